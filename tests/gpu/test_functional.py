"""hs.functional.attention on the device: values and derivatives of both modes, against the CPU in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jvp, vjp, vmap

import howsmooth as hs
from tests._cases import tokens
from tests._interpreter import bfloat16_in_the_interpreter

pytestmark = pytest.mark.gpu
with_kernels = pytest.mark.usefixtures("kernels", bfloat16_in_the_interpreter.__name__)


@pytest.fixture
def kernels(device: torch.device) -> None:
    """Kernels run on CUDA devices, and on a CPU where Triton's interpreter was chosen before its import."""
    triton = pytest.importorskip("triton", reason="Triton is not installed here")
    if not (device.type == "cuda" or (device.type == "cpu" and triton.knobs.runtime.interpret)):
        pytest.skip(f"{device.type} has no kernels")


RULES: dict[str, dict[str, object]] = {
    "all keys": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "mask": {"mask": torch.ones(9, 9, dtype=torch.bool).tril(2)},
    "bias, cap, sinks": {
        "score_bias": tokens(3, 4, 9, 9),
        "softcap": 2.0,
        "sinks": tokens(4, 4),
        "causal": True,
    },
}


Tensors = tuple[Tensor, ...]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return tokens(0, 2, 4, 9, 6), tokens(1, 2, 2, 9, 6), tokens(2, 2, 2, 9, 5)


def on(device: torch.device, dtype: torch.dtype, rules: dict[str, object]) -> dict[str, object]:
    """The rules with their tensors on the device."""
    return {
        name: rule.to(device=device, dtype=dtype if rule.is_floating_point() else None)
        if isinstance(rule, Tensor)
        else rule
        for name, rule in rules.items()
    }


def derivatives(f: Callable[..., Tensor], x: Tensors, d: Tensors, u: Tensor) -> list[Tensor]:
    """Value, tangent, cotangents, and their tangents along ``d``."""

    def pulled(*y: Tensor) -> Tensors:
        cotangents: Tensors = vjp(f, *y)[1](u)
        return cotangents

    return [*jvp(f, x, d), *pulled(*x), *jvp(pulled, x, d)[1]]


def check(
    x: Tensors,
    rules: dict[str, object],
    place: tuple[torch.device, torch.dtype],
    tolerance: float,
    **more: bool,
) -> None:
    """Compare derivatives on the device with those on the CPU in float64."""
    device, dtype = place
    d = tuple(tokens(5 + i, *t.shape) for i, t in enumerate(x))
    u = tokens(9, *x[0].shape[:-1], x[2].shape[-1])
    there_rules = on(device, dtype, rules)
    # What is rounded to the dtype is rounded for both.
    moved = tuple(t.to(device=device, dtype=dtype) for t in (*x, *d, u))
    exact = tuple(t.cpu().double() for t in moved)
    exact_rules = on(torch.device("cpu"), torch.float64, on(torch.device("cpu"), dtype, rules))
    wanted = derivatives(partial(hs.functional.attention, **exact_rules), exact[:3], exact[3:6], exact[6])
    found = derivatives(
        partial(hs.functional.attention, **there_rules, **more), moved[:3], moved[3:6], moved[6]
    )
    for got, want in zip(found, wanted, strict=True):
        assert got.device.type == device.type
        assert got.dtype == dtype
        assert float((got.cpu().double() - want).norm()) <= tolerance * float(want.norm())


DIGITS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", DIGITS)
def test_values_and_both_modes(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(inputs(), RULES[name], (device, dtype), DIGITS[dtype])


@with_kernels
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(inputs(), RULES[name], (device, dtype), DIGITS[dtype], kernels=True)


@with_kernels
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_in_their_own_tiles(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Several of every size of tile, none of them full, of heads as wide as they are made for."""
    n = 700 if device.type == "cuda" else 24
    x = tokens(0, 2, 4, n, width), tokens(1, 2, 2, n, width), tokens(2, 2, 2, n, width)
    for rules in ({"causal": True}, {"window": n // 3}):
        check(x, rules, (device, dtype), DIGITS[dtype], kernels=True)


@with_kernels
def test_kernels_take_no_memory_of_the_square(device: torch.device) -> None:
    """One head of 65,536 tokens: a matrix of n² in bfloat16 would be 8 GiB."""
    n = 65_536 if device.type == "cuda" else 64
    x = tuple(tokens(i, 1, n, 64).to(device=device, dtype=torch.bfloat16) for i in range(3))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    found = derivatives(partial(hs.functional.attention, causal=True, kernels=True), x, x, x[0])
    assert all(bool(t.isfinite().all()) for t in found)
    if device.type == "cuda":
        assert torch.cuda.max_memory_allocated(device) - before < n * n * 2 / 8


def test_vmap_and_second_derivatives(device: torch.device) -> None:
    q, k, v = (t[0, :2] for t in inputs())

    def energy(t: Tensor, where: torch.device) -> Tensor:
        out = hs.functional.attention(t, k.to(where), v.to(where), causal=True)
        return out.square().sum()

    cpu = torch.device("cpu")
    wanted, found = hessian(energy)(q, cpu), hessian(energy)(q.to(device), device)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-10, atol=1e-10)
    stack = torch.stack((q, 2 * q, -q))
    one_by_one = torch.stack([hs.functional.attention(t, k, v) for t in stack])
    mapped = vmap(lambda t: hs.functional.attention(t, k.to(device), v.to(device)))(stack.to(device))
    torch.testing.assert_close(mapped.cpu(), one_by_one, rtol=1e-12, atol=1e-12)
