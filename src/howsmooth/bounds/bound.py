"""The class ``Bound``: an upper or lower bound on a Lipschitz constant, with its hypotheses and source."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from howsmooth.bounds.log_numbers import Log
from howsmooth.errors import ArgumentError, check_number
from howsmooth.rounding import limit_in_digits, log_above

__all__ = ["Bound", "Hypothesis", "Quantity", "check_length", "check_radius", "exp"]

Side = Literal["upper", "lower"]


class Quantity(StrEnum):
    """The kinds of Lipschitz constant that a bound can refer to: on a ball, in mean field, at given tokens,
    or everywhere.
    """

    #: Lipschitz constant of f on all sequences of n tokens in the ball of radius R, in Frobenius norms.
    GLOBAL = "Lip(f on B_R^n)"
    #: Lipschitz constant of causal self-attention f^m on these sequences, in Frobenius norms.
    MASKED = "Lip(f^m on B_R^n)"
    #: Lipschitz constant in W_2 of the mean-field map F on measures on B_R, at least that of f for every n.
    MEAN_FIELD = "Lip_W2(F on P(B_R))"
    #: Lipschitz constant of the causal mean-field map F^m in the conditional distance d_2 (Definition 4.1),
    #: at least that of f^m for every n.
    MASKED_MEAN_FIELD = "Lip_d2(F^m on P(B_R))"
    #: Local Lipschitz constant at given tokens: the spectral norm of the Jacobian.
    LOCAL = "‖D_X f‖"
    #: Lipschitz constant on all sequences in the ball of radius R, between the norms max_j |x_j| and
    #: max_i |y_i|.
    TOKEN_WISE = "Lip_∞(f on B_R^n)"
    #: The same at given tokens: max_i sup |Σ_j J_ij e_j| over tangents with |e_j| ≤ 1.
    LOCAL_TOKEN_WISE = "‖D_X f‖_∞"
    #: Lipschitz constant on all tokens in R^d, for maps that have one.
    EVERYWHERE = "Lip(f)"


@dataclass(frozen=True)
class Hypothesis:
    """A condition of a theorem, and whether it holds for the given attention."""

    statement: str
    holds: bool


@dataclass(frozen=True)
class Bound:
    """An upper or lower bound on a Lipschitz constant, stored as a logarithm.

    Attributes
    ----------
    name
        Name of the function that computed the bound.
    side
        "upper" or "lower".
    quantity
        The Lipschitz constant that is bounded.
    source
        Theorem and paper, or the documentation page with the proof.
    log_formula
        Natural logarithm of the formula's value, rounded up for an upper and down for a lower bound. It is
        finite where the value overflows, and −inf where the value is zero.
    hypotheses
        The conditions under which the formula is a bound.

    """

    name: str
    side: Side
    quantity: Quantity
    source: str
    log_formula: float
    hypotheses: tuple[Hypothesis, ...] = ()

    def __post_init__(self) -> None:
        if math.isnan(self.log_formula):
            raise ArithmeticError("a formula gave nan")

    @classmethod
    def upper(
        cls,
        name: str,
        quantity: Quantity,
        source: str,
        *,
        formula: float | None = None,
        log_formula: float | None = None,
        hypotheses: tuple[Hypothesis, ...] = (),
    ) -> Bound:
        """Return an upper bound from the computed value of its formula, which is rounded up.

        Pass either the value as ``formula`` or its logarithm as ``log_formula``.
        """
        if (formula is None) == (log_formula is None):
            raise TypeError("give one of formula and log_formula")
        found = Log.of(formula or 0.0) if log_formula is None else Log(log_formula)
        return cls(name, "upper", quantity, source, log_above(float(found.log)), hypotheses)

    @property
    def holds(self) -> bool:
        """Whether all hypotheses hold for the given attention."""
        return all(hypothesis.holds for hypothesis in self.hypotheses)

    @property
    def log_value(self) -> float:
        """The natural logarithm of the bound. If a hypothesis fails, it is inf for an upper bound, and −inf
        for a lower bound.
        """
        if self.holds:
            return self.log_formula
        return math.inf if self.side == "upper" else -math.inf

    @property
    def value(self) -> float:
        """The value of the bound, inf where it overflows. If a hypothesis fails, it is inf for an upper bound
        and 0 for a lower bound.
        """
        return exp(self.log_value)

    @property
    def formula(self) -> float:
        """The number that the formula gives, even if a hypothesis fails."""
        return exp(self.log_formula)

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        sign = "≤" if self.side == "upper" else "≥"
        failed = "; ".join(h.statement for h in self.hypotheses if not h.holds)
        number = limit_in_digits(self.value, 6, upper=self.side == "upper")
        if self.holds and math.isinf(self.value):
            number = f"exp({self.log_value:.6g})"
        reason = f", as it needs: {failed}" if failed else ""
        return f"Bound({self.quantity} {sign} {number}{reason}; {self.name}, {self.source})"


def exp(log: float) -> float:
    """Return e^log, inf where it overflows."""
    try:
        return math.exp(log)
    except OverflowError:
        return math.inf


def check_radius(radius: object) -> float:
    """Return ``radius`` as a float after checking that it is a finite number > 0."""
    remedy = "If a norm layer precedes the attention, norm_radius(norm) computes it."
    expected = "a finite number > 0, the largest norm of a token"
    return check_number("radius", radius, expected, remedy=remedy)


def check_length(length: object, *, least: int = 1, name: str = "length") -> int:
    """Return ``length`` as an int after checking that it is a whole number >= ``least``."""
    try:
        n = operator.index(length)  # type: ignore[arg-type]
    except TypeError:
        n = least - 1
    if isinstance(length, bool) or n < least:
        raise ArgumentError(name, expected=f"a whole number of tokens n >= {least}", got=repr(length))
    return n
