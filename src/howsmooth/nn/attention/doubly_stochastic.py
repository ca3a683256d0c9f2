"""The doubly stochastic matrix diag(α) e^S diag(β), and its derivatives without those of the iterations.

P = diag(α) e^S diag(β) has rows and columns of sum one. For a change dS of the scores, dP is P ∘ Π dS with
Π the projection away from all matrices a_i + b_j, orthogonal in the inner product Σ_ij P_ij M_ij M'_ij: a
map that is its own adjoint. So forward and backward mode are one function, made of differentiable operations
on P, and derivatives of every order are those of the limit. Proof: docs/theory/enforce.md.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["doubly_stochastic"]

# Sinkhorn's iterations before Newton's method is tried: with small scores they are enough.
_PATIENCE = 8
# Lengths that a Newton step is cut to, of its largest entry.
_LENGTHS = (1.0, 5.0, 25.0)
# Sums of columns this near to one are the better measure: the objective no longer changes in its digits.
_NEAR = 1e-3
# Added to the diagonal of the systems, which are singular where P falls into blocks.
_RIDGE = 1e-15


def doubly_stochastic(
    scores: Float[Tensor, "*batch n n"], *, tolerance: float = 1e-10, max_iterations: int = 1000
) -> Float[Tensor, "*batch n n"]:
    """Return P = diag(α) e^S diag(β) in float64, rows of sum one, columns within the tolerance.

    Differentiable in every mode and order. Iterations stop for each matrix by itself, so that no result
    changes with its company, beyond rounding.

    Parameters
    ----------
    scores
        S, (..., n, n); −∞ where P shall be zero. The pattern of the others must be symmetric, with its
        diagonal, or no such P need exist.
    tolerance
        Largest |Σ_i P_ij − 1| over the columns j.
    max_iterations
        Number after which to refuse.

    Raises
    ------
    ArgumentError
        If the iterations have not converged.
    NonFiniteError
        If a score is NaN or +∞.

    """
    p: Tensor = _Scaling.apply(scores.double(), tolerance, max_iterations)  # type: ignore[no-untyped-call]
    return p


class _Scaling(torch.autograd.Function):
    """Scores to P."""

    @staticmethod
    def forward(scores: Tensor, tolerance: float, max_iterations: int) -> Tensor:
        return _scaled(scores, tolerance, max_iterations)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (p,) = ctx.saved_tensors
        return _projected(p, gradients[0]), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (p,) = ctx.saved_tensors
        return _projected(p, tangents[0])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], scores: Tensor, tolerance: float, max_iterations: int
    ) -> tuple[Tensor, int]:
        moved = scores.movedim(in_dims[0], 0)
        return _Scaling.apply(moved, tolerance, max_iterations), 0  # type: ignore[no-untyped-call]


def _projected(p: Float[Tensor, "*batch n n"], m: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Return P ∘ (M − a_i − b_j), with a and b such that rows and columns have the sum zero.

    a = r − P b for the row sums r of P ∘ M; (I − PᵀP) b = s − Pᵀ r for its column sums s.
    """
    weighted = p * m
    r, s = weighted.sum(dim=-1, keepdim=True), weighted.sum(dim=-2)[..., None]
    b = torch.linalg.solve(_system(p), s - p.mT @ r)
    projected: Tensor = weighted - p * (r - p @ b) - p * b.mT
    return projected


def _system(p: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Return diag(c) − PᵀP with c the sums of the columns, made invertible on its kernel.

    That is the constants; if P falls into blocks, those on each block, for which the ridge is there. What is
    solved for is free by the kernel, and P does not see it.
    """
    system: Tensor = torch.diag_embed(p.sum(dim=-2) + _RIDGE) - p.mT @ p + 1 / p.shape[-1]
    return system


def _scaled(
    scores: Float[Tensor, "*batch n n"], tolerance: float, max_iterations: int
) -> Float[Tensor, "*batch n n"]:
    """Return P, by the minimum of the convex Σ_i log Σ_j exp(S_ij + g_j) − Σ_j g_j.

    Its gradient is c − 1, with c the sums of the columns. A Sinkhorn iteration never raises it, so that the
    best of several steps, that one among them, converges.
    """
    if bool((scores.isnan() | (scores == torch.inf)).any()):
        raise NonFiniteError("X", expected="finite scores", got="NaN or infinity")
    g = torch.zeros_like(scores[..., :1, :])
    off = torch.full_like(g[..., :1], torch.inf)
    for step in range(max_iterations):
        log_p, columns, off = _normalised(scores, g)
        late = off > tolerance
        if not bool(late.any()):
            return log_p.exp()
        trials = [g - columns]
        if step >= _PATIENCE:
            trials += _newton(g, log_p.exp())
        g = torch.where(late, _best(scores, trials, near=off < _NEAR), g)
    raise ArgumentError(
        "max_iterations",
        expected=f"enough for columns that sum to one within {tolerance:g}",
        got=f"{max_iterations}, after which a column is off by {float(off.max()):.2g}",
        remedy="The bound holds for the limit only. Give more iterations, a larger tolerance, or smaller "
        "weights: the number grows with the scores.",
    )


def _newton(g: Tensor, p: Tensor) -> list[Tensor]:
    """Return Newton steps of several lengths: far from the limit a whole one may go astray."""
    step = torch.linalg.solve(_system(p), (p.sum(dim=-2) - 1)[..., None]).mT
    largest = step.abs().amax(dim=-1, keepdim=True)
    return [g - step, *(g - step * (length / largest).clamp(max=1) for length in _LENGTHS)]


def _best(scores: Tensor, trials: list[Tensor], near: Tensor) -> Tensor:
    """Return, for each matrix, the trial of least objective; near the limit, of sums nearest to one."""
    if len(trials) == 1:
        return trials[0]
    ranks = []
    for g in trials:
        rows = torch.logsumexp(scores + g, dim=-1).sum(dim=-1)
        objective = rows[..., None, None] - g.sum(dim=-1, keepdim=True)
        rank = torch.where(near, _normalised(scores, g)[2], objective)
        ranks.append(rank.nan_to_num(nan=torch.inf))
    choice = torch.stack(ranks).argmin(dim=0, keepdim=True)
    stacked = torch.stack(trials)
    return stacked.gather(0, choice.expand(1, *stacked.shape[1:]))[0]


def _normalised(scores: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log P with rows of sum one, the logs of its columns' sums, and how far these are from one."""
    log_p = torch.log_softmax(scores + g, dim=-1)
    columns = torch.logsumexp(log_p, dim=-2, keepdim=True)
    return log_p, columns, torch.expm1(columns).abs().amax(dim=-1, keepdim=True)
