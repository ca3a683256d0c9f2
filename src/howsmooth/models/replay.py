"""The model's own numbers, and the proof that the captured maps reproduce them.

The pass that recorded the structure ran under an attention function of ours, on one sequence. Here the
model runs as its user has it, on all sequences: that gives the X that is measured, and the outputs that
each map must reproduce. Then each attention module is called again by itself on changed tokens, which
tells a map from a coincidence of values, and shows whether earlier outputs really do not move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from howsmooth.errors import CaptureError
from howsmooth.models.identify import Structure
from howsmooth.models.recording import AttentionLayer, bound_arguments, first_tokens, run, stopping
from howsmooth.models.tolerance import precision, relative_error, tolerance

__all__ = ["LayerRun", "run_layers", "verify"]


@dataclass(eq=False)
class LayerRun:
    """What the model itself computed in one layer, on all sequences."""

    args: tuple[Any, ...]  # of the owner, for calling it again
    kwargs: dict[str, Any]
    x: Float[Tensor, "batch n d"]  # the attention's input X
    heads: Tensor | None = None  # input of the output projection, (batch, n, heads * value_dim)
    attention: Tensor | None = None  # its output
    hidden: Tensor | None = None  # pre-norm: the layer's input H
    block: Tensor | None = None  # what the block map must give
    less: Tensor | None = None  # after this is subtracted
    # Whether a float64 layer computed something in float32: inside its attention, and anywhere in the block.
    downcast_attention: bool = False
    downcast_block: bool = False


class _Downcasts(TorchDispatchMode):
    """Notices conversions from float64 to float32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten._to_copy.default
            and args[0].dtype == torch.float64
            and result.dtype == torch.float32
        ):
            self.seen = True
        return result


def run_layers(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    layers: list[AttentionLayer],
    structures: dict[int, Structure],
) -> dict[int, LayerRun]:
    """Run the model as it is, and read the values at the modules that were identified."""
    taps = _Taps(layers, structures)
    watch: AbstractContextManager[Any] = taps.downcasts if model.dtype == torch.float64 else nullcontext()
    with taps.hooked(), watch:
        run(model, inputs)
    missing = structures.keys() - taps.done.keys()
    if missing:
        raise CaptureError(
            f"{layers[min(missing)]} was not reached in the model's own pass: the model takes another way "
            "under its own attention implementation."
        )
    return taps.done


