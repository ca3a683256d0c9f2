"""hs.bounds.kv_error_upper_bound against the outputs that random and adversarial errors really give."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention.scaled_dot_product import attend
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.rounding import limit_in_digits
from tests._cases import CASES, random_attention, tokens
from tests._tiny_models import tiny, token_ids

N = 7


def layer(f: hs.SelfAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    given = f._grouped(q)[None], k, v, f.scale, f.visibility(q.shape[-2])
    return f._projected(attend(*(t.expand(len(k), *t.shape[1:]) for t in given[:1]), *given[1:],
                               features=f.features))  # fmt: skip


def changes(f: hs.SelfAttention, x: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    """Norms (patterns, n) of the change of each output token for errors of keys and values."""
    q, k, v = f.projections(x)
    moved = layer(f, q, k + dk, v + dv) - layer(f, q, k[None], v[None])
    return torch.linalg.vector_norm(moved, dim=-1)


@pytest.mark.parametrize("name", ["causal grouped, hot", "sinks, softcap, score bias", "a norm of keys"])
def test_random_errors_of_each_entry_stay_within_the_bound(name: str) -> None:
    """``test_attack_bounds`` ascends against the bound."""
    f, x, g = CASES[name](N), tokens(5, N, 6), torch.Generator().manual_seed(0)
    _, k, v = f.projections(x)
    for size in (1e-3, 1.0):
        most = [size * torch.rand(t.shape, generator=g, dtype=torch.float64) for t in (k, v)]
        errors = [m * torch.randn(20, *m.shape, generator=g, dtype=torch.float64).sign() for m in most]
        bound = hs.bounds.kv_error_upper_bound(f, x, keys=most[0], values=most[1])
        share = float((changes(f, x, *errors) / bound.tokens).max())
        assert 0.02 < share <= 1.0


def test_the_bound_of_value_errors_is_attained() -> None:
    f, x = random_attention(2, heads=1, d_out=None, causal=True), tokens(7, N, 6)
    _, k, v = f.projections(x)
    for size in (torch.rand(1, N, dtype=torch.float64), torch.rand(v.shape, dtype=torch.float64)):
        worst = size if size.ndim == 3 else size[..., None] * torch.eye(v.shape[-1])[0]
        found = changes(f, x, torch.zeros_like(k)[None], worst[None])[0]
        assert torch.allclose(hs.bounds.kv_error_upper_bound(f, x, values=size).tokens, found, rtol=1e-7)


def test_small_key_errors_of_one_value_dimension_attain_the_bound() -> None:
    f, x = random_attention(3, heads=1, value_dim=1, d_out=None), tokens(8, N, 6)
    size = 1e-5
    q, k, v = f.projections(x)
    p = (f.scale * q[0] @ k[0].mT).softmax(dim=-1)
    # To first order, the change of token i is Σ_j P_ij |v_j − o_i| |t_ij| with t_ij = s |q_i| ε_j.
    distances = (v[0].mT - p @ v[0]).abs()
    first = (p * distances).sum(dim=1) * abs(f.scale) * q[0].norm(dim=1) * size
    found = hs.bounds.kv_error_upper_bound(f, x, keys=size).tokens
    assert torch.allclose(found, first, rtol=1e-3)


def test_errors_of_all_sizes_stay_within_the_hull_of_the_values() -> None:
    f, x = random_attention(4, heads=1, d_out=None), tokens(9, N, 6)
    v = f.projections(x)[2][0]
    y = f(x)
    found = hs.bounds.kv_error_upper_bound(f, x, keys=1e9)
    assert torch.allclose(found.tokens, torch.cdist(y, v).amax(dim=1), rtol=1e-7)
    assert hs.bounds.kv_error_upper_bound(f, x, keys=0.0, values=0.0).value == 0.0
    # A sink is one more key with value zero. It may take a whole row.
    f = random_attention(5, heads=1, d_out=None, sinks=torch.tensor([-9.0], dtype=torch.float64))
    assert bool((f(x).norm(dim=1) > torch.cdist(f(x), f.projections(x)[2][0]).amax(dim=1)).any())
    found = hs.bounds.kv_error_upper_bound(f, x, keys=1e9)
    assert bool((found.tokens >= f(x).norm(dim=1)).all())


def test_the_bound_holds_in_exact_arithmetic_where_rounding_decides() -> None:
    # Scores near 2^33 that differ by about one: float64 rounds the weights in their seventh digit.
    one = torch.eye(8, dtype=torch.float64)[None]
    f = hs.SelfAttention(one, one, one[:, :1], scale=1.0)
    x = 2.0**15 + tokens(10, N, 8) * 2.0**-16
    size = torch.zeros(1, N)
    size[0, 0] = 1.0
    found = hs.bounds.kv_error_upper_bound(f, x, values=size).tokens
    with mpmath.workdps(60):
        rows = [[mpmath.mpf(float(entry)) for entry in row] for row in x]
        for q, bound in zip(rows, found.tolist(), strict=True):
            scores = [mpmath.fdot(q, k) for k in rows]
            weight = 1 / mpmath.fsum(mpmath.exp(score - scores[0]) for score in scores)
            assert weight <= bound <= weight * (1 + 1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_which_float64_knows_nothing_give_a_bound(causal: bool) -> None:
    # Scores of 1e20 have rounding errors of 1e4, so that any visible token may have all the weight.
    query, key, value = (1e6 * torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))).double()
    f = hs.SelfAttention(query, key, value, causal=causal)
    x = 1e4 * tokens(3, 5, 4)
    assert math.isfinite(hs.bounds.kv_error_upper_bound(f, x, keys=1e-3).value)
    # Each output token is one value, which may move by its whole error.
    assert hs.bounds.kv_error_upper_bound(f, x, values=1e-3).value >= 1e-3 * 5**0.5


def test_the_bound_holds_however_few_steps_search_it(monkeypatch: pytest.MonkeyPatch) -> None:
    f, x = random_attention(3, heads=1, value_dim=1, d_out=None), tokens(8, N, 6)
    found = hs.bounds.kv_error_upper_bound(f, x, keys=1.5).tokens
    monkeypatch.setattr("howsmooth.bounds.key_value_error_bounds._STEPS", 1)
    few = hs.bounds.kv_error_upper_bound(f, x, keys=1.5).tokens
    assert bool((few >= found * (1 - 1e-6)).all())
    assert not torch.allclose(few, found)


def test_a_site_and_its_parts() -> None:
    (site,) = hs.capture(tiny("llama"), token_ids(1, 8), layers=[0])
    whole = hs.bounds.kv_error_upper_bound(site, keys=0.1)
    assert "Theorem K" in repr(whole)
    assert limit_in_digits(whole.value, 6, upper=True) in repr(whole)
    only = torch.zeros(2, 8)
    only[1] = 0.1
    one = hs.bounds.kv_error_upper_bound(site.map, site.x[0], keys=only)
    assert 0 < one.value < whole.value
    channels = hs.bounds.kv_error_upper_bound(site, values=torch.full((2, 1, 6), 0.1))
    assert channels.value == hs.bounds.kv_error_upper_bound(site, values=torch.full((2, 8, 6), 0.1)).value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keys": torch.ones(3, 5, 2)}, "keys"),
        ({"keys": "many"}, "keys"),
        ({"values": -1.0}, "values"),
        ({"X": torch.ones(1, 5, 6)}, "one sequence"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, object], said: str) -> None:
    f, x = random_attention(1), tokens(1, 5, 6)
    with pytest.raises(ArgumentError, match=said):
        hs.bounds.kv_error_upper_bound(f, **({"X": x} | given))


def test_other_maps_and_numbers_are_refused() -> None:
    f, x = random_attention(1), tokens(1, 5, 6)
    with pytest.raises(ArgumentError, match="residual"):
        hs.bounds.kv_error_upper_bound(
            hs.capture(tiny("gpt2"), token_ids(1, 5), layers=[0], scope="residual")[0], keys=0.1
        )
    with pytest.raises(NonFiniteError, match="values"):
        hs.bounds.kv_error_upper_bound(f, x, values=float("nan"))
    with pytest.raises(NonFiniteError, match="X"):
        hs.bounds.kv_error_upper_bound(f, x * torch.inf, values=1.0)
