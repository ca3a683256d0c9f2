"""Saving and loading of models as safetensors with class names and settings in the metadata, and without
code.

The metadata of a file has the entries ``format``, ``version`` and ``model``. ``model`` is the tree of
:mod:`howsmooth.nn.model_config` as JSON, with length and radius of the certificate. The tensors are all
parameters and buffers under their names in the model. Unconstrained tensors of parametrizations (orthogonal,
spectral norm) are stored unchanged, so that a loaded model computes the same numbers to the last bit.
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

from howsmooth.bounds.radius.pretrained_classifier_reader import foreign_hooks
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.nn.model_config import (
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
# Building a model takes memory besides its tensors, for initial values and their decompositions. It may take
# this many copies of all tensors and this many further numbers.
_SPARE_NUMBERS = 2**20
_SPARE_COPIES = 16
_LARGEST_LENGTH = 2**53
_INFINITE = "inf"  # JSON has no number for it.


@dataclass(frozen=True, eq=False)
class SavedModel:
    """The contents of a file that :func:`save` wrote: a model, the length and radius of its input, and notes.

    Attributes
    ----------
    model
        The model, in evaluation mode, on the CPU, in the dtype in which it was saved.
    length
        The number of tokens for the certificate, or None.
    radius
        The largest norm of a token for the certificate, or None.
    notes
        Texts that were saved with the model, by name.

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
    """Write a model to a file from which :func:`load` rebuilds it with bit-identical outputs.

    Before anything is written, the model is rebuilt from its description. If the two models differ in
    anything but the values of their tensors, an error is raised. This happens if a layer was changed after
    its construction, or has a parametrization that its settings do not mention. Weights are copied to the
    CPU. Optimizers and gradients are not saved.

    Parameters
    ----------
    model
        A model that consists of layers of :mod:`howsmooth.nn`, :class:`torch.nn.Sequential`, and modules of
        :mod:`torch.nn` such as linear maps, activations, LayerNorm, RMSNorm, dropout and
        TransformerEncoderLayer. Tensors of modules of :mod:`torch.nn` may have the parametrizations
        :func:`torch.nn.utils.parametrizations.orthogonal` and
        :func:`~torch.nn.utils.parametrizations.spectral_norm`.
    path
        Path of the file, which must end in ``.safetensors``. The file is replaced atomically, so a reader
        never finds a part of it.
    length, radius
        Number of tokens and their largest norm for the certificate, which is ``math.inf`` for all tokens.
        They are the defaults of ``howsmooth certify``.
    notes
        Texts to save with the model, by name, such as how it was trained.
    classes
        The caller's own classes among the modules. They need a method ``settings`` like
        :class:`~howsmooth.nn.LipschitzModule`, and :func:`load` needs the same classes.

    Returns
    -------
    pathlib.Path
        Path of the file.

    Raises
    ------
    ArgumentError
        If a file cannot hold the model (the message names the module), or another argument is wrong.
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
        raise ArgumentError("notes", expected="a dictionary of strings", got=repr(notes)[:80])
    known = KnownClasses(classes)
    try:
        tensors = _tensors(model)
        described = {
            "tree": describe(model, known),
            "length": _length(length),
            "radius": _INFINITE if radius == math.inf else _radius(radius),
            "notes": words,
            "orders": {name: order for name, t in tensors.items() if (order := _order(t)) != sorted(order)},
        }
        again = _built(described["tree"], known, tensors)
        _compare(model, again)
        _check_tensors(again, tensors)
    except DescriptionError as error:
        raise ArgumentError(
            "model",
            expected="a model that a file can describe",
            got=f"a model that it cannot: {error}",
            remedy="For other models, save the state_dict with torch.save. In place of a copy that "
            "hs.nn.deploy made, save the original, and deploy what hs.nn.load returns.",
        ) from error
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "model": json.dumps(described, allow_nan=False),
    }
    copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    # The file is written under another name and renamed, so that readers never see a part of it.
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(copies, partial, metadata=metadata)
        partial.replace(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"The model file {_shown(path)} cannot be written: {_reason(error)}.") from error
    return path


def load(path: str | os.PathLike[str], *, classes: Sequence[type[nn.Module]] = ()) -> nn.Module:
    """Load a model that :func:`save` wrote.

    The model is in evaluation mode, on the CPU, in the dtype in which it was saved. Nothing in a file is ever
    executed, so files from untrusted sources are safe to load. Class names in the file are compared with
    known classes, constructors get numbers and strings only, and no layer is built that is much larger than
    the tensors in the file.

    Parameters
    ----------
    path
        Path of the file.
    classes
        The caller's own classes with which the model was saved.

    Raises
    ------
    ModelError
        If the file does not exist, is damaged, comes from another program or a later version, or describes no
        model. The message says which.

    """
    return load_saved(path, classes=classes).model


def load_saved(path: str | os.PathLike[str], *, classes: Sequence[type[nn.Module]] = ()) -> SavedModel:
    """Return the contents of a file that :func:`save` wrote: model, length, radius and notes.

    The file is read as safely as by :func:`load`, with the same errors.
    """
    path = _path(path)
    known = KnownClasses(classes)
    if not _is_file(path):
        raise ModelError(f"There is no model file {_shown(path)}.")
    try:
        described, tensors = _read(path)
        length, radius = _length(described.get("length")), described.get("radius")
        radius = math.inf if radius == _INFINITE else _radius(radius)
        model = _built(described.get("tree"), known, tensors)
        _check_tensors(model, tensors)
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
                    f"it has version {metadata.get('version', '?')[:20]} of the format, but this howsmooth "
                    f"reads version {VERSION}"
                )
            # The tensors are views of the file, which another program may overwrite, so they are copied.
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
        raise DescriptionError("its description is not JSON, or is nested too deeply") from error
    notes = described.get("notes") if isinstance(described, dict) else None
    if not (isinstance(notes, dict) and all(isinstance(one, str) for one in notes.values())):
        raise DescriptionError("its description is not an object with tree, notes, length and radius")
    return described, tensors


def _built(tree: Any, known: KnownClasses, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Construct the model that a file describes. Its weights are random; the saved ones are loaded later.

    DescriptionError is raised if this needs far more memory than the saved ``tensors``.
    """
    numbers = sum(t.numel() for t in tensors.values())
    try:
        with torch.random.fork_rng(devices=[]), LimitedMemory(_SPARE_COPIES * numbers + _SPARE_NUMBERS):
            return build(tree, known)
    except (MemoryError, RecursionError) as error:
        raise DescriptionError(f"building it fails: {first_line(error)}") from error


