"""Sliding windows: the same numbers as a mask that shows the same keys, in a time that grows with n w."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth import bounds
from howsmooth.adversarial.gradient_ascent import _basis, _compressed
from howsmooth.adversarial.repeated_token_search import can_search_atoms
from howsmooth.adversarial.search_domains import Ball
from howsmooth.attention import scaled_dot_product
from howsmooth.attention.custom_code_attention import SoftmaxCore
from howsmooth.attention.masks import Visibility, check_window
from howsmooth.bounds import ball_lower_bounds as lower_bounds
from howsmooth.bounds import ball_upper_bounds as masked_bounds
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.bounds.ball_lower_bounds import equal_tokens_lower_bound
from howsmooth.errors import ArgumentError
from howsmooth.measures import DiscreteMeasure, Gaussian
from tests._cases import D, random_attention, rotary, tokens, true_norm
from tests._selection import others_slow

N = 9


def band(n: int, window: int, *, causal: bool) -> Tensor:
    """Which keys a window shows, written once more."""
    return torch.tensor(
        [[abs(i - j) < window and (j <= i or not causal) for j in range(n)] for i in range(n)]
    )


def pair(
    seed: int, window: int, *, causal: bool, n: int = N, **keywords: object
) -> tuple[hs.SelfAttention, ...]:
    """The same attention with a window, and with the mask that says so."""
    masked = random_attention(seed, mask=band(n, window, causal=causal), **keywords)
    return random_attention(seed, causal=causal, window=window, **keywords), masked


RULES = [(1, True), (3, True), (2, False), (4, False), (20, True)]
VARIANTS: dict[str, dict[str, object]] = {
    "grouped": {"heads": 4, "kv_heads": 2},
    "rotary, sinks": {"rotary": rotary(N, 4), "sinks": torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)},
    "score bias, softcap": {
        "score_bias": torch.linspace(-2, 2, N * N, dtype=torch.float64).reshape(1, N, N),
        "softcap": 1.5,
    },
}


@pytest.mark.parametrize(
    ("variant", "window", "causal"),
    others_slow(
        [(name, *rule) for name in VARIANTS for rule in RULES],
        [
            ("grouped", 3, True),
            ("rotary, sinks", 1, True),
            ("rotary, sinks", 2, False),
            ("score bias, softcap", 4, False),
            ("score bias, softcap", 20, True),
        ],
    ),
)
def test_a_window_is_the_mask_that_shows_the_same_keys(variant: str, window: int, causal: bool) -> None:
    f, masked = pair(3, window, causal=causal, **VARIANTS[variant])
    x = tokens(5, 2, N, D)
    torch.testing.assert_close(f(x), masked(x), rtol=1e-13, atol=1e-13)
    estimate = hs.local_lipschitz(f, x, rtol=1e-6)
    torch.testing.assert_close(
        estimate.value, hs.local_lipschitz(masked, x, rtol=1e-6).value, rtol=1e-9, atol=0
    )
    torch.testing.assert_close(estimate.value, true_norm(masked, x), rtol=1e-6, atol=0)


def test_every_row_is_a_softmax_over_its_own_keys() -> None:
    """NumPy, one token at a time."""
    window = 3
    f = random_attention(8, heads=2, d_out=None, biases=False, causal=True, window=window)
    x = tokens(1, N, D)
    xs, query, key, value = (t.numpy() for t in (x, f.query, f.key, f.value))
    expected = np.zeros((N, f.d_out))
    for i in range(N):
        seen = xs[max(0, i - window + 1) : i + 1]
        for h in range(2):
            scores = f.scale * (seen @ key[h].T) @ (query[h] @ xs[i])
            weights = np.exp(scores - scores.max())
            expected[i, h * f.value_dim : (h + 1) * f.value_dim] = weights @ seen @ value[h].T / weights.sum()
    np.testing.assert_allclose(f(x).numpy(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("entries", [700, 20_000])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_rows_take_only_the_keys_in_reach(causal, entries, monkeypatch) -> None:
    """Several blocks of rows, of heads: nothing is left out, and the scores formed are of order n w."""
    monkeypatch.setattr(scaled_dot_product, "_ENTRIES", {"cpu": entries})
    monkeypatch.setattr(scaled_dot_product, "_ROWS", 4)
    n, window = 150, 5
    f, masked = pair(4, window, causal=causal, n=n, heads=4, kv_heads=2)
    formed: list[int] = []
    plain = scaled_dot_product.attention_probabilities

    def counted(q: Tensor, k: Tensor, *rest: object) -> Tensor:
        formed.append(q[..., 0].numel() * k.shape[-2])
        return plain(q, k, *rest)

    x = tokens(2, n, D)
    expected = masked(x)
    monkeypatch.setattr(scaled_dot_product, "attention_probabilities", counted)
    torch.testing.assert_close(f(x), expected, rtol=1e-12, atol=1e-13)
    assert 4 * n * window <= sum(formed) <= 4 * n * 3 * window


def test_blocks_of_a_long_sequence_are_not_cut_as_if_every_key_were_seen() -> None:
    n = 1 << 20
    ((_, rows),) = scaled_dot_product.row_blocks(1, 1, n, n, torch.device("cpu"), 64)
    assert len(rows) == n // 64


def test_a_core_of_a_staged_layer_has_windows_too() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, N, 3, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, N, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    for causal in (True, False):
        windowed = SoftmaxCore(0.7, causal, window=3)
        masked = SoftmaxCore(0.7, mask=band(N, 3, causal=causal))
        torch.testing.assert_close(windowed.attend(q, k, v), masked.attend(q, k, v), rtol=1e-13, atol=1e-14)
        assert windowed.head(1).window == windowed.to(dtype=torch.float32).window == 3
    with pytest.raises(ArgumentError, match="window: expected as many queries as keys"):
        SoftmaxCore(0.7, window=3).attend(q[:, :4], k, v)


def test_related_maps_keep_the_window() -> None:
    f, masked = pair(6, 3, causal=True, heads=4, kv_heads=2)
    x = tokens(0, N, D)
    for one, other in (
        (f.head(3), masked.head(3)),
        (f.without_output(), masked.without_output()),
        (f.to(dtype=torch.float64), masked),
    ):
        torch.testing.assert_close(one(x), other(x), rtol=1e-13, atol=1e-14)


def test_it_is_said_in_words_and_fixes_no_length() -> None:
    f = random_attention(1, causal=True, window=4)
    assert "causal, sliding window 4" in f.describe()
    assert "sliding window 4" in random_attention(1, window=4).describe()
    mask = torch.ones(5, 5, dtype=torch.bool)
    words = random_attention(1, causal=True, window=4, mask=mask).describe()
    assert "causal, sliding window 4, with a further mask" in words
    for n in (1, 3, 30):
        assert f(tokens(n, n, D)).shape == (n, D)


def test_what_is_no_window_is_refused() -> None:
    for window in (0, -1, 2.0, True, "3"):
        with pytest.raises(ArgumentError, match="window: expected a whole number >= 1"):
            check_window(window)
    for build in (random_attention, lambda seed, **k: SoftmaxCore(1.0, **k)):
        with pytest.raises(ArgumentError, match="window: expected a whole number >= 1"):
            build(1, window=0)


def test_a_mask_that_leaves_nothing_of_a_window_is_refused() -> None:
    mask = torch.eye(5, dtype=torch.bool)
    mask[4] = torch.tensor([True, True, False, False, False])
    random_attention(1, mask=mask, window=5)
    for build in (random_attention, lambda seed, **k: SoftmaxCore(1.0, **k)):
        with pytest.raises(ArgumentError, match="query 4 sees none"):
            build(1, mask=mask, window=2)


def test_measures_are_refused_by_name() -> None:
    f = random_attention(1, window=3)
    measure = DiscreteMeasure(tokens(0, 5, D))
    with pytest.raises(ArgumentError, match="a window"):
        f(measure)
    with pytest.raises(ArgumentError, match="sliding window 3"):
        f(Gaussian(torch.zeros(D, dtype=torch.float64), torch.eye(D, dtype=torch.float64)))


# ---- bounds


@pytest.mark.parametrize(
    ("causal", "heads"), others_slow(itertools.product([True, False], [1, 3]), [(True, 1), (False, 3)])
)
def test_bounds_are_those_of_the_mask(heads: int, causal: bool) -> None:
    f, masked = pair(11, 3, causal=causal, heads=heads)
    x = tokens(3, N, D)
    mine, theirs = (bounds.table(one, x) for one in (f, masked))
    assert list(mine.name) == list(theirs.name)
    assert len(mine) >= 3
    np.testing.assert_allclose(mine.value, theirs.value, rtol=1e-9)
    truth = float(true_norm(masked, x[None])[0])
    assert float(bounds.best(f, x).value) >= truth


@pytest.mark.parametrize("causal", [True, False])
def test_sums_over_a_mask_do_not_depend_on_its_blocks(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, window = 50, 40
    f, masked = pair(12, window, causal=causal, n=n, heads=1)
    whole = bounds.masked_ball_upper_bound(masked, n, 1.5).value
    monkeypatch.setattr(masked_bounds, "_ENTRIES", 3 * n)
    for one in (f, masked):
        assert bounds.masked_ball_upper_bound(one, n, 1.5).value == pytest.approx(whole, rel=1e-12)


def test_the_first_rows_of_a_wide_causal_window_are_those_of_a_triangle() -> None:
    wide = random_attention(3, heads=1, causal=True, window=2000)
    triangle = random_attention(3, heads=1, causal=True)
    expected = equal_tokens_lower_bound(triangle, 2000, 1.0).value
    assert equal_tokens_lower_bound(wide, 300_000, 1.0).value == pytest.approx(expected, rel=1e-12)


def test_bounds_of_other_masks_do_not_hold_for_a_window() -> None:
    for causal in (True, False):
        f = random_attention(12, heads=1, biases=False, causal=causal, window=3)
        statements = (
            bounds.theorem_3_3, bounds.ball_upper_bound, bounds.theorem_4_3, bounds.causal_ball_upper_bound,
            bounds.proposition_3_4, bounds.two_cluster_lower_bound, bounds.causal_two_cluster_lower_bound,
            bounds.two_heavy_tokens_lower_bound,
        )  # fmt: skip
        for statement in statements:
            assert not statement(f, N, 1.0).holds, statement.__name__


def test_a_bound_of_a_long_window_is_that_of_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the longer length n² entries of a mask would take 1.6 GB."""
    monkeypatch.setattr(lower_bounds, "_DENSE_ROWS", 100)
    f = random_attention(3, heads=1, window=50)
    long, short = (bounds.masked_ball_upper_bound(f, n, 1.0).value for n in (40_000, 400))
    assert long == pytest.approx(short, rel=1e-12)
    for causal in (True, False):
        f = random_attention(3, heads=1, window=50, causal=causal)
        seen = band(400, 50, causal=causal).double()
        first = torch.linalg.matrix_norm((seen / seen.sum(1, keepdim=True))[:100], 2)
        value = torch.linalg.matrix_norm(f.output @ f.value[0], 2)
        expected = max(1.0, float(first)) * float(value)
        assert equal_tokens_lower_bound(f, 40_000, 1.0).value == pytest.approx(expected, rel=1e-9)


