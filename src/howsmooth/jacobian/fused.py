"""Products without n × n matrices on a CUDA device, each in kernels of Triton's.

Tiles of :mod:`howsmooth.jacobian.streamed` are written to memory and read again between matrix products;
here they stay on the chip, and the products run on the matrix units, whose operands are parts of float32
numbers. JᵀJ takes twelve products a tile where nine would do: P is formed for the image, for the cotangents
of the queries and for those of the keys. Measurements: docs/benchmarks.md.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from howsmooth.jacobian.streamed import StreamedDerivative, Through

__all__ = ["PARTS_BYTES", "FusedDerivative", "filled_width", "fused", "within"]

PARTS_BYTES = 6
"""Of all parts of one number."""

_OLDEST = (8, 0)  # whose matrix units multiply bfloat16
_WIDEST = 128
_NARROWEST = 16  # of a matrix unit
# Errors are measured up to scores of this size (docs/benchmarks.md).
_LARGEST_SCORE = 128.0


@dataclass(frozen=True)
class _Tile:
    """Sizes of a kernel's tiles, and how it runs."""

    rows: int
    keys: int
    warps: int
    stages: int


# By parts: the fastest of eight or so each, on an H200 with heads of 64 entries.
_IMAGE = {2: _Tile(128, 64, 8, 2), 3: _Tile(128, 64, 8, 1)}
_QUERIES = {2: _Tile(128, 64, 8, 3), 3: _Tile(128, 64, 8, 2)}
_KEYS = {2: _Tile(64, 64, 4, 2), 3: _Tile(64, 64, 4, 1)}
# Where there is no room on the chip for these.
_SMALLER = (_Tile(64, 64, 4, 1), _Tile(64, 32, 4, 1), _Tile(32, 32, 4, 1), _Tile(16, 16, 4, 1))
_room: dict[object, int] = {}


