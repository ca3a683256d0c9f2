"""How fast this machine is at what measurements are made of: measured once in some seconds, and kept.

What is timed is the library's own products and solver at a few sizes, so that the times hold whatever they
are made of. They are kept in the user's cache folder, for each device, number of threads and release.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.jacobian.streamed import SINGLE_SCORES
from howsmooth.spectral import LinearOperator, lanczos
from howsmooth.study.cost import NARROW, WIDE, Curve, Rates
from howsmooth.study.environment import environment
from howsmooth.texts.cache import cache_folder

__all__ = ["calibrated", "measure_rates"]

# Machines get slower and faster: a disk's age, a container's share. Older calibrations are made again.
_DAYS = 30
# Against n: how many sequences together, and heads. Enough to be timed, and as in studies.
_SIZES = ((2, 10, 8), (8, 10, 8), (32, 10, 8), (128, 4, 8), (512, 1, 8))
_FORMED_AT = (8, 128, 512)
# Where P is not kept.
_STREAMED_AT, _STREAMED_HEADS = (1024,), 2
_TOKEN = 16  # dimension of tokens, small: projections are timed by themselves
_EIGEN_AT = (16, 64, 256, 768)
_ROWS, _FEW, _WIDTH = 256, 8, 768
_STEPS = 20
_SHORTEST = 0.004  # seconds that one timing lasts at least
_REPEATS = 3
_LONG = 0.05  # seconds that need no repetition

Clock = Callable[[], float]


def calibrated(device: str, *, fresh: bool = False) -> Rates:
    """Return what this machine needs, as it was measured before or, if that is old or not there, anew.

    Parameters
    ----------
    device
        Such as ``cpu`` or ``cuda``.
    fresh
        Measure anew in any case.

    """
    path = _path(device)
    if path is not None and not fresh:
        with suppress(OSError, ValueError, TypeError, KeyError):
            if time.time() - path.stat().st_mtime < _DAYS * 86400:
                return _rates(json.loads(path.read_text("utf-8")))
    rates = measure_rates(device)
    if path is not None:
        # A cache is a convenience: where it cannot be written, the next call measures again.
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
                json.dump(asdict(rates), file)
            Path(file.name).replace(path)
    return rates


def measure_rates(device: str, clock: Clock = time.perf_counter) -> Rates:
    """Time products, solver and eigenvalues; some seconds.

    Parameters
    ----------
    device
        Where.
    clock
        Returns seconds; ``time.process_time`` leaves out what others do on a busy machine.

    """
    timer = _Timer(torch.device(device), clock)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).to(device)

    products = [_products(timer, normal, dtype) for dtype in (torch.float32, torch.float64)]

    def pairs(key_dim: int, dtype: torch.dtype) -> Curve:
        return tuple(
            (float(n), _pair(timer, normal, n, members, heads, key_dim, dtype))
            for n, members, heads in _SIZES
        )

    def streamed(key_dim: int) -> tuple[Curve, Curve, Curve]:
        def curve(dtype: torch.dtype, largest: float) -> Curve:
            return tuple(
                (float(n), _pair(timer, normal, n, 1, _STREAMED_HEADS, key_dim, dtype, largest))
                for n in _STREAMED_AT
            )

        # The last with scores beyond what is formed in float32.
        small, large = 1.0, 20 * SINGLE_SCORES
        return curve(torch.float32, small), curve(torch.float64, small), curve(torch.float32, large)

    step, member = _solver(timer, normal)
    return Rates(
        matrix=(products[0][0], products[1][0]),
        weights=(products[0][1], products[1][1]),
        narrow=(pairs(NARROW, torch.float32), pairs(NARROW, torch.float64)),
        wide=(pairs(WIDE, torch.float32), pairs(WIDE, torch.float64)),
        softmax=tuple(
            (float(n), _forming(timer, normal, n, members, heads))
            for n, members, heads in _SIZES
            if n in _FORMED_AT
        ),
        streamed_narrow=streamed(NARROW),
        streamed_wide=streamed(WIDE),
        streamed_softmax=tuple(
            (float(n), _forming(timer, normal, n, 1, _STREAMED_HEADS, streamed=True)) for n in _STREAMED_AT
        ),
        basis=_basis(timer, normal, step, member),
        step=step,
        member=member,
        eigen=tuple((float(size), _eigen(timer, normal, size)) for size in _EIGEN_AT),
    )


class _Timer:
    """Median seconds of a call, after a first one that is not counted."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device = device
        self._clock = clock

    def __call__(self, work: Callable[[], Any]) -> float:
        self._run(work, 1)
        once = max(self._run(work, 1), 1e-9)
        if once > _LONG:
            return once
        calls = max(1, round(_SHORTEST / once))
        return sorted(self._run(work, calls) / calls for _ in range(_REPEATS))[_REPEATS // 2]

    def _run(self, work: Callable[[], Any], calls: int) -> float:
        self._wait()
        began = self._clock()
        for _ in range(calls):
            work()
        self._wait()
        return self._clock() - began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


Normal = Callable[..., Tensor]


def _products(timer: _Timer, normal: Normal, dtype: torch.dtype) -> tuple[float, float]:
    """Operations a second of a product with many rows, bytes a second of one with few."""
    across = normal(3 * _WIDTH, _WIDTH, dtype=dtype)
    many, few = normal(_ROWS, _WIDTH, dtype=dtype), normal(_FEW, _WIDTH, dtype=dtype)
    fast, slow = timer(lambda: many @ across.mT), timer(lambda: few @ across.mT)
    read = max(slow - fast * _FEW / _ROWS, slow / 4)
    return 2.0 * _ROWS * across.numel() / fast, float(across.nbytes) / read


def _attention(normal: Normal, heads: int, key_dim: int, largest: float = 1.0) -> SelfAttention:
    """Attention whose scores at unit tokens are at most ``largest``."""
    query, key, value = (normal(heads, key_dim, _TOKEN, dtype=torch.float64) for _ in range(3))
    for rows in (query, key):
        rows /= torch.linalg.matrix_norm(rows, 2).max()
    return SelfAttention(largest * query, key, value, scale=1.0)


def _tokens(normal: Normal, members: int, n: int) -> Tensor:
    x = normal(members, n, _TOKEN, dtype=torch.float64)
    unit: Tensor = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return unit


def _pair(
    timer: _Timer,
    normal: Normal,
    n: int,
    members: int,
    heads: int,
    key_dim: int,
    dtype: torch.dtype,
    streamed: float | None = None,
) -> float:
    """Time a product with JᵀJ for each entry of P; with scores up to ``streamed``, where P is not kept."""
    f, x = _attention(normal, heads, key_dim, streamed or 1.0), _tokens(normal, members, n)
    operator = closed_form_jacobian(f, x, dtype=dtype, streamed=streamed is not None)
    e = normal(members, n, _TOKEN, dtype=dtype)
    return timer(lambda: operator.energy_product(e)) / (members * heads * n * n)


def _forming(
    timer: _Timer, normal: Normal, n: int, members: int, heads: int, *, streamed: bool = False
) -> float:
    f, x = _attention(normal, heads, WIDE), _tokens(normal, members, n)
    seconds = timer(lambda: closed_form_jacobian(f, x, dtype=torch.float32, streamed=streamed))
    return seconds / (members * heads * n * n)


class _Diagonal(LinearOperator):
    """Costs next to nothing, so that what is timed is the solver."""

    def __init__(self, values: Tensor, members: int) -> None:
        size = values.shape[0]
        super().__init__(members, (size,), (size,), values.dtype, values.device)
        self.values = values

    def _product(self, e: Tensor) -> Tensor:
        return e * self.values

    def _adjoint_product(self, u: Tensor) -> Tensor:
        return u * self.values


def _solve(timer: _Timer, operator: LinearOperator, start: Tensor, steps: int) -> float:
    """Time so many steps: with a tolerance of zero nothing converges."""
    return timer(lambda: lanczos(operator, start, rtol=0.0, confidence=0.999, max_iterations=steps))


def _solver(timer: _Timer, normal: Normal) -> tuple[float, float]:
    """Time a step of the solver with products that are small, for the batch and for each member."""
    f = _attention(normal, 1, 8)
    few, many = 1, 9

    def run(members: int) -> float:
        operator = closed_form_jacobian(f, _tokens(normal, members, 4), dtype=torch.float32)
        return _solve(timer, operator, normal(members, 4, _TOKEN), _STEPS) / _STEPS

    alone, together = run(few), run(many)
    member = max((together - alone) / (many - few), 1e-7)
    return max(alone - member, 1e-7), member


def _basis(timer: _Timer, normal: Normal, step: float, member: float) -> float:
    """Bytes a second at which vectors of a usual size are made orthogonal to those before."""
    size, members = 100 * _WIDTH, 4
    values = torch.linspace(0.5, 1.0, size, device=normal(1).device)
    seconds = _solve(timer, _Diagonal(values, members), normal(members, size), _STEPS)
    # Each step reads all vectors before it, twice.
    read = members * 4.0 * size * _STEPS**2
    return read / max(seconds - _STEPS * (step + members * member), seconds / 4)


def _eigen(timer: _Timer, normal: Normal, size: int) -> float:
    rows = normal(size, size, dtype=torch.float64)
    matrix = rows @ rows.mT
    return timer(lambda: torch.linalg.eigvalsh(matrix))


def _path(device: str) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    # A commit changes more often than what is timed.
    made_with = {name: words for name, words in environment(device).items() if name != "commit"}
    key = json.dumps(made_with, sort_keys=True).encode()
    return folder / f"calibration-{hashlib.sha256(key).hexdigest()[:16]}.json"


def _rates(written: dict[str, Any]) -> Rates:
    def read(value: Any) -> Any:
        return tuple(map(read, value)) if isinstance(value, list) else float(value)

    return Rates(**{field.name: read(written[field.name]) for field in fields(Rates)})
