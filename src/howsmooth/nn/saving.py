"""Models in files: weights as safetensors, the rest as words in its metadata. No code is read, none is run.

The metadata of a file holds ``format``, ``version``, and ``model``: the tree of
:mod:`howsmooth.nn.description` as JSON, with the length and the radius of the certificate. Its tensors are
all parameters and buffers under the names that they have in the model, those of parametrizations
(orthogonal, spectral norm) as they are, so that the model that is read computes the same numbers to the last
bit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from howsmooth.errors import ArgumentError, ModelError
from howsmooth.nn.certificates.certification import foreign_hooks
from howsmooth.nn.description import (
    DescriptionError,
    KnownClasses,
    LimitedMemory,
    build,
    describe,
    first_line,
    parametrization_settings,
    place,
)

__all__ = ["SavedModel", "load", "load_saved", "save"]

FORMAT = "howsmooth.nn"
VERSION = 1
SUFFIX = ".safetensors"

_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
# What building takes beside the tensors themselves: initial values, temporaries of their decompositions.
_SPARE_NUMBERS = 2**20
_SPARE_COPIES = 16
_LARGEST_LENGTH = 2**53


@dataclass(frozen=True, eq=False)
class SavedModel:
    """What a file of :func:`save` holds.

    Attributes
    ----------
    model
        The model, in eval mode, on the CPU, in the precision in which it was saved.
    length
        The number of tokens that the certificate is for, if it was saved.
    radius
        The largest norm of a token that the certificate is for, if it was saved.
    notes
        Words that were saved with it.

    """

    model: nn.Module
    length: int | None
    radius: float | None
    notes: dict[str, str] = field(default_factory=dict)


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    length: int | None = None,
    radius: float | None = None,
    notes: Mapping[str, str] | None = None,
    classes: Sequence[type[nn.Module]] = (),
) -> Path:
    """Write a model so that :func:`load` gives one with bit-identical outputs and the same certificate.

    The model is built anew from its description before anything is written. If the two differ in anything
    but the values of their tensors (a layer changed after it was made, a parametrization that no settings
    tell), it is refused. Weights are copied to the CPU; optimisers and gradients are not saved.

    Parameters
    ----------
    model
        Made of layers of :mod:`howsmooth.nn`, :class:`torch.nn.Sequential`, and modules of :mod:`torch.nn`
        such as linear maps, activations, LayerNorm, RMSNorm, dropout and TransformerEncoderLayer. A tensor of
        one of the latter may have the parametrizations :func:`torch.nn.utils.parametrizations.orthogonal` and
        :func:`~torch.nn.utils.parametrizations.spectral_norm`.
    path
        Of the file, with the ending ``.safetensors``. A reader sees the old file or the new one, never a
        part.
    length, radius
        Of the sequences that the certificate is for; ``howsmooth certify`` takes them unless it is told
        others.
    notes
        Words to keep, such as how it was trained.
    classes
        Classes of your own among the modules, with a method ``settings`` as that of
        :class:`~howsmooth.nn.LipschitzModule`; :func:`load` needs them as well.

    Returns
    -------
    pathlib.Path
        Of the file.

    Raises
    ------
    ArgumentError
        If the model holds what a file cannot (the message names the module), or another argument is wrong.
    ModelError
        If the file cannot be written.

    """
    path = _path(path)
    if path.suffix != SUFFIX:
        raise ArgumentError("path", expected=f"a name that ends in {SUFFIX}", got=repr(str(path)))
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", expected="a torch.nn.Module", got=type(model).__name__)
    words = dict(notes or {})
    if not all(isinstance(one, str) for pair in words.items() for one in pair):
        raise ArgumentError("notes", expected="words under names that are words", got=repr(notes)[:80])
    known = KnownClasses(classes)
    try:
        tensors = _tensors(model)
        described = {
            "tree": describe(model, known),
            "length": _length(length),
            "radius": _radius(radius),
            "notes": words,
            "orders": {name: order for name, t in tensors.items() if (order := _order(t)) != sorted(order)},
        }
        _compare(model, _built(described["tree"], known, tensors))
    except DescriptionError as error:
        raise ArgumentError(
            "model",
            expected="one that a file can describe",
            got=f"one that it cannot: {error}",
            remedy="Save the state_dict of any other model with safetensors.",
        ) from error
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "model": json.dumps(described, allow_nan=False),
    }
    copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(copies, partial, metadata=metadata)
        partial.replace(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"The model file {_shown(path)} cannot be written: {_reason(error)}.") from error
    return path


def load(path: str | os.PathLike[str], *, classes: Sequence[type[nn.Module]] = ()) -> nn.Module:
    """Read a model that :func:`save` wrote: in eval mode, on the CPU, in the precision of the saved one.

    Nothing in a file is ever run, so that files of strangers can be read: what it says is compared with
    classes that are known, a constructor is called with numbers and words only, and no layer is made that is
    larger than the tensors in the file.

    Parameters
    ----------
    path
        Of the file.
    classes
        Classes of your own that the model was saved with.

    Raises
    ------
    ModelError
        If there is no such file, it is damaged, of another program or of a later version, or what it
        describes is no model; one sentence says which.

    """
    return load_saved(path, classes=classes).model


def load_saved(path: str | os.PathLike[str], *, classes: Sequence[type[nn.Module]] = ()) -> SavedModel:
    """Read what :func:`save` wrote: as :func:`load`, with the length, the radius and the notes."""
    path = _path(path)
    known = KnownClasses(classes)
    if not _is_file(path):
        raise ModelError(f"There is no model file {_shown(path)}.")
    try:
        described, tensors = _read(path)
        length, radius = _length(described.get("length")), _radius(described.get("radius"))
        model = _built(described.get("tree"), known, tensors)
        _fill(model, _laid_out(tensors, described.get("orders", {})))
    except (DescriptionError, ArgumentError) as error:
        raise ModelError(
            f"The model file {_shown(path)} cannot be used: {str(error).rstrip('.')}."
        ) from error
    return SavedModel(model.eval(), length, radius, described["notes"])


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise DescriptionError(
                    "it is a safetensors file of another program, without the description that "
                    "howsmooth.nn.save writes"
                )
            if metadata.get("version") != str(VERSION):
                raise DescriptionError(
                    f"it is of version {metadata.get('version', '?')[:20]} of the format, where this "
                    f"howsmooth reads version {VERSION}"
                )
            # Copies: what is read is a view of the file, which another program may write anew.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except MemoryError as error:
        raise DescriptionError("it does not fit into memory") from error
    except (OSError, SafetensorError, ValueError, TypeError, AttributeError) as error:
        raise DescriptionError(
            f"it is damaged, or no safetensors file: {_reason(error)}. Pickled models are never read"
        ) from error
    try:
        described = json.loads(metadata.get("model", ""))
    except (ValueError, RecursionError) as error:
        raise DescriptionError("its description is no JSON, or a nest too deep to read") from error
    notes = described.get("notes") if isinstance(described, dict) else None
    if not (isinstance(notes, dict) and all(isinstance(one, str) for one in notes.values())):
        raise DescriptionError("its description is no object with a tree, notes, a length and a radius")
    return described, tensors


def _built(tree: Any, known: KnownClasses, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build a model whose tensors have the names and shapes of these, with random numbers of its own."""
    numbers = sum(t.numel() for t in tensors.values())
    try:
        with torch.random.fork_rng(devices=[]), LimitedMemory(_SPARE_COPIES * numbers + _SPARE_NUMBERS):
            model = build(tree, known)
    except (MemoryError, RecursionError) as error:
        raise DescriptionError(f"building it fails: {first_line(error)}") from error
    made = _tensors(model)
    for name in sorted({*made, *tensors}):
        if name not in made or name not in tensors:
            where = "the file" if name not in tensors else "the model that is described"
            raise DescriptionError(f"the tensor {name[:80]} is missing in {where}")
        if made[name].shape != tensors[name].shape:
            raise DescriptionError(
                f"the tensor {name[:80]} has the shape {tuple(tensors[name].shape)}, where the model that is "
                f"described needs {tuple(made[name].shape)}"
            )
        if made[name].is_floating_point() != tensors[name].is_floating_point():
            raise DescriptionError(f"the tensor {name[:80]} holds {tensors[name].dtype}")
    return model


