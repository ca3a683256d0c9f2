"""Lower bounds on ‖D_X f‖ from the columns of the Jacobian that belong to the few most attended (heavy)
tokens.

X consists of heavy tokens z_1, …, z_c, once each and first, and of copies of one light token w. The blocks of
the Jacobian in the columns of the heavy and the rows of the light tokens are known in closed form
(documentation page "Worst inputs, and lower bounds", Lemma 1). Their norm is a lower bound on ‖D_X f‖ for any
number of heads and any biases, without a mask or with a causal one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from howsmooth.bounds.attention_parameters import Head, Parameters, log_spectral_norm
from howsmooth.bounds.worst_case_tokens import HeavyTokens
from howsmooth.rounding import gamma, up

__all__ = [
    "MOST_ROWS",
    "log_column_norm",
    "log_integer",
    "log_norm",
    "log_rank_one",
    "log_weights",
    "rounding_of_scores",
    "total_value",
]

# The causal constant does not decrease with n, so the bound for this many rows also holds for more tokens.
MOST_ROWS = 1 << 16


def log_column_norm(p: Parameters, n: int, points: HeavyTokens) -> float:
    """Return the log of the norm of the blocks of D_X f in the columns of the most attended (heavy) tokens
    and the rows of the other tokens.

    The norm of these blocks is a lower bound on ‖D_X f‖. With a causal mask the first row is included.
    """
    c, d = points.heavies.shape
    if n <= c:
        return -math.inf if p.masking != "causal" else log_norm(total_value(p))
    if p.masking == "causal":
        n = min(n, MOST_ROWS)
        log_m = torch.arange(1, n - c + 1, dtype=torch.float64).log()
    else:
        log_m = torch.tensor([log_integer(n - c)], dtype=torch.float64)
    heads = p.heads
    log_p, log_light = log_weights(heads, points.heavies, points.light, log_m)  # (rows, H, c), (rows, H)
    # With U_h = W_h V_h and the weights p of head h in a light row, the block of heavy token a in that row is
    # M_a = Σ_h p_a U_h + U_h(Σ_b p_a p_b (z_a − z_b) + p_a p_light (z_a − w)) y_hᵀ.
    # So it is a combination of fixed matrices with the coefficients p_a, p_a p_b and p_a p_light.
    pair = log_p[..., :, None] + log_p[..., None, :]
    coefficients = torch.cat([log_p[..., None], pair, (log_p + log_light[..., None])[..., None]], dim=-1)
    top = float(coefficients.max())
    if not math.isfinite(top):
        return -math.inf
    table = torch.exp(coefficients - top).flatten(1)  # (rows, H c (1 + c + 1))
    stacked = _same_gram(table).unflatten(1, (len(heads), c, c + 2))

    values = torch.stack([w @ head.V for w, head in zip(p.outputs, heads, strict=True)])  # (H, d_out, d)
    forms = _forms(heads, points.light)
    shifts = points.heavies[:, None, :] - torch.cat([points.heavies, points.light[None]])  # (c, c + 1, d)
    moved = torch.einsum("hod,abd->habo", values, shifts)
    blocks = torch.einsum("rha,hod->road", stacked[..., 0], values)
    blocks += torch.einsum("rhab,habo,hd->road", stacked[..., 1:], moved, forms)
    matrix = blocks.flatten(2).flatten(0, 1)  # (rows d_out, c d)
    log_rows = 0.0 if p.masking == "causal" else 0.5 * float(log_m[0])
    if p.masking == "causal" and top > -600:
        first = torch.zeros(values.shape[1], c * d, dtype=torch.float64)
        first[:, :d] = values.sum(0) * math.exp(-top)
        matrix = torch.cat([first, matrix])
    log = log_norm(matrix)
    # The relative error of a weight p is about (1 − p) times the error of the scores: none where p is 1.
    undecided = 1 - float(log_p.amax(dim=-1).min().exp())
    allowance = undecided * rounding_of_scores(heads, points) if undecided else 0.0
    return top + log_rows + log - allowance if math.isfinite(log) else -math.inf


def log_weights(
    heads: Sequence[Head], heavies: Tensor, light: Tensor, log_copies: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Return the logs of the weights with which a light token attends to each heavy token and to all light
    tokens. The heavy tokens are few and get most of the attention; the light token occurs many times.

    The first result is the weight of each heavy token (rows, H, c), the second the total weight of all light
    tokens (rows, H). ``log_copies`` is the logarithm of the number of light tokens that each row sees.
    """
    gaps = _forms(heads, light) @ (heavies - light).mT  # (H, c)
    log_m = torch.as_tensor(log_copies, dtype=torch.float64).reshape(-1, 1)  # (rows, 1)
    total = torch.logaddexp(torch.logsumexp(gaps, dim=1)[None], log_m)  # (rows, H)
    return gaps[None] - total[..., None], log_m - total


