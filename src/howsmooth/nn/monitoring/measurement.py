"""One measurement of a model during training: every attention layer at the probe inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from howsmooth.attention import TokenMap
from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError, NonFiniteError
from howsmooth.lipschitz import LipschitzEstimate, local_lipschitz
from howsmooth.models.capture import capture
from howsmooth.models.identification.self_attention_module import CrossAttention
from howsmooth.models.identification.verified_layer import read_layer
from howsmooth.models.inputs.model_inputs import ModelInputs
from howsmooth.models.measurement_mode import implementation
from howsmooth.models.tracing.forward_trace import TracedLayer, run, trace_forward_pass
from howsmooth.models.tracing.layer_trace import AttentionLayer, first_tokens
from howsmooth.nn.monitoring.layer_cache import SCOPES, Reading, reading_of
from howsmooth.nn.monitoring.lipschitz_layers import OwnAttention, OwnLayers
from howsmooth.nn.monitoring.preserve_state import unmarked
from howsmooth.nn.monitoring.probe_inputs import Probes
from howsmooth.nn.monitoring.record import MonitorRecord
from howsmooth.nn.monitoring.statistics import Entropy, score_norm

__all__ = ["Accuracy", "Readings", "measured"]


@dataclass(frozen=True)
class Accuracy:
    """Arguments of :func:`~howsmooth.local_lipschitz` that are the same for all measurements."""

    rtol: float
    confidence: float
    max_iterations: int
    seed: int

    def at(self, f: Callable[[Tensor], Tensor], x: Tensor, step: int, index: int) -> LipschitzEstimate:
        """Measure the local Lipschitz constant of a function ``f`` at the tokens ``x``.

        The random start depends only on ``seed``, ``step`` and ``index``.
        """
        words = np.random.SeedSequence([self.seed, step, index]).generate_state(1, np.uint64)
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
    """An attention layer read at one of the monitor's inputs: its map and tokens, or an error.

    The error says why the map could not be read.
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
class _Row:
    """An attention layer read at all of the monitor's inputs.

    From this, one record is computed.
    """

    name: str
    parts: list[_Layer] = field(default_factory=list)


#: For each probe input, the layers' indices and how to read each layer next time.
Readings = dict[int, list[tuple[int, Reading | int]]]


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
    """Measure every attention layer at all of the monitor's inputs.

    The model's state is restored afterwards. ``readings`` comes from the last measurement and is updated. An
    error in one layer becomes that layer's row. An error before any layer is found becomes a row of the whole
    model. With ``strict`` errors are raised instead.
    """
    began = time.process_time()
    blank = MonitorRecord(step, None, "", scope, probes.words, probes.sequences)
    rows: dict[int, _Row] = {}
    try:
        with unmarked(model):
            for number, given in enumerate(probes.of_model(model)):
                # The fast path reads layers where they were found last time; if it fails, all are captured
                # again.
                before = readings.pop(number, None)
                layers_found = before and _read_again(model, given, before, scope)
                if not layers_found:
                    layers_found = _layers(model, given, layers, scope)
                known = [(index, found.again) for index, found in layers_found if found.again is not None]
                if len(known) == len(layers_found):
                    readings[number] = known
                for index, found in layers_found:
                    rows.setdefault(index, _Row(found.name)).parts.append(found)
            return [
                _record(replace(blank, layer=index, name=row.name), row, accuracy, strict)
                for index, row in sorted(rows.items())
            ]
    except Exception as error:  # a failed measurement must not end the training
        if strict:
            raise
        return [replace(blank, failure=_reason(error), seconds=time.process_time() - began)]


def _layers(
    model: nn.Module, given: ModelInputs, layers: Sequence[int] | None, scope: str
) -> list[tuple[int, _Layer]]:
    """Run the model on one probe input, and read each of its attention layers as a map with its tokens."""
    own = OwnLayers(model)
    # Names of all attention layers in the order of their calls, of howsmooth.nn and others together.
    names: list[str] = []
    began = time.process_time()

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
    shared = (time.process_time() - began) / len(places)
    wanted = range(len(places)) if layers is None else _indices(layers, len(places))
    found = [(i, _read(places[i], model, given, scope)) for i in wanted]
    for _, layer in found:
        if layer.own is not None:
            layer.again = own.calls.index(layer.own)
    if layers is None:
        found = [(i, layer) for i, layer in found if not isinstance(layer.failure, CrossAttention)]
    for _, layer in found:
        layer.seconds += shared
    return found


