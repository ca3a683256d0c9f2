"""Certify a saved model, and evaluate it on a file of data, for ``howsmooth certify``."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from howsmooth.errors import ArgumentError, ModelError, reason
from howsmooth.nn.certificates.certificate import ModelCertificate
from howsmooth.nn.certificates.evaluation import Evaluation, checked_inputs, evaluate, tokens_of
from howsmooth.nn.certificates.model_bound import certify
from howsmooth.nn.certificates.module_propagation import has_rules
from howsmooth.nn.saving import SavedModel, load_saved
from howsmooth.study.plans import CertificationPlan

__all__ = ["Certified", "certify_file"]

_INPUTS, _LABELS = "X", "y"


@dataclass(frozen=True, eq=False)
class Certified:
    """The certificate of a saved model, and the evaluation of the model on data."""

    asked: CertificationPlan
    saved: SavedModel
    certificate: ModelCertificate
    #: The largest norm of an input token. With ``clip`` the certificate itself holds for any norm.
    radius: float
    #: The evaluation on data; None if no data were given.
    evaluation: Evaluation | None
    #: The dtypes of the weights in the file, such as "float32 and float64".
    precision: str
    #: The dtype of the data; empty if no data were given.
    data_precision: str = ""


def certify_file(asked: CertificationPlan, on_batch: Callable[[int, int], None] | None = None) -> Certified:
    """Certify the model in a file, and evaluate it on data if the plan names any.

    ``on_batch`` is called after each batch with the number of inputs evaluated so far and the number of all
    inputs.

    Raises
    ------
    ModelError
        If a file cannot be used.
    ArgumentError
        If the length or the radius is given nowhere; if the data do not fit the model, or are missing
        although the model has a ``forward`` method of its own; or if the module of classes cannot be
        imported.
    CertificateError
        If the model cannot be certified.

    """
    try:
        saved = load_saved(asked.model, classes=() if asked.classes is None else _classes(asked.classes))
    except ModelError as error:
        if asked.data is None and "--classes" in str(error):
            raise ModelError(
                f"{error} Where such a class has a forward of its own, give --data FILE too: the first input "
                "is the example on which its operations are recorded."
            ) from error
        raise
    if asked.data is None and (asked.labels is not None or asked.clip):
        raise ArgumentError(
            "labels" if asked.labels is not None else "clip",
            expected="this option together with --data",
            got="no --data",
        )
    if asked.data is None and not has_rules(saved.model):
        raise ArgumentError(
            "data",
            expected="--data FILE: the model has a forward of its own, which is recorded at the first input",
            got="no --data",
        )
    inputs, labels = (None, None) if asked.data is None else _data(asked.data, asked.labels)
    length = asked.length or saved.length
    if length is None and inputs is not None:
        length = tokens_of(saved.model, checked_inputs(inputs)).shape[1]
    radius = asked.radius or saved.radius
    for name, value in (("length", length), ("radius", radius)):
        if value is None:
            raise ArgumentError(
                name,
                expected="a number",
                got="none, and the model was saved without one",
                remedy=f"Give it with --{name}.",
            )
    assert length is not None
    assert radius is not None
    precision = " and ".join(sorted({_word(p) for p in saved.model.parameters()})) or "no"
    if inputs is None:
        # Certify a float64 copy of the model, as the evaluation on data does.
        certificate = certify(copy.deepcopy(saved.model).double(), length, radius)
        return Certified(asked, saved, certificate, radius, None, precision)
    found = evaluate(
        saved.model,
        inputs,
        labels,
        length=length,
        radius=radius,
        clip=asked.clip,
        batch=asked.batch,
        on_batch=on_batch,
    )
    return Certified(asked, saved, found.certificate, radius, found, precision, _word(inputs))


def _classes(module: str) -> list[type[nn.Module]]:
    """Import a Python module, and return the subclasses of ``nn.Module`` in it that have an attribute
    ``settings``.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found = vars(importlib.import_module(module)).values()
    except Exception as error:  # the code of a module may raise any error
        raise ArgumentError(
            "classes", expected="a Python module that can be imported", got=f"{module!r} ({reason(error)})"
        ) from error
    finally:
        sys.path.remove(here)
    kinds = [one for one in found if isinstance(one, type) and issubclass(one, nn.Module)]
    return [one for one in kinds if hasattr(one, "settings")]


def _data(data: Path, labels: Path | None) -> tuple[Tensor, Tensor | None]:
    # Imported here because it imports transformers, which takes seconds.
    from howsmooth.models.inputs.array_files import read_arrays

    arrays = read_arrays(data, "data file")
    inputs = _one(arrays, data, "data", _INPUTS)
    if labels is not None:
        return inputs, _one(read_arrays(labels, "file of labels"), labels, "labels", _LABELS)
    return inputs, arrays.get(_LABELS) if len(arrays) > 1 else None


def _one(arrays: dict[str, Tensor], path: Path, what: str, name: str) -> Tensor:
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    if name not in arrays:
        names = ", ".join(sorted(arrays))[:200] or "none"
        raise ModelError(f"{what}: expected one array in {path}, or an array named {name}, got {names}.")
    return arrays[name]


def _word(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