def _forms(heads: Sequence[Head], light: Tensor) -> Tensor:
    """Return for each head the vector A w + b of the light token w. Its inner products with the tokens are
    the scores of w.

    The vectors are the rows of a matrix (H, d).
    """
    return torch.stack([head.left @ (head.right @ light) + head.b for head in heads])


def _same_gram(table: Tensor) -> Tensor:
    """Compress a matrix to few rows, such that its Gram matrix changes little and never increases."""
    if len(table) == 1:
        return table
    factor = torch.linalg.qr(table, mode="r").R
    _, s, vh = torch.linalg.svd(factor, full_matrices=False)
    # Leaving out small singular values subtracts a positive semidefinite matrix: the bound remains valid.
    few: Tensor = (s[:, None] * vh)[s > 1e-13 * s[0]]
    return few


def rounding_of_scores(heads: Sequence[Head], points: HeavyTokens) -> float:
    """Bound the rounding errors of the differences between the scores of the most attended (heavy) tokens and
    the scores of the other tokens.
    """
    w = points.light.abs()
    sizes = [float((h.left.abs() @ (h.right.abs() @ w) + h.b.abs()).norm()) for h in heads]
    shift = float(torch.linalg.vector_norm(points.heavies - points.light, dim=1).max())
    terms = 2 * heads[0].d + heads[0].left.shape[1]
    allowance = up(gamma(terms + 4) * max(sizes) * shift)
    return allowance if math.isfinite(allowance) else math.inf


def log_rank_one(V: Tensor, a: float, x: Tensor, y: Tensor) -> float:
    """Return the log of the spectral norm of V(aI + x yᵀ) for a matrix V, a number a > 0 and vectors x and y.
    The log is correct even where the norm overflows.

    The result is −inf if x or y is not finite.
    """
    sizes = [max(float(torch.linalg.vector_norm(t)), 1e-300) for t in (x, y)]
    if not all(map(math.isfinite, sizes)):
        return -math.inf
    log_size = math.log(sizes[0]) + math.log(sizes[1])
    shift = max(math.log(a), log_size)
    matrix = math.exp(math.log(a) - shift) * V
    matrix = matrix + math.exp(log_size - shift) * torch.outer(V @ (x / sizes[0]), y / sizes[1])
    return shift + log_norm(matrix)


def log_norm(matrix: Tensor) -> float:
    """Return the logarithm of the spectral norm of a matrix, rounded down; −inf if it is zero or not finite.

    The rounding of the entries is that of a formula, for which statements make an allowance.
    """
    return log_spectral_norm(matrix, upper=False) if bool(matrix.isfinite().all()) else -math.inf


def total_value(p: Parameters) -> Tensor:
    """Return Σ_h W_h V_h, the sum over heads of output map times value matrix, (d_out, d)."""
    return torch.stack([w @ head.V for w, head in zip(p.outputs, p.heads, strict=True)]).sum(0)


def log_integer(n: int) -> float:
    """Return log n for an integer n >= 0 of any size, and −inf for n = 0."""
    return math.log(n) if n > 0 else -math.inf
