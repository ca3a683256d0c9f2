"""One measurement of a model during training: its attention layers at fixed inputs, the probes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from howsmooth.attention import TokenMap
from howsmooth.errors import CaptureError, HowsmoothError, NonFiniteError
from howsmooth.lipschitz import LipschitzEstimate, local_lipschitz
from howsmooth.models.as_called import as_called
from howsmooth.models.capture import capture
from howsmooth.models.float32_weights import weights_in_memory
from howsmooth.models.identification.layer_identification import VerifiedLayer, read_layer
from howsmooth.models.identification.self_attention_module import CrossAttention
from howsmooth.models.inputs.model_inputs import model_inputs
from howsmooth.models.measurement_mode import measurement_mode
from howsmooth.models.model_call import ModelCall
from howsmooth.models.padded_sequences import padding_of, reproduces, without_padding
from howsmooth.models.preserved_state import preserved_state
from howsmooth.models.tracing.attention_recorder import AttentionLayer, TracedLayer, trace_forward_pass
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.checks import check
from howsmooth.nn.monitoring.attention_statistics import ScoreStatistics, score_norm
from howsmooth.nn.monitoring.own_attention import OwnAttention
from howsmooth.nn.monitoring.record import MonitorRecord
from howsmooth.watching import Call, first_tokens, watched

__all__ = ["ProbeInputs", "Probes", "Reading"]

#: The types of probe inputs: token ids (batch, n), the model's inputs by name, or a list of these.
ProbeInputs = Tensor | Mapping[str, Any] | list[Tensor | Mapping[str, Any]]

_Place = OwnAttention | TracedLayer
#: Raises _Moved if a layer of this index has other tokens or outputs without padding than with padding.
_Check = Callable[[OwnAttention | VerifiedLayer, int], None]


class _Moved(Exception):  # noqa: N818 - not a failure: other inputs without padding may follow
    """The exception that names a layer whose tokens or output change when the padding is removed."""


class Probes:
    """Copies of the fixed inputs of a monitor, so that later changes of the originals have no effect.

    ``inputs`` are the copies, ``sequences`` is the number of sequences, and ``words`` are the sizes of the
    inputs and a checksum. ArgumentError is raised if the model does not accept the inputs.
    """

    def __init__(self, model: nn.Module, given: ProbeInputs) -> None:
        expected = "token ids, inputs of the model by name, or a list of these"
        remedy = "Give the inputs of one call as a dict, and several inputs as a list."
        check(not isinstance(given, tuple), "probes", expected, "a tuple", remedy)
        several: list[Any] = given if isinstance(given, list) else [given]
        check(bool(several), "probes", "inputs of the model, at least one sequence", "none")
        self.inputs: list[Tensor | dict[str, Any]] = []
        self.sequences = 0
        checksum, shapes = hashlib.sha256(), []
        for one in several:
            checked = model_inputs(model, one)
            padding_of(checked)  # raises an error for a sequence of nothing but padding
            self.sequences += checked.batch
            for name, value in checked.named.items():
                if not isinstance(value, Tensor):
                    checksum.update(f"{name} {value!r}".encode())
                    shapes.append(f"{name}={value!r}")
                    continue
                raw = value.detach().cpu().contiguous()
                checksum.update(f"{name} {raw.dtype} {tuple(raw.shape)}".encode())
                checksum.update(raw.reshape(-1).view(torch.uint8).numpy().tobytes())
                shapes.append(f"{name} {' x '.join(map(str, raw.shape))}")
            given = one if isinstance(one, Tensor) else dict(one)
            self.inputs.append(tree_map_only(Tensor, lambda t: t.detach().clone(), given))
        self.words = f"{', '.join(shapes)}; sha256 {checksum.hexdigest()[:12]}"


@dataclass(eq=False)
class _Part:
    """The measurement of a layer at one probe input, or the error that it raised."""

    name: str
    failure: Exception | None = None
    seconds: float = 0.0
    estimate: LipschitzEstimate | None = None
    scores: ScoreStatistics = field(default_factory=ScoreStatistics)
    #: Squared norms of all tokens; empty if they were not read.
    squares: Tensor = field(default_factory=lambda: torch.empty(0))
    #: The fields of the record that do not depend on the tokens.
    fixed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Reading:
    """The measurement of a model for a monitor, with the settings of the monitor as fields."""

    model: nn.Module
    probes: Probes
    layers: Sequence[int] | None
    scope: str
    rtol: float
    confidence: float
    max_iterations: int
    seed: int
    strict: bool

    def at(self, step: int) -> list[MonitorRecord]:
        """Measure every attention layer at all probe inputs, and restore the state of the model.

        Layers are read and measured one by one, so that copies of the weights of only one layer are in
        memory. An error in one layer becomes that layer's row. An error before any layer is found becomes a
        row of the whole model. With ``strict`` errors are raised instead.
        """
        began = time.process_time()
        blank = MonitorRecord(step, None, "", self.scope, self.probes.words, self.probes.sequences)
        rows: dict[int, list[_Part]] = {}
        try:
            with preserved_state(self.model):
                for number, inputs in enumerate(self.probes.inputs):
                    # Evaluation mode is what a monitor of a training is for.
                    with as_called(self.model, inputs, training=False) as given:
                        for index, part in self._of_probe(step, number, given):
                            rows.setdefault(index, []).append(part)
            return [
                self._record(replace(blank, layer=index, name=parts[0].name), parts)
                for index, parts in sorted(rows.items())
            ]
        except Exception as error:  # a failed measurement must not end the training
            if self.strict:
                raise
            return [replace(blank, failure=_reason(error), seconds=time.process_time() - began)]

    def check_layers(self) -> None:
        """Raise ArgumentError if the model has no attention layer with one of the indices ``layers``.

        They are counted at the first probe input. Of a model that cannot be run now, its measurement says
        why.
        """
        with preserved_state(self.model), measurement_mode(self.model):
            try:
                places = _places(self.model, model_inputs(self.model, self.probes.inputs[0]))
            except Exception:
                return
        self._indices(len(places))

    def _indices(self, count: int) -> list[int]:
        for index in self.layers or ():
            check(-count <= index < count, "layers", f"indices from {-count} to {count - 1}", index)
        return sorted(range(count) if self.layers is None else {index % count for index in self.layers})

    def _of_probe(self, step: int, number: int, given: ModelCall) -> Iterator[tuple[int, _Part]]:
        """Measure all layers at one probe input. Padded inputs are measured by sequence, without padding."""
        padding = padding_of(given)
        if padding is None:
            yield from self._of_layers((step, number, 0), given, lambda layer, index: None)
            return
        whole = cache(lambda: _places(self.model, padding.whole))
        for sequence in range(given.batch):

            def compare(layer: OwnAttention | VerifiedLayer, index: int, sequence: int = sequence) -> None:
                place = dict(enumerate(whole())).get(index)
                if isinstance(layer, OwnAttention):
                    same = isinstance(place, OwnAttention) and layer.reproduces(place, padding, sequence)
                else:
                    same = isinstance(place, TracedLayer) and reproduces(layer, place, padding, sequence)
                if not same:
                    raise _Moved(
                        str(layer if isinstance(layer, OwnAttention) else layer.self_attention.layer)
                    )

            moved = ""
            for alone in without_padding(padding, sequence):
                try:
                    yield from [*self._of_layers((step, number, sequence), alone, compare)]
                    break
                except _Moved as error:
                    moved = str(error)
            else:
                raise CaptureError(
                    f"The tokens of {moved} in sequence {sequence} of the probes are not the same without "
                    "the padding, nor with the positions of the real tokens. This also happens if the "
                    "model's own code switches autocast on. Give probes of one length at a time."
                )

    def _of_layers(
        self, key: tuple[int, int, int], given: ModelCall, compare: _Check
    ) -> Iterator[tuple[int, _Part]]:
        began = time.process_time()
        places = _places(self.model, given)
        shared = (time.process_time() - began) / len(places)
        for index in self._indices(len(places)):
            began = time.process_time()
            place = places[index]
            part = _Part(place.name if isinstance(place, OwnAttention) else place.layer.name)
            modules = [place.module] if isinstance(place, OwnAttention) else place.owners
            try:
                with weights_in_memory(*modules):
                    self._fill(part, place, index, key, compare)
            except _Moved:
                raise
            except CrossAttention as error:
                if self.layers is None:
                    continue
                part.failure = error
            except Exception as error:  # no failure of a measurement may end the training
                part.failure = part.failure or error
            part.seconds = shared + time.process_time() - began
            yield index, part

    def _fill(
        self, part: _Part, place: _Place, index: int, key: tuple[int, int, int], compare: _Check
    ) -> None:
        f: Callable[[Tensor], Tensor]
        if isinstance(place, OwnAttention):
            f, x = place.read(self.scope)
            compare(place, index)
        else:
            _check_finite(place)
            read = read_layer(place)
            compare(read, index)
            part.name = read.self_attention.layer.name
            site = read.sites(self.scope)[0]
            f, x = site.map, site.x
            inner = site if self.scope == "attention" else read.sites("attention")[0]
        step, *rest = key
        seed = int(np.random.SeedSequence([self.seed, step, index, *rest]).generate_state(1, np.uint64)[0])
        accuracy: dict[str, Any] = {"rtol": self.rtol, "confidence": self.confidence}
        try:
            part.estimate = local_lipschitz(f, x, **accuracy, max_iterations=self.max_iterations, seed=seed)
        except Exception as error:  # the scores of a layer that diverges are known all the same
            part.failure = error
        if isinstance(place, OwnAttention):
            place.add_scores(part.scores, x)
        else:
            part.scores.add_map(inner.map, inner.x)
        part.squares = x.double().square().sum(-1).flatten().cpu()
        part.fixed["tokens"] = x.shape[-2]
        if rest != [0, 0]:
            return
        if isinstance(place, OwnAttention):
            part.fixed |= {"map": place.describe()} | place.bound()
            part.fixed |= score_norm(place.map, "scores that are no bilinear form of the tokens")
        else:
            part.fixed["map"] = f.describe() if isinstance(f, TokenMap) else ""
            part.fixed |= score_norm(inner.map, "a layer of which not every parameter is known")

    def _record(self, blank: MonitorRecord, parts: list[_Part]) -> MonitorRecord:
        seconds = sum(part.seconds for part in parts)
        failure = next((part.failure for part in parts if part.failure is not None), None)
        if failure is not None and self.strict:
            raise failure
        # Where the tokens of some part were not read, nothing is known of them together.
        if all(len(part.squares) for part in parts):
            squares = torch.cat([part.squares for part in parts])
            scores = ScoreStatistics()
            for part in parts:
                scores.add(part.scores)
            blank = replace(
                blank,
                **parts[0].fixed | {"tokens": max(part.fixed["tokens"] for part in parts)} | scores.fields(),
                radius_mean=float(squares.mean().sqrt()),
                radius_max=float(squares.max().sqrt()),
            )
        if failure is not None:
            return replace(blank, failure=_reason(failure), seconds=seconds)
        estimates = [part.estimate for part in parts if part.estimate is not None]
        whole = {name: torch.cat([getattr(e, name).flatten() for e in estimates]) for name in _OF_EACH}
        return replace(
            blank,
            method=estimates[0].method,
            # The largest constant is at least the largest lower limit and at most the largest upper limit.
            lipschitz=float(whole["value"].max()),
            lower=float(whole["lower"].max()),
            upper=float(whole["upper"].max()),
            lipschitz_mean=float(whole["value"].mean()),
            confidence=self.confidence,
            rtol=self.rtol,
            converged=bool(whole["converged"].all()),
            iterations=int(whole["iterations"].max()),
            each=tuple(whole["value"].tolist()),
            seconds=seconds,
        )


_OF_EACH = ("value", "lower", "upper", "converged", "iterations")


def _places(model: nn.Module, given: ModelCall) -> list[_Place]:
    """Run the model, and return its attention layers, also those of hs.nn, in the order of their calls."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LipschitzAttention)}
    own: dict[str, list[OwnAttention]] = {name: [] for name in layers}
    names: list[str] = []  # of all attention layers in the order of their calls

    def inside(name: str) -> bool:
        return any(name == one or not one or name.startswith(f"{one}.") for one in own)

    def starts(call: Call) -> None:
        names.append(call.name)
        copies = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in call.arguments().items()}
        own[call.name].append(OwnAttention(call.name, layers[call.name], copies))

    def ends(call: Call) -> None:
        own[call.name][-1].output = call.output[0].detach().clone()

    def seen(layer: AttentionLayer) -> None:
        # Softmaxes inside layers of howsmooth.nn belong to these layers and are not captured.
        if not inside(layer.name):
            names.append(layer.name)

    with watched(layers, starts, ends):
        _, kept = trace_forward_pass(given, None, seen)
    others = iter([one for _, one in sorted(kept.items()) if not inside(one.layer.name)])
    places = [own[name].pop(0) if name in own else next(others) for name in names]
    if not places:
        capture(model, given.named)  # raises an error with the reason
        raise CaptureError(f"{type(model).__name__} has no attention that is captured.")
    return places


def _check_finite(place: TracedLayer) -> None:
    layer = place.layer
    for name, weight in layer.root.named_parameters():
        if not bool(weight.isfinite().all()):
            got = f"NaN or infinity in its {name}"
            raise NonFiniteError("model", expected=f"finite weights in {layer}", got=got)
    tokens = (first_tokens(call.arguments()) for call in place.calls)
    if any(x is not None and not bool(x.isfinite().all()) for x in tokens):
        got = "NaN or infinity from an earlier layer"
        raise NonFiniteError("model", expected=f"finite tokens for {layer}", got=got)


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, HowsmoothError) else f"{type(error).__name__}: {words[:300]}"
