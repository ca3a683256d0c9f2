"""The derivative of softmax attention with respect to queries, keys and values (theory §2).

With S = q kᵀ and dS = dq kᵀ + q dkᵀ (the scale is folded into q), P the row softmax:
dP = P∘(dS − rowsum(P∘dS)) and dO = dP v + P dv. Nothing here knows tokens or projections.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["SoftmaxDerivative"]


@dataclass(frozen=True)
class SoftmaxDerivative:
    """Derivative of attention at one point, its probabilities P kept in memory (n² a head).

    Axes: b = batch member times key/value head, m = n times the query heads that share it.

    Parameters
    ----------
    q
        Scaled queries (b, m, key_dim).
    k, v
        Keys and values (b, n, ·). Both may be shifted by a constant vector a head: rows of dP sum
        to zero, so the derivative does not change, and centring them spares digits.
    p
        Attention probabilities (b, m, n).
    mean
        P v, (b, m, value_dim).

    """

    q: Float[Tensor, "b m key_dim"]
    k: Float[Tensor, "b n key_dim"]
    v: Float[Tensor, "b n value_dim"]
    p: Float[Tensor, "b m n"]
    mean: Float[Tensor, "b m value_dim"]

    def rounding(self, batch: int) -> Float[Tensor, " batch"]:
        """Relative error of the derivative's norm that rounding in the products may cause, each member.

        dS has entries up to max|q| max|k| times a unit tangent, of which the softmax keeps a difference
        of order one: with that factor κ the errors measured stay below eps (2 + κ / 100), over
        saturated and unsaturated, causal and unmasked heads with κ up to 2000.
        """
        longest_q, longest_k = (
            torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64).amax(dim=-1).view(batch, -1)
            for t in (self.q, self.k)
        )
        kappa = (longest_q * longest_k).amax(dim=-1).cpu()
        rounding: Tensor = torch.finfo(self.q.dtype).eps * (32.0 + kappa / 25.0)
        return rounding

    def product(
        self,
        dq: Float[Tensor, "b m key_dim"],
        dk: Float[Tensor, "b n key_dim"],
        dv: Float[Tensor, "b n value_dim"],
    ) -> Float[Tensor, "b m value_dim"]:
        """Return dO for tangents of the scaled queries, the keys and the values."""
        ds = torch.baddbmm(torch.bmm(dq, self.k.mT), self.q, dk.mT)
        ds.mul_(self.p)
        dp = torch.addcmul(ds, self.p, ds.sum(dim=-1, keepdim=True), value=-1)
        return torch.baddbmm(torch.bmm(dp, self.v), self.p, dv)

    def adjoint(
        self, do: Float[Tensor, "b m value_dim"]
    ) -> tuple[Float[Tensor, "b m key_dim"], Float[Tensor, "b n key_dim"], Float[Tensor, "b n value_dim"]]:
        """Return the adjoint's (scaled queries, keys, values) parts for a cotangent of the output."""
        # rowsum(P∘(dO vᵀ)) = rowsum(dO∘(P v)): one product of size n × value_dim less.
        ds = torch.bmm(do, self.v.mT)
        ds.sub_((do * self.mean).sum(dim=-1, keepdim=True)).mul_(self.p)
        return torch.bmm(ds, self.k), torch.bmm(ds.mT, self.q), torch.bmm(self.p.mT, do)

    def select(self, rows: Tensor) -> SoftmaxDerivative:
        """Return the derivative of some rows of the axis b."""
        return SoftmaxDerivative(self.q[rows], self.k[rows], self.v[rows], self.p[rows], self.mean[rows])
