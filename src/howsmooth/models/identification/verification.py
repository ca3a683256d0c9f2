"""Verification that a captured map gives the same outputs as the model's own layer.

The layer runs by itself on all sequences, with the user's attention implementation: first on the tokens of
the forward pass, then on changed tokens. Changed tokens reject maps that fit by coincidence, and show whether
the outputs of a causal layer really do not depend on later tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from howsmooth.attention import SelfAttention
from howsmooth.errors import CaptureError
from howsmooth.models.identification.candidate_maps import Candidate
from howsmooth.models.identification.norm_placement import Block, ValueLocation
from howsmooth.models.identification.output_projection import AttentionOutput
from howsmooth.models.identification.self_attention_module import SelfAttentionModule, moved_tokens
from howsmooth.models.tolerance import lowest_epsilon, relative_error, tolerance
from howsmooth.models.tracing.attention_recorder import AttentionLayer
from howsmooth.models.tracing.module_replay import ModuleReplay, first_tensor
from howsmooth.watching import Call, first_tokens, notice_downcasts, watched

__all__ = ["OwnValues", "check_same_output", "own_values", "verify", "verify_block"]


@dataclass(frozen=True, eq=False)
class OwnValues:
    """The inputs and outputs of the model's own attention module in one run, for all sequences."""

    x: Float[Tensor, "batch n d"]
    heads: Tensor | None  # the concatenated heads, (batch, n, heads * value_dim); None if they are unknown
    attention: Tensor  # the output of the attention
    downcast: bool  # whether a float64 module computed something in float32

    @property
    def inner(self) -> Tensor:
        """The concatenated outputs of the heads, or the attention output if they are unknown."""
        return self.attention if self.heads is None else self.heads


def own_values(call: ModuleReplay, output: AttentionOutput, x: Tensor) -> OwnValues:
    """Run the model's own attention module on tokens ``x``, and return its heads and its output."""
    part = output.projection or output.call
    taken: list[tuple[Tensor, Tensor]] = []  # what the projection was given, and what it made of it

    def tap(one: Call) -> None:
        if not taken and one.inputs is not None:
            taken.append((call.rows(one.inputs).clone(), call.rows(first_tensor(one.output)).clone()))

    with watched({part.name: part.module}, ends=tap), notice_downcasts(x.dtype) as downcasts:
        returned = first_tensor(call(x))
    heads = taken[0][0] if taken else call.rows(returned)  # the module gives them to a projection outside
    attention = _attention_of(call, output, returned)
    if attention is None and not taken:
        raise CaptureError(f"{call.name} did not reach its output when it ran by itself.")
    return OwnValues(
        call.rows(x),
        None if output.projection is None else heads,
        taken[0][1] if attention is None else attention,
        downcasts.seen,
    )


def _attention_of(call: ModuleReplay, output: AttentionOutput, returned: Tensor) -> Tensor | None:
    """Compute the attention output from the module's output ``returned``. Return None if impossible."""
    if output.outside:
        width = 0 if output.call.inputs is None else output.call.inputs.shape[-1]
        return first_tensor(output.call.module(call.rows(returned).reshape(call.batch, -1, width)))
    return None if output.call is output.projection else call.rows(returned).clone()


def verify(self_attention: SelfAttentionModule, output: AttentionOutput, found: Candidate) -> None:
    """Raise CaptureError unless a captured map agrees with the model, on the captured tokens and on others.
    If the map is called causal, also check that later tokens never change earlier outputs.
    """
    layer, call = self_attention.layer, self_attention.replay
    x, half = call.tokens(), call.tokens().shape[1] // 2
    inner = found.map.without_output() if output.projection is not None else found.map
    moved = own_values(call, output, call.shaped(moved_tokens(x)))
    eps = lowest_epsilon(x.dtype, downcast=moved.downcast)
    # In the forward pass of the model, whose output was kept, if it is the output of the attention.
    own = None if call.output is None else _attention_of(call, output, call.output)
    own = own_values(call, output, call.x).attention if own is None else own
    check_same_output(layer, "its attention", found.map(x), own, tolerance(eps, found.condition))
    # On changed tokens the scores may be larger: queries and keys may each have grown by a factor of two.
    tol = tolerance(eps, 4.0 * found.condition)
    after = inner(moved.x)
    check_same_output(layer, "its heads on other tokens", after, moved.inner, tol)
    if output.projection is not None:
        _compare_attention(layer, found, moved, tol)
    if not found.map.causal or half == 0 or after.shape[1] != x.shape[1]:
        return
    # With the later half of the tokens as it was, the earlier outputs of a causal map must stay.
    mixed = torch.cat((moved.x[:, :half], x[:, half:]), dim=1)
    again, other = own_values(call, output, call.shaped(mixed)).inner, inner(mixed)
    check_same_output(layer, "its heads on other tokens", other, again, tol)
    for what, a, b in (("model", moved.inner, again), ("captured map", after, other)):
        if relative_error(b[:, :half], a[:, :half]) > tol:
            raise CaptureError(
                f"{layer} is masked causally, but later tokens move earlier outputs of the {what}."
            )


