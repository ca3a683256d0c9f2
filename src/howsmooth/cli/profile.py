"""The command ``howsmooth profile``, which ranks layers and heads by Lipschitz constant at one input, and
says which token moves which.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.cli.one_input import OneInputPlan, find_and_show
from howsmooth.cli.typer_command import Shown, command, resumable
from howsmooth.errors import ArgumentError
from howsmooth.study import plans
from howsmooth.study.execution_options import Out
from howsmooth.study.options import Told, Word, options
from howsmooth.study.progress_listener import Listener
from howsmooth.study.ranges import ALL
from howsmooth.words import encodable

__all__ = ["ProfilePlan", "profile"]

_EXAMPLES = (
    "Every attention layer and every head is measured at one input, the heads of a layer in one batch. The "
    "ranking is printed; a page, a figure and two tables are written into --out. A model is measured in "
    "float32, whatever the precision of its weights.",
    "Examples:",
    "[cyan]howsmooth profile builtin-encoder --span 0:64[/]  the first 64 tokens of Alice in Wonderland",
    "[cyan]howsmooth profile builtin-decoder --span 0:32 --layers 0,-1 --json[/]  JSON for a program",
    "[cyan]howsmooth profile ./model --text letter.txt --out letter[/]  your own model and text",
    "[cyan]howsmooth profile ./model --texts lines.txt --out many[/]  means and ranks over many texts",
    "[cyan]howsmooth profile ./model --text letter.txt --against ./old[/]  what changed between two models",
    "[cyan]howsmooth profile vit --random-init --images builtin[/]  an image",
    "[cyan]howsmooth profile builtin-encoder --scope model --span 0:32[/]  the whole model, block by block",
    "[cyan]howsmooth profile builtin-decoder --span 0:12 --layers 1 --influence[/]  "
    "which token moves which, in one layer",
)


@options
class ProfilePlan(OneInputPlan):
    """The options of the command ``howsmooth profile``: the model, the input, and how to measure."""

    texts_file: Annotated[
        Word | None,
        Told("FILE", flag="texts"),
        "Many texts: a text file, each line of which is a text of its own (of a .csv file each news item).",
    ] = None
    against: Annotated[
        Word | None,
        Told("MODEL"),
        "Divide the constants by those of this model, at the same tokens with the same options.",
    ] = None
    images: Annotated[
        plans.Images,
        Told("builtin|PATH", several=True),
        "An image instead of a text: a file, or builtin (generated).",
    ] = ()
    special_tokens: plans.SpecialTokens = False
    layers: plans.Layers = ALL
    scope: Annotated[
        Literal["all", "attention", "head", "parts", "model"],
        "attention: each layer with all its heads; head: each head alone; all: both; parts: attention, MLP, "
        "whole block and experts of each layer; model: the whole model, and where in its depth it expands.",
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
        if self.texts_file and self.inputs:
            raise ArgumentError("texts_file", expected="no other input beside it", got=f"--{self.kind}")
        for name in ("texts_file", "against"):
            if getattr(self, name) and (self.scope == "model" or self.influence):
                got = "influence" if self.influence else "the scope model"
                raise ArgumentError(name, expected="the constants of layers and heads", got=got)

    def input_of(self, loaded: Any) -> Any:
        """Return the input of a loaded model, of a file of texts a list with each line."""
        found = super().input_of(loaded)
        if self.texts_file is None:
            return found
        lines = [(i, line) for i, line in enumerate(found.content.splitlines(), 1) if line.strip()]
        if len(lines) == 1:
            expected, remedy = "a file with at least two lines", "Give one text with --text."
            raise ArgumentError("texts_file", expected=expected, got="1 line", remedy=remedy)
        return [replace(found, content=line, source=f"line {i} of {found.source}") for i, line in lines]

    def find(self, loaded: Any, inputs: Any, display: Listener) -> Any:
        """Measure the chosen layers and heads, or the whole model block by block."""
        from howsmooth import profiling

        settings: Any = {name: getattr(self, name) for name in ("span", "rtol", "seed", "influence")}
        noun = "text" if self.texts_file else "stage" if self.scope == "model" else "layer"
        noun = "step" if self.influence else noun
        settings["on_layer"] = display.counter(noun)
        if self.scope == "model":
            return profiling.depth_profile(loaded, inputs, output=self.output, **settings)
        scopes = {"all": ("attention", "head"), "parts": ("attention", "mlp", "whole-block", "expert")}
        settings["scopes"] = scopes.get(self.scope, self.scope)
        other = replace(self, source=self.against).load() if self.against else None
        file = settings["file"] = self.out / "texts.jsonl" if self.texts_file else None
        with resumable(lambda: f"texts are kept in {encodable(str(file))}" if file and file.exists() else ""):
            found: Any = profiling.profile(loaded, inputs, layers=self.layers_of(loaded), **settings)
            if other is None:
                return found
            display.phase(f"{self.PHASE} {other.label}")
            return found.compare(profiling.profile(other, inputs, layers=self.layers_of(other), **settings))

    def beside(self, found: Any) -> tuple[dict[str, Any], list[str]]:
        """Return the largest influences of one token on another for JSON, if they were asked for."""
        told = getattr(found, "influence", None)  # None if it failed: the reason is printed
        return {"influence": told and told.described()} if self.influence else {}, []


@command(*_EXAMPLES)
def profile(plan: ProfilePlan, shown: Shown) -> int:
    """Rank a model's layers and heads by Lipschitz constant at one input, and show the sensitive tokens."""
    return 3 if getattr(find_and_show(plan, shown), "refused", ()) else 0
