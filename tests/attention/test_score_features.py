"""Score biases, soft caps, sinks: against naive maps, transformers' own functions and autodiff."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth import adversarial, bounds
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.scaled_dot_product import cap_slope
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.bounds.pre_norm_bounds import absorb_norm
from howsmooth.dynamics import Rescaled
from howsmooth.dynamics.rescaled_tokens import value_matrix
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.jacobian.fixed_measure_derivative import frozen_derivatives
from howsmooth.measures import DiscreteMeasure
from howsmooth.paper.published_code.altered_attention import DropoutAttention, unmasked, wrong_slices
from tests._cases import CASES, D, dense_jacobian, random_attention, tokens
from tests._operators import to_dense

N = 5


def _bias(heads: int, n: int = N) -> Tensor:
    return tokens(70, heads, n, n)


def naive(f: hs.SelfAttention) -> Callable[[Tensor], Tensor]:
    """The map of its definition, one head at a time, tokens (n, d)."""

    def value(x: Tensor) -> Tensor:
        n, heads = len(x), []
        for h in range(f.heads):
            g = h // (f.heads // f.kv_heads)
            q = x @ f.query[h].T + f.query_bias[h]
            k = x @ f.key[g].T + f.key_bias[g]
            if f.rotary is not None:
                q, k = f.rotary.rotate(q), f.rotary.rotate(k)
            s = f.scale * q @ k.T
            if f.softcap is not None:
                s = f.softcap * torch.tanh(s / f.softcap)
            if f.score_bias is not None:
                s = s + f.score_bias[h % len(f.score_bias)]
            if f.causal:
                s = s - torch.full((n, n), float("inf")).triu(1).nan_to_num(0.0, posinf=float("inf"))
            if f.mask is not None:
                s = torch.where(f.mask, s, -float("inf"))
            e = s.exp()
            under = e.sum(1, keepdim=True) + (0.0 if f.sinks is None else f.sinks[h].exp())
            heads.append((e / under) @ (x @ f.value[g].T + f.value_bias[g]))
        return torch.cat(heads, dim=1) @ f.output.T + f.output_bias

    return value


@pytest.mark.parametrize(
    "name", [name for name in CASES if any(w in name for w in ("softcap", "score bias", "sinks"))]
)
def test_map_and_jacobian_are_those_of_the_definition(name: str) -> None:
    f, x = CASES[name](N), tokens(71, N, D)
    torch.testing.assert_close(f(x), naive(f)(x), rtol=1e-13, atol=1e-13)
    exact = dense_jacobian(naive(f), x)
    ours = to_dense(closed_form_jacobian(f, x[None]))[0]
    assert (ours - exact).abs().max() <= 1e-13 * max(1.0, float(exact.abs().max()))
    found = hs.local_lipschitz(f, x, rtol=1e-9)
    assert float(found.value) == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=1e-10)


def test_the_order_is_that_of_gemma_2() -> None:
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    f, x = random_attention(3, heads=4, kv_heads=2, softcap=0.8, score_bias=_bias(4)), tokens(72, N, D)
    q, k, v = (t[None] for t in f.projections(x))
    module = SimpleNamespace(num_key_value_groups=2, training=False, head_dim=f.key_dim)
    # Its softmax is in float32.
    heads, p = gemma.eager_attention_forward(
        module, q, k, v, f.score_bias[None], scaling=f.scale, softcap=f.softcap
    )
    assert p.shape == (1, 4, N, N)
    torch.testing.assert_close(f.without_output()(x), heads[0].flatten(1), rtol=1e-5, atol=1e-5)


def test_sinks_are_those_of_gpt_oss() -> None:
    oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    sinks = torch.tensor([0.5, -1.0, 2.0, 4.0], dtype=torch.float64)
    f, x = random_attention(3, heads=4, kv_heads=2, sinks=sinks), tokens(72, N, D)
    q, k, v = (t[None] for t in f.projections(x))
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
    heads, p = oss.eager_attention_forward(module, q, k, v, None, scaling=f.scale)
    assert (p.sum(-1) < 1).all()
    torch.testing.assert_close(f.without_output()(x), heads[0].flatten(1), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("sink", [-30.0, 2.0])
def test_large_common_parts_of_keys_and_values_spare_digits_with_sinks(sink: float) -> None:
    """In single precision, as the registry's cases, but with biases far larger than the rest."""
    f, x = random_attention(9, sinks=torch.full((3,), sink, dtype=torch.float64)), tokens(76, 1, N, D)
    f = f._rebuilt(value_bias=1e5 * f.value_bias, key_bias=10 * f.key_bias)
    exact = dense_jacobian(naive(f), x[0])
    single = closed_form_jacobian(f, x, dtype=torch.float32)
    error = torch.linalg.matrix_norm(to_dense(single)[0].double() - exact, 2)
    assert float(error) <= float(single.rounding[0]) * float(torch.linalg.matrix_norm(exact, 2))


def test_a_key_bias_counts_under_a_cap_and_with_sinks() -> None:
    """The softmax forgets a shift of a row of scores, cap and sinks do not."""
    x = tokens(73, N, D)
    sinks = torch.zeros(3, dtype=torch.float64)
    for keywords, same in (({}, True), ({"softcap": 0.9}, False), ({"sinks": sinks}, False)):
        f = random_attention(4, **keywords)
        g = f._rebuilt(key_bias=f.key_bias + 3.0)
        assert torch.allclose(f(x), g(x), rtol=1e-10) is same


def test_the_slope_of_a_saturated_cap_keeps_its_digits() -> None:
    s = torch.tensor([0.0, 0.3, -40.0, 600.0], dtype=torch.float64)
    expected = torch.cosh(s / 2.0) ** -2
    torch.testing.assert_close(cap_slope(s[None], 2.0)[0], expected, rtol=1e-13, atol=0)
    assert 0 < float(cap_slope(s[None], 2.0)[0, -1]) < 1e-250


