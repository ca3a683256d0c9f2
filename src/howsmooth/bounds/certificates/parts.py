"""An upper bound on ‖D_X f‖ for any number of heads, by bounds on three parts of D_X f (Theorem N)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.certificates.eigenvalue_bounds import FORMED, Groups, dominated, sandwich
from howsmooth.bounds.certificates.rounded_attention import HeadsAt, row_blocks
from howsmooth.rounding import Enclosed, above, gamma, shrink, spectral_norms, up
from howsmooth.rounding.unproved_eigenvalue_estimates import largest_eigenpairs

__all__ = ["Weights", "averages", "by_parts", "diagonal", "moving_keys", "pair_weights", "search"]

# Numbers of Lanczos steps: from random vectors, from the vectors of the step before, for what is returned.
_FIRST_STEPS, _STEPS, _LAST_STEPS = 10, 5, 10

# The search multiplies q_j by this power of Φ_j/q_j. With the power 1 it may swing between two states.
_POWER = 0.8

# The search ends when a step makes ν² smaller by less than this fraction.
_PROGRESS = 0.005

# Floors of q, of the ratios a/b within a row, and of M (against underflow).
_SMALLEST_Q, _SMALLEST_RATIO, _SMALLEST_M = 1e-12, 1e-8, 2.0**-900

# Estimates are raised by this factor, because a failed proof costs one factorisation more.
_ABOVE = 1 + 5e-4


def by_parts(at: HeadsAt, iterations: int) -> Enclosed:
    """Bound the norm of the Jacobian by Theorem N, with weights from a search of ``iterations`` steps."""
    parts = (averages(at), moving_keys(at, search(at, iterations)), diagonal(at))
    upper, plain = (torch.stack(numbers).sum() for numbers in zip(*parts, strict=True))
    return Enclosed(above(upper, 2), plain)


# ---- the parts


def averages(at: HeadsAt) -> Enclosed:
    """Bound the norm of Σ_h P^h ⊗ W_h V_h, the Jacobian for attention weights P^h that are held fixed."""
    W, V, P = _outer(at), [head.V for head in at.heads], [head.P for head in at.heads]
    folded = spectral_norms(torch.cat([w @ v for w, v in zip(W, V, strict=True)], dim=1))
    error = gamma(len(V[0]) + 2) * torch.stack([w.norm() * v.norm() for w, v in zip(W, V, strict=True)]).sum()
    stacked = spectral_norms(torch.cat(P))
    found = Enclosed(above((folded.upper + up(error)) * stacked.upper, 2), folded.plain * stacked.plain)
    if len(P) == 1:
        return found
    each, outer = spectral_norms(torch.stack(P)), spectral_norms(torch.cat(at.W, dim=1))
    enlarged = torch.cat([v * p for v, p in zip(V, each.upper, strict=True)])
    values = spectral_norms(enlarged)
    upper = outer.upper * (values.upper + up(gamma(2) * enlarged.norm()))
    other = Enclosed(above(upper, 2), outer.plain * values.plain)
    return min(found, other, key=lambda bound: float(bound.upper))


def moving_keys(at: HeadsAt, weights: Weights) -> Enclosed:
    """Bound the part of the Jacobian that arises because the scores depend on the keys (Theorem N)."""
    q, n = weights.q, at.n
    relative = up(gamma(n + 8))
    sums = []
    for head, b in zip(at.heads, weights.b, strict=True):
        squares = torch.empty(n, *[head.v.shape[1]] * 2, dtype=q.dtype)
        for rows in row_blocks(n, head.v.numel()):
            w = head.v[None] - head.o[rows, None]
            squares[rows] = ((b[rows] * q)[..., None] * w).mT @ w
        sums.append(squares)
    c = sandwich(_outer(at), sums, [relative * _traces(s) for s in sums], weights.c)
    sums, slack = [], []
    for head, a in zip(at.heads, weights.a, strict=True):
        outer = (head.q[:, :, None] * head.q[:, None, :]).flatten(1)
        squares = ((a * c.upper[:, None]).mT @ outer).unflatten(1, (head.q.shape[1], -1))
        slack.append((relative + gamma(2 * head.q.shape[1] + 16)) * head.turn_norm**2 * _traces(squares))
        sums.append(squares if head.turns is None else head.turns.mT @ squares @ head.turns)
    phi = sandwich(_keys(at), sums, slack, weights.nu_square * q)
    return Enclosed(above((phi.upper / q).amax(), 8), (phi.plain / q).amax()).root()


def diagonal(at: HeadsAt) -> Enclosed:
    """Bound the part of the Jacobian that arises because the scores depend on the queries. It is block
    diagonal, and its norm is max_i ‖Σ_h W_h F_i^h Q_h‖.
    """
    Q = shrink(torch.cat([head.Q for head in at.heads]).mT).mT
    W, Qs = _outer(at), Q.chunk(len(at.heads))
    F = torch.stack([head.F for head in at.heads], dim=1)
    n, H, v, k = F.shape
    rows, columns = len(W[0]), Q.shape[1]
    sizes = torch.linalg.matrix_norm(F)
    if min(rows, columns) <= FORMED or not bool(at.outer.any()):
        scale = torch.stack([w.norm() * q.norm() for w, q in zip(W, Qs, strict=True)])
        error = up(gamma(len(Q) + v + 6) * (sizes * scale).sum(1))
        found = []
        for part in row_blocks(n, len(Q) * max(rows, columns)):
            left = torch.cat([w @ F[part, h] for h, w in enumerate(W)], dim=-1)
            norms = spectral_norms(left @ Q)
            found.append((norms.upper + error[part], norms.plain))
        return Enclosed(*(torch.cat(parts).amax() for parts in zip(*found, strict=True)))
    # The squared norm is the largest eigenvalue of W B_i Wᵀ with B_i = F_i Q Qᵀ F_iᵀ, F_i block-diagonal.
    q = torch.stack(Qs)
    gram = torch.einsum("hkd,gld->hkgl", q, q)

    def subtract(a: Tensor, groups: Groups) -> None:
        for matrix, group in zip(a, groups, strict=True):
            factors = F[list(group)]
            right = factors.permute(1, 0, 3, 2).flatten(1, 2)  # (heads, members key_dim, value_dim)
            for h in range(H):
                # The factorisation reads the lower triangle, so head h meets the heads up to h.
                left = (factors[:, h] @ gram[h, :, : h + 1].flatten(1)).unflatten(2, (h + 1, -1))
                block = left.permute(2, 1, 0, 3).flatten(2) @ right[: h + 1]
                matrix[h * v : (h + 1) * v, : (h + 1) * v] -= block.transpose(0, 1).flatten(1)

    # A sum over members and entries of a head is one inner product of at most n key_dim terms.
    size = (sizes.square() * q.square().sum((1, 2))).sum(1)
    slack = up(at.outer.square().sum() * up(gamma(columns + (n + 1) * k + 20) * size))
    proved = dominated(at.outer, subtract, _diagonal_guesses(at.outer, q, F), slack, largest=True)
    return Enclosed(proved.upper.amax(), proved.plain.amax()).root()


def _outer(at: HeadsAt) -> tuple[Float[Tensor, "rows value_dim"], ...]:
    return at.outer.chunk(len(at.heads), dim=1)


def _keys(at: HeadsAt) -> tuple[Float[Tensor, "rows key_dim"], ...]:
    return shrink(torch.cat([head.K for head in at.heads]).mT).chunk(len(at.heads), dim=1)


def _traces(squares: Float[Tensor, "n k k"]) -> Float[Tensor, " n"]:
    found: Tensor = squares.diagonal(dim1=-2, dim2=-1).sum(-1)
    return found


# ---- the weights


@dataclass(frozen=True, eq=False)
class Weights:
    """The positive weights in the bound of Theorem N: for tokens, and for pairs of tokens in each head.

    ``a`` and ``b`` have products of at least M², up to four roundings. ``c`` and ``nu_square`` estimate c_i
    and ν² for these weights.
    """

    q: Float[Tensor, " n"]
    a: Sequence[Float[Tensor, "n n"]]
    b: Sequence[Float[Tensor, "n n"]]
    c: Float[Tensor, " n"]
    nu_square: Float[Tensor, ""]


def search(at: HeadsAt, iterations: int) -> Weights:
    """Search for weights that make the bound of :func:`moving_keys` small.

    The weights of pairs are chosen by the sizes of the blocks. The iteration q_j ← q_j (Φ_j(q)/q_j)^0.8 ends
    when ν² hardly falls, and the best weights are taken. Eigenvalues are estimated by Lanczos steps, which
    start at the vectors of the step before and need products with P but no matrix for every row. They are in
    float32, which halves the time, with factors scaled to entries of at most 1.
    """
    a, b = pair_weights(at)
    H = len(at.heads)
    W, of_W = _scaled(_outer(at))
    K, of_K = _scaled(_keys(at))
    values, of_values = _scaled([*(head.v for head in at.heads), *(head.o for head in at.heads)])
    queries, of_queries = _scaled([head.q for head in at.heads])
    turns, of_turns = None, 1.0
    if at.heads[0].turns is not None:
        turns, of_turns = _scaled([head.turns for head in at.heads if head.turns is not None])
    v, o = values[:H], values[H:]
    a32, b32 = torch.stack(a).float(), torch.stack(b).float()
    generator = torch.Generator().manual_seed(0)
    of_rows = torch.randn(at.n, W.shape[1], generator=generator)
    of_columns = torch.randn(at.n, K.shape[1], generator=generator)

    def eigenvalues(q: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        nonlocal of_rows, of_columns
        rho = b32 * q

        def image(u: Tensor) -> Tensor:
            x = u @ W
            moved = rho * (x @ v.mT - (x * o).sum(-1, keepdim=True))
            return ((moved @ v - moved.sum(-1, keepdim=True) * o) @ W.mT).sum(0)

        c, of_rows = largest_eigenpairs(image, of_rows, steps)
        back = (a32 * c[:, None]).mT.contiguous()

        def image_of_keys(u: Tensor) -> Tensor:
            x = u @ K
            x = x if turns is None else _multiplied(x, turns)
            x = (back * (x @ queries.mT)) @ queries
            x = x if turns is None else _multiplied(x, turns.mT)
            return (x @ K.mT).sum(0)

        phi, of_columns = largest_eigenpairs(image_of_keys, of_columns, steps)
        return c, phi

    q = best = torch.ones(at.n)
    smallest = float("inf")
    for step in range(iterations + 1):
        _, phi = eigenvalues(q, _STEPS if step else _FIRST_STEPS)
        nu_square = float((phi / q).amax())
        if nu_square < smallest:
            best = q
        if not nu_square <= smallest * (1 - _PROGRESS):
            break
        smallest = nu_square
        q = q * (phi / q).pow(_POWER)
        largest = float(q.amax())
        q = (q / largest).clamp_min(_SMALLEST_Q) if 0 < largest < float("inf") else torch.ones_like(q)
    c, phi = eigenvalues(best, _LAST_STEPS)
    q, scale = best.double(), (of_values * of_W) ** 2
    top = (phi.double() / q).amax() * scale * (of_queries * of_turns * of_K) ** 2
    return Weights(q, a, b, c.double() * scale * _ABOVE, top * _ABOVE)


def pair_weights(at: HeadsAt) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of pairs of tokens in Theorem N: two matrices a and b (n, n) for each head.

    They are a_ij = M_ij r_ij and b_ij = M_ij / r_ij, with r_ij near |W w_ij| / |y_ij|. A factor of a whole
    row of all heads changes nothing, so the largest ratio of each row is one.
    """
    ratios = []
    for head, W in zip(at.heads, at.W, strict=True):
        turns = 1.0 if head.turns is None else torch.linalg.matrix_norm(head.turns)
        length = head.q.norm(dim=1, keepdim=True) * turns * head.K.norm()
        ratios.append(torch.cdist(head.o, head.v) * W.norm() / length.clamp_min(1e-300))
    ratio = torch.stack(ratios).clamp(1e-200, 1e200)
    ratio = (ratio / ratio.amax((0, 2), keepdim=True)).clamp_min(_SMALLEST_RATIO)
    M = torch.stack([head.moving for head in at.heads]).clamp_min(_SMALLEST_M)
    return list(M * ratio), list(M / ratio)


