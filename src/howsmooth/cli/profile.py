"""The command ``howsmooth profile``, which ranks layers and heads by Lipschitz constant at one input, and
says which token moves which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.cli.one_input import OneInputPlan, find_and_show
from howsmooth.cli.typer_command import Shown, command
from howsmooth.errors import ArgumentError
from howsmooth.study import plans
from howsmooth.study.execution_options import Out
from howsmooth.study.options import Told, options
from howsmooth.study.progress_listener import Listener
from howsmooth.study.ranges import ALL

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
    "[cyan]howsmooth profile builtin-decoder --span 0:12 --layers 1 --influence[/]  "
    "which token moves which, in one layer",
)


@options
class ProfilePlan(OneInputPlan):
    """The options of the command ``howsmooth profile``: the model, the input, and how to measure."""

    images: Annotated[
        plans.Images,
        Told("builtin|PATH", several=True),
        "An image instead of a text: a file, or builtin (generated).",
    ] = ()
    special_tokens: plans.SpecialTokens = False
    layers: plans.Layers = ALL
    scope: Annotated[
        Literal["all", "attention", "head", "model"],
        "attention: each layer with all its heads; head: each head alone; all: both; model: the whole "
        "model, and where in its depth it expands.",
    ] = "all"
    output: plans.Output = "hidden"
    influence: Annotated[
        bool,
        "Also which token moves which: in the layer with the largest constant, where time grows with the "
        "square of the length; with the scope model, which token moves its last output.",
    ] = False
    random_init: plans.RandomInit = False
    as_decoder: plans.AsDecoder = False
    part: plans.Part = None
    rtol: plans.Rtol = plans.PROFILE_RTOL
    device: plans.Device = "cpu"
    out: Out = Path("howsmooth-profile")

    def __post_init__(self) -> None:
        super().__post_init__()
        # The model is not loaded yet: refuse what even float64 cannot reach.
        check_accuracy(self.rtol, 0.999, "float64")
        plans.check_output(self.output, (self.scope,))
        if self.scope == "model" and self.layers.items:
            raise ArgumentError("layers", expected="none with the scope model", got=self.layers.text)
        if self.influence and self.scope == "head":
            raise ArgumentError("influence", expected="the scope all, attention or model", got=self.scope)

    def find(self, loaded: Any, inputs: Any, display: Listener) -> Any:
        """Measure the chosen layers and heads, or the whole model block by block."""
        from howsmooth import profiling

        settings: Any = {name: getattr(self, name) for name in ("span", "rtol", "seed", "influence")}
        noun = "step" if self.influence else "stage" if self.scope == "model" else "layer"
        settings["on_layer"] = display.counter(noun)
        if self.scope == "model":
            return profiling.depth_profile(loaded, inputs, output=self.output, **settings)
        scopes = ("attention", "head") if self.scope == "all" else (self.scope,)
        layers = self.layers_of(loaded)
        return profiling.profile(loaded, inputs, scopes=scopes, layers=layers, **settings)

    def beside(self, found: Any) -> tuple[dict[str, Any], list[str]]:
        """Return the largest influences of one token on another for JSON, if they were asked for."""
        told = found.influence  # None if it failed: the reason is printed with what was not measured
        return {"influence": told and told.described()} if self.influence else {}, []


@command(*_EXAMPLES)
def profile(plan: ProfilePlan, shown: Shown) -> int:
    """Rank a model's layers and heads by Lipschitz constant at one input, and show the sensitive tokens."""
    return 3 if getattr(find_and_show(plan, shown), "refused", ()) else 0