def _check_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise DescriptionError unless the names and shapes of ``tensors`` are those of the model's tensors.

    The error is also raised if only one of two tensors of the same name is floating-point.
    """
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
            raise DescriptionError(f"the tensor {name[:80]} has the dtype {tensors[name].dtype}")


def _fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set the tensors of a model to the values and dtypes of the tensors of a file, and keep tied tensors
    tied.
    """
    for name, t in _tensors(model).items():
        t.data = tensors[name]


def _order(t: Tensor) -> list[int]:
    """Return the axes of a tensor in the order of its memory layout, the outermost axis first.

    The result is empty if the tensor is contiguous.
    """
    return sorted(range(t.ndim), key=lambda axis: (-t.stride()[axis], axis)) if not t.is_contiguous() else []


def _laid_out(tensors: Mapping[str, Tensor], orders: Any) -> dict[str, Tensor]:
    """Return the tensors in the memory layouts that they had when they were saved.

    The layout can affect the rounding of matrix products.
    """
    if not isinstance(orders, dict) or not all(
        name in tensors
        and isinstance(order, list)
        and all(type(axis) is int for axis in order)
        and sorted(order) == list(range(tensors[name].ndim))
        for name, order in orders.items()
    ):
        raise DescriptionError("the orders of axes in its description are not valid")
    laid = dict(tensors)
    for name, order in orders.items():
        # The inverse permutation of the axes.
        back = sorted(range(len(order)), key=order.__getitem__)
        laid[name] = tensors[name].permute(order).contiguous().permute(back)
    return laid


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a model by name, including those that a state_dict leaves out."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    found: dict[str, Tensor] = dict(named)
    for name, t in found.items():
        if is_lazy(t) or t.is_meta or t.layout is not torch.strided:
            raise DescriptionError(f"the tensor {name[:80]} is not a dense tensor with values")
        if t.dtype not in _DTYPES:
            raise DescriptionError(f"the tensor {name[:80]} has the dtype {t.dtype}")
    return found


def _compare(model: nn.Module, again: nn.Module) -> None:
    """Raise DescriptionError if a rebuilt model differs from the original.

    Only the values of tensors may differ.
    """
    first, second = dict(model.named_modules()), dict(again.named_modules())
    for path, module in first.items():
        where, other = place(path), second.get(path)
        if other is None:
            raise DescriptionError(f"its settings do not mention {where}")
        kinds = [parametrize.type_before_parametrizations(one) for one in (module, other)]
        if kinds[0] is not kinds[1]:
            raise DescriptionError(
                f"{type(model).__name__}(**settings()) builds {kinds[1].__name__} at {path}, but the model "
                f"has {kinds[0].__name__} there: build it in __init__"
            )
        if "forward" in vars(module) or foreign_hooks(module):
            raise DescriptionError(f"{where} has hooks or a replaced forward, which are code")
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise DescriptionError(f"{where} keeps extra state besides its tensors")
        if _steps(module) != _steps(other):
            raise DescriptionError(f"the settings of {where} do not mention its parametrizations")
        # extra_repr of a layer of howsmooth.nn may depend on its weights, so its settings are compared
        # instead.
        ask = "settings" if hasattr(module, "settings") else "extra_repr"
        if getattr(module, ask)() != getattr(other, ask)():
            raise DescriptionError(f"{where} was changed after its construction")
    missing = [path for path in second if path not in first]
    if missing:
        raise DescriptionError(f"{place(missing[0])} was removed after its construction")
    if _ties(model) != _ties(again):
        raise DescriptionError("modules share a tensor, which their settings do not mention")


def _steps(module: nn.Module) -> dict[str, list[Any]]:
    if not parametrize.is_parametrized(module):
        return {}
    return {
        name: [(type(one), parametrization_settings(one)) for one in chain]
        for name, chain in module.parametrizations.items()  # type: ignore[union-attr, operator]
    }


def _ties(model: nn.Module) -> dict[str, str]:
    """Return a dict that maps each tensor name in the model to the first name of the same tensor.

    Tied tensors have several names.
    """
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in _tensors(model).items()}


def _length(length: Any) -> int | None:
    if length is not None and (type(length) is not int or not 1 <= length <= _LARGEST_LENGTH):
        raise ArgumentError("length", expected="a whole number of at least 1, or None", got=repr(length)[:80])
    return length


def _radius(radius: Any) -> float | None:
    if radius is None:
        return None
    if isinstance(radius, bool) or not isinstance(radius, int | float) or not radius > 0:
        raise ArgumentError("radius", expected="a number > 0, or None", got=repr(radius)[:80])
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
