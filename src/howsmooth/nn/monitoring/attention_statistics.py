"""Statistics of attention: norms of score matrices, the largest logit, and entropies of attention weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.attention import L2Attention, SelfAttention, TokenMap
from howsmooth.attention.custom_code_attention import StagedAttention
from howsmooth.attention.masks import Visibility
from howsmooth.attention.multi_head_projections import HeadsAttention
from howsmooth.attention.scaled_dot_product import NO_FEATURES, ScoreFeatures, attention_scores, row_blocks
from howsmooth.bounds import Head
from howsmooth.errors import ArgumentError

__all__ = ["ScoreStatistics", "score_norm"]


def score_norm(f: TokenMap | None, unknown: str) -> dict[str, float | str]:
    """Return the largest spectral norm of the heads' score matrices, or the reason why it is missing, as a
    field of a record.

    The score matrix of head h is A_h, and the scores are ⟨A_h x_i + b_h, x_j⟩. For softmax attention, A_h =
    scale · K_hᵀ Q_h. For L2 attention, A_h = 2 · scale · K_hᵀ Q_h, which is the part of −scale · |Q x_i − K
    x_j|² that depends on both tokens. ``unknown`` is the reason for other maps.
    """
    if not isinstance(f, HeadsAttention):
        return {"score_norm_missing": unknown}
    if isinstance(f, SelfAttention) and f.rotary is not None:
        return {"score_norm_missing": "rotary positions"}
    if isinstance(f, SelfAttention) and (f.query_norm is not None or f.key_norm is not None):
        return {"score_norm_missing": "normed queries or keys"}
    factor = 2 * f.scale if isinstance(f, L2Attention) else f.scale
    group = f.heads // f.kv_heads
    # Small decompositions are faster on the CPU than on a GPU, which would have to finish each one in turn.
    query, key, value = (weight.cpu() for weight in (f.query, f.key, f.value))
    heads = (
        Head((key[h // group].mT, factor * query[h].double()), value[h // group]) for h in range(f.heads)
    )
    return {"score_norm": max(head.A_norm for head in heads)}


@dataclass
class ScoreStatistics:
    """The largest attention logit, and the mean over all queries of the entropy of their attention weights.

    The entropy for query i is −Σ_j P_ij log P_ij, where P_ij is its attention weight for key j. For the
    normalised mean, the entropy of a row that sees m keys (a sink counts as one key) is divided by its
    maximum log m; rows that see a single key are left out. A logit is the number that enters the softmax for
    a query and a key that it sees: the scaled product of both after their norms and rotary positions, with
    soft-cap and bias.
    """

    total: float = 0.0
    rows: int = 0
    normalised_total: float = 0.0
    normalised_rows: int = 0
    #: Why the entropy is missing; empty if it is known.
    missing: str = ""
    #: The largest logit; None if no logit is known.
    largest: float | None = None
    #: Why the largest logit is missing; empty if it is known.
    logits_missing: str = ""

    def add(self, other: ScoreStatistics) -> None:
        """Add the statistics of another object. What is missing in the other becomes missing here."""
        for name in ("total", "rows", "normalised_total", "normalised_rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.missing = self.missing or other.missing
        self.logits_missing = self.logits_missing or other.logits_missing
        self.largest = max((one.largest for one in (self, other) if one.largest is not None), default=None)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a record that describe the logits and attention weights."""
        known, several = self.rows and not self.missing, self.normalised_rows and not self.missing
        return {
            "logit_max": None if self.logits_missing else self.largest,
            "logit_missing": self.logits_missing,
            "entropy": self.total / self.rows if known else None,
            "entropy_normalised": self.normalised_total / self.normalised_rows if several else None,
            "entropy_missing": self.missing,
        }

    def add_map(self, f: TokenMap, x: Float[Tensor, "batch n d"]) -> None:
        """Add the logits and the entropies of an attention map at the tokens ``x`` to these statistics."""
        try:
            if isinstance(f, SelfAttention):
                q, k = f.queries_and_keys(x)
                visible = Visibility(x.shape[1], f.causal, f.window, f.mask)
                self._add_softmax(f._grouped(q), k, f.scale, visible, f.features)
            elif isinstance(f, StagedAttention):

                def core(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                    one = f.cores[i]
                    visible, features = one.rules(q, k)
                    grouped = q.unflatten(-3, (k.shape[-3], -1))
                    self._add_softmax(grouped, k, one.scale, visible, features)
                    return one.attend(q, k, v)

                for member in x:
                    f.run(member, core)
            else:
                self.missing = self.logits_missing = "its attention probabilities are not known"
        except ArgumentError as error:
            self.missing = self.logits_missing = str(error)

    def add_probabilities(
        self, p: Float[Tensor, "batch heads m n"], visible: Bool[Tensor, "batch heads m n"] | None
    ) -> None:
        """Add given attention weights, whose logits are not known, to the statistics."""
        self.logits_missing = "its attention weights are known, but not the scores before the softmax"
        count = torch.full((p.shape[-2],), p.shape[-1], device=p.device)
        self._add(p, count if visible is None else visible.sum(-1))

    def _add_softmax(
        self,
        q: Float[Tensor, "*lead kv_heads group m key_dim"],
        k: Float[Tensor, "*lead kv_heads n key_dim"],
        scale: float,
        visible: Visibility,
        features: ScoreFeatures = NO_FEATURES,
    ) -> None:
        group, m, n, kv_heads = q.shape[-3], q.shape[-2], k.shape[-2], k.shape[-3]
        q, k = q.flatten(0, -4), k.flatten(0, -3)
        sinks = features.sinks
        for some, all_rows in row_blocks(len(k), group, m, n, q.device):
            for rows in all_rows:
                keys = visible.keys(rows)
                seen = visible.block(rows, keys, q.device)
                part = features.block(some, kv_heads, rows, keys)
                scores = attention_scores(q[some, :, rows], k[some, keys], scale, seen, None, part)
                largest = float(scores.max())
                self.largest = largest if self.largest is None else max(self.largest, largest)
                p = torch.softmax(part.with_sinks(scores), dim=-1)[..., : scores.shape[-1]]
                count = torch.full(p.shape[:-1], keys.stop - keys.start, device=q.device)
                if seen is not None or part.seen is not None:
                    allowed = torch.ones_like(p, dtype=torch.bool)
                    allowed = allowed if seen is None else allowed & seen
                    count = (allowed if part.seen is None else allowed & part.seen).sum(-1)
                if sinks is not None:
                    # The sink takes the rest of each row's probability and counts as one more key.
                    p = torch.cat((p, (1 - p.sum(-1, keepdim=True)).clamp(min=0)), dim=-1)
                    count = count + 1
                self._add(p, count)

    def _add(self, p: Tensor, count: Tensor) -> None:
        # entr(0) = 0, so masked entries add nothing.
        entropies = torch.special.entr(p.double()).sum(-1)
        free = (count > 1).expand(entropies.shape)
        most = count.clamp(min=2).double().log()
        self.total += float(entropies.sum())
        self.rows += entropies.numel()
        self.normalised_total += float((entropies / most)[free].sum())
        self.normalised_rows += int(free.sum())
