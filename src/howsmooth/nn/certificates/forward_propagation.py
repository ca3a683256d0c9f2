"""Propagation of Lipschitz constants and token norms through the operations of a model's own ``forward``.

The forward runs on tensors that have bounds in place of values. Each operation on them, and each module of
known constant, has a rule here or is refused by name, and so is whatever reads values.
Rules and proofs: documentation page "Enforce: layers with a constant that is proved", section "Models with a
forward of their own".
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from howsmooth.errors import ArgumentError, CertificateError, HowsmoothError, reason
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.certificates.module_propagation import ModuleRow, attention_block, kind_of, refusal, walk
from howsmooth.nn.certificates.torch_module_constants import Reach, linear_reach, rule_of
from howsmooth.nn.checks import check, check_ball, norm_above
from howsmooth.nn.lipschitz_module import LipschitzModule
from howsmooth.nn.parts.embedding_and_pooling import Patches
from howsmooth.plain_modules import eager, running_module
from howsmooth.rounding import above, times

__all__ = ["walk_forward"]

_SOURCE = 'models with a forward of their own, howsmooth documentation, "Enforce"'
_REMEDY = (
    "The rules are on the documentation page 'Layers with a Lipschitz constant'. Put the operation into a "
    "class that derives from hs.nn.LipschitzModule."
)
_ONE_RUN = threading.RLock()
_PLAIN_CALL = nn.Module.__call__


@dataclass(frozen=True)
class _State:
    """Bounds on one tensor of the forward pass. ``shape`` is its shape in the run on the example input.

    ``constant`` bounds the Lipschitz constant of the map from the model's input to this tensor, and
    ``radius`` the norms of its tokens. ``tokens`` are the axes that number the tokens; axis 0 is the batch,
    and all other axes number the entries of a token. It is None for images, whose tokens are patches, and for
    attention weights, which have no bounds.
    """

    constant: float
    radius: float
    shape: tuple[int, ...]
    tokens: tuple[int, ...] | None

    @property
    def length(self) -> int:
        return math.prod(self.shape[axis] for axis in self.tokens or ())


class _BoundedTensor(Tensor):
    """What the forward computes with in place of a tensor: it has bounds, and no values to read.

    ``example`` are its values in this run, which the model cannot see. The gate is the last tensor before it
    that every path from the input goes through. What lies between, such as the branch of a residual, has
    rows one level deeper.
    """

    example: Tensor
    state: _State
    run: _Run
    before: tuple[_BoundedTensor, ...]
    number: int
    rows: tuple[ModuleRow, ...]
    gate: _BoundedTensor

    @staticmethod
    def __new__(
        cls, example: Tensor, state: _State, run: _Run, before: tuple[_BoundedTensor, ...] = ()
    ) -> _BoundedTensor:
        """Make a tensor without data that has the shape and the strides of ``example``."""
        made: _BoundedTensor = Tensor._make_wrapper_subclass(
            cls, example.shape, strides=example.stride(), dtype=example.dtype, device=example.device
        )
        made.example, made.state, made.run, made.before = example, state, run, before
        made.number, made.rows = len(run.tensors), ()
        gates = set(before) or {made}
        while len(gates) > 1:
            last = max(gates, key=lambda one: one.number)
            gates = gates - {last} | {last.gate}
        made.gate = gates.pop()
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply the rule of an operation."""
        return _bounded(args, kwargs)[0].run.operation(func, args, kwargs or {})

    # Code past the functions of PyTorch, such as TorchScript, comes here, and finds no rule.
    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]

    def since(self, gate: _BoundedTensor) -> set[_BoundedTensor]:
        """Return the tensors on paths from ``gate`` to this one, without these two."""
        found, reached = set[_BoundedTensor](), [self]
        while reached:
            before = set(reached.pop().before) - found - {gate}
            found |= before
            reached += before
        return found


def _bounded(*given: Any) -> list[_BoundedTensor]:
    return [one for one in tree_leaves(given) if isinstance(one, _BoundedTensor)]


