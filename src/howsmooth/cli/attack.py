"""``howsmooth attack``: the tokens at which attention is steepest, and how near they come to the bounds."""

from __future__ import annotations

import typer

from howsmooth.cli.carrying import means_of, resumable
from howsmooth.cli.options import JsonOption, QuietOption, as_typed, command
from howsmooth.cli.progress import shown_progress
from howsmooth.study.plan import AttackPlan, LocalExecution

__all__ = ["attack"]

_EXAMPLES = (
    "Into --out go a store, summary.csv with one row an attention and length, attacks.csv with everything "
    "tried, exponents.csv, figures, and the tokens found in inputs/, each with its attention, for "
    "howsmooth bound or howsmooth.models.parameter_files.read_parameter_file.",
    "Examples:",
    "[cyan]howsmooth attack builtin-encoder --layers 0 --lengths 12,24,48 --steps 20 --restarts 4[/]  quick",
    "[cyan]howsmooth attack builtin-decoder --heads all --out worst[/]  all heads of all layers; takes long",
    "[cyan]howsmooth attack builtin-decoder --heads all --executor processes[/]  an attention a CPU core",
    "[cyan]howsmooth attack gpt2 --random-init --layers 0,6 --radius data[/]  as long as real tokens are",
    "[cyan]howsmooth attack ./head.npz --radius 4 --lengths 10,100[/]  parameters of your own",
    "The same command again continues where it was interrupted; lengths, layers and heads can be added.",
)


@command(*_EXAMPLES, out="howsmooth-attack", without=("scheduler",))
def attack(
    plan: AttackPlan, execution: LocalExecution, json: JsonOption = False, quiet: QuietOption = False
) -> int:
    """Look for the tokens at which attention is steepest, within the ball that its tokens lie in."""
    from howsmooth.cli.tables import attacks_as_json, show_attacks
    from howsmooth.study.attack_tables import publish_attacks
    from howsmooth.study.attacks import run_attack

    with resumable(execution.out, as_typed()), shown_progress(quiet=quiet) as display:
        with means_of(execution, display) as means:
            outcome = run_attack(plan, execution.out, means)
        published = publish_attacks(execution.out, display)
    if json:
        typer.echo(attacks_as_json(published, outcome, execution.out))
    elif not quiet:
        show_attacks(published, outcome, execution.out)
    return 0
