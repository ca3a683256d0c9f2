"""A pretrained classifier as a function of its embedded tokens, and the network that computes it.

No names of models, modules or parameters are read. The embedded tokens are found in the operations of one
run: they are the last tensor before tokens meet through which everything passes that depends on the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from howsmooth.bounds.radius.network_graph import NotReadError
from howsmooth.bounds.radius.network_reader import read_network
from howsmooth.bounds.radius.symbolic_tensor import SymbolicTensor, refused_module, run_on_symbols
from howsmooth.bounds.radius.symbolic_terms import Terms
from howsmooth.bounds.radius.transformer_network import Network
from howsmooth.errors import ArgumentError, CertificateError, NonFiniteError, reason
from howsmooth.force_float64 import WithoutDowncast
from howsmooth.plain_modules import eager, fast_path

__all__ = ["Classifier", "check_logits"]

_AGREEMENT = 1e-9
# Operations that take rows of a table by integers.
_LOOKUPS = {"embedding", "index", "index_select", "gather", "one_hot"}
_MEETINGS = {"bmm", "baddbmm", "_softmax", "_safe_softmax"}
_OF_ITS_OWN = (
    "Put the layers and the readout into a module of their own, and give it the outputs of what comes before."
)


class _Place(NamedTuple):
    """Where the embedded tokens are: output number ``output`` of the operation number ``operation`` of a run,
    with their values there. Operation −1 stands for the input itself.
    """

    operation: int
    output: int
    tokens: Tensor


class _Recorder(TorchDispatchMode):
    """Finds the embedded tokens in one run of a model on an input.

    Memory is followed, not tensors, so that views count as what they show. Only an output in new memory is a
    place: nothing else shows it, so that other tokens in its place reach all that comes after.
    """

    def __init__(self, given: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count, self._met = 0, False
        self._last_use: dict[int, int] = {}  # by memory that depends on the input
        self._made: dict[int, int] = {}
        self._integers = set[int]()
        self._kept: list[Tensor] = [given]  # memory must not be used twice
        self._places: list[tuple[int, _Place]] = []
        if given.is_floating_point():
            self._follow(given, -1, 0)
        else:
            self._integers.add(_memory(given))

    def _follow(self, t: Tensor, operation: int, output: int) -> None:
        memory = _memory(t)
        if memory in self._made:
            return
        self._made[memory], self._last_use[memory] = operation, operation
        self._kept.append(t)
        if not self._met and t.ndim in (2, 3) and t.numel() and (t.ndim == 2 or len(t) == 1):
            tokens = t.clone()
            place = _Place(operation, output, tokens if t.ndim == 2 else tokens[0])
            self._places.append((memory, place))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        number, self._count = self._count, self._count + 1
        known = {_memory(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        moving, looked_up = known & self._made.keys(), bool(known & self._integers)
        name = func.overloadpacket.__name__
        if moving and (name in _MEETINGS or "attention" in name):
            self._met = True
        self._last_use.update(dict.fromkeys(moving, number))
        for output, t in enumerate(tree_flatten(found)[0]):
            if not isinstance(t, Tensor):
                continue
            if t.is_floating_point() and (moving or (looked_up and name in _LOOKUPS)):
                memory = _memory(t)
                if memory not in known:
                    self._follow(t, number, output)
                elif memory not in self._made:  # memory that was there before is written
                    self._made[memory] = self._last_use[memory] = number
            elif not t.is_floating_point() and looked_up:
                self._integers.add(_memory(t))
                self._kept.append(t)
        return found

    def place(self) -> _Place | None:
        """Return the last place through which everything passes that depends on the input."""
        for memory, place in reversed(self._places):
            before = (m for m, made in self._made.items() if made <= place.operation and m != memory)
            if all(self._last_use[m] <= place.operation for m in before):
                return place
        return None


class _Replacement(TorchDispatchMode):
    """Puts other tokens in the place of the embedded ones."""

    def __init__(self, place: _Place, tokens: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place, self._tokens, self._count = place, tokens, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._count == self._place.operation:
            outputs, structure = tree_flatten(found)
            outputs[self._place.output] = self._tokens.reshape(outputs[self._place.output].shape)
            found = tree_unflatten(outputs, structure)
        self._count += 1
        return found


def _memory(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


@dataclass(frozen=True, eq=False)
class Classifier:
    """A float64 model as a function of its embedded tokens, for one input.

    ``inputs`` are its arguments by name; ``main`` is the name of the one with the tokens, ids or image.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    main: str
    place: _Place

    @classmethod
    def at(cls, model: nn.Module, inputs: Tensor | Mapping[str, Any]) -> Classifier:
        """Return a model as a function of its embedded tokens, at given inputs or embedded tokens (n, d)."""
        if isinstance(inputs, Mapping):
            main = str(getattr(model, "main_input_name", ""))
            if main not in inputs:
                main = next((name for name, t in inputs.items() if isinstance(t, Tensor)), "")
            return cls._found(model, dict(inputs), main)
        if not hasattr(model, "main_input_name"):
            classifier = cls(model, {}, "", _Place(-1, 0, inputs))
            classifier.logits(inputs)
            return classifier
        found = cls._found(model, *_stand_in(model, inputs))
        if found.place.tokens.shape != inputs.shape:
            expected = f"embedded tokens (n, {found.place.tokens.shape[1]}) of the width of the model"
            raise ArgumentError("inputs", expected=expected, got=f"the shape {tuple(inputs.shape)}")
        return cls(found.model, found.inputs, found.main, found.place._replace(tokens=inputs))

    @classmethod
    def _found(cls, model: nn.Module, inputs: Mapping[str, Any], main: str) -> Classifier:
        given = inputs.get(main)
        if not isinstance(given, Tensor) or len(given) != 1 or given.ndim < 2 or not given.numel():
            got = "none" if given is None else f"the shape {tuple(given.shape)}"
            raise ArgumentError("inputs", expected=f"{main or 'an input'} of one sequence (1, ...)", got=got)
        _check_token_ids(model, given)
        recorder = _Recorder(given)
        _run(model, inputs, recorder)
        place = recorder.place()
        if place is None:
            why = "has no place at which all tokens are embedded and have not yet met"
            raise CertificateError("", kind=type(model).__name__, reason=why, remedy=_OF_ITS_OWN)
        return cls(model, inputs, main, place)

    def _arguments(self, tokens: Tensor) -> tuple[Mapping[str, Any], AbstractContextManager[Any]]:
        """Return the model's arguments with other tokens (1, n, d), and the mode that puts them in place."""
        if self.place.operation >= 0:
            return self.inputs, _Replacement(self.place, tokens)
        return {**self.inputs, self.main: tokens}, nullcontext()

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (classes,) for embedded tokens x (n, d)."""
        return _run(self.model, *self._arguments(x[None]))

    def network(self) -> tuple[Network, list[int]]:
        """Return the network that computes the logits from the embedded tokens that it reads, and the indices
        of these. The logits do not depend on the others. Raise CertificateError for other operations.
        """
        names = {module: name for name, module in self.model.named_modules()}
        _check_fast_paths(names)
        x, terms = self.place.tokens, Terms()

        def run(symbolic: Callable[[Tensor], SymbolicTensor]) -> Any:
            return _called(self.model, *self._arguments(symbolic(torch.arange(x.numel()).view(1, *x.shape))))

        entries = run_on_symbols(run, terms, names)
        if entries.ndim != 1:
            raise CertificateError(
                "",
                kind=type(self.model).__name__,
                reason=f"has logits of the shape {(1, *entries.shape)}, not (1, classes)",
                remedy="Give a module that returns those of one token, such as logits[:, -1].",
            )
        try:
            network, reads = read_network(
                terms, entries, x.shape[1], lambda number: names.get(terms.owned(number), "")
            )
        except NotReadError as error:
            raise refused_module(names, str(error), terms.owned(error.number)) from None
        self._compare(network, reads)
        return network, reads

    def _compare(self, network: Network, reads: list[int]) -> None:
        """Compare the logits of model and network at some points. The network is read, so that this finds
        faults of the reader alone.
        """
        x = self.place.tokens
        noise = torch.Generator().manual_seed(0)
        change = torch.randn(x.shape, generator=noise, dtype=x.dtype) * (x.std() if x.numel() > 1 else 1.0)
        for tokens in (x, x + 0.1 * change, x + change):
            expected, found = self.logits(tokens), network.logits(tokens[reads])
            check_logits(expected)
            error = float((expected - found).abs().max() / (1 + expected.abs().max()))
            if not error <= _AGREEMENT:
                why = f"is not reproduced by its stages (difference {error:.1e} of the logits)"
                raise CertificateError("", kind=type(self.model).__name__, reason=why)


def check_logits(logits: Tensor) -> None:
    """Raise NonFiniteError if the logits of a model are not finite."""
    if not bool(torch.isfinite(logits).all()):
        remedy = "Look for NaN, infinity or huge numbers in its weights."
        raise NonFiniteError("model", expected="finite logits", got="NaN or infinity", remedy=remedy)


def _stand_in(model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], str]:
    """Return inputs of a transformers model for as many tokens as x (n, d), and the name of the main one."""
    config: Any = model.config
    if model.main_input_name != "pixel_values":
        table = _table(model)
        width = x.shape[1] if table is None else table.weight.shape[1]
        return {"inputs_embeds": x.new_zeros(1, len(x), width)}, "inputs_embeds"
    sides = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
    return {"pixel_values": x.new_zeros(1, config.num_channels, *sides)}, "pixel_values"


def _table(model: nn.Module) -> nn.Embedding | None:
    table = None
    with suppress(AttributeError, NotImplementedError):
        table = cast("Any", model).get_input_embeddings()
    return table if isinstance(table, nn.Embedding) else None


def _check_token_ids(model: nn.Module, ids: Tensor) -> None:
    table = _table(model)
    if table is None or ids.is_floating_point():
        return
    low, high, rows = int(ids.min()), int(ids.max()), table.num_embeddings
    if low < 0 or high >= rows:
        raise ArgumentError(
            "inputs",
            expected=f"token ids from 0 to {rows - 1}, the rows of the model's embedding table",
            got=f"id {low if low < 0 else high}",
            remedy="Use the tokenizer that belongs to the model.",
        )


def _check_fast_paths(names: Mapping[nn.Module, str]) -> None:
    """Raise CertificateError if PyTorch may compute a layer by one operation that passes by its own code."""
    if not torch.backends.mha.get_fastpath_enabled():
        return
    for layer in names:
        if not isinstance(layer, nn.TransformerEncoderLayer | nn.MultiheadAttention):
            continue
        base = nn.TransformerEncoderLayer if isinstance(layer, nn.TransformerEncoderLayer) else None
        computed = {m for p in layer.modules() if isinstance(p, ParametrizationList) for m in p.modules()}
        parts = [p for p in layer.modules() if p not in {*computed, layer, getattr(layer, "activation", 0)}]
        own = any(not type(p).__module__.startswith("torch.nn") or "forward" in vars(p) for p in parts)
        kind = getattr(layer, "activation_relu_or_gelu", 0)
        if base is not None and kind:
            functions = {1: (nn.functional.relu, torch.relu), 2: (nn.functional.gelu,)}[kind]
            activation = layer.activation
            plain = type(activation) is (nn.ReLU if kind == 1 else nn.GELU)
            plain = plain and getattr(activation, "approximate", "none") == "none"
            own = own or not (plain or activation in functions)
            for name in ("forward", "_sa_block", "_ff_block"):
                own = own or name in vars(layer) or getattr(type(layer), name) is not getattr(base, name)
        elif base is not None:
            continue
        if own:
            raise CertificateError(
                names[layer],
                kind=type(layer).__name__,
                reason="has code of its own, by which PyTorch's fast path passes",
                remedy="Forbid it: torch.backends.mha.set_fastpath_enabled(False).",
            )


def _called(model: nn.Module, arguments: Mapping[str, Any], mode: AbstractContextManager[Any]) -> Any:
    """Return the logits of a model, the first tensor of what it returns, without the batch."""
    with WithoutDowncast(), mode:
        positional = [arguments[""]] if "" in arguments else []
        found: Any = model(*positional, **{name: value for name, value in arguments.items() if name})
        found = getattr(found, "logits", found)
        found = found[0] if isinstance(found, tuple | list) else found
        while found.ndim > 1 and len(found) == 1:
            found = found[0]
        return found


def _run(model: nn.Module, arguments: Mapping[str, Any], mode: AbstractContextManager[Any]) -> Tensor:
    try:
        with torch.no_grad(), fast_path(False), eager():
            found = _called(model, arguments, mode)
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        given = ", ".join(f"{name} {tuple(t.shape)}" if name else f"tokens {tuple(t.shape)}"
                          for name, t in arguments.items() if isinstance(t, Tensor))  # fmt: skip
        raise ArgumentError(
            "inputs",
            expected="inputs that the model takes",
            got=f"{given} ({reason(error)})",
            remedy="" if hasattr(model, "main_input_name") else _OF_ITS_OWN,
        ) from None
    if not isinstance(found, Tensor):
        raise CertificateError("", kind=type(model).__name__, reason="returns no tensor of logits")
    return found
