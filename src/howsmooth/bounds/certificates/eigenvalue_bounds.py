"""Proved upper bounds on eigenvalues and spectral norms, verified by a Cholesky factorisation.

An eigenvalue routine only suggests a value. Proofs: documentation page "Certificates at given tokens",
section "Verified norms".
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.certificates.eigenvalue_estimates import largest_eigenvalue_estimates
from howsmooth.bounds.certificates.number_with_error_bound import TINY, Enclosed
from howsmooth.roundoff import U, gamma, up

__all__ = ["largest_eigenvalue", "nonnegative_norm", "norm", "shrink"]

_POWER_STEPS = 300
_SLOW = 1e-9


def largest_eigenvalue(
    g: Float[Tensor, "batch r r"],
    slack: Float[Tensor, " batch"],
    guess: Float[Tensor, " batch"] | None = None,
) -> Enclosed:
    """Return proved upper bounds on the largest eigenvalues of positive semidefinite matrices.

    ``g`` approximates these matrices G. ``slack`` bounds ‖E‖ for a symmetric E with E ≥ |g − G| entry by
    entry. ``g`` is overwritten, and only one triangle of it is read.

    t I − g is factorised. If the factorisation succeeds, then
    λ_max(g) ≤ t + γ_{r+1}/(1 − γ_{r+1}) · tr(t I − g) for any t (Rump, *Verification of positive
    definiteness*, BIT 46, 2006). The estimate ``guess`` is tried first for t, or else a computed eigenvalue.
    If a factorisation fails, t is raised.
    """
    rise = 1e-12 if guess is None else 1e-7
    t = (largest_eigenvalue_estimates(g).clamp_min(0) if guess is None else guess) * (1 + rise) + TINY
    own = g.diagonal(dim1=-2, dim2=-1).clone()
    shifted = g.neg_()
    m = g.shape[-1] + 2
    factor = up(torch.tensor(gamma(m) / (1 - gamma(m)) + 2 * U, dtype=t.dtype))
    plain, upper = torch.full_like(t, torch.inf), torch.full_like(t, torch.inf)
    waiting = torch.arange(len(t))
    while len(waiting):
        here = shifted if len(waiting) == len(t) else shifted[waiting]
        here.diagonal(dim1=-2, dim2=-1).copy_(t[waiting, None] - own[waiting])
        done = torch.linalg.cholesky_ex(here).info == 0
        proved = waiting[done]
        plain[proved] = t[proved]
        upper[proved] = t[proved] + factor * here.diagonal(dim1=-2, dim2=-1).sum(-1)[done]
        waiting = waiting[~done]
        t[waiting] = t[waiting] * (1 + rise) + TINY
        rise *= 4
    return Enclosed((upper + up(slack) + TINY) * (1 + 4 * U), plain)


def norm(b: Float[Tensor, "batch m r"]) -> Enclosed:
    """Return proved upper bounds on the spectral norms of matrices, whose entries are taken as exact."""
    b = b if b.shape[-1] <= b.shape[-2] else b.mT
    slack = gamma(b.shape[-2] + 1) * b.square().sum((-2, -1))
    return largest_eigenvalue(b.mT @ b, slack).root()


def nonnegative_norm(p: Float[Tensor, "n n"]) -> Enclosed:
    """Return a proved upper bound on the spectral norm of a matrix P with nonnegative entries.

    By Collatz and Wielandt, ‖P‖² ≤ max_j (PᵀPv)_j / v_j for every v > 0; power iteration finds v. All sums
    have nonnegative terms, so rounding errors are relative. If the iteration has not converged, the Gram
    matrix is verified by Cholesky instead.
    """
    n = p.shape[0]
    v = torch.ones(n, dtype=p.dtype)
    low = high = torch.tensor(0.0, dtype=p.dtype)
    for _ in range(_POWER_STEPS):
        image = p.T @ (p @ v)
        high = (image / v).amax()
        low = (v @ image) / (v @ v)
        if high <= low * (1 + 1e-13):
            break
        v = (image / image.amax()).clamp_min(1e-60)
    found = Enclosed(high * (1 + 2 * gamma(2 * n + 4)) + TINY, low).root()
    if found.upper > found.plain * (1 + _SLOW):
        proved = Enclosed(*(part[0] for part in norm(p[None])))
        if proved.upper < found.upper:
            return proved
    return found


def shrink(o: Float[Tensor, "rows m"]) -> Float[Tensor, "fewer m"]:
    """Replace a tall matrix O by a matrix T with fewer rows, such that ‖O B‖ <= ‖T B‖ for every matrix B.

    T has at most m rows, and TᵀT ≥ OᵀO. It is the Cholesky factor of OᵀO plus a shift that exceeds all
    rounding errors. The columns are first scaled by powers of two, so that the shift is small compared to
    each of them.
    """
    rows, m = o.shape
    if rows <= m:
        return o
    size = o.abs().amax(0)
    scale = torch.where(size > 0, torch.ldexp(torch.ones_like(size), -torch.frexp(size).exponent), 1.0)
    scaled = o * scale
    gram = scaled.mT @ scaled
    shift = 1.1 * (gamma(rows + 2) + gamma(m + 4)) * gram.diagonal().sum() + TINY
    for _ in range(8):
        shifted = gram.clone()
        shifted.diagonal().add_(shift)
        factor, info = torch.linalg.cholesky_ex(shifted, upper=True)
        if int(info) == 0:
            triangle: Tensor = factor / scale
            return triangle
        shift = shift * 4
    return o
