"""Verification that a captured map reproduces the outputs of the original layer of the model.

The layer runs by itself on all sequences, with the user's attention implementation: first on the tokens of
the forward pass, then on changed tokens. Changed tokens reject maps that fit by coincidence, and show whether
the outputs of a causal layer really do not depend on later tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from howsmooth.attention import SelfAttention
from howsmooth.errors import CaptureError
from howsmooth.models.identification.candidate_maps import Hypothesis
from howsmooth.models.identification.norm_and_residual_placement import Block
from howsmooth.models.identification.output_projection import AttentionOutput
from howsmooth.models.identification.self_attention_module import SelfAttentionModule, moved_tokens
from howsmooth.models.tolerance import precision, relative_error, tolerance
from howsmooth.models.tracing.layer_trace import AttentionLayer, bound_arguments, first_tokens
from howsmooth.models.tracing.module_replay import ModuleReplay, first_tensor

__all__ = ["ModelValues", "compare", "model_values", "notice_downcasts", "verify", "verify_block"]


@dataclass(frozen=True, eq=False)
class ModelValues:
    """The inputs and outputs of the original attention module of the model in one run, for all sequences."""

    x: Float[Tensor, "batch n d"]
    heads: (
        Tensor | None
    )  # input of the output projection, (batch, n, heads * value_dim); None if it is unknown
    attention: Tensor  # the output of the attention
    downcast: bool  # whether a float64 module computed something in float32

    @property
    def inner(self) -> Tensor:
        """Return the concatenated outputs of the heads, or the attention output if they are unknown."""
        return self.attention if self.heads is None else self.heads


class _Downcasts(TorchDispatchMode):
    """A dispatch mode that records whether any operation converts float64 to float32 or back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        other = {torch.float32: torch.float64, torch.float64: torch.float32}
        if isinstance(result, Tensor) and result.dtype in other:
            given = (value for value in args if isinstance(value, Tensor))
            self.seen = self.seen or any(value.dtype == other[result.dtype] for value in given)
        return result


@contextmanager
def notice_downcasts(dtype: torch.dtype) -> Iterator[_Downcasts]:
    """Return a context manager that records whether a computation in float64 converts numbers to float32.

    For other dtypes nothing is recorded.
    """
    downcasts = _Downcasts()
    mode: AbstractContextManager[Any] = downcasts if dtype == torch.float64 else nullcontext()
    with mode:
        yield downcasts


