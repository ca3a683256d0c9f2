"""Attention and its first and second derivatives computed by Triton kernels, without n × n matrices in
memory.

A kernel computes for all blocks at once what :class:`~howsmooth.jacobian.softmax_tile.WholeRows` computes for
one. The kernel for the value keeps two tensors for the derivatives: O in float32, and the logarithms of the
softmax denominators. PyTorch does not differentiate these two; the closed forms of the derivatives account
for their dependence on the inputs.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from howsmooth.functional.scores import Scores
from howsmooth.triton_launch import TileSize, launch, padded_width

__all__ = ["KEPT", "KernelRows", "input_precision", "obstacle", "tiles"]

KEPT = ("mean", "lse")
"""Names of the kept tensors: O in float32 (lead, kv_heads, group, m, value_dim), and log₂ of the softmax
denominators (lead, kv_heads, group, m, 1)."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_OLDEST = (8, 0)  # first compute capability whose matrix units multiply bfloat16
_OLDEST_TRITON = (3, 6)  # first version that multiplies float32 in three bfloat16 parts
_WIDEST = 256  # entries of a head


# Tiles from large to small, for kernels over blocks of rows and over blocks of keys. The first tile that fits
# on the chip is used. The search begins at the first tile whose numbers fit, or nearly fit, into registers of
# a thread, as the compiler reports for compute capability 9.0 (benchmarks/kernels.py).
_ROWS = (
    TileSize(128, 64, 8, 3),
    TileSize(128, 64, 8, 2),
    TileSize(128, 32, 8, 2),
    TileSize(64, 32, 4, 2),
    TileSize(64, 16, 4, 2),
    TileSize(32, 32, 4, 1),
    TileSize(16, 16, 4, 1),
)
_KEYS = (
    TileSize(64, 128, 8, 2),
    TileSize(32, 128, 8, 2),
    TileSize(32, 64, 8, 2),
    TileSize(16, 64, 4, 2),
    TileSize(16, 32, 4, 2),
    TileSize(16, 16, 4, 1),
)
# Index of the first tile that is tried for each kernel: in half precision and in float32, for heads of up to
# 64, 128 and 256 entries.
_FIRST = {
    "value": ((0, 0, 1), (2, 3, 4)),
    "tangent": ((0, 1, 4), (4, 4, 6)),
    "adjoint_queries": ((0, 0, 3), (2, 4, 4)),
    "adjoint_keys": ((0, 1, 2), (3, 4, 5)),
    "second_queries": ((0, 3, 4), (4, 4, 6)),
    "second_keys": ((1, 3, 4), (3, 5, 5)),
}
_BY_KEYS = ("adjoint_keys", "second_keys")


def obstacle(scores: Scores, x: Mapping[str, Tensor]) -> str | None:
    """Return why the Triton kernels cannot compute attention for the tensors ``x``, or None if they can."""
    q, v, visible = x["q"], x["v"], scores.grid.visible
    if (visible.causal or visible.window is not None) and (visible.offset or scores.grid.m != visible.n):
        return (
            f"causal order or a window of {scores.grid.m} queries from {visible.offset} on, {visible.n} keys"
        )
    if "sinks" in x and x["sinks"].shape[-2] * x["sinks"].shape[0] != 1:
        return "sinks for each query"
    if q.dtype not in _DTYPES:
        return f"{q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > _WIDEST or 0 in (*q.shape, *x["k"].shape, *v.shape):
        return f"queries {tuple(q.shape)} and values {tuple(v.shape)}"
    if "seed" in x:
        return "dropout"
    if "mask" in x and "bias" in x:
        return "both a mask of numbers and a score bias"
    if get_proxy_mode() is not None:
        return "a call that torch.func.linearize or make_fx records"
    if importlib.util.find_spec("triton") is None:
        return "no Triton"
    return _obstacle_of(q.device)


