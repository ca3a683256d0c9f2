"""QK-clip (MuonClip, arXiv:2507.20534): query and key weights of heads with large logits are scaled down."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from torch import Tensor, nn

from howsmooth.models.capture import capture
from howsmooth.models.preserved_state import preserved_state
from howsmooth.nn.monitoring.attention_statistics import ScoreStatistics
from howsmooth.nn.monitoring.record import MonitorRecord

__all__ = ["clip"]


def clip(model: nn.Module, inputs: Sequence[Any], record: MonitorRecord, limit: float) -> str:
    """Scale the weights of a layer so that no logit at the inputs exceeds the limit; say what was done.

    The scores of a head with the largest logit S > limit get the factor limit / S: its root by the keys, or
    the root of the largest factor of all heads that share them, and the rest by the queries.
    """
    heads: dict[int | None, tuple[Any, ScoreStatistics]] = {}
    try:
        with preserved_state(model):
            for one in inputs:
                for site in capture(model, one, layers=[record.layer or 0], scope="head"):
                    heads.setdefault(site.head, (site.map, ScoreStatistics()))[1].add_map(site.map, site.x)
    except Exception as error:  # as a measurement, it must not end the training
        return f"not clipped: {error}"
    rows, wanted, of_keys = _rows(model.get_submodule(record.name)), [], dict[bytes, float]()
    for f, found in heads.values():
        factor = limit / max(limit, found.largest or 0.0)
        query, key = ([row.tobytes() for row in w[0].double().cpu().numpy()] for w in (f.query, f.key))
        plain = f.softcap is f.score_bias is f.query_norm is f.key_norm is None
        if not plain or not all(rows.get(row) for row in query + key):
            return "not clipped: its logits are not just products of queries and keys with weights of its own"
        of_keys |= {row: max(factor, of_keys.get(row, 0.0)) for row in key}
        wanted.append((factor, query, key[0]))
    scaled = {row: sqrt(factor) for row, factor in of_keys.items()}
    scaled |= {row: factor / sqrt(of_keys[key]) for factor, query, key in wanted for row in query}
    for row, factor in scaled.items():
        for part in rows[row]:
            part *= factor
    return f"{sum(factor < 1 for factor, *_ in wanted)} of {len(wanted)} heads"


def _rows(module: nn.Module) -> dict[bytes, list[Tensor]]:
    """Return the weights and the bias of each output of a module's matrices, nothing for equal outputs."""
    named, found = dict(module.named_parameters()), dict[bytes, list[Tensor]]()
    for name, p in named.items():
        bias = named.get(f"{name.removesuffix('weight')}bias")
        for w in (p.detach(), p.detach().mT) if p.ndim == 2 else ():  # transformers' Conv1D is transposed
            for i, row in enumerate(w.double().cpu().contiguous().numpy()):
                parts = [w[i]] if bias is None or len(bias) != len(w) else [w[i], bias.detach()[i]]
                found[row.tobytes()] = [] if row.tobytes() in found else parts
    return found