def _with(field: str, given: Any) -> Any:
    """Return arguments with a field of bounded tensors in their places."""
    return tree_map_only(_BoundedTensor, attrgetter(field), given)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module, by its rule if it gets tensors with bounds and is of PyTorch or of known constant."""
    kind = kind_of(module)
    torchs = kind.__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)
    given = _bounded(args, kwargs)
    if given and (torchs or isinstance(module, LipschitzModule) or rule_of(kind) is not None):
        return given[0].run.guarded(given[0].run.of_module, module, args, kwargs)
    return _PLAIN_CALL(module, *args, **kwargs)


def walk_forward(model: nn.Module, inputs: Tensor, length: int, radius: float) -> Reach:
    """Propagate Lipschitz constants through the operations of a model's ``forward``, run on ``inputs``."""
    random = _random_states(inputs.device)
    run, again = _Run(model, length, radius), _Run(model, length, radius)
    found = run.follow(inputs.clone())
    if not all(map(torch.equal, random, _random_states(inputs.device))):
        raise refusal(model, "", "draws random numbers, so it is not a fixed function")
    # Values of the input that reach the fixed numbers of the operations would be others here.
    again.follow(inputs / -2)
    if len(run.given) != len(again.given) or not all(map(_same, run.given, again.given)):
        why = "computes something else whenever it is called, so it is not a fixed function"
        raise refusal(model, "", why)
    return found


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


