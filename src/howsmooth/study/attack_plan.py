"""What an attack is asked for and carried out with, and what it tells while it works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from howsmooth.errors import ArgumentError
from howsmooth.study.sources import Request, Source

__all__ = ["AttackPlan", "AttackProgress", "AttackTools", "attack_tools"]

# More than would ever end.
_MOST = 1_000_000


@dataclass(frozen=True)
class AttackPlan:
    """What to attack, and how hard.

    Attributes
    ----------
    request
        Which attentions.
    lengths
        Numbers of tokens, each at least 2.
    radius
        Of the ball: a number; ``"auto"`` for the largest norm that the norm layer before the attention can
        give, or else that of the tokens at hand; ``"data"`` for that of the tokens at hand.
    steps, restarts
        Of the search: steps of gradient ascent over whole inputs, three times as many among inputs of few
        distinct tokens; and random restarts of the latter.

    """

    request: Request
    lengths: tuple[int, ...]
    radius: float | str = "auto"
    steps: int = 100
    restarts: int = 48

    def __post_init__(self) -> None:
        """Refuse what no attention could make right."""
        if not self.lengths or min(self.lengths) < 2:
            raise ArgumentError(
                "lengths",
                expected="numbers of at least 2, since one token alone is always V x",
                got=str(min(self.lengths)) if self.lengths else "none",
            )
        for name, least in (("steps", 1), ("restarts", 0)):
            value = getattr(self, name)
            if not least <= value <= _MOST:
                expected = f"at least {least}" if value < least else f"at most {_MOST}"
                raise ArgumentError(name, expected=expected, got=str(value))

    def identity(self, source: Source) -> dict[str, Any]:
        """Return what all attacks of one store must have in common."""
        request = self.request
        return {
            "source": source.label,
            "fingerprint": source.fingerprint,
            "text": source.text,
            "scope": request.scope,
            "radius": self.radius,
            "steps": self.steps,
            "restarts": self.restarts,
            "seed": request.seed,
            **({"windows": source.windows} if source.windows else {}),
        }


@dataclass(frozen=True)
class AttackTools:
    """The functions that an attack calls; their signatures are those of the library's own.

    Attributes
    ----------
    constructions
        As :func:`howsmooth.adversarial.constructions`.
    ascend
        As :func:`howsmooth.adversarial.ascend`.
    best
        As :func:`howsmooth.bounds.best`.
    measure
        As :func:`howsmooth.local_lipschitz`.

    """

    constructions: Callable[..., Sequence[Any]]
    ascend: Callable[..., Any]
    best: Callable[..., Any]
    measure: Callable[..., Any]


def attack_tools() -> AttackTools:
    """Return the library's own functions."""
    from howsmooth.adversarial import ascend, constructions
    from howsmooth.bounds import best
    from howsmooth.lipschitz import local_lipschitz

    return AttackTools(constructions, ascend, best, local_lipschitz)


@dataclass(frozen=True)
class AttackProgress:
    """How far an attack is: ``done`` of ``planned`` (attention, length) pairs, ``cost`` in units of time."""

    done: int
    planned: int
    kept: int
    cost_done: float
    cost_planned: float
    words: str
