"""Upper bounds on the spectral norms of batches of matrices, by powers of Gram matrices, rounded up.

A measured matrix is bounded by its computed numbers and the bound on its rounding error.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.radius.packed_quadratic_forms import Pairs
from howsmooth.rounding import STEP, gamma, largest_eigenvalues_by_squaring, spectral_norms_above
from howsmooth.rounding.rounded_tensor import settled

__all__ = ["each_form_norm", "form_norm", "spectral_norm", "weighted_norm"]

_SQUARINGS = 4
_BLOCKWISE_FROM = 600
_CHUNK = 256


def spectral_norm(matrices: Float[Tensor, "*batch m r"]) -> Float[Tensor, "*batch"]:
    """Return upper bounds on spectral norms, at most r^(1/64) times too large."""
    value, error = settled(matrices)
    return spectral_norms_above(value, _SQUARINGS) + error


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def weighted_norm(
    weights: Float[Tensor, "heads rows n"], changes: Float[Tensor, "heads n e k"]
) -> Float[Tensor, "heads rows"]:
    """Bound √(Σ_j w_ij |C_j δ|²) over all |δ| ≤ 1, for given matrices C_j and each row i of nonnegative
    weights w_ij.

    For few columns the k × k matrix Σ_j w_ij C_jᵀC_j is formed, or the matrix of the n × n blocks
    √(w_ij w_il) C_j C_lᵀ, whichever is smaller. For many, the norms of the blocks take their place: the
    largest eigenvalue is not smaller then.
    """
    heads, n, e, k = changes.shape
    if k <= _BLOCKWISE_FROM:
        value, error = settled(changes)
        if n * e < k:
            rows, root = value.flatten(1, 2), weights.sqrt().repeat_interleave(e, 2)
            gram = root[..., None] * (rows @ rows.mT)[:, None] * root[..., None, :]
        else:
            gram = torch.einsum("hij,hjkl->hikl", weights, value.mT @ value)
        slack = gamma(max(n + e, k) + 8) * _trace(gram)
        apart = error * weights.amax(2).sqrt()
        return largest_eigenvalues_by_squaring(gram, slack=slack).sqrt() * STEP + apart * STEP
    blocks = weights.new_empty(heads, n, n)
    for j in range(n):
        blocks[:, j] = spectral_norm(changes[:, j, None] @ changes.mT)
    root = weights.sqrt()
    whole = root[..., None] * blocks[:, None] * root[..., None, :] * STEP
    return largest_eigenvalues_by_squaring(whole).sqrt() * STEP


def form_norm(forms: Float[Tensor, "*batch m p"], pairs: Pairs) -> Float[Tensor, "*batch"]:
    """Bound the norm of the vector (δᵀ Q_1 δ, ..., δᵀ Q_m δ) over all |δ| ≤ 1, for quadratic forms Q_i.

    Each quadratic form Q_i is given as a vector over pairs of indices (:class:`Pairs`). The vector of δδᵀ has
    norm 1, and its trace part has norm 1/√k: both are used, and the smaller bound is taken.
    """
    value, error = settled(forms)
    trace = value[..., pairs.i == pairs.j].sum(-1)
    wide = forms.shape[-2] <= forms.shape[-1]
    gram = value @ value.mT if wide else value.mT @ value
    k = pairs.k
    slack = gamma(max(forms.shape[-2:]) + 4 * k + 8) * _trace(gram)
    whole = largest_eigenvalues_by_squaring(gram, slack=slack).sqrt()
    if not wide:
        return whole * STEP + error
    rest = gram - trace[..., None] * trace[..., None, :] / k
    apart = largest_eigenvalues_by_squaring(rest, slack=slack).sqrt() * (1 - 1 / k) ** 0.5
    split = torch.linalg.vector_norm(trace, dim=-1) / k + gamma(k) * _trace(gram).sqrt()
    return torch.minimum(whole, apart + split) * STEP + error


def each_form_norm(forms: Float[Tensor, "*batch p"], pairs: Pairs) -> Float[Tensor, "*batch"]:
    """Bound the spectral norm of each quadratic form Q, which is the maximum of |δᵀ Q δ| over |δ| ≤ 1."""
    value, error = settled(forms)
    flat = value.reshape(-1, forms.shape[-1])
    found = []
    for chunk in flat.split(_CHUNK):
        matrices = pairs.matrices(chunk)
        gram = matrices @ matrices
        slack = gamma(pairs.k + 16) * _trace(gram)
        found.append(largest_eigenvalues_by_squaring(gram, squarings=2, slack=slack).sqrt())
    return torch.cat(found).reshape(forms.shape[:-1]) * STEP + error
