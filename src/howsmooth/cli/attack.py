"""The command ``howsmooth attack``, which searches for tokens with a large local Lipschitz constant."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from howsmooth.cli.plan_execution import means_of, resumable, rows_kept
from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import amount, as_json, heading, paragraph, say, show_table
from howsmooth.cli.typer_command import ShownOrQuiet, as_typed, command
from howsmooth.study.execution_options import LocalExecution
from howsmooth.study.plans import AttackPlan
from howsmooth.study.progress_listener import Outcome
from howsmooth.study.text_formatting import counted, decimal, mask_in_words, place_in_words, readable

if TYPE_CHECKING:
    from howsmooth.study.attack_outputs import AttackOutputs

__all__ = ["attack"]

_EXAMPLES = (
    "The folder --out receives a store (SQLite), summary.csv with one row for each attention and length, "
    "attacks.csv with every input that was tried, exponents.csv and figures. Its folder inputs/ holds the "
    "worst tokens that were found, each file with the parameters of its attention; howsmooth bound and "
    "howsmooth.models.attention_parameter_files.read_parameter_file read such files.",
    "Examples:",
    "[cyan]howsmooth attack builtin-encoder --layers 0 --lengths 12,24 --restarts 4[/]  fast",
    "[cyan]howsmooth attack builtin-decoder --heads all --out worst[/]  all heads of all layers; slow",
    "[cyan]howsmooth attack builtin-decoder --heads all --executor processes[/]  on all CPU cores",
    "[cyan]howsmooth attack gpt2 --random-init --layers 0,6 --radius data[/]  in the ball of real tokens",
    "[cyan]howsmooth attack ./head.npz --radius 4 --lengths 10,100[/]  your own parameters",
    "In place of the model, a .toml file may hold the options as keys: source, layers, lengths and so on.",
    "Run the same command again to continue after an interruption, or with more lengths, layers or heads.",
)


@command(*_EXAMPLES, out="howsmooth-attack", without=("scheduler",))
def attack(plan: AttackPlan, execution: LocalExecution, shown: ShownOrQuiet) -> int:
    """Search for tokens with a large local Lipschitz constant, in a ball that contains the model's tokens."""
    from howsmooth.study.attack_outputs import write_attack_outputs
    from howsmooth.study.attack_run import run_attack

    out = execution.out
    with resumable(lambda: rows_kept(out), as_typed()), shown_progress(quiet=shown.quiet) as display:
        with means_of(execution, display) as means:
            outcome = run_attack(plan, out, means)
        published = write_attack_outputs(out, display)
    if shown.json:
        typer.echo(_as_json(published, outcome, out))
    elif not shown.quiet:
        _show(published, outcome, out)
    return 0


def _as_json(published: AttackOutputs, outcome: Outcome, folder: Path) -> str:
    """Return the results of the searches as one JSON object; a number that overflows becomes null."""
    from howsmooth.study.exponents import LEVEL
    from howsmooth.study.records import Attack, plain_rows
    from howsmooth.study.store import STORE_NAME

    return as_json(
        out=folder,
        seconds=round(outcome.seconds, 3),
        attacked=outcome.made[Attack.table],
        kept=outcome.kept[Attack.table],
        **published.identity,
        attacks=plain_rows(published.summary),
        exponents=plain_rows(published.exponents),
        exponent_confidence=LEVEL,
        files={
            "store": folder / STORE_NAME,
            **published.files,
            "figures": [path for figure in published.figures for path in figure],
        },
    )


def _show(published: AttackOutputs, outcome: Outcome, folder: Path) -> None:
    """Print the largest constants that were found for each attention layer or head, their growth with n, and
    the written files.
    """
    from howsmooth.study.records import Attack, plain_rows
    from howsmooth.study.store import STORE_NAME

    label = readable(str(published.identity.get("source", "")))
    place = itemgetter("layer", "head")
    fits = [row for row in plain_rows(published.exponents) if not row["note"]]
    for (layer, head), family in groupby(plain_rows(published.summary), key=place):
        rows = list(family)
        where = f"{label}, {place_in_words(layer, head)}, scope {rows[0]['scope']}"
        # A length that is added later may have longer tokens, which give it a larger ball.
        radii = sorted({f"{row['radius']:.4g}" for row in rows}, key=float)
        balls = " to ".join(dict.fromkeys((radii[0], radii[-1])))
        heading(f"\n{where}, {mask_in_words(rows[0]['masking'])}, R = {balls}")
        names = ["n", "given", "paper", "found", "by", "÷ paper", "at most", "by", "reached"]
        show_table(names, map(_attack, rows), wrapped=["by"])
        growth = [
            f"{row['series']} like n^{decimal(row['slope'], 3)} "
            f"[{decimal(row['low'], 3)}, {decimal(row['high'], 3)}]"
            for row in fits
            if place(row) == (layer, head)
        ]
        if any(map(_outside, rows)):
            paragraph("  * at tokens outside of the ball, to which the other columns do not apply")
        if all(row["paper"] is None for row in rows):
            paragraph("  no construction of the paper: it needs plain scores and no mask")
        if not all(row["converged"] for row in rows):
            paragraph("  ? the measurement has not converged; attacks.csv has its interval")
        if growth:
            paragraph(f"  growth, with the scatter of the lengths: {'; '.join(growth)}")
    words = f"\n{counted(outcome.made[Attack.table], 'attack')} made in {outcome.seconds:.1f} s"
    words += f", {outcome.kept[Attack.table]} were already there" if outcome.kept[Attack.table] else ""
    paragraph(f"{words}.")
    say(f"Tables: {published.files['summary']}, attacks.csv, exponents.csv")
    say(f"Also in {folder}: {STORE_NAME}, figures/, and the tokens found in inputs/")


def _attack(row: dict[str, Any]) -> list[str]:
    from howsmooth.roundoff import limit_in_digits

    share = row["found_to_upper"]
    return [
        str(row["n"]),
        _number(row["tokens"]) + (" *" if _outside(row) else ""),
        _number(row["paper"]),
        limit_in_digits(row["found"], 4, upper=False) + ("" if row["converged"] else " ?"),
        row["found_by"],
        _number(row["found_to_paper"], 3),
        "" if row["log_upper"] is None else amount(row["log_upper"], 4, upper=True),
        row["upper_by"],
        "" if share is None else f"{100 * share:.3g} %",
    ]


def _outside(row: dict[str, Any]) -> bool:
    """Return whether the given tokens of a row lie outside the ball, beyond rounding."""
    return row["tokens_norm"] is not None and row["tokens_norm"] > row["radius"] * (1 + 1e-9)


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"