class _Run:
    """One run of a forward on tensors with bounds. The first operation that fails ends it, even if the model
    catches the exception. ``given`` are the functions, modules and fixed numbers of all operations.
    """

    def __init__(self, model: nn.Module, length: int, radius: float) -> None:
        self._model, self._length, self._radius = model, length, radius
        self._names = {module: name for name, module in model.named_modules()}
        self._counts = Counter[str]()
        self._failed: Exception | None = None
        self.tensors: list[_BoundedTensor] = []
        self.given: list[Any] = []

    def follow(self, inputs: Tensor) -> Reach:
        tokens = {2: (), 3: (1,)}.get(inputs.ndim)
        state = _State(1.0, self._radius, tuple(inputs.shape), tokens)
        images, fits = inputs.ndim == 4, tokens is not None and state.length == self._length
        expected = f"tokens (batch, {self._length}, d), or images (batch, channels, height, width)"
        check(images or fits, "inputs", expected, f"shape {state.shape}")
        first, last = self._add(inputs, state, ()), None
        with _ONE_RUN, torch.no_grad(), eager():
            called = nn.Module.__call__
            nn.Module.__call__ = _call  # type: ignore[method-assign]
            try:
                last = self._model(first)
            except Exception as error:  # what a forward does may raise any error with tensors without values
                self._failed = self._failed or error
            finally:
                nn.Module.__call__ = called  # type: ignore[method-assign]
        if isinstance(self._failed, HowsmoothError | NotImplementedError):
            raise self._failed
        if self._failed is not None:
            got = f"{inputs.shape} ({reason(self._failed)})"
            expected = "an input that the model takes"
            raise ArgumentError("inputs", expected=expected, got=got) from self._failed
        if not isinstance(last, _BoundedTensor) or last.state.tokens is None:
            raise CertificateError("", kind="output", reason="is not one tensor of tokens or of logits")
        state = last.state
        if state.tokens == (2,):  # the rows of the output consist of entries of all tokens
            state = replace(state, tokens=(1,), radius=above(math.sqrt(state.length) * state.radius, 8))
        # Without the rows of operations whose results are not used.
        used = last.since(first) | {last}
        rows = tuple(row for one in self.tensors if one in used for row in one.rows)
        return Reach(state.constant, state.radius, state.length, rows=rows)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _SHAPES:  # they are the same for all inputs
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return self.guarded(self._of_operation, func, args, kwargs)

    def guarded(self, bound: Callable[..., Any], called: Any, args: Any, kwargs: Any) -> Any:
        if self._failed is not None:
            raise self._failed
        given = tree_leaves(_with("number", (args, kwargs)))
        self.given += [called, *tree_map_only(Tensor, Tensor.clone, given)]
        try:
            return bound(called, args, kwargs)
        except Exception as error:
            self._failed = error
            raise

    def _add(self, value: Tensor, state: _State, given: Iterable[_BoundedTensor]) -> _BoundedTensor:
        state = replace(state, radius=check_ball(state.radius))
        made = _BoundedTensor(value, state, self, tuple(dict.fromkeys(given)))
        for between in made.since(made.gate):
            between.rows = tuple(replace(row, level=row.level + 1) for row in between.rows)
        self.tensors.append(made)
        return made

    def _of_operation(self, func: Any, args: Any, kwargs: Any) -> _BoundedTensor:
        named = func.__self__ if func.__name__ in ("__get__", "__set__") else func
        name = named.__name__.removeprefix("__").removesuffix("__")
        rule, given = _RULES.get(func), _bounded(args, kwargs)
        value: Any = None
        found: _State | str = "is an operation without a rule"
        if rule is not None and any(one.state.tokens is None for one in given):
            found = "is called with images, or with the weights of an attention"
        elif rule is not None:
            own, keywords = _with("example", (args, kwargs))
            value = func(*own, **keywords)
            own, keywords = _with("state", (args, kwargs))
            try:
                found = rule(value, *own, **keywords)
            except TypeError:
                found = "is called with arguments for which there is no rule"
        if isinstance(found, _State) and (math.isnan(found.constant) or math.isnan(found.radius)):
            found = "has a constant that is NaN"
        if isinstance(found, str):
            module = running_module(self._names) or self._model
            raise refusal(module, self._names[module], f"calls '{name}', which {found}", _REMEDY)
        made = self._add(value, found, given)
        path = f"{name}_{self._counts[name]}" if self._counts[name] else name
        self._counts[name] += 1
        first, last = made.gate.state, made.state
        if (first.constant, first.radius) != (last.constant, last.radius):
            # The constant of the gate is a factor of that of the result, unless it is zero or infinite.
            known = 0 < first.constant < math.inf
            constant = above(last.constant / first.constant, 8) if known else math.inf
            radii, lengths = (first.radius, last.radius), (first.length, last.length)
            made.rows = (ModuleRow(path, name, 0, constant, *radii, *lengths, _SOURCE),)
        return made

    def of_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        attends = isinstance(module, LipschitzAttention | nn.MultiheadAttention)
        path, x = self._names.get(module, ""), (*args, None)[0]
        given = {name for name, one in kwargs.items() if one is not None}
        unknown = given - ({"need_weights", "average_attn_weights"} if attends else set())
        found: Reach | str
        if module not in self._names:
            found = "is called, but is no part of the model"
        elif not isinstance(x, _BoundedTensor) or any(one is not x for one in args):
            found = "is called with something else than the same tokens"
        elif unknown or (isinstance(module, nn.MultiheadAttention) and len(args) != 3):
            found = f"is called with {', '.join(sorted(unknown)) or 'arguments'} for which there is no rule"
        elif "forward" in vars(module):
            found = "has a forward that was replaced after it was built"
        elif x.state.tokens is None:
            found = self._of_images(module, x.state, path)
        else:
            found = self._of_tokens(module, x.state, path)
        if isinstance(found, str):
            raise refusal(module, path, found)
        own, keywords = _with("example", (args, kwargs))
        value = _PLAIN_CALL(module, *own, **keywords)
        first, images = value[0] if attends else value, x.state.tokens is None
        axes = {2: (), 3: (1,), 4: (2, 3) if images else None}.get(getattr(first, "ndim", 0))
        if axes is None:
            why = "returns something else than tokens (batch, n, d) or vectors (batch, d)"
            raise refusal(module, path, why)
        constant = above(times(found.constant, x.state.constant), 8)
        state, n = _State(constant, found.radius, tuple(first.shape), axes), found.length
        check(not images or state.length == n, "inputs", f"images of {n} patches", f"{state.length} patches")
        if state.length != n:
            raise refusal(module, path, f"returns {state.length} tokens, where its certificate counts {n}")
        made = self._add(first, state, [x])
        made.rows = found.rows
        if not attends:
            return made
        unread = replace(state, tokens=None)
        return made, *tree_map_only(Tensor, lambda one: _BoundedTensor(one, unread, self, (made,)), value[1:])

    def _of_tokens(self, module: nn.Module, state: _State, path: str) -> Reach | str:
        attends = isinstance(module, LipschitzAttention | nn.MultiheadAttention)
        tokens = len(state.shape) == 3 and state.tokens == (1,)
        if not (tokens or (len(state.shape) == 2 and not attends)):
            return "is called with something else than tokens (batch, n, d) or vectors (batch, d)"
        certified = attention_block(module, state.length) if attends else module
        if isinstance(certified, str):
            return certified
        step = walk(certified, state.length, state.radius, path)
        return (
            replace(step, rows=(replace(step.rows[0], kind=kind_of(module).__name__),)) if attends else step
        )

    def _of_images(self, module: nn.Module, state: _State, path: str) -> Reach | str:
        """Bound the tokens that a convolution or Patches makes of images, or say why this is impossible."""
        if any(one.rows for one in self.tensors):
            return "cuts the images a second time, perhaps into other patches than those of the radius"
        n, kind = self._length, kind_of(module)
        if isinstance(module, Patches):
            reach = Reach(1.0, state.radius, n)
        elif kind.forward is nn.Conv2d.forward:
            assert isinstance(module, nn.Conv2d)
            if module.kernel_size != module.stride or module.dilation != (1, 1) or module.groups != 1:
                return "has patches that overlap or lie apart (kernel_size and stride differ), or groups"
            if module.padding not in ((0, 0), "valid"):
                return "pads images, whose patches then are not the tokens of the certificate"
            reach = linear_reach(module, n, state.radius)
        else:
            return (
                "has no rule for images: begin with hs.nn.Patches (ClipTokens stands behind it), or a Conv2d "
                "whose patches do not overlap"
            )
        row = ModuleRow(path, kind.__name__, 0, reach.constant, state.radius, reach.radius, n, n, _SOURCE)
        return replace(reach, rows=(row,))


