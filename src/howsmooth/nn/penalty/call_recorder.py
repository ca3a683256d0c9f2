"""Record the calls of a penalty's layers in a forward pass, and repeat them on copies of the layers."""

from __future__ import annotations

import fnmatch
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves, tree_map

from howsmooth import watching
from howsmooth.errors import ArgumentError, DerivativeError
from howsmooth.nn.checks import check
from howsmooth.nn.penalty.output_projections import OutputProjections, first_output
from howsmooth.plain_modules import unwrapped

__all__ = ["LayerCall", "Penalty", "drawing_nothing", "replica"]

_X = object()  # stands for the tokens among the stored arguments of a call
_HOOKS = [key for key in vars(nn.Module()) if "_hooks" in key]


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One recorded call of a layer, which can be repeated on a copy of the layer."""

    name: str  # the path of the layer in the model
    layer: nn.Module
    tokens: Tensor  # a copy of X with its autograd graph
    arguments: dict[str, Any]  # with _X in place of the tokens
    versions: list[int]  # PyTorch's counters of changes in place, one for each tensor among the arguments
    batch_axis: int | None  # None if the call had one sequence without a batch axis

    @classmethod
    def of(cls, call: watching.Call) -> LayerCall:
        """Record a call that is about to begin."""
        layer, arguments = call.module, call.arguments()
        for key, parameter in inspect.signature(layer.forward).parameters.items():
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            got = f"{type(layer).__name__}, whose forward takes *{key}"
            remedy = "Name a module around it or inside it."
            check(named or key not in arguments, "layers", "layers whose arguments have names", got, remedy)
        for key, value in arguments.items():
            # Without its cache, because a repeated call would append the keys and values a second time.
            if hasattr(value, "get_seq_length") and hasattr(value, "update"):
                arguments[key] = None
        if type(layer) is nn.MultiheadAttention:
            # With need_weights=True, PyTorch computes attention step by step, which can be differentiated
            # twice and is faster here.
            arguments["need_weights"] = True
        x = next((t for t in _tensors(arguments) if t.is_floating_point() and t.ndim > 1 and t.numel()), None)
        if x is None:
            expected = "layers that get tokens, a floating-point tensor (..., n, d)"
            got = f"{call.name} ({type(layer).__name__}), which gets none"
            raise ArgumentError("layers", expected=expected, got=got)
        # The batch is the first axis, except for MultiheadAttention's default layout (n, batch, d).
        second = isinstance(layer, nn.MultiheadAttention) and not layer.batch_first
        axis = None if x.ndim == 2 else int(second)
        arguments = tree_map(
            lambda leaf: _X if leaf is x else leaf.detach() if isinstance(leaf, Tensor) else leaf, arguments
        )
        # The copy keeps X even if the layer changes its input in place; the graph to earlier layers is kept.
        return cls(call.name, layer, x.clone(), arguments, _versions(arguments), axis)

    @property
    def members(self) -> Tensor:
        """The tokens, detached, with the batch as first axis. Half precision is converted to float32."""
        return self.by_member(_single(self.tokens)).detach()

    def by_member(self, t: Tensor) -> Tensor:
        """Return a tensor with its batch axis first; if the call has no such axis, one is added."""
        if self.batch_axis is None:
            return t[None]
        return t.transpose(0, 1) if self.batch_axis == 1 else t

    def as_given(self, t: Tensor) -> Tensor:
        """Move the batch axis back to where the call had it, after :meth:`by_member`."""
        return t[0] if self.batch_axis is None else self.by_member(t)

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        """Call a module with other tokens (batch, ...), and all other arguments as they were recorded."""
        given = self.as_given(x)

        def as_tokens(leaf: Any) -> Any:
            half = isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
            return given if leaf is _X else leaf.to(given.dtype) if half else leaf

        found = first_output(module(**tree_map(as_tokens, self.arguments)))
        if found is None:
            got = f"{self.name}, which returns none"
            raise ArgumentError("layers", expected="layers that return tokens", got=got)
        return self.by_member(found)

    def first(self, members: int) -> LayerCall:
        """Return this call restricted to the first ``members`` sequences of the batch.

        Nothing says which arguments have one entry for each sequence. So all tensors are cut whose first axis
        has the size of the batch, or a multiple of it. :meth:`check_first` checks by the output whether this
        was right.
        """
        axis = self.batch_axis
        if axis is None or self.tokens.shape[axis] <= members:
            return self
        batch = self.tokens.shape[axis]

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.ndim == 0:
                return leaf
            # Another tensor of tokens (n, batch, d), such as the keys, has its batch on the second axis, too.
            if axis == 1 and leaf.ndim == 3 and leaf.shape[1:] == self.tokens.shape[1:]:
                return leaf.narrow(1, 0, members)
            size = leaf.shape[0]
            # A size that is a multiple of the batch is taken as (batch · heads, ...), as for masks of
            # attention.
            whole = size == batch or (leaf.ndim > 2 and size % batch == 0)
            return leaf.narrow(0, 0, size // batch * members) if whole and size else leaf

        arguments = tree_map(cut, self.arguments)
        tokens = self.tokens.narrow(axis, 0, members)
        return replace(self, tokens=tokens, arguments=arguments, versions=_versions(arguments))

    def check_first(self, module: nn.Module, members: int) -> None:
        """Raise ArgumentError if the output for the first ``members`` sequences depends on the others."""
        alone = self.first(members)
        if alone is self:
            return
        with torch.no_grad():
            wanted = self.run(module, self.members)[:members]
            try:
                same = torch.allclose(alone.run(module, alone.members), wanted, rtol=1e-3, atol=1e-5)
            except (RuntimeError, ValueError, IndexError):
                same = False
        expected = "layers that can be run on the first sequences of a batch alone"
        got = f"{self.name} ({type(self.layer).__name__}), whose arguments could not be cut"
        check(same, "members", expected, got, "Use members=None for a model with this layer.")

    def check_unchanged(self) -> None:
        """Raise DerivativeError if an argument has been changed in place since the call."""
        if _versions(self.arguments) != self.versions:
            raise DerivativeError(
                f"{self.name}: an argument of its call was changed in place after the call. Call the penalty "
                "right after the forward pass, or name a module around the layer."
            )


def _tensors(arguments: dict[str, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _versions(arguments: dict[str, Any]) -> list[int]:
    return [t._version for t in _tensors(arguments)]


class Penalty:
    """Base class of penalties, which record the calls of layers while they are attached to a model.

    Each forward pass with gradients replaces the calls of the last one. If ``projected`` is True, the calls
    of attention layers include their output projection. ``settings`` are words for ``repr``.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str] | None, *, projected: bool, settings: str
    ) -> None:
        check(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
        self.layers = _chosen_layers(model, layers)
        self._model, self._settings = model, settings
        self._calls: list[LayerCall] = []
        self._projections = OutputProjections(model, self.layers) if projected else None
        # The calls of the last pass are forgotten only now: penalties use them after the pass has ended.
        begins = self._calls.clear
        self._watch = watching.Watch(model, self.layers, starts=self._record, begins=begins)

    def __repr__(self) -> str:
        attached = "attached" if self._watch.attached else "not attached"
        model, layers = type(self._model).__name__, len(self.layers)
        return f"{type(self).__name__}({model}, {layers} layers, {self._settings}, {attached})"

    def attach(self) -> Self:
        """Start to record the inputs of the layers in each forward pass of the model."""
        self._watch.attach()
        if self._projections is not None:
            self._projections.attach()
        return self

    def detach(self) -> None:
        """Stop the recording, and forget what was recorded. The model is as it was before :meth:`attach`."""
        if self._projections is not None:
            self._projections.detach()
        self._watch.detach()
        self._calls.clear()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *raised: object) -> None:
        self.detach()

    def _record(self, call: watching.Call) -> None:
        self._calls.append(LayerCall.of(call))

    def _named_calls(self) -> dict[str, LayerCall]:
        """Return the calls of the last forward pass by layer. The second call of a layer is ``name[1]``."""
        if not self._calls:
            attached = self._watch.attached
            raise ArgumentError(
                "penalty",
                expected="a forward pass of the model with gradients since the penalty was attached",
                got="no such pass through a layer" if attached else "a penalty that is not attached",
                remedy="Leave the penalty out of an evaluation, which has no gradients: where model.training "
                "is false. Call the model by model(x), not by model.forward(x). Under torch.compile, attach "
                "the penalty before the first pass."
                if attached
                else "Write `with penalty:` around forward pass and call, or call penalty.attach() first.",
            )
        counts: dict[str, int] = {}
        named: dict[str, LayerCall] = {}
        for call in self._calls:
            if self._projections is not None:
                call = replace(call, layer=self._projections.found.get(call.name, call.layer))
            index = counts[call.name] = counts.get(call.name, -1) + 1
            named[f"{call.name}[{index}]" if index else call.name] = call
        return named


