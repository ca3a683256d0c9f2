"""The Jacobian at a measure, between the weighted norms, against autodiff and 50 digits."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.jacobian.autodiff import weighted_autodiff_jacobian
from howsmooth.jacobian.fixed_measure_derivative import frozen_derivatives
from howsmooth.measures import DiscreteMeasure
from howsmooth.spectral.scaling import PowersOfTwo, Scaled
from tests._cases import ACTING, CASES, D, random_attention, tokens
from tests._operators import to_dense

WEIGHTS = torch.tensor([0.4, 0.05, 0.3, 0.2, 0.05], dtype=torch.float64)
POSITIONS = torch.tensor([0.1, 0.4, 0.4, 1.0, 0.7], dtype=torch.float64)
WEIGHTED = sorted(ACTING)


def weighted_dense(f: TokenMap, x: Tensor, a: Tensor, positions: Tensor | None = None) -> Tensor:
    """√(a_i/a_j) J_ij as one matrix, J by autodiff of the atoms of F(μ)."""

    def moved(x: Tensor) -> Tensor:
        return f(DiscreteMeasure(x, a, positions=positions)).points

    n, d = x.shape
    j = torch.autograd.functional.jacobian(moved, x, vectorize=True)
    return (j * a.sqrt()[:, None, None, None] / a.sqrt()[:, None]).reshape(n * f.d_out, n * d)


class Unknown(TokenMap):
    """A map that the closed forms do not know."""

    def __init__(self, inner: TokenMap) -> None:
        self.inner = inner

    d = property(lambda self: self.inner.d)
    d_out = property(lambda self: self.inner.d_out)
    dtype = property(lambda self: self.inner.dtype)
    device = property(lambda self: self.inner.device)

    def to(self, **keywords: object) -> Unknown:
        return Unknown(self.inner.to(**keywords))

    def describe(self) -> str:
        return "unknown"

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        return self.inner._forward(x, weighting)


@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_jacobian_equals_scaled_autodiff(name: str) -> None:
    f, x = CASES[name](5), tokens(3, 5, D)
    dense = weighted_dense(f, x, WEIGHTS, POSITIONS)
    ours = to_dense(closed_form_jacobian(f, x[None], weighting=Weighting(WEIGHTS.log(), POSITIONS)))[0]
    assert (ours - dense).abs().max() <= 1e-13 * max(1.0, float(dense.abs().max()))


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_adjoint_is_the_transpose(name: str) -> None:
    f, x = CASES[name](5), tokens(4, 2, 5, D)
    op = closed_form_jacobian(f, x, weighting=Weighting(WEIGHTS.log(), POSITIONS))
    e, u = tokens(5, 2, 5, D), tokens(6, 2, 5, f.d_out)
    left, right = (op.product(e) * u).flatten(1).sum(1), (e * op.adjoint_product(u)).flatten(1).sum(1)
    assert ((left - right).abs() <= 1e-12 * (e.norm() * u.norm() + left.abs())).all()
    some = torch.tensor([1])
    torch.testing.assert_close(op.select(some).product(e[some]), op.product(e)[some])
    torch.testing.assert_close(op.select(some).adjoint_product(u[some]), op.adjoint_product(u)[some])


@pytest.mark.parametrize("name", ["grouped heads", "causal", "pre-norm"])
def test_autodiff_at_a_measure_equals_the_closed_form(name: str) -> None:
    f, x = CASES[name](5), tokens(8, 5, D)
    weighting = Weighting(WEIGHTS.log(), POSITIONS)
    ours = to_dense(weighted_autodiff_jacobian(f, x, weighting))[0]
    torch.testing.assert_close(ours, weighted_dense(f, x, WEIGHTS, POSITIONS), rtol=1e-10, atol=1e-12)


def exact(f: hs.SelfAttention, x: Tensor, log_weights: Tensor, positions: Tensor) -> list[list[mpmath.mpf]]:
    """√(a_i/a_j) V_h [P_ij (I + z_ij y_iᵀ) + δ_ij C_i A_h] of heads without bias, from its definition."""
    n, d = x.shape
    X = [mpmath.matrix(row.tolist()) for row in x]
    logs = [mpmath.mpf(float(t)) for t in log_weights]
    total = mpmath.log(mpmath.fsum(mpmath.exp(t) for t in logs))
    J = mpmath.zeros(n * f.d_out, n * d)
    for h in range(f.heads):
        Q, K, V = (mpmath.matrix(t[h].tolist()) for t in (f.query, f.key, f.value))
        V = mpmath.matrix(f.output[:, h * f.value_dim : (h + 1) * f.value_dim].tolist()) * V
        A = mpmath.mpf(f.scale) * K.T * Q
        for i in range(n):
            y = A * X[i]
            seen = [j for j in range(n) if not f.causal or positions[j] <= positions[i]]
            e = {j: mpmath.exp(logs[j] - total + (y.T * X[j])[0]) for j in seen}
            p = {j: e[j] / mpmath.fsum(e.values()) for j in seen}
            m = sum((p[j] * X[j] for j in seen), mpmath.zeros(d, 1))
            C = sum((p[j] * (X[j] - m) * (X[j] - m).T for j in seen), mpmath.zeros(d, d))
            for j in seen:
                block = p[j] * (mpmath.eye(d) + (X[j] - m) * y.T) * mpmath.exp((logs[i] - logs[j]) / 2)
                block = V * (block + C * A if i == j else block)
                for a in range(f.d_out):
                    for b in range(d):
                        J[i * f.d_out + a, j * d + b] += block[a, b]
    return [[J[a, b] for b in range(n * d)] for a in range(n * f.d_out)]


@pytest.mark.parametrize(
    ("least", "temperature", "size", "keywords"),
    [
        (-5.0, 2.0, 1.0, {"heads": 2}),
        (-700.0, 30.0, 3.0, {"heads": 1}),
        (-1400.0, 5.0, 8.0, {"heads": 1}),
        (-1400.0, 10.0, 3.0, {"heads": 2, "causal": True}),
    ],
)
def test_weights_beyond_float64_against_fifty_digits(least, temperature, size, keywords) -> None:
    f = random_attention(
        3, d=2, d_out=2, key_dim=2, value_dim=2, temperature=temperature, biases=False, **keywords
    )
    x, logs = size * tokens(9, 4, 2), torch.linspace(0.0, least, 4).double()
    logs = logs - torch.logsumexp(logs, 0)
    with mpmath.workdps(50):
        true = exact(f, x, logs, POSITIONS)
        op = closed_form_jacobian(f, x[None], weighting=Weighting(logs, POSITIONS[:4]))
        ours = to_dense(op)[0].tolist()
        largest = max(abs(t) for row in true for t in row)
        error = torch.tensor(
            [
                [float((t - o) / largest) for t, o in zip(*rows, strict=True)]
                for rows in zip(true, ours, strict=True)
            ]
        )
        scaled = torch.tensor([[float(t / largest) for t in row] for row in true])
    relative = torch.linalg.matrix_norm(error, 2) / torch.linalg.matrix_norm(scaled, 2)
    assert relative <= op.rounding[0] <= 1e-11
    assert float(torch.linalg.matrix_norm(scaled, 2)) > 0


def test_entries_beyond_the_range_are_refused() -> None:
    eye = torch.ones(1, 1, 1).double()
    f = hs.SelfAttention(-eye, eye, eye, scale=1.0)
    x = torch.tensor([[1.0], [-1.0]]).double() * 40.0
    logs = torch.tensor([-1600.0, 0.0]).double()
    with pytest.raises(NonFiniteError, match=r"range of torch.float64, got one of about exp\(800"):
        closed_form_jacobian(f, x[None], weighting=Weighting(logs))


def test_what_does_not_act_on_measures_is_refused() -> None:
    x, weighting = tokens(0, 5, D), Weighting(WEIGHTS.log())
    for name, words in (("masked", "boolean mask"), ("rotary", "rotary positions"), ("causal", "positions")):
        f = CASES[name](5)
        with pytest.raises(ArgumentError, match=words):
            closed_form_jacobian(f, x[None], weighting=weighting)
        with pytest.raises(ArgumentError, match=words):
            list(frozen_derivatives(f, x, weighting))
    with pytest.raises(ArgumentError, match=r"at least exp\(-600\).*got exp\(-700\)"):
        weighted_autodiff_jacobian(
            random_attention(0), x, Weighting(torch.tensor([0.0, -700, 0, 0, 0]).double())
        )


@pytest.mark.parametrize("name", WEIGHTED)
def test_frozen_derivatives_are_those_of_one_more_atom(name: str) -> None:
    """A further atom that weighs nothing sees the measure and is not seen: differences of its image."""
    f, x = CASES[name](5), tokens(10, 5, D)
    found = torch.cat(list(frozen_derivatives(f, x, Weighting(WEIGHTS.log(), POSITIONS))))
    assert found.shape == (5, f.d_out, D)
    logs = torch.cat((WEIGHTS.log(), torch.tensor([-2000.0]).double()))
    direction, h = tokens(11, D), 1e-5
    for i in range(5):
        positions = torch.cat((POSITIONS, POSITIONS[i : i + 1]))
        ahead, behind = (
            f(
                DiscreteMeasure(
                    torch.cat((x, x[i : i + 1] + s * direction)), log_weights=logs, positions=positions
                )
            ).points[-1]
            for s in (h, -h)
        )
        torch.testing.assert_close(found[i] @ direction, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-7)


def test_frozen_derivatives_by_autodiff() -> None:
    weighting, x = Weighting(WEIGHTS.log(), POSITIONS), tokens(10, 5, D)
    for name in ("causal", "pre-norm", "heads concatenated"):
        f = CASES[name](5)
        ours = torch.cat(list(frozen_derivatives(Unknown(f), x, weighting)))
        torch.testing.assert_close(ours, torch.cat(list(frozen_derivatives(f, x, weighting))))


def test_frozen_derivatives_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    f, x = random_attention(1, causal=True), tokens(12, 5, D)
    weighting = Weighting(WEIGHTS.log(), POSITIONS)
    whole = list(frozen_derivatives(f, x, weighting))
    monkeypatch.setattr("howsmooth.jacobian.fixed_measure_derivative._BLOCK", 400)
    parts = list(frozen_derivatives(f, x, weighting))
    assert (len(whole), len(parts)) == (1, 3)
    torch.testing.assert_close(torch.cat(parts), whole[0])


def test_a_scaled_operator_is_the_operator_times_powers_of_two() -> None:
    op = closed_form_jacobian(random_attention(0), tokens(0, 2, 4, D))
    scaled = Scaled(op, PowersOfTwo(np.array([-2, 3]), np.array([-1, 0]), np.array([0, 5])))
    sizes = torch.tensor([0.25, 8.0], dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(to_dense(scaled), sizes * to_dense(op))
    chosen = torch.tensor([1])
    torch.testing.assert_close(to_dense(scaled.select(chosen)), 8 * to_dense(op)[chosen])
    u = tokens(1, 2, 4, D)
    torch.testing.assert_close(scaled.adjoint_product(u), sizes * op.adjoint_product(u))
