"""Where tokens start: drawn at random, or read from a file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.errors import ArgumentError

__all__ = ["DRAWN", "draw_tokens", "onto_sphere", "read_tokens"]

DRAWN = ("gaussian", "sphere")
_ENDINGS = (".npy", ".npz")


def draw_tokens(kind: str, n: int, d: int, radius: float, seed: int) -> Float64[Tensor, "n d"]:
    """Draw n tokens: from N(0, radius² I) for ``gaussian``, uniformly of norm ``radius`` for ``sphere``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return onto_sphere(x, radius) if kind == "sphere" else radius * x


def onto_sphere(x: Float64[Tensor, "n d"], radius: float) -> Float64[Tensor, "n d"]:
    """Move each token along its ray to the sphere of a radius.

    Raises
    ------
    ArgumentError
        If a token is zero.

    """
    norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    if not bool((norms > 0).all()):
        raise ArgumentError(
            "start", expected="tokens that are not zero on a sphere", got="a token that is zero"
        )
    placed: Tensor = x * (radius / norms)
    return placed


def read_tokens(path: Path) -> Float64[Tensor, "n d"]:
    """Read tokens (n, d): a ``.npy`` file, or ``X`` of a ``.npz`` file. Pickled data is never read.

    Raises
    ------
    ArgumentError
        If there are none.

    """
    if path.suffix not in _ENDINGS:
        raise ArgumentError(
            "start",
            expected=f"auto, {', '.join(DRAWN)}, text, file, or a name that ends in {' or '.join(_ENDINGS)}",
            got=repr(str(path)),
        )
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            with loaded:
                array = loaded["X"]
        else:
            array = loaded
    except KeyError as error:
        raise _unreadable(path, "it has no array X") from error
    except MemoryError as error:
        raise _unreadable(path, "it does not fit into memory") from error
    except OSError as error:
        raise _unreadable(path, error.strerror or "it is no array") from error
    except (ValueError, TypeError, EOFError, SyntaxError, zipfile.BadZipFile) as error:
        raise _unreadable(path, "it holds no array of numbers") from error
    if array.dtype.kind not in "fiu" or array.ndim != 2 or 0 in array.shape:
        raise ArgumentError(
            "start", expected=f"an array (n, d) of numbers in {path}", got=f"{array.dtype} {array.shape}"
        )
    x = torch.from_numpy(np.array(array, dtype=np.float64, order="C"))
    if not bool(torch.isfinite(x).all()):
        raise ArgumentError("start", expected=f"finite numbers in {path}", got="NaN or infinity")
    return x


def _unreadable(path: Path, why: str) -> ArgumentError:
    return ArgumentError("start", expected=f"tokens in {path}", got=f"a file that cannot be read: {why}")