def test_certificates_of_parameters_know_the_window() -> None:
    f, masked = pair(13, 3, causal=True, heads=1)
    x = tokens(4, N, D)
    # Without the search, whose float32 turns the last digits of float64 into other weights.
    expected = bounds.certificate(masked, x, iterations=0).value
    for one in (f, parameters_of(f)):
        found = bounds.certificate(one, x, iterations=0)
        assert float(found.value) == pytest.approx(float(expected), rel=1e-9)


def test_few_atoms_are_no_search_space_of_a_window() -> None:
    domain = Ball(1.0)
    assert can_search_atoms(random_attention(1, causal=True), domain)
    assert not can_search_atoms(random_attention(1, causal=True, window=3), domain)


# ---- searches


def test_a_search_in_fewer_coordinates_keeps_the_window() -> None:
    f = random_attention(2, heads=1, key_dim=1, value_dim=2, causal=True, window=2, softcap=1.5)
    basis = _basis(f, Ball(1.0))
    assert basis is not None
    x = tokens(5, N, D)
    torch.testing.assert_close(_compressed(f, basis)(x @ basis), f(x), rtol=1e-12, atol=1e-13)


def test_masks_are_summed_in_blocks_of_bounded_size() -> None:
    for seen in (Visibility(1 << 16), Visibility(1 << 16, True, 1 << 14)):
        (_, block) = next(masked_bounds.mask_blocks(seen))
        assert block.numel() <= 1 << 24