def _diagonal_guesses(
    outer: Float[Tensor, "rows m"], Q: Float[Tensor, "heads k d"], F: Float[Tensor, "n heads v k"]
) -> Float[Tensor, " n"]:
    """Estimate the squared norms of the diagonal blocks of :func:`diagonal` by Lanczos steps."""
    W, of_W = _scaled(outer.split(F.shape[2], dim=1))
    Q, of_Q = _scaled(list(Q))
    F, of_F = _scaled(list(F.transpose(0, 1)))

    def image(u: Tensor) -> Tensor:
        x = (_multiplied(u @ W, F.mT) @ Q).sum(0)
        return (_multiplied(x @ Q.mT, F) @ W.mT).sum(0)

    b = torch.randn(W.shape[1], generator=torch.Generator().manual_seed(1)).expand(F.shape[1], -1)
    return largest_eigenpairs(image, b, _STEPS)[0].double() * ((of_W * of_Q * of_F) ** 2 * _ABOVE)


def _scaled(parts: Sequence[Tensor]) -> tuple[Tensor, float]:
    size = max(float(t.abs().amax()) for t in parts) or 1.0
    return torch.stack([(t / size).float() for t in parts]), size


def _multiplied(x: Float[Tensor, "heads n k"], matrices: Float[Tensor, "heads n l k"]) -> Tensor:
    """Multiply each vector x by its own matrix M. PyTorch computes xᵀMᵀ in an eighth of the time of M x."""
    found: Tensor = (x[..., None, :] @ matrices.mT)[..., 0, :]
    return found
