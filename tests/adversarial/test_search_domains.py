"""Domains of the ascent: projections, membership, random tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.adversarial import Around, Ball, Ellipsoid
from howsmooth.adversarial.search_domains import Domain
from howsmooth.errors import ArgumentError, NonFiniteError
from tests._cases import tokens

N, D = 5, 6
GAIN, SHIFT = tokens(1, D), tokens(2, D)
DOMAINS: dict[str, Domain] = {
    "ball": Ball(1.5),
    "LayerNorm": Ellipsoid(hs.LayerNorm(GAIN, SHIFT, 1e-5)),
    "LayerNorm without shift": Ellipsoid(hs.LayerNorm(GAIN, None, 1e-5)),
    "LayerNorm, eps = 0": Ellipsoid(hs.LayerNorm(GAIN, SHIFT, 0.0)),
    "RMSNorm": Ellipsoid(hs.RMSNorm(GAIN, 1e-3)),
    "around": Around(tokens(3, N, D), 0.3),
    "around each": Around(tokens(3, N, D), 0.3, per_token=True),
}


@pytest.fixture(params=DOMAINS)
def domain(request: pytest.FixtureRequest) -> Domain:
    return DOMAINS[request.param]


def test_projection_lands_inside_and_stays(domain):
    far = 10 * tokens(4, 3, N, D)
    inside = domain.project(far)
    assert domain.contains(inside)
    assert not domain.contains(far)
    assert torch.allclose(domain.project(inside), inside, atol=1e-12)


def test_random_tokens_are_inside_and_reproducible(domain):
    draws = [domain.random(torch.Generator().manual_seed(7), N, D) for _ in range(2)]
    assert torch.equal(*draws)
    assert domain.contains(draws[0])
    assert not torch.equal(draws[0], domain.random(torch.Generator().manual_seed(8), N, D))


def test_the_projection_is_the_nearest_in_coordinates(domain):
    far = domain.coordinates(10 * tokens(5, N, D))
    nearest = domain.project_coordinates(far)
    if isinstance(domain, Ellipsoid) and domain.norm.eps == 0:
        assert torch.allclose(nearest.norm(dim=-1), torch.ones(N, dtype=torch.float64))
        return
    generator = torch.Generator().manual_seed(9)
    for _ in range(50):
        other = domain.coordinates(domain.project(3 * torch.randn(N, D, generator=generator).double()))
        # the variational inequality of a projection on a convex set
        assert float(((far - nearest) * (other - nearest)).sum()) <= 1e-9


def test_coordinates_and_back(domain):
    x = domain.random(torch.Generator().manual_seed(10), N, D)
    assert torch.allclose(domain.tokens(domain.coordinates(x)), x, atol=1e-12)


def test_pull_back_is_the_adjoint(domain):
    u = domain.coordinates(domain.random(torch.Generator().manual_seed(11), N, D))
    direction = domain.project_coordinates(0.5 * u) - u  # stays in the plane of mean-zero vectors
    gradient = tokens(12, N, D)
    moved = domain.tokens(u + direction) - domain.tokens(u)
    assert float((moved * gradient).sum()) == pytest.approx(
        float((direction * domain.pull_back(gradient)).sum()), rel=1e-9
    )


@pytest.mark.parametrize("norm", [hs.LayerNorm(GAIN, SHIFT, 1e-2), hs.RMSNorm(GAIN, 1e-2)])
def test_an_ellipsoid_holds_what_the_norm_gives_and_no_more(norm):
    ellipsoid = Ellipsoid(norm)
    for scale in (1e-3, 1.0, 1e6):
        assert ellipsoid.contains(norm(scale * tokens(13, N, D)))
    # of its random tokens, shrunk a little, each is the image of some token
    wanted = ellipsoid.tokens(0.9 * ellipsoid.coordinates(ellipsoid.random(torch.Generator(), N, D)))
    u = ellipsoid.coordinates(wanted)
    length = u.norm(dim=1, keepdim=True)
    x = u / length * torch.sqrt(D * norm.eps * length**2 / (1 - length**2))
    assert torch.allclose(norm(x), wanted)


def test_a_gain_of_zero_is_no_obstacle():
    gain = GAIN.clone()
    gain[2] = 0.0
    ellipsoid = Ellipsoid(hs.RMSNorm(gain))
    projected = ellipsoid.project(10 * tokens(14, N, D))
    assert bool(torch.isfinite(projected).all())
    assert bool((projected[:, 2] == 0).all())


def test_the_image_of_layer_norm_has_mean_zero():
    ellipsoid = DOMAINS["LayerNorm"]
    u = ellipsoid.project_coordinates(tokens(16, N, D))
    assert torch.allclose(u.mean(dim=-1), torch.zeros(N, dtype=torch.float64), atol=1e-12)
    pulled = ellipsoid.pull_back(tokens(17, N, D))
    assert torch.allclose(pulled.mean(dim=-1), torch.zeros(N, dtype=torch.float64), atol=1e-12)
    assert not ellipsoid.contains(ellipsoid.tokens(torch.full((N, D), 0.1, dtype=torch.float64)))


def test_balls_around_tokens():
    centre = tokens(3, N, D)
    far: Tensor = centre + tokens(15, N, D)
    together = Around(centre, 0.3).project(far) - centre
    assert float(together.norm()) == pytest.approx(0.3)
    each = Around(centre, 0.3, per_token=True).project(far) - centre
    assert torch.allclose(each.norm(dim=1), torch.full((N,), 0.3, dtype=torch.float64))


def test_refusals():
    with pytest.raises(ArgumentError, match="radius"):
        Ball(0.0)
    with pytest.raises(ArgumentError, match="norm"):
        Ellipsoid(Ball(1.0))
    with pytest.raises(ArgumentError, match="X0"):
        Around(torch.zeros(3), 1.0)
    with pytest.raises(ArgumentError, match=r"got ndarray\. Use torch\.as_tensor"):
        Around(torch.zeros(2, 3).numpy(), 1.0)
    with pytest.raises(NonFiniteError):
        Around(torch.full((2, 2), math.nan), 1.0)
    with pytest.raises(ArgumentError, match="shape"):
        Around(torch.zeros(2, 2), 1.0).random(torch.Generator(), 3, 2)


def test_domains_say_what_they_are(domain):
    assert domain.describe() in repr(domain)