def _compare_attention(layer: AttentionLayer, found: Candidate, own: OwnValues, tol: float) -> None:
    """Raise CaptureError unless map and model have the same attention output. Their heads agree already."""
    f, heads, attention = found.map, own.inner, own.attention
    if not isinstance(f, SelfAttention) or f.output is None:
        check_same_output(layer, "its attention", f(own.x), attention, tol)
        return
    # An output matrix is applied to the model's own heads, so that only its own rounding is tolerated.
    heads = heads.reshape(len(heads), -1, f.output.shape[1])
    captured, size = heads @ f.output.mT, heads.abs() @ f.output.abs().mT
    if f.output_bias is not None:
        captured, size = captured + f.output_bias, size + f.output_bias.abs()
    allowed = tolerance(lowest_epsilon(own.x.dtype, downcast=own.downcast)) * size
    if attention.numel() != captured.numel() or bool(
        ((captured - attention.reshape(captured.shape)).abs() > allowed).any()
    ):
        raise CaptureError(f"{layer} does more to its heads than multiply them by a matrix.")


def check_same_output(layer: AttentionLayer, what: str, captured: Tensor, own: Tensor, tol: float) -> None:
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


def verify_block(
    self_attention: SelfAttentionModule,
    output: AttentionOutput,
    block: Block,
    layer: ModuleReplay,
    condition: float,
) -> Float[Tensor, "batch n d"]:
    """Check the map of a layer's attention half against the model. Return the input H of this half in the
    forward pass.

    Raises
    ------
    CaptureError
        If the block has no map, or map and layer differ by more than rounding explains.

    """
    place, replay = self_attention.layer, self_attention.replay
    if block.map is None or block.value_at is None:
        raise CaptureError(
            f"The block around {place} is not captured: {block.obstacle}. "
            "The scopes up to 'attention' do not need it."
        )
    given: list[Tensor] = []
    shape = replay.tokens().shape
    for x in (layer.x, moved_tokens(layer.x)) if layer.x.is_floating_point() else (layer.x,):
        with notice_downcasts(replay.x.dtype) as downcasts:
            seen = _half_layer(replay, output.call.module, block, block.value_at, partial(layer, x))
        if "hidden" not in seen or "value" not in seen:
            raise CaptureError(f"The block around {place} did not reach its norms when it ran by itself.")
        hidden, value = replay.rows(seen["hidden"]).reshape(shape), seen["value"]
        if "less" in seen:
            value = value - seen["less"].reshape(value.shape)
        loose = tolerance(lowest_epsilon(hidden.dtype, downcast=downcasts.seen), 4.0 * condition)
        check_same_output(place, "its block", block.map(hidden), replay.rows(value).reshape(shape), loose)
        given.append(hidden)
    return given[0].clone()


def _half_layer(
    attention: ModuleReplay, output: nn.Module, block: Block, at: ValueLocation, run: Callable[[], object]
) -> dict[str, Tensor]:
    """Run a layer, and return copies of tensors by name: the input H of its attention half (``hidden``), the
    tensor that contains the output of this half (``value``), and what to subtract from it, if anything
    (``less``).
    """
    pre, seen = block.pre_norm, dict[str, Tensor]()
    began = reached = False  # whether the attention has begun, and whether its output is there

    def see(name: str, tensor: Tensor | None) -> None:
        if tensor is not None and (name == "hidden" or name not in seen):
            seen[name] = tensor.clone()

    def starts(call: Call) -> None:
        nonlocal began
        if began:
            return
        began = call.module is attention.module
        if call.module is pre:
            see("hidden", call.inputs)
        elif began and pre is None:
            see("hidden", call.arguments().get(attention.x_name))

    def ends(call: Call) -> None:
        nonlocal reached
        reached |= began and call.module is output
        if reached and call.module is at.less:
            see("less", first_tensor(call.output))
        if reached and call.module is at.module:
            given = at.side == "input"
            see("value", first_tokens(call.arguments()) if given else first_tensor(call.output))

    parts = dict.fromkeys(p for p in (attention.module, output, pre, at.module, at.less) if p is not None)
    with watched({str(i): part for i, part in enumerate(parts)}, starts, ends):
        run()
    return seen
