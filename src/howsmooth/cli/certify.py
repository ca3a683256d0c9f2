"""``howsmooth certify``: the constant of a saved model, where it is spent, and what it says of data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from howsmooth.cli.options import OUTPUT, JsonOption, SilentOption, command
from howsmooth.cli.progress import shown_progress
from howsmooth.errors import ArgumentError
from howsmooth.study.options import HOW, Kind, Options, flag, number, option, path, whole
from howsmooth.study.plan import Execution

__all__ = ["CertificationPlan", "certify"]

_MOST_RADII = 100
_MOST_INPUTS = 2**31

_EXAMPLES = (
    "The model is a file of howsmooth.nn.save; nothing in it is run. The constant is proved for all inputs "
    "of so many tokens of norm at most the radius, and everything is computed in float64.",
    "Examples:",
    "[cyan]howsmooth certify model.safetensors[/]  the constant, and where it is spent",
    "[cyan]howsmooth certify model.safetensors --data digits.npz[/]  and accuracies, clean and certified",
    "[cyan]howsmooth certify model.safetensors --data X.npy --labels y.npy --radii 0.1,0.5 --out found[/]  a "
    "table of radii, one for each input",
    "[cyan]howsmooth certify model.safetensors --radius 2 --data X.npy --clip --json[/]  for a machine",
    "Data with labels may be one file: .npz or .safetensors with X and y.",
)


def _distances(name: str, value: Any) -> tuple[float, ...]:
    """Read distances, a list of numbers with commas between them; they come in order, each once."""
    try:
        values = {float(word) for word in value.split(",")}
    except ValueError:
        values = {math.nan}
    if not all(math.isfinite(one) and one >= 0 for one in values) or len(values) > _MOST_RADII:
        raise ArgumentError(
            name,
            expected=f"finite numbers >= 0 with commas between them, at most {_MOST_RADII}",
            got=repr(value[:80]),
        )
    return tuple(sorted(abs(one) for one in values))


@dataclass(frozen=True)
class CertificationPlan(Options):
    """Which saved model to certify, and on what data."""

    PANEL: ClassVar[str] = "What to certify"

    model: Path = option(
        ..., path(), "A file that howsmooth.nn.save wrote.", metavar="MODEL", positional=True
    )
    data: Path | None = option(
        None,
        path(),
        "Inputs, as the model takes them: .npy, .npz or .safetensors. Of several arrays, X are the "
        "inputs and y the labels.",
        metavar="FILE",
    )
    labels: Path | None = option(None, path(), "Their classes, in such a file.", metavar="FILE")
    radii: tuple[float, ...] = option(
        "0.1,0.25,0.5,1",
        Kind(str, _distances),
        "Distances at which to tell the certified accuracy, in the norm of the whole input.",
        metavar="LIST",
    )
    length: int | None = option(
        None,
        whole(1),
        "Number of tokens of an input; of patches, for images. Default: as saved, or of the data.",
        metavar="N",
    )
    radius: float | None = option(
        None, number(positive=True), "Largest norm of a token. Default: as saved.", metavar="R"
    )
    clip: bool = option(
        False,
        flag(),
        "Project tokens beyond the radius on its ball, where they are refused otherwise. The "
        "certificate is then that of the model that does so, for all inputs.",
    )
    batch: int = option(256, whole(1, _MOST_INPUTS), "How many inputs are run at a time.", panel=HOW)


@command(*_EXAMPLES, without=("out", "executor", "workers", "scheduler"))
def certify(
    plan: CertificationPlan,
    execution: Execution,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Also write modules.csv there, and inputs.csv with a radius for each input.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json: JsonOption = False,
    quiet: SilentOption = False,
) -> int:
    """Certify a saved model: its Lipschitz constant, where it is spent, and accuracy under any attack."""
    from howsmooth.cli.certify_result import certificate_as_json, show_certificate
    from howsmooth.study.certifying import Asked, certify_file
    from howsmooth.study.files import write_table

    with shown_progress(quiet=quiet) as display:
        display.phase("Certifying")
        found = certify_file(
            Asked(plan.model, plan.data, plan.labels, plan.length, plan.radius, plan.clip, plan.batch),
            on_batch=lambda done, total: display.advance(float(done), float(total), f"input {done}"),
        )
    written = [] if out is None else [write_table(found.certificate.table, out, "modules.csv")]
    if out is not None and found.evaluation is not None:
        written.append(write_table(found.evaluation.table, out, "inputs.csv"))
    if json:
        typer.echo(certificate_as_json(found, plan.radii, written))
    else:
        show_certificate(found, plan.radii, written)
    return 0
