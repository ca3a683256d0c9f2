"""Checks that a model gives the same outputs when it is measured as when its user calls it."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from howsmooth.errors import CaptureError
from howsmooth.models.finite_weights import naming_weights
from howsmooth.models.float32_weights import HALF
from howsmooth.models.inputs.model_inputs import model_inputs
from howsmooth.models.measurement_mode import configs, measurement_mode, quiet
from howsmooth.models.model_call import ModelCall
from howsmooth.models.padded_sequences import padding_of
from howsmooth.models.preserved_state import preserved_state
from howsmooth.models.tolerance import relative_error
from howsmooth.models.tracing.attention_recorder import Recorder, own_copies, run_once

__all__ = ["as_called"]

# The relative difference of outputs that rounding explains in single precision; and in half precision, which
# may leave less than one digit after many layers.
_SINGLE, _HALF = 1e-4, 0.5
_CACHES = frozenset({"past_key_values", "cache_params"})


@contextmanager
def as_called(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    wanted: Sequence[int] | None = (),
    *,
    training: bool = True,
) -> Iterator[ModelCall]:
    """Return a context manager that prepares a model for measurement and yields its checked inputs.

    What ``measurement_mode`` changes may not change the outputs of the model: where a change can matter, the
    model is run once more without this change. A cache that matters stays on, and stores nothing. Without
    ``training``, training mode is not compared. If a run shows what the layers ``wanted`` do as they are
    measured, it is the ``record`` of the call. An ArgumentError is raised for a model or an input of a kind
    that is not measured, and a CaptureError if the outputs differ by more than rounding, or in training mode
    by more than random numbers. A weight that is not finite is named by the errors that it causes.
    """
    given = _compared(model_inputs(model, inputs), wanted, training)
    with measurement_mode(model), naming_weights(given.model):
        yield given


class _Forgetting(DynamicCache):  # type: ignore[misc]
    """A cache that stays empty: at each call it returns only the keys and values that it is given."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _compared(given: ModelCall, wanted: Sequence[int] | None, training: bool) -> ModelCall:
    """Check that measuring a model does not change its outputs; return the inputs to measure it with."""
    model = given.model
    known, modules = isinstance(model, PreTrainedModel), list(model.modules())
    named, padding, trained = given.named, padding_of(given), any(m.training for m in modules)
    cached = any(getattr(config, "use_cache", False) for config in configs(model))
    if known and "use_cache" in named:
        cached, given = named["use_cache"], replace(given, named={**named, "use_cache": False})
    plain: tuple[Any, Recorder | None] = None, None  # what the model returns as it is measured

    def returned(
        named: Mapping[str, Any], keep: Collection[str] = (), drawn: int = 1
    ) -> tuple[Any, Recorder | None]:
        with measurement_mode(model, keep), preserved_state(model), quiet():
            # Random numbers are other ones than in the layers that run by themselves later.
            torch.rand(drawn, device=given.device), random.random(), np.random.rand()  # noqa: NPY002
            if "precision" in keep:
                return model(**own_copies(named)), None
            call = replace(given, named=dict(named))
            if padding is not None or not {"cache"}.issuperset(keep):
                return run_once(call), None
            record = Recorder(call, wanted, whole=True)
            return record.run(), record

    def attempt(*how: Any) -> tuple[Any, Recorder | None]:
        try:
            return returned(*how)
        except Exception:  # any code may run here; the measurement says what is wrong
            return None, None

    def error(called: Any) -> float:
        nonlocal plain
        plain = returned(given.named) if plain[0] is None else plain
        return _difference(called, plain[0], None if padding is None else padding.real)

    def check(called: Any, user: str, measured: str, remedy: str, allowed: float = _SINGLE) -> None:
        if called is not None and not error(called) <= allowed:
            raise CaptureError(
                f"{type(model).__name__} gives other outputs {user}, as it is called, than {measured}, as it "
                f"is measured (relative difference {error(called):.1e}). {remedy}"
            )

    called, record = attempt(named, {"cache"}) if cached else (None, None)
    if known and isinstance(called, Mapping) and not _CACHES & called.keys():
        plain = called, record  # no cache was there to be switched off
    elif known and called is not None and error(called) > _SINGLE:
        kept = {**named, "use_cache": True, "past_key_values": _Forgetting()}
        again = [attempt(kept)[0], attempt(kept)[0]]  # a state that a cache keeps all the same would show
        if all(one is not None and _difference(called, one) <= _SINGLE for one in again):
            given, plain = replace(given, named=kept), (again[0], None)
    remedy = "Call and measure it with use_cache=False, as an argument or in its configuration, or with an "
    check(called, "with its cache", "without one", f"{remedy}attention_mask.")
    of_torch = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
    if not trained and padding is None and any(isinstance(m, of_torch) for m in modules):
        called, _ = attempt(given.named, {"fast path"})
        remedy = "Switch it off: torch.backends.mha.set_fastpath_enabled(False)."
        check(called, "with PyTorch's fast path", "without it", remedy)
    stored, device = given.stored, given.device.type
    prepared = any("_original_forward" in vars(module) for module in modules)
    if stored in HALF or prepared or torch.is_autocast_enabled(device):
        as_stored = {
            name: value.to(stored) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in named.items()
        }
        called, _ = attempt(as_stored, {"cache", "fast path", "precision"})
        remedy = "Use and measure model.float(), without autocast."
        check(called, "in half precision", "in float32", remedy, _HALF)
    if training and trained:
        called, _ = attempt(given.named, {"training"})
        if called is not None and error(called) > _SINGLE:
            again, _ = attempt(given.named, {"training"}, 1009)
            if again is not None and _difference(called, again) <= _SINGLE:
                remedy = "No random numbers cause this. Call model.eval() first."
                check(called, "in training mode", "in evaluation mode", remedy)
    if plain[1] is not None:
        object.__setattr__(given, "record", (plain[1].layers, plain[1].kept))
    return given


def _difference(called: Any, measured: Any, real: Tensor | None = None) -> float:
    errors, wanted = [0.0], _tensors(measured)
    for name, t in _tensors(called).items():
        pair = [t, wanted.get(name, t)]
        for mask in () if real is None else (real, real.mT):
            pair = [t[mask] if t.shape[:2] == mask.shape else t for t in pair]
        if pair[0].shape != pair[1].shape:
            return math.inf
        some = pair[0].isfinite() | pair[1].isfinite()
        if bool(some.any()):
            errors.append(relative_error(*(pair if bool(some.all()) else (t[some] for t in pair))))
    return max(math.inf if math.isnan(one) else one for one in errors)


def _tensors(output: Any) -> dict[str, Tensor]:
    if isinstance(output, tuple | list):
        output = next((t for t in output if isinstance(t, Tensor)), None)
    found = {"": output} if isinstance(output, Tensor) else output
    found = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
    return {name: t for name, t in found.items() if isinstance(t, Tensor) and t.is_floating_point()}
