"""Measurement of the local Lipschitz constants of all heads of one attention layer at one sequence."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import SelfAttention, TokenMap
from howsmooth.batching import footprint
from howsmooth.errors import ArgumentError
from howsmooth.jacobian.closed_form import in_double
from howsmooth.jacobian.heads import HeadsJacobian, heads_jacobians
from howsmooth.lipschitz.arguments import check_arguments
from howsmooth.lipschitz.local import local_lipschitz
from howsmooth.lipschitz.mixed_precision import check_in_float64
from howsmooth.lipschitz.singular_value_solver import Solver, independent_seeds, member_seeds
from howsmooth.lipschitz_estimate import LipschitzEstimate
from howsmooth.memory import memory_budget
from howsmooth.spectral import LinearOperator

__all__ = ["head_lipschitz"]

# Krylov vectors that a head needs in most measurements, for the choice of how many heads form a batch.
_EXPECTED_STEPS = 32
# Float64 tensors (n, d) of a head that the check in float64 holds at once, with the head's two directions.
_VERDICT_VECTORS = 6


def head_lipschitz(
    attention: TokenMap,
    x: Tensor,
    *,
    rtol: float = 1e-4,
    confidence: float = 0.999,
    max_iterations: int = 200,
    seed: int = 0,
    memory: int | None = None,
) -> LipschitzEstimate:
    """Measure the local Lipschitz constant ‖D_X f_h‖₂ of each head f_h of an attention layer.

    It replaces one call of :func:`howsmooth.local_lipschitz` for each ``attention.head(h)``, with intervals
    of the same kind, and takes about as long as one call for the whole layer. A head depends on its tokens
    only through its queries, keys and values, so float32 products have that many coordinates. The check in
    float64 is over the tokens themselves.

    Parameters
    ----------
    attention
        A layer whose heads can be taken alone: a :class:`~howsmooth.attention.SelfAttention` without a norm
        layer over all heads, or a :class:`~howsmooth.attention.StagedAttention` of one softmax.
    x
        The tokens (n, d) of one sequence, float32 or float64.
    rtol, confidence, max_iterations, memory
        As for :func:`howsmooth.local_lipschitz`. Where the probabilities of a head do not fit, and from
        1,024 tokens on, heads are measured one by one.
    seed
        Seed of the random starts; head h uses its own stream h.

    Returns
    -------
    LipschitzEstimate
        With one member a head: ``value`` has shape (heads,), the directions (heads, n, d) and (heads, n,
        value_dim).

    Raises
    ------
    ArgumentError
        If an argument does not fit, or the heads cannot be taken alone; the message names the argument.
    NonFiniteError
        If ``x`` or a product is not finite.

    """
    if not hasattr(attention, "heads") or not hasattr(attention, "head"):
        raise ArgumentError("attention", expected="attention with heads", got=type(attention).__name__)
    check_arguments(attention, x, rtol, confidence, max_iterations)
    if x.ndim != 2:
        raise ArgumentError("x", expected="the tokens (n, d) of one sequence", got=f"shape {tuple(x.shape)}")
    if not 0 <= seed < 2**64:
        raise ArgumentError("seed", expected="an integer from 0 to 2**64 - 1", got=repr(seed))
    x, n = x.detach(), x.shape[0]
    seeds = independent_seeds(member_seeds(seed, attention.heads), [x] * attention.heads)
    solver = Solver(rtol, confidence, max_iterations, seeds, [n] * attention.heads)
    budget = memory_budget(memory, x.device)
    first = attention.head(0)
    one = footprint(first, (n, attention.d), dtype=x.dtype, device=x.device, memory=budget)
    if one.streamed or not isinstance(attention, SelfAttention):
        parts = [_alone(attention.head(h), x, h, solver, memory) for h in range(attention.heads)]
    else:
        most = max(1, budget // (one.size + _vector_bytes(first, x)))
        double = in_double(attention)
        assert isinstance(double, SelfAttention)
        parts = [_together(double, x, heads, solver) for heads in torch.arange(attention.heads).split(most)]
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return LipschitzEstimate(
        **found,
        confidence=confidence,
        method="closed form",
        scope=f"each head of {attention.describe()}",
        rtol=rtol,
        seed=seed,
    )


def _together(f: SelfAttention, x: Tensor, heads: Tensor, solver: Solver) -> dict[str, Tensor]:
    """Measure the local Lipschitz constants of several heads of an attention layer as one batch.

    Return the fields of the estimate by name. The layer is float64.
    """
    members = heads.tolist()
    dtypes = (torch.float64,) if x.dtype == torch.float64 else (x.dtype, torch.float64)
    jacobians = heads_jacobians(f, x.double(), members, dtypes)
    exact = jacobians[torch.float64]
    if x.dtype == torch.float64:
        # Krylov vectors stay in the coordinates of the tokens, for which the rounding is proved.
        (found,) = solver.together([exact], [members])
    else:
        reduced, bases = jacobians[x.dtype].reduced()
        (found,) = solver.together([reduced], [members], judged=True)
        assert found.gram is not None
        found = replace(found, right=found.right @ bases.mT, gram=found.gram @ bases.mT)
        found = check_in_float64(_JacobiansInTokens(reduced, bases), exact, found, members, solver)
    return {
        "value": found.sigma,
        "lower": found.lower,
        "upper": found.upper,
        "converged": found.converged,
        "iterations": found.steps,
        "input_direction": found.right,
        "output_direction": found.left,
    }


def _alone(head: TokenMap, x: Tensor, h: int, solver: Solver, memory: int | None) -> dict[str, Tensor]:
    """Measure the local Lipschitz constant of one head of an attention layer.

    Return the fields of the estimate by name.
    """
    found = local_lipschitz(
        head,
        x,
        rtol=solver.rtol,
        confidence=solver.confidence,
        max_iterations=solver.max_iterations,
        seed=solver.seeds[h],
        memory=memory,
    )
    names = ("value", "lower", "upper", "converged", "iterations", "input_direction", "output_direction")
    return {name: getattr(found, name)[None] for name in names}


def _vector_bytes(head: TokenMap, x: Tensor) -> int:
    """Return the number of bytes of all vectors in memory while the Lipschitz constant of one head is
    measured.

    They are the Krylov basis of the head, and the vectors (n, d) of the final check in float64.
    """
    basis = _EXPECTED_STEPS * x.itemsize + _VERDICT_VECTORS * torch.float64.itemsize
    return x.shape[0] * (head.d + head.d_out) * basis


class _JacobiansInTokens(LinearOperator):
    """The Jacobians of all heads with respect to the tokens. A head depends only on the projection of the
    tokens onto a subspace, and its Jacobian is computed from the Jacobian in coordinates of this subspace.

    With J_h in the coordinates of the basis B_h, the Jacobian of head h is E ↦ J_h(E B_h).
    """

    def __init__(self, reduced: HeadsJacobian, bases: Float[Tensor, "heads d r"]) -> None:
        shapes = (reduced.in_shape[0], bases.shape[1]), reduced.out_shape
        super().__init__(reduced.batch, *shapes, reduced.dtype, reduced.device, reduced.rounding)
        self.reduced = reduced
        self.bases = bases

    def _product(self, e: Tensor) -> Tensor:
        return self.reduced.product(e @ self.bases)

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return self.reduced.adjoint_product(u) @ self.bases.mT
