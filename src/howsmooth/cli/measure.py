"""The command ``howsmooth measure``, which measures models on inputs and writes the results."""

from __future__ import annotations

from howsmooth.cli.plan_execution import MeasurementShown, carry_out, tell_forecast
from howsmooth.cli.typer_command import TYPED, as_typed, command
from howsmooth.study.execution_options import Execution
from howsmooth.study.plans import Plan

__all__ = ["TYPED", "measure"]

_EXAMPLES = (
    "The folder --out receives a store with one row for each measurement, measurements.csv, exponents.csv, "
    "figures, and report.html, which explains the results.",
    "Examples:",
    "[cyan]howsmooth measure[/]  the two built-in models on Alice's Adventures in Wonderland",
    "[cyan]howsmooth measure builtin-encoder --layers 0,-1 --lengths 4:64:4 --samples 5[/]  a quick look",
    "[cyan]howsmooth measure builtin-decoder --scope head --heads 0:3 --layers 2[/]  four heads",
    "[cyan]howsmooth measure gpt2 --random-init --text alice --layers 6[/]  the architecture, untrained",
    "[cyan]howsmooth measure builtin-encoder --as-decoder[/]  an encoder with a causal mask",
    "[cyan]howsmooth measure vit --random-init --images builtin --layers 0,5[/]  images instead of a text",
    "[cyan]howsmooth measure ./my-model --embeddings X.npy --lengths 4,8[/]  "
    "tokens that another program embedded",
    "[cyan]howsmooth measure builtin-encoder --as-published all[/]  also what the paper's code computes",
    "[cyan]howsmooth measure ./my-model --lengths 1024,4096 --dry-run[/]  only predict the time",
    "[cyan]howsmooth measure builtin-decoder --executor processes --workers 2[/]  on two processes",
    "[cyan]howsmooth measure builtin-decoder --json --quiet > result.json[/]  JSON for another program",
    "Run the same command again to continue after an interruption; finished measurements are not repeated. "
    "Lengths, samples, layers, heads, scopes, texts and models can be added to a folder at any time.",
)


@command(*_EXAMPLES)
def measure(plan: Plan, execution: Execution, shown: MeasurementShown) -> int:
    """Measure the local Lipschitz constant of a model's attention on real inputs, with an interval."""
    if shown.dry_run:
        return tell_forecast(plan, execution, shown)
    return carry_out(plan, execution, shown, again=as_typed(), keep_going=False)
