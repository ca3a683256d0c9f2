"""Every statement: what it refuses by the name of the argument, and what it gives at extremes."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from importlib import import_module

import pytest
import torch

import howsmooth as hs
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.bounds.bound import Bound
from howsmooth.bounds.catalogue import CATALOGUE
from howsmooth.errors import ArgumentError, NonFiniteError
from tests._cases import D, random_attention, rotary, tokens

X = tokens(0, 4, D)
GIVEN = {"attention": random_attention(0, heads=1, biases=False), "X": X, "length": 4, "radius": 1.0}
WRONG = {
    "attention": [torch.eye(2), None],
    "X": [X[:, :3], torch.stack([X, X]), X.to(torch.complex128), None, 4],
    "length": [0, -3, 2.5, True, None],
    "radius": [0.0, -1.0, math.nan, math.inf, "one", True],
    "side": ["both"],
    "weight": [1.0, 0.0],
    "cluster": ["other"],
}
OPTIONS = {"side", "weight", "cluster"}


def function(name: str) -> Callable[..., Bound]:
    found: Callable[..., Bound] = getattr(import_module(CATALOGUE[name].formula.__module__), name)
    return found


def arguments(name: str) -> set[str]:
    return set(inspect.signature(function(name)).parameters)


STATEMENTS = [
    name for name in CATALOGUE if name != "certificate" and arguments(name) - OPTIONS <= GIVEN.keys()
]


def refused(name: str, error: type[Exception], said: str, **wrong: object) -> None:
    given = {key: GIVEN[key] for key in arguments(name) & GIVEN.keys()}
    with pytest.raises(error, match=said):
        function(name)(**(given | wrong))


def test_there_are_statements_of_every_kind() -> None:
    for names in ({"length", "radius"}, {"radius"}, {"X"}, {"X", "radius"}):
        assert any(arguments(name) - OPTIONS - {"attention"} == names for name in STATEMENTS)


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_wrong_argument_is_named(name: str) -> None:
    for argument in arguments(name) & WRONG.keys():
        for wrong in WRONG[argument]:
            refused(name, ArgumentError, argument, **{argument: wrong})
    if "X" in arguments(name):
        refused(name, NonFiniteError, "X", X=X * math.inf)
        mask = torch.eye(3, dtype=torch.bool)
        refused(name, ArgumentError, "length of the mask", attention=random_attention(0, heads=1, mask=mask))


@pytest.mark.parametrize("name", STATEMENTS)
def test_another_attention_is_refused(name: str) -> None:
    if CATALOGUE[name].heads == "one":
        refused(name, ArgumentError, f"one head: {name} is", attention=random_attention(0, biases=False))
    turned = random_attention(0, heads=1, rotary=rotary(8, 4))
    if name == "any_scores_ball_upper_bound":
        assert hs.bounds.any_scores_ball_upper_bound(turned, 4, 1.0).holds
    else:
        refused(name, ArgumentError, "rotary", attention=turned)


def test_a_length_whose_rows_cannot_be_gone_through_is_refused() -> None:
    for length in (2**20 + 1, 10**400):
        asked = {"attention": random_attention(0, heads=1, softcap=1.0), "length": length}
        refused("any_scores_ball_upper_bound", ArgumentError, "mean_field_upper_bound", **asked)


@pytest.mark.parametrize("name", STATEMENTS)
def test_extremes_give_numbers(name: str) -> None:
    """Logarithms where numbers overflow, and zero where all values are zero."""
    eye, statement, asked = torch.eye(2).double(), function(name), arguments(name)
    longest = 10**400 if name != "any_scores_ball_upper_bound" else 1000  # it has numbers for every row
    for radius, A, V in itertools.product((1e-200, 60.0, 1e200), (-eye, 0 * eye), (eye, 0 * eye)):
        f = hs.SelfAttention(A[None], eye[None], V[None], scale=1.0)
        if name not in ("any_scores_ball_upper_bound", "theorem_3_7", "theorem_4_5"):
            f = parameters_of(f).folded(0)
        for length in (1, longest) if "length" in asked else (4,):
            given = {"attention": f, "X": 0.1 * X[:, :2], "length": length, "radius": radius}
            bound = statement(**{key: given[key] for key in asked & given.keys()})
            assert bound.value >= 0
            assert not math.isnan(bound.log_value)
            assert bound.log_value < math.inf or radius == 1e200 or not bound.holds
            assert V.any() or bound.value == 0 or not bound.holds
