"""Draw the initial tokens of a flow at random, or read them from a file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.models.inputs.array_files import read_arrays
from howsmooth.seeds import derive_seed
from howsmooth.study.flows.flow_plan import FlowPlan

__all__ = ["DRAWN", "draw_tokens", "kind_of_start", "onto_sphere", "read_tokens"]

DRAWN = ("gaussian", "sphere")
_ENDINGS = (".npy", ".npz")


def kind_of_start(plan: FlowPlan, own: str = "") -> str:
    """Return where the initial tokens of a flow come from: a random draw, the source, or a file.

    The result is ``gaussian``, ``sphere``, ``given`` (by the source of the attention), or the path of a file.
    ``own`` says where the tokens of the source come from, ``text`` or ``file``; it is empty if the source has
    none.
    """
    if plan.start == "auto":
        return "given" if own else "sphere" if plan.sphere else "gaussian"
    return "given" if own and plan.start == own else plan.start


def draw_tokens(plan: FlowPlan, kind: str, n: int, d: int) -> Float64[Tensor, "n d"]:
    """Draw n tokens: from N(0, radius² I) for ``gaussian``, uniformly with norm ``radius`` for ``sphere``."""
    seed = derive_seed(purpose="start", kind=kind, n=n, d=d, seed=plan.seed)
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return onto_sphere(x, plan.radius) if kind == "sphere" else plan.radius * x


def onto_sphere(x: Float64[Tensor, "n d"], radius: float) -> Float64[Tensor, "n d"]:
    """Project each token radially onto the sphere around zero that has the given radius.

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


def read_tokens(plan: FlowPlan, path: str | os.PathLike[str]) -> Float64[Tensor, "n d"]:
    """Read tokens (n, d) from a ``.npy`` file, or from ``X`` in a ``.npz`` file. Pickled data are refused.

    Raises
    ------
    ModelError
        If the file cannot be read.
    ArgumentError
        If it holds no tokens, or not as many as the plan says.

    """
    path = Path(path)
    if str(path) in ("text", "file"):
        raise ArgumentError(
            "start", expected=f"a source with tokens of its own for {path}", got=repr(plan.source)
        )
    x = _read(path)
    for name, there in (("tokens", x.shape[0]), ("dimension", x.shape[1])):
        asked = getattr(plan, name)
        if asked is not None and asked != there:
            raise ArgumentError(
                name, expected=f"{there}, as in {path}", got=str(asked), remedy=f"Leave --{name} out."
            )
    return x


def _read(path: Path) -> Float64[Tensor, "n d"]:
    if path.suffix not in _ENDINGS:
        raise ArgumentError(
            "start",
            expected=f"auto, {', '.join(DRAWN)}, text, file, or a name that ends in {' or '.join(_ENDINGS)}",
            got=repr(str(path)),
        )
    array = read_arrays(path, "file of tokens", _ENDINGS).get("X" if path.suffix == ".npz" else "")
    if array is None or array.ndim != 2 or 0 in array.shape:
        got = "none of that name" if array is None else f"shape {tuple(array.shape)}"
        raise ArgumentError("start", expected=f"an array X (n, d) of numbers in {path}", got=got)
    x = array.double()
    if not bool(torch.isfinite(x).all()):
        raise ArgumentError("start", expected=f"finite numbers in {path}", got="NaN or infinity")
    return x