@dataclass(frozen=True)
class FusedDerivative(StreamedDerivative):
    """A streamed derivative in float32 whose products are made by kernels.

    Parameters
    ----------
    parts
        Of a float32 number, in bfloat16: three have its 24 bits, two have 16.

    """

    parts: int = 3

    def rounding(self, batch: int) -> Float[Tensor, " batch"]:
        """Relative error of the derivative's norm that rounding in the products may cause, each member.

        Errors measured on an H200 stay below eps (10 + κ / 3) with three parts, eps float32's, and below
        2⁻¹⁶ κ / 20 with two: over saturated and unsaturated, causal and unmasked heads of 96 to 4096 tokens,
        κ from 4 to 106.
        """
        if self.parts == 3:
            return torch.finfo(torch.float32).eps * (64.0 + 2.0 * self.kappa)
        return 2.0**-16 * (4.0 + self.kappa / 8.0)

    def product(
        self,
        dq: Float[Tensor, "b rows key_dim"],
        dk: Float[Tensor, "b n key_dim"],
        dv: Float[Tensor, "b n value_dim"],
    ) -> Float[Tensor, "b rows value_dim"]:
        """Return dO for tangents of the scaled queries, the keys and the values."""
        from howsmooth.jacobian import fused_kernels

        q, k, v = self._operands
        out = torch.empty_like(self.mean)
        operands = (
            q,
            self._split(dq.view(self.q.shape).flatten(0, 1)),
            k,
            self._split(dk),
            v,
            self._split(dv),
        )
        self._run(
            fused_kernels.image, _IMAGE, "rows",
            *operands, self._lse, self.mean, out,
            *self._sizes(), self.v.shape[-1],
        )  # fmt: skip
        return out.flatten(1, 2)

    def adjoint(
        self, do: Float[Tensor, "b rows value_dim"]
    ) -> tuple[Float[Tensor, "b rows key_dim"], Float[Tensor, "b n key_dim"], Float[Tensor, "b n value_dim"]]:
        """Return the adjoint's (scaled queries, keys, values) parts for a cotangent of the output."""
        from howsmooth.jacobian import fused_kernels

        q, k, v = self._operands
        do = do.view(self.mean.shape)
        common, u = torch.linalg.vecdot(do, self.mean), self._split(do.flatten(0, 1))
        operands = (q, u, k, v, self._lse, common)
        dq, dk, dv = (torch.empty_like(t) for t in (self.q, self.k, self.v))
        key_dim, value_dim = self.k.shape[2], self.v.shape[2]
        self._run(
            fused_kernels.adjoint_queries, _QUERIES, "rows",
            *operands, dq, *self._sizes(), key_dim,
        )  # fmt: skip
        self._run(
            fused_kernels.adjoint_keys, _KEYS, "keys",
            *operands, dk, dv, *self._sizes(), key_dim, value_dim,
        )  # fmt: skip
        return dq.flatten(1, 2), dk, dv

    def gram(
        self,
        dq: Float[Tensor, "b rows key_dim"],
        dk: Float[Tensor, "b n key_dim"],
        dv: Float[Tensor, "b n value_dim"],
        through: Through,
    ) -> tuple[Float[Tensor, "b rows key_dim"], Float[Tensor, "b n key_dim"], Float[Tensor, "b n value_dim"]]:
        """Return the adjoint of ``through`` of the product; ``through`` is called once for each member."""
        do = self.product(dq, dk, dv).view(self.mean.shape)
        rows = slice(0, self.q.shape[2])
        for i, part in enumerate(do.split(self.kv_heads)):
            part.copy_(through(i, rows, part))
        return self.adjoint(do.flatten(1, 2))

    @cached_property
    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values in their parts."""
        return self._split(self.q.flatten(0, 1)), self._split(self.k), self._split(self.v)

    @cached_property
    def _lse(self) -> Tensor:
        return (self.lse / math.log(2)).float()

    @property
    def _width(self) -> int:
        """Of all operands: where keys' and values' differed, Triton 3.6 made wrong code for three parts."""
        return filled_width(self.k.shape[-1], self.v.shape[-1])

    def _split(self, t: Float[Tensor, "heads rows width"]) -> Tensor:
        """Return the parts, (part, head, row, width filled up)."""
        width = self._width
        out = t.new_empty(self.parts, *t.shape[:-1], width, dtype=torch.bfloat16)
        rest = pad(t, (0, width - t.shape[-1]))
        for i in range(self.parts):
            out[i] = rest
            if i + 1 < self.parts:
                rest = rest - out[i]
        return out

    def _sizes(self) -> tuple[int, ...]:
        q, k, _ = self._operands
        group, m = self.q.shape[1:3]
        return (
            q[0].numel(),
            k[0].numel(),
            m,
            self.k.shape[1],
            group,
            self.first_row,
            self.visibility.window or 0,
        )

    def _run(self, kernel: Any, tiles: dict[int, _Tile], of: str, *arguments: object) -> None:
        """Run a kernel on blocks of rows or of keys, in the largest tiles that the device has room for."""
        from triton.runtime.errors import OutOfResources

        heads, length = self.k.shape[:2]
        if of == "rows":
            heads, length = heads * self.q.shape[1], self.q.shape[2]
        case = (kernel, self.parts, self._width, self.q.device)
        candidates = (tiles[self.parts], *_SMALLER)
        for i in range(_room.get(case, 0), len(candidates)):
            tile = candidates[i]
            try:
                with torch.cuda.device_of(self.q):
                    kernel[-(-length // getattr(tile, of)), heads](
                        *arguments,
                        CAUSAL=self.visibility.causal,
                        WINDOWED=self.visibility.window is not None,
                        PARTS=self.parts,
                        WIDTH=self._width,
                        ROWS=tile.rows,
                        KEYS=tile.keys,
                        num_warps=tile.warps,
                        num_stages=tile.stages,
                    )
            except OutOfResources:
                if tile is candidates[-1]:
                    raise
            else:
                _room[case] = i
                return


def filled_width(key_dim: int, value_dim: int) -> int:
    """Return to what the columns of all operands are filled up."""
    return max(_NARROWEST, 1 << (max(key_dim, value_dim) - 1).bit_length())


def fused(at: StreamedDerivative, allowance: float | None = None) -> StreamedDerivative:
    """Return the derivative with its products in kernels, where there are kernels for it.

    Of as few parts as keep their relative rounding within the allowance, or as it is where none do. Without
    an allowance three parts, where float32 products would have scores in float32.
    """
    return within(at, allowance) if _fits(at) else at


def within(at: StreamedDerivative, allowance: float | None) -> StreamedDerivative:
    """Do what :func:`fused` says, wherever that is."""
    own = vars(at)
    rows = {name: own[name].contiguous() for name in ("q", "k", "v", "lse", "mean")}
    coarse, fine = (FusedDerivative(**(own | rows | {"exact": None, "parts": parts})) for parts in (2, 3))
    if allowance is None:
        return fine if at.exact is None else at
    members = len(at.kappa)
    return next((f for f in (coarse, fine) if float(f.rounding(members).max()) <= allowance), at)


def _fits(at: StreamedDerivative) -> bool:
    return (
        at.q.is_cuda
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(at.q.device) >= _OLDEST
        and at.q.dtype == torch.float32
        and float(at.kappa.max()) <= _LARGEST_SCORE
        and not at.features
        and at.visibility.mask is None
        and max(at.q.shape[-1], at.v.shape[-1]) <= _WIDEST
        and importlib.util.find_spec("triton") is not None
    )
