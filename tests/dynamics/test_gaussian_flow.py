"""The flow of a Gaussian: against closed forms, SciPy and particles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import L2Attention
from howsmooth.dynamics import Layers, Sphere, flow
from howsmooth.errors import ArgumentError
from howsmooth.measures import Gaussian, wasserstein
from tests._cases import D, random_attention, tokens


def multiples_of_identity(a: float, v: float, d: int) -> hs.SelfAttention:
    """A = aI and V = vI."""
    identity = torch.eye(d, dtype=torch.float64)[None]
    return hs.SelfAttention(a * identity, identity, v * identity, scale=1.0)


def random_gaussian(seed: int, d: int = D, spread: float = 0.5) -> Gaussian:
    root = tokens(seed, d, d) * spread / math.sqrt(d)
    return Gaussian(tokens(seed + 1, d) * spread, root @ root.mT)


def riccati(gaussian: Gaussian, a: float, v: float, t: float) -> tuple[Tensor, Tensor]:
    """Solution of α' = v(I + aΣ)α, Σ' = 2av Σ²: eigenvalue by eigenvalue."""
    values, vectors = torch.linalg.eigh(gaussian.covariance)
    shrunk = 1 - 2 * a * v * t * values
    mean = vectors @ ((vectors.mT @ gaussian.mean) * math.exp(v * t) / shrunk.sqrt())
    return mean, (vectors * (values / shrunk)) @ vectors.mT


@pytest.mark.parametrize(("a", "v"), [(0.7, 0.4), (0.7, -0.4), (-0.5, 1.0)])
def test_multiples_of_the_identity_follow_the_riccati_equation(a: float, v: float) -> None:
    start = random_gaussian(0, 3)
    got = flow(multiples_of_identity(a, v, 3), start, [0, 0.5, 1.0])
    for t, state in zip(got.times.tolist(), got.states, strict=True):
        mean, covariance = riccati(start, a, v, t)
        assert float((state.mean - mean).abs().max()) < 1e-6
        assert float((state.covariance - covariance).abs().max()) < 1e-6


@pytest.mark.parametrize(("method", "step"), [("dopri5", None), ("rk4", 0.02), ("euler", 0.02)])
def test_blow_up_time_of_the_riccati_equation(method: str, step: float | None) -> None:
    start = Gaussian(
        torch.tensor([0.3, -0.2], dtype=torch.float64), torch.diag(torch.tensor([1.0, 0.5])).double()
    )
    keywords = {"step": step} if step else {"rtol": 1e-6, "atol": 1e-6}
    got = flow(multiples_of_identity(0.8, 0.5, 2), start, [0, 0.5, 1.0, 1.3, 2.0], method=method, **keywords)
    lower, upper = got.blow_up
    assert got.status == "blew up"
    assert lower <= 1 / (2 * 0.8 * 0.5 * 1.0) <= upper
    assert upper - lower < (1e-4 if step is None else 1.0)
    assert got.times.tolist() == [0, 0.5, 1.0]
    assert all(bool(torch.isfinite(state.covariance).all()) for state in got.states)
    if step is None:
        mean, covariance = riccati(start, 0.8, 0.5, 1.0)
        assert torch.allclose(got.final.covariance, covariance, rtol=1e-4)
        assert torch.allclose(got.final.mean, mean, rtol=1e-4)


def test_multi_head_attention_follows_the_equations_of_mean_and_covariance() -> None:
    f, start, d = random_attention(1, heads=2), random_gaussian(2), D
    output = f.output.numpy().reshape(d, f.heads, f.value_dim)

    def velocity(t: float, y: np.ndarray) -> np.ndarray:
        mean, sigma = y[:d], y[d:].reshape(d, d)
        moved, matrix = f.output_bias.numpy().copy(), np.zeros((d, d))
        for h in range(f.heads):
            o = output[:, h] @ f.value[h].numpy()
            a = f.scale * f.key[h].numpy().T @ f.query[h].numpy()
            b = f.scale * f.key[h].numpy().T @ f.query_bias[h].numpy()
            matrix += o @ sigma @ a
            moved += o @ (mean + sigma @ (a @ mean + b)) + output[:, h] @ f.value_bias[h].numpy()
        return np.concatenate([moved, (matrix @ sigma + sigma @ matrix.T).ravel()])

    y = np.concatenate([start.mean.numpy(), start.covariance.numpy().ravel()])
    wanted = solve_ivp(velocity, (0, 1), y, method="DOP853", rtol=1e-10, atol=1e-12).y[:, -1]
    got = flow(f, start, [0, 1]).final
    assert np.abs(got.mean.numpy() - wanted[:d]).max() < 1e-6
    assert np.abs(got.covariance.numpy().ravel() - wanted[d:]).max() < 1e-6


def test_l2_attention_in_one_dimension_follows_its_closed_form() -> None:
    # Σ' = 4svqk Σ² / (1 + 2sk²Σ), hence −1/Σ + 2sk² log Σ = 4svqk t + constant: no blow-up in finite time.
    q, k, v, s = 0.9, 1.2, 0.7, 0.5
    f = L2Attention(*(torch.full((1, 1, 1), c, dtype=torch.float64) for c in (q, k, v)), scale=s)
    start = Gaussian(torch.tensor([0.4], dtype=torch.float64), torch.tensor([[1.5]], dtype=torch.float64))
    got = flow(f, start, [0, 1, 3, 9])
    assert got.status == "finished"

    def invariant(sigma: float) -> float:
        return -1 / sigma + 2 * s * k**2 * math.log(sigma)

    for t, state in zip(got.times.tolist(), got.states, strict=True):
        sigma = float(state.covariance)
        assert invariant(sigma) - invariant(1.5) == pytest.approx(4 * s * v * q * k * t, abs=1e-6)


def test_particles_converge_to_the_gaussian_at_the_rate_one_half() -> None:
    # The same Runge–Kutta steps for both: what is left is the sampling alone.
    f, start = random_attention(3, heads=1, d=2, d_out=2, temperature=0.5), random_gaussian(4, 2, 0.4)
    keywords = {"method": "rk4", "step": 0.25}
    wanted = flow(f, start, [0, 0.5], **keywords).final
    counts, seeds = [16, 64, 256], 64
    errors = []
    for n in counts:
        x = torch.stack([start.sample(n, 1000 * n + seed).points for seed in range(seeds)])
        y = flow(f, x, [0, 0.5], **keywords).final
        mean = y.mean(dim=1)
        covariance = (y - mean[:, None]).mT @ (y - mean[:, None]) / n
        errors.append(float((mean - wanted.mean).norm().hypot((covariance - wanted.covariance).norm())))
    assert np.polyfit(np.log(counts), np.log(errors), 1)[0] == pytest.approx(-0.5, abs=0.08)
    assert errors[-1] / math.sqrt(seeds) < 0.02


def test_residual_layers_move_a_gaussian_as_residual_maps_do() -> None:
    f, start = random_attention(5), random_gaussian(6)
    wanted = hs.Residual(f)(hs.Residual(f)(start))
    got = flow(f, start, [0, 1, 2], method="residual", step=1.0)
    assert torch.allclose(got.final.mean, wanted.mean, rtol=1e-11)
    assert torch.allclose(got.final.covariance, wanted.covariance, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("midpoint", 2), ("rk4", 4)])
def test_order_of_convergence_of_the_moments(method: str, order: int) -> None:
    start = random_gaussian(7, 3)
    wanted, _ = riccati(start, 0.3, 0.8, 1.0)
    f = multiples_of_identity(0.3, 0.8, 3)
    steps = [1 / 10, 1 / 20, 1 / 40]
    errors = [
        float((flow(f, start, [0, 1], method=method, step=h).final.mean - wanted).norm()) for h in steps
    ]
    assert np.polyfit(np.log(steps), np.log(errors), 1)[0] == pytest.approx(order, abs=0.1)


def test_estimated_error_bounds_the_distance_to_the_true_gaussian() -> None:
    start = random_gaussian(8, 3)
    mean, covariance = riccati(start, 0.6, 0.8, 1.0)
    for keywords in ({"method": "midpoint", "step": 0.05}, {"rtol": 1e-4, "atol": 1e-4}):
        got = flow(multiples_of_identity(0.6, 0.8, 3), start, [0, 1], estimate_error=True, **keywords)
        true = float(wasserstein(got.final, Gaussian(mean, covariance)).value)
        assert 0 < true < 2 * got.error < 20 * true


def test_a_singular_covariance_stays_singular() -> None:
    f = random_attention(9)
    axis = tokens(10, D, 1)
    start = Gaussian(tokens(11, D), axis @ axis.mT)
    values = torch.linalg.eigvalsh(flow(f, start, [0, 0.5]).final.covariance)
    assert float(values[-2]) < 1e-12 * float(values[-1])


def test_a_dirac_follows_the_matrix_exponential() -> None:
    f = random_attention(12, heads=1, biases=False)
    start = Gaussian(tokens(13, D), torch.zeros(D, D, dtype=torch.float64))
    got = flow(f, start, [0, 1])
    wanted = expm((f.output @ f.value[0]).numpy()) @ start.mean.numpy()
    assert np.abs(got.final.mean.numpy() - wanted).max() < 1e-6
    assert float(got.final.covariance.abs().max()) == 0


def test_layers_move_a_gaussian_one_after_another() -> None:
    maps, start = [random_attention(14, temperature=0.5), random_attention(15)], random_gaussian(16)
    middle = flow(maps[0], start, [0, 0.5]).final
    wanted = flow(maps[1], middle, [0.5, 1.0]).final
    got = flow(Layers(maps, total_time=1.0), start, [0, 1.0]).final
    assert torch.equal(got.mean, wanted.mean)
    assert torch.equal(got.covariance, wanted.covariance)


@pytest.mark.parametrize("keywords", [{"rtol": 1e-4, "atol": 1e-4}, {"method": "rk4", "step": 0.25}])
def test_a_covariance_that_overflows_before_its_root_ends_the_flow(keywords: dict[str, object]) -> None:
    # x' = x: Σ = e^{2t} Σ(0) leaves float64 at t = log(1.8e8) / 2 = 9.5, its root at twice 355 only.
    f = hs.Residual(multiples_of_identity(1.0, 0.0, 1))
    start = Gaussian(torch.zeros(1, dtype=torch.float64), torch.full((1, 1), 1e300, dtype=torch.float64))
    got = flow(f, start, [0.0, 5.0, 15.0], **keywords)
    assert got.status == "blew up"
    assert got.times.tolist() == [0.0, 5.0]
    assert got.blow_up[0] <= math.log(1.797e8) / 2 <= got.blow_up[1] < 10.5
    assert float(got.final.covariance) == pytest.approx(1e300 * math.exp(10), rel=1e-2)


def test_a_covariance_that_overflows_in_the_last_step_is_not_kept() -> None:
    f = hs.Residual(multiples_of_identity(1.0, 0.0, 1))
    start = Gaussian(torch.zeros(1, dtype=torch.float64), torch.full((1, 1), 1e308, dtype=torch.float64))
    got = flow(f, start, [0.0, 1.0], method="residual", step=1.0)
    assert got.blow_up == (0.0, 1.0)
    assert got.times.tolist() == [0.0]


@pytest.mark.parametrize(
    ("field", "start", "argument", "words"),
    [
        (random_attention(19, causal=True), random_gaussian(20), "measure", "unmasked"),
        (hs.RMSNorm(torch.ones(D, dtype=torch.float64)), random_gaussian(20), "measure", "Gaussian"),
        (
            Layers([random_attention(19), random_attention(20, causal=True)]),
            random_gaussian(20),
            "measure",
            "unmasked",
        ),
        (Sphere(random_attention(19)), random_gaussian(20), "field", "sphere"),
        (lambda t, x: x, random_gaussian(20), "field", "Gaussian"),
        (random_attention(19), random_gaussian(20, D + 1), "measure", "dimension"),
        (random_attention(19), random_gaussian(20).to(dtype=torch.float32), "measure", "dtype"),
        (
            random_attention(19),
            Gaussian(tokens(0, D).requires_grad_(), torch.eye(D, dtype=torch.float64)),
            "start",
            "gradients",
        ),
    ],
)
def test_what_does_not_keep_a_measure_gaussian_is_refused(field, start, argument, words) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        flow(field, start, [0, 1])
    assert caught.value.argument == argument
