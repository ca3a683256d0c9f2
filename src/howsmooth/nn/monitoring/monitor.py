"""The class ``LipschitzMonitor``, which measures local Lipschitz constants of attention during training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.errors import check_number, check_whole
from howsmooth.models.loading.load import LoadedModel
from howsmooth.nn.checks import check
from howsmooth.nn.monitoring.clipped_logits import clip
from howsmooth.nn.monitoring.gathered_model import gathered, without_wrappers
from howsmooth.nn.monitoring.gradient_ratios import watch_gradients
from howsmooth.nn.monitoring.measurement import ProbeInputs, Probes, Reading
from howsmooth.nn.monitoring.record import MonitorRecord
from howsmooth.printed_table import PrintedTable
from howsmooth.scopes import SCOPES

__all__ = ["LipschitzMonitor"]

# Modules without a forward of their own: torch.nn.Module and Lightning's LightningModule.
_NO_FORWARD = ("_forward_unimplemented", "LightningModule.forward")

# A monitor writes one row for each layer, so the scope of single heads is not available.
_SCOPES = tuple(scope for scope in SCOPES if scope != "head")


class LipschitzMonitor:
    """A monitor that measures every attention layer of a model at fixed inputs, at regular training steps.

    Each measurement gives one row for each layer (:class:`MonitorRecord`): the local Lipschitz constant with
    its interval, the norm of the score matrices, the entropy of the attention probabilities, and the norms of
    the tokens. The attribute ``records`` has all of them. ArgumentError names an argument of a wrong type or
    value.

    The monitor does not change the training: losses are the same to the last bit. It restores the random
    states of PyTorch, NumPy and Python, the training flags of all modules, gradients, buffers, hooks and the
    default dtype. The forward pass on the probe inputs runs in evaluation mode, without autocast, in the
    dtype of the weights, or in float32 if they are in half precision. It calls the model, including the
    user's forward hooks.

    Parameters
    ----------
    model
        Any model that :func:`~howsmooth.models.capture` supports, or a model with attention layers of
        :mod:`howsmooth.nn`, which are measured by their ``map``; also inside ``torch.compile``,
        DistributedDataParallel and FSDP (``FullyShardedDataParallel``, ``fully_shard``). With the latter two,
        each process has a monitor and calls it, the first process measures, and the others get no records;
        FSDP gathers the parameters as a whole for this time, so measure after a step of the optimizer.
    probes
        The fixed inputs of the measurements, as for :func:`~howsmooth.models.capture`: a batch of sequences,
        for example of validation data, or a list of batches of different lengths. They are copied. Sequences
        with padding are measured one by one, without the padding.
    every
        Number of training steps from one measurement to the next.
    callback
        Function that is called with each record. :meth:`~howsmooth.nn.MonitorRecord.tagged` returns its
        numbers for a logger, and ``as_dict`` all fields for a file. Exceptions of the function are not
        caught.
    layers
        Indices of the layers to measure, in the order of the forward pass; negative ones count from the end.
        The default is all self-attention layers. If layers are given, the model is run on the first probe
        input, to refuse a layer that it does not have.
    scope
        The part of a layer that is measured, as for :func:`~howsmooth.models.capture`, except ``"head"``.
    rtol, confidence, max_iterations
        As for :func:`~howsmooth.local_lipschitz`. The default accuracy of one percent is enough for a curve.
    seed
        Seed of the random starts, which differ between steps and between layers.
    strict
        Whether to raise errors of a measurement. By default a layer that fails gets a row with the reason in
        ``failure``, with a warning at its first failure, which names weights that are not finite.
    gradients
        Whether to keep lower limits from all backward passes after the first measurement, in the field
        ``gradient_lower``, without an allowance for rounding. It is None if no pass was finite. Gradients
        may change in their last bits.
    clip_logits
        A limit τ > 0 of the logits, such as 100. If a logit S is larger, query and key weights of its head
        are scaled by √(τ / S) each after the measurement, layer by layer, so that none is at the probes.

    """

    def __init__(
        self,
        model: nn.Module | LoadedModel,
        probes: ProbeInputs,
        *,
        every: int = 100,
        callback: Callable[[MonitorRecord], object] | None = None,
        layers: Sequence[int] | None = None,
        scope: str = "attention",
        rtol: float = 1e-2,
        confidence: float = 0.999,
        max_iterations: int = 200,
        seed: int = 0,
        strict: bool = False,
        gradients: bool = False,
        clip_logits: float | None = None,
    ) -> None:
        if isinstance(model, LoadedModel):
            model = model.model
        kind = type(model).__name__
        check(isinstance(model, nn.Module), "model", "a torch.nn.Module", kind)
        own = getattr(model.forward, "__qualname__", "") not in _NO_FORWARD
        expected = "a module with a forward of its own, which takes the probes"
        remedy = "Give the module inside of it that does, such as module.model."
        check(own, "model", expected, f"{kind}, which has none", remedy)
        check_whole("every", every)
        check_whole("max_iterations", max_iterations)
        check_whole("seed", seed, least=0)
        single = "A row is a whole layer; hs.profile measures each head." if scope == "head" else ""
        check(scope in _SCOPES, "scope", f"one of {', '.join(_SCOPES)}", repr(scope), single)
        known = callback is None or callable(callback)
        check(known, "callback", "a function of a record", type(callback).__name__)
        if clip_logits is not None:
            check_number("clip_logits", clip_logits)
            several = torch.distributed.is_available() and torch.distributed.is_initialized()
            check(not several, "clip_logits", "None where several processes train", repr(clip_logits))
        if layers is not None:
            several = isinstance(layers, Sequence) and not isinstance(layers, str) and len(layers) > 0
            indices = several and all(type(index) is int for index in layers)
            check(indices, "layers", "a list of layer indices, or None", repr(layers))
        #: The model as it is trained, inside the wrappers of distributed training.
        self.trained = model
        self.model = without_wrappers(model)
        self.probes = Probes(self.model, probes)
        double = any(p.dtype == torch.float64 for p in self.model.parameters())
        check_accuracy(rtol, confidence, "float64" if double else "float32")
        self.every = every
        self.callback = callback
        self.layers = None if layers is None else tuple(layers)
        self.scope = scope
        self.records: list[MonitorRecord] = []
        accuracy = float(rtol), float(confidence), max_iterations, seed
        self._measurement = Reading(self.model, self.probes, self.layers, scope, *accuracy, bool(strict))
        self._steps = 0
        self._failed: set[int | None] = set()
        self._gradients, self._clip_logits = gradients, clip_logits
        self._ratios: dict[str, Tensor] = {}
        if self.layers is not None:
            with gathered(self.trained, self.model) as runs_here:
                if runs_here:
                    self._measurement.check_layers()

    def step(self, step: int | None = None) -> list[MonitorRecord]:
        """Count an optimizer step. Measure the model if the count reaches or passes a multiple of ``every``.

        ``step`` is the number of steps so far, by default one more than at the last call. The result has the
        records of this measurement, and is empty if nothing was measured.
        """
        before = self._steps
        self._steps = self._steps + 1 if step is None else check_whole("step", step, least=0)
        # Where several optimizers step in a batch, the count may pass a multiple without being one.
        passed = before > 0 and before // self.every < self._steps // self.every
        return self.measure(self._steps) if self._steps % self.every == 0 or passed else []

    def measure(self, step: int | None = None) -> list[MonitorRecord]:
        """Measure the attention layers of the model now, for instance before training.

        ``step`` is the number of steps so far, from which :meth:`step` goes on, by default those counted.
        """
        self._steps = at = self._steps if step is None else check_whole("step", step, least=0)
        with gathered(self.trained, self.model) as runs_here:
            if not runs_here:
                return []
            rows = self._measurement.at(at)
            failed = [one for one in rows if one.failure and one.layer not in self._failed]
            named = self.model.named_parameters() if failed else ()
            broken = [name for name, p in named if not bool(p.isfinite().all())]
        rows = [replace(one, gradient_lower=self.gradient_lower().get(one.name)) for one in rows]
        self._ratios.clear()
        if self._gradients and (names := {one.name for one in rows if one.layer is not None}):
            watch_gradients(self.model, names, self._ratios)
            self._gradients = False
        if (limit := self._clip_logits) and any((one.logit_max or 0.0) > limit for one in rows):
            rows = [replace(one, clipped=clip(self.model, self.probes.inputs, one, limit)) for one in rows]
        for record in rows:
            self.records.append(record)
            if self.callback is not None:
                self.callback(record)
        for record in failed[:1] if broken else failed:
            where = "the model" if record.layer is None else f"layer {record.layer} ({record.name})"
            words = f"The monitor could not measure {where} at step {at}: {record.failure}"
            words += f" Not finite are {len(broken)} weights: {', '.join(broken[:4])}." if broken else ""
            warnings.warn(words, stacklevel=3)
        self._failed.update(one.layer for one in rows if one.failure or broken)
        return rows

    def gradient_lower(self) -> dict[str, float]:
        """Return this field of the next records as it is now, by the names of the layers."""
        return {name: float(ratio) for name, ratio in self._ratios.items() if not ratio.isnan()}

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Call :meth:`step` after each step of an optimizer, until ``remove()`` of the result is called."""
        known = isinstance(optimizer, torch.optim.Optimizer)
        check(known, "optimizer", "a torch.optim.Optimizer", type(optimizer).__name__)

        def stepped(*_: object) -> None:
            self.step()

        return optimizer.register_step_post_hook(stepped)

    def table(self) -> pd.DataFrame:
        """Return all records so far as a table, without the constants of single sequences (``each``)."""
        columns = {
            name: one.type for name, one in MonitorRecord.__dataclass_fields__.items() if name != "each"
        }
        frame = PrintedTable([record.as_dict() for record in self.records], columns=[*columns])
        kinds = {"int | None": "Int64", "bool | None": "boolean", "float | None": "float", "float": "float"}
        return frame.astype({name: kinds[kind] for name, kind in columns.items() if kind in kinds})

    def __repr__(self) -> str:
        layers = "all layers" if self.layers is None else f"layers {', '.join(map(str, self.layers))}"
        return (
            f"LipschitzMonitor({type(self.model).__name__}, {layers}, scope {self.scope}, every {self.every} "
            f"steps, {self.probes.sequences} sequences, {len(self.records)} rows)"
        )
