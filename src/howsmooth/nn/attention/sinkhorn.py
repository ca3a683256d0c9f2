"""Sinkhorn attention (Sander et al., 2022), whose attention weights are doubly stochastic.

For scores S, the attention weights are P = diag(α) e^S diag(β), with rows and columns of sum one. If the
scores change by dS, then P changes by P ∘ Π dS, where Π is the projection onto the orthogonal complement of
all matrices a_i + b_j in the inner product Σ_ij P_ij M_ij M'_ij. This map is its own adjoint, so forward and
backward mode are one function of P, with derivatives of every order. Proof: documentation page "Enforce:
layers with a constant that is proved", section "Sinkhorn attention with several heads".
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from howsmooth.attention import SinkhornAttention as SinkhornMap
from howsmooth.attention import TokenMap
from howsmooth.bounds.differentiable_upper_bounds import sinkhorn_layer
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.errors import ArgumentError, NonFiniteError, check_number, check_whole
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.head_weights import Weights, scaled_weights
from howsmooth.nn.checks import refuse_where

__all__ = ["SinkhornAttention", "doubly_stochastic"]

_PATIENCE = 8  # Sinkhorn iterations before Newton steps are tried; for small scores they suffice
# Newton steps are also tried with their largest entry cut to these values.
_LENGTHS = (1.0, 5.0, 25.0)
# When the column sums are this close to one, trials are compared by their column sums, because the objective
# no longer changes within its digits.
_NEAR = 1e-3
# Added to the diagonal of the linear systems, which are singular if P is block diagonal.
_RIDGE = 1e-15


class SinkhornAttention(LipschitzAttention):
    """Sinkhorn self-attention, whose attention weights sum to one in every row and every column.

    The scores are those of softmax attention. The weights are the limit of Sinkhorn's iterations, computed in
    float64 up to a tolerance, and derivatives solve n × n systems (Sander, Ablin, Blondel, Peyré,
    *Sinkformers: Transformers with Doubly Stochastic Attention*, AISTATS 2022). The constant on a ball does
    not depend on n (:func:`howsmooth.bounds.sinkhorn` for one head). It holds for the limit only, so a call
    raises ArgumentError if the iteration does not converge.

    Masks must be symmetric, and each token must see itself. "any" also permits padding, and "additive" any
    finite numbers. Tokens that are hidden from all others, such as padding, see only one another, so the rows
    and columns of the other tokens sum to one among themselves. A causal mask is not supported, because the
    identity is the only doubly stochastic matrix with its pattern.

    ``tolerance`` is the largest allowed |Σ_i P_ij − 1| over the columns j, and ``max_iterations`` the number
    of iterations after which the layer raises an error; other parameters are those of
    :class:`LipschitzAttention`.
    """

    masks = ("none", "fixed", "any", "additive")
    _mask_remedy = "A triangular doubly stochastic matrix is the identity."
    _bound_name = "sinkhorn_layer"
    _phrase = "Sinkhorn attention"
    _of_bound: ClassVar[tuple[str, ...]] = ("tolerance", "max_iterations")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        tolerance: float = 1e-9,
        max_iterations: int = 1000,
        **rest: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **rest)
        expected = "a number from 1e-13 up to 1"
        self.tolerance = check_number("tolerance", tolerance, expected, lambda t: 1e-13 <= t < 1)
        self.max_iterations = check_whole("max_iterations", max_iterations)
        if self.masking.hidden is not None:
            _check_pattern(~self.masking.hidden, "mask")

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Weights
    ) -> Tensor:
        scores = self._scores(q.double(), k.double(), weights)
        if added is not None:
            scores = scores + _closed(added.double())
        p = doubly_stochastic(scores, tolerance=self.tolerance, max_iterations=self.max_iterations)
        return p.to(v.dtype)

    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        return sinkhorn_layer(self._parts(weights), radius, scale=1 / math.sqrt(self.head_dim))

    def _map(self, weights: Weights, scale: float) -> TokenMap:
        if self.masking.hidden is not None:
            return super()._map(weights, scale)
        parts = self._parts(scaled_weights(weights, scale))
        return parts.as_map(SinkhornMap, tolerance=self.tolerance, max_iterations=self.max_iterations)


def _closed(added: Tensor) -> Tensor:
    """Let the tokens that a mask hides from all queries, such as padding, see one another and no others."""
    n = added.shape[-1]
    added = added.expand(*added.shape[:-2], n, n)
    seen = added > -math.inf
    # A token is absent if no query sees it. Present and absent tokens must not see each other, since both
    # groups need doubly stochastic matrices of their own.
    absent = ~seen.any(dim=-2)
    both = absent[..., :, None] & absent[..., None, :]
    one = absent[..., :, None] ^ absent[..., None, :]
    _check_pattern((seen & ~one) | both, "attn_mask")
    return added.masked_fill(one, -math.inf).masked_fill(both, 0.0)


def _check_pattern(seen: Tensor, name: str) -> None:
    expected = "a symmetric mask in which each token sees itself, apart from padding"
    remedy = "Other masks may have no doubly stochastic matrix; a triangular mask has only the identity."
    symmetric = (seen == seen.mT) & seen.diagonal(dim1=-2, dim2=-1)[..., None]
    refuse_where(~symmetric, name, expected, "another mask", remedy)


def doubly_stochastic(scores: Tensor, *, tolerance: float = 1e-10, max_iterations: int = 1000) -> Tensor:
    """Return the doubly stochastic matrix P = diag(α) e^S diag(β) in float64, for scores S (..., n, n).

    Scores are −∞ where P is to be zero. The pattern of the others must be symmetric and include the diagonal;
    otherwise P may not exist. Rows sum to one up to rounding, and columns up to ``tolerance``. The iteration
    stops for each matrix separately, so a result does not depend on the rest of the batch, up to rounding.
    ArgumentError is raised if it has not converged, and NonFiniteError if a score is NaN or +∞.
    """
    if torch.compiler.is_compiling():  # torch.compile records no autograd function with a forward mode
        recorded: Tensor = _scaled(scores.double(), tolerance, max_iterations)
        return recorded
    p: Tensor = _Scaling.apply(scores.double(), tolerance, max_iterations)  # type: ignore[no-untyped-call]
    return p


class _Scaling(torch.autograd.Function):
    """The doubly stochastic matrix P of given scores, with derivatives that are computed from P alone."""

    @staticmethod
    def forward(scores: Tensor, tolerance: float, max_iterations: int) -> Tensor:
        p: Tensor = _scaled(scores, tolerance, max_iterations)
        return p

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)
        if not torch.compiler.is_compiling():
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
        # The batch axis of vmap becomes an ordinary leading axis.
        moved = scores.movedim(in_dims[0], 0)
        return _Scaling.apply(moved, tolerance, max_iterations), 0  # type: ignore[no-untyped-call]


def _projected(p: Tensor, m: Tensor) -> Tensor:
    """Return the derivative of P along a change M of the scores.

    It is P ∘ (M − a_i − b_j), and its rows and columns sum to zero. With the row sums r and the column sums s
    of P ∘ M, a = r − P b and (I − PᵀP) b = s − Pᵀ r.
    """
    weighted = p * m
    r, s = weighted.sum(dim=-1, keepdim=True), weighted.sum(dim=-2)[..., None]
    b = torch.linalg.solve(_system(p), s - p.mT @ r)
    projected: Tensor = weighted - p * (r - p @ b) - p * b.mT
    return projected


def _system(p: Tensor) -> Tensor:
    """Return diag(c) − PᵀP, made invertible, for a nearly doubly stochastic matrix P with column sums c.

    Its kernel consists of the constant vectors or, if P is block diagonal, of the vectors constant on each
    block. Adding 1/n to all entries removes the constants, and the ridge handles the blocks. A kernel vector
    in a solution does not change what is computed from it.
    """
    system: Tensor = torch.diag_embed(p.sum(dim=-2) + _RIDGE) - p.mT @ p + 1 / p.shape[-1]
    return system


# An operator of its own: the number of iterations depends on the scores, so no graph can hold them.
@torch.library.custom_op("howsmooth::doubly_stochastic", mutates_args=())
def _scaled(scores: Tensor, tolerance: float, max_iterations: int) -> Tensor:
    """Compute the doubly stochastic matrix for scores S by minimising a convex function of g = log β.

    The function is Σ_i log Σ_j exp(S_ij + g_j) − Σ_j g_j. Its gradient is c − 1, where c are the column sums.
    A Sinkhorn iteration never increases it, so the best of several steps with the Sinkhorn step converges.
    """
    if bool((scores.isnan() | (scores == torch.inf)).any()):
        raise NonFiniteError("X", expected="finite scores", got="NaN or infinity")
    g = torch.zeros_like(scores[..., :1, :])
    off = torch.full_like(g[..., :1], torch.inf)
    for step in range(max_iterations):
        log_p, columns, off = _normalised(scores, g)
        # Matrices that have converged are not changed any more.
        late = off > tolerance
        if not bool(late.any()):
            return log_p.exp()
        trials = [g - columns]  # the Sinkhorn step
        if step >= _PATIENCE:
            # The Hessian of the objective is diag(c) − PᵀP and its gradient is c − 1. A full Newton step may
            # overshoot.
            p = log_p.exp()
            newton = torch.linalg.solve(_system(p), (p.sum(dim=-2) - 1)[..., None]).mT
            largest = newton.abs().amax(dim=-1, keepdim=True)
            trials += [g - newton, *(g - newton * (length / largest).clamp(max=1) for length in _LENGTHS)]
        g = torch.where(late, _best(scores, trials, near=off < _NEAR), g)
    expected = f"enough for columns that sum to one within {tolerance:g}"
    got = f"{max_iterations}, after which a column is off by {float(off.max()):.2g}"
    remedy = (
        "The bound holds for the limit only. Give more iterations, a larger tolerance, or smaller weights: "
        "the number grows with the scores."
    )
    raise ArgumentError("max_iterations", expected=expected, got=got, remedy=remedy)


@_scaled.register_fake
def _shape(scores: Tensor, tolerance: float, max_iterations: int) -> Tensor:
    return torch.empty_like(scores)


_scaled.register_autograd(_Scaling.backward, setup_context=_Scaling.setup_context)


def _best(scores: Tensor, trials: list[Tensor], near: Tensor) -> Tensor:
    """Return the trial g of the lowest objective or, where ``near``, with column sums closest to one."""
    if len(trials) == 1:
        return trials[0]
    ranks = []
    for g in trials:
        rows = torch.logsumexp(scores + g, dim=-1).sum(dim=-1)
        objective = rows[..., None, None] - g.sum(dim=-1, keepdim=True)
        # Smaller is better; trials that overflowed become NaN and rank last.
        rank = torch.where(near, _normalised(scores, g)[2], objective)
        ranks.append(rank.nan_to_num(nan=torch.inf))
    choice = torch.stack(ranks).argmin(dim=0, keepdim=True)
    stacked = torch.stack(trials)
    return stacked.gather(0, choice.expand(1, *stacked.shape[1:]))[0]


def _normalised(scores: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log P with rows of sum one, the logs of its column sums, and the largest violation."""
    log_p = torch.log_softmax(scores + g, dim=-1)
    columns = torch.logsumexp(log_p, dim=-2, keepdim=True)
    return log_p, columns, torch.expm1(columns).abs().amax(dim=-1, keepdim=True)
