"""Readers of token ids and embedded tokens from files, for models without a tokenizer or an
embedding table.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from howsmooth.errors import ArgumentError, NonFiniteError, reason
from howsmooth.models.inputs.array_files import DataSource, read_array, shown

__all__ = ["TokenStream", "load_embeddings", "load_token_ids"]


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


def load_token_ids(source: object) -> TokenStream:
    """Read token ids from a file, an array or a list.

    Parameters
    ----------
    source
        A ``.npy`` file, a ``.json`` file with a list (or a list of lists), or a text file with whole numbers
        separated by spaces, each line a sequence; or an integer array or tensor (tokens,) or (sequences,
        tokens); or a list.

    Raises
    ------
    ArgumentError
        If the file cannot be read, or contains no ids, or anything that is not a whole number of at least
        zero.

    """
    name, where, values = _ids(source)
    rows = _rows(values, where)
    sequences = [torch.tensor(row, dtype=torch.int64) for row in rows]
    if not sum(map(len, sequences)):
        raise ArgumentError(where, expected="at least one token id", got="none")
    of = "token ids given as an array" if name == "tokens" else f"token ids of {where}"
    return _stream(name, of, [one for one in sequences if len(one)])


def load_embeddings(source: object) -> TokenStream:
    """Read embedded tokens from a file or a tensor.

    Parameters
    ----------
    source
        A ``.safetensors`` file whose tensors are sequences (n, d) or batches (batch, n, d) of tokens, in the
        order of their names; or a ``.npy`` file with one such tensor; or the tensor. All must have the same
        d, and the same dtype: float32 or float64.

    Raises
    ------
    ArgumentError
        If the file cannot be read, or a tensor has another shape or dtype.
    NonFiniteError
        If a tensor contains NaN or infinity.

    """
    if isinstance(source, Tensor):
        name, where, tensors = "embeddings", "embeddings", {"embeddings": source.detach().cpu()}
    elif isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        name, where = path.stem, str(path)
        try:
            npy = path.suffix.lower() == ".npy"
            found = {"": torch.as_tensor(read_array(path))} if npy else load_file(path)
            tensors = {f"{where}: {key}" if key else where: one for key, one in found.items()}
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise ArgumentError(where, expected="a .npy or .safetensors file", got=reason(error)) from error
    else:
        raise ArgumentError(
            "embeddings", expected="a .npy or .safetensors file, or a tensor", got=type(source).__name__
        )
    sequences = [one for key in sorted(tensors) for one in _sequences(tensors[key], key)]
    if not sequences:
        raise ArgumentError(where, expected="tensors of shape (n, d)", got="none")
    kinds = sorted({(one.shape[1], str(one.dtype)) for one in sequences})
    if len(kinds) > 1:
        got = " and ".join(f"d = {d} in {dtype}" for d, dtype in kinds[:2])
        raise ArgumentError(where, expected="tokens of one dimension and one dtype", got=got)
    of = "embedded tokens given as a tensor" if name == "embeddings" else f"embedded tokens of {where}"
    return _stream(name, of, sequences)


def _stream(name: str, source: str, sequences: list[Tensor]) -> TokenStream:
    tokens = torch.cat(sequences)
    lengths = tuple(map(len, sequences))
    digest = hashlib.sha256(f"{tokens.dtype} {lengths} ".encode())
    digest.update(tokens.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    count = "one sequence" if len(lengths) == 1 else f"{len(lengths)} sequences"
    return TokenStream(name, f"{source}, {count}", digest.hexdigest(), tokens, lengths)


def _sequences(tensor: Tensor, argument: str) -> list[Tensor]:
    if tensor.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(
            argument,
            expected="float32 or float64",
            got=str(tensor.dtype),
            remedy="Token ids are given as such, not as embeddings.",
        )
    if tensor.ndim not in (2, 3) or 0 in tensor.shape:
        raise ArgumentError(
            argument, expected="a tensor (n, d) or (batch, n, d)", got=f"shape {tuple(tensor.shape)}"
        )
    if not bool(tensor.isfinite().all()):
        raise NonFiniteError(argument, expected="finite numbers", got="NaN or infinity")
    return list(tensor.unbind()) if tensor.ndim == 3 else [tensor]


def _ids(source: object) -> tuple[str, str, Any]:
    """Read token ids from a file, an array or a list, without checking them.

    It returns their name, their path for messages, and the ids.
    """
    if isinstance(source, Tensor):
        return "tokens", "tokens", source.detach().cpu().numpy()
    if isinstance(source, np.ndarray) or (isinstance(source, Sequence) and not isinstance(source, str)):
        return "tokens", "tokens", source
    if not isinstance(source, str | os.PathLike):
        raise ArgumentError("tokens", expected="a file, an array or a list", got=type(source).__name__)
    path = Path(source).expanduser()
    where = shown(path)
    if path.suffix.lower() == ".npy":
        return path.stem, where, read_array(path)
    try:
        words = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".json":
            return path.stem, where, json.loads(words)
    except (OSError, ValueError, RecursionError) as error:
        got = f"{where} ({reason(error)})"
        raise ArgumentError("tokens", expected="a file of token ids", got=got) from error
    return path.stem, where, [line.split() for line in words.splitlines()]


def _rows(values: Any, where: str) -> list[list[int]]:
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iu" or values.ndim not in (1, 2):
            raise ArgumentError(
                where,
                expected="an integer array (tokens,) or (sequences, tokens)",
                got=f"{values.dtype} of shape {tuple(values.shape)}",
                remedy="Token ids are whole numbers; embedded tokens are given as embeddings.",
            )
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ArgumentError(where, expected="a list of token ids", got=type(values).__name__)
    nested = [isinstance(one, Sequence) and not isinstance(one, str) for one in values]
    if any(nested) and not all(nested):
        raise ArgumentError(where, expected="token ids, or lists of them", got="both")
    return [[_id(one, where) for one in row] for row in (values if any(nested) else [values])]


def _id(value: object, where: str) -> int:
    shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
    # int() would also accept signs, underscores and digits of other scripts.
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value < 2**63:
        return int(value)
    raise ArgumentError(where, expected="token ids, whole numbers of at least 0", got=shown)
