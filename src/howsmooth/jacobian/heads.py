"""The Jacobians of the single heads of one attention layer at one sequence, as one batched linear operator.

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

from howsmooth.attention import SelfAttention
from howsmooth.jacobian.attention import AttentionJacobian
from howsmooth.jacobian.padded_jacobian_batch import joined
from howsmooth.jacobian.projections import Projections
from howsmooth.roundoff import MatrixNorms
from howsmooth.spectral import LinearOperator

__all__ = ["HeadsJacobian", "heads_jacobians"]


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
    of_heads: dict[torch.dtype, list[LinearOperator]] = {dtype: [] for dtype in dtypes}
    for h in heads:
        made = [Projections(dtype, x.shape[0]) for dtype in dtypes]
        for operator in AttentionJacobian.at(f.head(h), tokens, off, None, made, norms):
            of_heads[operator.dtype].append(operator)
    return {dtype: HeadsJacobian.of_heads(operators) for dtype, operators in of_heads.items()}


class HeadsJacobian(AttentionJacobian):
    """The Jacobians of single heads of one attention layer at one sequence, as a batch with one member for
    each head.
    """

    @classmethod
    def of_heads(cls, heads: Sequence[LinearOperator]) -> HeadsJacobian:
        """Join the Jacobians of single heads of one layer at one sequence to one batched operator."""
        matrices = [head.projection.weight for head in heads if isinstance(head, AttentionJacobian)]
        whole = joined(heads)
        assert isinstance(whole, AttentionJacobian)
        return cls._with(whole, torch.stack(matrices))

    @classmethod
    def _with(cls, whole: AttentionJacobian, weight: Float[Tensor, "heads rows d"]) -> HeadsJacobian:
        """Return a copy of the Jacobians ``whole`` with the query, key and value matrices of each head
        replaced by ``weight``.
        """
        projection = replace(whole.projection, weight=weight)
        return cls(projection, whole.core, whole.norms, whole.proved)

    def reduced(self) -> tuple[HeadsJacobian, Float[Tensor, "heads d r"]]:
        """Return, for each head, a smaller Jacobian with the same singular values, and an orthonormal basis
        of the subspace of token space on which the head depends.

        A head with matrix W_h depends on r = min(d, rows of W_h) coordinates of a token, so its Jacobian is
        E ↦ J_h(E B_h), where J_h and the basis B_h are returned.
        """
        weight = self.projection.weight.double()
        bases, triangles = torch.linalg.qr(weight.mT)
        projection = replace(self.projection, weight=triangles.mT.to(self.dtype).contiguous())
        return HeadsJacobian(projection, self.core, self.norms), bases.to(self.dtype)

    def select(self, members: Tensor) -> HeadsJacobian:
        """Return the Jacobians of the chosen heads."""
        return self._with(super().select(members), self.projection.weight[members.to(self.device)])
