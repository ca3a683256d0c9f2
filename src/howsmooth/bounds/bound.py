"""What every statement of this room returns: a number, the side it is on, and what it depends on."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from howsmooth.errors import ArgumentError

__all__ = ["Bound", "Hypothesis", "Quantity", "check_length", "check_radius"]

Side = Literal["upper", "lower"]

# Formulas are evaluated in float64, most of them as logarithms up to a few hundred: this margin covers
# their rounding, so that an upper bound is never below, and a lower bound never above, its formula.
_MARGIN = 1e-12


class Quantity(StrEnum):
    """What a bound is a bound of."""

    #: Lipschitz constant of f on all sequences of n tokens in the ball of radius R, Frobenius norm.
    GLOBAL = "Lip(f on B_R^n)"
    #: The same for masked (causal) self-attention.
    MASKED = "Lip(f^m on B_R^n)"
    #: Lipschitz constant in W_2 of the mean-field map on measures on B_R; it bounds f for every n.
    MEAN_FIELD = "Lip_W2(F on P(B_R))"
    #: For masked attention, in the conditional distance d_2 (Definition 4.1); it bounds f^m for every n.
    MASKED_MEAN_FIELD = "Lip_d2(F^m on P(B_R))"
    #: Local Lipschitz constant, the spectral norm of the Jacobian, at the given tokens.
    LOCAL = "‖D_X f‖"
    #: Lipschitz constant on all of R^d, for attentions that have one.
    EVERYWHERE = "Lip(f)"


@dataclass(frozen=True)
class Hypothesis:
    """A condition of a statement, and whether it holds for the parameters given."""

    statement: str
    holds: bool


@dataclass(frozen=True)
class Bound:
    """A bound on a Lipschitz constant.

    Attributes
    ----------
    name
        Of the function that computed it.
    side
        "upper" or "lower".
    quantity
        What is bounded.
    source
        Theorem and paper, or where it is derived.
    log_formula
        Natural logarithm of what the formula gives, rounded outwards (up for an upper bound): finite where
        the number itself overflows, −inf where it is zero.
    hypotheses
        The conditions under which the formula is a bound.

    """

    name: str
    side: Side
    quantity: Quantity
    source: str
    log_formula: float
    hypotheses: tuple[Hypothesis, ...] = ()

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
        """Make an upper bound of a formula's value or of its logarithm (give one), rounded up."""
        log = _log(formula, log_formula)
        return cls(name, "upper", quantity, source, log + _MARGIN, hypotheses)

    @classmethod
    def lower(
        cls,
        name: str,
        quantity: Quantity,
        source: str,
        *,
        formula: float | None = None,
        log_formula: float | None = None,
        hypotheses: tuple[Hypothesis, ...] = (),
    ) -> Bound:
        """Make a lower bound of a formula's value or of its logarithm (give one), rounded down."""
        log = _log(formula, log_formula)
        return cls(name, "lower", quantity, source, log - _MARGIN, hypotheses)

    @property
    def holds(self) -> bool:
        """Whether all hypotheses hold."""
        return all(hypothesis.holds for hypothesis in self.hypotheses)

    @property
    def log_value(self) -> float:
        """Natural logarithm of ``value``."""
        if self.holds:
            return self.log_formula
        return math.inf if self.side == "upper" else -math.inf

    @property
    def value(self) -> float:
        """The bound; inf where it overflows. Trivial (inf above, 0 below) where a hypothesis fails."""
        return _exp(self.log_value)

    @property
    def formula(self) -> float:
        """What the formula gives, whether or not it is a bound here."""
        return _exp(self.log_formula)

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        sign = "≤" if self.side == "upper" else "≥"
        failed = "; ".join(h.statement for h in self.hypotheses if not h.holds)
        number = f"{self.value:.6g}"
        if self.holds and math.isinf(self.value):
            number = f"exp({self.log_value:.6g})"
        reason = f", as it needs: {failed}" if failed else ""
        return f"Bound({self.quantity} {sign} {number}{reason}; {self.name}, {self.source})"


def _log(formula: float | None, log_formula: float | None) -> float:
    if (formula is None) == (log_formula is None):
        raise TypeError("give one of formula and log_formula")
    if log_formula is None:
        assert formula is not None
        log_formula = -math.inf if formula == 0 else math.log(formula)
    if math.isnan(log_formula):
        raise ArithmeticError("a formula gave nan")
    return log_formula


def _exp(log: float) -> float:
    try:
        return math.exp(log)
    except OverflowError:
        return math.inf


def check_radius(radius: object) -> float:
    """Return the radius as a float, after checking that it is a finite number > 0."""
    try:
        value = float(radius)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if isinstance(radius, bool) or not (math.isfinite(value) and value > 0):
        raise ArgumentError(
            "radius",
            expected="a finite number > 0, the largest norm of a token",
            got=repr(radius),
            remedy="With a norm layer before the attention, norm_radius(norm) gives it.",
        )
    return value


def check_length(length: object, *, least: int = 1) -> int:
    """Return the sequence length as an int, after checking that it is a whole number >= ``least``."""
    try:
        n = operator.index(length)  # type: ignore[arg-type]
    except TypeError:
        n = least - 1
    if isinstance(length, bool) or n < least:
        raise ArgumentError("length", expected=f"a whole number of tokens n >= {least}", got=repr(length))
    return n
