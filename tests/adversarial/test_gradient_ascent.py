"""Ascent: gradients against finite differences, honest history, domains kept, and what it reaches."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth import adversarial
from howsmooth.adversarial import Around, Ball, Ellipsoid, ascend, gradient_ascent, repeated_token_search
from howsmooth.adversarial.repeated_token_search import RepeatedTokens, search_atoms
from howsmooth.bounds.attention_parameters import Head, parameters_of
from howsmooth.bounds.ball_upper_bounds import ball_upper_bound, causal_ball_upper_bound
from howsmooth.bounds.bound import Bound
from howsmooth.errors import ArgumentError, NonFiniteError
from tests._cases import CASES, D, dense_jacobian, random_attention, rotary, tokens, true_norm
from tests._selection import others_slow

QUICK = {"steps": 6, "atom_restarts": 4, "atom_steps": 16}
FEW = {"steps": 3, "atom_restarts": 2, "atom_steps": 8}


def head_of(seed: int, **keywords: object) -> hs.SelfAttention:
    f = random_attention(seed, heads=1, biases=False, temperature=3.0)
    return hs.SelfAttention(f.query, f.key, f.value, **keywords)


def norm_at(f: hs.SelfAttention, x: Tensor) -> float:
    return float(true_norm(f, x[None])[0])


def assert_what_was_climbed_on_is_what_is_returned(ascent: adversarial.Ascent) -> None:
    """Else the steps left the domain, and only the end was projected back."""
    best = ascent.history[ascent.history.accepted].value.max()
    assert ascent.value == pytest.approx(best, rel=2e-3)


# ---- gradients


@pytest.mark.parametrize(
    "case", ["multi-head", "causal", "rotary", "post-norm", "masked", "softcap", "sinks"]
)
def test_gradient_of_the_leading_singular_value(case):
    n = 4
    f = CASES[case](n)
    x, direction = tokens(30, n, D), tokens(31, n, D)
    found = hs.local_lipschitz(f, x[None], rtol=1e-9, seed=1)
    gradient = gradient_ascent._gradient_of_pairing(
        f, x[None], found.output_direction, found.input_direction
    )[0]
    step = 1e-5
    difference = (norm_at(f, x + step * direction) - norm_at(f, x - step * direction)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(difference, rel=1e-4)


# ---- few atoms


@pytest.mark.parametrize("heads", [1, 3])
def test_a_sequence_of_atoms_has_the_norm_of_the_weighted_jacobian_or_of_a_split_atom(heads):
    f = random_attention(32, heads=heads, temperature=2.0)
    counts = (1, 3, 2)
    points = tokens(33, 3, D)
    x = RepeatedTokens("", points, counts).tokens()
    problem = repeated_token_search._Problem.of(f, [counts])

    def pair(v: Tensor, u: Tensor) -> Tensor:
        return repeated_token_search._pairing(f, problem, points[None], u[None], v[None])

    u0 = torch.zeros(3, f.d_out, dtype=torch.float64)
    rows = [
        torch.autograd.functional.jacobian(lambda v, u=u: pair(v, u)[0], torch.zeros(3, D).double()).flatten()
        for u in (
            u0.flatten().index_fill(0, torch.tensor(i), 1.0).reshape(u0.shape) for i in range(u0.numel())
        )
    ]
    weighted = float(torch.linalg.matrix_norm(torch.stack(rows), 2))
    j = dense_jacobian(f, x).reshape(len(x), f.d_out, len(x), D)
    # an atom of multiplicity two moved apart: J_ii − J_ij for two of its copies
    split = max(float(torch.linalg.matrix_norm(j[i, :, i] - j[i, :, i + 1], 2)) for i in (1, 4))
    assert max(weighted, split) == pytest.approx(norm_at(f, x), rel=1e-9)


@pytest.mark.parametrize(
    ("heads", "causal"),
    others_slow([(1, False), (1, True), (2, False), (2, True)], [(1, True), (2, False)]),
)
def test_values_of_atoms_are_lower_limits_and_near(causal, heads):
    f = random_attention(34, heads=heads, temperature=3.0, causal=causal)
    search = search_atoms(
        f, 12, Ball(2.0), [], restarts=8, steps=60, generator=torch.Generator().manual_seed(0)
    )
    assert len(search.found) == len(search.values)
    for atoms, value in zip(search.found, search.values.tolist(), strict=True):
        x = atoms.tokens()
        assert x.shape == (12, D)
        assert Ball(2.0).contains(x)
        true = norm_at(f, x)
        assert value <= true * (1 + 1e-9)
    best = search.found[0].tokens()
    assert float(search.values[0]) >= 0.95 * norm_at(f, best)
    assert search.values.tolist() == sorted(search.values.tolist(), reverse=True)


def test_light_rows_of_long_causal_sequences_are_grouped_without_losing_any():
    f = head_of(35, causal=True)
    for light in (1, 2, 47, 48, 49, 1000, 12345):
        weights = repeated_token_search._Problem.of(f, [(1, 1, light)]).row_weight.square()
        assert float(weights.sum()) == pytest.approx(light + 2)


def test_atoms_of_a_sequence():
    x = adversarial.two_heavy_tokens(head_of(36), 9, 1.0).x
    atoms = RepeatedTokens.of("two_heavy_tokens", x)
    assert atoms is not None
    assert atoms.counts == (1, 1, 7)
    assert torch.equal(atoms.tokens(), x)
    assert RepeatedTokens.of("many", tokens(37, 9, D)) is None


# ---- what it finds


@pytest.mark.parametrize("causal", [False, True])
def test_finds_more_than_the_constructions_and_less_than_the_bound(causal):
    f = head_of(38, causal=causal)
    n, radius = 8, 1.5
    built = adversarial.constructions(f, n, radius)
    best = max(float(hs.local_lipschitz(f, c.x).value) for c in built)
    ascent = ascend(f, n, radius, **QUICK)
    bound: Bound = (causal_ball_upper_bound if causal else ball_upper_bound)(f, n, radius)
    assert best * (1 - 1e-6) <= ascent.value <= bound.value
    assert float(ascent.estimate.value) == pytest.approx(norm_at(f, ascent.x), rel=1e-4)
    assert Ball(radius).contains(ascent.x)
    papers = next(c for c in built if c.name == "two_cluster")
    assert ascent.value > 1.5 * float(hs.local_lipschitz(f, papers.x).value)


def test_from_random_starts_alone_it_climbs():
    f = random_attention(39, heads=2, temperature=3.0, mask=torch.ones(5, 5, dtype=torch.bool))
    ascent = ascend(f, 5, 1.5, starts=[], random_starts=2, steps=20)
    first = ascent.history[ascent.history.step == 0].value.max()
    assert ascent.value > 1.5 * first


def test_rotary_positions_and_wider_scopes():
    for f in (random_attention(40, rotary=rotary(6, 4)), CASES["residual"](6), CASES["pre-norm"](6)):
        ascent = ascend(f, 6, 1.2, **FEW, random_starts=1)
        assert ascent.value >= ascent.history.value.max() * (1 - 1e-3)
        assert ascent.x.shape == (6, D)


OTHER_SCORES = ["score bias", "softcap", "sinks", "norms of queries and keys, rotary, causal"]


@pytest.mark.parametrize("name", others_slow(OTHER_SCORES, ["score bias", OTHER_SCORES[-1]]))
def test_other_scores_are_climbed_between_their_starts_and_their_bound(name):
    f = CASES[name](5)
    found = ascend(f, 5, 2.0, random_starts=2, steps=8)
    first = found.history[found.history["step"] == 0]
    assert found.value > float(first["value"].max()) * 1.01
    assert found.value == pytest.approx(float(true_norm(f, found.x[None])[0]), rel=2e-4)
    assert found.value <= hs.bounds.best(f, length=5, radius=2.0).value
    assert any("cluster" in start or "heavy" in start for start in first["start"])


def test_the_constant_that_is_found_does_not_fall_with_the_length_of_a_causal_sequence():
    # At this radius softmax is saturated at random tokens, from which a search alone finds less at 16 tokens.
    f = head_of(3, causal=True, rotary=rotary(32, 4))
    effort = {"random_starts": 1, "steps": 6}
    short, long = (adversarial.ascend(f, n, 60.0, **effort) for n in (8, 16))
    assert long.value >= short.value * (1 - 1e-3)
    assert "first 8 tokens" in set(long.history["start"])
    # Attention that may have a search among atoms, which is left out in the shorter sequences too.
    plain = adversarial.ascend(head_of(3, causal=True), 16, 1.0, **effort, atom_restarts=0)
    assert len(plain.history) < 1000


def test_a_token_near_zero_is_a_start_where_queries_have_a_norm():
    f = CASES["norms of queries and keys, rotary, causal"](5)
    sharp = f._rebuilt(query_norm=hs.RMSNorm(f.query_norm.weight, 1e-8), query_bias=None)
    history = ascend(sharp, 5, 2.0, random_starts=2, steps=0).history
    first = history[history["step"] == 0].set_index("start")["value"]
    assert first["zero query, head 0"] > 20 * first["random 0"]


def test_the_norm_layer_as_domain():
    norm = hs.LayerNorm(tokens(41, D).abs(), tokens(42, D), 1e-5)
    f = random_attention(43, heads=2, temperature=2.0)
    ascent = ascend(f, 6, domain=Ellipsoid(norm), **FEW)
    assert Ellipsoid(norm).contains(ascent.x, tol=1e-7)
    assert Ellipsoid(norm).contains(norm(tokens(44, 6, D)))
    assert ascent.value > float(hs.local_lipschitz(f, norm(tokens(44, 6, D))).value)
    assert_what_was_climbed_on_is_what_is_returned(ascent)


@pytest.mark.parametrize("per_token", [False, True])
def test_around_given_tokens(per_token):
    f = random_attention(45, heads=2, temperature=2.0)
    centre = tokens(46, 6, D)
    domain = Around(centre, 0.5, per_token=per_token)
    ascent = ascend(f, domain=domain, steps=8)
    assert domain.contains(ascent.x)
    assert ascent.value > 1.05 * norm_at(f, centre)
    assert "centre" in set(ascent.history.start)
    assert_what_was_climbed_on_is_what_is_returned(ascent)


def test_the_smaller_dimension_that_a_head_sees_loses_nothing():
    d, k, n = 30, 3, 6
    f = hs.SelfAttention(*(tokens(47 + i, 1, k, d) / math.sqrt(d) for i in range(3)), scale=2.0)
    basis = gradient_ascent._basis(f, Ball(1.0))
    assert basis is not None
    assert basis.shape == (d, 3 * k)
    assert gradient_ascent._basis(f, Around(tokens(50, n, d), 1.0)) is None
    x = tokens(51, n, d)
    small = gradient_ascent._compressed(f, basis)
    assert norm_at(small, x @ basis) == pytest.approx(norm_at(f, x), rel=1e-9)
    ascent = ascend(f, n, 3.0, **FEW)
    assert ascent.x.shape == (n, d)
    assert ascent.value == pytest.approx(norm_at(f, ascent.x), rel=1e-4)


def test_float32_maps():
    f = random_attention(52, heads=2, dtype=torch.float32)
    ascent = ascend(f, 5, 1.5, **FEW)
    assert ascent.x.dtype == torch.float32
    assert bool(ascent.estimate.converged)
    assert float(ascent.x.norm(dim=1).max()) <= 1.5 * (1 + 1e-6)


# ---- the history


def test_the_history_is_reproducible_and_complete():
    f = head_of(53)
    rows: list[dict[str, object]] = []
    first = ascend(f, 6, 1.5, **FEW, seed=3, on_evaluation=rows.append)
    second = ascend(f, 6, 1.5, **FEW, seed=3)
    pd.testing.assert_frame_equal(first.history, second.history)
    assert torch.equal(first.x, second.x)
    assert first.history.value.tolist() != ascend(f, 6, 1.5, **FEW, seed=4).history.value.tolist()
    assert list(first.history.columns) == ["start", "step", "value", "step_size", "accepted", "converged"]
    whole = first.history[first.history.converged]
    assert len(rows) == len(whole) - 1  # but for the measurement at the end
    atoms = first.history[~first.history.converged]
    assert len(atoms) > FEW["atom_restarts"] * FEW["atom_steps"]
    assert not atoms.accepted.any()


def test_accepted_values_only_rise():
    history = ascend(head_of(54), 6, 1.5, **QUICK).history
    risen = history[history.accepted]
    assert len(risen) > 10
    assert all(part.value.is_monotonic_increasing for _, part in risen.groupby("start"))
    tried = history[(history.step_size > 0) & history.converged]
    for _, part in tried.groupby("start"):
        sizes, accepted = part.step_size.tolist(), part.accepted.tolist()
        for size, following, success in zip(sizes, sizes[1:], accepted, strict=False):
            assert following == pytest.approx(min(1.0, 1.3 * size) if success else 0.4 * size)


def test_a_value_that_did_not_converge_is_never_accepted(monkeypatch):
    calls = 0
    measure = gradient_ascent.local_lipschitz

    def doubtful(*arguments: object, **keywords: object) -> hs.LipschitzEstimate:
        nonlocal calls
        calls += 1
        found = measure(*arguments, **keywords)
        if calls == 1:
            return found
        # large, but not certain
        return replace(found, value=found.value * 100, converged=torch.zeros_like(found.converged))

    monkeypatch.setattr(gradient_ascent, "local_lipschitz", doubtful)
    f, start = head_of(55), Ball(1.5).random(torch.Generator().manual_seed(0), 6, D)
    ascent = ascend(f, 6, 1.5, starts=[start], random_starts=0, steps=5)
    history = ascent.history
    assert not history[history.step.between(1, 5)].accepted.any()
    assert torch.allclose(ascent.x, start)


def test_steep_starts_that_do_not_converge_count_with_their_lower_limit():
    # Scores of 1e10 leave few digits: the interval of the steepest start is wider than rtol.
    parameters = 10 * torch.randn(3, 1, 3, 3, generator=torch.Generator().manual_seed(3)).double()
    f = hs.SelfAttention(*parameters)
    found = ascend(f, 4, 1e4, steps=2, atom_restarts=0)
    built = adversarial.two_heavy_tokens(f, 4, 1e4)
    assert found.value >= float(hs.local_lipschitz(f, built.x).lower) > 1e9
    assert "not converged" in repr(found)


def test_starts_of_which_float64_knows_no_digit_are_left_out():
    f = head_of(3)
    ordinary, huge = tokens(5, 4, D), 1e12 * tokens(6, 4, D)
    with pytest.raises(NonFiniteError):
        hs.local_lipschitz(f, huge)
    found = ascend(f, 4, 1e14, starts=[huge, ordinary], random_starts=0, steps=0)
    assert found.start == "given 1"
    with pytest.raises(NonFiniteError, match=r"^radius: .* norm at most 1e\+12\. Take a smaller radius\.$"):
        ascend(f, 4, 1e12, starts=[huge], random_starts=0, steps=0)
    narrow = f.to(dtype=torch.float32)
    with pytest.raises(NonFiniteError, match=r"smaller radius, or f\.to\(dtype=torch\.float64\)\.$"):
        ascend(narrow, 4, 1e6, starts=[1e-6 * huge], random_starts=0, steps=0)


def test_starts_of_ones_own():
    f = head_of(56)
    built = adversarial.two_heavy_tokens(f, 6, 1.5)
    ascent = ascend(f, 6, 1.5, starts=[built, tokens(57, 6, D)], random_starts=0, steps=4)
    assert set(ascent.history.start) == {"two_heavy_tokens", "given 1"}
    assert ascent.value >= norm_at(f, built.x) * (1 - 1e-6)


def test_refusals():
    f, near = head_of(58), Around(tokens(59, 4, D), 1.0)
    for arguments, keywords, words in (
        ((torch.sin, 5, 1.0), {}, "map of this library"),
        ((f, 5), {}, "radius"),
        ((f, 5, 1.0), {"domain": Ball(1.0)}, "radius"),
        ((f, 5, 0.0), {}, "radius"),
        ((f, 5, Ball(1.0)), {}, "domain="),
        ((Head(torch.eye(2), torch.eye(2)), 5, 1.0), {}, r"hs\.SelfAttention"),
        ((f, 0, 1.0), {}, "length"),
        ((f, 5), {"domain": near}, "length"),
        ((f,), {"domain": Around(tokens(59, 4, D + 1), 1.0)}, "dimension"),
        ((f, 5, 1.0), {"starts": [tokens(60, 4, D)]}, "starts"),
        ((f, 5, 1.0), {"starts": [], "random_starts": 0}, "starts"),
        ((f, 5, 1.0), {"steps": -1}, "steps"),
        ((f, 5, 1.0), {"seed": 0.5}, "seed"),
        ((f, 5, 1.0), {"objective": "max"}, "objective"),
    ):
        with pytest.raises(ArgumentError, match=words):
            ascend(*arguments, **keywords)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_random_heads_at_64_dimensions(causal):
    ratios = []
    for seed in range(4):
        query, key, value = (tokens(70 + 3 * seed + i, 1, 32, 64) / 8 for i in range(3))
        f = hs.SelfAttention(query, key, value, causal=causal)
        ascent = ascend(f, 100, 8.0, steps=40)
        paper = float(hs.local_lipschitz(f, adversarial.two_cluster(f, 100, 8.0).x).value)
        ratios.append(ascent.value / paper)
        bound = (causal_ball_upper_bound if causal else ball_upper_bound)(parameters_of(f), 100, 8.0)
        assert 0.7 * bound.value <= ascent.value <= bound.value
    assert min(ratios) > 5


# ---- the token-wise constant


@pytest.mark.parametrize("case", ["multi-head", "causal", "post-norm"])
def test_the_gradient_of_the_token_wise_constant_is_that_of_differences(case: str) -> None:
    f, x = CASES[case](5), tokens(12, 1, 5, D)

    def constant(x: Tensor) -> Tensor:
        """The constant with the directions held at their best, which the envelope theorem allows."""
        return gradient_ascent._token_wise(f, x, 1e-12, [3]).value[0]

    found = gradient_ascent._token_wise(f, x, 1e-12, [3])
    gradient = gradient_ascent._gradient_of_pairing(f, x, found.output_direction, found.input_direction)
    direction, h = tokens(13, 1, 5, D), 1e-5
    slope = (constant(x + h * direction) - constant(x - h * direction)) / (2 * h)
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-4)


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_token_wise_ascent_rises_above_random_inputs_and_keeps_below_the_bound(causal: bool) -> None:
    f, radius = random_attention(1, heads=2, d=3, d_out=3, causal=causal, biases=False), 1.5
    found = ascend(f, 5, radius, objective="token-wise", steps=4)
    assert_what_was_climbed_on_is_what_is_returned(found)
    assert found.x.norm(dim=-1).max() <= radius * (1 + 1e-12)
    again = hs.influence(f, found.x).token_wise
    assert found.value == found.estimate.value == pytest.approx(again.lower, rel=1e-4)
    drawn = [radius * torch.nn.functional.normalize(tokens(seed, 5, 3), dim=-1) for seed in range(5)]
    assert found.value > 1.1 * max(hs.influence(f, x).token_wise.lower for x in drawn)
    assert found.value <= hs.bounds.token_wise_ball_upper_bound(f, radius).value
    assert found.history["value"].iloc[-1] == found.value
