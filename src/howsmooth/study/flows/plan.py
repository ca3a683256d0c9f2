"""What a flow is asked for: where it starts, what moves it, until when, and how it is integrated."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from howsmooth.errors import ArgumentError

__all__ = ["ATTENTIONS", "FIXED_STEP", "METHODS", "FlowPlan", "Grid"]

ATTENTIONS = ("softmax", "l2", "sinkhorn")
FIXED_STEP = ("euler", "midpoint", "rk4", "residual")
METHODS = ("dopri5", "dopri8", "bosh3", *FIXED_STEP)
_MOST_FRAMES = 10_000
_MOST_STEPS = 10_000_000
# A state must fit into one value of SQLite.
_MOST_NUMBERS = 100_000_000


@dataclass(frozen=True)
class Grid:
    """The times of the frames, and the step between them if it is fixed.

    Attributes
    ----------
    times
        Of the frames, the start included.
    step
        Of the integrator; ``None`` if it chooses its own.

    """

    times: tuple[float, ...]
    step: float | None


@dataclass(frozen=True)
class FlowPlan:
    """A flow: x_i' = f(X)_i from given tokens.

    Attributes
    ----------
    source
        A named system, a parameter file or a model.
    start
        ``gaussian`` or ``sphere`` (drawn), ``text`` (the tokens of a model), ``file`` (the X of a parameter
        file), or the path of a ``.npy`` or ``.npz`` file of tokens; ``auto`` for the first of these that
        the source has.
    tokens, dimension
        Their number and dimension; ``None`` for what source and start say.
    radius
        Standard deviation of each coordinate of ``gaussian``, or the radius of ``sphere``.
    until
        The last time; ``None`` for the number of layers of a model, 10 otherwise.
    frames
        How many states after the start are kept, at most.
    method, step, rtol
        As for :func:`howsmooth.dynamics.flow`.
    sphere
        Put the start on a sphere around the origin and stay there: on that of ``radius`` if it is drawn, on
        that of the root mean square norm if tokens are given.
    rescale
        Follow e^{−tV} x_i(t).
    closure
        Beside the tokens, follow the Gaussian measure that they are drawn from.
    growth
        Measure how perturbations of the start grow; by rk4, with a step a frame, where the method chooses its
        steps.
    attention, causal, beta
        Of a named system: the kind, the mask, and the factor of its scores.
    layers, text, random_init, as_decoder
        Of a model.
    norms
        Of a model: attention behind its norm layer, from the tokens before that, instead of attention alone.
    seed
        From which all randomness derives.

    """

    source: str
    start: str = "auto"
    tokens: int | None = None
    dimension: int | None = None
    radius: float = 1.0
    until: float | None = None
    frames: int = 100
    method: str = "dopri5"
    step: float | None = None
    rtol: float = 1e-7
    sphere: bool = False
    rescale: bool = False
    closure: bool = False
    growth: bool = False
    attention: str = "softmax"
    causal: bool = False
    beta: float = 1.0
    layers: str = "all"
    text: str = "python-docs"
    random_init: bool = False
    as_decoder: bool = False
    norms: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no source could make right."""
        for name, choices in (("method", METHODS), ("attention", ATTENTIONS)):
            if getattr(self, name) not in choices:
                raise ArgumentError(
                    name, expected=f"one of {', '.join(choices)}", got=repr(getattr(self, name))
                )
        for name in ("radius", "until", "step", "rtol", "beta"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ArgumentError(name, expected="a finite number > 0", got=str(value))
        for name, most in (("tokens", _MOST_NUMBERS), ("dimension", _MOST_NUMBERS), ("frames", _MOST_FRAMES)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ArgumentError(name, expected=f"a number from 1 to {most}", got=str(value))
        if (self.tokens or 1) * (self.dimension or 1) > _MOST_NUMBERS:
            raise ArgumentError(
                "tokens",
                expected=f"at most {_MOST_NUMBERS} coordinates together",
                got=f"{self.tokens} tokens of dimension {self.dimension}",
            )
        if not 0 <= self.seed < 2**63:
            raise ArgumentError("seed", expected="an integer from 0 to 2^63 - 1", got=str(self.seed))
        if self.step is not None and self.method not in FIXED_STEP:
            raise ArgumentError(
                "step",
                expected=f"none with the method {self.method}, which chooses its own steps",
                got=str(self.step),
                remedy=f"Leave it out, or choose --method among {', '.join(FIXED_STEP)}.",
            )
        apart = (("rescale", "sphere"), ("closure", "sphere"), ("closure", "rescale"))
        for name, other in (*apart, ("norms", "rescale"), ("norms", "closure")):
            if getattr(self, name) and getattr(self, other):
                raise ArgumentError(
                    name, expected=f"--{name} without --{other}", got="both", remedy="Leave one out."
                )

    def grid(self, layers: int | None) -> Grid:
        """Place the frames: at whole steps where the step is fixed, evenly otherwise.

        Parameters
        ----------
        layers
            The number of a model's layers, each of which lasts one unit of time; ``None`` for one map.

        Raises
        ------
        ArgumentError
            If the steps do not end where the flow does, or would never end.

        """
        until = float(layers or 10) if self.until is None else self.until
        if layers is not None and until > layers:
            raise ArgumentError(
                "until",
                expected=f"at most {layers}, as each of the {layers} layers lasts one unit of time",
                got=f"{until:g}",
            )
        if self.method not in FIXED_STEP:
            return Grid(tuple(until * k / self.frames for k in range(self.frames + 1)), None)
        step = self.step
        if step is None:
            step = 1.0 if layers is not None and self.method == "residual" else until / self.frames
        count = round(until / step) if until / step <= _MOST_STEPS else _MOST_STEPS + 1
        if not 1 <= count <= _MOST_STEPS or abs(count * step - until) > 1e-9 * until:
            raise ArgumentError(
                "step",
                expected=f"a step of which a whole number, at most {_MOST_STEPS}, reaches {until:g}",
                got=f"{step:g}",
                remedy="Change --step or --until.",
            )
        frames = min(self.frames, count)
        places = [round(k * count / frames) for k in range(frames + 1)]
        return Grid(tuple(until * place / count for place in places), until / count)

    def settings(self) -> dict[str, Any]:
        """Return what all frames of one store must have in common, apart from what was found."""
        return {name: value for name, value in asdict(self).items() if name != "growth"}
