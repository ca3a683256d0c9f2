"""The altered attention maps that the published code measures, and its invalid formula for Theorem C.3.

An altered map has no mask, has dropout, or has weights that are sliced along the wrong axis.
"""

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
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.seeds import torch_seed

__all__ = [
    "DropoutAttention",
    "c_3_as_coded",
    "has_fused_weight",
    "unmasked",
    "with_dropout",
    "wrong_slices",
]


class DropoutAttention(OuterMap):
    """Self-attention in training mode: each call draws new random dropout of the attention weights and of the
    outputs.

    Parameters
    ----------
    inner
        The attention without dropout.
    weights, outputs
        The probability with which an attention weight, or an entry of the output, is set to zero. All other
        weights or entries are divided by 1 − probability.
    seed
        The seed of the random draws.

    """

    inner: SelfAttention

    def __init__(self, inner: SelfAttention, *, weights: float, outputs: float, seed: int) -> None:
        require_plain_scores(inner, "the published maps", argument="inner")
        self.inner, self.weights, self.outputs = inner, weights, outputs
        self._seed = seed
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
        """Return a copy of the attention with another dtype or on another device; the random numbers of the
        copy restart from the seed.
        """
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
        p = p * self._dropout_factors(p, self.weights)
        out = weighted_values(p, v).flatten(-4, -3).movedim(-3, -2).flatten(-2)
        if f.output is not None:
            out = out @ f.output.mT
            out = out if f.output_bias is None else out + f.output_bias
        return out * self._dropout_factors(out, self.outputs)

    def _dropout_factors(self, like: Tensor, probability: float) -> Tensor:
        """Return a random factor for each entry: zero with this probability, and else 1/(1 − probability)."""
        # Draw on the CPU, so that the draws are the same for every device.
        kept = torch.rand(like.shape, generator=self._generator) >= probability
        return kept.to(device=self.device, dtype=self.dtype) / (1 - probability)


def with_dropout(f: TokenMap, *, weights: float, outputs: float, seed: int) -> TokenMap:
    """Return a copy of a map in which the attention has dropout, as in training; see
    :class:`DropoutAttention`.
    """
    return _with_attention(
        f, lambda attention: DropoutAttention(attention, weights=weights, outputs=outputs, seed=seed)
    )


def unmasked(f: TokenMap) -> TokenMap:
    """Return a copy of a map in which the attention has no mask, as if the layer were called outside of its
    model.
    """
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
    """Return True if an attention module keeps W_Q, W_K and W_V in one transposed weight matrix, as GPT-2
    does.

    The ``Conv1D`` weight of GPT-2 has shape (d, 3d). Only for such models does the published code cut the
    heads along the wrong axis, as :func:`wrong_slices` does.
    """
    for part in attention.children():
        weight = getattr(part, "weight", None)
        # Compare the name of the class: this package does not import transformers.
        if type(part).__name__ == "Conv1D" and isinstance(weight, Tensor):
            d, width = weight.shape
            if width == 3 * d:
                return True
    return False


def wrong_slices(attention: SelfAttention) -> SelfAttention:
    """Return a copy of an attention in which the heads are cut from W_Q, W_K and W_V along the wrong axis, as
    in the published code.

    Let W_Q of shape (d, d) be the query part of the fused weight, which multiplies row tokens from the right.
    Head h then gets W_Q[hk:(h+1)k, :] in place of W_Q[:, hk:(h+1)k]ᵀ. Keys and values are cut in the same
    way. Masks, biases and output projection are unchanged. The published figure uses the worst tokens of this
    map, ``adversarial.two_cluster(wrong_slices(attention), n, R)``; the constant at these tokens should be
    measured on the attention itself.

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

    The formula is ‖V‖ √(R_A² r² (n + 1) + n), where R_A = max_i |A x_i| and r is the diameter of the set of
    tokens. The head has the scores ⟨A x_i + b, x_j⟩ and the values V x_j.

    The formula is not a bound on ‖D_X f‖, so the result is a plain number and not a bound. The matrix C_i A
    in the Jacobian depends on Aᵀ x_j, which R_A omits, and on the query bias, which the formula ignores. For
    A = 10 e₂e₁ᵀ, V = I and X = ((0, 1), (0, −1)) the formula gives √2, but ‖D_X f‖ is 10.1.
    ``bounds.theorem_c_3`` is a valid bound.

    Parameters
    ----------
    attention
        One head: a ``SelfAttention`` or a ``Head``.
    X
        Tokens of shape (n, d).

    Raises
    ------
    ArgumentError
        If there are several heads or rotary positions, or X has the wrong shape.
    NonFiniteError
        If an entry of X is NaN or infinite.

    References
    ----------
    Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, Theorem C.3, and the code published with it.

    """
    head = parameters_of(attention).one_head("c_3_as_coded")
    if not isinstance(X, Tensor) or X.ndim != 2 or X.shape[0] < 1 or X.shape[1] != head.d:
        got = f"shape {tuple(X.shape)}" if isinstance(X, Tensor) else type(X).__name__
        raise ArgumentError("X", expected=f"tokens of shape (n, {head.d})", got=got)
    if not bool(torch.isfinite(X).all()):
        raise NonFiniteError("X", expected="finite numbers", got="NaN or infinity")
    x = X.detach().to(dtype=torch.float64, device="cpu")
    largest = float(torch.linalg.vector_norm(x @ head.right.mT @ head.left.mT, dim=1).amax())
    r = float(torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").amax())
    return head.V_norm * math.hypot(largest * r * math.sqrt(len(x) + 1), math.sqrt(len(x)))