def model_values(self_attention: SelfAttentionModule, output: AttentionOutput, x: Tensor) -> ModelValues:
    """Run the attention module of the model on tokens ``x``, and return its output and the outputs of its
    heads.
    """
    call, projection = self_attention.replay, output.projection
    taken: list[tuple[Tensor, Tensor]] = []  # heads, and what the projection makes of them

    def tap(module: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        given = first_tokens(bound_arguments(module, args, kwargs))
        if not taken and given is not None:
            taken.append((call.rows(given).clone(), call.rows(first_tensor(result)).clone()))

    with ExitStack() as stack:
        if projection is not None:
            stack.enter_context(projection.module.register_forward_hook(tap, with_kwargs=True))
        downcasts = stack.enter_context(notice_downcasts(x.dtype))
        result = first_tensor(call(x))
    returned = call.rows(result).clone()
    # If the projection did not run, it is outside the attention module, which then returns the heads.
    heads, attention = taken[0] if taken else (None if projection is None else returned, None)
    if output.outside:
        width = 0 if output.call.inputs is None else output.call.inputs.shape[-1]
        attention = first_tensor(output.call.module(returned.reshape(call.batch, -1, width)))
    elif output.call is not projection:
        attention = returned
    if attention is None:
        raise CaptureError(f"{self_attention.layer} did not reach its output when it ran by itself.")
    return ModelValues(call.rows(x), heads, attention, downcasts.seen)


def verify(self_attention: SelfAttentionModule, output: AttentionOutput, found: Hypothesis) -> None:
    """Raise CaptureError unless a captured map agrees with the model, at the captured tokens and at other
    tokens.

    Raises
    ------
    CaptureError
        If they differ by more than rounding explains, or if the map counts as causal and later tokens change
        earlier outputs.

    """
    layer, call = self_attention.layer, self_attention.replay
    own = model_values(self_attention, output, call.x)
    inner = found.map.without_output() if output.projection is not None else found.map
    eps = precision(own.x.dtype, downcast=own.downcast)
    tol = tolerance(eps, found.condition)
    before = inner(own.x)
    compare(layer, "its heads" if output.projection is not None else "its output", before, own.inner, tol)
    if output.projection is not None:
        _compare_attention(layer, found, own, tol)
    # On changed tokens the scores may be larger: queries and keys may each have grown by a factor of two.
    tol = tolerance(eps, 4.0 * found.condition)
    # For a causal map also with only the second half of the tokens changed: earlier outputs must stay.
    half = own.x.shape[1] // 2
    for first in dict.fromkeys((0, half if found.map.causal else 0)):
        moved = model_values(self_attention, output, call.shaped(moved_tokens(own.x, first)))
        after = inner(moved.x)
        compare(layer, "its heads on other tokens", after, moved.inner, tol)
        if first == 0 and output.projection is not None:
            _compare_attention(layer, found, moved, tol)
        if first == 0 or before.shape[1] != own.x.shape[1]:
            continue
        for what, a, b in (("model", own.inner, moved.inner), ("captured map", before, after)):
            if relative_error(b[:, :first], a[:, :first]) > tol:
                raise CaptureError(
                    f"{layer} is masked causally, but later tokens move earlier outputs of the {what}."
                )


def _compare_attention(layer: AttentionLayer, found: Hypothesis, own: ModelValues, tol: float) -> None:
    """Raise CaptureError unless the map reproduces the attention output of the model.

    The outputs of the heads were checked before.
    """
    f, heads, attention = found.map, own.inner, own.attention
    if not isinstance(f, SelfAttention) or f.output is None:
        compare(layer, "its attention", f(own.x), attention, tol)
        return
    # An output matrix is applied to the model's own heads, so that only its own rounding is tolerated.
    heads = heads.reshape(len(heads), -1, f.output.shape[1])
    captured, size = heads @ f.output.mT, heads.abs() @ f.output.abs().mT
    if f.output_bias is not None:
        captured, size = captured + f.output_bias, size + f.output_bias.abs()
    allowed = tolerance(precision(own.x.dtype, downcast=own.downcast)) * size
    if attention.numel() != captured.numel() or bool(
        ((captured - attention.reshape(captured.shape)).abs() > allowed).any()
    ):
        raise CaptureError(f"{layer} does more to its heads than multiply them by a matrix.")


def compare(layer: AttentionLayer, what: str, captured: Tensor, own: Tensor, tol: float) -> None:
    """Raise CaptureError if the outputs of a captured map and of the model differ by more than ``tol``."""
    if captured.numel() == own.numel():  # the model may have heads on a separate axis
        own = own.reshape(captured.shape)
    if captured.shape != own.shape:
        raise CaptureError(
            f"{layer}: the captured map gives {tuple(captured.shape)} where the model gives "
            f"{tuple(own.shape)} ({what})."
        )
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


# ---------------------------------------------------------------- the block


@dataclass(eq=False)
class _BlockValues:
    hidden: Tensor | None = None  # H, the input of the norm before the attention
    value: Tensor | None = None  # the tensor at ``Block.value_at``
    less: Tensor | None = None  # the branch to subtract from it
    attention_ran: bool = False  # whether the attention module has started
    reached: bool = False  # whether the output of the attention was computed


def verify_block(
    self_attention: SelfAttentionModule,
    output: AttentionOutput,
    block: Block,
    layer: ModuleReplay,
    condition: float,
) -> Float[Tensor, "batch n d"]:
    """Check that the map of the attention half of a layer agrees with the model, and return the input of this
    half.

    Returns
    -------
    Tensor
        The input H of the block in the forward pass, (batch, n, d).

    Raises
    ------
    CaptureError
        If the block has no map, or map and layer differ by more than rounding explains.

    """
    if block.map is None or block.value_at is None:
        raise CaptureError(
            f"The block around {self_attention.layer} is not captured: {block.obstacle}. "
            "The scopes up to 'attention' do not need it."
        )
    given: list[Tensor] = []
    shape = self_attention.replay.tokens().shape
    for x in (layer.x, moved_tokens(layer.x)) if layer.x.is_floating_point() else (layer.x,):
        values = _BlockValues()
        with (
            _tapped(self_attention, output, block, values),
            notice_downcasts(self_attention.replay.x.dtype) as downcasts,
        ):
            layer(x)
        hidden = values.hidden
        if hidden is None or values.value is None:
            raise CaptureError(
                f"The block around {self_attention.layer} did not reach its norms when it ran by itself."
            )
        hidden = self_attention.replay.rows(hidden).reshape(shape)
        value = values.value
        if values.less is not None:
            value = value - values.less.reshape(value.shape)
        loose = tolerance(precision(hidden.dtype, downcast=downcasts.seen), 4.0 * condition)
        compare(
            self_attention.layer,
            "its block",
            block.map(hidden),
            self_attention.replay.rows(value).reshape(shape),
            loose,
        )
        given.append(hidden)
    return given[0].clone()


@contextmanager
def _tapped(
    self_attention: SelfAttentionModule, output: AttentionOutput, block: Block, values: _BlockValues
) -> Iterator[None]:
    """Return a context manager that stores the input and the output of the attention half of a layer when the
    layer runs.
    """
    pre, reading = block.pre_norm, block.value_at

    def norm_starts(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tokens = first_tokens(bound_arguments(module, args, kwargs))
        if tokens is not None and not values.attention_ran:
            values.hidden = tokens.clone()

    def attention_starts(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not values.attention_ran and pre is None:
            x = bound_arguments(module, args, kwargs).get(self_attention.replay.x_name)
            values.hidden = None if x is None else x.clone()
        values.attention_ran = True

    def output_ends(module: nn.Module, args: Any, result: Any) -> None:
        values.reached = values.attention_ran

    def shown(module: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if not values.reached or reading is None:
            return
        out = first_tensor(result)
        if module is reading.less and values.less is None:
            values.less = out.clone()
        if module is reading.module and values.value is None:
            value = first_tokens(bound_arguments(module, args, kwargs)) if reading.side == "input" else out
            values.value = None if value is None else value.clone()

    with ExitStack() as stack:
        stack.enter_context(
            self_attention.replay.module.register_forward_pre_hook(attention_starts, with_kwargs=True)
        )
        stack.enter_context(output.call.module.register_forward_hook(output_ends))
        if pre is not None:
            stack.enter_context(pre.register_forward_pre_hook(norm_starts, with_kwargs=True))
        for module in dict.fromkeys(() if reading is None else (reading.module, reading.less)):
            if module is not None:
                stack.enter_context(module.register_forward_hook(shown, with_kwargs=True))
        yield
