"""The command ``howsmooth inspect``: list the attention layers of a model and what can be measured."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from howsmooth.cli.progress import shown_progress
from howsmooth.cli.typer_command import ONE_PROCESS, JsonOption, SilentOption, command
from howsmooth.study.execution_options import Execution
from howsmooth.study.options import HOW, Options, flag, option, whole, words
from howsmooth.study.plans import shared

__all__ = ["InspectionPlan", "inspect"]


_MOST_WEIGHTS = 10**9

_EXAMPLES = (
    "Every layer is captured once in every scope, and its map is compared with the model's own output. A "
    "layer that cannot be captured is listed with the reason, for example cross-attention, token mixing "
    "without a softmax, or a mask that depends on the tokens. The exit code is 0 if some layer is captured, "
    "and 2 if none is or the model is not found.",
    "Examples:",
    "[cyan]howsmooth inspect builtin-encoder[/]  a model with its weights",
    "[cyan]howsmooth inspect gpt2 --random-init[/]  an architecture, without its weights",
    "[cyan]howsmooth inspect ./folder --random-init --as-decoder[/]  a folder with only a config.json",
    "[cyan]howsmooth inspect t5 --random-init[/]  encoder and decoder",
    "[cyan]howsmooth inspect vit --random-init[/]  a vision model, on a generated image",
    "[cyan]howsmooth inspect clip --random-init --part vision[/]  one of a model's parts",
    "[cyan]howsmooth inspect ./folder --tokens 200 --json[/]  JSON for another program",
)


@dataclass(frozen=True)
class InspectionPlan(Options):
    """The options of ``howsmooth inspect``: which model to inspect, and how to build it."""

    model: str = option(
        ...,
        words(),
        "A built-in model, a local folder or a Hub id; with --random-init also a model type.",
        metavar="MODEL",
        positional=True,
    )
    random_init: bool = shared("random_init")
    as_decoder: bool = shared("as_decoder")
    part: str | None = shared("part")
    tokens: int | None = option(
        None,
        whole(2),
        "Length of the input of random token ids, for a text model. A sliding window is visible only if it "
        "is shorter than the input. Default: 16, or fewer if the model takes no more.",
        metavar="N",
    )
    all_layers: bool = option(
        False,
        flag(),
        "With --random-init: build every layer. By default, a configuration of more than a billion "
        "weights is built with at least 2 layers, and only as many as include every kind of layer that it "
        "names; the result says so.",
        panel=HOW,
    )
    seed: int = shared("seed", help="Seed of the random weights.")


@command(*_EXAMPLES, without=("out", *ONE_PROCESS))
def inspect(
    plan: InspectionPlan, execution: Execution, json: JsonOption = False, quiet: SilentOption = False
) -> int:
    """List the attention layers of a model: heads, mask, positions, norms, and what can be measured."""
    from howsmooth.cli.inspect_result import inspection_as_json, show_inspection
    from howsmooth.models import inspect_model, load_model

    with shown_progress(quiet=quiet) as display:
        display.phase("Reading")
        loaded = load_model(
            plan.model,
            random_init=plan.random_init,
            as_decoder=plan.as_decoder,
            part=plan.part,
            seed=plan.seed,
            most_weights=None if plan.all_layers else _MOST_WEIGHTS,
        )
        display.phase("Inspecting")
        found = inspect_model(
            loaded,
            tokens=plan.tokens,
            on_layer=lambda done, total: display.advance(float(done), float(total), f"layer {done}"),
        )
    if json:
        typer.echo(inspection_as_json(loaded, found))
    else:
        show_inspection(loaded, found)
    return 0 if any(site.scopes for site in found.sites) else 2
