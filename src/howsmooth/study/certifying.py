"""A saved model and a file of data, certified: what ``howsmooth certify`` does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from howsmooth.errors import ArgumentError, ModelError
from howsmooth.nn.certificates.certificate import ModelCertificate
from howsmooth.nn.certificates.certification import certify
from howsmooth.nn.certificates.evaluation import Evaluation, evaluate, tokens_of
from howsmooth.nn.saving import SavedModel, load_saved
from howsmooth.study.plan import CertificationPlan

__all__ = ["Certified", "certify_file"]

_INPUTS, _LABELS = "X", "y"


@dataclass(frozen=True, eq=False)
class Certified:
    """What was found."""

    asked: CertificationPlan
    saved: SavedModel
    certificate: ModelCertificate
    #: The radius that inputs are held against, which with ``clip`` is not that of the certificate.
    radius: float
    #: None without data.
    evaluation: Evaluation | None
    #: Precisions of the weights in the file, in words.
    precision: str
    #: That of the data, empty without any.
    data_precision: str = ""


def certify_file(asked: CertificationPlan, on_batch: Callable[[int, int], None] | None = None) -> Certified:
    """Certify the model of a file, and evaluate it on data if there are any.

    Raises
    ------
    ModelError
        If a file cannot be used.
    ArgumentError
        If length or radius are nowhere said, or the data do not fit.
    CertificateError
        If the model cannot be certified.

    """
    saved = load_saved(asked.model)
    if asked.data is None and (asked.labels is not None or asked.clip):
        raise ArgumentError(
            "labels" if asked.labels is not None else "clip",
            expected="it together with data",
            got="no --data",
        )
    inputs, labels = (None, None) if asked.data is None else _data(asked.data, asked.labels)
    length = asked.length or saved.length
    if length is None and inputs is not None:
        length = tokens_of(saved.model, inputs).shape[1]
    radius = asked.radius or saved.radius
    for name, value in (("length", length), ("radius", radius)):
        if value is None:
            raise ArgumentError(
                name,
                expected="a number",
                got="none, as the model was saved without one",
                remedy=f"Give it with --{name}.",
            )
    assert length is not None
    assert radius is not None
    precision = _precisions(saved.model)
    if inputs is None:
        # The weights as numbers, whatever their precision, as with data.
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


def _data(data: Path, labels: Path | None) -> tuple[Tensor, Tensor | None]:
    # With it comes transformers, which takes seconds.
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
        raise ModelError(f"{what}: expected one array in {path}, or one of the name {name}, got {names}.")
    return arrays[name]


def _precisions(model: nn.Module) -> str:
    return " and ".join(sorted({_word(p) for p in model.parameters()})) or "no"


def _word(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
