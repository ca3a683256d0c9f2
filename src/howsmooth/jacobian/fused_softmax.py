"""The derivative of softmax attention computed by Triton kernels on a CUDA device, without n × n matrices.

:mod:`howsmooth.jacobian.streamed_softmax` writes each tile to memory between matrix products. Here a tile
stays on the chip, and the products run on the matrix units, with float32 numbers split into bfloat16 parts.
JᵀJ takes twelve matrix products a tile instead of nine, because P is formed three times: for the image, for
the cotangents of the queries, and for those of keys and values. Timings are on the documentation page
"Evidence".
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

from howsmooth.jacobian.softmax_tile import OfKeys, OfOutputs, OfQueries, OfValues
from howsmooth.jacobian.streamed_softmax import StreamedDerivative, Through
from howsmooth.triton_launch import TileSize, launch, padded_width

__all__ = ["PARTS_BYTES", "FusedDerivative", "fused", "within"]

PARTS_BYTES = 6
"""Bytes of the three bfloat16 parts of one number."""

_OLDEST = (8, 0)  # first compute capability whose matrix units multiply bfloat16
_WIDEST = 128  # entries of a head
# The errors of the kernels were measured for scores up to this size (documentation page "Evidence").
_LARGEST_SCORE = 128.0


# The tile of each kernel, by the number of parts: the fastest of about eight, on an H200, with heads of 64
# entries.
_IMAGE = {2: TileSize(128, 64, 8, 2), 3: TileSize(128, 64, 8, 1)}
_QUERIES = {2: TileSize(128, 64, 8, 3), 3: TileSize(128, 64, 8, 2)}
_KEYS = {2: TileSize(64, 64, 4, 2), 3: TileSize(64, 64, 4, 1)}
# Tiles that are tried if those above do not fit into the memory on the chip.
_SMALLER = (TileSize(64, 64, 4, 1), TileSize(64, 32, 4, 1), TileSize(32, 32, 4, 1), TileSize(16, 16, 4, 1))


@dataclass(frozen=True)
class FusedDerivative(StreamedDerivative):
    """The derivative of softmax attention in float32, with products computed by Triton kernels. A float32
    number is split into bfloat16 ``parts``: three hold all of its 24 bits, two hold 16.
    """

    parts: int = 3

    def rounding(self, batch: int) -> Float[Tensor, " batch"]:
        """Estimate, for each sequence, the relative rounding error of the norm of the Jacobian.

        Errors measured on an H200 stay below eps (10 + κ / 3) with three parts, eps that of float32, and
        below 2⁻¹⁶ κ / 20 with two, for saturated and unsaturated, causal and unmasked heads of 96 to 4096
        tokens and κ from 4 to 106.
        """
        if self.parts == 3:
            return torch.finfo(torch.float32).eps * (64.0 + 2.0 * self.kappa)
        return 2.0**-16 * (4.0 + self.kappa / 8.0)

    def product(self, dq: OfQueries, dk: OfKeys, dv: OfValues) -> OfOutputs:
        """Return the tangent of the outputs, given tangents of the scaled queries, keys and values."""
        # Imported here, so that the package works without Triton.
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

    def adjoint(self, do: OfOutputs) -> tuple[OfQueries, OfKeys, OfValues]:
        """Return cotangents of the scaled queries, keys and values, given a cotangent of the outputs."""
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
        self, dq: OfQueries, dk: OfKeys, dv: OfValues, through: Through
    ) -> tuple[OfQueries, OfKeys, OfValues]:
        """Return Jᵀ(T(J(dq, dk, dv))) for the derivative J of softmax attention. The function T, ``through``,
        is called once for each sequence.
        """
        # The kernels keep no tiles, so the product is completed before the adjoint begins.
        do = self.product(dq, dk, dv).view(self.mean.shape)
        rows = slice(0, self.q.shape[2])
        for i, part in enumerate(do.split(self.kv_heads)):
            part.copy_(through(i, rows, part))
        return self.adjoint(do.flatten(1, 2))

    @cached_property
    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._split(self.q.flatten(0, 1)), self._split(self.k), self._split(self.v)

    @cached_property
    def _lse(self) -> Tensor:
        return (self.lse / math.log(2)).float()

    @property
    def _width(self) -> int:
        # Keys and values have one width: Triton 3.6 compiles wrong code for three parts if theirs differ.
        return padded_width(self.k.shape[-1], self.v.shape[-1])

    def _split(self, t: Float[Tensor, "heads rows width"]) -> Tensor:
        """Return bfloat16 parts (part, head, row, column) whose sum is nearly t, with padded columns."""
        width = self._width
        out = t.new_empty(self.parts, *t.shape[:-1], width, dtype=torch.bfloat16)
        rest = pad(t, (0, width - t.shape[-1]))
        for i in range(self.parts):
            out[i] = rest  # rounds to bfloat16
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
            0,  # the number of the first query row
            self.visibility.window or 0,
        )

    def _run(self, kernel: Any, tiles: dict[int, TileSize], of: str, *arguments: object) -> None:
        """Run a kernel on all heads and all blocks of query rows, or of keys if ``of`` is "keys"."""
        heads, length = self.k.shape[:2]
        if of == "rows":
            heads, length = heads * self.q.shape[1], self.q.shape[2]
        options = {
            "CAUSAL": self.visibility.causal,
            "WINDOWED": self.visibility.window is not None,
            "PARTS": self.parts,
            "WIDTH": self._width,
        }
        launch(
            kernel,
            (tiles[self.parts], *_SMALLER),
            lambda tile: (-(-length // getattr(tile, of)), heads),
            self.q,
            arguments,
            options,
        )


def fused(at: StreamedDerivative, allowance: float | None = None) -> StreamedDerivative:
    """Return a derivative of softmax attention with products by Triton kernels. Return ``at`` itself if no
    kernel supports it.

    The kernels split float32 numbers into two or three bfloat16 parts. They get as few parts as keep the
    relative rounding error within ``allowance``; if three parts do not, ``at`` is returned. Without an
    allowance they get three parts, provided that the products of ``at`` form their scores in float32 too.
    """
    return within(at, allowance) if _fits(at) else at


def within(at: StreamedDerivative, allowance: float | None) -> StreamedDerivative:
    """Return the derivative ``at`` with products by Triton kernels, or ``at`` itself if kernels are not
    accurate enough.
    """
    own = vars(at)
    rows = {name: own[name].contiguous() for name in ("q", "k", "v", "lse", "mean")}
    # ``exact`` is dropped: the kernels form scores from the parts of q and k.
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
