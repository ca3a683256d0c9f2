"""The command ``howsmooth profile``: which layers, heads and tokens of a model are sensitive on one input."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from howsmooth.cli.one_input import OneInputPlan, Step, find_and_show
from howsmooth.cli.typer_command import ONE_PROCESS, JsonOption, SilentOption, command
from howsmooth.errors import ArgumentError
from howsmooth.study.execution_options import Execution
from howsmooth.study.options import HOW, choice, flag, number, option, size, whole, words
from howsmooth.study.plans import check_output, shared

__all__ = ["ProfilePlan", "profile"]

_EXAMPLES = (
    "Every attention layer and every head is measured at one input, the heads of a layer in one batch. The "
    "ranking is printed; a page, a figure and two tables are written into --out. A model is measured in "
    "float32, whatever the precision of its weights.",
    "Examples:",
    "[cyan]howsmooth profile builtin-encoder --span 0:64[/]  the first 64 tokens of Alice in Wonderland",
    "[cyan]howsmooth profile builtin-decoder --span 0:32 --layers 0,-1 --json[/]  JSON for a program",
    "[cyan]howsmooth profile ./model --text letter.txt --out letter[/]  your own model and text",
    "[cyan]howsmooth profile vit --random-init --images builtin[/]  an image",
    "[cyan]howsmooth profile builtin-encoder --scope model --span 0:32[/]  the whole model, block by block",
)


@dataclass(frozen=True)
class ProfilePlan(OneInputPlan):
    """The options of ``howsmooth profile``: the model, the input, and how to measure."""

    images: str | None = option(
        None, words(place=True), "An image instead of a text, or builtin.", metavar="builtin|FILE"
    )
    audio: str | None = option(
        None,
        words(place=True),
        "Audio instead of a text: a .wav or .npy file, or builtin.",
        metavar="builtin|FILE",
    )
    scope: str = option(
        "all",
        choice("all", "attention", "head", "model"),
        "attention: each layer with all its heads; head: each head alone; all: both; model: the whole model, "
        "and where in its depth it expands.",
        metavar="all|attention|head|model",
    )
    output: str = shared("output")
    influence: bool = option(
        False,
        flag(),
        "Also which token moves which, in the layer with the largest constant. Takes longer: time grows with "
        "the square of the length.",
    )
    rtol: float = option(1e-3, number(), "Relative width of the interval at convergence.", panel=HOW)
    confidence: float = option(
        0.999, number(), "Probability that an interval contains its constant.", panel=HOW
    )
    max_iterations: int = option(200, whole(1), "Largest number of Lanczos steps.", panel=HOW)
    memory: int | None = option(
        None,
        size(),
        "Memory that one measurement may use, such as 8GiB. Default: half of the free memory.",
        metavar="SIZE",
        panel=HOW,
    )

    def check(self) -> None:
        """Refuse more than one input, since one profile describes one input."""
        given = [name for name in ("tokens", "images", "audio") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ArgumentError(given[1], expected="one input", got=f"{' and '.join(given)}")
        if self.span is not None and given[:1] in (["images"], ["audio"]):
            raise ArgumentError("span", expected=f"none beside {given[0]}", got=self.span)
        check_output(self.output, (self.scope,))
        if self.scope == "model" and self.layers.items:
            raise ArgumentError("layers", expected="none with the scope model", got=self.layers.text)
        if self.influence and self.scope not in ("all", "attention"):
            raise ArgumentError("influence", expected="the scope all or attention", got=self.scope)

    def input_of(self, loaded: Any) -> Any:
        """Return the input of a loaded model, as :func:`howsmooth.profile` takes it."""
        from howsmooth.models import audio_inputs, image_inputs

        if self.images is not None:
            made = image_inputs(loaded, self.images)
            # The built-in images are thirty, of which the first is taken.
            return {name: one[:1] for name, one in made.items()} if self.images == "builtin" else made
        if self.audio is not None:
            return audio_inputs(loaded, self.audio)
        return super().input_of(loaded)

    def find(self, loaded: Any, inputs: Any, on_step: Step, folder: Path) -> Any:
        """Measure every layer and head or, with the scope ``model``, every block and their composition."""
        from howsmooth.profiling import depth_profile
        from howsmooth.profiling import profile as measured

        names = ("span", "rtol", "confidence", "max_iterations", "seed", "memory")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names} | {"on_layer": on_step}
        if self.scope == "model":
            return depth_profile(loaded, inputs, output=self.output, **settings)
        scopes = ("attention", "head") if self.scope == "all" else (self.scope,)
        settings |= {"layers": self.layers_of(loaded), "influence": self.influence}
        return measured(loaded, inputs, scopes=scopes, **settings)


@command(*_EXAMPLES, without=ONE_PROCESS, out="howsmooth-profile")
def profile(
    plan: ProfilePlan, execution: Execution, json: JsonOption = False, quiet: SilentOption = False
) -> int:
    """Rank a model's layers and heads by Lipschitz constant at one input, and show the sensitive tokens."""
    found = find_and_show(plan, execution.out, json=json, quiet=quiet)
    return 3 if getattr(found, "refused", ()) else 0
