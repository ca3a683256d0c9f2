"""One measurement of a model during training: the Lipschitz constant of every attention layer at the probe
inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from howsmooth.attention import TokenMap
from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError, NonFiniteError
from howsmooth.lipschitz import LipschitzEstimate, local_lipschitz
from howsmooth.models.capture import capture
from howsmooth.models.float32_weights import weights_in_memory
from howsmooth.models.identification.layer_identification import VerifiedLayer, read_layer
from howsmooth.models.identification.self_attention_module import CrossAttention
from howsmooth.models.inputs.model_inputs import ModelInputs
from howsmooth.models.measurement_mode import implementation
from howsmooth.models.padded_sequences import Padding, padding_of, reproduces, without_padding
from howsmooth.models.tracing.layer_trace import AttentionLayer, first_tokens
from howsmooth.models.tracing.module_call_tracer import TracedLayer, run, trace_forward_pass
from howsmooth.nn.monitoring.attention_calls import OwnAttention, OwnLayers
from howsmooth.nn.monitoring.attention_statistics import ScoreStatistics, score_norm
from howsmooth.nn.monitoring.preserve_training_state import preserved_state
from howsmooth.nn.monitoring.probe_inputs import Probes
from howsmooth.nn.monitoring.record import MonitorRecord
from howsmooth.nn.monitoring.weight_locations import SCOPES, Reading, reading_of

__all__ = ["Accuracy", "Readings", "check_layers", "measured"]


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
    #: For a captured layer, how to read it faster next time. For a layer of howsmooth.nn, the number of its
    #: call among the calls of such layers.
    again: Reading | int | None = None
    failure: Exception | None = None
    seconds: float = 0.0


@dataclass(eq=False)
class _Part:
    """The measurement of an attention layer at one of the probe inputs, or the error that it raised."""

    name: str
    again: Reading | int | None = None
    failure: Exception | None = None
    seconds: float = 0.0
    estimate: LipschitzEstimate | None = None
    scores: ScoreStatistics = field(default_factory=ScoreStatistics)
    #: Squared norms of all tokens.
    squares: Tensor = field(default_factory=lambda: torch.empty(0))
    #: The fields of the record that do not depend on the tokens.
    fixed: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Readings:
    """The locations of weights, and other data, that a measurement stores to make the next one faster.

    The data tell where the weights of each layer are in the model, and how the padding of a sequence is
    removed.
    """

    #: By probe input, and sequence of a padded one: the layers' indices and how to read each next time.
    layers: dict[tuple[int, int], list[tuple[int, Reading | int]]] = field(default_factory=dict)
    #: By probe input and sequence: which of the inputs without padding has the padded sequence's tokens.
    choices: dict[tuple[int, int], int] = field(default_factory=dict)


def measured(
    model: nn.Module,
    probes: Probes,
    step: int,
    *,
    readings: Readings,
    layers: Sequence[int] | None,
    scope: str,
    accuracy: Accuracy,
    strict: bool,
) -> list[MonitorRecord]:
    """Measure every attention layer at all probe inputs, restore the state of the model, and return records.

    Layers are read and measured one by one, so that copies of the weights of only one layer are in memory.
    ``readings`` comes from the last measurement and is updated. An error in one layer becomes that layer's
    row. An error before any layer is found becomes a row of the whole model. With ``strict`` errors are
    raised instead.
    """
    began = time.process_time()
    blank = MonitorRecord(step, None, "", scope, probes.words, probes.sequences)
    rows: dict[int, list[_Part]] = {}
    one = _Measurement(model, step, readings, layers, scope, accuracy)
    try:
        with preserved_state(model):
            for number, given in enumerate(probes.of_model(model)):
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
    with preserved_state(model):
        try:
            places, _ = _places(model, probes.of_model(model)[0])
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
    readings: Readings
    layers: Sequence[int] | None
    scope: str
    accuracy: Accuracy

    def of_probe(self, number: int, given: ModelInputs) -> Iterator[tuple[int, _Part]]:
        """Measure all layers at one probe input.

        The sequences of a padded input are measured one by one, each without its padding.
        """
        padding = padding_of(self.model, given)
        if padding is None:
            yield from self._parts((number, 0), given, None)
            return
        traced: list[_Padded] = []

        def padded(sequence: int) -> _Padded:
            if not traced:
                places, _ = _places(self.model, padding.whole)
                traced.append(_Padded(padding, places))
            return replace(traced[0], sequence=sequence)

        for sequence in range(given.batch):
            yield from self._without_padding((number, sequence), padding, padded)

    def _without_padding(
        self, key: tuple[int, int], padding: Padding, padded: Callable[[int], _Padded]
    ) -> list[tuple[int, _Part]]:
        moved = ""
        for choice, alone in enumerate(without_padding(self.model, padding, key[1])):
            if self.readings.choices.get(key, choice) != choice:
                continue
            try:
                parts = self._parts(key, alone, lambda: padded(key[1]))
            except _Moved as error:
                moved = str(error)
                continue
            self.readings.choices[key] = choice
            return parts
        raise CaptureError(
            f"The tokens of {moved} in sequence {key[1]} of the probes are not the same without the padding, "
            "nor with the positions of the real tokens. This also happens if the model's own code switches "
            "autocast on. Give probes of one length at a time."
        )

    def _parts(
        self, key: tuple[int, int], given: ModelInputs, padded: Callable[[], _Padded] | None
    ) -> list[tuple[int, _Part]]:
        """Measure all layers at inputs without padding, and store where the weights of each layer are."""
        before = self.readings.layers.pop(key, None)
        parts: list[tuple[int, _Part]] = []
        for index, layer in self._read(given, before, padded):
            parts.append((index, self._measured(layer, index, key)))
        known = [(index, part.again) for index, part in parts if part.again is not None]
        if known and len(known) == len(parts):
            self.readings.layers[key] = known
        return parts

    def _read(
        self,
        given: ModelInputs,
        before: list[tuple[int, Reading | int]] | None,
        padded: Callable[[], _Padded] | None,
    ) -> Iterator[tuple[int, _Layer]]:
        """Yield each attention layer with its index, so that the caller measures one layer before the next is
        captured.
        """
        done: set[int] = set()
        if before is not None:
            # The fast path reads layers where they were found last time; where it fails, the others are
            # captured again.
            for index, layer in _read_again(self.model, given, before, self.scope):
                done.add(index)
                yield index, layer
            if len(done) == len(before):
                return
        for index, layer in _captured(self.model, given, self.layers, self.scope, padded):
            if index not in done:
                yield index, layer

    def _measured(self, layer: _Layer, index: int, key: tuple[int, int]) -> _Part:
        began = time.process_time()
        part = _Part(layer.name, layer.again, layer.failure, layer.seconds)
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


def _places(model: nn.Module, given: ModelInputs) -> tuple[list[OwnAttention | TracedLayer], OwnLayers]:
    """Run the model on one probe input, and return all its attention layers in the order of their calls.

    Layers of howsmooth.nn are among them; the second result holds the calls of these layers.

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

    with own.hooked(names.append):
        _, kept = trace_forward_pass(model, given.named, None, seen)
    # Softmaxes inside layers of howsmooth.nn belong to these layers and are not captured.
    passed = [one for _, one in sorted(kept.items()) if own.outside(one.layer.name)]
    calls, others = iter(own.calls), iter(passed)
    places = [next(others) if own.outside(name) else next(calls) for name in names]
    if not places:
        capture(model, given.named)  # raises an error with the reason
        raise CaptureError(f"{type(model).__name__} has no attention that is captured.")
    return places, own


