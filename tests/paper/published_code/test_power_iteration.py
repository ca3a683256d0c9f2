"""The published power iteration, its maps, slices and bound, each against the same thing written out here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import ArgumentError
from howsmooth.paper import published_code as published
from tests._cases import dense_jacobian, random_attention, tokens, true_norm
from tests._tiny_models import tiny, token_ids


def _start(x: Tensor, seed: int) -> Tensor:
    u = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).flatten()
    return u / u.norm()


@pytest.mark.parametrize("absolute", [True, False])
def test_with_the_output_in_place_of_the_tangent_the_value_is_known_and_no_norm(absolute: bool) -> None:
    f, x = random_attention(0, heads=2), tokens(0, 7, 6)
    J = dense_jacobian(f, x)
    found, other = (
        published.power_iteration(f, x, output=True, absolute=absolute, seed=seed) for seed in (0, 1)
    )
    assert found.value == pytest.approx(math.sqrt(float((J.T @ f(x).flatten()).norm())), rel=1e-12)
    assert (found.steps, found.settled, other.value) == (2, True, found.value)
    assert abs(found.value / float(true_norm(f, x[None])) - 1) > 0.05
    # It sees a bias that the constant does not.
    assert f.output_bias is not None
    moved = f._rebuilt(output_bias=f.output_bias + 10)
    value = published.power_iteration(moved, x, output=True, absolute=absolute, seed=0).value
    assert value > 1.5 * found.value
    assert torch.equal(true_norm(f, x[None]), true_norm(moved, x[None]))
    nothing = published.power_iteration(lambda t: 0 * t + 1, x, output=True, absolute=absolute, seed=0)
    assert (nothing.value, nothing.settled) == (0.0, True)


def test_the_coded_bound_is_its_formula_knows_no_query_bias_and_is_no_bound() -> None:
    f, x = random_attention(0, heads=1, d_out=None), tokens(0, 5, 6)
    A = f.key[0].T @ f.query[0] * f.scale
    R_A = max(float((A @ token).norm()) for token in x)
    r = max(float((a - b).norm()) for a in x for b in x)
    expected = float(torch.linalg.matrix_norm(f.value[0], 2)) * math.sqrt(R_A**2 * r**2 * 6 + 5)
    assert published.c_3_as_coded(f, x) == pytest.approx(expected, rel=1e-9)
    assert published.c_3_as_coded(f._rebuilt(query_bias=None), x) == published.c_3_as_coded(f, x)
    with pytest.raises(ArgumentError, match=r"X: expected tokens of shape \(n, 6\)"):
        published.c_3_as_coded(f, x[None])
    # The counterexample, where it lies below the constant.
    A = torch.tensor([[0.0, 0.0], [10.0, 0.0]], dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64)
    f = hs.SelfAttention(A[None], eye[None], eye[None], scale=1.0)
    x = torch.tensor([[0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    assert published.c_3_as_coded(f, x) == pytest.approx(math.sqrt(2), rel=1e-9)
    assert float(true_norm(f, x[None])) == pytest.approx(10.1, abs=0.05)


@pytest.mark.parametrize(("absolute", "limit"), [(True, 1e-4), (False, 1e-6)])
def test_the_tangent_iteration_stops_where_its_rule_says(absolute: bool, limit: float) -> None:
    f, x = random_attention(3, heads=1), tokens(3, 5, 6)
    J = dense_jacobian(f, x)
    u, previous, steps = _start(x, 4), math.inf, 0
    while True:
        steps += 1
        image = J.T @ (J @ u)
        mu = float(image.norm())
        if abs(mu - previous) < (limit if absolute else limit * mu):
            break
        previous, u = mu, image / mu
    found = published.power_iteration(f, x, output=False, absolute=absolute, seed=4)
    assert found.steps == steps > 2
    assert found.value == pytest.approx(math.sqrt(mu), rel=1e-10)
    assert found.settled
    assert found.value <= float(true_norm(f, x[None])) * (1 + 1e-12)


def test_an_absolute_rule_depends_on_the_size_of_the_map() -> None:
    f, x = random_attention(3, heads=1), tokens(3, 5, 6)
    small, large = (f._rebuilt(output=c * f.output) for c in (1e-3, 1e3))
    early = published.power_iteration(small, x, output=False, absolute=True, seed=0)
    assert early.settled
    assert early.steps == 2
    assert early.value < 0.95 * float(true_norm(small, x[None]))
    usual, late = (published.power_iteration(g, x, output=False, absolute=True, seed=0) for g in (f, large))
    assert early.steps < usual.steps < late.steps
    steps = {
        published.power_iteration(g, x, output=False, absolute=False, seed=0).steps for g in (small, large)
    }
    assert len(steps) == 1


def test_dropout_of_weights_takes_the_only_token_or_scales_it() -> None:
    f, x = random_attention(0, heads=1, d_out=None, biases=False), tokens(0, 1, 6)
    g = published.DropoutAttention(f, weights=0.3, outputs=0.0, seed=0)
    drawn = g(x.expand(2000, 1, 6))
    zero = (drawn == 0).all(dim=(1, 2))
    assert torch.allclose(drawn[~zero], f(x) / 0.7, rtol=1e-12)
    assert float(zero.double().mean()) == pytest.approx(0.3, abs=0.04)  # four standard deviations


def test_dropout_of_outputs_acts_on_each_entry_after_the_bias_and_leaves_the_mean() -> None:
    f, x = random_attention(1, causal=True), tokens(0, 40, 6)
    g = published.DropoutAttention(f, weights=0.0, outputs=0.25, seed=0)
    once = g(x)
    kept = once != 0
    assert torch.allclose(once[kept], f(x)[kept] / 0.75, rtol=1e-12)
    assert float((~kept).double().mean()) == pytest.approx(0.25, abs=0.12)
    assert not torch.equal(once, g(x))
    assert torch.equal(once, g.to(dtype=torch.float64)(x))
    both = published.DropoutAttention(f, weights=0.5, outputs=0.25, seed=0)
    assert torch.allclose(both(x.expand(4000, 40, 6)).mean(0), f(x), atol=0.1)


def test_dropout_differs_between_the_products_so_that_the_iteration_does_not_settle() -> None:
    f, x = random_attention(1, causal=True), tokens(0, 8, 6)
    g = published.with_dropout(hs.Residual(f), weights=0.1, outputs=0.1, seed=0)
    found = published.power_iteration(g, x, output=False, absolute=True, seed=0)
    assert (found.settled, found.steps) == (False, 100)


def test_without_mask_the_parts_around_the_attention_stay() -> None:
    attention, norm = random_attention(2, causal=True), hs.LayerNorm(torch.rand(6).double(), None, 1e-5)
    x = tokens(0, 5, 6)
    free = random_attention(2)
    assert torch.allclose(
        published.unmasked(hs.Compose(norm, hs.Residual(attention)))(x), norm(x + free(x)), rtol=1e-13
    )
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    assert torch.allclose(published.unmasked(random_attention(2, mask=mask))(x), free(x), rtol=1e-13)


def test_wrong_slices_are_rows_of_the_fused_weight() -> None:
    model = tiny("gpt2")
    (site,) = hs.capture(model, token_ids(1, 4), layers=[1])
    assert isinstance(site.map, hs.SelfAttention)
    wrong = published.wrong_slices(site.map)
    weight = model.h[1].attn.c_attn.weight.detach()
    for place, name in enumerate(("query", "key", "value")):
        part = weight[:, 24 * place : 24 * (place + 1)]
        for h in range(4):
            assert torch.allclose(getattr(site.map, name)[h], part[:, 6 * h : 6 * (h + 1)].T)
            assert torch.allclose(getattr(wrong, name)[h], part[6 * h : 6 * (h + 1), :])
    assert wrong.causal
    assert torch.equal(published.wrong_slices(wrong).query, site.map.query)
    with pytest.raises(ArgumentError, match="heads of d dimensions in all"):
        published.wrong_slices(random_attention(0, heads=3, key_dim=4))
