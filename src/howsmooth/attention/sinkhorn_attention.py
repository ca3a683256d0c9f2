"""Sinkhorn self-attention: probabilities that are doubly stochastic (Sander et al., 2022)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.core import attend, attention_scores, differentiated, row_blocks
from howsmooth.attention.heads import HeadsAttention
from howsmooth.attention.visibility import Visibility
from howsmooth.attention.weighting import Weighting
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["SinkhornAttention"]


class SinkhornAttention(HeadsAttention):
    """Multi-head Sinkhorn self-attention, X (..., n, d) -> (..., n, d_out).

    f(X)_i = W_O · concat_h( Σ_j P^h_ij (V_h x_j + b_v,h) ) + b_O with P^h = diag(α) e^S diag(β) of
    S_ij = scale · ⟨Q_h x_i + b_q,h, K_h x_j + b_k,h⟩, the limit of Sinkhorn's iterations: each row and each
    column of P sums to one. On a measure with weights a, Σ_j P_ij = 1 and Σ_i a_i P_ij = a_j: the coupling
    (a_i P_ij) has both marginals equal to the measure. There is no causal form: a triangular
    doubly stochastic matrix is the identity.

    The iterations run in float64, in logarithms, until the columns sum to one within the tolerance; rows do
    so to rounding. Where a derivative is asked for, two Newton steps follow that are differentiated with the
    rest: first and second derivatives are then those of the limit. They solve n × n systems, so that memory
    is n² a head; without derivatives it is that of the tokens.

    Parameters
    ----------
    query, key, value, output, query_bias, key_bias, value_bias, output_bias, scale
        As for :class:`~howsmooth.attention.SelfAttention`. Neither bias of queries and keys has an effect.
    tolerance
        Largest |Σ_i a_i P_ij / a_j − 1| over the columns j.
    max_iterations
        Number of iterations after which the map refuses to answer. They converge linearly, slowly where
        scores are large.

    Raises
    ------
    ArgumentError
        If an argument does not fit; and from a call, if the iterations have not converged.
    NonFiniteError
        If a parameter holds NaN or infinity; and from a call, if the scores do.

    References
    ----------
    Sander, Ablin, Blondel, Peyré, *Sinkformers: Transformers with Doubly Stochastic Attention*, AISTATS 2022.
    Derivatives: docs/theory/maps-on-measures.md.

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
        super().__init__(
            query,
            key,
            value,
            output,
            query_bias=query_bias,
            key_bias=key_bias,
            value_bias=value_bias,
            output_bias=output_bias,
            scale=scale,
        )
        if not 1e-13 <= tolerance < 1:
            raise ArgumentError("tolerance", expected="a number from 1e-13 up to 1", got=f"{tolerance:g}")
        if isinstance(max_iterations, bool) or max_iterations < 1:
            raise ArgumentError("max_iterations", expected="a whole number >= 1", got=repr(max_iterations))
        self.tolerance = float(tolerance)
        self.max_iterations = max_iterations

    def describe(self) -> str:
        """Return one phrase that says what the map is."""
        return self._described("Sinkhorn attention", "unmasked")

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> SinkhornAttention:
        """Return the same attention with parameters of another dtype or on another device."""
        return SinkhornAttention(
            **self._arguments(dtype, device), tolerance=self.tolerance, max_iterations=self.max_iterations
        )

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
        self,
        q: Float[Tensor, "*batch kv_heads group n key_dim"],
        k: Float[Tensor, "*batch kv_heads n key_dim"],
        log_weights: Float[Tensor, " n"],
    ) -> Float[Tensor, "*batch kv_heads group 1 n"]:
        """Return g with P_ij ∝ a_j exp(S_ij + g_j) whose columns sum to a within the tolerance.

        One iteration is one pass over blocks of rows, which are formed anew each time if there are several.
        """
        if torch._C._functorch.is_batchedtensor(q):
            raise ArgumentError(
                "X",
                expected="a batch as leading axes, for Sinkhorn attention",
                got="a tensor within torch.func.vmap",
                remedy="Call the map on the whole batch: how long it iterates depends on the values.",
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
                if violation != violation:
                    raise NonFiniteError("X", expected="finite scores", got="NaN or infinity")
                # Each head of each member stops by itself, so that none changes with its company.
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
        q: Float[Tensor, "*batch kv_heads group n key_dim"],
        k: Float[Tensor, "*batch kv_heads n key_dim"],
        offsets: Float[Tensor, "*batch kv_heads group 1 n"],
        log_weights: Float[Tensor, " n"],
    ) -> Float[Tensor, "*batch kv_heads group 1 n"]:
        """One Newton step for c_j = Σ_i a_i P_ij / a_j = 1, from offsets log a + g that all but solve it.

        ∂c/∂g = diag(c) − R P with R_ji = a_i P_ij / a_j. Its kernel, a constant added to g, does not change
        P; the term 1 aᵀ takes it away.
        """
        log_p = torch.log_softmax(attention_scores(q.double(), k.double(), self.scale, None, offsets), dim=-1)
        r = (log_p + (log_weights[:, None] - log_weights[None, :])).exp().mT
        c = r.sum(dim=-1)
        system = torch.diag_embed(c) - r @ log_p.exp() + log_weights.exp()
        step: Tensor = torch.linalg.solve(system, (c - 1)[..., None])
        return offsets - step.mT
