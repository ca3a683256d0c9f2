"""QK-clip (MuonClip, arXiv:2507.20534): query and key weights of heads with large logits are scaled down."""

from __future__ import annotations

from math import sqrt as root

from torch import Tensor, nn

from howsmooth.attention import SelfAttention
from howsmooth.errors import CaptureError
from howsmooth.models.capture import capture
from howsmooth.models.preserved_state import preserved_state
from howsmooth.nn.monitoring.attention_statistics import ScoreStatistics
from howsmooth.nn.monitoring.measurement import Probes

__all__ = ["scale_heads"]


def scale_heads(model: nn.Module, probes: Probes, name: str, layer: int, limit: float) -> int:
    """Scale weights of a layer so that no logit at the probes exceeds the limit; return the number of heads.

    The scores of a head with the largest logit S > limit get the factor limit / S: its root by the keys, or
    the root of the largest factor of all heads that share them, and the rest by the queries.
    """
    heads: dict[int, tuple[SelfAttention, ScoreStatistics]] = {}
    with preserved_state(model):
        for inputs in probes.inputs:
            for site in capture(model, inputs, layers=[layer], scope="head"):
                f, added = site.map, ("softcap", "score_bias", "query_norm", "key_norm")
                if site.name != name or any(getattr(f, one, f) is not None for one in added):
                    raise CaptureError("Its logits are no products of linear queries and keys alone.")
                heads.setdefault(site.head, (f, ScoreStatistics()))[1].add_map(f, site.x)
    rows, wanted, of_keys = _rows(model.get_submodule(name)), [], dict[bytes, float]()
    for f, found in heads.values():
        factor = limit / max(limit, found.largest or 0.0)
        query, key = ([row.tobytes() for row in w[0].double().cpu().numpy()] for w in (f.query, f.key))
        if any(rows.get(row) is None for row in query + key):
            raise CaptureError("Its query and key weights are not rows of its parameters, each once.")
        of_keys |= {row: max(factor, of_keys.get(row, 0.0)) for row in key}
        wanted.append((factor, query, key[0]))
    scaled = {row: root(factor) for row, factor in of_keys.items()}
    scaled |= {row: factor / root(of_keys[key]) for factor, query, key in wanted for row in query}
    for row, factor in scaled.items():
        for part in rows[row] or ():
            part *= factor
    return sum(factor < 1 for factor, *_ in wanted)


def _rows(module: nn.Module) -> dict[bytes, list[Tensor] | None]:
    """Return the weights and the bias of each output of a module's matrices by the weights' bytes."""
    named, found = dict(module.named_parameters()), dict[bytes, list[Tensor] | None]()
    for name, p in named.items():
        bias = named.get(f"{name.removesuffix('weight')}bias")
        for w in (p.detach(), p.detach().mT) if p.ndim == 2 else ():  # transformers' Conv1D is transposed
            for i, row in enumerate(w.double().cpu().contiguous().numpy()):
                parts = [w[i]] if bias is None or len(bias) != len(w) else [w[i], bias.detach()[i]]
                found[row.tobytes()] = None if row.tobytes() in found else parts
    return found
