"""Read token ids and embedded tokens from .npy files, without running code that a file may contain."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from howsmooth.errors import ArgumentError, NonFiniteError, reason

if TYPE_CHECKING:
    import torch

__all__ = ["TokenStream", "load_tokens", "open_tokens"]


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Sequences of token ids or embedded tokens, all of one length, joined in one tensor."""

    name: str  #: The name of the file without its ending.
    source: str  #: A phrase that says where the tokens come from.
    digest: str  #: SHA-256 of the tokens.
    #: Token ids (tokens,) in int64, or embedded tokens (tokens, d) in float32 or float64.
    tokens: torch.Tensor = field(repr=False)
    #: The length of each sequence. A study never cuts a sequence across their boundaries.
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def open_tokens(source: str | os.PathLike[str], kind: str) -> np.ndarray:
    """Open the array in a ``.npy`` file. For the kind ``"tokens"`` it must be an integer array (tokens,) or
    (sequences, tokens); for ``"embeddings"`` (n, d) or (sequences, n, d) in float32 or float64. Any other
    file or array raises ArgumentError.
    """
    path = Path(source).expanduser()
    where = _shortened(path)
    array, got = None, repr(where)
    if path.suffix.lower() == ".npy":
        try:
            array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except Exception as error:  # numpy raises many kinds of errors for a damaged header
            got = f"{where}, which cannot be read ({reason(error)})"
    if array is None:
        remedy = "numpy.save(file, array) writes one."
        raise ArgumentError(kind, expected="a .npy file", got=got, remedy=remedy)
    ids = kind == "tokens"
    axes = array.ndim - (not ids)  # without that of the dimension
    right = array.dtype.kind in "iu" if ids else array.dtype.kind == "f" and array.dtype.itemsize in (4, 8)
    if not right or axes not in (1, 2) or not array.size:
        raise ArgumentError(
            where,
            expected="token ids as an integer array (tokens,) or (sequences, tokens)"
            if ids
            else "embedded tokens as an array (n, d) or (sequences, n, d) in float32 or float64",
            got=f"{array.dtype} of shape {array.shape}",
            remedy="Token ids are given as tokens, and floating-point numbers as embeddings.",
        )
    return array


def load_tokens(source: str | os.PathLike[str], kind: str) -> TokenStream:
    """Read token ids or embedded tokens from a ``.npy`` file; refuse invalid ids, NaN and infinity."""
    import torch  # takes seconds, and a wrong file is told before

    array, ids = open_tokens(source, kind), kind == "tokens"
    path = Path(source).expanduser()
    where = _shortened(path)
    if ids and not 0 <= int(array.min()) <= int(array.max()) < 2**63:
        got = str(min(0, int(array.min())) or int(array.max()))
        raise ArgumentError(where, expected="token ids, whole numbers of at least 0", got=got)
    if not ids and not np.isfinite(array).all():
        raise NonFiniteError(where, expected="finite numbers", got="NaN or infinity")
    sequences = array if array.ndim == 3 - ids else array[None]
    # torch supports neither foreign byte orders nor all strides, so that the array is copied.
    dtype = np.dtype(np.int64) if ids else array.dtype.newbyteorder("=")
    tokens = torch.from_numpy(np.array(sequences, dtype=dtype, order="C")).flatten(0, 1)
    lengths = (sequences.shape[1],) * len(sequences)
    digest = hashlib.sha256(f"{tokens.dtype} {lengths} ".encode())
    digest.update(tokens.reshape(-1).view(torch.uint8).numpy().data)
    what = "token ids" if ids else "embedded tokens"
    count = "one sequence" if len(lengths) == 1 else f"{len(lengths)} sequences"
    return TokenStream(path.stem, f"{what} of {where}, {count}", digest.hexdigest(), tokens, lengths)


def _shortened(path: Path) -> str:
    return str(path) if len(str(path)) <= 200 else f"{str(path)[:197]}..."
