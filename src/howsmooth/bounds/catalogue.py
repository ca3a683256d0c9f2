"""The catalogue of bounds: each is a formula with its quantity, its source and its hypotheses.

A formula is a function of a prepared problem. ``statement`` makes of it the public function that prepares the
problem from a user's arguments, evaluates the formula and the hypotheses, rounds outwards once, and has the
documentation of its family. The signature is that of the function that prepares the problem, whose docstring
describes the arguments that are its own; what is said of the others, and of errors, stands here once.
``best``, ``table``, the lists in the documentation and ``howsmooth bound`` go over ``CATALOGUE``.

Formulas are written with :class:`~howsmooth.bounds.log_numbers.Log`, so one text gives numbers, their
logarithms where they overflow, and gradients, which ``howsmooth.nn`` needs to divide layers by their bounds.
A new bound is one function::

    @statement(on_ball, quantity=Quantity.GLOBAL, source=f"{PAPER}, Theorem E.3", masks="none")
    def theorem_e_3(p: Problem) -> Log:
        '''Bound Lip(f on B_R^n) from above by Theorem E.3 of the paper, which allows a query bias.'''
        return p.V * (3 * (p.a**2 + 4 * p.n * p.a3**2 + p.n)) ** 0.5
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from howsmooth.bounds.bound import Bound, Hypothesis, Quantity, Side
from howsmooth.bounds.bound_problem import Problem
from howsmooth.bounds.log_numbers import Log, Number
from howsmooth.rounding import log_above, log_below

__all__ = ["CATALOGUE", "OURS", "PAPER", "Condition", "Statement", "listing", "statement"]

PAPER = "Castin, Ablin, Peyré, How Smooth Is Attention?, ICML 2024"
OURS = "howsmooth documentation, "

P = ParamSpec("P")
T = TypeVar("T")
Value = Number | tuple[Number, Number] | Bound
Heads = Literal["one", "several", "any"]
Masks = Literal["none", "causal", "none or causal", "any"]

# What is said of an argument unless the function that prepares the problem says more.
_ARGUMENTS = {
    "attention": """{heads}: a :class:`~howsmooth.bounds.Head`, a :class:`~howsmooth.attention.SelfAttention`
or a captured site.""",
    "X": """Tokens (n, d) of one sequence: a tensor, an array or nested lists of finite numbers. None stands
for the tokens of the site.""",
    "length": "Number n >= 1 of tokens.",
    "radius": "Largest norm R > 0 of a token.",
}
_ERRORS = """ArgumentError
    If an argument does not fit{or_attention}.