_PROPERTIES = ("shape", "ndim", "dtype", "device")
_SHAPES = {Tensor.size, Tensor.dim, Tensor.__len__, *(getattr(Tensor, one).__get__ for one in _PROPERTIES)}


# ---- rules: a function of the value at the example and the arguments, in which _State stands for tensors
# that depend on the input. The result is a string if there is no constant: the rest of a sentence.


Rule = Callable[..., _State | str]


def _sum(value: Tensor, one: Any, other: Any) -> _State | str:
    if isinstance(one, _State) and isinstance(other, _State):
        if one.shape != other.shape or one.tokens != other.tokens:
            return f"adds tensors of shapes {one.shape} and {other.shape}, whose tokens do not correspond"
        constant, radius = one.constant + other.constant, one.radius + other.radius
        return replace(one, constant=above(constant, 8), radius=above(radius, 8))
    state, fixed = (one, other) if isinstance(one, _State) else (other, one)
    if state.shape != tuple(value.shape):
        return "enlarges a tensor by a sum with a larger one"
    by_token = torch.as_tensor(fixed).detach().to("cpu", torch.float64).expand(state.shape)
    axes = state.tokens or ()
    by_token = by_token.movedim(axes, tuple(range(1, 1 + len(axes))))
    rows = by_token.flatten(1 + len(axes)).flatten(0, -2)
    longest = rows[torch.linalg.vector_norm(rows, dim=1).argmax()]
    return replace(state, radius=above(state.radius + norm_above("constant", longest[None]), 8))


def _product(value: Tensor, one: Any, other: Any) -> _State | str:
    if isinstance(one, _State) and isinstance(other, _State):
        return "multiplies two tensors that depend on the input, which is Lipschitz on no whole space"
    state, fixed = (one, other) if isinstance(one, _State) else (other, one)
    if state.shape != tuple(value.shape):
        return "enlarges a tensor by a product with a larger one"
    largest = float(torch.as_tensor(fixed).detach().abs().amax())
    constant, radius = times(largest, state.constant), times(largest, state.radius)
    return replace(state, constant=above(constant, 8), radius=above(radius, 8))


def _quotient(value: Tensor, one: Any, other: Any) -> _State | str:
    if isinstance(other, _State):
        return "divides by a tensor that depends on the input"
    return _product(value, one, 1 / torch.as_tensor(other, dtype=torch.float64))


def _cat(value: Tensor, tensors: Any, dim: int = 0) -> _State | str:
    if dim % value.ndim != 1 or value.ndim != 3:
        return "joins other axes than the tokens of (batch, n, d), dim=1"
    squares, radius = 0.0, 0.0
    for one in tensors:
        if isinstance(one, _State):
            if one.tokens != (1,):
                return "joins something else than tokens (batch, n, d)"
            squares, radius = squares + one.constant**2, max(radius, one.radius)
        else:
            norms = torch.linalg.vector_norm(one.detach().to("cpu", torch.float64), dim=-1)
            if not bool(torch.isfinite(norms).all()):
                return "joins numbers that are not finite"
            radius = max(radius, above(float(norms.max()), one.shape[-1] + 8))
    return _State(above(math.sqrt(squares), 2 * len(tensors) + 8), radius, tuple(value.shape), (1,))


