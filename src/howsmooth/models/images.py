"""Images as inputs of vision models: read from files, folders and arrays, or made by code."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.models.builtin_images import BUILTIN_COUNT, builtin_image, builtin_image_name

__all__ = ["BUILTIN", "IMAGE_ENDINGS", "Images", "load_images"]

BUILTIN = "builtin"
"""The name of what needs no download."""

IMAGE_ENDINGS = (
    ".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".npy",
)  # fmt: skip
"""What counts as an image in a folder: pictures, and arrays of numpy."""

_MOST_PIXELS = 2**26
_MOST_ENTRIES = 100_000
_FLOATS = ("float16", "float32", "float64")

Reader = Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class Images:
    """Images, read when they are asked for.

    Attributes
    ----------
    name
        The name under which results stand.
    source
        One phrase for a report.
    digest
        SHA-256 of all of them.
    names
        One for each image.

    """

    name: str
    source: str
    digest: str
    names: tuple[str, ...]
    _readers: tuple[Reader, ...] = field(repr=False)

    def __len__(self) -> int:
        """How many images there are."""
        return len(self._readers)

    @property
    def size(self) -> int:
        """How many images there are."""
        return len(self)

    def __getitem__(self, index: int) -> Tensor:
        """Return an image (3, height, width) with values from 0 to 1, float32."""
        return self._readers[index]()


def load_images(source: object = BUILTIN) -> Images:
    """Find images, and check that each can be read; only when one is used is it read again.

    Parameters
    ----------
    source
        ``"builtin"``; a file or a folder (with the folders in it), or a list of them; an array of numpy
        (height, width), (height, width, 3) or a batch of the latter; or a tensor (3, height, width) or
        (batch, 3, height, width). Bytes go from 0 to 255, floating-point values from 0 to 1. In a folder
        whatever does not end as a picture or ``.npy`` is passed over. Grey becomes three equal colours, and
        what is transparent is laid on white.

    Raises
    ------
    ArgumentError
        If there is nothing of that name, no image in a folder, or a file is no image or has more than 2^26
        pixels; or if an array is of another shape, or its values lie outside of the range.

    """
    if isinstance(source, Images):
        return source
    if isinstance(source, np.ndarray | Tensor):
        return _of_arrays(source)
    if isinstance(source, str | Path):
        source = [source]
    if not isinstance(source, Sequence) or not all(isinstance(one, str | Path) for one in source):
        raise ArgumentError(
            "images",
            expected="'builtin', paths of files or folders, an array or a tensor",
            got=type(source).__name__,
        )
    if not source:
        raise ArgumentError("images", expected="at least one file or folder", got="none")
    if list(map(str, source)) == [BUILTIN]:
        return _builtin()
    return _of_files([Path(one).expanduser() for one in source])


@cache
def _builtin() -> Images:
    made = [builtin_image(index) for index in range(BUILTIN_COUNT)]
    return Images(
        name="builtin-images",
        source=f"{BUILTIN_COUNT} images made by code, nothing downloaded: gratings, noise with the spectrum "
        "of natural images, overlapping leaves, shapes, blobs and rows of letters",
        digest=_digest([one.tobytes() for one in made]),
        names=tuple(map(builtin_image_name, range(BUILTIN_COUNT))),
        _readers=tuple(partial(_as_tensor, one, BUILTIN) for one in made),
    )


def _of_arrays(given: np.ndarray | Tensor) -> Images:
    if isinstance(given, Tensor):
        if given.ndim not in (3, 4) or given.shape[-3] not in (1, 3):
            raise ArgumentError(
                "images",
                expected="a tensor (3, height, width) or (batch, 3, height, width)",
                got=f"shape {tuple(given.shape)}",
            )
        array = given.detach().cpu().movedim(-3, -1).numpy()
    else:
        array = given
    batch = list(array) if array.ndim == 4 else [array]
    if not batch:
        raise ArgumentError("images", expected="at least one image", got=f"shape {tuple(array.shape)}")
    tensors = [_as_tensor(one, "images") for one in batch]
    return Images(
        name="images",
        source=f"{len(batch)} images given as an array",
        digest=_digest([one.numpy().tobytes() for one in tensors]),
        names=tuple(f"image {index}" for index in range(len(batch))),
        _readers=tuple(partial(tensors.__getitem__, index) for index in range(len(tensors))),
    )


def _of_files(places: list[Path]) -> Images:
    files = [file for place in places for file in _files(place)]
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise ArgumentError("images", expected="each file once", got=f"{file} twice")
        seen.add(file.resolve())
    readers: list[Reader] = []
    names: list[str] = []
    digests: list[bytes] = []
    for file in files:
        found = _checked(file)
        readers += found
        names += [file.name if len(found) == 1 else f"{file.name} {index}" for index in range(len(found))]
        digests.append(hashlib.sha256(file.read_bytes()).digest())
    where = str(places[0]) if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
    first = places[0].resolve()
    name = first.name if first.is_dir() else first.stem
    return Images(
        name=name or "images",
        source=f"{_count(len(readers))} of {where}",
        digest=_digest(digests),
        names=tuple(names),
        _readers=tuple(readers),
    )


def _count(number: int) -> str:
    return "one image" if number == 1 else f"{number} images"


def _digest(parts: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _files(place: Path) -> Iterator[Path]:
    try:
        if place.is_dir():
            found = sorted(_pictures(place))
            if not found:
                raise ArgumentError(
                    "images",
                    expected=f"images in the folder ({', '.join(IMAGE_ENDINGS)})",
                    got=f"none in {place}",
                )
            yield from found
        elif place.is_file():
            yield place
        else:
            raise ArgumentError(
                "images",
                expected=f"{BUILTIN!r}, a file or a folder",
                got=f"{str(place)!r}, which is not there",
            )
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        shown = str(place) if len(str(place)) <= 80 else f"{str(place)[:77]}..."
        raise ArgumentError("images", expected="a file or a folder", got=f"{shown!r} ({reason})") from error


def _pictures(folder: Path) -> Iterator[Path]:
    """List what ends as an image in a folder and the folders in it, hidden ones and links left out."""
    looked_at = 0
    for above, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        looked_at += len(folders) + len(files)
        if looked_at > _MOST_ENTRIES:
            raise ArgumentError(
                "images",
                expected=f"a folder with at most {_MOST_ENTRIES} files and folders",
                got=f"more in {folder}",
                remedy="Give the folder of the images themselves.",
            )
        yield from (
            Path(above, name)
            for name in files
            if not name.startswith(".") and Path(name).suffix.lower() in IMAGE_ENDINGS
        )


def _checked(file: Path) -> list[Reader]:
    """Read a file once, whole, so that what is wrong with it is said before anything is measured."""
    if file.suffix.lower() == ".npy":
        array = _array(file)
        batch = list(array) if array.ndim == 4 else [array]
        if not batch:
            raise ArgumentError(str(file), expected="at least one image", got=f"shape {array.shape}")
        for one in batch:
            _as_tensor(one, str(file))
        return [partial(_of_array, file, index) for index in range(len(batch))]
    _as_tensor(_picture(file), str(file))
    return [lambda: _as_tensor(_picture(file), str(file))]


def _of_array(file: Path, index: int) -> Tensor:
    array = _array(file)
    return _as_tensor(array[index] if array.ndim == 4 else array, str(file))


def _array(file: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(file, allow_pickle=False))
    except Exception as error:  # of a damaged header, numpy raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise ArgumentError(str(file), expected="an array of numpy (.npy)", got=reason) from error


def _picture(file: Path) -> np.ndarray:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large images; the limit below is ours
            with Image.open(file) as picture:
                _check_size(picture.width, picture.height, str(file))
                turned = ImageOps.exif_transpose(picture)
                if turned.mode.startswith(("I", "F")):
                    return _deep_grey(turned, file)
                if turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info:
                    clear = turned.convert("RGBA")
                    ground = Image.new("RGBA", clear.size, "white")
                    turned = Image.alpha_composite(ground, clear)
                return np.asarray(turned.convert("RGB"))
    except ArgumentError:
        raise
    except UnidentifiedImageError:
        got = "a file that is none"
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        got = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    raise ArgumentError(str(file), expected="an image that can be read", got=got)


def _check_size(width: int, height: int, argument: str) -> None:
    if width * height > _MOST_PIXELS:
        raise ArgumentError(
            argument,
            expected=f"an image of at most {_MOST_PIXELS} pixels",
            got=f"{width} x {height}",
            remedy="Make it smaller first: a model sees a few hundred pixels a side.",
        )


def _deep_grey(picture: Image.Image, file: Path) -> np.ndarray:
    """Return grey of more than eight bits a pixel with values from 0 to 1."""
    values = np.asarray(picture, dtype=np.float64)
    if picture.mode != "F":
        values = values / 65535.0
    if not 0 <= values.min() <= values.max() <= 1:
        raise ArgumentError(
            str(file), expected="grey values from 0 to 65535, or from 0 to 1 as floats", got="values outside"
        )
    return values


def _as_tensor(array: np.ndarray, argument: str) -> Tensor:
    """Check an array of one image and return it as (3, height, width) from 0 to 1."""
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3) or 0 in array.shape:
        raise ArgumentError(
            argument,
            expected="an image (height, width) or (height, width, 3)",
            got=f"an array of shape {tuple(array.shape)}",
        )
    _check_size(array.shape[1], array.shape[0], argument)
    if array.dtype == np.uint8:
        values = array.astype(np.float32) / np.float32(255.0)
    elif array.dtype.name in _FLOATS:
        if not np.isfinite(array).all():
            raise NonFiniteError(argument, expected="finite values", got="NaN or infinity")
        values = array.astype(np.float32)
        if not 0 <= array.min() <= array.max() <= 1:
            raise ArgumentError(
                argument,
                expected="floating-point values from 0 to 1",
                got=f"values from {float(array.min()):.4g} to {float(array.max()):.4g}",
                remedy="Divide bytes by 255, or give them as uint8.",
            )
    else:
        raise ArgumentError(
            argument, expected="bytes (uint8) or floating-point values from 0 to 1", got=str(array.dtype)
        )
    colours = values.repeat(3, axis=-1) if values.shape[-1] == 1 else values
    return torch.from_numpy(np.moveaxis(colours, -1, 0).copy())
