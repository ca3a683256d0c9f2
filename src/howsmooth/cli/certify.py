"""The command ``howsmooth certify``: certify a saved model's Lipschitz constant and accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.progress import shown_progress
from howsmooth.cli.typer_command import ONE_PROCESS, JsonOption, SilentOption, command, folder_option
from howsmooth.study.execution_options import Execution
from howsmooth.study.plans import CertificationPlan

__all__ = ["certify"]

_EXAMPLES = (
    "The model is a file written by howsmooth.nn.save. No code in the file is run. The constant is proved "
    "for all inputs of --length tokens whose norms are at most --radius, and is computed in float64.",
    "Examples:",
    "[cyan]howsmooth certify model.safetensors[/]  the constant, and the constant of each module",
    "[cyan]howsmooth certify model.safetensors --data digits.npz[/]  also clean and certified accuracy",
    "[cyan]howsmooth certify model.safetensors --data X.npy --labels y.npy --out found[/]  "
    "also a table with the certified radius of each input",
    "[cyan]howsmooth certify model.safetensors --radius 2 --data X.npy --clip --json[/]  JSON for a program",
    "One .npz or .safetensors file may hold both the inputs X and the labels y.",
)


@command(*_EXAMPLES, without=("out", *ONE_PROCESS))
def certify(
    plan: CertificationPlan,
    execution: Execution,
    out: Annotated[
        Path | None,
        folder_option(
            "Also write modules.csv into this folder, and inputs.csv with the certified radius of each input."
        ),
    ] = None,
    json: JsonOption = False,
    quiet: SilentOption = False,
) -> int:
    """Certify a saved model: its Lipschitz constant, the constant of each module, and certified accuracy."""
    from howsmooth.cli.certify_result import certificate_as_json, show_certificate
    from howsmooth.study.certification import certify_file
    from howsmooth.study.file_writing import write_table

    with shown_progress(quiet=quiet) as display:
        display.phase("Certifying")
        found = certify_file(
            plan,
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
