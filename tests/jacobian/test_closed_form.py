"""Every Jacobian operator against dense autodiff, and the properties of the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import howsmooth as hs
from howsmooth.attention import scaled_dot_product
from howsmooth.errors import ArgumentError, DerivativeError, NonFiniteError
from howsmooth.jacobian import AutodiffJacobian, closed_form_jacobian
from howsmooth.jacobian.closed_form import closed_form_jacobians, has_closed_form
from howsmooth.spectral.operator import Subset
from tests._cases import CASES, D, dense_jacobian, random_attention, tokens
from tests._operators import to_dense
from tests._selection import pairs


@pytest.mark.parametrize(("name", "n"), pairs(CASES, [5, 1, 2]))
def test_closed_form_equals_dense_autodiff(name: str, n: int) -> None:
    f, x = CASES[name](n), tokens(n, 2, n, D)
    dense = torch.stack([dense_jacobian(f, member) for member in x])
    ours = to_dense(closed_form_jacobian(f, x))
    assert (ours - dense).abs().max() <= 1e-13 * max(1.0, float(dense.abs().max()))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("norms of", "a norm of"))])
def test_adjoint_and_selection_go_through_norms_of_queries_and_keys(name: str) -> None:
    f, x, u = CASES[name](4), tokens(4, 3, 4, D), tokens(5, 3, 4, D)
    dense = torch.stack([dense_jacobian(f, member) for member in x])
    op = closed_form_jacobian(f, x)
    expected = (dense.mT @ u.flatten(1)[..., None]).view(x.shape)
    torch.testing.assert_close(op.adjoint_product(u), expected, rtol=1e-11, atol=1e-12)
    chosen = op.select(torch.tensor([2, 0]))
    torch.testing.assert_close(to_dense(chosen), dense[[2, 0]], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(chosen.adjoint_product(u[[2, 0]]), expected[[2, 0]], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("entries", [1, 24, 200])
@pytest.mark.parametrize(
    "name",
    [
        "causal grouped, hot",
        "causal and masked",
        "softcap, grouped, causal, rotary",
        "sinks, softcap, score bias",
    ],
)
def test_probabilities_may_be_formed_in_blocks(name, entries, monkeypatch) -> None:
    f, x = CASES[name](6), tokens(3, 3, 6, D)
    whole = closed_form_jacobian(f, x)
    monkeypatch.setitem(scaled_dot_product._ENTRIES, "cpu", entries)
    blocks = closed_form_jacobian(f, x)
    for part in ("p", "slope", "mean"):
        torch.testing.assert_close(
            getattr(blocks.core, part), getattr(whole.core, part), rtol=1e-13, atol=1e-15
        )


@pytest.mark.parametrize("name", ["multi-head", "rotary, partial, grouped, causal", "masked", "pre-norm"])
def test_autodiff_equals_dense_autodiff(name: str) -> None:
    f, x = CASES[name](3), tokens(1, 2, 3, D)
    dense = torch.stack([dense_jacobian(f, member) for member in x])
    ours = to_dense(AutodiffJacobian(f, x))
    assert (ours - dense).abs().max() <= 1e-13 * max(1.0, float(dense.abs().max()))


@given(
    name=st.sampled_from(sorted(CASES)),
    n=st.integers(1, 6),
    seed=st.integers(0, 99),
    autodiff=st.sampled_from([False, False, False, True]),
)
def test_adjointness_linearity_and_selection(name: str, n: int, seed: int, autodiff: bool) -> None:
    f, x = CASES[name](n), tokens(seed, 3, n, D)
    op = AutodiffJacobian(f, x) if autodiff else closed_form_jacobian(f, x)
    e, g, u = tokens(seed + 1, 3, n, D), tokens(seed + 2, 3, n, D), tokens(seed + 3, 3, n, f.d_out)
    left = (op.product(e) * u).flatten(1).sum(1)
    right = (e * op.adjoint_product(u)).flatten(1).sum(1)
    size = op.product(e).flatten(1).norm(dim=1) * u.flatten(1).norm(dim=1)
    assert ((left - right).abs() <= 1e-12 * size + 1e-14).all()
    torch.testing.assert_close(
        op.product(2 * e - g), 2 * op.product(e) - op.product(g), rtol=1e-10, atol=1e-10
    )
    some = torch.tensor([2, 0])
    for chosen in (op.select(some), Subset(op, some)):
        torch.testing.assert_close(chosen.product(e[some]), op.product(e)[some], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            chosen.adjoint_product(u[some]), op.adjoint_product(u)[some], rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(chosen.rounding, op.rounding[some])
        again = chosen.select(torch.tensor([1]))
        torch.testing.assert_close(again.product(e[:1]), op.product(e)[:1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "dtypes"), pairs(CASES, [(torch.float32,), (torch.float32, torch.float64)]))
def test_float32_products_keep_the_float64_point(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    f, x = CASES[name](6), tokens(2, 2, 6, D)
    exact = to_dense(closed_form_jacobian(f, x))
    (made,) = closed_form_jacobians(f, [x], dtypes)
    single = to_dense(made[torch.float32])
    assert single.dtype == torch.float32
    error = torch.linalg.matrix_norm(single.double() - exact, 2) / torch.linalg.matrix_norm(exact, 2)
    assert (error <= made[torch.float32].rounding).all()


def test_contract_checks_shape_and_dtype() -> None:
    op = closed_form_jacobian(random_attention(0), tokens(0, 2, 4, D))
    with pytest.raises(ArgumentError, match=r"E: expected shape \(2, 4, 6\)"):
        op.product(tokens(0, 1, 4, D))
    with pytest.raises(ArgumentError, match=r"U: expected .*float64"):
        op.adjoint_product(torch.zeros(2, 4, D))
    assert (op.batch, op.in_size, op.out_size) == (2, 24, 24)


# ---- autodiff on maps that are not ours


class _Fused(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_fused_attention_is_differentiated_through_the_math_backend() -> None:
    x = tokens(0, 2, 1, 4, D)
    op = AutodiffJacobian(_Fused(), x)
    same = hs.SelfAttention(*(torch.eye(D).double()[None] for _ in range(3)))
    torch.testing.assert_close(
        to_dense(op), to_dense(closed_form_jacobian(same, x[:, 0])), rtol=1e-11, atol=1e-12
    )


def test_active_dropout_is_refused() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1)).double()
    x = tokens(0, 2, 4, D)
    with pytest.raises(ArgumentError, match="Dropout '1' in training mode"):
        AutodiffJacobian(model, x)
    with pytest.raises(ArgumentError, match="two different outputs"):
        AutodiffJacobian(lambda t: nn.functional.dropout(t, 0.5), x)
    AutodiffJacobian(model.eval(), x)


def test_a_map_that_mixes_the_batch_is_refused() -> None:
    x = tokens(0, 5, 4, D)
    with pytest.raises(ArgumentError, match="mixes them"):
        AutodiffJacobian(lambda t: t - t.mean(dim=0), x)
    with pytest.raises(ArgumentError, match="mixes them"):
        AutodiffJacobian(lambda t: torch.cat((t[:4], t[4:] * t[1:2])), x)
    with pytest.raises(ArgumentError, match="BatchNorm1d"):
        AutodiffJacobian(nn.BatchNorm1d(4).double(), x)


def test_wrong_derivatives_are_refused() -> None:
    class SmallerGradient(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output) -> None:
            pass

        @staticmethod
        def backward(ctx, g):
            return 0.95 * g

        @staticmethod
        def jvp(ctx, t):
            return t.clone()

    with pytest.raises(DerivativeError, match="disagree"):
        AutodiffJacobian(SmallerGradient.apply, tokens(0, 2, 4, D))
    with pytest.raises(DerivativeError, match="disagree"):  # however many numbers there are
        AutodiffJacobian(SmallerGradient.apply, tokens(0, 100, 100, dtype=torch.float32))


def test_a_derivative_that_is_cut_off_is_refused() -> None:
    """detach cuts both modes alike, so they agree with each other; only the values contradict them."""
    for dtype in (torch.float32, torch.float64):
        x = tokens(0, 2, 4, D, dtype=dtype)
        with pytest.raises(DerivativeError, match="contradict"):
            AutodiffJacobian(lambda t: t * t.detach().sum(dim=-1, keepdim=True).sin(), x)
        with pytest.raises(DerivativeError, match="contradict"):
            AutodiffJacobian(lambda t: t.detach() * 2, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kinks_and_sharp_maps_are_not_refused(dtype: torch.dtype) -> None:
    x = tokens(0, 2, 4, D, dtype=dtype)
    for f in (
        torch.relu,
        torch.round,  # derivative zero almost everywhere, and differences too
        lambda t: (1e4 * t).sin() * 1e-4,
        lambda t: torch.softmax(300 * t, dim=-1),
        lambda t: t * 0,
        random_attention(0, temperature=60.0).to(dtype=dtype),
    ):
        AutodiffJacobian(f, x)
    AutodiffJacobian(lambda t: t * t, torch.zeros(4, D, dtype=dtype))
    mixed = tokens(1, D, 9, dtype=dtype)
    AutodiffJacobian(lambda t: torch.relu(t @ mixed) @ mixed.mT, torch.zeros(4, D, dtype=dtype))


def _spread(t: Tensor) -> Tensor:
    return t * torch.logspace(-6, 6, t.shape[-1], dtype=t.dtype)


# Fine maps whose derivatives round by far more than one epsilon of their size, or that have a kink at x.
WILD: dict[str, Callable[[Tensor], Tensor]] = {
    "a residual that cancels": lambda t: (
        t + (1e3 * t).sin().cumsum(-2) - (1e3 * (t * (1 + 1e-9))).sin().cumsum(-2)
    ),
    "a branch that cancels": lambda t: (t + 1e4 * t) - (1e4 - 1e-6) * t,
    "a wide range of scales": lambda t: torch.softmax(t @ t.mT, dim=-1) @ _spread(t),
    "from a wide range of scales": lambda t: _spread(t.flip(-1)).tanh() @ t.mT,
    "saturated scores": lambda t: torch.softmax(20 * t @ t.mT, dim=-1) @ t - 0.9999 * t,
    "one mean taken from itself": lambda t: t[..., :1, :] - (1 - 1e-4) * t[..., :1, :].mean(-2, keepdim=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WILD)
def test_wild_maps_are_not_refused_and_their_interval_holds(name: str, dtype: torch.dtype) -> None:
    """Judged in float64 by dense Jacobians; what float32 cannot tell shows as an interval that is wide."""
    x = tokens(0, 4, D, dtype=dtype)
    estimate = hs.local_lipschitz(WILD[name], x, rtol=1e-3, batch_dims=0)
    true = float(torch.linalg.matrix_norm(dense_jacobian(WILD[name], x.double()), 2))
    assert float(estimate.lower) * (1 - 1e-9) <= true <= float(estimate.upper) * (1 + 1e-9)


@pytest.mark.parametrize("cut", [False, True])
def test_a_map_of_a_ball_is_measured_on_its_sphere(cut: bool) -> None:
    """Finite differences would leave the ball; a derivative that is cut off is found there all the same."""

    def f(t: Tensor) -> Tensor:
        if not bool((t.detach().norm(dim=-1) <= 2 * (1 + 1e-12)).all()):
            raise ValueError("beyond the ball")
        p = torch.softmax(t @ t.mT / D, dim=-1)
        return (p.detach() if cut else p) @ t + t * t.mean()

    x = tokens(0, 4, D)
    x = 2 * x / x.norm(dim=-1, keepdim=True)
    if cut:
        with pytest.raises(DerivativeError, match="contradict"):
            AutodiffJacobian(f, x)
    else:
        torch.testing.assert_close(to_dense(AutodiffJacobian(f, x))[0], dense_jacobian(f, x))


class _NoForward(torch.autograd.Function):
    """x ↦ x², without forward mode, and without the functions that torch.func needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g


