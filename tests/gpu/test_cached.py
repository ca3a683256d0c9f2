"""Maps, operators and the solver with all probabilities kept, on the device, against the CPU in float64."""

from __future__ import annotations

import math

import pytest
import torch

import howsmooth as hs
from howsmooth import measures
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.spectral import lanczos
from tests._cases import ACTING, CASES, D, random_attention, tokens, true_norm
from tests._operators import Dense, gaussian, with_spectrum

pytestmark = pytest.mark.gpu

N = 7


@pytest.mark.parametrize("name", CASES)
def test_maps_give_what_they_give_on_the_cpu(name: str, device: torch.device) -> None:
    f, x = CASES[name](N), tokens(0, 3, N, D)
    moved = f.to(device=device)
    assert moved.device.type == device.type
    image = moved(x.to(device))
    assert image.device.type == device.type
    torch.testing.assert_close(image.cpu(), f(x), rtol=1e-12, atol=1e-12)
    single = f.to(dtype=torch.float32, device=device)(x.float().to(device))
    torch.testing.assert_close(single.cpu().double(), f(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_cpu(name: str, device: torch.device) -> None:
    f, x = CASES[name](N), tokens(1, 2, N, D)
    here = closed_form_jacobian(f, x)
    there = closed_form_jacobian(f.to(device=device), x.to(device))
    e, u = tokens(2, 2, *here.in_shape), tokens(3, 2, *here.out_shape)
    pairs = (
        (there.product(e.to(device)), here.product(e)),
        (there.adjoint_product(u.to(device)), here.adjoint_product(u)),
        (there.gram_product(e.to(device))[1], here.gram_product(e)[1]),
    )
    for got, wanted in pairs:
        assert got.device.type == device.type
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_every_case_in_both_precisions(name: str, device: torch.device) -> None:
    f, x = CASES[name](N), tokens(0, 3, N, D)
    truth = true_norm(f, x)
    fine = hs.local_lipschitz(f.to(device=device), x.to(device), rtol=1e-6)
    assert fine.method == "closed form"
    assert fine.converged.all()
    torch.testing.assert_close(fine.value.cpu(), truth, rtol=1e-10, atol=0)
    coarse = hs.local_lipschitz(f.to(dtype=torch.float32, device=device), x.float().to(device))
    assert coarse.converged.all()
    assert ((coarse.value.cpu() - truth).abs() <= 2e-5 * truth).all()
    assert coarse.input_direction.device.type == device.type
    assert coarse.input_direction.dtype == torch.float32


def test_a_seed_is_the_same_start_on_every_device(device: torch.device) -> None:
    f, x = random_attention(3), tokens(3, 4, 9, D)
    here = hs.local_lipschitz(f, x, rtol=1e-3, seed=5)
    there = hs.local_lipschitz(f.to(device=device), x.to(device), rtol=1e-3, seed=5)
    assert there.iterations.tolist() == here.iterations.tolist()
    torch.testing.assert_close(there.upper.cpu(), here.upper, rtol=1e-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prescribed_spectra(device: torch.device, dtype: torch.dtype) -> None:
    spectra = [[3.0, 2.9, 1.0, 0.5], [2.0, 2.0, 2.0, 0.1], [1.0], [0.0]]
    matrices = torch.stack([with_spectrum(i, values, 12, 15) for i, values in enumerate(spectra)])
    operator = Dense(matrices.to(device=device, dtype=dtype))
    start = gaussian(7, len(spectra), 15).to(operator.matrices)
    found = lanczos(operator, start, rtol=1e-4, confidence=0.999, max_iterations=100)
    truth = torch.tensor([max(values) for values in spectra], dtype=torch.float64)
    assert (found.converged | found.broke_down).all()
    torch.testing.assert_close(found.sigma.cpu(), truth, rtol=2e-5, atol=1e-12)
    assert ((found.lower <= truth * (1 + 1e-6)) & (truth <= found.upper * (1 + 1e-6))).all()


@pytest.mark.parametrize("name", ["multi-head", "rotary, partial, grouped, causal", "pre-norm"])
def test_autodiff(name: str, device: torch.device) -> None:
    f, x = CASES[name](N), tokens(4, 2, N, D)
    found = hs.local_lipschitz(f.to(device=device), x.to(device), method="autodiff", rtol=1e-9)
    torch.testing.assert_close(found.value.cpu(), true_norm(f, x), rtol=1e-10, atol=0)


def test_any_module(device: torch.device) -> None:
    layer = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8), torch.nn.LayerNorm(8)
    ).double()
    x = tokens(5, 2, 6, 8)
    here = hs.local_lipschitz(layer, x, rtol=1e-8)
    there = hs.local_lipschitz(layer.to(device), x.to(device), rtol=1e-8)
    torch.testing.assert_close(there.value.cpu(), here.value, rtol=1e-8, atol=0)


@pytest.mark.parametrize("name", ["multi-head", "causal grouped, hot", "softcap, causal", "post-norm"])
def test_at_a_measure(name: str, device: torch.device) -> None:
    assert name in ACTING
    f = CASES[name](N)
    atoms, weights = tokens(6, N, D), torch.softmax(2 * tokens(7, N), dim=0)
    positions = torch.linspace(0, 1, N, dtype=torch.float64)
    here = hs.local_lipschitz(f, measures.DiscreteMeasure(atoms, weights, positions=positions), rtol=1e-8)
    moved = measures.DiscreteMeasure(atoms.to(device), weights.to(device), positions=positions.to(device))
    there = hs.local_lipschitz(f.to(device=device), moved, rtol=1e-8)
    torch.testing.assert_close(there.value.cpu(), here.value, rtol=1e-9, atol=0)


def test_hundreds_of_tokens_in_blocks(device: torch.device) -> None:
    """Some thousand entries more than a block of the CPU holds; the same numbers, and a finite interval."""
    f = random_attention(8, heads=2, key_dim=16, value_dim=16, d=32, d_out=32, causal=True)
    x = tokens(8, 800, 32)
    here = hs.local_lipschitz(f, x, rtol=1e-5)
    single = f.to(dtype=torch.float32, device=device)
    there = hs.local_lipschitz(single, x.float().to(device), rtol=1e-4)
    assert float(there.value) == pytest.approx(float(here.value), rel=2e-5)
    assert bool(there.converged)
    assert math.isfinite(float(there.upper))
