"""Sinkhorn self-attention, whose attention matrix is doubly stochastic (Sander et al., 2022)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.masks import Visibility
from howsmooth.attention.multi_head_projections import HeadsAttention
from howsmooth.attention.scaled_dot_product import (
    Keys,
    Queries,
    attend,
    attention_scores,
    differentiated,
    row_blocks,
)
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["SinkhornAttention"]


class SinkhornAttention(HeadsAttention):
    """Multi-head Sinkhorn self-attention, X (..., n, d) -> (..., n, d_out).

    f(X)_i = W_O · concat_h( Σ_j P^h_ij (V_h x_j + b_v,h) ) + b_O, where P^h = diag(α) e^S diag(β) is the
    limit of Sinkhorn's iterations for the scores S_ij = scale · ⟨Q_h x_i + b_q,h, K_h x_j + b_k,h⟩: each row
    and each column of P^h sums to one. On a measure with weights a, Σ_j P_ij = 1 and Σ_i a_i P_ij = a_j, so
    both marginals of the coupling (a_i P_ij) are the measure. There is no causal form, because a triangular
    doubly stochastic matrix is the identity.

    The iterations run in float64 on logarithms until the columns sum to one within the tolerance; the rows
    sum to one up to rounding. If a derivative is recorded, two differentiable Newton steps follow, so that
    first and second derivatives are correct for the limit. Newton steps solve n × n systems and need n²
    memory for each head; without derivatives memory is O(n d).

    Parameters
    ----------
    query, key, value, output, query_bias, key_bias, value_bias, output_bias, scale
        As for :class:`~howsmooth.attention.SelfAttention`. The biases of queries and keys have no effect.
    tolerance
        Largest |Σ_i a_i P_ij / a_j − 1| over the columns j.
    max_iterations
        Number of iterations after which a call raises ArgumentError. Convergence is linear, and slow for
        large scores.

    Raises
    ------
    ArgumentError
        If an argument does not fit. A call raises it if the iterations have not converged.
    NonFiniteError
        If a parameter holds NaN or infinity. A call raises it if a score does.

    References
    ----------
    Sander, Ablin, Blondel, Peyré, *Sinkformers: Transformers with Doubly Stochastic Attention*, AISTATS 2022.
    Derivatives: documentation page "Maps on measures", section "Sinkhorn attention".

    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor | None = None,
        *,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        output_bias: Tensor | None = None,
        scale: float | None = None,
        tolerance: float = 1e-9,
        max_iterations: int = 1000,
    ) -> None:
        super().__init__(query, key, value, output, query_bias, key_bias, value_bias, output_bias, scale)
        if not 1e-13 <= tolerance < 1:
            raise ArgumentError("tolerance", expected="a number from 1e-13 up to 1", got=f"{tolerance:g}")
        if isinstance(max_iterations, bool) or max_iterations < 1:
            raise ArgumentError("max_iterations", expected="a whole number >= 1", got=repr(max_iterations))
        self.tolerance = float(tolerance)
        self.max_iterations = max_iterations

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        return self._described("Sinkhorn attention", "unmasked")

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        n = x.shape[-2]
        if weighting is None:
            log_weights = torch.full((n,), 1 / n, dtype=torch.float64, device=x.device).log()
        else:
            log_weights = weighting.log_weights.double()
        q, k, v = self._project(x)
        q = self._grouped(q)
        offsets = log_weights + self._potentials(q.detach(), k.detach(), log_weights.detach())
        if differentiated(q) or differentiated(log_weights):
            for _ in range(2):
                offsets = self._newton(q, k, offsets, log_weights)
        return self._projected(attend(q, k, v, self.scale, Visibility(n), offsets.to(x.dtype)))

    def _potentials(
        self, q: Queries, k: Keys, log_weights: Float[Tensor, " n"]
    ) -> Float[Tensor, "*batch kv_heads group 1 n"]:
        """Find the vector g such that P_ij ∝ a_j exp(S_ij + g_j), with rows that sum to one, satisfies Σ_i
        a_i P_ij = a_j within the tolerance. Here S are the scores and a the weights of the atoms.

        If the scores take several blocks of rows, each is computed anew in every iteration to save memory.
        """
        if torch._C._functorch.is_batchedtensor(q):
            raise ArgumentError(
                "X",
                expected="a batch as leading axes, for Sinkhorn attention",
                got="a tensor within torch.func.vmap",
                remedy="Call the map on the whole batch: the number of iterations depends on the values.",
            )
        group, n = q.shape[-3], q.shape[-2]
        lead = k.shape[:-2]
        q, k = q.double().flatten(0, -4), k.double().flatten(0, -3)
        found = []
        for some, rows in row_blocks(len(k), group, n, n, q.device):
            kept = attention_scores(q[some], k[some], self.scale, None) if len(rows) == 1 else None
            g = torch.zeros((len(k[some]), group, 1, n), dtype=torch.float64, device=q.device)
            for _ in range(self.max_iterations):
                columns = torch.full_like(g, -torch.inf)
                for block in rows:
                    scores = kept
                    if scores is None:
                        scores = attention_scores(q[some, :, block], k[some], self.scale, None)
                    f = -torch.logsumexp(scores + (log_weights + g), dim=-1, keepdim=True)
                    sums = torch.logsumexp(scores + (f + log_weights[block, None]), dim=-2, keepdim=True)
                    columns = torch.logaddexp(columns, sums)
                off = torch.expm1(columns + g).abs().amax(dim=-1, keepdim=True)
                violation = float(off.max())
                if violation <= self.tolerance:
                    break
                if violation != violation:  # NaN
                    raise NonFiniteError("X", expected="finite scores", got="NaN or infinity")
                # A head that has converged is not updated, so its result does not depend on the others.
                g = torch.where(off > self.tolerance, -columns, g)
            else:
                raise ArgumentError(
                    "max_iterations",
                    expected=f"enough for columns that sum to one within {self.tolerance:g}",
                    got=f"{self.max_iterations}, after which a column is off by {violation:.2g}",
                    remedy="Give more iterations or a larger tolerance; the number grows with the scores.",
                )
            found.append(g)
        return torch.cat(found).reshape(*lead, group, 1, n)

    def _newton(
        self,
        q: Queries,
        k: Keys,
        offsets: Float[Tensor, "*batch kv_heads group 1 n"],
        log_weights: Float[Tensor, " n"],
    ) -> Float[Tensor, "*batch kv_heads group 1 n"]:
        """Improve the ``offsets`` log a + g by one Newton step towards c = 1, where c_j = Σ_i a_i P_ij / a_j.

        The derivative of c is ∂c/∂g = diag(c) − R P, where R_ji = a_i P_ij /
        a_j. This matrix is singular, since a constant added to g does not change P; adding 1 aᵀ makes it
        invertible.
        """
        log_p = torch.log_softmax(attention_scores(q.double(), k.double(), self.scale, None, offsets), dim=-1)
        r = (log_p + (log_weights[:, None] - log_weights[None, :])).exp().mT
        c = r.sum(dim=-1)
        system = torch.diag_embed(c) - r @ log_p.exp() + log_weights.exp()
        step: Tensor = torch.linalg.solve(system, (c - 1)[..., None])
        return offsets - step.mT
