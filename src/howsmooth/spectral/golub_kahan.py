"""Golub–Kahan bidiagonalisation with full reorthogonalisation, batched, stopped by its own interval.

From a Gaussian start b on the input side, k steps give orthonormal V_k, U_k and an upper bidiagonal
B_k with J V_k = U_k B_k. Its largest singular value σ̂ is a lower limit of ‖J‖, and
:mod:`howsmooth.spectral.interval` gives the upper one. Each member of the batch stops at its own
step; what it returns does not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from howsmooth.errors import NonFiniteError
from howsmooth.spectral.interval import a_posteriori_upper, start_quantile
from howsmooth.spectral.operator import LinearOperator

__all__ = ["LeadingTriplet", "golub_kahan"]

_FIRST_CAPACITY = 16


@dataclass(frozen=True)
class LeadingTriplet:
    """The leading singular value of each member, its interval, and its directions.

    ``sigma``, ``lower`` and ``upper`` are float64; lower <= sigma <= upper. ``converged`` says that
    upper − lower <= rtol · sigma, ``broke_down`` that the Krylov space was exhausted. ``right`` and
    ``left`` are unit vectors in the input and output space (``left`` is zero where the operator is).
    """

    sigma: Float[Tensor, " batch"]
    lower: Float[Tensor, " batch"]
    upper: Float[Tensor, " batch"]
    converged: Bool[Tensor, " batch"]
    broke_down: Bool[Tensor, " batch"]
    steps: Int[Tensor, " batch"]
    right: Float[Tensor, "batch *in_shape"]
    left: Float[Tensor, "batch *out_shape"]


class _Basis:
    """Orthonormal rows (member, step, size) that grow by one a step."""

    def __init__(self, members: int, size: int, like: Tensor) -> None:
        self.rows = like.new_empty(members, min(_FIRST_CAPACITY, size + 1), size)
        self.count = 0

    def append(self, row: Tensor) -> None:
        members, capacity, size = self.rows.shape
        if self.count == capacity:
            grown = self.rows.new_empty(members, min(2 * capacity, size + 1), size)
            grown[:, :capacity] = self.rows
            self.rows = grown
        self.rows[:, self.count] = row
        self.count += 1

    def keep(self, members: Tensor) -> None:
        self.rows = self.rows[members]

    def orthogonalise(self, w: Tensor) -> Tensor:
        """Return w minus its projection on the basis, and once more where cancellation was felt."""
        if self.count == 0:
            return w
        rows = self.rows[:, : self.count]
        for _ in range(2):
            before = torch.linalg.vector_norm(w, dim=1)
            coefficients = torch.bmm(rows, w.unsqueeze(-1))
            w = torch.baddbmm(w.unsqueeze(1), coefficients.mT, rows, alpha=-1).squeeze(1)
            # Daniel, Gragg, Kaufman, Stewart (1976): a second pass pays only after a large loss.
            if bool((torch.linalg.vector_norm(w, dim=1) > 0.7 * before).all()):
                break
        return w

    def combine(self, member: int, weights: np.ndarray) -> Tensor:
        rows = self.rows[member, : len(weights)]
        return torch.as_tensor(weights, dtype=rows.dtype, device=rows.device) @ rows


def golub_kahan(
    operator: LinearOperator,
    start: Float[Tensor, "batch *in_shape"],
    *,
    rtol: float,
    confidence: float,
    max_iterations: int,
) -> LeadingTriplet:
    """Return the leading singular triplet of each member of ``operator``.

    Parameters
    ----------
    operator
        The batch of maps.
    start
        Gaussian vectors, drawn independently of the operator; nothing else keeps the interval.
    rtol
        A member stops when upper − lower <= rtol · σ̂.
    confidence
        Probability, over the start, with which each member's interval holds.
    max_iterations
        Steps at most; each is one product and one adjoint product.

    Raises
    ------
    NonFiniteError
        If a product is not finite, or rounding leaves it no digit.

    Notes
    -----
    The interval is widened on both sides by ``operator.rounding``, which is also the level below which
    a bidiagonal entry counts as zero. At a breakdown the Krylov space is exhausted. The entry that
    vanished is then replaced by the rounding level, which keeps the limit honest: what floating point
    cannot tell from zero, the interval does not take for zero.

    """
    slack = operator.rounding.numpy()
    if not (slack < 0.1).all():
        raise NonFiniteError(
            "f",
            expected=f"a Jacobian of which {operator.dtype} products keep a digit",
            got=f"a relative rounding of {slack.max():.1e}",
            remedy="The attention scores are too large for it; measure in float64 or at smaller tokens.",
        )
    quantile = start_quantile(operator.in_size, confidence)
    total = operator.batch
    steps_allowed = min(max_iterations, operator.in_size, operator.out_size + 1)

    sigma, upper = np.zeros(total), np.zeros(total)
    steps = np.zeros(total, dtype=np.int64)
    converged, broke_down = np.zeros(total, dtype=bool), np.zeros(total, dtype=bool)
    right = start.new_zeros(total, operator.in_size)
    left = start.new_zeros(total, operator.out_size)

    alphas = np.zeros((total, steps_allowed))
    betas = np.zeros((total, steps_allowed))
    active = np.arange(total)  # members still running, in the order of the rows below

    v = start.reshape(total, -1)
    v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
    v_basis = _Basis(total, operator.in_size, v)
    u_basis = _Basis(total, operator.out_size, v)
    u = beta = None

    for k in range(1, steps_allowed + 1):
        v_basis.append(v)
        w = operator.product(v.view(len(active), *operator.in_shape)).reshape(len(active), -1)
        if u is not None and beta is not None:
            w = w - beta[:, None] * u
        w = u_basis.orthogonalise(w)
        alpha = torch.linalg.vector_norm(w, dim=1)
        _check_finite(alpha)
        largest = np.maximum(alphas[active].max(axis=1), betas[active].max(axis=1))
        alpha = _zero_below(alpha, slack[active] * largest)
        u = _divide(w, alpha)
        u_basis.append(u)

        z = operator.adjoint_product(u.view(len(active), *operator.out_shape)).reshape(len(active), -1)
        z = v_basis.orthogonalise(z - alpha[:, None] * v)
        beta = torch.linalg.vector_norm(z, dim=1)
        _check_finite(beta)
        alphas[active, k - 1] = alpha.double().cpu().numpy()
        betas[active, k - 1] = beta.double().cpu().numpy()

        finished = np.zeros(len(active), dtype=bool)
        for row, member in enumerate(active):
            a, b = alphas[member, :k], betas[member, :k]
            complete = k == operator.in_size
            broke_down[member] = complete or a[-1] * b[-1] <= slack[member] * max(a.max(), b.max()) ** 2
            sigma[member], upper[member] = _limits(a, b, quantile, slack[member], complete=complete)
            lower = sigma[member] * (1 - slack[member])
            converged[member] = upper[member] - lower <= rtol * sigma[member]
            if converged[member] or broke_down[member] or k == steps_allowed:
                finished[row] = True
                steps[member] = k
                left_weights, _, right_weights = np.linalg.svd(_bidiagonal(a, b))
                right[member] = v_basis.combine(row, right_weights[0])
                left[member] = u_basis.combine(row, left_weights[:, 0])
        if finished.all():
            break
        v = _divide(z, beta)
        if finished.any():
            keep = torch.as_tensor(np.flatnonzero(~finished), device=v.device)
            active = active[~finished]
            operator = operator.select(keep)
            v, u, beta = v[keep], u[keep], beta[keep]
            v_basis.keep(keep)
            u_basis.keep(keep)

    return LeadingTriplet(
        sigma=torch.from_numpy(sigma),
        lower=torch.from_numpy(sigma * (1 - slack)),
        upper=torch.from_numpy(upper),
        converged=torch.from_numpy(converged),
        broke_down=torch.from_numpy(broke_down),
        steps=torch.from_numpy(steps),
        right=right.view(total, *operator.in_shape),
        left=left.view(total, *operator.out_shape),
    )


def _bidiagonal(alphas: np.ndarray, betas: np.ndarray) -> np.ndarray:
    return np.diag(alphas) + np.diag(betas[:-1], 1)


def _limits(
    alphas: np.ndarray, betas: np.ndarray, quantile: float, slack: float, *, complete: bool
) -> tuple[float, float]:
    """Return σ̂ and the a-posteriori upper limit, widened by rounding, of one member."""
    unit = max(alphas.max(), betas[:-1].max(initial=0.0))
    if unit == 0.0:
        return 0.0, 0.0
    singular = np.linalg.svd(_bidiagonal(alphas / unit, betas / unit), compute_uv=False)
    if complete:
        logs = -np.inf
    else:
        # No product α_j β_j of a running member is below the rounding level except the last.
        products = alphas * betas / unit**2
        logs = float(np.log(np.maximum(products, slack * float(singular[0]) ** 2)).sum())
    limit = a_posteriori_upper(singular**2, logs, quantile)
    return unit * float(singular[0]), unit * float(np.sqrt(limit)) * (1 + slack)


def _zero_below(values: Tensor, floor: np.ndarray) -> Tensor:
    threshold = torch.as_tensor(floor, dtype=values.dtype, device=values.device)
    return torch.where(values <= threshold, torch.zeros_like(values), values)


def _divide(vectors: Tensor, lengths: Tensor) -> Tensor:
    """Return vectors / lengths, and zero where the length is zero."""
    safe = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    return torch.where(lengths[:, None] > 0, vectors / safe[:, None], torch.zeros_like(vectors))


def _check_finite(norms: Tensor) -> None:
    if not bool(torch.isfinite(norms).all()):
        raise NonFiniteError(
            "f",
            expected="finite Jacobian products",
            got="NaN or infinity",
            remedy="Look for overflow: tokens or parameters too large for their dtype.",
        )