def _obstacle_of(device: torch.device) -> str | None:
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < _OLDEST_TRITON:
        return f"Triton {triton.__version__}, where {'.'.join(map(str, _OLDEST_TRITON))} is the oldest"
    if triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return f"tensors on {device}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= _OLDEST else f"a device of compute capability {capability}"


@dataclass(frozen=True, eq=False)
class KernelRows:
    """Attention and its first and second derivatives at all query rows, computed by Triton kernels.

    The methods are those of :class:`~howsmooth.jacobian.softmax_tile.WholeRows`. Tensors have five axes, of
    which the first has its full length. Results are float32.

    Parameters
    ----------
    scores
        The rule by which scores are formed.
    x
        The tensors by name.
    kept
        The tensors named in ``KEPT``.

    """

    scores: Scores
    x: Mapping[str, Tensor]
    kept: tuple[Tensor, ...]

    @classmethod
    def of_value(cls, scores: Scores, x: Mapping[str, Tensor]) -> KernelRows:
        """Compute the outputs and the logarithms of the softmax denominators for the tensors ``x``."""
        q, v = x["q"], x["v"]
        mean = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.float32)
        lse = q.new_empty((*q.shape[:-1], 1), dtype=torch.float32)
        at = cls(scores, x, (mean, lse))
        at._run("value", q, x["k"], v, lse, mean)
        return at

    def value(self) -> Tensor:
        """Return the attention outputs O."""
        return self.kept[0]

    def tangent(self, d: Mapping[str, Tensor]) -> Tensor:
        """Return the tangent of the attention outputs for the tangents ``d`` of the tensors."""
        return self._tangent(self._filled(d))[0]

    def adjoint(self, u: Tensor, which: Sequence[str]) -> dict[str, Tensor]:
        """Return the cotangents of the tensors that ``which`` names, given the cotangent ``u`` of O."""
        x, (mean, lse) = self.x, self.kept
        common = _row_products(u, mean)
        found = self._cotangents("adjoint", (x["q"], u, x["k"], x["v"], lse, common), which)
        if "sinks" in which:
            found["sinks"] = -self._sink_probability() * common
        return found

    def second(
        self, u: Tensor, d: Mapping[str, Tensor], du: Tensor | None, which: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return the tangents of the cotangents that :meth:`adjoint` returns."""
        x, (mean, lse), d = self.x, self.kept, self._filled(d)
        do, mu = self._tangent(d)
        # r = ⟨U, O⟩ of each row, and its tangent dr = ⟨dU, O⟩ + ⟨U, dO⟩.
        common, moved = _row_products(u, mean), _row_products(u, do)
        if du is None:
            du = torch.zeros_like(u)
        else:
            moved = moved + _row_products(du, mean)
        operands = (x["q"], d["q"], u, du, x["k"], d["k"], x["v"], d["v"], lse, mu, common, moved)
        found = self._cotangents("second", operands, which)
        if "sinks" in which:
            found["sinks"] = self._sink_probability() * ((mu - d["sinks"].float()) * common - moved)
        return found

    def _cotangents(self, name: str, operands: tuple[Tensor, ...], which: Sequence[str]) -> dict[str, Tensor]:
        """Compute the cotangents that ``which`` names, by the kernels whose names begin with ``name``."""
        found = {
            of: torch.empty(self.x[of].shape, dtype=torch.float32, device=self.x[of].device) for of in "qkv"
        }
        if "q" in which:
            self._run(f"{name}_queries", *operands, found["q"])
        if "k" in which or "v" in which:
            self._run(f"{name}_keys", *operands, found["k"], found["v"])
        return found

    def _tangent(self, d: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the tangent of O and, for each query, the mean μ = rowsum(P∘dS) of its scores' tangents.

        The argument ``d`` must have a tangent of every tensor.
        """
        x, (mean, lse) = self.x, self.kept
        mu, out = torch.empty_like(lse), torch.empty_like(mean)
        # Without sinks the kernel does not read this argument.
        dsinks = d["sinks"].contiguous() if "sinks" in d else lse
        operands = (x["q"], d["q"], x["k"], d["k"], x["v"], d["v"], lse, mean, dsinks, mu, out)
        self._run("tangent", *operands)
        return out, mu

    def _filled(self, d: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tangents ``d``, with zeros for the tensors that have none."""
        names = (name for name in ("q", "k", "v", "sinks") if name in self.x)
        return {name: d[name] if name in d else torch.zeros_like(self.x[name]) for name in names}

    def _sink_probability(self) -> Tensor:
        return torch.exp2(self.x["sinks"].float() / math.log(2) - self.kept[1])

    def _run(self, name: str, *tensors: Tensor) -> None:
        """Run a kernel on all blocks of rows or of keys, with the largest tiles that fit on the chip."""
        # Imported here, so that the package works without Triton.
        from howsmooth.functional import fused_kernels

        scores, x = self.scores, self.x
        q, k, v = x["q"], x["k"], x["v"]
        group, visible = q.shape[2], scores.grid.visible
        added = next((x[name] for name in ("mask", "bias") if name in x), None)
        arguments = (
            *(t.contiguous() for t in tensors),
            *_strided(x.get("seen"), q, visible.n), *_strided(added, q, visible.n),
            x["sinks"].contiguous() if "sinks" in x else q,
            scores.scale, scores.softcap or 1.0,
            q.shape[-2], k.shape[-2], q.shape[1] * group, group, visible.window or 0,
        )  # fmt: skip
        width = padded_width(q.shape[-1], v.shape[-1])
        options = {
            "CAUSAL": visible.causal,
            "WINDOWED": visible.window is not None,
            "SEEN": "seen" in x,
            "BIAS": added is not None,
            "CAPPED": scores.softcap is not None,
            "SINKS": "sinks" in x,
            "PRECISION": input_precision(q.dtype),
            "KEY": q.shape[-1],
            "VALUE": v.shape[-1],
            "WIDTH": width,
        }
        by_keys = name in _BY_KEYS
        heads = math.prod((k if by_keys else q).shape[:3])

        def grid(tile: TileSize) -> tuple[int]:
            return (heads * (-(-k.shape[-2] // tile.keys) if by_keys else -(-q.shape[-2] // tile.rows)),)

        kernel = getattr(fused_kernels, name)
        launch(kernel, tiles(name, q.dtype, width), grid, q, arguments, options)


def tiles(name: str, dtype: torch.dtype, width: int) -> tuple[TileSize, ...]:
    """Return the tile sizes to try for a kernel, the largest first. ``width`` is the padded row length."""
    every = _KEYS if name in _BY_KEYS else _ROWS
    first = _FIRST[name][dtype == torch.float32][max(0, (width - 1).bit_length() - 6)]
    return every[min(first, len(every) - 1) :]


def input_precision(dtype: torch.dtype) -> str:
    """Return Triton's setting ``input_precision`` with which products of this dtype keep all digits."""
    import triton

    return "bf16x6" if dtype == torch.float32 and not triton.knobs.runtime.interpret else "ieee"


def _row_products(u: Tensor, of_queries: Tensor) -> Tensor:
    common: Tensor = torch.linalg.vecdot(u.float(), of_queries)
    return common[..., None]


def _strided(t: Tensor | None, q: Tensor, n: int) -> tuple[object, ...]:
    """Return a mask or bias as arguments of a kernel: the tensor, and its strides along the leading axis,
    heads, rows and keys. For None, return ``q`` as a placeholder that the kernel does not read.
    """
    if t is None:
        return q, 0, 0, 0, 0
    heads = t.expand(*q.shape[:-1], n).flatten(1, 2)
    return heads.view(torch.uint8) if t.dtype == torch.bool else heads, *heads.stride()
