"""Upper bounds of spectral norms by powers of Gram matrices, in batches."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.radius.pairs import Pairs

__all__ = ["each_form_norm", "form_norm", "largest_eigenvalue", "spectral_norm", "weighted_norm"]

_SQUARINGS = 4
_BLOCKWISE_FROM = 600
_CHUNK = 256


def largest_eigenvalue(
    gram: Float[Tensor, "*batch r r"], squarings: int = _SQUARINGS
) -> Float[Tensor, "*batch"]:
    """Return upper bounds of the largest eigenvalues of positive semidefinite matrices.

    The bound is (Σ λ³²)^(1/32) = ‖G¹⁶‖_F^(1/16), at most r^(1/32) times too large.
    """
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    power = gram / torch.where(size > 0, size, 1.0)
    for _ in range(squarings):
        power = power @ power
    found = torch.linalg.vector_norm(power, dim=(-2, -1))
    bound: Tensor = found ** (0.5**squarings) * size[..., 0, 0]
    return bound


def spectral_norm(matrices: Float[Tensor, "*batch m r"]) -> Float[Tensor, "*batch"]:
    """Return upper bounds of spectral norms, at most r^(1/64) times too large."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    gram = matrices @ matrices.mT if wide else matrices.mT @ matrices
    return largest_eigenvalue(gram).clamp_min(0).sqrt()


def weighted_norm(
    weights: Float[Tensor, "heads rows n"], changes: Float[Tensor, "heads n e k"]
) -> Float[Tensor, "heads rows"]:
    """Bound sup over |δ| ≤ 1 of (Σ_j w_ij |C_j δ|²)^½ for each row i of nonnegative weights.

    For few columns the k × k matrix Σ_j w_ij C_jᵀC_j is formed. For many, the n × n matrix of the norms of
    the blocks √(w_ij w_il) C_j C_lᵀ takes its place: its largest eigenvalue is not smaller.
    """
    heads, n, _, k = changes.shape
    if k <= _BLOCKWISE_FROM:
        squares = changes.mT @ changes
        gram = torch.einsum("hij,hjkl->hikl", weights, squares)
        return largest_eigenvalue(gram).clamp_min(0).sqrt()
    blocks = torch.empty(heads, n, n, dtype=changes.dtype)
    for j in range(n):
        blocks[:, j] = spectral_norm(changes[:, j, None] @ changes.mT)
    root = weights.sqrt()
    return largest_eigenvalue(root[..., None] * blocks[:, None] * root[..., None, :]).clamp_min(0).sqrt()


def form_norm(forms: Float[Tensor, "*batch m p"], pairs: Pairs) -> Float[Tensor, "*batch"]:
    """Bound the length of (δᵀ Q_1 δ, ..., δᵀ Q_m δ) for |δ| ≤ 1.

    Each quadratic form Q_i is given as a vector over pairs of indices (:class:`Pairs`). The vector of δδᵀ has
    norm 1, and its trace part has norm 1/√k: both are used, and the smaller bound is taken.
    """
    trace = forms[..., pairs.i == pairs.j].sum(-1)
    wide = forms.shape[-2] <= forms.shape[-1]
    gram = forms @ forms.mT if wide else forms.mT @ forms
    whole = largest_eigenvalue(gram).clamp_min(0).sqrt()
    if not wide:
        return whole
    k = pairs.k
    rest = gram - trace[..., None] * trace[..., None, :] / k
    apart = largest_eigenvalue(rest).clamp_min(0).sqrt() * (1 - 1 / k) ** 0.5
    return torch.minimum(whole, apart + torch.linalg.vector_norm(trace, dim=-1) / k)


def each_form_norm(forms: Float[Tensor, "*batch p"], pairs: Pairs) -> Float[Tensor, "*batch"]:
    """Bound |δᵀ Q δ| for |δ| ≤ 1 and each quadratic form by itself: the spectral norm of Q."""
    flat = forms.reshape(-1, forms.shape[-1])
    found = []
    for chunk in flat.split(_CHUNK):
        matrices = pairs.matrices(chunk)
        found.append(largest_eigenvalue(matrices @ matrices, squarings=2).clamp_min(0).sqrt())
    return torch.cat(found).reshape(forms.shape[:-1])
