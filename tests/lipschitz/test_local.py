"""local_lipschitz against dense float64 SVD, closed forms and awkward input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import howsmooth as hs
from howsmooth.errors import ArgumentError, DerivativeError, NonFiniteError
from howsmooth.jacobian import AutodiffJacobian
from howsmooth.rounding import interval_in_digits
from tests._cases import CASES, D, random_attention, tokens, true_norm
from tests._selection import others_slow


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=st.fixed_dictionaries(
        {
            "heads": st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
            "key_dim": st.integers(1, 5),
            "value_dim": st.integers(1, 5),
            "d": st.integers(1, 7),
            "d_out": st.one_of(st.none(), st.integers(1, 8)),
            "causal": st.booleans(),
            "biases": st.booleans(),
        }
    ),
    n=st.integers(1, 7),
    log_temperature=st.floats(-2, 1.5),
    radius=st.floats(0.01, 5.0),
    seed=st.integers(0, 10_000),
)
def test_agrees_with_dense_svd(shape, n, log_temperature, radius, seed) -> None:
    """1e-10 in float64, 2e-5 in float32, and the interval holds in both."""
    heads, kv_heads = shape["heads"]
    f = random_attention(
        seed, **(shape | {"heads": heads, "kv_heads": kv_heads}), temperature=10**log_temperature
    )
    single, x32 = f.to(dtype=torch.float32), radius * tokens(seed, 2, n, shape["d"], dtype=torch.float32)
    # The truth in both precisions is the exact map with the float32 numbers.
    exact, x = single.to(dtype=torch.float64), x32.double()
    truth = true_norm(exact, x)
    fine = hs.local_lipschitz(exact, x, rtol=1e-10, seed=seed, max_iterations=400)
    coarse = hs.local_lipschitz(single, x32, rtol=2e-5, seed=seed)
    assert ((fine.value - truth).abs() <= 1e-10 * truth).all()
    assert ((coarse.value - truth).abs() <= 2e-5 * truth).all()
    for estimate in (fine, coarse):
        assert (estimate.lower <= truth * (1 + 1e-13)).all()
        assert (truth <= estimate.upper * (1 + 1e-13)).all()
        assert ((estimate.lower <= estimate.value) & (estimate.value <= estimate.upper)).all()
        assert estimate.value.dtype == estimate.lower.dtype == torch.float64


# The products of every case are judged in test_jacobian_operators.
@pytest.mark.parametrize(
    "name",
    others_slow(
        CASES,
        [
            "multi-head",
            "causal grouped, hot",
            "rotary, partial, grouped, causal",
            "rank one",
            "score bias for all heads, masked",
            "sinks, softcap, score bias",
            "norms of queries and keys, rotary, causal",
            "LayerNorm",
            "post-norm",
            "scaled residual",
        ],
    ),
)
def test_every_case_in_both_precisions(name: str) -> None:
    n = 5
    f, x = CASES[name](n), tokens(0, 3, n, D)
    truth = true_norm(f, x)
    fine = hs.local_lipschitz(f, x, rtol=1e-6)
    assert fine.method == "closed form"
    assert fine.converged.all()
    torch.testing.assert_close(fine.value, truth, rtol=1e-10, atol=0)
    coarse = hs.local_lipschitz(f.to(dtype=torch.float32), x.float())
    assert coarse.converged.all()
    assert ((coarse.value - truth).abs() <= 2e-5 * truth).all()
    # The directions are the leading singular pair: a finite difference along the input direction moves
    # the output by the constant, along the output direction.
    h = 1e-6
    moved = (f(x + h * fine.input_direction) - f(x - h * fine.input_direction)) / (2 * h)
    torch.testing.assert_close(moved.flatten(1).norm(dim=1), truth, rtol=1e-6, atol=0)
    torch.testing.assert_close(moved, truth[:, None, None] * fine.output_direction, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["multi-head", "rotary, partial, grouped, causal", "post-norm", "pre-norm"])
def test_autodiff_agrees_with_closed_form(name: str) -> None:
    f, x = CASES[name](4), tokens(0, 2, 4, D)
    closed = hs.local_lipschitz(f, x, rtol=1e-9, method="closed form")
    auto = hs.local_lipschitz(f, x, rtol=1e-9, method="autodiff")
    assert (closed.method, auto.method) == ("closed form", "autodiff")
    torch.testing.assert_close(auto.value, closed.value, rtol=1e-10, atol=0)
    rounded, y = f.to(dtype=torch.float32), x.float()
    single = hs.local_lipschitz(rounded, y, method="autodiff", rtol=1e-3)
    # The value is computed in float64, for the parameters that were rounded to float32.
    exact = hs.local_lipschitz(rounded.to(dtype=torch.float64), y.double(), rtol=1e-9).value
    assert ((single.lower <= exact) & (exact <= single.upper)).all()


def test_n_copies_of_one_token_give_the_norm_of_value() -> None:
    """‖P‖ = 1 and C = 0: the constant is ‖V‖ (theory §6), and almost all singular values repeat."""
    f = random_attention(0, heads=1, value_dim=D, d_out=None)
    x = tokens(0, 1, D).expand(9, D)
    norm = float(torch.linalg.matrix_norm(f.value[0], 2))
    for dtype in (torch.float32, torch.float64):
        estimate = hs.local_lipschitz(f.to(dtype=dtype), x.to(dtype))
        assert float(estimate.value) == pytest.approx(norm, rel=1e-6)
        assert bool(estimate.converged)


def test_scaled_identity_weights_in_memory_converges_through_float64_products() -> None:
    """Uniform attention on one token is J = V; V = 3 I leaves one Krylov step and nothing to compare."""
    eye = torch.eye(20)[None]
    f = hs.SelfAttention(eye, eye, 3.0 * eye)
    estimate = hs.local_lipschitz(f, tokens(0, 1, 20, dtype=torch.float32))
    assert bool(estimate.converged)
    assert float(estimate.lower) <= 3.0 <= float(estimate.upper)
    assert estimate.input_direction.dtype == torch.float32


def test_causal_uniform_attention_is_the_cesaro_mean() -> None:
    """A = 0: f^m is the Cesàro mean, of norm 1.1441 at n = 2 (theory §4)."""
    zero, eye = torch.zeros(1, 1, 1).double(), torch.ones(1, 1, 1).double()
    f = hs.SelfAttention(zero, zero, eye, causal=True)
    two = hs.local_lipschitz(f, tokens(0, 2, 1), rtol=1e-10)
    assert float(two.value) == pytest.approx(1.1441, abs=5e-5)
    cesaro = torch.tril(torch.ones(30, 30).double()) / torch.arange(1, 31).double()[:, None]
    thirty = hs.local_lipschitz(f, tokens(1, 30, 1), rtol=1e-10)
    assert float(thirty.value) == pytest.approx(float(torch.linalg.matrix_norm(cesaro, 2)), rel=1e-10)


def test_zero_map() -> None:
    zero = torch.zeros(1, 2, 3)
    estimate = hs.local_lipschitz(hs.SelfAttention(zero, zero, zero), torch.ones(2, 4, 3))
    assert estimate.value.tolist() == estimate.upper.tolist() == [0.0, 0.0]
    assert estimate.converged.all()
    assert float(hs.local_lipschitz(lambda t: 0 * t, torch.ones(4, 3)).value) == 0.0


def test_maps_whose_products_underflow_are_measured() -> None:
    """Squares below 1e-38 and 1e-308 are zero, and so are products of weights on their way to the result."""
    for dtype, size in ((torch.float32, 1e-15), (torch.float64, 1e-150)):
        first, second = (size * tokens(seed, 4, 4) for seed in (0, 1))
        first, second = first.to(dtype), second.to(dtype)

        def f(x: Tensor, first: Tensor = first, second: Tensor = second) -> Tensor:
            return x @ first @ second

        found = hs.local_lipschitz(f, tokens(2, 3, 4).to(dtype), batch_dims=1)
        truth = (
            float(torch.linalg.matrix_norm((first.double() / size) @ (second.double() / size), 2)) * size**2
        )
        assert ((found.lower <= truth) & (truth <= found.upper)).all()
        assert found.converged.all()


def test_members_of_any_size_keep_their_digits_beside_others() -> None:
    """The Jacobian of x²/2 is diag x."""
    x = tokens(0, 5, 3, dtype=torch.float32)
    x = x * torch.tensor([1.0, 1e-25, 1e-36, 1e15, 0.0])[:, None]
    found = hs.local_lipschitz(lambda y: y * y / 2, x, batch_dims=1)
    truth = x.double().abs().amax(dim=1)
    assert ((found.lower <= truth) & (truth <= found.upper)).all()
    assert found.converged.tolist() == [True, True, True, True, True]
    assert (float(found.lower[4]), float(found.upper[4])) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_map_that_loses_its_products_is_no_zero(dtype: torch.dtype) -> None:
    small = 1e-3 * torch.finfo(dtype).tiny ** 0.7

    def f(x: Tensor) -> Tensor:
        return x * small * small * small

    with pytest.raises(NonFiniteError, match="underflow to zero inside f") as caught:
        hs.local_lipschitz(f, tokens(0, 3, 2).to(dtype), batch_dims=1)
    assert ("float64" in caught.value.remedy) == (dtype == torch.float32)
    # One number below the smallest normal one has few digits, and is not taken at its word.
    one = hs.local_lipschitz(
        lambda x: x * (1e-7 * torch.finfo(dtype).tiny), tokens(0, 1, 2).to(dtype), batch_dims=1
    )
    assert float(one.lower) == 0.0
    assert float(one.upper) >= 1e-7 * torch.finfo(dtype).tiny
    assert not one.converged.any()


def test_tokens_below_the_smallest_normal_number_are_measured() -> None:
    """Finite differences once had a step of zero there."""
    weight = tokens(0, 4, 3)
    found = hs.local_lipschitz(lambda x: x @ weight, tokens(1, 5, 4) * 1e-318, batch_dims=0)
    truth = float(torch.linalg.matrix_norm(weight, 2))
    assert float(found.lower) <= truth <= float(found.upper)
    assert bool(found.converged)


def _root_mean_square(x: Tensor) -> Tensor:
    return x / (x * x).mean(dim=-1, keepdim=True).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens_overflow", [1, 3])
def test_a_norm_whose_squares_overflow_is_no_constant(dtype: torch.dtype, tokens_overflow: int) -> None:
    """Divided by infinity, long tokens are zeros, with derivatives that are zeros."""
    x = tokens(0, 3, 2).to(dtype)
    x[:tokens_overflow] *= torch.finfo(dtype).max ** 0.75
    with pytest.raises(NonFiniteError, match="overflow inside f") as caught:
        hs.local_lipschitz(_root_mean_square, x, batch_dims=0)
    assert ("float64" in caught.value.remedy) == (dtype == torch.float32)
    # A mask of −∞ is no overflow.
    mask = torch.full((3, 3), -torch.inf, dtype=dtype).triu(1)
    found = hs.local_lipschitz(
        lambda t: (t @ t.mT + mask).logsumexp(-1), tokens(0, 3, 2).to(dtype), batch_dims=0
    )
    assert bool(found.converged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_that_underflows_in_the_map_is_no_zero(dtype: torch.dtype) -> None:
    """The derivative of (a x)(b x) is made of a x and b x, and that of x² of x alone."""
    x = tokens(0, 3, 2).to(dtype)
    tiny = torch.finfo(dtype).tiny ** 0.6
    for sizes in ((tiny, tiny, 1.0), (tiny, tiny, 1 / tiny)):
        a, b, c = sizes
        with pytest.raises(NonFiniteError, match="underflow"):
            hs.local_lipschitz(lambda t, a=a, b=b, c=c: (t * a * b) * (t * a * b) * c, x, batch_dims=0)

    def behind_a_norm(t: Tensor) -> Tensor:
        t = torch.nn.functional.layer_norm(t * tiny * tiny, (2,), eps=1.0) / tiny
        return t * t.flip(-1)

    with pytest.raises(NonFiniteError, match="underflow"):
        hs.local_lipschitz(behind_a_norm, x, batch_dims=0)
    found = hs.local_lipschitz(lambda t: t * t, x * tiny, batch_dims=0)
    truth = 2 * float((x * tiny).double().abs().max())
    assert float(found.lower) <= truth <= float(found.upper)


def test_a_derivative_that_overflows_is_called_infinite_and_not_wrong() -> None:
    gelu = torch.nn.GELU(approximate="tanh")
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        hs.local_lipschitz(gelu, tokens(0, 3, 2).float() * 1e26, batch_dims=0)


def test_lost_digits_of_a_saturated_softmax_are_seen_with_the_default_seed() -> None:
    """A check along one vector on both sides cannot see entries that are zero in J and in Jᵀ."""
    x = torch.tensor([[60.0, -61.0, 40.4], [-50.0, -159.0, -27.7]])
    with pytest.raises(DerivativeError, match="saturated softmax"):
        hs.local_lipschitz(lambda t: torch.softmax(t, dim=-1), x, batch_dims=0)


def test_a_derivative_that_is_not_transposed_is_refused_with_the_default_seed() -> None:
    """Then J and what is called Jᵀ agree in ⟨J e, e⟩, whatever e is."""
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)

    class Turn(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x @ (torch.eye(2, dtype=torch.float64) + turn)

        @staticmethod
        def setup_context(ctx: object, inputs: object, output: object) -> None:
            pass

        @staticmethod
        def backward(ctx: object, u: Tensor) -> Tensor:
            return u @ (torch.eye(2, dtype=torch.float64) + turn)

        @staticmethod
        def jvp(ctx: object, e: Tensor) -> Tensor:
            return e @ (torch.eye(2, dtype=torch.float64) + turn)

    with pytest.raises(DerivativeError):
        hs.local_lipschitz(Turn.apply, tokens(0, 3, 2), batch_dims=0)


def test_homogeneous_in_value_and_blind_to_biases_of_key_and_value() -> None:
    f, x = random_attention(1), tokens(1, 5, D)
    base = hs.local_lipschitz(f, x, rtol=1e-10).value
    doubled = hs.local_lipschitz(f._rebuilt(value=2 * f.value), x, rtol=1e-10).value
    shifted = hs.local_lipschitz(
        f._rebuilt(key_bias=f.key_bias + 7, value_bias=None, output_bias=None), x, rtol=1e-10
    ).value
    torch.testing.assert_close(doubled, 2 * base, rtol=1e-10, atol=0)
    torch.testing.assert_close(shifted, base, rtol=1e-9, atol=0)


def test_batch_axes_and_shapes() -> None:
    f, x = random_attention(2, d_out=4), tokens(2, 2, 3, 5, D)
    estimate = hs.local_lipschitz(f, x)
    assert estimate.value.shape == estimate.converged.shape == estimate.iterations.shape == (2, 3)
    assert estimate.input_direction.shape == (2, 3, 5, D)
    assert estimate.output_direction.shape == (2, 3, 5, 4)
    single = hs.local_lipschitz(f, x[1, 2], seed=0)
    assert single.value.shape == ()
    assert float(single.value) == pytest.approx(float(estimate.value[1, 2]), rel=1e-4)


def test_a_member_depends_on_its_own_input_and_seed_only() -> None:
    f, x = random_attention(3), tokens(3, 4, 5, D)
    together = hs.local_lipschitz(f, x, seed=[10, 11, 12, 13])
    for i in range(4):
        alone = hs.local_lipschitz(f, x[i], seed=[10 + i])
        torch.testing.assert_close(alone.value, together.value[i], rtol=1e-12, atol=0)
        torch.testing.assert_close(alone.upper, together.upper[i], rtol=1e-9, atol=0)
        assert int(alone.iterations) == int(together.iterations[i])
    assert torch.equal(together.value, hs.local_lipschitz(f, x, seed=[10, 11, 12, 13]).value)
    other = hs.local_lipschitz(f, x, seed=[20, 11, 12, 13])
    assert float(other.upper[0]) != float(together.upper[0])


@pytest.mark.parametrize(("seed", "shape"), [(0, (1, 4)), (0, (5, 8)), (2**32 - 1, (3, 7))])
@pytest.mark.parametrize("move", ["as drawn", "normed", "centred"])
def test_tokens_drawn_with_the_same_seed_do_not_repeat_the_start(seed, shape, move) -> None:
    """The Jacobian of a norm layer is zero along its tokens, and a start along them showed nothing of it:
    where small seeds were PyTorch's own, the upper limit was up to an eighth below the norm.
    """
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if move == "normed":
        x = torch.nn.functional.normalize(x, dim=-1)
    elif move == "centred":
        x = 3.0 * (x - x.mean(dim=-1, keepdim=True))
    f = hs.RMSNorm(torch.ones(shape[1], dtype=torch.float64), eps=1e-9)
    mixed = torch.eye(shape[0], dtype=torch.float64) + 0.1
    for g in (f, hs.LayerNorm(f.weight, eps=1e-9), lambda x: torch.tanh(mixed @ f(x))):
        blocks = torch.func.jacrev(g)(x)
        norm = torch.linalg.matrix_norm(blocks.reshape(x.numel(), -1), 2)
        est = hs.local_lipschitz(
            g, x, batch_dims=None if isinstance(g, hs.LayerNorm | hs.RMSNorm) else 0, seed=seed
        )
        assert est.lower <= norm * (1 + 1e-9)
        assert norm <= est.upper * (1 + 1e-9)
        first = torch.linalg.matrix_norm(blocks[0, :, 0], 2)
        found = hs.influence(g, x, outputs=0, seed=seed)
        assert found.lower[0, 0] <= first * (1 + 1e-9)
        assert first <= found.upper[0, 0] * (1 + 1e-9)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (1, 1)])
def test_factors_that_cancel_do_not_spoil_float32(heads: int, kv_heads: int) -> None:
    """Here W_O W_V is small against its factors, and float32 products alone are off by more than 2e-5."""
    shape = {"heads": heads, "kv_heads": kv_heads, "key_dim": 2, "d": 1, "d_out": 2}
    f = random_attention(3077, **shape, temperature=10.0, biases=False, dtype=torch.float32)
    x = 3.0 * tokens(3077, 2, 2, 1, dtype=torch.float32)
    truth = true_norm(f, x)
    estimate = hs.local_lipschitz(f, x, rtol=2e-5)
    assert ((estimate.value - truth).abs() <= 2e-6 * truth).all()
    assert ((estimate.lower <= truth * (1 + 1e-13)) & (truth <= estimate.upper)).all()


def test_float32_autodiff_allows_for_rounding_that_it_cannot_see() -> None:
    """At scores in the hundreds the float32 map itself is off; the interval must say so."""
    f = random_attention(8, temperature=300.0, heads=1).to(dtype=torch.float32)
    x = tokens(8, 6, 9, D, dtype=torch.float32)
    truth = true_norm(f, x)
    checked = hs.local_lipschitz(f, x, method="autodiff", rtol=1e-3)  # in float64
    assert ((checked.lower <= truth * (1 + 1e-13)) & (truth <= checked.upper)).all()
    assert checked.converged.all()
    estimate = hs.local_lipschitz(lambda t: f(t), x, rtol=1e-3)
    assert ((estimate.value - truth).abs() > 40 * torch.finfo(torch.float32).eps * truth).any()
    assert ((estimate.lower <= truth * (1 + 1e-13)) & (truth <= estimate.upper)).all()


def test_float32_autodiff_is_checked_in_float64_only_if_that_fits() -> None:
    f, x = random_attention(8).to(dtype=torch.float32), tokens(8, 9, D, dtype=torch.float32)
    checked, unchecked = (
        hs.local_lipschitz(f, x, method="autodiff", rtol=1e-2, memory=memory) for memory in (2**30, 1000)
    )
    assert "not checked in float64" not in checked.scope
    assert unchecked.scope == f"{checked.scope}; not checked in float64, for lack of memory"


@pytest.mark.parametrize(("float64_bytes", "least"), [(0.0, 1e-4), (2.0**40, 1e-6)], ids=["alone", "judged"])
def test_rounding_inside_a_map_is_allowed_for_in_all_but_one_of_a_hundred(float64_bytes, least) -> None:
    """Saturated float32 maps, whose every product is off, beside a multiple of what rounding moves."""
    off: list[Tensor] = []
    for seed, temperature in ((0, 100.0), (1, 300.0), (2, 1000.0), (3, 300.0)):
        f = random_attention(seed, temperature=temperature, heads=1).to(dtype=torch.float32)
        x = tokens(seed, 25, 9, D, dtype=torch.float32)
        op = AutodiffJacobian(f, x, float64_bytes=float64_bytes)
        assert op.judged == (float64_bytes > 0)
        units = torch.eye(op.in_size).view(-1, 1, *op.in_shape).expand(-1, 25, -1, -1)
        dense = torch.stack([op.product(e.contiguous()).flatten(1) for e in units], dim=2).double()
        off.append((torch.linalg.matrix_norm(dense, 2) / true_norm(f, x) - 1).abs() / op.rounding)
    ratios = torch.cat(off)
    assert int((ratios > 1).sum()) <= 1  # of 100; five by eight times one change
    assert float(ratios.max()) <= 2.0
    assert float(ratios.median()) >= least  # and it is not as large as to say nothing


def test_unconverged_members_come_with_a_remedy() -> None:
    estimate = hs.local_lipschitz(random_attention(5), tokens(5, 2, 8, D), rtol=1e-8, max_iterations=2)
    assert not estimate.converged.any()
    assert "2 of 2 members did not reach rtol = 1e-08 within 2 iterations" in estimate.remedy
    assert "0 of 2 converged, see .remedy;" in repr(estimate)
    assert "NOT converged in 2 iterations, see .remedy;" in repr(estimate[0])
    enough = hs.local_lipschitz(random_attention(5), tokens(5, 2, 8, D))
    assert enough.remedy == ""
    assert "remedy" not in repr(enough)


def test_large_scores_do_not_spoil_float32() -> None:
    """Scores in the hundreds: a float32 softmax would be off in every digit that matters."""
    f = random_attention(7, temperature=60.0)
    single = f.to(dtype=torch.float32)
    x = tokens(7, 4, 9, D, dtype=torch.float32)
    truth = true_norm(single, x)
    estimate = hs.local_lipschitz(single, x)
    assert ((estimate.value - truth).abs() <= 2e-5 * truth).all()
    assert ((estimate.lower <= truth * (1 + 1e-13)) & (truth <= estimate.upper)).all()


@pytest.mark.parametrize(
    ("keywords", "argument", "words"),
    [
        ({"x": torch.ones(3, D).half()}, "x", "float16"),
        ({"x": torch.ones(3, D, dtype=torch.bfloat16)}, "x", "half precision"),
        ({"x": torch.ones(3, D, dtype=torch.int64)}, "x", "hs.capture(model, ids)"),
        ({"x": torch.ones(3, D, dtype=torch.bool)}, "x", ".float()"),
        ({"x": torch.ones(D).double()}, "x", "x[None, :]"),
        ({"x": torch.ones(0, 3, D).double()}, "x", "none of the sizes zero"),
        ({"x": torch.ones(3, D + 1).double()}, "X", "(..., n, 6)"),
        ({"x": torch.ones(3, D)}, "X", "float64"),
        ({"rtol": 0.0}, "rtol", "1e-12"),
        ({"rtol": math.nan}, "rtol", "nan"),
        ({"confidence": 1.0}, "confidence", "0.5"),
        ({"confidence": 0.1}, "confidence", "0.1"),
        ({"max_iterations": 0}, "max_iterations", ">= 1"),
        ({"seed": [1, 2]}, "seed", "2 integers"),
        ({"batch_dims": -1}, "batch_dims", "-1"),
        ({"batch_dims": True}, "batch_dims", "True"),
        ({"batch_dims": 1}, "batch_dims", "None or 0"),
        ({"f": torch.sin, "batch_dims": 2}, "x", "batch_dims=2"),
        ({"x": [torch.ones(3, D).double()], "batch_dims": 0}, "batch_dims", "a list"),
        ({"f": torch.sin}, "batch_dims", "batch_dims=1 for 3 vectors"),
        ({"method": "autodif"}, "method", "'autodif'"),
        ({"f": torch.sin, "method": "closed form"}, "method", "no closed-form"),
    ],
)
def test_refusals(keywords: dict, argument: str, words: str) -> None:
    defaults = {"f": random_attention(0), "x": torch.ones(3, D).double()}
    with pytest.raises(ArgumentError) as caught:
        hs.local_lipschitz(**(defaults | keywords))
    assert caught.value.argument == argument
    assert words in str(caught.value)


def test_float32_refuses_what_it_cannot_deliver() -> None:
    f = random_attention(0).to(dtype=torch.float32)
    with pytest.raises(ArgumentError, match="measure in float64"):
        hs.local_lipschitz(f, torch.ones(3, D), rtol=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_input_that_is_not_finite(bad: float) -> None:
    x = torch.ones(2, 3, D).double()
    x[1, 2, 0] = bad
    with pytest.raises(NonFiniteError, match="x: expected finite"):
        hs.local_lipschitz(random_attention(0), x)


def test_overflow_is_an_error_and_not_a_number() -> None:
    f = random_attention(0).to(dtype=torch.float32)
    with pytest.raises(NonFiniteError):
        hs.local_lipschitz(f, 1e30 * tokens(0, 4, D, dtype=torch.float32))


def _dense(f: Callable[[torch.Tensor], torch.Tensor], members: torch.Tensor) -> torch.Tensor:
    """Spectral norms of the dense Jacobians at members, one by one, of a map of batches."""
    found = [torch.func.jacrev(f)(one[None]).detach().reshape(-1, one.numel()) for one in members]
    return torch.stack([torch.linalg.matrix_norm(jacobian, 2) for jacobian in found])


def test_vectors_are_no_sequence_unless_that_is_said() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = tokens(0, 5, D)
    with pytest.raises(
        ArgumentError, match=r"batch_dims=1 for 5 vectors.*batch_dims=0 for one sequence of 5"
    ):
        hs.local_lipschitz(mlp, x)
    each = hs.local_lipschitz(mlp, x, batch_dims=1, rtol=1e-9)
    torch.testing.assert_close(each.value, _dense(mlp, x), rtol=1e-8, atol=0.0)
    assert each.input_direction.shape == (5, D)
    whole = hs.local_lipschitz(mlp, x, batch_dims=0, rtol=1e-9)
    assert whole.value.shape == ()
    assert float(whole.value) == pytest.approx(float(each.value.max()), rel=1e-8)
    assert float(hs.local_lipschitz(mlp, x[0], batch_dims=0).value) == pytest.approx(
        float(each.value[0]), rel=1e-3
    )
    # Where it is clear what a member is nothing need be said.
    for clear in (x[None], x[:1], [x]):
        assert hs.local_lipschitz(mlp, clear).converged.all()
    assert hs.local_lipschitz(lambda t: torch.softmax(t @ t.mT, dim=-1) @ t, x).value.shape == ()


def test_images_are_measured_one_by_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GELU(), nn.Flatten(), nn.Linear(27, 4)).double()
    images = tokens(0, 3, 2, 5, 5)
    with pytest.raises(ArgumentError, match=r"batch_dims.*1 for images"):
        hs.local_lipschitz(model, images)
    estimate = hs.local_lipschitz(model, images, batch_dims=1, rtol=1e-9)
    torch.testing.assert_close(estimate.value, _dense(model, images), rtol=1e-8, atol=0.0)
    assert estimate.input_direction.shape == images.shape
    assert estimate.output_direction.shape == (3, 4)
    alone = hs.local_lipschitz(model, images[1:2], batch_dims=0, rtol=1e-9)
    assert float(alone.value) == pytest.approx(float(estimate.value[1]), rel=1e-8)
    # Several axes may count members.
    pairs = images[:2].reshape(2, 1, 2, 5, 5)
    again = hs.local_lipschitz(
        lambda x: model(x.flatten(0, 1)).unflatten(0, x.shape[:2]), pairs, batch_dims=2
    )
    torch.testing.assert_close(again.value, estimate.value[:2, None], rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(
    ("f", "x", "argument", "words"),
    [
        (
            nn.Sequential(nn.Embedding(5, D), nn.Linear(D, D)),
            torch.ones(2, 3),
            "f",
            "embeddings, such as lambda",
        ),
        (nn.MultiheadAttention(D, 1, batch_first=True), torch.ones(2, 3, D), "f", "TypeError"),
        (nn.LSTM(D, D, batch_first=True), torch.ones(2, 3, D), "f", "lambda x: f(x)[0]"),
    ],
)
def test_what_a_module_raises_or_returns_is_said_of_f(f, x, argument, words) -> None:
    with pytest.raises(ArgumentError) as caught:
        hs.local_lipschitz(f, x)
    assert caught.value.argument == argument
    assert words in str(caught.value)


def test_a_site_in_place_of_its_map() -> None:
    model = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True).eval()
    sites = hs.capture(model, tokens(0, 1, 4, D, dtype=torch.float32))
    for f, x in ((sites[0], sites[0].x), (sites, sites[0].x), (sites[0].map, sites[0])):
        with pytest.raises(ArgumentError, match=r"local_lipschitz\(site.map, site.x\)"):
            hs.local_lipschitz(f, x)


def test_a_head_in_place_of_its_map() -> None:
    A, V, x = tokens(0, D, D), tokens(1, D, D), tokens(2, 4, D)
    with pytest.raises(ArgumentError) as caught:
        hs.local_lipschitz(hs.bounds.Head(A, V), x)
    code = str(caught.value).split(" is ")[1].rstrip(".")
    told = eval(code, {"hs": hs, "torch": torch, "A": A, "V": V})
    assert torch.allclose(told(x), torch.softmax(x @ A.T @ x.T, dim=-1) @ x @ V.T)


def test_any_torch_module() -> None:
    layer = nn.Linear(D, 3).double().requires_grad_(False)
    estimate = hs.local_lipschitz(layer, tokens(0, 4, D), rtol=1e-9, batch_dims=0)
    assert float(estimate.value) == pytest.approx(float(torch.linalg.matrix_norm(layer.weight, 2)), rel=1e-10)
    assert (estimate.method, estimate.scope) == ("autodiff", "Linear")


@pytest.mark.parametrize("transform", ["grad", "jacrev", "vjp"])
def test_maps_that_are_themselves_gradients(transform: str) -> None:
    """Their Jacobian is a Hessian. PyTorch counts no memory inside these transforms."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()

    def energy(y: Tensor) -> Tensor:
        return net(y).sum()

    maps: dict[str, Callable[[Tensor], Tensor]] = {
        "grad": torch.func.grad(energy),
        "jacrev": torch.func.jacrev(energy),
        "vjp": lambda y: torch.func.vjp(energy, y)[1](y.new_ones(()))[0],
    }
    x = tokens(0, 3, 5)
    found = hs.local_lipschitz(maps[transform], x, batch_dims=1)
    hessians = torch.stack([torch.autograd.functional.hessian(energy, one) for one in x])
    truth = torch.linalg.matrix_norm(hessians, 2)
    assert ((found.lower <= truth * (1 + 1e-12)) & (truth <= found.upper * (1 + 1e-12))).all()
    assert found.converged.all()


