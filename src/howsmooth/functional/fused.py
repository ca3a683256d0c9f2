"""Attention and its first and second derivatives in kernels of Triton's, each without n × n matrices.

What a block of :mod:`howsmooth.functional.softmax` computes, for all blocks at once. The value hands two
tensors on to its derivatives, which have no derivatives themselves: O in float32, and the logarithms of the
softmax's denominators. All derivatives are in closed form and allow for what these depend on.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from howsmooth.functional.softmax import Scores

__all__ = ["KEPT", "Kept", "Kernels", "obstacle"]

KEPT = ("mean", "lse")
"""O in float32 (lead, kv_heads, group, m, value_dim), and logarithms (lead, kv_heads, group, m, 1)."""
Kept = tuple[Tensor, ...]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_OLDEST = (8, 0)  # whose matrix units multiply bfloat16
_WIDEST = 256
_NARROWEST = 16  # of a matrix unit


@dataclass(frozen=True)
class _Tile:
    """Sizes of a kernel's tiles, and how it runs."""

    rows: int
    keys: int
    warps: int
    stages: int


# From large to small: the first is taken that the device has room for. That none needs more registers than
# there are was read from what the compiler says of them for compute capability 9.0 (benchmarks/kernels.py).
_TILES = (
    _Tile(128, 64, 8, 3),
    _Tile(128, 64, 8, 2),
    _Tile(64, 64, 4, 2),
    _Tile(64, 32, 4, 2),
    _Tile(32, 32, 4, 1),
    _Tile(16, 16, 4, 1),
)
_room: dict[object, int] = {}


def obstacle(x: Mapping[str, Tensor]) -> str | None:
    """Say what about queries, keys and values, and what is added to scores, there are no kernels for."""
    q, v = x["q"], x["v"]
    if q.dtype not in _DTYPES:
        return f"{q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > _WIDEST or 0 in (*q.shape, *x["k"].shape, *v.shape):
        return f"queries {tuple(q.shape)} and values {tuple(v.shape)}"
    if "mask" in x and "bias" in x:
        return "two tensors that are added to the scores"
    if get_proxy_mode() is not None:
        return "a call that is recorded"
    if importlib.util.find_spec("triton") is None:
        return "no Triton"
    return _obstacle_of(q.device)


def _obstacle_of(device: torch.device) -> str | None:
    import triton

    if triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return f"tensors on {device}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= _OLDEST else f"a device of compute capability {capability}"


