"""Hooks that record the inputs of chosen layers while a model runs forward, for penalties."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from howsmooth.errors import ArgumentError, DerivativeError
from howsmooth.nn.penalty.output_projections import OutputProjections, UncopiedHook, first_output

__all__ = ["Attached", "Call", "Recorder", "attention_layers"]

_HALF = (torch.float16, torch.bfloat16)


class _Tokens:
    """A placeholder for the tokens among the stored arguments of a call."""


_X = _Tokens()


@dataclass(frozen=True, eq=False)
class Call:
    """One recorded call of a layer, which can be repeated on a copy of the layer."""

    name: str  # the path of the layer in the model
    layer: nn.Module
    tokens: Tensor  # a copy of X with its autograd graph
    leaves: list[Any]  # all arguments as a flat list, with _X in place of the tokens
    versions: list[int]  # the version counter of each tensor in ``leaves``, which rises with changes in place
    tree: Any  # the structure of the arguments, from which ``leaves`` become args and kwargs again
    batch_axis: int | None  # None if the call had one sequence without a batch axis

    @property
    def members(self) -> Tensor:
        """The tokens of the call with the batch as first axis, detached from the autograd graph.

        Half-precision tokens are converted to float32.
        """
        return self.history.detach()

    @property
    def history(self) -> Tensor:
        """The tokens of the call with the batch as first axis, still attached to the autograd graph.

        Half-precision tokens are converted to float32.
        """
        x = self.tokens
        return self.by_member(x.float() if x.dtype in _HALF else x)

    def by_member(self, t: Tensor) -> Tensor:
        """Move the batch axis of a tensor to the front, or add the axis if it is missing.

        ``t`` has the batch axis where the layer's tokens have it.
        """
        if self.batch_axis is None:
            return t[None]
        return t.transpose(0, 1) if self.batch_axis == 1 else t

    def as_given(self, t: Tensor) -> Tensor:
        """Move the first axis of a tensor to the place at which the layer expects the batch axis.

        If the layer was called without a batch axis, the first axis is removed.
        """
        return t[0] if self.batch_axis is None else self.by_member(t)

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        """Call a module with other tokens and with all other recorded arguments.

        The batch is the first axis of the tokens and of the result.
        """
        given = self.as_given(x)
        leaves = [given if leaf is _X else _as(leaf, given) for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.tree)
        found = first_output(module(*args, **kwargs))
        if found is None:
            got = f"{self.name}, which returns none"
            raise ArgumentError("layers", expected="layers that return tokens", got=got)
        return self.by_member(found)

    def first(self, members: int) -> Call:
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

        leaves = [leaf if leaf is _X else cut(leaf) for leaf in self.leaves]
        versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
        return replace(self, tokens=self.tokens.narrow(axis, 0, members), leaves=leaves, versions=versions)

    def check_first(self, module: nn.Module, members: int) -> None:
        """Raise ArgumentError if the output for the first ``members`` sequences depends on the other
        sequences.
        """
        alone = self.first(members)
        if alone is self:
            return
        with torch.no_grad():
            wanted = self.run(module, self.members)[:members]
            try:
                same = torch.allclose(alone.run(module, alone.members), wanted, rtol=1e-3, atol=1e-5)
            except (RuntimeError, ValueError, IndexError):
                same = False
        if not same:
            raise ArgumentError(
                "members",
                expected="layers that can be run on the first sequences of a batch alone",
                got=f"{self.name} ({type(self.layer).__name__}), whose arguments could not be cut",
                remedy="Use members=None for a model with this layer.",
            )

    def check_unchanged(self) -> None:
        """Raise DerivativeError if an argument has been changed in place since the call."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        if [t._version for t in tensors] != self.versions:
            raise DerivativeError(
                f"{self.name}: an argument of its call was changed in place after the call. Call the penalty "
                "right after the forward pass, or name a module around the layer."
            )


