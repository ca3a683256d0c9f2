"""Gaussian measures, and attention on them, against quadrature and samples."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import TokenMap
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.measures import DiscreteMeasure, Gaussian, affine_action
from tests._cases import CASES, D, parameters, random_attention, tokens


def _attention(kind: str, seed: int, **keywords: object) -> hs.SelfAttention | hs.L2Attention:
    f = random_attention(seed, **keywords)
    if kind == "softmax":
        return f
    return hs.L2Attention(**(parameters(f) | {"scale": 0.7}))


def _gaussian(seed: int, d: int, rank: int | None = None) -> Gaussian:
    root = tokens(seed, d, d if rank is None else rank)
    return Gaussian(tokens(seed + 1, d), root @ root.mT / d)


def _quadrature(gaussian: Gaussian, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss–Hermite points and weights of a Gaussian in few dimensions."""
    z, w = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.array(list(itertools.product(z, repeat=gaussian.d)))
    weights = np.prod(np.array(list(itertools.product(w, repeat=gaussian.d))), axis=1)
    root = np.linalg.cholesky(gaussian.covariance.numpy())
    return gaussian.mean.numpy() + grid @ root.T, weights / weights.sum()


def _mean_field(
    f: hs.SelfAttention | hs.L2Attention, x: np.ndarray, y: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Γ_μ(x) of Definition 2.4 with integrals over μ as sums over the points y."""
    heads = []
    for h in range(f.heads):
        g = h * f.kv_heads // f.heads
        q, k = f.query[h].numpy() @ x, y @ f.key[g].numpy().T
        if f.query_bias is not None:
            q, k = q + f.query_bias[h].numpy(), k + f.key_bias[g].numpy()
        squares = isinstance(f, hs.L2Attention)
        scores = -f.scale * ((q - k) ** 2).sum(axis=1) if squares else f.scale * k @ q
        kernel = weights * np.exp(scores - scores.max())
        v = y @ f.value[g].numpy().T + (0 if f.value_bias is None else f.value_bias[g].numpy())
        heads.append(kernel @ v / kernel.sum())
    row = np.concatenate(heads)
    row = row if f.output is None else f.output.numpy() @ row
    return row if f.output_bias is None else row + f.output_bias.numpy()


@pytest.mark.parametrize("kind", ["softmax", "l2"])
@pytest.mark.parametrize(
    ("d", "keywords"),
    [
        (1, {"heads": 1}),
        (1, {"heads": 2, "kv_heads": 1, "d_out": 3}),
        (2, {"heads": 2}),
        (2, {"heads": 4, "kv_heads": 2, "d_out": None}),
        (2, {"heads": 1, "biases": False}),
    ],
)
def test_action_is_the_integral_of_the_definition(kind: str, d: int, keywords: dict) -> None:
    f = _attention(kind, 0, key_dim=2, value_dim=2, d=d, temperature=0.5, **({"d_out": d} | keywords))
    gaussian = _gaussian(1, d)
    matrix, shift = affine_action(f, gaussian)
    y, weights = _quadrature(gaussian, 150 if d == 1 else 60)
    for x in tokens(2, 4, d).numpy():
        expected = _mean_field(f, x, y, weights)
        np.testing.assert_allclose(matrix.numpy() @ x + shift.numpy(), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", ["softmax", "l2"])
def test_image_is_that_of_large_samples(kind: str) -> None:
    """Mean and covariance over 30 samples of 1000 atoms, within five standard errors of their average."""
    f = hs.Residual(_attention(kind, 3, temperature=0.3))
    gaussian = _gaussian(3, D)
    image = f(gaussian)
    moved = [f(gaussian.sample(1000, seed=seed)) for seed in range(30)]
    for exact, found in (
        (image.mean, torch.stack([m.mean for m in moved])),
        (image.covariance, torch.stack([m.covariance for m in moved])),
    ):
        error = found.std(dim=0) / math.sqrt(len(moved))
        assert bool(((found.mean(dim=0) - exact).abs() < 5 * error).all())
        # The error bars say something: they are small next to what is measured.
        assert float(error.max()) < 0.05 * float(exact.abs().max())
    assert isinstance(image, Gaussian)


def test_image_of_one_head_is_the_formula_of_the_paper() -> None:
    f = random_attention(4, heads=1, biases=False)
    gaussian = _gaussian(4, D)
    a = f.scale * f.key[0].mT @ f.query[0]
    v, sigma = f.output @ f.value[0], gaussian.covariance
    image = f(gaussian)
    torch.testing.assert_close(image.mean, v @ (gaussian.mean + sigma @ a @ gaussian.mean))
    torch.testing.assert_close(image.covariance, v @ sigma @ a @ sigma @ a.mT @ sigma @ v.mT)


@pytest.mark.parametrize("kind", ["softmax", "l2"])
def test_singular_covariances_are_limits_of_regular_ones(kind: str) -> None:
    f, singular = _attention(kind, 5), _gaussian(5, D, rank=2)
    near = Gaussian(singular.mean, singular.covariance + 1e-9 * torch.eye(D, dtype=torch.float64))
    torch.testing.assert_close(f(singular).mean, f(near).mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(f(singular).covariance, f(near).covariance, rtol=1e-6, atol=1e-6)
    point = Gaussian(singular.mean, torch.zeros(D, D, dtype=torch.float64))
    # A Dirac is moved as one token.
    torch.testing.assert_close(f(point).mean, f(singular.mean[None])[0])
    assert float(f(point).covariance.abs().max()) == 0.0


def test_residuals_and_compositions_are_composed() -> None:
    one, two, gaussian = _attention("softmax", 6), _attention("l2", 7), _gaussian(6, D)
    step = hs.Residual(one)(gaussian)
    matrix, shift = affine_action(one, gaussian)
    plus = matrix + torch.eye(D, dtype=torch.float64)
    torch.testing.assert_close(step.mean, plus @ gaussian.mean + shift)
    torch.testing.assert_close(step.covariance, plus @ gaussian.covariance @ plus.mT)
    torch.testing.assert_close(hs.Compose(two, hs.Residual(one))(gaussian).mean, two(step).mean)
    torch.testing.assert_close(hs.Compose(two, hs.Residual(one))(gaussian).covariance, two(step).covariance)
    matrix, shift = affine_action(hs.Compose(two, hs.Residual(one)), gaussian)
    torch.testing.assert_close(matrix @ gaussian.mean + shift, two(step).mean)


def test_gradients_pass_through() -> None:
    f = _attention("l2", 8)

    def image(mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        moved = f(Gaussian(mean, root @ root.mT))
        return moved.mean, moved.covariance

    arguments = (tokens(8, D).requires_grad_(), tokens(9, D, D).requires_grad_())
    assert torch.autograd.gradcheck(image, arguments)


def test_sample_has_the_moments_and_the_support() -> None:
    gaussian, n = _gaussian(10, 4, rank=2), 20_000
    sample = gaussian.sample(n, seed=3)
    assert torch.equal(sample.points, gaussian.sample(n, seed=3).points)
    assert not torch.equal(sample.points, gaussian.sample(n, seed=4).points)
    scale = float(gaussian.covariance.diagonal().max())
    assert float((sample.mean - gaussian.mean).abs().max()) < 5 * math.sqrt(scale / n)
    assert float((sample.covariance - gaussian.covariance).abs().max()) < 5 * scale * math.sqrt(2 / n)
    values, vectors = torch.linalg.eigh(gaussian.covariance)
    assert float(values[1]) < 1e-12
    off = (sample.points - gaussian.mean) @ vectors[:, :2]
    assert float(off.abs().max()) < 1e-6


def test_float32_is_kept() -> None:
    f, gaussian = _attention("l2", 11), _gaussian(11, D)
    single = f.to(dtype=torch.float32)(gaussian.to(dtype=torch.float32))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.covariance.double(), f(gaussian).covariance, rtol=1e-4, atol=1e-4)
    assert gaussian.to(dtype=torch.float32).sample(3, seed=0).dtype == torch.float32
    assert repr(_gaussian(11, 5, rank=3)) == "Gaussian(d=5, covariance of rank 3)"


# ---- refusals

EYE = torch.eye(2, dtype=torch.float64)
ZERO = torch.zeros(2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("build", "argument", "words"),
    [
        (lambda: Gaussian([0.0], EYE), "mean", "list"),
        (lambda: Gaussian(EYE, EYE), "mean", "shape (2, 2)"),
        (lambda: Gaussian(torch.zeros(0), EYE), "mean", "d >= 1"),
        (lambda: Gaussian(ZERO.half(), EYE.half()), "mean", "float16"),
        (lambda: Gaussian(ZERO / 0, EYE), "mean", "NaN"),
        (lambda: Gaussian(ZERO, 1.0), "covariance", "float"),
        (lambda: Gaussian(ZERO, ZERO), "covariance", "shape (2,)"),
        (lambda: Gaussian(ZERO, torch.eye(3).double()), "covariance", "shape (2, 2)"),
        (lambda: Gaussian(ZERO, EYE.float()), "covariance", "float64"),
        (lambda: Gaussian(ZERO, EYE * float("inf")), "covariance", "infinity"),
        (
            lambda: Gaussian(ZERO, EYE + torch.tensor([[0, 0.3], [0.2, 0]])),
            "covariance",
            "by 0.1 across",
        ),
        (lambda: Gaussian(ZERO, -EYE), "covariance", "an eigenvalue -1 "),
        (
            lambda: Gaussian(ZERO, torch.tensor([[1.0, 2.0], [2.0, 1.0]]).double()),
            "covariance",
            "an eigenvalue -1 (the largest is 3)",
        ),
        (
            lambda: Gaussian(ZERO, EYE + (1 + 1e-7) * EYE.flip(0)),
            "covariance",
            "-1e-07",
        ),
        (lambda: Gaussian(ZERO, EYE).sample(0, seed=0), "n", ">= 1"),
        (lambda: Gaussian(ZERO, EYE).sample(2.0, seed=0), "n", "2.0"),
        (lambda: Gaussian(ZERO, EYE).sample(2, seed=None), "seed", "None"),
        (lambda: Gaussian(ZERO, EYE).weighted_tokens(), "measure", "sample"),
    ],
)
def test_refusals_name_the_argument(build: object, argument: str, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        build()
    assert caught.value.argument == argument
    assert words in str(caught.value)
    assert isinstance(caught.value, NonFiniteError) == ("NaN or infinity" in str(caught.value))


def test_rounding_of_a_product_is_no_negative_eigenvalue() -> None:
    for seed in range(5):
        root = tokens(seed, 40, 3)
        assert Gaussian(torch.zeros(40).double(), root @ root.mT).d == 40
        single = root.float()
        assert Gaussian(torch.zeros(40), single @ single.mT).d == 40


def test_a_layer_scale_multiplies_each_channel_of_the_gaussian() -> None:
    f, factor = (
        _attention("softmax", 3, d=2, d_out=2, heads=1),
        torch.tensor([0.5, -2.0], dtype=torch.float64),
    )
    gaussian = _gaussian(4, 2)
    inner, inner_shift = affine_action(f, gaussian)
    matrix, shift = affine_action(hs.Residual(hs.Compose(hs.LayerScale(factor), f)), gaussian)
    for x in tokens(5, 3, 2):
        torch.testing.assert_close(matrix @ x + shift, x + factor * (inner @ x + inner_shift))


GAUSSIAN_CASES = {
    "one head", "multi-head", "no biases", "grouped heads", "multi-query", "heads concatenated",
    "wide output", "rank one", "own scale", "negative scale", "residual",
    "layer scale", "scaled residual",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_maps_that_do_not_keep_measures_gaussian_are_refused_by_name(name: str) -> None:
    f = CASES[name](4)
    if name in GAUSSIAN_CASES:
        assert isinstance(f(_gaussian(0, D)), Gaussian)
        return
    with pytest.raises(ArgumentError, match="for a Gaussian") as caught:
        f(_gaussian(0, D))
    assert any(
        word in caught.value.got
        for word in ("causal", "masked", "rotary", "Norm", "soft-capped", "bias", "sinks")
    )


def test_measures_of_another_dimension_or_dtype_are_refused() -> None:
    f: TokenMap = random_attention(0)
    with pytest.raises(ArgumentError, match="dimension 6"):
        f(_gaussian(0, D - 1))
    with pytest.raises(ArgumentError, match="float64"):
        f(_gaussian(0, D).to(dtype=torch.float32))
    assert isinstance(f(_gaussian(0, D).sample(3, seed=0)), DiscreteMeasure)