@dataclass(eq=False)
class _Taps:
    """The hooks of :func:`run_layers`; layers are counted by the calls of their attention modules."""

    layers: list[AttentionLayer]
    structures: dict[int, Structure]
    done: dict[int, LayerRun] = field(default_factory=dict)
    downcasts: _Downcasts = field(default_factory=_Downcasts)
    calls: int = 0
    current: Structure | None = None
    last_input: dict[int, Tensor] = field(default_factory=dict)  # of each pre-norm

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Place the hooks, and remove them."""
        structures = self.structures.values()
        with ExitStack() as stack:

            def each(modules: Any) -> Iterator[nn.Module]:
                yield from {id(module): module for module in modules if module is not None}.values()

            def place(handle: Any) -> None:
                stack.callback(handle.remove)

            readings = [s.block.value_at for s in structures if s.block.value_at is not None]
            for module in each(m for reading in readings for m in (reading.module, reading.less)):
                place(module.register_forward_hook(self._value_shown, with_kwargs=True))
            for root in each(s.layer.root for s in structures):
                place(root.register_forward_pre_hook(self._root_starts))
                place(root.register_forward_hook(self._root_ends))
            for owner in each(layer.owner for layer in self.layers):
                place(owner.register_forward_pre_hook(self._owner_starts, with_kwargs=True))
            for output in each(s.output for s in structures):
                place(output.register_forward_hook(self._output_ends, with_kwargs=True))
            for norm in each(s.block.pre_norm for s in structures):
                place(norm.register_forward_pre_hook(self._pre_norm_starts, with_kwargs=True))
            yield

    def _root_starts(self, module: nn.Module, args: Any) -> None:
        self.downcasts.seen = False

    def _root_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.current is not None and self.current.layer.root is module:
            layer_run = self.done[self.current.layer.index]
            layer_run.downcast_block |= self.downcasts.seen
            self.current = None
            if self.structures.keys() <= self.done.keys():
                stopping()

    def _owner_starts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index, self.calls = self.calls, self.calls + 1
        self.current = self.structures.get(index)
        if self.current is None:
            return
        x = first_tokens(bound_arguments(module, args, kwargs))
        if module is not self.current.layer.owner or x is None:
            raise CaptureError(
                f"{self.current.layer} was expected next in the model's own pass, and did not come."
            )
        self.done[index] = LayerRun(args, kwargs, x.clone(), downcast_block=self.downcasts.seen)
        self.downcasts.seen = False
        if self.current.block.pre_norm is not None:
            self.done[index].hidden = self.last_input.get(id(self.current.block.pre_norm))

    def _pre_norm_starts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = first_tokens(bound_arguments(module, args, kwargs))
        if tokens is not None:
            self.last_input[id(module)] = tokens.clone()

    def _output_ends(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self.current is None or module is not self.current.output:
            return
        layer_run = self.done[self.current.layer.index]
        heads = first_tokens(bound_arguments(module, args, kwargs))
        if layer_run.attention is None and heads is not None:
            layer_run.downcast_attention = self.downcasts.seen
            layer_run.downcast_block |= self.downcasts.seen
            shape = (*layer_run.x.shape[:2], -1)
            layer_run.heads, layer_run.attention = heads.reshape(shape).clone(), output.reshape(shape).clone()

    def _value_shown(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        reading = None if self.current is None else self.current.block.value_at
        if self.current is None or reading is None:
            return
        layer_run = self.done[self.current.layer.index]
        if layer_run.attention is None:
            return
        first = output[0] if isinstance(output, tuple | list) else output
        if module is reading.less and layer_run.less is None:
            layer_run.less = first.clone()
        if module is reading.module and layer_run.block is None:
            value = first_tokens(bound_arguments(module, args, kwargs)) if reading.side == "input" else first
            layer_run.block = None if value is None else value.clone()


def verify(structure: Structure, own: LayerRun, *, block: bool) -> None:
    """Check that the captured maps give what the model gave, there and after a change of the tokens.

    Parameters
    ----------
    structure, own
        What was identified, and what the model itself computed, in the same layer.
    block
        Whether to check the map of the whole block too.

    Raises
    ------
    CaptureError
        If a map differs by more than rounding can explain, or is not causal where its mask says so.

    """
    layer, attention = structure.layer, structure.attention
    if own.heads is None or own.attention is None:
        raise CaptureError(f"{layer} did not reach its output projection in the model's own pass.")
    eps = precision(own.x.dtype, downcast=own.downcast_attention)
    tol = tolerance(eps, structure.condition)
    inner = attention.without_output()
    before = inner(own.x)
    _compare(layer, "its heads", before, own.heads, tol)
    _compare(layer, "its attention", attention(own.x), own.attention, tol)
    if block and structure.block.map is not None:
        x = own.x if structure.block.pre_norm is None else own.hidden
        if x is None or own.block is None:
            raise CaptureError(f"{layer} did not reach its norms in the model's own pass.")
        loose = tolerance(precision(own.x.dtype, downcast=own.downcast_block), structure.condition)
        value = own.block if own.less is None else own.block - own.less
        _compare(layer, "its block", structure.block.map(x), value.reshape(x.shape), loose)

    # The later half of the tokens is moved by about their own size, with the same numbers every time.
    half = own.x.shape[1] // 2
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(own.x.shape, generator=generator, dtype=torch.float64, device="cpu").to(own.x)
    noise[:, :half] = 0.0
    moved = own.x + noise * own.x.square().mean().sqrt()
    after = _owner_again(structure, own, moved)
    captured = inner(moved)
    # Larger tokens give larger scores: q and k may each have grown by a small factor.
    tol = tolerance(eps, 4.0 * structure.condition)
    _compare(layer, "its heads on other tokens", captured, after, tol)
    if attention.causal and half > 0:
        for what, first, second in (("model", own.heads, after), ("captured map", before, captured)):
            if relative_error(second[:, :half], first[:, :half]) > tol:
                raise CaptureError(
                    f"{layer} is masked causally, but later tokens move earlier outputs of the {what}."
                )


def _compare(layer: AttentionLayer, what: str, captured: Tensor, own: Tensor, tol: float) -> None:
    errors = [relative_error(a, b) for a, b in zip(captured, own, strict=True)]
    worst = max(errors)
    if worst <= tol:
        return
    reason = (
        "its mask or its positions differ between the sequences; measure them one at a time"
        if errors[0] <= tol
        else "it does something that was not recognised, so it is not captured"
    )
    raise CaptureError(
        f"{layer}: the captured map differs from the model's own output ({what}) by {worst:.1e} relative, "
        f"where rounding explains {tol:.1e}: {reason}."
    )


def _owner_again(structure: Structure, own: LayerRun, x: Tensor) -> Tensor:
    """Call the model's own attention module with other tokens for X, and return its concatenated heads."""
    seen: list[Tensor] = []

    def tap(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = first_tokens(bound_arguments(module, args, kwargs))
        if tokens is not None:
            seen.append(tokens.reshape(*x.shape[:2], -1).clone())

    owner = structure.layer.owner
    given = first_tokens(bound_arguments(owner, own.args, own.kwargs))
    swap: Callable[[Any], Any] = lambda value: x if value is given else value  # noqa: E731
    handle = structure.output.register_forward_pre_hook(tap, with_kwargs=True)
    try:
        output = owner(*map(swap, own.args), **{name: swap(value) for name, value in own.kwargs.items()})
    finally:
        handle.remove()
    if not seen:  # the output projection lies outside of the owner, which then returns the heads themselves
        first = output[0] if isinstance(output, tuple | list) else output
        seen.append(first.reshape(*x.shape[:2], -1))
    return seen[0]
