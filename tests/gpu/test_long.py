"""Probabilities formed tile by tile, one basis, several lengths: on the device."""

from __future__ import annotations

import math

import pytest
import torch

import howsmooth as hs
from howsmooth.batching import footprint
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.jacobian.closed_form import has_closed_form
from howsmooth.memory import SHARE, free_memory, memory_budget
from howsmooth.spectral import lanczos
from tests._cases import CASES, D, random_attention, tokens, true_norm
from tests._operators import Dense, gaussian, with_spectrum

pytestmark = pytest.mark.gpu

N = 9
LAYERS = [name for name, make in CASES.items() if has_closed_form(make(N))]


@pytest.mark.parametrize("name", LAYERS)
def test_streamed_products_are_those_of_the_cpu(name: str, device: torch.device) -> None:
    f, x = CASES[name](N), tokens(1, 2, N, D)
    here = closed_form_jacobian(f, x)
    e, u = tokens(2, 2, *here.in_shape), tokens(3, 2, *here.out_shape)
    wanted = (here.product(e), here.adjoint_product(u), *here.gram_product(e))
    moved = f.to(device=device), x.to(device)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-3)):
        there = closed_form_jacobian(*moved, dtype=dtype, streamed=True)
        e_there, u_there = (t.to(device=device, dtype=dtype) for t in (e, u))
        found = there.product(e_there), there.adjoint_product(u_there), *there.gram_product(e_there)
        for got, want in zip(found, wanted, strict=True):
            assert got.device.type == device.type
            size = float(want.abs().max())
            torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hundreds_of_tokens_in_several_tiles(dtype: torch.dtype, device: torch.device) -> None:
    f = random_attention(
        8, heads=4, kv_heads=2, key_dim=16, value_dim=16, d=32, d_out=32, causal=True, window=700
    )
    x = tokens(8, 1, 1500, 32)
    at = closed_form_jacobian(f, x)
    e = tokens(9, 1, *at.in_shape)
    image, gram = at.gram_product(e)
    there = closed_form_jacobian(f.to(device=device), x.to(device), dtype=dtype, streamed=True)
    found = there.gram_product(e.to(device=device, dtype=dtype))
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    for got, want in zip(found, (image, gram), strict=True):
        assert float((got.cpu().double() - want).norm()) <= tolerance * float(want.norm())


@pytest.mark.parametrize("rtol", [1e-3, 1e-4, 3e-5])
@pytest.mark.parametrize("window", [None, 700])
def test_an_interval_by_kernels_holds(window: int | None, rtol: float, device: torch.device) -> None:
    """Products of 16 bits where rtol leaves room for them, else of 24."""
    if device.type not in ("cuda", "cpu"):
        pytest.skip(f"{device.type} has no kernels, and not the CPU's small tiles")
    f = random_attention(
        9, heads=4, kv_heads=2, key_dim=16, value_dim=16, d=32, d_out=32, causal=True, window=window
    )
    n = 6000 if device.type == "cuda" else 1500  # tiles are larger there, and memory for them
    f, x = f.to(device=device), tokens(10, n, 32).to(device)
    truth = hs.local_lipschitz(f, x, rtol=1e-8)
    memory = 3 << 30 if device.type == "cuda" else 1 << 27
    assert footprint(f, (n, 32), dtype=torch.float32, device=device, memory=memory).streamed
    found = hs.local_lipschitz(f.to(dtype=torch.float32), x.float(), rtol=rtol, memory=memory)
    assert found.converged
    assert float(found.lower) <= float(truth.upper)
    assert float(found.upper) >= float(truth.lower)
    assert float(found.value) == pytest.approx(float(truth.value), rel=2 * rtol)