def test_an_atom_that_splits_under_a_cap() -> None:
    f, x = random_attention(5, heads=4, kv_heads=2, softcap=0.6), tokens(74, N, D)
    measure = DiscreteMeasure(x, torch.tensor([0.1, 0.3, 0.2, 0.15, 0.25], dtype=torch.float64))
    found = torch.cat(list(frozen_derivatives(f, x, measure._weighting())))

    def seen_from(y: Tensor, i: int) -> Tensor:
        # A further atom of no mass at y moves as Γ_μ(y).
        weights = torch.cat((measure.log_weights, torch.tensor([-1e30], dtype=torch.float64)))
        return f._forward(torch.cat((x, y[None])), Weighting(weights))[-1]

    for i in range(N):
        exact = torch.autograd.functional.jacobian(lambda y, i=i: seen_from(y, i), x[i], vectorize=True)
        torch.testing.assert_close(found[i], exact, rtol=1e-12, atol=1e-13)


def test_related_maps_keep_what_is_done_to_scores() -> None:
    x = tokens(75, N, D)
    for bias in (_bias(4), _bias(1)):
        f = random_attention(
            6, heads=4, kv_heads=2, softcap=0.8, score_bias=bias, sinks=tokens(77, 4), d_out=None
        )
        parts = torch.cat([f.head(h)(x) for h in range(4)], dim=-1)
        torch.testing.assert_close(parts, f(x), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(f.without_output()(x), f(x))
        single = f.to(dtype=torch.float32)
        assert single.score_bias.dtype == torch.float32
        torch.testing.assert_close(single(x.float()).double(), f(x), rtol=1e-4, atol=1e-4)
    norm = hs.RMSNorm(torch.rand(D, dtype=torch.float64) + 0.5, 1e-6)
    f = random_attention(7, softcap=0.8)
    unit = x / (x.norm(dim=-1, keepdim=True) ** 2 + D * 1e-6).sqrt()
    torch.testing.assert_close(absorb_norm(f, norm)(unit), f(norm(x)), rtol=1e-11, atol=1e-12)


def _square(**keywords: object) -> hs.SelfAttention:
    return random_attention(8, heads=2, key_dim=3, value_dim=3, **keywords)


REFUSING = {
    "parameters": lambda f, folder: parameters_of(f),
    "absorbed": lambda f, folder: bounds.pre_norm_upper_bound(
        f, hs.RMSNorm(torch.ones(D, dtype=torch.float64), 1e-6), length=N
    ),
    "two clusters": lambda f, folder: adversarial.two_cluster(f, N, 1.0),
    "slices": lambda f, folder: wrong_slices(f),
    "unmasked": lambda f, folder: unmasked(hs.Residual(f)),
    "dropout": lambda f, folder: DropoutAttention(f, weights=0.1, outputs=0.1, seed=0),
    "rescaled": lambda f, folder: Rescaled(f),
}


@pytest.mark.parametrize("who", REFUSING)
@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"softcap": 2.0}, "soft-capped"),
        ({"score_bias": _bias(1)}, "a score bias"),
        ({"sinks": tokens(78, 2)}, "sinks"),
        ({"query_norm": hs.RMSNorm(torch.ones(3).double())}, "a norm of queries"),
        ({"key_norm": hs.LayerNorm(torch.ones(6).double())}, "a norm of keys"),
    ],
)
def test_what_knows_plain_scores_only_refuses_by_name(who, keywords, words, tmp_path) -> None:
    with pytest.raises(ArgumentError) as caught:
        REFUSING[who](_square(**keywords), tmp_path)
    assert words in caught.value.got


def test_tokens_that_are_equal_move_less_with_sinks_so_there_is_no_value_matrix() -> None:
    with pytest.raises(ArgumentError, match="sinks"):
        value_matrix(_square(sinks=tokens(78, 2)))


@pytest.mark.parametrize(
    ("keywords", "argument", "words"),
    [
        ({"softcap": 0.0}, "softcap", "> 0"),
        ({"sinks": torch.zeros(3).double()}, "sinks", "(2)"),
        ({"sinks": torch.zeros(2)}, "sinks", "float64"),
        ({"softcap": float("inf")}, "softcap", "inf"),
        ({"query_norm": hs.RMSNorm(torch.ones(4).double())}, "query_norm", "dimension 3, of one head, or 6"),
        ({"key_norm": hs.RMSNorm(torch.ones(3))}, "key_norm.weight", "float64"),
        ({"key_norm": torch.nn.LayerNorm(3)}, "key_norm", "a LayerNorm or RMSNorm"),
        ({"score_bias": torch.zeros(3, 4, 4).double()}, "score_bias", "(2, n, n) or (1, n, n)"),
        ({"score_bias": torch.zeros(1, 4, 5).double()}, "score_bias", "(1, 4, 5)"),
        ({"score_bias": torch.zeros(1, 4, 4)}, "score_bias", "float64"),
        (
            {"score_bias": torch.zeros(1, 4, 4).double(), "mask": torch.ones(5, 5, dtype=torch.bool)},
            "score_bias",
            "of the mask",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(keywords: dict, argument: str, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        _square(**keywords)
    assert caught.value.argument == argument
    assert words in str(caught.value)


def test_a_bias_is_finite_and_fixes_the_length() -> None:
    with pytest.raises(NonFiniteError, match="score_bias"):
        _square(score_bias=torch.full((1, 3, 3), -float("inf"), dtype=torch.float64))
    with pytest.raises(ArgumentError, match=r"n = 5 tokens, the length of the score bias"):
        _square(score_bias=_bias(1))(tokens(0, 4, D))
