"""One measurement of a model during training: the Lipschitz constant of every attention layer at the probe
inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from howsmooth.attention import TokenMap
from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError, NonFiniteError
from howsmooth.lipschitz import LipschitzEstimate, local_lipschitz
from howsmooth.models.as_called import as_called
from howsmooth.models.capture import capture
from howsmooth.models.float32_weights import weights_in_memory
from howsmooth.models.identification.layer_identification import VerifiedLayer, read_layer
from howsmooth.models.identification.self_attention_module import CrossAttention
from howsmooth.models.inputs.model_inputs import model_inputs
from howsmooth.models.measurement_mode import measurement_mode
from howsmooth.models.model_call import ModelCall
from howsmooth.models.padded_sequences import Padding, padding_of, reproduces, without_padding
from howsmooth.models.preserved_state import preserved_state
from howsmooth.models.tracing.recorder import AttentionLayer, TracedLayer, trace_forward_pass
from howsmooth.nn.monitoring.attention_calls import OwnAttention, OwnLayers
from howsmooth.nn.monitoring.attention_statistics import ScoreStatistics, score_norm
from howsmooth.nn.monitoring.probe_inputs import Probes
from howsmooth.nn.monitoring.record import MonitorRecord
from howsmooth.watching import first_tokens

__all__ = ["Accuracy", "check_layers", "measured"]


@dataclass(frozen=True)
class Accuracy:
    """The accuracy settings of :func:`~howsmooth.local_lipschitz`, which are the same for all measurements of
    a monitor.
    """

    rtol: float
    confidence: float
    max_iterations: int
    seed: int

    def at(self, f: Callable[[Tensor], Tensor], x: Tensor, *place: int) -> LipschitzEstimate:
        """Measure the local Lipschitz constant of f at x.

        ``self.seed`` and the integers ``place`` determine the random start.
        """
        words = np.random.SeedSequence([self.seed, *place]).generate_state(1, np.uint64)
        return local_lipschitz(
            f,
            x,
            rtol=self.rtol,
            confidence=self.confidence,
            max_iterations=self.max_iterations,
            seed=int(words[0]),
        )


@dataclass(eq=False)
class _Layer:
    """An attention layer, as a map that can be measured, with its input tokens at one of the probe inputs.

    If the layer could not be captured, ``failure`` is the exception.
    """

    name: str
    #: The map that is measured, and its tokens. For captured layers, also the attention in the map, and its
    #: tokens.
    map: Callable[[Tensor], Tensor] | None = None
    x: Tensor | None = None
    attention: TokenMap | None = None
    tokens: Tensor | None = None
    own: OwnAttention | None = None
    failure: Exception | None = None
    seconds: float = 0.0


@dataclass(eq=False)
class _Part:
    """The measurement of an attention layer at one of the probe inputs, or the error that it raised."""

    name: str
    failure: Exception | None = None
    seconds: float = 0.0
    estimate: LipschitzEstimate | None = None
    scores: ScoreStatistics = field(default_factory=ScoreStatistics)
    #: Squared norms of all tokens.
    squares: Tensor = field(default_factory=lambda: torch.empty(0))
    #: The fields of the record that do not depend on the tokens.
    fixed: dict[str, Any] = field(default_factory=dict)


def measured(
    model: nn.Module,
    probes: Probes,
    step: int,
    *,
    layers: Sequence[int] | None,
    scope: str,
    accuracy: Accuracy,
    strict: bool,
) -> list[MonitorRecord]:
    """Measure every attention layer at all probe inputs, restore the state of the model, and return records.

    Layers are read and measured one by one, so that copies of the weights of only one layer are in memory.
    An error in one layer becomes that layer's row. An error before any layer is found becomes a row of the
    whole model. With ``strict`` errors are raised instead.
    """
    began = time.process_time()
    blank = MonitorRecord(step, None, "", scope, probes.words, probes.sequences)
    rows: dict[int, list[_Part]] = {}
    one = _Measurement(model, step, layers, scope, accuracy)
    try:
        with preserved_state(model):
            for number, inputs in enumerate(probes.inputs):
                # Evaluation mode is what a monitor of a training is for.
                with as_called(model, inputs, training=False) as given:
                    for index, part in one.of_probe(number, given):
                        rows.setdefault(index, []).append(part)
        return [
            _record(replace(blank, layer=index, name=parts[0].name), parts, accuracy, strict)
            for index, parts in sorted(rows.items())
        ]
    except Exception as error:  # a failed measurement must not end the training
        if strict:
            raise
        return [replace(blank, failure=_reason(error), seconds=time.process_time() - began)]


def check_layers(model: nn.Module, probes: Probes, layers: Sequence[int]) -> None:
    """Raise ArgumentError if an index in ``layers`` is not the index of an attention layer of the model.

    The attention layers are counted at the first probe input. A model that cannot be run now is not checked;
    its measurement says why.
    """
    with preserved_state(model), measurement_mode(model):
        try:
            places = _places(model, model_inputs(model, probes.inputs[0]))
        except Exception:
            return
    _indices(layers, len(places))


class _Moved(Exception):  # noqa: N818 - not a failure: other inputs without padding may follow
    """The exception that names a layer whose tokens or output change when the padding is removed."""


@dataclass(eq=False)
class _Measurement:
    """One measurement of the attention layers of a model at one training step."""

    model: nn.Module
    step: int
    layers: Sequence[int] | None
    scope: str
    accuracy: Accuracy

    def of_probe(self, number: int, given: ModelCall) -> Iterator[tuple[int, _Part]]:
        """Measure all layers at one probe input.

        The sequences of a padded input are measured one by one, each without its padding.
        """
        padding = padding_of(given)
        if padding is None:
            yield from self._parts((number, 0), given, None)
            return
        traced: list[_Padded] = []

        def padded(sequence: int) -> _Padded:
            if not traced:
                traced.append(_Padded(padding, _places(self.model, padding.whole)))
            return replace(traced[0], sequence=sequence)

        for sequence in range(given.batch):
            yield from self._without_padding((number, sequence), padding, padded)

    def _without_padding(
        self, key: tuple[int, int], padding: Padding, padded: Callable[[int], _Padded]
    ) -> list[tuple[int, _Part]]:
        moved = ""
        for alone in without_padding(padding, key[1]):
            try:
                return self._parts(key, alone, lambda: padded(key[1]))
            except _Moved as error:
                moved = str(error)
        raise CaptureError(
            f"The tokens of {moved} in sequence {key[1]} of the probes are not the same without the padding, "
            "nor with the positions of the real tokens. This also happens if the model's own code switches "
            "autocast on. Give probes of one length at a time."
        )

    def _parts(
        self, key: tuple[int, int], given: ModelCall, padded: Callable[[], _Padded] | None
    ) -> list[tuple[int, _Part]]:
        """Measure all layers at inputs without padding, each before the next is captured."""
        layers = _captured(self.model, given, self.layers, self.scope, padded)
        return [(index, self._measured(layer, index, key)) for index, layer in layers]

    def _measured(self, layer: _Layer, index: int, key: tuple[int, int]) -> _Part:
        began = time.process_time()
        part = _Part(layer.name, layer.failure, layer.seconds)
        if part.failure is None:
            try:
                self._fill(part, layer, index, key)
            except Exception as error:  # no failure of a measurement may end the training
                part.failure = part.failure or error
        part.seconds += time.process_time() - began
        return part

    def _fill(self, part: _Part, layer: _Layer, index: int, key: tuple[int, int]) -> None:
        f, x = layer.map, layer.x
        assert f is not None
        assert x is not None
        try:
            part.estimate = self.accuracy.at(f, x, self.step, index, *key)
        except Exception as error:  # the scores of a layer that diverges are known all the same
            part.failure = error
        if layer.own is not None:
            layer.own.add_scores(part.scores, x)
        elif layer.attention is not None and layer.tokens is not None:
            part.scores.add_map(layer.attention, layer.tokens)
        part.squares = x.double().square().sum(-1).flatten().cpu()
        part.fixed["tokens"] = x.shape[-2]
        if key != (0, 0):
            return
        try:
            norm = score_norm(layer.attention) if layer.own is None else layer.own.score_norm()
            part.fixed["score_norm"] = norm
        except ArgumentError as error:
            part.fixed["score_norm_missing"] = error.got
        described = f.describe() if isinstance(f, TokenMap) else ""
        part.fixed["map"] = described if layer.own is None else layer.own.describe()
        if layer.own is not None:
            part.fixed |= layer.own.bound()


def _places(model: nn.Module, given: ModelCall) -> list[OwnAttention | TracedLayer]:
    """Run the model on one probe input, and return all its attention layers in the order of their calls.

    Layers of howsmooth.nn are among them.

    Raises
    ------
    CaptureError
        If the model has no attention that is captured; the message says why.

    """
    own = OwnLayers(model)
    # Names of all attention layers in the order of their calls, of howsmooth.nn and others together.
    names: list[str] = []

    def seen(layer: AttentionLayer) -> None:
        if own.outside(layer.name):
            names.append(layer.name)

    with own.watching(names.append):
        _, kept = trace_forward_pass(given, None, seen)
    # Softmaxes inside layers of howsmooth.nn belong to these layers and are not captured.
    passed = [one for _, one in sorted(kept.items()) if own.outside(one.layer.name)]
    calls, others = iter(own.calls), iter(passed)
    places = [next(others) if own.outside(name) else next(calls) for name in names]
    if not places:
        capture(model, given.named)  # raises an error with the reason
        raise CaptureError(f"{type(model).__name__} has no attention that is captured.")
    return places


def _captured(
    model: nn.Module,
    given: ModelCall,
    layers: Sequence[int] | None,
    scope: str,
    padded: Callable[[], _Padded] | None,
) -> Iterator[tuple[int, _Layer]]:
    """Run the model on one probe input, and yield each attention layer as a map with its input tokens."""
    began = time.process_time()
    places = _places(model, given)
    shared = (time.process_time() - began) / len(places)
    for i in range(len(places)) if layers is None else _indices(layers, len(places)):
        place = places[i]
        modules = [place.module] if isinstance(place, OwnAttention) else place.modules
        with weights_in_memory(*modules):
            layer = _read(place, i, model, given, scope, padded)
            if layers is None and isinstance(layer.failure, CrossAttention):
                continue
            layer.seconds += shared
            yield i, layer


def _indices(layers: Sequence[int], count: int) -> list[int]:
    for index in layers:
        if not -count <= index < count:
            raise ArgumentError("layers", expected=f"indices from {-count} to {count - 1}", got=str(index))
    return sorted({index % count for index in layers})


@dataclass(frozen=True, eq=False)
class _Padded:
    """The attention layers of a forward pass with padding, for comparison with a pass without padding."""

    padding: Padding
    places: list[OwnAttention | TracedLayer]
    sequence: int = 0

    def check(self, layer: VerifiedLayer | OwnAttention, index: int) -> None:
        """Raise _Moved if a layer has other tokens or outputs without padding than with padding."""
        place = self.places[index] if index < len(self.places) else None
        if isinstance(layer, OwnAttention):
            same = isinstance(place, OwnAttention) and layer.reproduces(place, self.padding, self.sequence)
        else:
            same = isinstance(place, TracedLayer) and reproduces(layer, place, self.padding, self.sequence)
        if not same:
            raise _Moved(str(layer if isinstance(layer, OwnAttention) else layer.self_attention.layer))


def _read(
    place: OwnAttention | TracedLayer,
    index: int,
    model: nn.Module,
    given: ModelCall,
    scope: str,
    padded: Callable[[], _Padded] | None,
) -> _Layer:
    """Capture one attention layer as a map with its input tokens.

    If this fails, the result contains the exception instead. Only _Moved is raised.
    """
    began = time.process_time()
    try:
        if isinstance(place, OwnAttention):
            layer = _Layer(place.name, own=place)
            layer.map, layer.x = place.read(scope)
            if padded is not None:
                padded().check(place, index)
        else:
            layer = _Layer(place.layer.name)
            _check_finite(place)
            read = read_layer(place)
            if padded is not None:
                padded().check(read, index)
            layer.name = read.self_attention.layer.name
            whole = read.sites(scope)[0]
            inner = whole if scope == "attention" else read.sites("attention")[0]
            layer.map, layer.x, layer.attention, layer.tokens = whole.map, whole.x, inner.map, inner.x
    except _Moved:
        raise
    except Exception as error:
        layer.failure = error
    layer.seconds = time.process_time() - began
    return layer


def _check_finite(place: TracedLayer) -> None:
    """Raise NonFiniteError with the cause if the weights or tokens of a layer are not finite."""
    layer = place.layer
    for name, weight in layer.root.named_parameters():
        if not bool(weight.isfinite().all()):
            raise NonFiniteError(
                "model", expected=f"finite weights in {layer}", got=f"NaN or infinity in its {name}"
            )
    tokens = (first_tokens(call.arguments()) for call in place.calls)
    if any(x is not None and not bool(x.isfinite().all()) for x in tokens):
        raise NonFiniteError(
            "model", expected=f"finite tokens for {layer}", got="NaN or infinity from an earlier layer"
        )


def _record(blank: MonitorRecord, parts: list[_Part], accuracy: Accuracy, strict: bool) -> MonitorRecord:
    """Return the record of one layer from its measurements at all probe inputs."""
    seconds = sum(part.seconds for part in parts)
    failure = next((part.failure for part in parts if part.failure is not None), None)
    if failure is not None and strict:
        raise failure
    # Where the tokens of some part were not read, nothing is known of them together.
    found = _statistics(parts) if all(len(part.squares) for part in parts) else {}
    if failure is not None:
        return replace(blank, **found, failure=_reason(failure), seconds=seconds)
    estimates = [part.estimate for part in parts if part.estimate is not None]
    whole = {name: torch.cat([getattr(e, name).flatten() for e in estimates]) for name in _OF_EACH}
    return replace(
        blank,
        **found,
        method=estimates[0].method,
        # The largest constant is at least the largest lower limit and at most the largest upper limit.
        lipschitz=float(whole["value"].max()),
        lower=float(whole["lower"].max()),
        upper=float(whole["upper"].max()),
        lipschitz_mean=float(whole["value"].mean()),
        confidence=accuracy.confidence,
        rtol=accuracy.rtol,
        converged=bool(whole["converged"].all()),
        iterations=int(whole["iterations"].max()),
        each=tuple(whole["value"].tolist()),
        seconds=seconds,
    )


def _statistics(parts: list[_Part]) -> dict[str, Any]:
    """Return the fields of a record that describe the tokens and scores of a layer at all probe inputs."""
    scores = parts[0].scores
    for part in parts[1:]:
        scores.add(part.scores)
    of_all = torch.cat([part.squares for part in parts])
    return {
        **parts[0].fixed,
        "tokens": max(part.fixed["tokens"] for part in parts),
        "logit_max": scores.largest,
        "logit_missing": scores.logits_missing,
        "entropy": scores.mean,
        "entropy_normalised": scores.normalised,
        "entropy_missing": scores.missing,
        "radius_mean": float(of_all.mean().sqrt()),
        "radius_max": float(of_all.max().sqrt()),
    }


_OF_EACH = ("value", "lower", "upper", "converged", "iterations")


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, HowsmoothError) else f"{type(error).__name__}: {words[:300]}"
