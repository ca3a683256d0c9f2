"""Readers of arrays in .npy, .npz and .safetensors files that never run code contained in a file."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from howsmooth.errors import ArgumentError, ModelError, reason

__all__ = ["DataSource", "read_array", "read_arrays", "shown"]

SUFFIXES = (".npy", ".npz", ".safetensors")


@dataclass(frozen=True, eq=False)
class DataSource:
    """Data for a model, read from a file, with the name, origin and SHA-256 hash of the data.

    Attributes
    ----------
    name
        The name of the data in results.
    source
        A phrase for a report that says where the data come from.
    digest
        SHA-256 of the data.

    """

    name: str
    source: str
    digest: str


def read_array(path: Path, argument: str) -> np.ndarray:
    """Read the array in a .npy file without running code that the file may contain.

    Raises
    ------
    ArgumentError
        If the file is of another kind, cannot be read, or contains pickled objects.

    """
    got = f"{shown(path)!r}"
    if path.suffix.lower() == ".npy":
        try:
            return np.asarray(np.load(path, allow_pickle=False))
        except Exception as error:  # numpy raises many kinds of errors for a damaged header
            got = f"{shown(path)}, which cannot be read ({reason(error)})"
    raise ArgumentError(
        argument, expected="a .npy file", got=got, remedy="numpy.save(file, array) writes one."
    )


def read_arrays(path: Path, what: str, suffixes: tuple[str, ...] = SUFFIXES) -> dict[str, Tensor]:
    """Read all arrays of a file as a dict by name, where the array of a .npy file has the name ``""``.

    Parameters
    ----------
    path
        Path of the file. Its ending decides its format.
    what
        What error messages call the file, such as "parameter file".
    suffixes
        The endings that are accepted.

    Raises
    ------
    ModelError
        If there is no such file, it cannot be read, or it contains anything but arrays of numbers.

    """
    where = f"The {what} {shown(path)}"
    if path.suffix not in suffixes:
        raise ModelError(f"{where} is neither {' nor '.join(suffixes)}. Pickled formats are never read.")
    if not _is_file(path):
        raise ModelError(f"There is no {what} {shown(path)}.")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        return _npz(path) if path.suffix == ".npz" else {"": _tensor("it", np.load(path, allow_pickle=False))}
    except MemoryError as error:
        # The header of a small file may announce an array of any size.
        raise ModelError(f"{where} cannot be read: it does not fit into memory.") from error
    except Exception as error:  # numpy raises many kinds of errors for a damaged header
        raise ModelError(f"{where} cannot be read: {reason(error)}.") from error


def _npz(path: Path) -> dict[str, Tensor]:
    if not zipfile.is_zipfile(path):
        raise ValueError("it is no archive as numpy.savez writes it")
    with np.load(path, allow_pickle=False) as archive:
        arrays: dict[str, np.ndarray] = {}
        for name in archive.files:
            try:
                arrays[name] = archive[name]
            except ValueError as error:
                if "allow_pickle" in str(error):
                    raise ValueError(f"{name} is a pickled object, which is never read") from error
                raise
    return {name: _tensor(name, array) for name, array in arrays.items()}


def _tensor(name: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise ValueError(f"{name} holds {array.dtype}, where float32 or float64 numbers are needed")
    # torch supports neither foreign byte orders nor all strides, so that the array is copied.
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def shown(path: Path) -> str:
    """Return a path as text for an error message, truncated to at most 200 characters."""
    return str(path) if len(str(path)) <= 200 else f"{str(path)[:197]}..."