NonFiniteError
    If an entry of a matrix is NaN or infinite, or a score overflows."""
_ERRORS_OF_ATTENTION = """; or if there are rotary positions or other scores than ⟨A x_i + b, x_j⟩, or
    several heads where one is asked for"""
_TAB = " " * 4
# The hypothesis on the mask. A bare head has every mask.
_MASKS = {
    "none": "no mask",
    "causal": "a causal mask and no other",
    "none or causal": "no mask, or a causal one",
}
# These are constants in other norms than all others.
_NOT_COMPARED = (Quantity.TOKEN_WISE, Quantity.LOCAL_TOKEN_WISE)


@dataclass(frozen=True)
class Condition(Generic[T]):
    """A hypothesis of a bound in words, and the function that says whether it holds for a problem."""

    words: str
    holds: Callable[[T], bool]

    def of(self, problem: T) -> Hypothesis:
        """Return this condition as a hypothesis that says whether it holds for ``problem``."""
        return Hypothesis(self.words, bool(self.holds(problem)))


@dataclass(frozen=True, eq=False)
class Statement(Generic[T]):
    """A bound of the catalogue: its formula, with the bounded quantity, the source and the hypotheses."""

    name: str
    #: The bounded constant, or a function that reads it from the problem.
    quantity: Quantity | Callable[[T], Quantity]
    #: Theorem and paper, or the documentation page with the proof.
    source: str
    #: The value of the bound as a function of the problem; a lower and an upper value if the caller chooses
    #: the side; or a whole bound.
    formula: Callable[[T], Value]
    #: What the problem must have: "X" for tokens, "length" for a number of tokens.
    arguments: frozenset[str]
    #: The hypotheses beside those on heads and masks.
    needs: Sequence[Condition[T]] = ()
    #: None if the caller chooses it.
    side: Side | None = "upper"
    #: The attentions that the statement is about.
    heads: Heads | None = "one"
    masks: Masks = "any"
    #: Says for which of these attentions ``best`` and ``table`` list the statement.
    listed: Callable[[Problem], bool] | None = None
    #: Whether the formula searches for tokens, which takes long.
    searched: bool = False

    def quantity_of(self, problem: T) -> Quantity:
        """Return the kind of Lipschitz constant that this entry of the catalogue bounds for a problem."""
        return self.quantity if isinstance(self.quantity, Quantity) else self.quantity(problem)

    def at(self, problem: T, side: Side | None = None) -> Bound:
        """Evaluate the bound and its hypotheses for a problem, and round the bound outwards."""
        if isinstance(problem, Problem) and self.heads == "one" and len(problem.parameters.heads) > 1:
            problem.parameters.one_head(self.name)  # raises an error
        hypotheses = [condition.of(problem) for condition in self.needs]
        if isinstance(problem, Problem) and self.masks in _MASKS:
            parameters = problem.parameters
            seen = parameters.bare or parameters.masking in self.masks.split(" or ")
            hypotheses.insert(0, Hypothesis(_MASKS[self.masks], seen))
        found = self.formula(problem)
        if isinstance(found, Bound):
            return found
        upper = (self.side or side or getattr(problem, "side", "upper")) == "upper"
        if isinstance(found, tuple):
            found = found[upper]
        log = float(Log.of(found).log.detach())
        log = log_above(log) if upper else log_below(log)
        about = self.quantity_of(problem), self.source
        return Bound(self.name, "upper" if upper else "lower", *about, log, tuple(hypotheses))

    def sides(self, problem: Problem) -> tuple[Side, ...]:
        """Return the sides, "upper" or "lower", on which ``best`` and ``table`` list this bound."""
        sides: tuple[Side, ...] = ("upper", "lower") if self.side is None else (self.side,)
        missing = any(getattr(problem, argument) is None for argument in self.arguments)
        if self.heads is None or missing or self.quantity in _NOT_COMPARED:
            return ()
        if self.listed is not None:
            return sides if self.listed(problem) else ()
        if not problem.plain:
            return ()
        masking, heads = problem.parameters.masking, len(problem.parameters.heads)
        # A lower bound on the constant of the mean-field map says nothing of a given number of tokens.
        of_measures = self.side == "lower" and self.quantity == Quantity.MEAN_FIELD
        fits = (self.masks == "any" or masking in self.masks.split(" or ")) and not (
            of_measures and problem.length is not None
        )
        return sides if fits and (self.heads == "any" or (self.heads == "one") == (heads == 1)) else ()


CATALOGUE: dict[str, Statement[Any]] = {}
"""All statements by name, in the order in which they are defined."""


def statement(
    prepare: Callable[P, T],
    *,
    quantity: Quantity | Callable[[T], Quantity],
    source: str,
    needs: Sequence[Condition[T]] = (),
    **others: Any,
) -> Callable[[Callable[[T], Value]], Callable[P, Bound]]:
    """Add a formula to the catalogue, and return the public function that evaluates it.

    ``prepare`` makes the problem from the public arguments. All else, also ``side``, ``heads``, ``masks``,
    ``listed`` and ``searched``, is described in :class:`Statement`.
    """

    def decorate(formula: Callable[[T], Value]) -> Callable[P, Bound]:
        signature, name = inspect.signature(prepare), formula.__name__
        arguments = frozenset(signature.parameters) & {"X", "length"}
        made = Statement(name, quantity, source, formula, arguments, needs, **others)
        CATALOGUE[name] = made

        def public(*args: P.args, **kwargs: P.kwargs) -> Bound:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
            return made.at(prepare(*args, **kwargs))

        public.__name__ = public.__qualname__ = name
        public.__module__, public.__doc__ = formula.__module__, _documented(made, formula, prepare)
        public.__annotations__ = {**prepare.__annotations__, "return": "Bound"}
        public.__signature__ = signature.replace(return_annotation="Bound")  # type: ignore[attr-defined]
        return public

    return decorate


def listing(names: Sequence[str]) -> str:
    """List the named bounds for the documentation, grouped by side and by bounded quantity."""
    groups: dict[str, list[str]] = {}
    for name, made in CATALOGUE.items():
        if name in names:
            side = f"{made.side.capitalize()} bounds" if made.side else "Upper and lower bounds"
            groups.setdefault(f"{side} on {_quantity_in_words(made)}", []).append(f"``{name}``")
    return "\n".join(
        textwrap.fill(f"- {title}: {', '.join(found)}.", 106, subsequent_indent="  ", break_on_hyphens=False)
        for title, found in groups.items()
    )


def _quantity_in_words(made: Statement[Any]) -> Quantity:
    return made.quantity if isinstance(made.quantity, Quantity) else Quantity.GLOBAL


def _documented(made: Statement[T], formula: Callable[[T], Value], prepare: Callable[P, T]) -> str:
    doc = inspect.cleandoc(prepare.__doc__ or "") + "\n"
    own = dict(re.findall(r"^(\w+)\n((?:    .*\n?)+)", doc, re.MULTILINE))
    heads = "One head" if made.heads == "one" else "Any number of heads"
    parameters = []
    for name in inspect.signature(prepare).parameters:
        words = own.get(name) or textwrap.indent(_ARGUMENTS[name].format(heads=heads), _TAB)
        parameters.append(f"{name}\n{words.rstrip()}")
    quantity = _quantity_in_words(made)
    returns = f"{made.side.capitalize()} bound on {quantity}" if made.side else f"Bound on {quantity}"
    if made.side == "upper" and quantity in (Quantity.MEAN_FIELD, Quantity.MASKED_MEAN_FIELD):
        returns += ", and so on Lip(f on B_R^n) for every n"
    words = "; ".join([*filter(None, [_MASKS.get(made.masks)]), *(one.words for one in made.needs)])
    returns += f". Hypotheses: {words}." if words else "."
    reference = made.source.replace(OURS, "Documentation page ")
    sections = {
        "Parameters": "\n".join(parameters),
        "Returns": "Bound\n" + textwrap.fill(returns, 106, initial_indent=_TAB, subsequent_indent=_TAB),
        "Raises": _ERRORS.format(or_attention=_ERRORS_OF_ATTENTION if made.heads else ""),
        "References": textwrap.fill(f"{reference}.", 106),
    }
    written = [f"{name}\n{'-' * len(name)}\n{text}\n" for name, text in sections.items()]
    return "\n".join([inspect.cleandoc(formula.__doc__ or "") + "\n", *written])
