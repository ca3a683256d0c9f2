"""Kernels of products without n × n matrices: on a CUDA device, or by Triton's interpreter."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from howsmooth.attention.masks import Visibility
from howsmooth.attention.scaled_dot_product import ScoreFeatures
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.jacobian.centred_projections import Operands
from howsmooth.jacobian.fused_softmax import FusedDerivative, fused, within
from howsmooth.jacobian.memory_footprint import kernel_bytes
from howsmooth.jacobian.streamed_softmax import StreamedDerivative, streamed_derivative
from tests._cases import random_attention
from tests._interpreter import bfloat16_in_the_interpreter
from tests._selection import others_slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip(
    "triton.language", reason="Triton is not installed here; the kernels are for CUDA devices"
)
pytestmark = pytest.mark.usefixtures(bfloat16_in_the_interpreter.__name__)


# Relative error of a product, of 24 bits and of 16. Matrix units cut sums off that the interpreter rounds.
DIGITS = {3: 4e-6 if DEVICE.type == "cuda" else 1e-6, 2: 3e-5}
RULES = {
    "every key": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": 37},
    "window": {"window": 70},
}


def derivative(
    seed: int,
    n: int,
    *,
    kv_heads: int = 2,
    group: int = 1,
    widths: tuple[int, int] = (64, 64),
    members: int = 1,
    **rules: object,
) -> tuple[StreamedDerivative, StreamedDerivative]:
    """Return the derivative at random queries, keys and values in float32 and in float64."""
    generator = torch.Generator().manual_seed(seed)
    key_dim, value_dim = widths

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)

    q = normal(members, kv_heads, group, n, key_dim)
    k, v = normal(members, kv_heads, n, key_dim), normal(members, kv_heads, n, value_dim)
    seen = Visibility(n, **rules)
    single, double = (
        streamed_derivative(Operands.of_heads(q, k, v, key_dim**-0.5, ScoreFeatures()), seen, dtype)
        for dtype in (torch.float32, torch.float64)
    )
    return single, double


def by_kernels(single: StreamedDerivative, parts: int) -> FusedDerivative:
    return FusedDerivative(**(vars(single) | {"exact": None, "parts": parts}))


def tangents(seed: int, at: StreamedDerivative) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = at.q.flatten(1, 2).shape, at.k.shape, at.v.shape
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("rule", "parts"),
    others_slow(
        itertools.product(RULES, [2, 3]),
        [("every key", 3), ("causal window", 2)],
    ),
)
def test_products_are_those_of_float64(rule: str, parts: int) -> None:
    single, double = derivative(1, 130, group=2, kv_heads=1, **RULES[rule])
    at, (dq, dk, dv) = by_kernels(single, parts), tangents(2, single)
    wanted = double.product(dq.double(), dk.double(), dv.double())
    assert relative(at.product(dq, dk, dv), wanted) < DIGITS[parts]
    do = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for found, want in zip(at.adjoint(do), double.adjoint(do.double()), strict=True):
        assert found.shape == want.shape
        assert relative(found, want) < DIGITS[parts]


@pytest.mark.parametrize("widths", [(3, 20), (40, 16), (16, 100), (128, 128)])
def test_widths_are_filled_up(widths: tuple[int, int]) -> None:
    single, double = derivative(4, 20, kv_heads=1, widths=widths, causal=True)
    at, moved = by_kernels(single, 3), tangents(5, single)
    wanted = double.product(*(t.double() for t in moved))
    assert relative(at.product(*moved), wanted) < DIGITS[3]
    for found, want in zip(at.adjoint(wanted.float()), double.adjoint(wanted), strict=True):
        assert relative(found, want) < DIGITS[3]


def test_a_gram_product_goes_through_each_member() -> None:
    single, double = derivative(6, 40, group=2, members=2, causal=True)
    at, moved, asked = by_kernels(single, 3), tangents(7, single), []

    def through(member: int, rows: slice, do: torch.Tensor) -> torch.Tensor:
        asked.append((member, rows))
        return (member + 1.0) * do

    wanted = double.gram(*(t.double() for t in moved), through)
    asked.clear()
    for found, want in zip(at.gram(*moved, through), wanted, strict=True):
        assert relative(found, want) < DIGITS[3]
    assert asked == [(0, slice(0, 40)), (1, slice(0, 40))]


def test_some_members_keep_their_kernels() -> None:
    single, double = derivative(10, 20, members=3)
    at, chosen = by_kernels(single, 2), torch.tensor([4, 5, 0, 1], device=DEVICE)
    some = at.select(chosen)
    assert isinstance(some, FusedDerivative)
    assert some.parts == 2
    moved = tangents(11, some)
    wanted = double.select(chosen).product(*(t.double() for t in moved))
    assert relative(some.product(*moved), wanted) < DIGITS[2]


def test_what_the_kernels_multiply_is_counted() -> None:
    f = random_attention(13, heads=4, kv_heads=2, key_dim=20, value_dim=12, d=8, causal=True)
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    at = closed_form_jacobian(f, x, dtype=torch.float32, streamed=True)
    kernels = by_kernels(at.core, 3)
    q, k, v = kernels._operands
    operands = 2 * (q.nbytes + k.nbytes + v.nbytes) + q.nbytes  # with tangents, and cotangents of the heads
    assert kernel_bytes(f, 9, torch.float32, torch.device("cuda")) == operands
    assert kernel_bytes(f, 9, torch.float64, torch.device("cuda")) == 0
    assert kernel_bytes(f, 9, torch.float32, torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("size", "allowance", "parts"),
    [
        (1.0, None, 3),
        (1.0, 2.5e-4, 2),
        (1.0, 2.5e-5, 3),
        (1.0, 1e-6, None),
        (2.5, None, None),
        (2.5, 2.5e-4, 2),
        (2.5, 2.5e-5, 3),
        (3.3, 2.5e-5, None),
    ],
)
def test_as_few_parts_as_the_allowance_permits(size, allowance, parts) -> None:
    """Scores up to 10, 65 and 110, of which those above 32 are formed in float64 otherwise."""
    single, _ = derivative(12, 20)
    at = replace(
        single,
        kappa=single.kappa * 0 + 10.1 * size**2,
        exact=None if size == 1 else (single.q.double(), single.k.double()),
    )
    found = within(at, allowance)
    assert (found.parts if isinstance(found, FusedDerivative) else None) == parts
    if parts is None:
        assert found is at
    elif allowance is not None:
        assert found.rounding(1).max() <= allowance


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what a processor does")
def test_a_processor_keeps_its_tiles() -> None:
    single, _ = derivative(12, 20)
    assert fused(single) is single
