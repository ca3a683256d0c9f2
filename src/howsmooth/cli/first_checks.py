"""Check that what the options name exists, before PyTorch and transformers are imported, which is slow."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from ctypes import CDLL
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from howsmooth import texts
from howsmooth.errors import ArgumentError, HowsmoothError, ModelError, reason
from howsmooth.files import check_parquet
from howsmooth.model_folders import (
    BUILTIN_MODELS,
    check_classifier,
    check_positions,
    check_tokenizer,
    check_weights,
    folder_of,
    stated_sizes,
)
from howsmooth.study.options import shown
from howsmooth.study.plans import InputPlan, Plan, check_text
from howsmooth.words import readable

__all__ = ["check_at_once"]

_DEVICES = re.compile(r"(cpu|cuda|hpu|ipu|maia|meta|mkldnn|mps|mtia|vulkan|xla|xpu)(:\d+)?")
_DRIVERS = ("libcuda.so.1", "nvcuda.dll")  # of NVIDIA, which every CUDA device needs


def check_at_once(given: Any, *, keep_going: bool = False, writes: bool = True) -> None:
    """Raise an error if the options name something that does not exist: an input, a folder, a device, a
    layer, a head or a position. Check the output folder only with ``writes``. With ``keep_going``, raise an
    error about a model only if all models are wrong.
    """
    if hasattr(given, "device"):
        _check_device(given.device)
    if writes and getattr(given, "out", None) is not None:
        _check_folder(given.out)
    if getattr(given, "parquet", False):
        check_parquet("parquet")
    files = {kind: getattr(given, kind, ()) or () for kind in ("tokens", "embeddings", "images")}
    reads_text = (hasattr(given, "text") or hasattr(given, "texts")) and not any(files.values())
    named = getattr(given, "models", [given] if hasattr(given, "source") else [])
    wrong: list[HowsmoothError] = []
    for one in named:
        try:
            _check_model(given, one, reads_text=reads_text)
        except HowsmoothError as error:
            wrong.append(error)
    if wrong and (not keep_going or len(wrong) == len(named)):
        raise wrong[0]
    text = getattr(given, "text", None) or getattr(given, "texts_file", None)
    for name in getattr(given, "texts", (text,) if text else ()):
        if name not in (*texts.TEXTS, "-"):
            found = texts.load_text(name)
            if isinstance(given, Plan) and not keep_going:
                for one in named:
                    check_text(found.name, found.content, given.samples, given.lengths_of(one))
            end = (getattr(given, "span", None) or "").partition(":")[2]
            for n in (*getattr(given, "lengths", ()), int(end or 0)) if isinstance(given, InputPlan) else ():
                check_text(found.name, found.content, 1, (n,))
    for kind, names in files.items():
        for name in names if isinstance(names, tuple) else ():  # inspect takes a number of tokens
            if kind != "images":
                from howsmooth.study.token_files import open_tokens  # imports numpy, which no help needs

                open_tokens(name, kind)
            elif name != "builtin" and not os.path.exists(Path(name).expanduser()):  # noqa: PTH110 - too long
                raise ArgumentError("images", expected="builtin, or a file or folder", got=shown(name))


def _check_model(given: Any, one: Any, *, reads_text: bool) -> None:
    name = one.source if one is given else one.name
    random_init, part = getattr(one, "random_init", False), getattr(one, "part", None)
    folder = folder_of(name, random_init=random_init)
    if folder is None:
        return
    if name in BUILTIN_MODELS and getattr(given, "images", None):
        raise ModelError(f"{name!r} takes a text or token ids, not images.")
    if name == BUILTIN_MODELS[1] and getattr(one, "as_decoder", False):
        raise ModelError(f"{name!r} is a decoder already, and causal. Leave out as_decoder=True.")
    if getattr(given, "CLASSIFIER", False):
        check_classifier(name, folder)
    if name not in BUILTIN_MODELS and not random_init:
        check_weights(name, folder)
        if reads_text and part is None:
            check_tokenizer(name, folder)
    if part is not None:
        return
    sizes, label = stated_sizes(folder), getattr(one, "label", name)
    own = {size: getattr(one, size, None) for size in ("layers", "heads", "lengths")}
    asked: dict[str, Any] = {
        size: getattr(given, size, None) if found is None else found for size, found in own.items()
    }
    for size in ("layers", "heads"):
        if size in sizes and asked[size] is not None:
            asked[size].resolve(sizes[size], label, size)
    if "positions" in sizes and isinstance(given, Plan | InputPlan):  # figures leave such lengths out
        check_positions(asked["lengths"] or (), sizes["positions"], label)


def _check_device(device: str) -> None:
    known = bool(_DEVICES.fullmatch(device) or entry_points(group="torch.backends"))
    if device.startswith("cuda") and not os.path.exists("/dev/kfd"):  # noqa: PTH110 - that of AMD
        known = known and any(map(_loads, _DRIVERS))
    if not known or (device.startswith("mps") and sys.platform != "darwin"):
        expected = "a device that PyTorch can use here, such as 'cpu'"
        raise ArgumentError("device", expected=expected, got=shown(device))


def _loads(library: str) -> bool:
    try:
        CDLL(library)
    except OSError:
        return False
    return True


def _check_folder(folder: Path) -> None:
    try:
        found = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if found.is_dir():
            with tempfile.TemporaryFile(dir=found):
                return
        got = f"the file {found}"
    except (OSError, ValueError) as error:  # such as a name that is too long
        got = f"{readable(str(folder), longest=300)} ({reason(error)})"
    remedy = "Choose another output folder."
    raise ArgumentError("out", expected="a writable folder", got=got, remedy=remedy)
