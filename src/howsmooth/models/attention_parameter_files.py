"""Reading and writing of the parameters of an attention layer in ``.safetensors`` and ``.npz`` files. Pickles
are refused.

A file contains the arguments of :class:`~howsmooth.attention.SelfAttention` under their names: ``query``,
``key``, ``value``, and optionally ``output``, ``query_bias``, ``key_bias``, ``value_bias``, ``output_bias``,
``scale``, ``causal``, ``window``, ``mask``, ``softcap``, ``score_bias``, ``sinks``, and ``rotary_cos`` with
``rotary_sin``. A norm of queries is ``query_norm_weight`` with ``query_norm_eps``, and optionally
``query_norm_bias`` and ``query_norm_centred`` (1 for LayerNorm; RMSNorm otherwise). The norm of keys has the
names ``key_norm_weight`` and so on. The tensors of a single head may lack the axis of heads.

Or it contains the paper's matrices: ``A`` (d, d), ``V`` (d_v, d), and optionally ``b`` (d,), ``W``
(d_out, d_v) and ``causal``. For several heads, ``A``, ``V`` and ``b`` have a leading axis of heads, and
``W`` = (W_1 … W_H) has the shape (d_out, heads * d_v). Scores are ⟨A x_i + b, x_j⟩, values V x_j, and the
outputs of the heads are added as Σ_h W_h V_h x_j.

Both kinds of files may contain tokens ``X`` (n, d).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, Rotary, SelfAttention
from howsmooth.attention.map import as_parameter
from howsmooth.errors import ArgumentError, ModelError, reason
from howsmooth.models.inputs.array_files import read_arrays

__all__ = ["ParameterFile", "is_parameter_file", "read_parameter_file", "save_parameters"]

SUFFIXES = (".safetensors", ".npz")
_MATRICES = ("query", "key", "value")
_BIASES = ("query_bias", "key_bias", "value_bias")
_OWN = (
    *_MATRICES,
    "output",
    *_BIASES,
    "output_bias",
    "mask",
    "rotary_cos",
    "rotary_sin",
    "score_bias",
    "sinks",
    *(f"{which}_norm_{part}" for which in ("query", "key") for part in ("weight", "bias", "eps", "centred")),
    "scale",
    "softcap",
    "causal",
    "window",
    "X",
)
_SETTINGS = (
    "scale", "softcap", "causal", "window", "mask",
    "query_norm_eps", "query_norm_centred", "key_norm_eps", "key_norm_centred",
)  # fmt: skip
_PAPER = ("A", "V", "b", "W", "causal", "X")


@dataclass(frozen=True, eq=False)
class ParameterFile:
    """The contents of a parameter file: an attention, and tokens if the file contains any."""

    #: Path of the file.
    path: Path
    #: The attention, in float64 if any tensor of the file is in float64, otherwise in float32.
    attention: SelfAttention
    #: Tokens (n, d) in the same precision, None if the file has no tokens.
    x: Float[Tensor, "n d"] | None


def is_parameter_file(name: object) -> bool:
    """Return True if a path has the ending of a parameter file (``.safetensors`` or ``.npz``) and is not a
    folder.
    """
    path = Path(str(name))
    return path.suffix in SUFFIXES and not path.is_dir()


def read_parameter_file(path: str | os.PathLike[str]) -> ParameterFile:
    """Read an attention, and tokens if there are any, from a ``.safetensors`` or ``.npz`` file.

    Parameters
    ----------
    path
        Path of the file; :mod:`howsmooth.models.attention_parameter_files` describes its contents.

    Raises
    ------
    ModelError
        If the file cannot be read, lacks a required tensor, has a tensor of an unknown name, or its tensors
        are no attention.

    """
    path = Path(path)
    tensors = read_arrays(path, "parameter file", SUFFIXES)
    try:
        numbers = {name: _as_floats(name, t) for name, t in tensors.items() if name not in _SETTINGS}
        widest = any(t.dtype == torch.float64 for t in numbers.values())
        numbers = {name: t.to(torch.float64 if widest else torch.float32) for name, t in numbers.items()}
        attention = _attention(numbers, tensors)
        return ParameterFile(path, attention, _tokens(numbers.get("X"), attention))
    except ArgumentError as error:
        raise ModelError(f"The parameter file {path}: {error}") from error


def save_parameters(
    path: str | os.PathLike[str],
    attention: SelfAttention,
    X: Float[Tensor, "n d"] | None = None,
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Write an attention, and optionally tokens, to a file for :func:`read_parameter_file`.

    Parameters
    ----------
    path
        Path of the file, which ends in ``.safetensors`` or ``.npz``. An existing file is replaced at once, so
        that no reader sees a half-written file.
    attention
        The attention to write.
    X
        Tokens (n, d). If they are in float64 and the parameters in float32, reading converts all to float64.
    notes
        Metadata for a ``.safetensors`` file, strings by name.

    Returns
    -------
    pathlib.Path
        The path of the file.

    Raises
    ------
    ArgumentError
        If the path has another ending, or X does not fit the attention.
    ModelError
        If the file cannot be written.

    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ArgumentError(
            "path", expected=f"a name that ends in {' or '.join(SUFFIXES)}", got=repr(str(path))
        )
    named: dict[str, Tensor | None] = {
        name: getattr(attention, name)
        for name in (*_MATRICES, "output", *_BIASES, "output_bias", "mask", "score_bias", "sinks")
    }
    if attention.rotary is not None:
        named |= {"rotary_cos": attention.rotary.cos, "rotary_sin": attention.rotary.sin}
    named |= {
        "scale": torch.tensor(attention.scale, dtype=torch.float64),
        "causal": torch.tensor(attention.causal),
        "window": None if attention.window is None else torch.tensor(attention.window),
        "softcap": None
        if attention.softcap is None
        else torch.tensor(attention.softcap, dtype=torch.float64),
        "X": _tokens(X, attention),
    }
    for name in ("query_norm", "key_norm"):
        norm = getattr(attention, name)
        if norm is not None:
            named |= {
                f"{name}_weight": norm.weight,
                f"{name}_bias": norm.bias,
                f"{name}_eps": torch.tensor(norm.eps, dtype=torch.float64),
                f"{name}_centred": torch.tensor(norm.centred),
            }
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in named.items() if t is not None}
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".npz":
            with partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **{name: t.numpy() for name, t in tensors.items()})
        else:
            save_file(tensors, partial, metadata=dict(notes or {}))
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"The parameter file {path} cannot be written: {reason(error)}.") from error
    return path


def _as_floats(name: str, t: Tensor) -> Tensor:
    """Convert real numbers to float32 or float64.

    Half precision becomes float32, and integers become float64.
    """
    if t.dtype in (torch.float32, torch.float64):
        return t
    if t.is_floating_point():
        return t.to(torch.float32)
    if t.is_complex() or t.dtype == torch.bool:
        raise ArgumentError(name, expected="real numbers", got=str(t.dtype))
    return t.to(torch.float64)


def _attention(numbers: dict[str, Tensor], tensors: dict[str, Tensor]) -> SelfAttention:
    paper = "A" in tensors or "V" in tensors
    known = _PAPER if paper else _OWN
    needed = ("A", "V") if paper else _MATRICES
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise ArgumentError(
            missing[0],
            expected="the tensors query, key and value, or A and V",
            got=f"a file with {_listed(tensors)}",
        )
    unknown = sorted(set(tensors) - set(known))
    if unknown:
        raise ArgumentError(
            unknown[0], expected=f"names among {', '.join(known)}", got=f"a file with {_listed(tensors)}"
        )
    causal = bool(_setting(tensors, "causal", "true or false, or 1 or 0", lambda v: v in (0, 1)))
    if paper:
        return _of_paper(numbers, causal)
    window = _setting(
        tensors, "window", "a whole number", lambda v: not isinstance(v, bool) and float(v).is_integer()
    )
    scale = _setting(tensors, "scale", "one number", lambda v: not isinstance(v, bool))
    # The parameters of a single head may be matrices, and its biases vectors.
    stacked: dict[str, Any] = {name: _with_axis(numbers[name], 2) for name in _MATRICES}
    biases: dict[str, Any] = {name: _with_axis(numbers[name], 1) for name in _BIASES if name in numbers}
    rotary = [numbers[name] for name in ("rotary_cos", "rotary_sin") if name in numbers]
    if len(rotary) == 1:
        raise ArgumentError("rotary_cos", expected="rotary_cos together with rotary_sin", got="one of them")
    return SelfAttention(
        **stacked,
        output=numbers.get("output"),
        **biases,
        output_bias=numbers.get("output_bias"),
        scale=None if scale is None else float(scale),
        causal=causal,
        window=None if window is None else int(window),
        mask=tensors.get("mask"),
        rotary=Rotary(*rotary) if rotary else None,
        softcap=_setting(tensors, "softcap", "one number", lambda v: not isinstance(v, bool)),
        score_bias=numbers.get("score_bias"),
        sinks=numbers.get("sinks"),
        query_norm=_norm(numbers, tensors, "query_norm"),
        key_norm=_norm(numbers, tensors, "key_norm"),
    )


def _norm(numbers: dict[str, Tensor], tensors: dict[str, Tensor], name: str) -> LayerNorm | RMSNorm | None:
    """Return the norm layer of queries or keys that a file contains, or None if it contains none."""
    found = sorted(key for key in tensors if key.startswith(f"{name}_"))
    if not found:
        return None
    weight, bias = numbers.get(f"{name}_weight"), numbers.get(f"{name}_bias")
    eps = _setting(tensors, f"{name}_eps", "one number", lambda v: not isinstance(v, bool))
    if weight is None or eps is None:
        expected = f"{name}_weight together with {name}_eps"
        raise ArgumentError(found[0], expected=expected, got=f"a file with {_listed(tensors)}")
    if _setting(tensors, f"{name}_centred", "true or false, or 1 or 0", lambda v: v in (0, 1)):
        return LayerNorm(weight, bias, float(eps))
    if bias is not None:
        raise ArgumentError(f"{name}_bias", expected=f"a norm with {name}_centred = 1", got="RMSNorm")
    return RMSNorm(weight, float(eps))


def _of_paper(numbers: dict[str, Tensor], causal: bool) -> SelfAttention:
    """Build an attention layer from the matrices A, V and W and the vector b of the paper, where W and b may
    be missing.

    The queries are A x_i + b, the keys are x_j, and the values are V x_j.
    """
    A, V = _with_axis(numbers["A"], 2), _with_axis(numbers["V"], 2)
    if A.ndim != 3 or A.shape[1] != A.shape[2]:
        raise ArgumentError(
            "A",
            expected="a square matrix (d, d), or (heads, d, d)",
            got=f"shape {tuple(numbers['A'].shape)}",
            remedy="For query and key matrices Q, K of shape (k, d), A = K.T @ Q / k**0.5.",
        )
    if V.ndim != 3 or V.shape[0] != A.shape[0] or V.shape[2] != A.shape[2]:
        raise ArgumentError(
            "V",
            expected=f"shape (d_v, {A.shape[2]})"
            if A.shape[0] == 1
            else f"shape ({A.shape[0]}, d_v, {A.shape[2]})",
            got=f"shape {tuple(numbers['V'].shape)}",
        )
    heads, d = A.shape[:2]
    as_parameter("A", A, (heads, d, d))
    as_parameter("V", V, (heads, "d_v", d))
    b, W = numbers.get("b"), numbers.get("W")
    if b is not None:
        b = as_parameter("b", _with_axis(b, 1), (heads, d))
    if W is not None:
        W = as_parameter("W", W, ("d_out", heads * V.shape[1]))
    key = torch.eye(d, dtype=A.dtype).expand(A.shape).contiguous()
    return SelfAttention(A, key, V, W, query_bias=b, scale=1.0, causal=causal)


def _with_axis(t: Tensor, rank: int) -> Tensor:
    """Add a leading axis to a tensor with ``rank`` axes, and return other tensors unchanged."""
    return t[None] if t.ndim == rank else t


def _setting(
    tensors: dict[str, Tensor], name: str, expected: str, fits: Callable[[float], bool]
) -> float | None:
    """Return the number in the one-entry tensor of a given name, or None if the file has no such tensor."""
    t = tensors.get(name)
    if t is None:
        return None
    got = f"shape {tuple(t.shape)}"
    if t.numel() == 1:
        value = t.item()
        if not t.is_complex() and fits(value):
            return value
        got = str(value)
    raise ArgumentError(name, expected=expected, got=got)


def _tokens(x: Tensor | None, attention: SelfAttention) -> Tensor | None:
    if x is None:
        return None
    if x.ndim != 2 or x.shape[0] < 1 or x.shape[1] != attention.d:
        raise ArgumentError("X", expected=f"tokens (n, {attention.d})", got=f"shape {tuple(x.shape)}")
    if not bool(torch.isfinite(x).all()):
        raise ArgumentError("X", expected="finite numbers", got="NaN or infinity")
    attention.check_length(x.shape[0])
    return x


def _listed(tensors: Mapping[str, Tensor]) -> str:
    more = f" and {len(tensors) - 8} more" if len(tensors) > 8 else ""
    return ", ".join(sorted(tensors)[:8]) + more if tensors else "none"
