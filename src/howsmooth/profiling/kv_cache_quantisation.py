"""The effects of quantised keys and values: what is predicted, bounded and simulated for each head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.attention.scaled_dot_product import attend
from howsmooth.bounds import kv_error_upper_bound
from howsmooth.models.identification.non_softmax_layers import NO_SOFTMAX
from howsmooth.models.recorded_softmaxes import RecordedModel, RecordedSoftmax
from howsmooth.profiling.entry_sensitivities import entry_sensitivities
from howsmooth.profiling.quantisers import (
    Place,
    group_of,
    quantised_tokens,
    rounded,
    simulated_kl,
    steps_and_zeros,
)

__all__ = ["QuantisedCache"]

# The error of an entry is predicted as if it were uniform within half a step: its variance is step² / 12.
_VARIANCE = 1.0 / 12.0
# Draws for the Fisher information, each a backward pass; every head averages over its tokens and channels.
_DRAWS = 16
_HEADS = "no linear module alone is given its heads, so that predicted, change and bound are of the heads"


class QuantisedCache:
    """The keys and values of a recorded model, of which those of some heads may be quantised."""

    def __init__(
        self,
        whole: RecordedModel,
        bits: Sequence[int],
        quantisers: Sequence[str],
        *,
        logits: bool,
        seed: int,
    ) -> None:
        self.whole, self.bits, self.quantisers, self.logits = whole, bits, quantisers, logits
        self.names = [str(at.layer) for at in whole.layers]
        #: What is left out, by the reason.
        self.left_out: dict[str, list[str]] = {}
        self._fisher = whole.squared_gradients(_DRAWS, seed) if logits else {}

    def also_left_out(self) -> None:
        """Note the layers that have no place among the rows of all layers."""
        if self.whole.without_softmax:
            self.left_out[f"{NO_SOFTMAX}, which has no keys and values"] = self.whole.without_softmax

    def simulated_kl(self, bits: Mapping[Place, int], quantiser: str) -> float:
        """Return the mean divergence if ``bits`` says which keys and values are quantised, and how."""
        return simulated_kl(self.whole, bits, quantiser)

    def rows(self, index: int) -> list[dict[str, Any]]:
        """Return the table's rows of one layer."""
        at = self.whole.layers[index]
        found = list(self._rows(at, self._fisher.get(index)))
        if at.projection is None:
            self.left_out.setdefault(_HEADS, []).append(f"the output projection of {at.layer}")
        return found

    def _rows(self, at: RecordedSoftmax, fisher: Sequence[Tensor] | None) -> Iterator[dict[str, Any]]:
        """Yield the rows of a layer. If quantisers act alike on the layer, only the first has rows."""
        f, x = at.attention()
        q, *operands = f.projections(x)
        heads, size = _heads(f, q, *operands), float(torch.linalg.vector_norm(f(x)))
        for i, sensitivity in enumerate(entry_sensitivities(f, x)):
            t = operands[i]
            different = {
                group_of(quantiser, t.shape[-1]): quantiser for quantiser in reversed(self.quantisers)
            }
            for quantiser, count in product(self.quantisers, self.bits):
                if quantiser not in different.values():
                    continue
                step, zero = steps_and_zeros(t, count, quantiser, "KV"[i])
                variance = _VARIANCE * step.square()
                predicted = (sensitivity.square() * variance).flatten(1).sum(dim=1).sqrt()
                near = rounded(t, step, zero)
                moved = _heads(f, q, *(near if j == i else operands[j] for j in range(2))) - heads
                if f.output is not None:
                    output = f.output.unflatten(1, (*moved.shape[:2], moved.shape[-1]))
                    moved = torch.einsum("bgnv,obgv->bno", moved, output)
                change = torch.linalg.vector_norm(moved.flatten(1), dim=1)
                for head in range(f.kv_heads):
                    limits = torch.zeros_like(step)
                    limits[head] = step[head] / 2
                    bound = kv_error_upper_bound(f, x, **{("keys", "values")[i]: limits}).value
                    predicted_kl = kl = math.nan
                    if self.logits and self.whole.logits is not None and fisher is not None:
                        # To second order ½ Σ σ_a² F_aa over the entries a of the head.
                        predicted_kl = (
                            0.5 * float((fisher[i][head] * variance[head]).sum()) / len(self.whole.logits)
                        )
                        kl = self.simulated_kl({(at.layer.index, head, "KV"[i]): count}, quantiser)
                    place = {"layer": at.layer.index, "head": head, "operand": "KV"[i]}
                    yield place | {
                        "bits": count,
                        "quantiser": quantiser,
                        "predicted": min(float(predicted[head]), bound),
                        "change": float(change[head]),
                        "bound": bound,
                        "output_norm": size,
                        "predicted_kl": predicted_kl,
                        "kl": kl,
                        "entries": quantised_tokens(t.shape[-2], quantiser, "KV"[i]) * t.shape[-1],
                        "name": at.layer.name,
                    }


def _heads(
    f: SelfAttention, q: Tensor, k: Tensor, v: Tensor
) -> Float64[Tensor, "kv_heads group n value_dim"]:
    visible = f.visibility(q.shape[-2])
    return attend(f._grouped(q)[None], k[None], v[None], f.scale, visible, features=f.features)[0]