class Attached:
    """Base class of penalties, which record the calls of layers while they are attached to a model."""

    _recorder: Recorder

    def attach(self) -> Self:
        """Start the recording of the inputs of the layers in the forward passes of the model."""
        self._recorder.attach()
        return self

    def detach(self) -> None:
        """Remove all hooks from the model, which stops the recording."""
        self._recorder.detach()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *raised: object) -> None:
        self.detach()


class Recorder:
    """A recorder of the calls of some layers in each forward pass of a model.

    Forward passes without gradients are not recorded.

    Parameters
    ----------
    model
        The model whose forward passes are recorded. Each new pass replaces the calls of the last one.
    layers
        The modules to record, by name.
    projected
        Whether the calls of attention layers include their output projection, wherever the model applies it.

    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], *, projected: bool = False) -> None:
        self._model = model
        self._layers = layers
        self._projections = OutputProjections(model, layers) if projected else None
        self._handles: list[Any] = []
        self._running = False
        self.calls: list[Call] = []

    @property
    def attached(self) -> bool:
        """Whether the hooks that record calls are registered with the layers."""
        return bool(self._handles)

    def attach(self) -> None:
        """Register the hooks that record the calls of the layers."""
        if self._handles:
            return
        self._handles = [
            self._model.register_forward_pre_hook(UncopiedHook(self._begin)),
            # The hook must also run if the forward pass raises an exception.
            self._model.register_forward_hook(UncopiedHook(self._end), always_call=True),
        ]
        for name, layer in self._layers.items():
            hook = UncopiedHook(self._hook(name))
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        if self._projections is not None:
            self._projections.attach()

    def detach(self) -> None:
        """Remove the hooks and forget all recorded calls."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._running, self.calls = [], False, []
        if self._projections is not None:
            self._projections.detach()

    def scope(self, name: str) -> str:
        """Return ``attention`` if the calls of the layer include its output projection, else ``module``."""
        known = self._projections is not None and name not in self._projections.unknown
        return "attention" if known else "module"

    def named(self) -> dict[str, Call]:
        """Return the calls of the last forward pass by the name of the layer.

        The second call of a layer ``name`` has the name ``name[1]``, and so on.

        Raises
        ------
        ArgumentError
            If no call was recorded.

        """
        seen, attached = {call.name for call in self.calls}, self.attached
        # A part that torch.compile wrapped and that ran before the penalty was attached calls no hooks.
        lost = [name for name in self._layers if "._orig_mod." in name and name not in seen]
        if lost or not seen:
            unseen = f"no such pass through {lost[0]}" if lost else "no such pass"
            raise ArgumentError(
                "penalty",
                expected="a forward pass of the model with gradients since the penalty was attached",
                got=unseen if attached else "a penalty that is not attached",
                remedy="Leave the penalty out of an evaluation, which has no gradients: where model.training "
                "is false. Attach it before the first pass of a model under torch.compile, or compile the "
                "model or its parts by module.compile()."
                if attached
                else "Write `with penalty:` around forward pass and call, or call penalty.attach() first.",
            )
        counts: dict[str, int] = {}
        named: dict[str, Call] = {}
        for call in self.calls:
            if self._projections is not None:
                call = replace(call, layer=self._projections.found.get(call.name, call.layer))
            index = counts[call.name] = counts.get(call.name, -1) + 1
            named[f"{call.name}[{index}]" if index else call.name] = call
        return named

    def _begin(self, module: nn.Module, args: object) -> None:
        # Forget the calls of the last pass only now: penalties use them after the pass has ended.
        if _counts():
            self._running, self.calls = True, []

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        if _counts():
            self._running = False
            if self._projections is not None:
                self._projections.settle()

    def _hook(self, name: str) -> Any:
        def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # If the layer is the model itself, its hook `_begin` has run before this one.
            if self._running and _counts():
                self.calls.append(_call(name, layer, args, kwargs))

        return see


