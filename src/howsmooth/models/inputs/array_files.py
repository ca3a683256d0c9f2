"""The reader of arrays in .npy files, which never runs code contained in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from howsmooth.errors import ArgumentError, reason

__all__ = ["DataSource", "read_array", "shown"]


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


def shown(path: Path) -> str:
    """Return a path as text for an error message, truncated to at most 200 characters."""
    return str(path) if len(str(path)) <= 200 else f"{str(path)[:197]}..."
