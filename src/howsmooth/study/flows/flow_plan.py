"""Define the plan of a flow: the system, the tokens at the start, the times and the integrator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from howsmooth.errors import ArgumentError
from howsmooth.study.options import HOW, OUTPUT, Options, choice, flag, number, option, whole, words
from howsmooth.study.plans import shared
from howsmooth.study.ranges import Ranges

__all__ = ["ATTENTIONS", "FIXED_STEP", "METHODS", "FlowPlan", "Grid"]

ATTENTIONS = ("softmax", "l2", "sinkhorn")
FIXED_STEP = ("euler", "midpoint", "rk4", "residual")
METHODS = ("dopri5", "dopri8", "bosh3", *FIXED_STEP)
_MOST_FRAMES = 10_000
_MOST_STEPS = 10_000_000
# A state is stored in one SQLite value, which holds at most 10^9 bytes.
_MOST_NUMBERS = 100_000_000

_OF_A_MODEL = "What flows: models"


class Grid(NamedTuple):
    """The times at which a flow stores its tokens, from time 0 on, and the integrator's fixed step.

    ``step`` is ``None`` if the integrator chooses its steps.
    """

    times: tuple[float, ...]
    step: float | None


@dataclass(frozen=True)
class FlowPlan(Options):
    """The plan of a flow, in which tokens X = (x_1, ..., x_n) move by x_i' = f(X)_i for a map f.

    The map is attention, or one layer of a model after another.
    """

    PANEL: ClassVar[str] = "What flows"

    source: str = shared(
        "source",
        help="A named system (identity, negative, one-direction, turning, random), a .safetensors or "
        ".npz file of parameters, a built-in model, a local folder, or a Hub id.",
        metavar="SOURCE",
    )
    start: str = option(
        "auto",
        words(place=True),
        "Tokens at the start: gaussian or sphere (random), text (the tokens of a model at its text), file "
        "(the X of a parameter file), or a .npy or .npz file of tokens X. auto: the tokens of the source; "
        "without any, gaussian, or sphere with --sphere.",
        metavar="KIND|FILE",
    )
    tokens: int | None = option(
        None, whole(1, _MOST_NUMBERS), "Number of tokens. Default: 40, or 64 tokens of a text."
    )
    dimension: int | None = option(
        None, whole(1, _MOST_NUMBERS), "Dimension of the tokens of a named system. Default: 2."
    )
    radius: float | None = option(
        None,
        number(positive=True),
        "Radius of the sphere, or standard deviation of Gaussian tokens. Default: 1, or with --sphere the "
        "root mean square of the norms of given tokens.",
    )
    attention: str = option(
        "softmax",
        choice(*ATTENTIONS),
        "Attention of a named system: softmax, l2 or sinkhorn.",
        metavar="KIND",
    )
    beta: float = option(1.0, number(positive=True), "Factor of the scores of a named system.")
    causal: bool = option(False, flag(), "Give a named system a causal mask.")
    sphere: bool = option(
        False,
        flag(),
        "Keep the tokens on a sphere of radius --radius, as norm layers do. Given tokens are projected onto "
        "it.",
    )
    rescale: bool = option(
        False, flag(), "Follow exp(-tV) x instead of the tokens x, which may grow without limit."
    )
    closure: bool = option(False, flag(), "Also follow the Gaussian measure from which the tokens are drawn.")
    text: str = shared("text", panel=_OF_A_MODEL)
    layers: Ranges = shared("layers", panel=_OF_A_MODEL)
    random_init: bool = shared("random_init", panel=_OF_A_MODEL)
    as_decoder: bool = shared("as_decoder", panel=_OF_A_MODEL)
    norms: bool = option(
        False,
        flag(),
        "For pre-norm models: move the tokens by f(N(X)), attention after its norm layer. Without this "
        "option they move by attention alone.",
        panel=_OF_A_MODEL,
    )
    growth: bool = option(
        False, flag(), "Also measure, at ten times, how much small perturbations of the start have grown."
    )
    until: float | None = option(
        None,
        number(positive=True),
        "Last time of the flow. Default: 10, or the number of layers of a model, each of which lasts 1.",
        panel=HOW,
    )
    frames: int = option(
        100, whole(1, _MOST_FRAMES), "Largest number of stored states after the first one.", panel=HOW
    )
    method: str = option(
        "dopri5",
        choice(*METHODS),
        "Integrator: dopri5, dopri8 or bosh3, which choose their steps; euler, midpoint or rk4 with a fixed "
        "step; or residual, for layers X + h f(X).",
        metavar="NAME",
        panel=HOW,
    )
    step: float | None = option(
        None,
        number(positive=True),
        "Step of a method with a fixed step. Default: one step for each frame; with residual, one step "
        "for each layer of a model.",
        panel=HOW,
    )
    rtol: float = option(
        1e-7, number(positive=True), "Relative error of methods that choose their steps.", panel=HOW
    )
    seed: int = shared("seed")
    tolerance: float | None = option(
        None,
        number(positive=True),
        "Tokens nearer than this distance are in one cluster. Default: 1/20 of their spread at the start.",
        panel=OUTPUT,
    )
    animation: str = option(
        "gif", choice("gif", "none"), "Format of the animation: gif or none.", metavar="KIND", panel=OUTPUT
    )

    def check(self) -> None:
        """Raise ArgumentError if options contradict each other."""
        if (self.tokens or 1) * (self.dimension or 1) > _MOST_NUMBERS:
            raise ArgumentError(
                "tokens",
                expected=f"at most {_MOST_NUMBERS} coordinates together",
                got=f"{self.tokens} tokens of dimension {self.dimension}",
            )
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
        """Return the times at which a flow stores its tokens, and the integrator's step if it is fixed.

        With a fixed step, the times are whole numbers of steps. Otherwise they are evenly spaced.

        Parameters
        ----------
        layers
            The number of layers of a model, each of which lasts one unit of time; ``None`` for one map.

        Raises
        ------
        ArgumentError
            If no whole number of steps reaches the last time, or there are too many steps.

        """
        until = float(layers or 10) if self.until is None else self.until
        if layers is not None and until > layers:
            raise ArgumentError(
                "until",
                expected=f"at most {layers}, because each of the {layers} layers lasts one unit of time",
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
                expected=f"a step that reaches {until:g} in a whole number of at most {_MOST_STEPS} steps",
                got=f"{step:g}",
                remedy="Change --step or --until.",
            )
        frames = min(self.frames, count)
        places = [round(k * count / frames) for k in range(frames + 1)]
        return Grid(tuple(until * place / count for place in places), until / count)

    def settings(self) -> dict[str, Any]:
        """Return the options that must be the same in every run on one store.

        The system must be the same too, which is checked separately.
        """
        apart = ("growth", "tolerance", "animation")
        return {name: value for name, value in self.described().items() if name not in apart}
