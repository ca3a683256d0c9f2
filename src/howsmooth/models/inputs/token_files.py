"""Readers of token ids and embedded tokens from .npy files, for models without a tokenizer or an embedding
table. They never run code contained in a file.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from howsmooth.errors import ArgumentError, NonFiniteError, reason

__all__ = ["DataSource", "TokenStream", "load_embeddings", "load_token_ids"]


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


@dataclass(frozen=True, eq=False)
class TokenStream(DataSource):
    """Sequences of token ids or of embedded tokens, concatenated into one tensor.

    Attributes
    ----------
    tokens
        Token ids (tokens,) in int64, or embedded tokens (tokens, d) in float32 or float64.
    lengths
        The lengths of the sequences, in order. A study never cuts a sequence across their boundaries.

    """

    tokens: Tensor = field(repr=False)
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of tokens in all sequences together."""
        return len(self.tokens)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """For each sequence, the index of its first token and the number of its tokens."""
        return tuple(zip(accumulate((0, *self.lengths[:-1])), self.lengths, strict=True))


def load_token_ids(source: str | os.PathLike[str]) -> TokenStream:
    """Read token ids from a ``.npy`` file with an integer array (tokens,) or (sequences, tokens).

    Raises
    ------
    ArgumentError
        If the file cannot be read, or contains no ids, or numbers that are no ids.

    """
    path = Path(source).expanduser()
    where, array = shown(path), _read_array(path, "tokens")
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ArgumentError(
            where,
            expected="an integer array (tokens,) or (sequences, tokens)",
            got=f"{array.dtype} of shape {array.shape}",
            remedy="Token ids are whole numbers; embedded tokens are given as embeddings.",
        )
    if not array.size:
        raise ArgumentError(where, expected="at least one token id", got="none")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**63:
        got = str(low if low < 0 else high)
        raise ArgumentError(where, expected="token ids, whole numbers of at least 0", got=got)
    sequences = torch.from_numpy(np.atleast_2d(array).astype(np.int64))
    return _stream(path, "token ids", list(sequences))


def load_embeddings(source: str | os.PathLike[str]) -> TokenStream:
    """Read embedded tokens from a ``.npy`` file with an array (n, d) or (sequences, n, d).

    Raises
    ------
    ArgumentError
        If the file cannot be read, or the array has another shape or a dtype other than float32 or float64.
    NonFiniteError
        If the array contains NaN or infinity.

    """
    path = Path(source).expanduser()
    where, array = shown(path), _read_array(path, "embeddings")
    if array.dtype.kind != "f" or array.dtype.itemsize not in (4, 8):
        raise ArgumentError(
            where,
            expected="float32 or float64",
            got=str(array.dtype),
            remedy="Token ids are given as such, not as embeddings.",
        )
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise ArgumentError(
            where, expected="an array (n, d) or (sequences, n, d)", got=f"shape {array.shape}"
        )
    if not np.isfinite(array).all():
        raise NonFiniteError(where, expected="finite numbers", got="NaN or infinity")
    # torch supports neither foreign byte orders nor all strides, so that the array is copied.
    tokens = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    return _stream(path, "embedded tokens", list(tokens.unbind()) if tokens.ndim == 3 else [tokens])


def _read_array(path: Path, argument: str) -> np.ndarray:
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


def _stream(path: Path, what: str, sequences: list[Tensor]) -> TokenStream:
    tokens = torch.cat(sequences)
    lengths = tuple(map(len, sequences))
    digest = hashlib.sha256(f"{tokens.dtype} {lengths} ".encode())
    digest.update(tokens.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    count = "one sequence" if len(lengths) == 1 else f"{len(lengths)} sequences"
    return TokenStream(path.stem, f"{what} of {shown(path)}, {count}", digest.hexdigest(), tokens, lengths)


def shown(path: Path) -> str:
    """Return a path as text for an error message, truncated to at most 200 characters."""
    return str(path) if len(str(path)) <= 200 else f"{str(path)[:197]}..."
