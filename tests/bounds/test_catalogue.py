"""The catalogue: what its functions take and refuse, and who goes over the registry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from howsmooth import bounds
from howsmooth.attention import LayerNorm
from howsmooth.bounds import Head, Quantity, best, table
from howsmooth.bounds.bound_problem import Problem, on_ball
from howsmooth.bounds.catalogue import CATALOGUE, statement
from howsmooth.bounds.log_numbers import Log, maximum, minimum
from howsmooth.errors import ArgumentError, NonFiniteError
from tests._cases import D, random_attention, tokens

N = 5


def test_wrong_calls_name_the_function() -> None:
    with pytest.raises(TypeError, match="theorem_3_3: missing a required argument: 'radius'"):
        bounds.theorem_3_3(Head([[1.0]], [[1.0]]), 3)  # type: ignore[call-arg]


# ---- a new statement


@pytest.fixture
def seventeen() -> Iterator[Any]:
    @statement(on_ball, quantity=Quantity.GLOBAL, source="nowhere", masks="none")
    def seventeen(p: Problem) -> Log:
        """Bound Lip(f on B_R^n) by 17 ‖V‖."""
        return 17 * p.V

    yield seventeen
    del CATALOGUE["seventeen"]


def test_a_new_statement_is_listed_and_may_be_best(seventeen: Any) -> None:
    head = Head([[9.0]], [[2.0]])
    assert seventeen(head, length=50, radius=1.0).value == pytest.approx(34.0, rel=1e-11)
    assert seventeen(head, 50, 1.0).value > 34.0 * (1 - 1e-15)
    assert best(head, length=10**6, radius=3.0).name == "seventeen"
    assert "seventeen" in set(table(head, length=3, radius=3.0).name)
    assert "seventeen" not in set(table(random_attention(0, heads=1, causal=True), length=3, radius=3.0).name)
    assert "seventeen" not in set(table(random_attention(0), length=3, radius=3.0).name)
    with pytest.raises(ArgumentError, match="one head: seventeen is a statement about"):
        seventeen(random_attention(0), 3, 1.0)


def test_a_formula_that_gives_nan_is_an_error() -> None:
    made = replace(CATALOGUE["theorem_3_3"], formula=lambda _: math.nan)
    with pytest.raises(ArithmeticError, match="nan"):
        made.at(Problem(Head([[1.0]], [[1.0]]), None, 3, 1.0))


# ---- matrices and tokens

NORM = LayerNorm(torch.ones(D, dtype=torch.float64), None, 1e-5)


def test_arrays_and_nested_lists_are_taken_as_tensors_are() -> None:
    f, x = random_attention(3, heads=1, biases=False), tokens(4, N, D)
    A, V, b = tokens(5, D, D), tokens(6, 2, D), tokens(7, D)
    for convert in (lambda t: t.numpy(), lambda t: t.tolist(), lambda t: t.numpy().astype("float64").T.T):
        head = Head(convert(A), convert(V), convert(b))
        assert head.A_norm == Head(A, V, b).A_norm
        assert torch.equal(head.b, b)
        for name in ("theorem_c_3", "diameter_upper_bound", "yudin_theorem_3", "token_wise_upper_bound"):
            function = getattr(bounds, name)
            assert function(f, convert(x)).value == function(f, x).value
        assert bounds.theorem_3_7(f, convert(x), 2.0).value == bounds.theorem_3_7(f, x, 2.0).value
        assert best(f, convert(x)).value == best(f, x).value
        assert bounds.certificate(f, convert(x)).value == bounds.certificate(f, x).value
        at_tokens = bounds.pre_norm_upper_bound(f, NORM, N, convert(x))
        assert at_tokens.value == bounds.pre_norm_upper_bound(f, NORM, N, x).value
        errors = bounds.kv_error_upper_bound(
            f, convert(x), keys=convert(torch.full((1, N), 0.1, dtype=torch.float64))
        )
        assert errors.value == bounds.kv_error_upper_bound(f, x, keys=0.1).value
        q, v = tokens(8, 2, 3, D), tokens(9, 2, 3, D)
        assert (
            bounds.l2_attention(convert(q), convert(v), None, 4).value
            == bounds.l2_attention(q, v, None, 4).value
        )
    whole = Head([[1, 2], [3, 4]], [[1, 0]])  # whole numbers
    assert whole.A.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    left, right = tokens(10, D, 2), tokens(11, 2, D)
    assert torch.equal(Head((left.numpy(), right.tolist()), V).A, left @ right)


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        ([[1.0, 2.0], [3.0]], "list"),
        ([["a", "b"], ["c", "d"]], "list"),
        ("matrix", "str"),
        (None, "NoneType"),
        ([[True, False], [False, True]], "torch.bool"),
        ([[1j, 0], [0, 1]], "torch.complex128"),
        (2.0, "2.0"),
        ([1.0, 2.0], r"shape \(2,\)"),
        ([], r"shape \(0,\)"),
    ],
)
def test_what_is_no_matrix_is_refused_by_name(wrong: object, got: str) -> None:
    eye = torch.eye(2)
    for name, call in {
        "A": lambda: Head(wrong, eye),
        "V": lambda: Head(eye, wrong),
        "X": lambda: bounds.theorem_c_3(Head(eye, eye), wrong),
        "query": lambda: bounds.l2_attention(wrong, eye[None], None, 3),
        "key": lambda: bounds.scaled_cosine(eye, wrong, eye, 3, temperature=1.0, eps=1.0),
    }.items():
        with pytest.raises(ArgumentError, match=rf"^{name}: expected .*nested lists, got {got}"):
            call()


def test_a_head_has_matrices_and_a_vector_of_one_dimension() -> None:
    eye = torch.eye(3)
    wrong = {"A": (torch.ones(2, 3), eye), "V": (eye, torch.ones(1, 2)), "b": (eye, eye, torch.ones(2))}
    for name, parts in wrong.items():
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            Head(*parts)


def test_matrices_are_finite() -> None:
    for name, call in {
        "A": lambda: Head([[math.nan]], [[1.0]]),
        "b": lambda: Head([[1.0]], [[1.0]], [math.inf]),
        "X": lambda: bounds.theorem_c_3(Head([[1.0]], [[1.0]]), [[math.inf]]),
    }.items():
        with pytest.raises(NonFiniteError, match=rf"^{name}: expected finite numbers"):
            call()


# ---- numbers stored as logarithms

NUMBERS = st.just(0.0) | st.floats(1e-100, 1e100)


@given(NUMBERS, NUMBERS)
def test_logs_compute_as_numbers_do(x: float, y: float) -> None:
    a, b = Log.of(x), Log.of(y)
    for found, expected in (
        (a + b, x + y),
        (2 + a, 2 + x),
        (a * b, x * y),
        (3.0 * a, 3.0 * x),
        (a**2, x**2),
        (a**0.5, x**0.5),
        (a / 7, x / 7),
        (minimum(a, b, 1.0), min(x, y, 1.0)),
        (maximum(a, y), max(x, y)),
        (Log(torch.stack([a.log, b.log])).sum(), x + y),
        *([(1 / a, 1 / x)] if x else []),
    ):
        assert float(found.value) == pytest.approx(expected, rel=1e-12, abs=0.0)


def test_logs_beyond_the_range_of_floats() -> None:
    huge = Log.of(10**400)
    assert float((huge * huge).log) == pytest.approx(800 * math.log(10), rel=1e-15)
    assert float((0 * (huge / 0)).value) == 0.0
    assert float(((1 / huge) * 10**400).value) == pytest.approx(1.0, rel=1e-12)
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    ((1 + Log.of(x) ** 2) ** 0.5).value.sum().backward()
    assert torch.allclose(x.grad, x.detach() / (1 + x.detach() ** 2).sqrt())
