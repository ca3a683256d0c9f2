"""``best`` and ``table``: which statements apply, which is tightest, and what stands beside a measurement."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import howsmooth as hs
from howsmooth.bounds import Head, best, norm_radius, pre_norm_upper_bound, table
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.errors import ArgumentError
from tests._cases import D, dense_jacobian, random_attention, rotary, tokens, true_norm
from tests._selection import others_slow
from tests._tiny_models import tiny, token_ids

N = 5


def _window(n: int) -> torch.Tensor:
    i = torch.arange(n)
    return (i[:, None] - i[None, :]).abs() <= 1


ATTENTIONS = {
    "one head": random_attention(0, heads=1),
    "no bias": random_attention(1, heads=1, biases=False, temperature=3.0),
    "causal": random_attention(2, heads=1, causal=True),
    "window": random_attention(3, heads=1, mask=_window(N)),
    "several heads": random_attention(4),
    "several heads, causal": random_attention(5, causal=True, kv_heads=1),
    "several heads, window": random_attention(6, mask=_window(N)),
    "concatenated": random_attention(7, d_out=None),
}


@settings(max_examples=3, deadline=None)
@given(
    name=st.sampled_from(sorted(ATTENTIONS)),
    seed=st.integers(0, 10**6),
    size=st.floats(0.1, 4.0),
)
def test_truth_lies_below_every_upper_bound(name: str, seed: int, size: float) -> None:
    f, x = ATTENTIONS[name], size * tokens(seed, N, D)
    truth = float(true_norm(f, x[None])[0])
    frame = table(f, x)
    assert float(best(f, x).value) >= truth
    upper = frame[frame.side == "upper"]
    assert len(upper) >= 3
    assert float(upper.value.min()) >= truth * (1 - 1e-12)
    # Lower bounds are on the ball, except those at X.
    local = frame[(frame.side == "lower") & (frame.index == "‖D_X f‖")]
    assert float(local.value.max()) <= truth * (1 + 1e-12)
    assert truth <= float(best(f, length=N, radius=float(x.norm(dim=1).max())).value)


@pytest.mark.parametrize("name", others_slow(ATTENTIONS, ["one head", "several heads, window"]))
def test_lower_bounds_stay_below_upper_bounds_on_the_ball(name: str) -> None:
    f = ATTENTIONS[name]
    for radius in (0.3, 10.0):
        frame = table(f, length=N, radius=radius)
        lowers, uppers = frame[frame.side == "lower"], frame[frame.side == "upper"]
        assert float(uppers.value.min()) > 0
        if len(lowers):
            assert 0 < float(lowers.value.max()) <= float(uppers.value.min())
            low = best(f, length=N, radius=radius, side="lower")
            assert low.value == float(lowers.value.max())
        assert best(f, length=N, radius=radius).value == float(uppers.value.min())


def test_table_is_sorted_and_says_what_fails() -> None:
    frame = table(ATTENTIONS["one head"], tokens(0, N, D))
    assert list(frame.columns) == ["name", "side", "value", "holds", "source"]
    assert frame.index.name == "quantity"
    assert frame.value.is_monotonic_increasing
    assert frame.attrs["log_values"] == sorted(frame.attrs["log_values"])
    assert frame.attrs["radius"] == pytest.approx(float(tokens(0, N, D).norm(dim=1).max()))
    assert frame.attrs["radius_from"] == "the longest token of X"
    row = frame[frame.name == "theorem_3_3"].iloc[0]
    assert not row.holds
    assert math.isinf(row.value)
    assert "needs: no query bias, which ball_upper_bound allows" in row.source
    measured = frame[frame.name == "measured"]
    truth = float(true_norm(ATTENTIONS["one head"], tokens(0, 1, N, D))[0])
    low, high = sorted(measured.value)
    assert low <= truth * (1 + 1e-12)
    assert truth <= high * (1 + 1e-12)
    assert high - low <= 1e-6 * truth


def test_what_overflows_keeps_its_logarithm() -> None:
    frame = table(ATTENTIONS["no bias"], length=50, radius=100.0)
    at = list(frame.name).index("theorem_3_5")
    assert math.isinf(frame.value.iloc[at])
    assert frame.holds.iloc[at]
    assert 700 < frame.attrs["log_values"][at] < math.inf
    assert not frame.value.isna().any()


def test_every_length_at_once() -> None:
    f = ATTENTIONS["no bias"]
    free = best(f, radius=0.3)
    assert free.name == "mean_field_upper_bound"
    for n in (1, 10, 10**6, 10**400):
        assert best(f, length=n, radius=0.3).value <= free.value
    assert best(ATTENTIONS["causal"], radius=0.3).name == "causal_mean_field_upper_bound"


def test_radius_comes_from_the_norm_layer_of_a_site() -> None:
    (site,) = hs.capture(tiny("gpt2"), token_ids(1, 7), layers=[1], scope="head", heads=[2])
    frame = table(site)
    assert site.norm is not None
    assert frame.attrs["radius"] == norm_radius(site.norm)
    assert frame.attrs["radius_from"] == "the LayerNorm before the attention"
    assert frame.attrs["length"] == 7
    assert table(site, length=20).attrs["length"] == 20
    truth = float(true_norm(site.map, site.x)[0])
    assert truth <= best(site).value <= best(site, length=7).value
    assert best(site, radius=100.0, length=7).value > best(site, length=7).value


def test_rotary_positions_have_certificates_and_one_bound_on_a_ball() -> None:
    f = random_attention(8, heads=1, rotary=rotary(N, 4))
    x = tokens(3, N, D)
    names = set(table(f, x).name)
    assert names == {"measured", "any_scores_ball_upper_bound", "certificate"}
    assert best(f, x).value >= float(true_norm(f, x[None])[0])
    with pytest.raises(ArgumentError, match="rotary positions, with which A depends"):
        best(f, length=4, radius=1.0, side="lower")


def test_head_and_parameters_are_taken_as_well() -> None:
    f = ATTENTIONS["no bias"]
    parameters = parameters_of(f)
    head = parameters.folded(0)
    assert best(head, length=9, radius=2.0).value == pytest.approx(
        best(f, length=9, radius=2.0).value, rel=1e-9
    )
    assert best(head, tokens(0, N, D)).value == pytest.approx(best(f, tokens(0, N, D)).value, rel=1e-6)
    assert best(parameters, length=9, radius=2.0).value == best(f, length=9, radius=2.0).value
    several = parameters_of(ATTENTIONS["several heads"])
    assert (
        best(several, length=9, radius=2.0).value
        == best(ATTENTIONS["several heads"], length=9, radius=2.0).value
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 0, "radius": 1.0}, "length: expected a whole number of tokens n >= 1, got 0"),
        ({"length": 2.5, "radius": 1.0}, "length: expected a whole number"),
        ({"length": True, "radius": 1.0}, "length: expected a whole number"),
        ({"length": 5, "radius": 0.0}, "radius: expected a finite number > 0"),
        ({"length": 5, "radius": -1.0}, "radius: expected a finite number > 0"),
        ({"length": 5, "radius": math.nan}, "radius: expected a finite number > 0"),
        ({"length": 5, "radius": math.inf}, "radius: expected a finite number > 0"),
        ({"length": 5}, "radius: expected a finite number > 0, as there is no norm layer"),
        ({"X": tokens(0, N, D), "radius": 0.1}, "radius: expected at least the largest norm of a token"),
        ({"X": tokens(0, N, D), "length": 3}, "length: expected the length of X, 5"),
        ({"X": tokens(0, N, D + 1)}, r"X: expected tokens of shape \(n, 6\)"),
        ({"X": tokens(0, 2, N, D)}, "one sequence"),
        ({"X": 10, "length": 4.0}, "X: expected tokens .* got 10. For a bound on a ball, give length and"),
        ({"X": tokens(0, N, D + 1).numpy()}, r"X: expected tokens of shape \(n, 6\), .* got shape \(5, 7\)"),
        ({"X": [[1.0, 2.0], [3.0]]}, "X: expected tokens .* got list"),
        ({"X": [["a"] * D]}, "X: expected tokens .* got list"),
        ({"X": 1j * tokens(0, N, D)}, r"X: expected tokens .* got torch\.complex128"),
        ({"length": 5, "radius": "2"}, "radius: expected a finite number > 0"),
        ({"X": tokens(0, N, D), "side": "lower"}, "side: expected 'upper' with X"),
        ({"length": 5, "radius": 1.0, "side": "left"}, "side: expected 'upper' or 'lower'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        best(ATTENTIONS["one head"], **arguments)


def test_what_is_no_attention_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a SelfAttention, a captured site or a Head, got Linear"):
        best(torch.nn.Linear(3, 3), length=5, radius=1.0)
    with pytest.raises(ArgumentError, match="as no upper bound for this attention holds for every length"):
        best(ATTENTIONS["several heads"], radius=1.0)
    site = hs.capture(tiny("bert"), token_ids(2, 5), layers=[0])[0]
    with pytest.raises(ArgumentError, match="one sequence"):
        table(site)


# ---- attention after a norm layer


def _layer(kind: str, eps: float) -> hs.LayerNorm | hs.RMSNorm:
    gain = tokens(20, D)
    return hs.LayerNorm(gain, tokens(21, D), eps) if kind == "LayerNorm" else hs.RMSNorm(gain, eps)


def test_pre_norm_composition_needs_eps() -> None:
    bound = pre_norm_upper_bound(
        ATTENTIONS["one head"], hs.RMSNorm(torch.ones(D, dtype=torch.float64), 0.0), N
    )
    assert not bound.holds
    assert math.isinf(bound.value)
    with pytest.raises(ArgumentError, match=r"X: expected tokens of shape \(5, 6\)"):
        pre_norm_upper_bound(ATTENTIONS["one head"], _layer("RMSNorm", 0.1), N, tokens(0, 3, D))


def test_tokens_that_are_zero_or_not_numbers() -> None:
    f = ATTENTIONS["one head"]
    zero = torch.zeros(N, D, dtype=torch.float64)
    assert best(f, zero).value >= float(true_norm(f, zero[None])[0]) > 0
    assert not table(f, zero).value.isna().any()
    with pytest.raises(ArgumentError, match="X: expected finite numbers"):
        best(f, zero * math.nan)


def test_lower_bounds_of_the_mean_field_constant() -> None:
    head = Head(-2.0 * torch.eye(3), torch.eye(3))
    low, high = best(head, radius=1.5, side="lower"), best(head, radius=1.5)
    assert low.quantity == high.quantity == "Lip_W2(F on P(B_R))"
    assert 0.1 * high.value < low.value < high.value
    names = set(table(head, radius=1.5).name)
    assert names == {
        "theorem_3_5",
        "mean_field_upper_bound",
        "proposition_3_6",
        "proposition_3_6_rate",
        "weighted_two_atom_lower_bound",
        "two_dirac",
    }
    # They are statements about measures: none about a given number of tokens.
    assert not any(name.startswith("proposition_3_6") for name in table(head, length=4, radius=1.5).name)


def test_pre_norm_composition_where_it_is_an_equality() -> None:
    """A = 0, V = I: the norm alone, of derivative √d/s at right angles to the token; 1/√eps near zero."""
    zero, eye = torch.zeros(1, 1, D, dtype=torch.float64), torch.eye(D, dtype=torch.float64)[None]
    f, norm = hs.SelfAttention(zero, zero, eye), hs.RMSNorm(torch.ones(D, dtype=torch.float64), 0.01)
    x = tokens(1, 1, D)
    truth = float(torch.linalg.matrix_norm(dense_jacobian(hs.Compose(f, norm), x), 2))
    assert pre_norm_upper_bound(f, norm, 1, x).value == pytest.approx(truth, rel=1e-9)
    assert pre_norm_upper_bound(f, norm, 1).value == pytest.approx(10.0, rel=1e-9)
    # Of several tokens each counts with its own length.
    two = torch.cat([x, 10 * x])
    truth = float(torch.linalg.matrix_norm(dense_jacobian(hs.Compose(f, norm), two), 2))
    assert pre_norm_upper_bound(f, norm, 2, two).value == pytest.approx(truth, rel=1e-9)


def test_a_token_longer_by_a_rounding_error_enlarges_the_ball() -> None:
    x = tokens(0, N, D)
    longest = float(x.norm(dim=1).max())
    radius = table(ATTENTIONS["one head"], x, radius=longest / (1 + 5e-7)).attrs["radius"]
    assert longest <= radius <= longest * (1 + 1e-13)