def _read_again(
    model: nn.Module, given: ModelInputs, known: list[tuple[int, Reading | int]], scope: str
) -> list[tuple[int, _Layer]] | None:
    """Run the model, and read its attention layers in the places where they were found before.

    The result is None if a layer cannot be read in its old place.
    """
    own = OwnLayers(model)
    began = time.process_time()
    captured = [reading for _, reading in known if isinstance(reading, Reading)]
    with ExitStack() as stack:
        for one in captured:
            stack.enter_context(one.hooked())
        stack.enter_context(own.hooked(lambda name: None))
        run(model, given.named)
    found: list[tuple[int, _Layer]] = []
    for index, reading in known:
        if isinstance(reading, int):
            if reading >= len(own.calls):
                return None
            layer = _read(own.calls[reading], model, given, scope)
        else:
            try:
                again = reading.read(scope)
            except HowsmoothError:  # such as weights that are not finite: a full capture reports it better
                return None
            if again is None:
                return None
            attention, f, x = again
            layer = _Layer(reading.name, map=f, x=x, attention=attention, tokens=x)
        layer.again = reading
        found.append((index, layer))
    for _, layer in found:
        layer.seconds = (time.process_time() - began) / len(found)
    return found


def _indices(layers: Sequence[int], count: int) -> list[int]:
    for index in layers:
        if not -count <= index < count:
            raise ArgumentError("layers", expected=f"indices from {-count} to {count - 1}", got=str(index))
    return sorted({index % count for index in layers})


def _read(place: OwnAttention | TracedLayer, model: nn.Module, given: ModelInputs, scope: str) -> _Layer:
    """Read an attention layer's map and its tokens.

    An exception is stored in the result instead of being raised.
    """
    began = time.process_time()
    try:
        if isinstance(place, OwnAttention):
            layer = _Layer(place.name, own=place)
            layer.map, layer.x = place.read(scope)
        else:
            layer = _Layer(place.layer.name)
            _check_finite(place)
            read = read_layer(place, given.batch, implementation(model))
            layer.name = read.self_attention.layer.name
            layer.again = reading_of(read) if scope in SCOPES else None
            whole = read.sites(scope)[0]
            inner = whole if scope == "attention" else read.sites("attention")[0]
            layer.map, layer.x, layer.attention, layer.tokens = whole.map, whole.x, inner.map, inner.x
    except Exception as error:
        layer.failure = error
    layer.seconds = time.process_time() - began
    return layer


def _check_finite(place: TracedLayer) -> None:
    """Raise NonFiniteError if a layer's weights or tokens are not finite.

    Without this check, a later and vaguer error would be raised.
    """
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


def _record(blank: MonitorRecord, row: _Row, accuracy: Accuracy, strict: bool) -> MonitorRecord:
    """Measure a layer at all probe inputs, and return the record of these measurements."""
    began = time.process_time() - sum(part.seconds for part in row.parts)
    failure = next((part.failure for part in row.parts if part.failure is not None), None)
    filled = blank
    if failure is None:
        try:
            filled = _filled(blank, row, accuracy)
        except Exception as error:  # no failure of a measurement may end the training
            failure = error
    if failure is not None:
        if strict:
            raise failure
        filled = replace(blank, failure=_reason(failure))
    return replace(filled, seconds=time.process_time() - began)


def _filled(blank: MonitorRecord, row: _Row, accuracy: Accuracy) -> MonitorRecord:
    entropy = Entropy()
    estimates: list[LipschitzEstimate] = []
    squares: list[Tensor] = []
    assert blank.layer is not None
    for number, part in enumerate(row.parts):
        assert part.map is not None
        assert part.x is not None
        estimates.append(accuracy.at(part.map, part.x, blank.step, blank.layer + 1000 * number))
        if part.own is not None:
            part.own.add_entropy(entropy, part.x)
        elif part.attention is not None and part.tokens is not None:
            entropy.add_map(part.attention, part.tokens)
        # Squared norms of all tokens, for the radius.
        squares.append(part.x.double().square().sum(-1).flatten().cpu())
    first = row.parts[0]
    norm, missing = None, ""
    try:
        norm = score_norm(first.attention) if first.own is None else first.own.score_norm()
    except ArgumentError as error:
        missing = error.got
    described = first.map.describe() if isinstance(first.map, TokenMap) else ""
    whole = {name: torch.cat([getattr(e, name).flatten() for e in estimates]) for name in _OF_EACH}
    of_all = torch.cat(squares)
    return replace(
        blank,
        tokens=max(part.x.shape[-2] for part in row.parts if part.x is not None),
        map=described if first.own is None else first.own.describe(),
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
        bound=None if first.own is None else first.own.bound(),
        score_norm=norm,
        score_norm_missing=missing,
        entropy=entropy.mean,
        entropy_normalised=entropy.normalised,
        entropy_missing=entropy.missing,
        radius_mean=float(of_all.mean().sqrt()),
        radius_max=float(of_all.max().sqrt()),
        each=tuple(whole["value"].tolist()),
    )


_OF_EACH = ("value", "lower", "upper", "converged", "iterations")


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, HowsmoothError) else f"{type(error).__name__}: {words[:300]}"
