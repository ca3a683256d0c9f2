"""The function ``precision``, which predicts and simulates how quantising the keys or values of each head
changes the output of a model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from howsmooth.attention import SelfAttention
from howsmooth.attention.core import attend
from howsmooth.bounds import kv_error_upper_bound
from howsmooth.errors import CaptureError, HowsmoothError, ModelError
from howsmooth.lipschitz.sensitivity_to_queries_keys_values import entry_sensitivities
from howsmooth.models import LoadedModel, Site, load_model
from howsmooth.models.identification.layer_identification import VerifiedLayer
from howsmooth.models.key_value_perturbations import LogitsOfModel
from howsmooth.printed_table import PrintedTable
from howsmooth.profiling.kv_cache_quantisation_result import Precision
from howsmooth.profiling.model_input import Inputs, Layers, Model, given_inputs, layers_of, loaded_if_named
from howsmooth.profiling.quantised_forward_pass import of_head, simulated_kl
from howsmooth.profiling.quantisers import (
    QUANTISERS,
    absmax_steps,
    checked_bits,
    checked_quantisers,
    group_of,
    rounded,
)
from howsmooth.seeds import derive_seed

__all__ = ["load_with_head", "precision"]

# The error of an entry is predicted as if it were uniform within half a step: its variance is step² / 12.
_VARIANCE = 1.0 / 12.0
# Draws for the Fisher information, each a backward pass; every head averages over its tokens and channels.
_DRAWS = 16


def precision(
    model: Model,
    inputs: Inputs,
    *,
    bits: int | Sequence[int] = (8, 4, 3),
    quantisers: str | Sequence[str] = QUANTISERS,
    span: slice | tuple[int, int] | str | None = None,
    layers: Layers = None,
    logits: bool = True,
    tokenizer: Any = None,
    seed: int = 0,
    on_layer: Callable[[int, int], None] | None = None,
) -> Precision:
    """Predict and simulate how quantising the keys or values of each head changes the output of a model at
    one input.

    The change of the attention's output is predicted, bounded and simulated for each layer, each key/value
    head, its keys or its values, each quantiser and each number of bits. Keys and values are those in the KV
    cache of transformers, after norm layers and rotary positions. They are quantised by absmax (symmetric,
    2^bits − 1 levels). ``Precision.refused`` names the layers that cannot be treated, with the reasons.

    If the model has logits, the Kullback–Leibler divergence of its predictions is also predicted and
    simulated. The whole model runs once for each row of the table, with only the keys or values of this row
    quantised. It also runs once for each quantiser and number of bits, with all keys and values quantised at
    the same time.

    Parameters
    ----------
    model
        As for :func:`howsmooth.profile`. A model given by its name or folder is loaded with its head if it
        has one. The head of a model with logits needs ``load_model(name, head=True)``.
    inputs, span, layers, tokenizer, on_layer
        As for :func:`howsmooth.profile`.
    bits
        Numbers of bits, each from 2 to 16.
    quantisers
        Which entries share a step: "token", "channel", "group-32" or "group-64"; all by default.
    logits
        Whether to run the whole model for the divergence of its predictions.
    seed
        Seed of the draws from which the divergence is predicted.

    Returns
    -------
    Precision
        With ``table`` (a row for each case), ``together`` (all keys and values at once), ``agreement``,
        ``budget(...)``, ``simulate(...)``, ``plot()`` and more.

    Raises
    ------
    ArgumentError
        If an argument does not fit; the message names it.
    CaptureError
        If no layer can be treated; the message says why.
    ModelError
        If a model given by its name cannot be loaded, or has no tokenizer for a text.

    """
    wanted = checked_bits(bits), checked_quantisers(quantisers)
    given = given_inputs(loaded_if_named(model, load_with_head), inputs, span, tokenizer)
    whole, refused = _whole_model(given.module, given.inputs, logits=logits)
    rows: list[dict[str, Any]] = []
    fisher: dict[int, tuple[Tensor, Tensor]] = {}
    if whole is not None:
        fisher = whole.squared_gradients(_DRAWS, derive_seed(purpose="precision", seed=seed))
    n = 0
    for index, layer in layers_of(given, layers, on_layer):
        try:
            site = _site(layer)
            n = max(n, site.x.shape[1])
            rows += _Layer(site, whole, fisher.get(index)).rows(*wanted)
        except HowsmoothError as error:
            refused.append(str(error))
    if not rows:
        raise CaptureError(f"No layer of {type(given.module).__name__} can be treated. {refused[-1]}")
    found = Precision(
        **given.origin(),
        table=PrintedTable(rows),
        together=pd.DataFrame(columns=["quantiser", "bits", "kl"]),
        n=n,
        seed=seed,
        refused=tuple(refused),
        logits=whole,
    )
    if whole is None:
        return found
    cases = [(quantiser, count) for quantiser in found.table["quantiser"].unique() for count in wanted[0]]
    together = [{"quantiser": q, "bits": count, "kl": found.simulate(count, q)} for q, count in cases]
    return replace(found, together=pd.DataFrame(together))


def load_with_head(name: str | os.PathLike[str], **options: Any) -> LoadedModel:
    """Load a model with the output layer that computes its logits, or without one if the model has none.

    The options are those of :func:`~howsmooth.models.load_model`.
    """
    try:
        return load_model(name, head=True, **options)
    except ModelError:
        return load_model(name, **options)


def _whole_model(module: nn.Module, inputs: Any, *, logits: bool) -> tuple[LogitsOfModel | None, list[str]]:
    """Return the whole model with its logits, or None together with the reason why there are no logits."""
    if not logits:
        return None, []
    try:
        return LogitsOfModel(module, inputs), []
    except CaptureError as error:
        return None, [f"The divergence of predictions is left out: {error}"]


def _site(layer: VerifiedLayer | CaptureError) -> Site:
    """Return the captured attention of a layer, or raise a CaptureError if its keys and values are
    not known.
    """
    if isinstance(layer, CaptureError):
        raise layer
    (site,) = layer.sites("attention")
    if not isinstance(site.map, SelfAttention):
        raise CaptureError(
            f"The keys and values of layer {site.layer} ({site.name}) are not known: {site.path_reason}."
        )
    return site


@dataclass(frozen=True, eq=False)
class _Case:
    """The predicted and simulated effects of one quantiser on one layer, applied to the keys, or to the
    values, of all heads.
    """

    predicted: Float64[Tensor, " kv_heads"]
    bound: Float64[Tensor, " kv_heads"]
    change: Float64[Tensor, " kv_heads"]
    predicted_kl: list[float]
    kl: list[float]


class _Layer:
    """One layer in float64: its queries, keys and values, and the sensitivity of its output to each entry of
    the keys and values.
    """

    def __init__(self, site: Site, whole: LogitsOfModel | None, fisher: tuple[Tensor, Tensor] | None) -> None:
        self.site, self.whole, self.fisher = site, whole, fisher
        assert isinstance(site.map, SelfAttention)
        self.f = site.map.to(dtype=torch.float64, device="cpu")
        self.x = site.x[0].to(dtype=torch.float64, device="cpu")
        self.q, k, v = self.f.projections(self.x)
        self.operands = {"K": k, "V": v}
        key, value = entry_sensitivities(self.f, self.x)
        self.sensitivities = {"K": key, "V": value}
        self.heads = self._heads({})
        self.size = float(torch.linalg.vector_norm(self.f(self.x)))

    def rows(self, bits: Sequence[int], quantisers: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield a table row for the keys and one for the values, for each quantiser, number of bits and head.

        If several quantisers give the same result on this layer, only the first one has rows.
        """
        for operand, t in self.operands.items():
            different = {group_of(quantiser, t.shape[-1]): quantiser for quantiser in reversed(quantisers)}
            for quantiser in filter(set(different.values()).__contains__, quantisers):
                for count in bits:
                    case = self._case(operand, quantiser, count)
                    for head in range(self.f.kv_heads):
                        yield {
                            "layer": self.site.layer,
                            "head": head,
                            "operand": operand,
                            "bits": count,
                            "quantiser": quantiser,
                            "predicted": float(case.predicted[head]),
                            "change": float(case.change[head]),
                            "bound": float(case.bound[head]),
                            "output_norm": self.size,
                            "predicted_kl": case.predicted_kl[head],
                            "kl": case.kl[head],
                            "name": self.site.name,
                        }

    def _case(self, operand: str, quantiser: str, bits: int) -> _Case:
        t = self.operands[operand]
        steps = absmax_steps(t, bits, quantiser)
        variance = _VARIANCE * steps.square()
        predicted = (self.sensitivities[operand].square() * variance).flatten(1).sum(dim=1).sqrt()
        change = self._change(operand, rounded(t, steps))
        bounds = []
        for head in range(self.f.kv_heads):
            size = torch.zeros_like(steps)
            size[head] = steps[head] / 2
            given = {"keys" if operand == "K" else "values": size}
            bounds.append(kv_error_upper_bound(self.f, self.x, **given).value)
        heads = range(self.f.kv_heads)
        bound = torch.tensor(bounds, dtype=torch.float64)
        return _Case(
            torch.minimum(predicted, bound),
            bound,
            change,
            [self._predicted_kl(operand, head, variance[head]) for head in heads],
            [self._kl(operand, head, quantiser, bits) for head in heads],
        )

    def _heads(self, other: Mapping[str, Tensor]) -> Float64[Tensor, "kv_heads group n value_dim"]:
        """Return the outputs of all heads after their keys or values have been replaced by the tensors in
        ``other``.
        """
        f, operands = self.f, self.operands | dict(other)
        visible = f.visibility(len(self.x))
        k, v = operands["K"][None], operands["V"][None]
        return attend(f._grouped(self.q)[None], k, v, f.scale, visible, features=f.features)[0]

    def _change(self, operand: str, other: Tensor) -> Float64[Tensor, " kv_heads"]:
        """Return, for each head, how much the layer's output changes if the keys or values of this head are
        replaced by the tensors in ``other``.
        """
        moved = self._heads({operand: other}) - self.heads
        if self.f.output is not None:
            output = self.f.output.unflatten(1, (*moved.shape[:2], moved.shape[-1]))
            moved = torch.einsum("bgnv,obgv->bno", moved, output)
        norms: Tensor = torch.linalg.vector_norm(moved.flatten(1), dim=1)
        return norms

    def _predicted_kl(self, operand: str, head: int, variance: Float64[Tensor, "n dim"]) -> float:
        """Predict, to second order, the KL divergence of the model's predictions if the keys or values of one
        head are quantised.

        The divergence is ½ Σ σ_a² F_aa, summed over the entries a. Here σ_a² is the variance of the rounding
        error of the entry, and F_aa is a diagonal entry of the Fisher information of the model's predictions.

        If the model repeats the keys of a head for each query head, the errors of the copies are treated as
        independent.
        """
        if self.whole is None or self.fisher is None:
            return math.nan
        part = of_head(self.fisher["KV".index(operand)], self.site.layer, head, self.f.kv_heads)
        if part.shape[-2:] != variance.shape:
            return math.nan
        return 0.5 * float((part * variance).sum()) / len(self.whole.logits)

    def _kl(self, operand: str, head: int, quantiser: str, bits: int) -> float:
        """Simulate the KL divergence of the model's predictions with quantised keys or values of one head."""
        if self.whole is None:
            return math.nan
        place = (self.site.layer, head, operand)
        return simulated_kl(self.whole, {place: bits}, {self.site.layer: self.f.kv_heads}, quantiser)
