"""Bounds on the errors of single entries, against arithmetic of many digits and errors made on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from mpmath import mp
from torch import Tensor

from howsmooth.rounding import MissingRuleError, Rounded, along_entries, entries_of, exact, known_to, plain
from tests._cases import tokens

F64 = torch.float64


@pytest.fixture(autouse=True)
def forty_digits() -> Iterator[None]:
    with mp.workdps(40):
        yield


def many(t: Tensor) -> np.ndarray:
    """Return the same numbers as an array of mpmath."""
    return np.array([mpmath.mpf(v) for v in t.flatten().tolist()], dtype=object).reshape(t.shape)


# Entries of very different sizes: one bound for all of them would be useless for the small ones.
X = tokens(1, 4, 5) * 10.0 ** -torch.arange(5, dtype=F64)
Y, Z = tokens(2, 5, 3), tokens(3, 4, 5)
TANH, EXP = np.vectorize(mpmath.tanh), np.vectorize(mpmath.exp)


def _weights(x: np.ndarray) -> np.ndarray:
    powers = EXP(x)
    return powers / powers.sum(axis=1, keepdims=True)


#: An operation on tensors, and the same on arrays of many digits.
RULES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any], Any]]] = {
    "matmul": (lambda x: x @ known_to(Y), lambda x: x @ many(Y)),
    "rmatmul": (lambda x: known_to(Y).mT @ x.mT, lambda x: many(Y).T @ x.T),
    "square matmul": (lambda x: x @ x.mT, lambda x: x @ x.T),
    "add": (lambda x: x + known_to(Z), lambda x: x + many(Z)),
    "rsub": (lambda x: 1.5 - x, lambda x: mpmath.mpf(1.5) - x),
    "sub": (lambda x: x - x[:1], lambda x: x - x[:1]),
    "mul": (lambda x: x * known_to(Z), lambda x: x * many(Z)),
    "square": (lambda x: x * x, lambda x: x * x),
    "mul by a number": (lambda x: 0.3 * x, lambda x: mpmath.mpf(0.3) * x),
    "div": (lambda x: x / 3.0, lambda x: x / 3),
    "tanh": (torch.tanh, TANH),
    "cat": (lambda x: torch.cat((x, x[:, 1:]), dim=1), lambda x: np.concatenate((x, x[:, 1:]), axis=1)),
    "softmax": (lambda x: torch.softmax(x, 1), _weights),
    "abs": (lambda x: (-x).mT[1:, :2].abs(), lambda x: abs(x.T[1:, :2])),
    "along": (lambda x: along_entries(torch.tanh, 1.0, x), TANH),
}


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("relative", [0.0, 1e-6])
def test_every_rule_bounds_its_own_rounding_and_given_errors(name: str, relative: float) -> None:
    rule, oracle = RULES[name]
    errors, nearest = relative * X.abs(), mpmath.mpf(0)
    found = rule(known_to(X, errors))
    bounds, value = many(entries_of(found)), many(plain(found))
    for seed in range(20 if relative else 1):
        moved = many(X) + many(errors) * many(tokens(10 + seed, 4, 5).sign())
        off = abs(oracle(moved) - value)
        assert bool((off <= bounds).all())
        shares = [a / b for a, b in zip(off.flatten(), bounds.flatten(), strict=True) if b]
        nearest = max(nearest, *shares) if shares else nearest
    if relative:
        assert nearest > 0.3
    else:
        assert bool((entries_of(found) <= 1e-14 * (1 + plain(found).abs())).all())
        assert nearest > 0.02 or name in ("cat", "abs")
    assert float(found.error) >= float(entries_of(found).norm())


def test_plain_operands_may_be_wrong_by_four_units() -> None:
    wrong = Z * (1 + 4 * 2.0**-53)
    for found, oracle in (
        (known_to(X) + Z, many(X) + many(wrong)),
        (known_to(X) * Z, many(X) * many(wrong)),
        (known_to(X) @ Z.mT, many(X) @ many(wrong).T),
    ):
        assert bool((abs(oracle - many(plain(found))) <= many(entries_of(found))).all())


def test_the_weights_of_one_key_and_of_none_are_exact() -> None:
    scores = known_to(Z, 0.1)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[0], mask[0, 2], mask[1, 3] = False, True, False
    bounds = entries_of(torch.softmax(scores.masked_fill(~mask, -torch.inf), 1))
    assert not bounds[0].any()
    assert float(bounds[1, 3]) == 0
    assert bool((bounds[1:][mask[1:]] > 0).all())


def test_a_saturated_row_has_errors_as_small_as_what_it_leaves() -> None:
    scores = known_to(torch.tensor([[0.0, -40.0]], dtype=F64), 1e-6)
    bounds = entries_of(torch.softmax(scores, 1))
    assert float(bounds[0, 1]) <= 1e-5 * float(torch.exp(torch.tensor(-40.0, dtype=F64)))


def test_what_has_no_rule_for_entries_uses_that_for_norms_or_is_refused() -> None:
    x = known_to(X, 0.5)
    found = torch.exp(x)
    assert isinstance(found, Rounded)
    assert found.error >= 0.5
    both = x + exact(Z, 2.0)  # of one operand only a norm is known
    assert isinstance(both, Rounded)
    assert both.error >= 2.0 + 0.5 * 20**0.5
    with pytest.raises(MissingRuleError, match="sin"):
        torch.sin(x)