class _NoForwardOnce(_NoForward):
    """The same, whose derivative cannot be differentiated again."""

    backward = staticmethod(once_differentiable(_NoForward.backward))


def test_forward_mode_may_be_missing() -> None:
    x, e = tokens(0, 2, 4, D), tokens(1, 2, 4, D)
    operator = AutodiffJacobian(_NoForward.apply, x)
    assert torch.equal(operator.product(e), 2 * x * e)
    assert torch.equal(operator.adjoint_product(e), 2 * x * e)


def test_forward_mode_that_is_needed_and_missing_is_said_clearly() -> None:
    with pytest.raises(DerivativeError, match="forward-mode"):
        AutodiffJacobian(_NoForwardOnce.apply, tokens(0, 2, 4, D))


def test_a_graph_that_does_not_fit_leaves_products_to_forward_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    f, x, e = random_attention(0), tokens(0, 2, 4, D), tokens(1, 2, 4, D)
    kept = AutodiffJacobian(f, x)
    monkeypatch.setattr("howsmooth.jacobian.autodiff.memory_budget", lambda *_: 1)
    forward = AutodiffJacobian(f, x)
    torch.testing.assert_close(forward.product(e), kept.product(e))
    monkeypatch.setattr("torch.func.jvp", None)
    kept.product(e)
    with pytest.raises(TypeError):
        forward.product(e)


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda t: (t, t), ArgumentError, "tuple"),
        (lambda t: t.sum(dim=(1, 2)), ArgumentError, "(2,)"),
        (lambda t: t[:1], ArgumentError, "(1, 4, 6)"),
        (lambda t: t.float(), ArgumentError, "float32"),
        (lambda t: t / 0, NonFiniteError, "NaN or infinity"),
    ],
)
def test_outputs_that_cannot_be_measured(f, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        AutodiffJacobian(f, tokens(0, 2, 4, D))
    assert words in str(caught.value)


def test_closed_form_refuses_what_it_does_not_know() -> None:
    assert not has_closed_form(torch.sin)
    with pytest.raises(ArgumentError, match="eps > 0"):
        closed_form_jacobian(hs.LayerNorm(torch.ones(D).double(), eps=0.0), torch.ones(1, 3, D).double())
