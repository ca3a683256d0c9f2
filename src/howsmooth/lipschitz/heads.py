"""Measurement of the local Lipschitz constants of all heads of one attention layer at one sequence.

Head h depends on its tokens through W_h alone, the matrix of its queries, keys and values, which has fewer
rows than the token has entries. With W_hᵀ = B_h R_h, where B_h (d, r) has orthonormal columns, the Jacobian
of the head is E ↦ J_h (E B_h), and has the same singular values as J_h. A Krylov basis of J_h takes r/d of
the memory and time, so that all heads together cost about as much as their layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import SelfAttention, StagedAttention
from howsmooth.batching import footprint
from howsmooth.jacobian.attention import AttentionJacobian, attention_jacobians
from howsmooth.jacobian.closed_form import in_double
from howsmooth.jacobian.projections import projections
from howsmooth.jacobian.unequal_lengths import joined_jacobian
from howsmooth.lipschitz.arguments import check_arguments
from howsmooth.lipschitz.local import local_lipschitz
from howsmooth.lipschitz.singular_value_solver import Solver, member_seeds
from howsmooth.lipschitz_estimate import FIELDS, LipschitzEstimate
from howsmooth.memory import memory_budget
from howsmooth.rounding import MatrixNorms
from howsmooth.spectral import LinearOperator
from howsmooth.spectral.float32_products import CheckedProducts

__all__ = ["head_lipschitz"]

# Krylov vectors that a head needs in most measurements, for the choice of how many heads form a batch.
_EXPECTED_STEPS = 32
# Float64 tensors (n, d) of a head that the check in float64 holds at once, with the head's two directions.
_VERDICT_VECTORS = 6


def head_lipschitz(
    attention: SelfAttention | StagedAttention,
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
    of the same kind, and takes about as long as one call for the whole layer. The check in float64 is over
    the tokens themselves. The layer is a SelfAttention without a norm layer over all heads, or a
    StagedAttention of one softmax; ``x`` are the tokens (n, d) of one sequence. Where the probabilities of a
    head do not fit, and from 1,024 tokens on, heads are measured one by one. Head h uses its own stream h of
    the seed. The estimate has one member a head.
    """
    check_arguments(attention, x, rtol, confidence, max_iterations)
    x, n = x.detach(), x.shape[0]
    solver = Solver(rtol, confidence, max_iterations, member_seeds(seed, attention.heads))
    budget = memory_budget(memory, x.device)
    first = attention.head(0)
    one = footprint(first, (n, attention.d), dtype=x.dtype, device=x.device, memory=budget)
    if one.streamed or not isinstance(attention, SelfAttention):
        alone = [
            local_lipschitz(
                attention.head(h),
                x,
                rtol=rtol,
                confidence=confidence,
                max_iterations=max_iterations,
                seed=solver.seeds[h],
                memory=memory,
            )
            for h in range(attention.heads)
        ]
        parts = [{name: getattr(found, name)[None] for name in FIELDS} for found in alone]
    else:
        # The Krylov basis of a head, and the vectors (n, d) of the final check in float64
        basis = _EXPECTED_STEPS * x.itemsize + _VERDICT_VECTORS * torch.float64.itemsize
        most = max(1, budget // (one.size + n * (first.d + first.d_out) * basis))
        double = in_double(attention)
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
    """Measure several heads of a float64 layer as one batch; return the estimate's fields by name."""
    members = heads.tolist()
    dtypes = (torch.float64,) if x.dtype == torch.float64 else (x.dtype, torch.float64)
    jacobians = heads_jacobians(f, x.double(), members, dtypes)
    exact = jacobians[torch.float64]
    if x.dtype == torch.float64:
        # Krylov vectors stay in the coordinates of the tokens, for which the rounding is proved.
        found = solver.alone(exact, members)
    else:
        reduced, bases = jacobians[x.dtype].reduced()
        found = solver.alone(_InTokens(reduced, exact, bases), members)
    return {name: getattr(found, field) for name, field in FIELDS.items()}


class _InTokens(CheckedProducts):
    """Float32 Jacobians of all heads, checked by float64 ones. The float32 ones take coordinates of the
    subspace on which a head depends, the float64 ones take tokens.

    With J_h in the coordinates of the basis B_h, the Jacobian of head h is E ↦ J_h(E B_h).
    """

    def __init__(
        self, reduced: HeadsJacobian, exact: HeadsJacobian, bases: Float[Tensor, "heads d r"]
    ) -> None:
        super().__init__(reduced, exact)
        self.bases = bases

    def lifted(self, e: Tensor, members: Tensor | None = None) -> Tensor:
        bases = self.bases if members is None else self.bases[members]
        return e @ bases.mT.to(e.dtype)


def heads_jacobians(
    f: SelfAttention, x: Float[Tensor, "n d"], heads: Sequence[int], dtypes: Sequence[torch.dtype]
) -> dict[torch.dtype, HeadsJacobian]:
    """Return the Jacobians of some heads of an attention layer at one sequence, once for each of several
    dtypes.

    The layer and its tokens are float64. The rounding errors of float64 products are bounded for each head as
    for a layer with one head.
    """
    tokens, norms = x[None], MatrixNorms()
    off = tokens.new_zeros(tokens.shape[:-1]) if torch.float64 in dtypes else None
    of_heads = []
    for h in heads:
        made = projections(dtypes, x.shape[0])
        of_heads.append(attention_jacobians(f.head(h), tokens, made, off, norms))
    return dict(zip(dtypes, map(HeadsJacobian.of_heads, zip(*of_heads, strict=True)), strict=True))


class HeadsJacobian(AttentionJacobian):
    """The Jacobians of single heads of one attention layer at one sequence, as a batch with one member for
    each head.
    """

    @classmethod
    def of_heads(cls, heads: Sequence[LinearOperator]) -> HeadsJacobian:
        """Join the Jacobians of single heads of one layer at one sequence to one batched operator."""
        matrices = [head.projection.weight for head in heads if isinstance(head, AttentionJacobian)]
        whole = joined_jacobian(heads)
        assert isinstance(whole, AttentionJacobian)
        return cls._with(whole, torch.stack(matrices))

    @classmethod
    def _with(cls, whole: AttentionJacobian, weight: Float[Tensor, "heads rows d"]) -> HeadsJacobian:
        """Return the Jacobians ``whole`` with ``weight`` as query, key and value matrices of each head."""
        projection = replace(whole.projection, weight=weight)
        return cls(whole.core, projection, whole.norms, whole.proved)

    def reduced(self) -> tuple[HeadsJacobian, Float[Tensor, "heads d r"]]:
        """Return, for each head, a smaller Jacobian with the same singular values, and an orthonormal basis
        of the subspace of token space on which the head depends.

        A head with matrix W_h depends on r = min(d, rows of W_h) coordinates of a token, so its Jacobian is
        E ↦ J_h(E B_h), where J_h and the basis B_h are returned.
        """
        weight = self.projection.weight.double()
        bases, triangles = torch.linalg.qr(weight.mT)
        projection = replace(self.projection, weight=triangles.mT.to(self.dtype).contiguous())
        return HeadsJacobian(self.core, projection, self.norms), bases.to(self.dtype)

    def select(self, members: Tensor) -> HeadsJacobian:
        """Return the Jacobians of the chosen heads."""
        return self._with(super().select(members), self.projection.weight[members.to(self.device)])
