"""The maps of the published code: unmasked, with dropout, with heads of the wrong slices; and its bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from howsmooth.attention import Compose, Residual, SelfAttention, TokenMap
from howsmooth.attention.core import attention_probabilities, weighted_values
from howsmooth.attention.plain_scores import require_plain_scores
from howsmooth.attention.weighting import Weighting
from howsmooth.bounds.parameters import parameters_of
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.seeds import torch_seed

__all__ = [
    "DropoutAttention", "c_3_as_coded", "has_fused_weight", "unmasked", "with_dropout", "wrong_slices",
]  # fmt: skip


class DropoutAttention(TokenMap):
    """Self-attention in training mode: dropout of attention weights and of outputs, drawn at each call.

    Parameters
    ----------
    inner
        The attention.
    weights, outputs
        Probability with which an attention weight, and an entry of the output, becomes zero; what
        remains is scaled by 1/(1 - probability).
    seed
        Of the draws.

    """

    def __init__(self, inner: SelfAttention, *, weights: float, outputs: float, seed: int) -> None:
        require_plain_scores(inner, "the published maps", argument="inner")
        self.inner, self.weights, self.outputs = inner, weights, outputs
        self._seed = seed
        self._generator = torch.Generator().manual_seed(torch_seed(seed))

    @property
    def d(self) -> int:
        """Dimension of an input token."""
        return self.inner.d

    @property
    def d_out(self) -> int:
        """Dimension of an output token."""
        return self.inner.d_out

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the parameters."""
        return self.inner.dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.inner.device

    def describe(self) -> str:
        """Return one phrase that says what the map is."""
        return f"{self.inner.describe()}, dropout {self.weights:g} of weights and {self.outputs:g} of outputs"

    def check_length(self, n: int) -> None:
        """Raise ArgumentError if the attention cannot take ``n`` tokens."""
        self.inner.check_length(n)

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> DropoutAttention:
        """Return the same map with parameters of another dtype or on another device, its draws begun anew."""
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
        p = p * self._kept(p, self.weights)
        out = weighted_values(p, v).flatten(-4, -3).movedim(-3, -2).flatten(-2)
        if f.output is not None:
            out = out @ f.output.mT
            out = out if f.output_bias is None else out + f.output_bias
        return out * self._kept(out, self.outputs)

    def _kept(self, like: Tensor, probability: float) -> Tensor:
        """Draw zeros with this probability, and 1/(1 - probability) else."""
        # On the CPU, so that every device sees the same draws.
        kept = torch.rand(like.shape, generator=self._generator) >= probability
        return kept.to(device=self.device, dtype=self.dtype) / (1 - probability)


def with_dropout(f: TokenMap, *, weights: float, outputs: float, seed: int) -> TokenMap:
    """Return the map with dropout in its attention, see :class:`DropoutAttention`."""
    return _with_attention(
        f, lambda attention: DropoutAttention(attention, weights=weights, outputs=outputs, seed=seed)
    )


def unmasked(f: TokenMap) -> TokenMap:
    """Return the map with every mask taken out of its attention, as when a layer is called by itself."""
    require_plain_scores(f, "the published maps", argument="f")
    return _with_attention(f, lambda attention: attention._rebuilt(causal=False, window=None, mask=None))


def _with_attention(f: TokenMap, change: Callable[[SelfAttention], TokenMap]) -> TokenMap:
    """Exchange the attention within residuals and compositions; other maps stay."""
    if isinstance(f, SelfAttention):
        return change(f)
    if isinstance(f, Residual):
        return Residual(_with_attention(f.inner, change))
    if isinstance(f, Compose):
        return Compose(_with_attention(f.outer, change), _with_attention(f.inner, change))
    return f


def has_fused_weight(attention: nn.Module) -> bool:
    """Tell whether a model's attention module keeps queries, keys and values in one transposed weight.

    GPT-2 does, in one ``Conv1D`` weight of shape (d, 3d). Only then does the published code slice as
    :func:`wrong_slices` does.
    """
    for part in attention.children():
        weight = getattr(part, "weight", None)
        # By the class's name: transformers is imported in another room.
        if type(part).__name__ == "Conv1D" and isinstance(weight, Tensor):
            d, width = weight.shape
            if width == 3 * d:
                return True
    return False


def wrong_slices(attention: SelfAttention) -> SelfAttention:
    """Return the attention with the matrices that slicing along the wrong axis gives for its heads.

    With W_Q (d, d) the query part of the fused weight, as it multiplies token rows from the left, head h is
    given W_Q[hk:(h+1)k, :] in place of W_Q[:, hk:(h+1)k]ᵀ; keys and values alike. Masks, biases and output
    stay. Its worst-case tokens, ``adversarial.two_cluster(wrong_slices(attention), n, R)``, are those of the
    published figure; they are to be measured on the attention itself.

    Raises
    ------
    ArgumentError
        If heads are grouped, or have not d dimensions in all: only then do the slices have the right shape.

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
    """‖V‖ √(R_A² r² (n + 1) + n) with R_A = max_i |A x_i| and r the diameter of the tokens.

    This is no bound on ‖D_X f‖, and is returned as a bare number for that reason: C_i A depends on Aᵀ x_j,
    which R_A leaves out, and on the query bias, which is ignored. A = 10 e₂e₁ᵀ, V = I and
    X = ((0, 1), (0, −1)) give √2, where ‖D_X f‖ is 10.1. ``bounds.theorem_c_3`` is the valid form.

    Parameters
    ----------
    attention
        One head: a ``SelfAttention`` or a ``Head``.
    X
        Tokens (n, d).

    Raises
    ------
    ArgumentError
        If there are several heads, rotary positions, or X does not fit.
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
