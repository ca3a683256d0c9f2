"""The altered attention maps that the published code measures, and its invalid formula for Theorem C.3."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from howsmooth.attention import Compose, Residual, SelfAttention, TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.compositions import OuterMap
from howsmooth.attention.scaled_dot_product import attention_probabilities, weighted_values
from howsmooth.attention.theorem_preconditions import require_plain_scores
from howsmooth.bounds.attention_parameters import as_matrix, parameters_of
from howsmooth.errors import ArgumentError
from howsmooth.seeds import torch_seed

__all__ = [
    "DropoutAttention", "c_3_as_coded", "has_fused_weight", "unmasked", "with_dropout", "wrong_slices",
]  # fmt: skip


class DropoutAttention(OuterMap):
    """Self-attention in training mode: each call draws new random dropout from a seeded generator.

    ``weights`` and ``outputs`` are the probabilities with which an attention weight, or an entry of the
    output, is set to zero. All others are divided by 1 − probability.
    """

    inner: SelfAttention

    def __init__(self, inner: SelfAttention, *, weights: float, outputs: float, seed: int) -> None:
        require_plain_scores(inner, "the published maps", argument="inner")
        self.inner, self.weights, self.outputs, self._seed = inner, weights, outputs, seed
        self._generator = torch.Generator().manual_seed(torch_seed(seed))

    @property
    def d_out(self) -> int:
        """The dimension of an output token."""
        return self.inner.d_out

    def describe(self) -> str:
        """Return a phrase that describes the attention and states its dropout probabilities."""
        return f"{self.inner.describe()}, dropout {self.weights:g} of weights and {self.outputs:g} of outputs"

    def check_length(self, n: int) -> None:
        """Raise an ArgumentError if the attention cannot take ``n`` tokens."""
        self.inner.check_length(n)

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> DropoutAttention:
        """Return a copy with another dtype or on another device, whose draws restart from the seed."""
        inner = self.inner.to(dtype=dtype, device=device)
        return DropoutAttention(inner, weights=self.weights, outputs=self.outputs, seed=self._seed)

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        f = self.inner
        if weighting is not None:
            raise ArgumentError(
                "measure", expected="a map that acts on measures", got="attention with dropout"
            )
        q, k, v = f.projections(x)
        q = q.unflatten(-3, (f.kv_heads, f.heads // f.kv_heads))
        p = attention_probabilities(q, k, f.scale, f.visible_keys(x.shape[-2]))
        out = weighted_values(self._dropped(p, self.weights), v)
        out = out.flatten(-4, -3).movedim(-3, -2).flatten(-2)
        if f.output is not None:
            out = out @ f.output.mT
            out = out if f.output_bias is None else out + f.output_bias
        return self._dropped(out, self.outputs)

    def _dropped(self, values: Tensor, probability: float) -> Tensor:
        # Draw on the CPU, so that the draws are the same for every device.
        kept = torch.rand(values.shape, generator=self._generator) >= probability
        return values * (kept.to(device=self.device, dtype=self.dtype) / (1 - probability))


def with_dropout(f: TokenMap, *, weights: float, outputs: float, seed: int) -> TokenMap:
    """Return a copy of a map in which the attention has dropout, as a :class:`DropoutAttention`."""
    return _with_attention(
        f, lambda attention: DropoutAttention(attention, weights=weights, outputs=outputs, seed=seed)
    )


def unmasked(f: TokenMap) -> TokenMap:
    """Return a copy of a map whose attention has no mask, as if its layer were called outside the model."""
    require_plain_scores(f, "the published maps", argument="f")
    return _with_attention(f, lambda attention: attention._rebuilt(causal=False, window=None, mask=None))


def _with_attention(f: TokenMap, change: Callable[[SelfAttention], TokenMap]) -> TokenMap:
    """Return a map in which the attention is replaced by ``change(attention)``, also inside compositions."""
    if isinstance(f, SelfAttention):
        return change(f)
    if isinstance(f, Residual):
        return Residual(_with_attention(f.inner, change))
    if isinstance(f, Compose):
        return Compose(_with_attention(f.outer, change), _with_attention(f.inner, change))
    return f


def has_fused_weight(attention: nn.Module) -> bool:
    """Return whether an attention module keeps W_Q, W_K and W_V in one transposed weight of shape (d, 3d), as
    GPT-2 does. Only then does the published code cut the heads along the wrong axis.
    """
    # Compare the name of the class: this package does not import transformers.
    weights = [part.weight for part in attention.children() if type(part).__name__ == "Conv1D"]
    return any(isinstance(one, Tensor) and one.shape[1] == 3 * one.shape[0] for one in weights)


def wrong_slices(attention: SelfAttention) -> SelfAttention:
    """Return a copy of an attention in which the heads are cut from W_Q, W_K and W_V along the wrong axis, as
    in the published code.

    Head h gets W_Q[hk:(h+1)k, :] in place of W_Q[:, hk:(h+1)k]ᵀ, where W_Q of shape (d, d) multiplies row
    tokens from the right; keys and values likewise. The published figure uses the worst tokens of this map,
    ``adversarial.two_cluster(wrong_slices(attention), n, R)``, on the attention itself.

    Raises
    ------
    ArgumentError
        If heads are grouped, or their dimensions do not sum to d, because then the slices have wrong shapes.

    """
    f = attention
    require_plain_scores(f, "the published slices")
    if f.kv_heads != f.heads or f.heads * f.key_dim != f.d or f.value_dim != f.key_dim:
        raise ArgumentError(
            "attention",
            expected="heads of d dimensions in all, as many for keys and values as for queries",
            got=f"{f.heads} heads of {f.key_dim} over {f.kv_heads} of {f.value_dim}, d = {f.d}",
            remedy="The slices of the published code exist for models such as GPT-2 only.",
        )

    def sliced(weight: Tensor) -> Tensor:
        return weight.reshape(f.d, f.d).mT.reshape(weight.shape).contiguous()

    return f._rebuilt(query=sliced(f.query), key=sliced(f.key), value=sliced(f.value))


def c_3_as_coded(attention: object, X: Tensor) -> float:
    """Return the number that the published code computes for Theorem C.3, which is not a valid bound.

    The formula is ‖V‖ √(R_A² r² (n + 1) + n), where R_A = max_i |A x_i| and r is the diameter of the n
    tokens X, of shape (n, d). ``attention`` is one head with the scores ⟨A x_i + b, x_j⟩ and the values
    V x_j: a ``SelfAttention`` or a ``Head``.

    R_A omits Aᵀ x_j, and the formula the query bias. For A = 10 e₂e₁ᵀ, V = I and X = ((0, 1), (0, −1)) it
    gives √2, but ‖D_X f‖ is 10.1. ``bounds.theorem_c_3`` is a valid bound.

    Raises
    ------
    ArgumentError
        If there are several heads or rotary positions, or X has the wrong shape or entries that are not
        finite.

    """
    head = parameters_of(attention).one_head("c_3_as_coded")
    x = as_matrix("X", X, ("n", head.d), what="tokens")
    largest = float(torch.linalg.vector_norm(x @ head.right.mT @ head.left.mT, dim=1).amax())
    r = float(torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").amax())
    return head.V_norm * math.hypot(largest * r * math.sqrt(len(x) + 1), math.sqrt(len(x)))