def _getitem(value: Any, state: _State, index: Any) -> _State | str:
    index = index if isinstance(index, tuple) else (index,)
    whole = slice(None)
    plain = state.tokens == (1,) and all(one == whole for one in (index[0], *index[2:]))
    if not plain or len(index) < 2 or not isinstance(index[1], int | slice) or value.ndim < 2:
        return "takes something else than tokens, x[:, index], of tokens (batch, n, d)"
    return replace(state, shape=tuple(value.shape), tokens=() if isinstance(index[1], int) else (1,))


def _mean(value: Tensor, state: _State, dim: Any = None, keepdim: bool = False) -> _State | str:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if state.tokens != (1,) or not isinstance(dim, int) or dim % 3 != 1 or keepdim:
        return "takes another mean than that of the tokens of (batch, n, d), dim=1"
    # The norm of the map from n tokens to their mean is 1/√n.
    constant = above(state.constant / math.sqrt(state.shape[1]), 8)
    return replace(state, constant=constant, shape=tuple(value.shape), tokens=())


def _flatten(value: Tensor, state: _State, start_dim: int = 0, end_dim: int = -1) -> _State | str:
    start, end = start_dim % len(state.shape), end_dim % len(state.shape)
    shape = tuple(value.shape)
    if state.tokens == (start, end) and (start, end) == (2, 3):
        return replace(state, shape=shape, tokens=(2,))
    if (start, end) == (1, len(state.shape) - 1):
        radius = above(math.sqrt(state.length) * state.radius, 8)
        return replace(state, shape=shape, tokens=(), radius=radius)
    return (
        "joins other axes than all but the batch, or those of the patches of (batch, channels, rows, columns)"
    )


def _transpose(value: Tensor, state: _State, one: int, other: int) -> _State | str:
    order = list(range(len(state.shape)))
    order[one], order[other] = order[other], order[one]
    return _permute(value, state, *order)


def _permute(value: Tensor, state: _State, *order: Any) -> _State | str:
    axes = [axis % len(state.shape) for axis in (order[0] if isinstance(order[0], tuple | list) else order)]
    if state.tokens is None or axes[0] != 0:
        return "moves the axis of the batch"
    tokens = tuple(sorted(axes.index(axis) for axis in state.tokens))
    return replace(state, shape=tuple(value.shape), tokens=tokens)


def _as_module(make: Callable[..., nn.Module]) -> Rule:
    def rule(value: Tensor, state: _State, **settings: Any) -> _State | str:
        step = walk(make(**settings), state.length, state.radius)
        return replace(state, constant=above(times(step.constant, state.constant), 8), radius=step.radius)

    return rule


def _dropout(
    value: Tensor, state: _State, p: float = 0.5, training: bool = True, inplace: bool = False
) -> _State | str:
    return "drops numbers at random, or overwrites its input" if (training and p > 0) or inplace else state


_NAMES: dict[Rule, tuple[str, ...]] = {
    _sum: ("add", "sub", "__rsub__"),
    _product: ("mul",),
    _quotient: ("div",),
    lambda value, one, other: _quotient(value, other, one): ("__rtruediv__",),
    _cat: ("cat", "concat"),
    _getitem: ("__getitem__",),
    _mean: ("mean",),
    _flatten: ("flatten",),
    _transpose: ("transpose",),
    _permute: ("permute",),
    lambda value, state: state: ("contiguous",),
    _dropout: ("dropout",),
    _as_module(nn.ReLU): ("relu",),
    _as_module(nn.GELU): ("gelu",),
    _as_module(nn.SiLU): ("silu",),
    _as_module(nn.Tanh): ("tanh",),
    _as_module(nn.Sigmoid): ("sigmoid",),
}
_RULES: dict[Any, Rule] = {
    getattr(home, name): rule
    for rule, names in _NAMES.items()
    for name in names
    for home in (torch, Tensor, nn.functional)
    if hasattr(home, name)
}
"""Rules by function. Operations in place have none."""
