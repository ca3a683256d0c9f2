"""The reader of images for vision models, from files and folders, and the built-in images."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from howsmooth.errors import ArgumentError, reason
from howsmooth.models.inputs.builtin_images import builtin_images
from howsmooth.models.inputs.token_files import DataSource, shown

__all__ = ["Images", "load_images"]

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
_MOST_ENTRIES = 100_000
_MOST_STRETCHED = 100


@dataclass(frozen=True, eq=False)
class Images(DataSource):
    """A sequence of images, in which images from files are read only when they are used."""

    _held: Sequence[Image.Image | Path] = field(repr=False)

    @property
    def size(self) -> int:
        """Number of images in the sequence."""
        return len(self._held)

    def __len__(self) -> int:
        """Return the number of images."""
        return self.size

    def __getitem__(self, index: int) -> Image.Image:
        """Return an image as a Pillow image in RGB with eight bits per channel."""
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
    places = [source] if isinstance(source, str | os.PathLike) else source
    if not (
        isinstance(places, Sequence) and places and all(isinstance(one, str | os.PathLike) for one in places)
    ):
        raise ArgumentError(
            "images",
            expected="'builtin', or paths of files or folders",
            got=repr(places)[:80],
            remedy="The image processor of the model makes tensors of arrays and of Pillow images.",
        )
    if list(map(os.fspath, places)) == ["builtin"]:
        return _builtin()
    return _of_files([Path(one).expanduser() for one in places])


@cache
def _builtin() -> Images:
    held = [Image.fromarray(one) for one in builtin_images()]
    made = (
        f"{len(held)} images made by code, nothing downloaded: gratings, noise with the spectrum of natural "
    )
    return Images(
        "builtin-images",
        f"{made}images, overlapping leaves, shapes, blobs and rows of letters",
        _digest(held),
        held,
    )


def _of_files(places: list[Path]) -> Images:
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


def _digest(images: Iterable[bytes | Image.Image]) -> str:
    parts = (one if isinstance(one, bytes) else one.tobytes() for one in images)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _files(place: Path) -> list[Path]:
    """Return a list with the given file, or the sorted image files of a folder and its subfolders."""
    try:
        is_file, is_folder = place.is_file(), place.is_dir()
    except (OSError, ValueError):  # a name that no file can have
        is_file = is_folder = False
    if is_file:
        return [place]
    if not is_folder:
        raise ArgumentError(
            "images", expected="'builtin', a file or a folder", got=f"{shown(place)!r}, which is not there"
        )
    entries = list(islice(_below(place), _MOST_ENTRIES + 1))
    if len(entries) > _MOST_ENTRIES:
        raise ArgumentError(
            "images",
            expected=f"a folder with at most {_MOST_ENTRIES} files",
            got=f"more in {place}",
            remedy="Give the folder of the images themselves.",
        )
    found = sorted(entry for entry in entries if entry.suffix.lower() in _ENDINGS)
    if not found:
        raise ArgumentError(
            "images", expected=f"images in the folder ({', '.join(_ENDINGS)})", got=f"none in {place}"
        )
    return found


def _below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, without hidden files and folders."""
    for above, folders, files in os.walk(folder):  # unlike rglob, it skips files that vanish meanwhile
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(above, name) for name in files if not name.startswith("."))


def _read(file: Path) -> Image.Image:
    picture = _opened(file)
    if picture.mode.startswith(("I", "F")):  # grey with more than eight bits per pixel
        values = np.asarray(picture, dtype=np.float64) / (1.0 if picture.mode == "F" else 65535.0)
        if not (np.isfinite(values).all() and 0.0 <= values.min() <= values.max() <= 1.0):
            raise ArgumentError(
                str(file), expected="grey values from 0 to 1, or of sixteen bits", got="others"
            )
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


def _opened(file: Path) -> Image.Image:
    """Read an image, and rotate it as its EXIF orientation says."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as picture:
                return ImageOps.exif_transpose(picture)
    except Exception as error:  # Pillow raises many kinds of errors for a damaged file
        raise ArgumentError(str(file), expected="an image that can be read", got=reason(error)) from error