@pytest.mark.parametrize("basis", [None, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lanczos_on_prescribed_spectra(
    dtype: torch.dtype, basis: torch.dtype | None, device: torch.device
) -> None:
    spectra = [[3.0, 2.9, 1.0, 0.5], [2.0, 2.0, 2.0, 0.1], [1.0, 0.9, 0.8, 0.7]]
    matrices = torch.stack([with_spectrum(i, values, 12, 15) for i, values in enumerate(spectra)])
    operator = Dense(matrices.to(device=device, dtype=dtype))
    start = gaussian(7, len(spectra), 15).to(operator.matrices)
    found = lanczos(operator, start, rtol=1e-3, confidence=0.999, max_iterations=100, basis_dtype=basis)
    truth = torch.tensor([max(values) for values in spectra], dtype=torch.float64)
    assert (found.converged | found.broke_down).all()
    assert found.right.device.type == device.type
    torch.testing.assert_close(found.sigma.cpu(), truth, rtol=1e-4, atol=0)
    assert ((found.lower <= truth * (1 + 1e-5)) & (truth <= found.upper * (1 + 1e-5))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["causal grouped, hot", "sinks, grouped, causal", "pre-norm", "post-norm"])
def test_a_budget_leads_to_the_same_number(name: str, dtype: torch.dtype, device: torch.device) -> None:
    n = 60
    f, x = CASES[name](n), tokens(4, n, D)
    (truth,) = true_norm(f, x[None])
    moved, own = f.to(dtype=dtype, device=device), x.to(dtype=dtype, device=device)
    for memory in (None, 1 << 33):
        found = hs.local_lipschitz(moved, own, rtol=1e-4, memory=memory)
        assert bool(found.converged)
        assert float(found.value) == pytest.approx(float(truth), rel=2e-5)


@pytest.mark.parametrize("name", ["causal", "sinks, grouped, causal", "pre-norm", "softcap, causal"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_sequences_of_several_lengths_as_one_batch(
    name: str, dtype: torch.dtype, rtol: float, device: torch.device
) -> None:
    f = CASES[name](30).to(dtype=dtype)
    xs = [tokens(i, n, D, dtype=dtype) for i, n in enumerate((5, 17, 6, 30, 17))]
    found = hs.local_lipschitz(f.to(device=device), [x.to(device) for x in xs], rtol=rtol)
    assert found.converged.all()
    for i, x in enumerate(xs):
        truth = float(true_norm(f, x[None]))
        assert float(found.value[i]) == pytest.approx(truth, rel=rtol / 10)
        assert float(found.lower[i]) <= truth * (1 + 1e-12)
        assert truth <= float(found.upper[i]) * (1 + 1e-12)


def test_some_of_several_lengths_go_to_float64(device: torch.device) -> None:
    """W_O W_V is small against its factors, and float32 leaves intervals too wide."""
    f = random_attention(3077, heads=3, kv_heads=1, key_dim=2, d=1, d_out=2, temperature=10.0, biases=False)
    f = f.to(dtype=torch.float32)
    xs = [3.0 * tokens(i, n, 1, dtype=torch.float32) for i, n in enumerate((2, 3, 2, 4, 6, 3))]
    found = hs.local_lipschitz(f.to(device=device), [x.to(device) for x in xs], rtol=2e-5)
    assert found.converged.all()
    for i, x in enumerate(xs):
        truth = float(true_norm(f, x[None]))
        assert float(found.value[i]) == pytest.approx(truth, rel=2e-6)
        assert float(found.lower[i]) <= truth * (1 + 1e-12)
        assert truth <= float(found.upper[i]) * (1 + 1e-12)


def test_the_budget_is_a_share_of_what_is_free_there(device: torch.device) -> None:
    free = free_memory(device)
    assert 0.8 * SHARE * free <= memory_budget(None, device) <= 1.2 * SHARE * free
    if device.type == "cuda":
        assert free <= torch.cuda.get_device_properties(device).total_memory


def test_long_sequences_take_no_memory_of_their_square(device: torch.device) -> None:
    """One head of 65,536 tokens: a matrix of n² in float32 would be 16 GiB."""
    n, d = (65_536, 64) if device.type == "cuda" else (2_048, 8)
    f = random_attention(
        6, heads=1, key_dim=d, value_dim=d, d=d, d_out=None, causal=True, dtype=torch.float32
    ).to(device=device)
    x = tokens(6, n, d, dtype=torch.float32).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    found = hs.local_lipschitz(f, x, rtol=1e-2, max_iterations=10, memory=8 << 30)
    assert math.isfinite(float(found.upper))
    assert float(found.lower) <= float(found.value) <= float(found.upper)
    if device.type == "cuda":
        added = torch.cuda.max_memory_allocated(device) - before
        assert added <= 8 << 30
        assert added < n * n * 4 / 4
