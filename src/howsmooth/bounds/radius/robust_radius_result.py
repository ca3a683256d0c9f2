"""The class ``RobustRadius``: a proved robust radius around one input, and the size of the smallest attack
found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from howsmooth.roundoff import limit_in_digits

__all__ = ["RobustRadius"]


@dataclass(frozen=True)
class RobustRadius:
    """A radius around one input within which the answer of a classifier provably does not change.

    It is proved for the network in real arithmetic with the stored weights, around the embedded tokens as
    they were given or computed in float64: every remainder is bounded, and so are all rounding errors of the
    computation.
    """

    #: Largest ε at which the margin's lower bound is positive, on the axis of ``norm``.
    radius: float
    #: Order of the Taylor expansion: 2 or 3.
    order: int
    #: The tokens that move, jointly.
    tokens: tuple[int, ...]
    #: 2 for the Euclidean norm of all changes together; infinity for the largest change of an entry.
    norm: float
    #: The class that does not change, and the class that bounds the radius; None for a functional.
    label: int | None
    rival: int | None
    #: Whether a target was given: the answer does not become it. Otherwise it becomes no other class.
    targeted: bool
    #: Difference of their logits at the input, or the functional minus its threshold.
    margin: float
    #: Pairs (ε, lower bound of the margin on the ball of radius ε): the radii that the search tried, and half
    #: of the radius.
    curve: tuple[tuple[float, float], ...]
    #: Size of the smallest change of the answer that projected gradients found; infinite if none, None if not
    #: asked for.
    attack: float | None
    #: The smallest margin of all classes, each divided by the norm of its gradient: the radius of a linear
    #: network with these gradients, no bound.
    first_order: float
    #: What each stage takes from the margin at ``radius``, in the order of the network; last, as "rounding",
    #: what residuals of rounding take beside their part in the stages. Empty if the time ended before a
    #: radius was proved.
    losses: dict[str, float] = field(repr=False)
    #: What the polynomial part takes from the margin at ``radius``.
    polynomial_loss: float = field(repr=False)
    #: Wall time of all this.
    seconds: float
    #: Whether ``seconds`` ended the search. Longer searches may then prove a larger radius.
    timed_out: bool

    def __float__(self) -> float:
        """Return the proved radius."""
        return self.radius

    def __str__(self) -> str:
        """Describe the proved radius, the attack and the largest reduction of the margin in a few
        sentences.
        """
        moved = f"token {self.tokens[0]}" if len(self.tokens) == 1 else f"{len(self.tokens)} tokens jointly"
        attack = (
            ""
            if self.attack is None
            else f", smallest attack found {limit_in_digits(self.attack, 4, upper=True)}"
        )
        norm = "l2" if self.norm == 2 else "l∞"
        first = "none" if math.isinf(self.first_order) else f"{self.first_order:.4g}"
        kept = f"class {self.label} does not become {self.rival}"
        if not self.targeted:
            kept = f"the answer stays class {self.label} (of all others, {self.rival} bounds the radius)"
        if self.label is None:
            kept = "the functional stays above its threshold"
        radius = limit_in_digits(self.radius, 4, upper=False)
        if not self.radius:
            kept = f"{'the time ended before a' if self.timed_out else 'no'} radius was proved"
        ended = " The time ended; a longer search may prove more." if self.timed_out and self.radius else ""
        lost = ""
        if self.losses:
            worst = max(self.losses, key=lambda name: self.losses[name])
            lost = f" Largest loss: {worst}, {self.losses[worst]:.3g} of a margin of {self.margin:.3g}."
        proved = ", proved" if self.radius else ""
        return (
            f"radius {radius} ({norm}, {moved}, order {self.order}{proved}): "
            f"{kept}{attack}; first-order radius {first} (no bound).{lost}{ended} {self.seconds:.1f} s."
        )