def test_an_estimate_prints_its_numbers_and_gives_tables() -> None:
    f = random_attention(6, causal=True)
    found = hs.local_lipschitz(f, tokens(6, 3, 4, D))
    ends = zip(found.value.tolist(), found.lower.tolist(), found.upper.tolist(), strict=True)
    assert all(f"{value:.6g} in {interval_in_digits(low, high)}" in repr(found) for value, low, high in ends)
    assert "relative width at most" in repr(hs.local_lipschitz(f, tokens(6, 5, 2, D)))
    table = found.table
    assert list(table["lower"]) == found.lower.tolist()
    assert set(table["confidence"]) == {0.999}
    assert table["value"].map("{:.6g}".format).map(found._repr_html_().__contains__).all()
    one = found[1]
    assert float(one) == float(found.value[1])
    assert "converged" in repr(one)
    assert torch.equal(found[1:].input_direction, found.input_direction[1:])
    assert [float(each) for each in found] == found.value.tolist()
    with pytest.raises(ArgumentError, match=r"float\(estimate\[0\]\)"):
        float(found)
    with pytest.raises(IndexError):
        one[0]


class Wrapping(torch.Tensor):
    """A tensor without storage that wraps another, as libraries of quantised weights make them."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapping:
        found: Wrapping = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map_only(cls, lambda t: t.inner, args), **(kwargs or {}))


def test_weights_may_be_tensors_that_wrap_others() -> None:
    weight, x = tokens(3, D, D), tokens(4, 3, D)
    wrapping = Wrapping(weight)
    found = hs.local_lipschitz(lambda x: x.tanh() @ wrapping, x, batch_dims=0)
    dense = torch.autograd.functional.jacobian(lambda x: x.tanh() @ weight, x).reshape(x.numel(), -1)
    assert float(found.lower) <= torch.linalg.matrix_norm(dense, 2) <= float(found.upper)


def test_the_tokens_of_an_estimate_are_the_shares_of_its_directions() -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "abcd"[ids[0]]

    found = hs.local_lipschitz(random_attention(6, causal=True), tokens(6, 4, D))
    table = found.tokens(Letters(), torch.arange(4))
    assert list(table["token"]) == list("abcd")
    assert table["input_share"].to_list() == pytest.approx(found.input_direction.square().sum(1).tolist())
    assert table["output_share"].sum() == pytest.approx(1.0)
    with pytest.raises(ArgumentError, match="ids"):
        found.tokens(Letters())
    with pytest.raises(ArgumentError, match="4 token ids"):
        found.tokens(Letters(), torch.arange(3))
    with pytest.raises(ArgumentError, match=r"estimate\[0\]"):
        hs.local_lipschitz(random_attention(6), tokens(6, 2, 4, D)).tokens()
