"""The images for vision models: read from files and folders, or built in."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from howsmooth.errors import ArgumentError, reason
from howsmooth.models.inputs.builtin_images import builtin_images

__all__ = ["Images", "load_images"]

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
_MOST_ENTRIES = 100_000
_MOST_STRETCHED = 100


@dataclass(frozen=True, eq=False)
class Images(Sequence[Image.Image]):
    """A sequence of RGB images with eight bits per channel. Each is read from its file when it is used."""

    name: str  #: The name of the images in results.
    source: str  #: A phrase that says where they come from.
    digest: str  #: SHA-256 of the images.
    _held: Sequence[Image.Image | Path] = field(repr=False)

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: int) -> Image.Image:  # type: ignore[override]
        held = self._held[index]
        return _read(held) if isinstance(held, Path) else held


def load_images(source: object = "builtin") -> Images:
    """Find the images in files or folders, and check that each image can be read.

    Parameters
    ----------
    source
        ``"builtin"``; a file or a folder (with its subfolders), or a list of files and folders, in which each
        file counts once. In folders, only files with the ending of an image are read. Grey images become RGB,
        and transparent pixels are put on white.

    Raises
    ------
    ArgumentError
        If a path does not exist, a folder has no images, or a file is no image, has more pixels than Pillow
        considers safe, or has a side more than a hundred times as long as the other.

    """
    if isinstance(source, Images):
        return source
    named = [source] if isinstance(source, str | os.PathLike) else source
    if not (
        isinstance(named, Sequence) and named and all(isinstance(one, str | os.PathLike) for one in named)
    ):
        raise ArgumentError(
            "images",
            expected="'builtin', or paths of files or folders",
            got=repr(named)[:80],
            remedy="The image processor of the model makes tensors of arrays and of Pillow images.",
        )
    if list(map(os.fspath, named)) == ["builtin"]:
        return _builtin()
    places = [Path(one).expanduser() for one in named]
    files = list(dict.fromkeys(file.resolve() for place in places for file in _files(place)))
    for file in files:  # now, so that a damaged file is reported before anything is measured
        _read(file)
    first = places[0].resolve()
    where = f"{places[0]} and {len(places) - 1} more" if len(places) > 1 else str(places[0])
    return Images(
        (first.name if first.is_dir() else first.stem) or "images",
        f"{'one image' if len(files) == 1 else f'{len(files)} images'} of {where}",
        _digest(file.read_bytes() for file in files),
        files,
    )


@cache
def _builtin() -> Images:
    held = [Image.fromarray(one) for one in builtin_images()]
    source = (
        f"{len(held)} images made by code, nothing downloaded: gratings, noise with the spectrum of natural "
        "images, overlapping leaves, shapes, blobs and rows of letters"
    )
    return Images("builtin-images", source, _digest(one.tobytes() for one in held), held)


def _digest(images: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in images)).hexdigest()


def _files(place: Path) -> list[Path]:
    """Return a list with the given file, or the sorted image files of a folder and its subfolders."""
    # Unlike the methods of a path, os.path takes names that no file can have.
    if os.path.isfile(place):  # noqa: PTH113
        return [place]
    if not os.path.isdir(place):  # noqa: PTH112
        got = f"{str(place)[:200]!r}, which is not there"
        raise ArgumentError("images", expected="'builtin', a file or a folder", got=got)
    entries: list[Path] = []
    for above, folders, names in os.walk(place):  # unlike rglob, it skips files that vanish meanwhile
        folders[:] = [name for name in folders if not name.startswith(".")]
        entries += (Path(above, name) for name in names if not name.startswith("."))
        if len(entries) > _MOST_ENTRIES:
            raise ArgumentError(
                "images",
                expected=f"a folder with at most {_MOST_ENTRIES} files",
                got=f"more in {place}",
                remedy="Give the folder of the images themselves.",
            )
    found = sorted(entry for entry in entries if entry.suffix.lower() in _ENDINGS)
    if not found:
        expected = f"images in the folder ({', '.join(_ENDINGS)})"
        raise ArgumentError("images", expected=expected, got=f"none in {place}")
    return found


def _read(file: Path) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as opened:
                picture = ImageOps.exif_transpose(opened)  # turned as its camera says
    except Exception as error:  # Pillow raises many kinds of errors for a damaged file
        raise ArgumentError(str(file), expected="an image that can be read", got=reason(error)) from error
    if picture.mode.startswith(("I", "F")):  # grey with more than eight bits per pixel
        values = np.asarray(picture, dtype=np.float64) / (1.0 if picture.mode == "F" else 65535.0)
        if not (np.isfinite(values).all() and 0.0 <= values.min() <= values.max() <= 1.0):
            expected = "grey values from 0 to 1, or of sixteen bits"
            raise ArgumentError(str(file), expected=expected, got="others")
        picture = Image.fromarray(np.rint(255.0 * values).astype(np.uint8))
    if max(picture.size) > _MOST_STRETCHED * min(picture.size):
        # It would fill the memory when it is resized for a model.
        raise ArgumentError(
            str(file),
            expected=f"an image with no side more than {_MOST_STRETCHED} times as long as the other",
            got=f"{picture.width} x {picture.height}",
        )
    ground = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(ground, picture.convert("RGBA")).convert("RGB")