def _chosen_layers(model: nn.Module, layers: Sequence[str] | None) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if layers is None:
        named = {
            m for m in modules.values() if any("attention" in c.__name__.lower() for c in type(m).__mro__)
        }
        inner = {name: m for name, m in modules.items() if m in named and not named & {*m.modules()} - {m}}
        expected, got = "a model with modules whose class name contains 'attention'", type(model).__name__
        remedy = "Give the paths of the layers, which model.named_modules() lists."
        check(bool(inner), "layers", expected, got, remedy)
        return inner
    several = isinstance(layers, Sequence) and not isinstance(layers, str) and len(layers) > 0
    check(several, "layers", "a list of paths or patterns", repr(layers))
    found: dict[str, nn.Module] = {}
    for pattern in layers:
        fits = [name for name in modules if name == pattern or _fits(name, str(pattern))]
        remedy = (
            "model.named_modules() lists the paths; a pattern is 'encoder.layers.*.self_attn', in which * "
            "stands for what is between two dots."
        )
        check(bool(fits), "layers", "paths or patterns of modules of the model", repr(pattern), remedy)
        found |= {name: modules[name] for name in fits}
    return found


def _fits(name: str, pattern: str) -> bool:
    """Return whether each part of a dotted path fits that of a pattern. An empty path fits no pattern."""
    parts, patterns = name.split("."), pattern.split(".")
    return bool(name) and len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def replica(layer: nn.Module, name: str) -> nn.Module:
    """Return a copy of the layer that shares its parameters but no other state with the original.

    The copy is in evaluation mode, so it has no dropout. It has its own buffers and attributes. It has none
    of the layer's hooks, except hooks that compute a weight (``torch.nn.utils.weight_norm``). Half-precision
    parameters are converted to float32. ArgumentError is raised if the layer is scripted, or its ``forward``
    was replaced on the instance.
    """
    copies: dict[nn.Module, nn.Module] = {}
    buffers: dict[int, Tensor] = {}
    modules = {path: module for path, module in layer.named_modules() if unwrapped(module) is module}
    for path, module in modules.items():
        own = vars(module)
        scripted = isinstance(module, torch.jit.ScriptModule)
        what = "scripted" if scripted else "whose forward was replaced on the object"
        got = f"{'.'.join(filter(None, (name, path)))} ({type(module).__name__}), {what}"
        remedy = "Attach the penalty to the module before it is wrapped."
        check(not scripted and "forward" not in own, "layers", "layers in plain Python", got, remedy)
        # copy.deepcopy would copy the parameters, too, and fails for attributes with a graph.
        copy = copies[module] = module.__new__(type(module))
        new: dict[str, Any] = {key: OrderedDict() for key in _HOOKS}
        new["_forward_pre_hooks"].update(
            (key, hook)
            for key, hook in module._forward_pre_hooks.items()
            if isinstance(hook, WeightNorm | SpectralNorm)
        )
        new["_parameters"] = {key: p if p is None else _single(p) for key, p in module._parameters.items()}
        new["_buffers"] = {
            key: b if b is None else buffers.setdefault(id(b), _single(b.detach().clone()))
            for key, b in module._buffers.items()
        }
        vars(copy).update(own | new | {"_compiled_call_impl": None, "training": False})
    for module in modules.values():
        # The copies refer to each other as the originals do, shared modules included.
        children = module._modules.items()
        vars(copies[module])["_modules"] = {
            key: c if c is None else copies[unwrapped(c)] for key, c in children
        }
    return copies[unwrapped(layer)]


@contextmanager
def drawing_nothing(name: str, device: torch.device) -> Iterator[None]:
    """Restore the random state when the context ends. Raise ArgumentError if it drew random numbers."""
    devices = [device] if device.type == "cuda" else []

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(one) for one in devices)]

    with torch.random.fork_rng(devices):
        before = states()
        yield
        after = states()
    expected = "layers that draw no random numbers in evaluation mode"
    remedy = "Leave the layer out: dropout that ignores evaluation mode has no singular value."
    same = all(map(torch.equal, before, after))
    check(same, "layers", expected, f"{name}, which draws random numbers", remedy)


def _single(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
