"""The command ``howsmooth attack``: search for tokens at which the local Lipschitz constant is large."""

from __future__ import annotations

import typer

from howsmooth.cli.plan_execution import means_of, resumable
from howsmooth.cli.progress import shown_progress
from howsmooth.cli.typer_command import JsonOption, QuietOption, as_typed, command
from howsmooth.study.execution_options import LocalExecution
from howsmooth.study.plans import AttackPlan

__all__ = ["attack"]

_EXAMPLES = (
    "The folder --out receives a store (SQLite), summary.csv with one row for each attention and length, "
    "attacks.csv with every input that was tried, exponents.csv and figures. Its folder inputs/ holds the "
    "worst tokens that were found, each file with the parameters of its attention; howsmooth bound and "
    "howsmooth.models.parameter_files.read_parameter_file read such files.",
    "Examples:",
    "[cyan]howsmooth attack builtin-encoder --layers 0 --lengths 12,24 --restarts 4[/]  fast",
    "[cyan]howsmooth attack builtin-decoder --heads all --out worst[/]  all heads of all layers; slow",
    "[cyan]howsmooth attack builtin-decoder --heads all --executor processes[/]  on all CPU cores",
    "[cyan]howsmooth attack gpt2 --random-init --layers 0,6 --radius data[/]  in the ball of real tokens",
    "[cyan]howsmooth attack ./head.npz --radius 4 --lengths 10,100[/]  your own parameters",
    "Run the same command again to continue after an interruption, or with more lengths, layers or heads.",
)


@command(*_EXAMPLES, out="howsmooth-attack", without=("scheduler",))
def attack(
    plan: AttackPlan, execution: LocalExecution, json: JsonOption = False, quiet: QuietOption = False
) -> int:
    """Search for tokens with a large local Lipschitz constant, in a ball that contains the model's tokens."""
    from howsmooth.cli.attack_result import attacks_as_json, show_attacks
    from howsmooth.study.attack_run import run_attack
    from howsmooth.study.attack_tables import write_attack_outputs

    with resumable(execution.out, as_typed()), shown_progress(quiet=quiet) as display:
        with means_of(execution, display) as means:
            outcome = run_attack(plan, execution.out, means)
        published = write_attack_outputs(execution.out, display)
    if json:
        typer.echo(attacks_as_json(published, outcome, execution.out))
    elif not quiet:
        show_attacks(published, outcome, execution.out)
    return 0