@dataclass(frozen=True, eq=False)
class Kernels:
    """Attention with these scores. Tensors have five axes, the first of full length in all.

    ``x`` holds the tensors by name, ``d`` tangents of some of them, ``kept`` what :meth:`value` has given to
    its derivatives. Results are float32.
    """

    scores: Scores

    def value(self, x: Mapping[str, Tensor]) -> tuple[Tensor, Kept]:
        """Return O, and what its derivatives are given."""
        from howsmooth.functional import fused_kernels

        q, v = x["q"], x["v"]
        mean = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.float32)
        lse = q.new_empty((*q.shape[:-1], 1), dtype=torch.float32)
        self._run(fused_kernels.value, "rows", x, q, x["k"], v, lse, mean)
        return mean.clone(), (mean, lse)

    def tangent(self, x: Mapping[str, Tensor], kept: Kept, d: Mapping[str, Tensor]) -> Tensor:
        """Return dO."""
        return self._tangent(x, kept, _filled(x, d))[0]

    def adjoint(
        self, x: Mapping[str, Tensor], kept: Kept, u: Tensor, which: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return the cotangents of the tensors ``which``: queries, keys, values and sinks."""
        from howsmooth.functional import fused_kernels

        common = _common(u, kept[0])
        operands, found = (x["q"], u, x["k"], x["v"], kept[1], common), dict[str, Tensor]()
        if "q" in which:
            found["q"] = _result(x["q"])
            self._run(fused_kernels.adjoint_queries, "rows", x, *operands, found["q"])
        if "k" in which or "v" in which:
            found["k"], found["v"] = _result(x["k"]), _result(x["v"])
            self._run(fused_kernels.adjoint_keys, "keys", x, *operands, found["k"], found["v"])
        if "sinks" in which:
            found["sinks"] = -_share(x, kept) * common
        return found

    def second(
        self,
        x: Mapping[str, Tensor],
        kept: Kept,
        u: Tensor,
        d: Mapping[str, Tensor],
        du: Tensor | None,
        which: Sequence[str],
    ) -> dict[str, Tensor]:
        """Return the tangents of :meth:`adjoint` for tangents ``d`` and ``du`` of U."""
        from howsmooth.functional import fused_kernels

        d = _filled(x, d)
        do, mu = self._tangent(x, kept, d)
        common, moved = _common(u, kept[0]), _common(u, do)
        if du is None:
            du = torch.zeros_like(u)
        else:
            moved = moved + _common(du, kept[0])
        operands = (x["q"], d["q"], u, du, x["k"], d["k"], x["v"], d["v"], kept[1], mu, common, moved)
        found = dict[str, Tensor]()
        if "q" in which:
            found["q"] = _result(x["q"])
            self._run(fused_kernels.second_queries, "rows", x, *operands, found["q"])
        if "k" in which or "v" in which:
            found["k"], found["v"] = _result(x["k"]), _result(x["v"])
            self._run(fused_kernels.second_keys, "keys", x, *operands, found["k"], found["v"])
        if "sinks" in which:
            share = _share(x, kept)
            found["sinks"] = share * ((mu - d["sinks"].float()) * common - moved)
        return found

    def _tangent(self, x: Mapping[str, Tensor], kept: Kept, d: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return dO and μ; ``d`` has a tangent for each of the tensors."""
        from howsmooth.functional import fused_kernels

        mean, lse = kept
        mu, out = torch.empty_like(lse), torch.empty_like(mean)
        dsinks = d["sinks"].contiguous() if "sinks" in d else lse
        operands = (x["q"], d["q"], x["k"], d["k"], x["v"], d["v"], lse, mean, dsinks, mu, out)
        self._run(fused_kernels.tangent, "rows", x, *operands)
        return out, mu

    def _run(self, kernel: Any, by: str, x: Mapping[str, Tensor], *tensors: Tensor) -> None:
        """Run a kernel on blocks of rows or of keys, in the largest tiles that the device has room for."""
        from triton.runtime.errors import OutOfResources

        scores, q, k, v = self.scores, x["q"], x["k"], x["v"]
        group, visible = q.shape[2], scores.grid.visible
        width = max(_NARROWEST, 1 << (max(q.shape[-1], v.shape[-1]) - 1).bit_length())
        added = next((x[name] for name in ("mask", "bias") if name in x), None)
        arguments = (
            *(t.contiguous() for t in tensors), *_strided(x.get("seen"), q), *_strided(added, q),
            x["sinks"].contiguous() if "sinks" in x else q,
            scores.scale, scores.softcap or 1.0,
            q.shape[-2], k.shape[-2], q.shape[1] * group, group, visible.window or 0,
        )  # fmt: skip
        options = {
            "CAUSAL": visible.causal,
            "WINDOWED": visible.window is not None,
            "SEEN": "seen" in x,
            "BIAS": added is not None,
            "CAPPED": scores.softcap is not None,
            "SINKS": "sinks" in x,
            "PRECISION": "ieee" if q.dtype != torch.float32 else _precision(),
            "KEY": q.shape[-1],
            "VALUE": v.shape[-1],
            "WIDTH": width,
        }
        heads, length = (
            (math.prod(q.shape[:3]), q.shape[-2]) if by == "rows" else (math.prod(k.shape[:3]), k.shape[-2])
        )
        case = (kernel, q.dtype, q.device, *options.values())
        for i in range(_room.get(case, 0), len(_TILES)):
            tile = _TILES[i]
            try:
                with torch.cuda.device_of(q):
                    kernel[(heads * -(-length // getattr(tile, by)),)](
                        *arguments,
                        **options,
                        ROWS=tile.rows,
                        KEYS=tile.keys,
                        num_warps=tile.warps,
                        num_stages=tile.stages,
                    )
            except OutOfResources:
                if tile is _TILES[-1]:
                    raise
            else:
                _room[case] = i
                return


def _precision() -> str:
    """How float32 operands are multiplied: with all of their digits, on matrix units where there are some."""
    import triton

    return "ieee" if triton.knobs.runtime.interpret else "bf16x6"


def _filled(x: Mapping[str, Tensor], d: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a tangent of queries, keys, values and sinks, zero where ``d`` has none."""
    names = (name for name in ("q", "k", "v", "sinks") if name in x)
    return {name: d[name] if name in d else torch.zeros_like(x[name]) for name in names}


def _common(u: Tensor, of_queries: Tensor) -> Tensor:
    """⟨U, ·⟩ in each row, (lead, kv_heads, group, m, 1)."""
    common: Tensor = torch.linalg.vecdot(u.float(), of_queries)
    return common[..., None]


def _share(x: Mapping[str, Tensor], kept: Kept) -> Tensor:
    """Share of the sink in each row, (lead, kv_heads, group, m, 1)."""
    return torch.exp2(x["sinks"].float() / math.log(2) - kept[1])


def _result(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=torch.float32, device=like.device)


def _strided(t: Tensor | None, q: Tensor) -> tuple[object, ...]:
    """Return a tensor of scores for a kernel, with strides of members, heads, rows and keys."""
    if t is None:
        return q, 0, 0, 0, 0
    members, kv_heads, group, m, _ = q.shape
    heads = t.expand(members, kv_heads, group, m, t.shape[-1]).flatten(1, 2)
    strides = (stride if size != 1 else 0 for stride, size in zip(heads.stride(), heads.shape, strict=True))
    return heads.view(torch.uint8) if t.dtype == torch.bool else heads, *strides