def _fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put values in place; a tensor takes its precision, too, and what is tied stays tied."""
    for name, t in _tensors(model).items():
        t.data = tensors[name]


def _order(t: Tensor) -> list[int]:
    """List the axes of a tensor from the outermost in memory to the innermost."""
    return sorted(range(t.ndim), key=lambda axis: (-t.stride()[axis], axis)) if not t.is_contiguous() else []


def _laid_out(tensors: Mapping[str, Tensor], orders: Any) -> dict[str, Tensor]:
    """Lay tensors out in memory as they were: a product of matrices may round otherwise in another layout."""
    if not isinstance(orders, dict) or not all(
        name in tensors
        and isinstance(order, list)
        and all(type(axis) is int for axis in order)
        and sorted(order) == list(range(tensors[name].ndim))
        for name, order in orders.items()
    ):
        raise DescriptionError("the orders of axes in its description are none")
    laid = dict(tensors)
    for name, order in orders.items():
        back = sorted(range(len(order)), key=order.__getitem__)
        laid[name] = tensors[name].permute(order).contiguous().permute(back)
    return laid


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name all parameters and buffers, those as well that a state_dict leaves out."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    found: dict[str, Tensor] = dict(named)
    for name, t in found.items():
        if is_lazy(t) or t.is_meta or t.layout is not torch.strided:
            raise DescriptionError(f"the tensor {name[:80]} holds no plain numbers")
        if t.dtype not in _DTYPES:
            raise DescriptionError(f"the tensor {name[:80]} holds {t.dtype}")
    return found


def _compare(model: nn.Module, again: nn.Module) -> None:
    """Refuse a model that its description does not give again."""
    first, second = dict(model.named_modules()), dict(again.named_modules())
    for path, module in first.items():
        where, other = place(path), second.get(path)
        if other is None or parametrize.type_before_parametrizations(
            module
        ) is not parametrize.type_before_parametrizations(other):
            raise DescriptionError(f"its settings do not tell of {where}")
        if "forward" in vars(module) or foreign_hooks(module):
            raise DescriptionError(f"{where} has hooks or a forward that was put on it, which are code")
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise DescriptionError(f"{where} keeps a state of its own beside its tensors")
        if _steps(module) != _steps(other):
            raise DescriptionError(f"the settings of {where} do not tell of its parametrizations")
        # A layer of ours may well print what its weights say.
        ask = "settings" if hasattr(module, "settings") else "extra_repr"
        if getattr(module, ask)() != getattr(other, ask)():
            raise DescriptionError(f"{where} was changed after it was made")
    missing = [path for path in second if path not in first]
    if missing:
        raise DescriptionError(f"{place(missing[0])} was taken out after it was made")
    if _ties(model) != _ties(again):
        raise DescriptionError("modules share a tensor, which their settings do not tell")


def _steps(module: nn.Module) -> dict[str, list[Any]]:
    if not parametrize.is_parametrized(module):
        return {}
    return {
        name: [(type(one), parametrization_settings(one)) for one in chain]
        for name, chain in module.parametrizations.items()  # type: ignore[union-attr, operator]
    }


def _ties(model: nn.Module) -> dict[str, str]:
    """Give each tensor's name the first name under which it stands."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in _tensors(model).items()}


def _length(length: Any) -> int | None:
    if length is not None and (type(length) is not int or not 1 <= length <= _LARGEST_LENGTH):
        raise ArgumentError("length", expected="a whole number of at least 1, or None", got=repr(length)[:80])
    return length


def _radius(radius: Any) -> float | None:
    if radius is None:
        return None
    if (
        isinstance(radius, bool)
        or not isinstance(radius, int | float)
        or not (math.isfinite(radius) and radius > 0)
    ):
        raise ArgumentError("radius", expected="a finite number > 0, or None", got=repr(radius)[:80])
    return float(radius)


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise ArgumentError("path", expected="the path of a file", got=repr(path)[:80])
    return Path(path).expanduser()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _shown(path: Path) -> str:
    return str(path) if len(str(path)) <= 200 else f"{str(path)[:197]}..."


def _reason(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
