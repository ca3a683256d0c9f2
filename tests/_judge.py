"""What a model's own forward gives where a captured map says something, and the verdict on the map.

The truth never goes through the library: a copy of the model runs with ``forward`` of two of its modules
replaced, one that puts other tokens in the place of its own, one whose value is read. Dense Jacobians of that
are taken by PyTorch.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import howsmooth as hs
from howsmooth.errors import HowsmoothError
from tests._hand_written import CASES, SCOPES, Block, Case, Spot, spread

WAYS = ("plain", "forward", "compiled", "blocks compiled", "data parallel", "training", "bfloat16")
#: Compiling takes seconds each: those that differ in what is compiled.
COMPILED = (
    "nanogpt flash",
    "llama2.c",
    "x-transformers",
    "timm vit",
    "latent",
    "post-norm",
    "shared weights",
)
HEAD = 1


class _Read(BaseException):  # the run ends where its value is read
    pass


def _first(value: Any) -> Tensor:
    return next(t for t in tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point())


def _put(value: Any, new: Tensor) -> Any:
    old = _first(value)
    return tree_map(lambda leaf: new if leaf is old else leaf, value)


class Own:
    """A model and its inputs, run again with other tokens at one place, read at another."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.inputs, self.context = model, inputs, context
        self._seen: dict[Spot, Tensor] = {}

    def at(self, spot: Spot | None) -> Tensor:
        """The value at a place in the model's run, or the model's output."""
        if spot not in self._seen:
            with torch.no_grad():
                self._seen[spot] = self._run(None, None, spot).clone()
        return self._seen[spot]

    def function(self, enter: Spot, leave: Spot | None) -> Callable[[Tensor], Tensor]:
        """The value at ``leave``, or the model's first output, as a function of the tokens at ``enter``."""
        return lambda x: self._run(enter, x, leave)

    def _run(self, enter: Spot | None, x: Tensor | None, leave: Spot | None) -> Tensor:
        model, taken = copy.deepcopy(self.model), []  # a run may write into tensors of the model
        for path, method in {(spot.path, spot.method) for spot in (enter, leave) if spot is not None}:
            _watch(model.get_submodule(path), path, method, enter, x, leave, taken)
        with self.context():
            try:
                output = _first_output(model(**self.inputs))
            except _Read:
                output = taken[0]
        if leave is not None and not taken:
            raise AssertionError(f"nothing passes {leave}")
        return output


def _first_output(output: Any) -> Tensor:
    return _first(output.to_tuple() if hasattr(output, "to_tuple") else output)


def _watch(
    module: nn.Module,
    path: str,
    method: str,
    enter: Spot | None,
    x: Tensor | None,
    leave: Spot | None,
    taken: list[Tensor],
) -> None:
    inner, count = getattr(module, method), itertools.count()

    def passes(side: str, call: int, value: Any) -> Any:
        point = path, method, side, call
        if enter is not None and enter.point == point:
            value = _put(value, x)
        if leave is not None and leave.point == point:
            taken.append(_first(value))
            raise _Read
        return value

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = next(count)
        args, kwargs = passes("in", call, (args, kwargs))
        return passes("out", call, inner(*args, **kwargs))

    setattr(module, method, forward)


def own_functions(case: Case, own: Own, scope: str) -> list[tuple[Spot, Callable[[Tensor], Tensor]]]:
    """Where the tokens of a scope may enter, and the model's own map from there."""
    if scope == "model":
        return [(spot, own.function(spot, None)) for spot in case.model]
    if scope == "block":
        return [(block.enter, _block(own, block)) for block in case.block]
    if scope in ("attention", "residual"):
        leaves = case.attention if scope == "attention" else case.attention[:1]
        return [(spot, _attention(own, spot, leave, scope)) for leave in leaves for spot in case.tokens]
    return [(spot, _heads(case, own, spot, heads, scope)) for heads in case.heads for spot in case.tokens]


def _block(own: Own, block: Block) -> Callable[[Tensor], Tensor]:
    f = own.function(block.enter, block.leave)
    return (lambda x: x + f(x)) if block.adds else f


def _attention(own: Own, enter: Spot, leave: Spot, scope: str) -> Callable[[Tensor], Tensor]:
    attention = own.function(enter, leave)
    return attention if scope == "attention" else lambda x: x + attention(x)


def _heads(case: Case, own: Own, enter: Spot, where: Spot | str, scope: str) -> Callable[[Tensor], Tensor]:
    read = own.function(enter, where if isinstance(where, Spot) else case.attention[0])

    def heads(x: Tensor) -> Tensor:
        y = read(x)
        if isinstance(where, str):
            matrix = own.model.get_submodule(where)
            y = torch.linalg.solve(matrix.weight, (y - matrix.bias).mT).mT
        y = y.transpose(1, 2).flatten(2) if y.ndim == 4 else y
        return y if scope == "heads" else y.unflatten(-1, (case.count, -1))[..., HEAD, :]

    return heads