def _counts() -> bool:
    """Return True if the current forward pass is to be recorded.

    A pass without gradients is not recorded, nor one that a checkpoint repeats during a backward pass.
    """
    # A task id other than −1 means that a backward pass is running, in which checkpoints call layers again.
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _call(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    bound = _by_parameter(layer, args, kwargs)
    if type(layer) is nn.MultiheadAttention:
        # With need_weights=True, PyTorch computes attention step by step, which can be differentiated twice
        # and is faster here.
        bound["need_weights"] = True
    # Without its cache, because a repeated call would append the keys and values a second time.
    caches = [key for key, one in bound.items() if hasattr(one, "get_seq_length") and hasattr(one, "update")]
    leaves, tree = tree_flatten(((), bound | dict.fromkeys(caches)))
    floating = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
    x = next((leaf for leaf in floating if leaf.ndim >= 2 and leaf.numel() > 0), None)
    if x is None:
        raise ArgumentError(
            "layers",
            expected="layers that get tokens, a floating-point tensor (..., n, d)",
            got=f"{name} ({type(layer).__name__}), which gets none",
        )
    # The batch is the first axis, except for MultiheadAttention's default layout (n, batch, d).
    axis: int | None = 0 if x.ndim > 2 else None
    if axis == 0 and isinstance(layer, nn.MultiheadAttention) and not layer.batch_first:
        axis = 1
    leaves = [_X if leaf is x else leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
    # The copy keeps X even if the layer changes its input in place; the graph to earlier layers is kept.
    return Call(name, layer, x.clone(), leaves, versions, tree, axis)


def _by_parameter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by parameter name, in the order of the signature."""
    signature = inspect.signature(layer.forward)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ArgumentError(
            "layers", expected="layers whose calls match their signature", got=str(error)
        ) from None
    named: dict[str, Any] = {}
    for key, value in bound.items():
        match signature.parameters[key].kind:
            case inspect.Parameter.VAR_KEYWORD:
                named |= value
            case inspect.Parameter.VAR_POSITIONAL | inspect.Parameter.POSITIONAL_ONLY:
                raise ArgumentError(
                    "layers",
                    expected="layers whose arguments have names",
                    got=f"{type(layer).__name__}, whose forward takes *{key}",
                    remedy="Name a module around it or inside it.",
                )
            case _:
                named[key] = value
    return named


def _as(leaf: Any, x: Tensor) -> Any:
    """Convert half-precision tensors to the dtype of the tokens, and return other values unchanged."""
    return leaf.to(x.dtype) if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf


def attention_layers(model: nn.Module, layers: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the modules of a model that match a list of paths or patterns.

    None selects the innermost modules whose class name contains "attention".

    Raises
    ------
    ArgumentError
        If a path or pattern matches no module, or the model has no module called attention.

    """
    modules = dict(model.named_modules())
    if layers is None:
        named = {
            name: m
            for name, m in modules.items()
            if any("attention" in base.__name__.lower() for base in type(m).__mro__)
        }
        chosen = set(named.values())
        inner = {
            name: m
            for name, m in named.items()
            if not any(one in chosen and one is not m for one in m.modules())
        }
        if not inner:
            raise ArgumentError(
                "layers",
                expected="a model with modules whose class name contains 'attention'",
                got=f"none in {type(model).__name__}",
                remedy="Give the paths of the layers, which model.named_modules() lists.",
            )
        return inner
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise ArgumentError("layers", expected="a list of paths or patterns", got=repr(layers))
    found: dict[str, nn.Module] = {}
    for pattern in layers:
        fits = [name for name in modules if name == pattern or _fits(name, str(pattern))]
        if not fits:
            raise ArgumentError(
                "layers",
                expected="paths or patterns of modules of the model",
                got=repr(pattern),
                remedy="model.named_modules() lists the paths; a pattern is 'encoder.layers.*.self_attn', in "
                "which * stands for what is between two dots.",
            )
        found |= {name: modules[name] for name in fits}
    return found


def _fits(name: str, pattern: str) -> bool:
    """Tell whether a module's path fits a pattern, part by part between the dots.

    So "layers.*" is each layer, and not what is inside of the layers. The empty path of the model itself fits
    no pattern.
    """
    parts, patterns = name.split("."), pattern.split(".")
    return bool(name) and len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