def _captured(
    model: nn.Module,
    given: ModelInputs,
    layers: Sequence[int] | None,
    scope: str,
    padded: Callable[[], _Padded] | None,
) -> Iterator[tuple[int, _Layer]]:
    """Run the model on one probe input, and yield each attention layer as a map with its input tokens."""
    began = time.process_time()
    places, own = _places(model, given)
    shared = (time.process_time() - began) / len(places)
    for i in range(len(places)) if layers is None else _indices(layers, len(places)):
        place = places[i]
        modules = [place.module] if isinstance(place, OwnAttention) else place.modules
        with weights_in_memory(*modules):
            layer = _read(place, i, model, given, scope, padded)
            if layers is None and isinstance(layer.failure, CrossAttention):
                continue
            if layer.own is not None:
                layer.again = own.calls.index(layer.own)
            layer.seconds += shared
            yield i, layer


def _read_again(
    model: nn.Module, given: ModelInputs, known: list[tuple[int, Reading | int]], scope: str
) -> Iterator[tuple[int, _Layer]]:
    """Run the model, and yield its attention layers with weights read where the last measurement found them.

    The layers are not captured again, which saves time. Stop at the first layer that can no longer be read
    there.
    """
    own = OwnLayers(model)
    began = time.process_time()
    captured = [reading for _, reading in known if isinstance(reading, Reading)]
    with ExitStack() as stack:
        for one in captured:
            stack.enter_context(one.hooked())
        stack.enter_context(own.hooked(lambda name: None))
        run(model, given.named)
    shared = (time.process_time() - began) / len(known)
    for index, reading in known:
        began = time.process_time()
        if isinstance(reading, int):
            if reading >= len(own.calls):
                return
            with weights_in_memory(own.calls[reading].module):
                layer = _read(own.calls[reading], index, model, given, scope, None)
                layer.again = reading
                layer.seconds += shared
                yield index, layer
            continue
        try:
            again = reading.read(scope)
        except HowsmoothError:  # such as weights that are not finite: a full capture reports it better
            return
        if again is None:
            return
        attention, f, x = again
        taken = shared + time.process_time() - began
        yield index, _Layer(reading.name, f, x, attention, x, again=reading, seconds=taken)


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
    given: ModelInputs,
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
            read = read_layer(place, given.batch, implementation(model))
            if padded is not None:
                padded().check(read, index)
            layer.name = read.self_attention.layer.name
            layer.again = reading_of(read) if scope in SCOPES else None
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