def moves(x: Tensor) -> dict[str, Tensor]:
    """The tokens themselves, all of them moved, and only the first one of each sequence moved."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    first = torch.zeros_like(noise)
    first[:, 0] = noise[:, 0]
    return {"its tokens": 0.0 * noise, "moved tokens": 0.3 * noise, "a moved first token": first}


def dense_norm(f: Callable[[Tensor], Tensor], x: Tensor, number: int, differences: bool = False) -> float:
    """The spectral norm of the dense Jacobian of one sequence of a batch, the others held fixed."""

    def one(z: Tensor) -> Tensor:
        return f(torch.cat((x[:number], z[None], x[number + 1 :]))).reshape(len(x), -1)[number]

    if differences:
        step = 1e-5 * torch.eye(x[number].numel(), dtype=x.dtype).reshape(-1, *x[number].shape)
        with torch.no_grad():
            jacobian = torch.stack([(one(x[number] + e) - one(x[number] - e)) / 2e-5 for e in step], dim=1)
    else:
        jacobian = torch.autograd.functional.jacobian(one, x[number], vectorize=True).flatten(1)
    return float(torch.linalg.matrix_norm(jacobian, 2))


@dataclass(frozen=True)
class Truth:
    """What the model gives at tokens that enter at a place: values at moved tokens, and the constant."""

    spot: Spot
    x: Tensor
    values: dict[str, Tensor]
    norm: float  # of the last sequence


def truth_at(spot: Spot, f: Callable[[Tensor], Tensor], x: Tensor, differences: bool = False) -> Truth:
    with torch.no_grad():
        values = {words: f(x + move) for words, move in moves(x).items()}
    return Truth(spot, x, values, dense_norm(f, x, len(x) - 1, differences))


@cache
def truths(own: Own, case: Case, scope: str) -> tuple[Truth, ...]:
    """What the model gives in a scope, for every place at which its tokens may enter."""
    places = own_functions(case, own, scope)
    return tuple(truth_at(spot, f, own.at(spot), case.differences) for spot, f in places)


def truths_of_real_tokens(own: Own, case: Case, scope: str, sequence: int, real: Tensor) -> tuple[Truth, ...]:
    """The same of the real tokens of one sequence in a padded batch, all else held fixed."""

    def alone(f: Callable[[Tensor], Tensor], whole: Tensor) -> Callable[[Tensor], Tensor]:
        place = torch.zeros(whole.shape[:2], dtype=torch.bool)
        place[sequence] = real
        return lambda x: f(whole.masked_scatter(place[..., None], x)).reshape(whole.shape)[sequence, real][
            None
        ]

    found = []
    for spot, f in own_functions(case, own, scope):
        whole = own.at(spot)
        found.append(truth_at(spot, alone(f, whole), whole[sequence, real][None]))
    return tuple(found)


def verdict(site: hs.Site, given: tuple[Truth, ...], precise: float) -> tuple[str, str]:
    """The outcome of a captured site, and why: a wrong number, or how it is measured.

    Of several places with the site's tokens one must agree.
    """
    meant = [truth for truth in given if _near(site.x.double(), truth.x, 0.01 * precise)]
    if not meant:
        places = ", ".join(f"{one.spot.side} {one.spot.path or 'the model'}" for one in given)
        return "WRONG", f"its tokens {tuple(site.x.shape)} are not those of: {places}"
    faults = [_fault(site, truth, precise) for truth in meant]
    return (site.path, site.path_reason) if "" in faults else ("WRONG", faults[0])


def _fault(site: hs.Site, truth: Truth, precise: float) -> str:
    for words, move in moves(truth.x).items():
        true = truth.values[words]
        with torch.no_grad():
            found = site.map(site.x + move.reshape(site.x.shape).to(site.x.dtype)).double()
        if found.numel() != true.numel():
            return f"its values are {tuple(found.shape)} where the model has {tuple(true.shape)}"
        error = float((found.reshape(true.shape) - true).abs().max() / true.abs().max())
        if not error <= precise:
            return f"its value at {words} is off by {error:.1e}"
    estimate = hs.local_lipschitz(site.map, site.x)
    lower, upper = float(estimate.lower[-1]), float(estimate.upper[-1])
    if lower * (1 - precise) <= truth.norm <= upper * (1 + precise):
        return ""
    return f"its constant is in [{lower:.6g}, {upper:.6g}], the dense Jacobian has {truth.norm:.6g}"


def _near(a: Tensor, b: Tensor, precise: float) -> bool:
    """Whether two values agree, however one is reshaped of each sequence of the batch."""
    same = len(a) == len(b) and a.numel() == b.numel()
    return same and bool((a.reshape(b.shape) - b).abs().max() <= precise * b.abs().max())


@dataclass(frozen=True)
class Verdict:
    """What became of one case, called in one way, in one scope."""

    case: str
    way: str
    scope: str
    outcome: str  # "closed form", "autodiff", "refused", "WRONG" or "traceback"
    reason: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.case:29} {self.way:16} {self.scope:10} {self.outcome:12} {self.reason}"

    def meets(self, expected: str) -> bool:
        """Whether it is what is expected: never a wrong number, nor an error that is not the library's."""
        ways, _, word = expected.partition("refused: ")
        if word and self.outcome == "refused" and word in self.reason:
            return True
        return self.outcome in {
            "closed form": ("closed form",),
            "measured": ("closed form", "autodiff"),
            "measured, or ": ("closed form", "autodiff"),
            "any": ("closed form", "autodiff", "refused"),
            "the same": ("the same",),
        }.get(ways, ())


def outcome(get: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """What becomes of a capture and its verdict, a refusal or another error included."""
    try:
        return get()
    except HowsmoothError as error:
        return "refused", str(error)
    except Exception as error:
        return "traceback", _words(error)


def judged(
    names: tuple[str, str],
    model: nn.Module,
    inputs: Any,
    case: Case,
    own: Own,
    scopes: Iterable[str],
    precise: float,
) -> list[Verdict]:
    """The verdicts on a model in some scopes."""
    found = []
    for scope in scopes:
        keywords: dict[str, Any] = {} if scope == "model" else {"layers": [case.layer]}
        if scope == "head":
            keywords["heads"] = [HEAD]

        def get(scope: str = scope, keywords: dict[str, Any] = keywords) -> tuple[str, str]:
            (site,) = hs.capture(model, inputs, scope=scope, **keywords)
            return verdict(site, truths(own, case, scope), 1e-6 if case.differences else precise)

        start = time.perf_counter()
        found.append(Verdict(*names, scope, *outcome(get), time.perf_counter() - start))
    return found


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@cache
def own_of(name: str, half: bool = False) -> Own:
    """A hand-written module, in float64 with weights that bfloat16 can hold if ``half``."""
    case = CASES[name]
    model = spread(case.make())
    inputs = case.inputs()
    if half:
        model, inputs = model.to(torch.bfloat16).double(), _cast(_cast(inputs, torch.bfloat16), torch.float64)
    return Own(model, inputs, _without_compiler if case.differences else nullcontext)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Run flex_attention as it is written, without compiling what it runs on a processor."""
    from torch.nn.attention import flex_attention

    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, inputs)


def called(model: nn.Module, way: str, blocks: str) -> nn.Module:
    """The model as somebody has it who calls it in a way."""
    if way == "forward":
        for module in model.modules():
            module.direct = True
    elif way == "compiled":
        return torch.compile(model, backend="eager")
    elif way == "blocks compiled":
        layers = model.get_submodule(blocks)
        for i, layer in enumerate(layers):
            layers[i] = torch.compile(layer, backend="eager")
    elif way == "data parallel":
        return nn.DataParallel(model)
    elif way == "training":
        return model.train()
    elif way == "bfloat16":
        return model.to(torch.bfloat16)
    return model


def ways_of(name: str) -> list[str]:
    case = CASES[name]
    compiled = name in COMPILED
    has = {"compiled": compiled, "blocks compiled": compiled and case.blocks, "bfloat16": case.half}
    return [way for way in WAYS if has.get(way, True)]


def judge(name: str, way: str, scopes: Iterable[str] = SCOPES) -> list[Verdict]:
    """The verdicts on a hand-written module that is called in one way."""
    case, half = CASES[name], way == "bfloat16"
    torch._dynamo.reset()
    model = called(spread(case.make()), way, case.blocks)
    inputs = _cast(case.inputs(), torch.bfloat16) if half else case.inputs()
    given = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    with torch.no_grad():
        before = _first_output(model(**inputs))
    found = judged((name, way), model, given, case, own_of(name, half), scopes, 1e-3 if half else 1e-9)
    try:
        with torch.no_grad():
            after = _first_output(model(**inputs))
    except Exception as error:
        found.append(Verdict(name, way, "afterwards", "traceback", _words(error)))
    else:
        same = torch.equal(before, after)
        reason = "" if same else "the model gives another output than before"
        found.append(Verdict(name, way, "afterwards", "the same" if same else "WRONG", reason))
    return found
