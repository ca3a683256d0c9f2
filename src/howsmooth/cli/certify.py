"""The command ``howsmooth certify``, which certifies the constant and the accuracy of a saved model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import as_json, heading, say, show_table
from howsmooth.cli.typer_command import ONE_PROCESS, Shown, command, folder_option
from howsmooth.study.execution_options import Execution
from howsmooth.study.plans import CertificationPlan
from howsmooth.study.text_formatting import counted, readable

if TYPE_CHECKING:
    from howsmooth.nn.certificates.evaluation import Evaluation
    from howsmooth.study.certification import Certified

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
    shown: Shown,
    out: Annotated[
        Path | None,
        folder_option(
            "Also write modules.csv into this folder, and inputs.csv with the certified radius of each input."
        ),
    ] = None,
) -> int:
    """Certify a saved model: its Lipschitz constant, the constant of each module, and certified accuracy."""
    from howsmooth.study.certification import certify_file
    from howsmooth.study.file_writing import write_table

    with shown_progress(quiet=shown.quiet) as display:
        display.phase("Certifying")
        found = certify_file(plan, on_batch=display.counter("input"))
    written = [] if out is None else [write_table(found.certificate.table, out, "modules.csv")]
    if out is not None and found.evaluation is not None:
        written.append(write_table(found.evaluation.table, out, "inputs.csv"))
    if shown.json:
        typer.echo(_as_json(found, plan.radii, written))
    else:
        _show(found, plan.radii, written)
    return 0


def _as_json(found: Certified, radii: Sequence[float], written: Sequence[Path]) -> str:
    """Return the certificate of a model and its evaluation on data as JSON; infinity becomes null."""
    from howsmooth.study.records import plain_rows

    certificate, evaluation = found.certificate, found.evaluation
    return as_json(
        model=found.asked.model,
        notes=found.saved.notes,
        length=certificate.length,
        radius=found.radius,
        clipped=found.asked.clip,
        constant=certificate.constant,
        output_radius=certificate.output_radius,
        stored_in=found.precision,
        computed_in="float64",
        modules=plain_rows(certificate.table),
        remarks=[*certificate.notes, *_remarks(found)],
        data=None if evaluation is None else _evaluated(found, evaluation, radii),
        files=written,
    )


def _evaluated(found: Certified, evaluation: Evaluation, radii: Sequence[float]) -> dict[str, object]:
    total = len(evaluation.table)
    correct = evaluation.correct
    return {
        "file": found.asked.data,
        "precision": found.data_precision,
        "inputs": total,
        "longest_token": float(evaluation.table["longest"].max()),
        "beyond_radius": evaluation.clipped,
        "labelled": evaluation.labelled,
        "clean_accuracy": None if correct is None else correct / total,
        "certified": [
            {"radius": radius, "inputs": count, "share": count / total}
            for radius in radii
            for count in [evaluation.certified(radius)]
        ],
        "median_certified_radius": evaluation.table["certified_radius"].median(),
    }


def _show(found: Certified, radii: Sequence[float], written: Sequence[Path]) -> None:
    """Print the certified constants of a model and of each module, and its certified accuracies."""
    from howsmooth.roundoff import limit_in_digits

    certificate, evaluation = found.certificate, found.evaluation
    where = "" if math.isinf(certificate.radius) else f" of norm at most {certificate.radius:.6g}"
    where += f", clipped to norm {found.radius:.6g}" if found.asked.clip else ""
    constant = limit_in_digits(certificate.constant, 6, upper=True)
    heading(
        f"{readable(found.asked.model.name)}: Lipschitz constant at most {constant} on "
        f"{counted(certificate.length, 'token')}{where}"
    )
    if certificate.rows:
        rows = [
            [
                "  " * row.level + readable(row.path or "the model"),
                row.kind,
                f"{row.constant:.6g}",
                f"{row.length_in}" + ("" if row.length_in == row.length_out else f" to {row.length_out}"),
                f"{row.radius_in:.4g}",
                f"{row.radius_out:.4g}",
            ]
            for row in certificate.rows
        ]
        names = ["module", "kind", "constant", "tokens", "radius in", "radius out"]
        show_table(names, rows, left=["module", "kind"])
    if evaluation is not None:
        total, correct = len(evaluation.table), evaluation.correct
        data = readable(found.asked.data.name if found.asked.data else "")
        longest = evaluation.table["longest"].max()
        heading(f"\n{data}: {counted(total, 'input')}, the longest token of norm {longest:.4g}")
        counts = [] if correct is None else [("not at all (clean)", correct)]
        counts += [(f"{radius:.6g}", evaluation.certified(radius)) for radius in radii]
        share = "certified accuracy" if evaluation.labelled else "keep their class"
        rows = [[moved, f"{count / total:.4f}", f"{count} of {total}"] for moved, count in counts]
        show_table(["moved by at most", share, "inputs"], rows, left=["moved by at most"])
    say("")
    for remark in (*certificate.notes, *_remarks(found)):
        say(remark)
    for path in written:
        say(f"Written: {path}")


def _remarks(found: Certified) -> list[str]:
    """Return remarks on the precision of the certificate, and on the inputs for which it holds."""
    remarks = []
    words = f"Weights are stored in {found.precision}; the constant and the outputs are computed in float64."
    if "float16" in found.precision:  # or bfloat16
        words += (
            " The certificate does not cover a run in half precision, whose rounding errors can be larger "
            "than the margins."
        )
    remarks.append(words)
    evaluation = found.evaluation
    if evaluation is None:
        return remarks
    if found.asked.clip:
        remarks.append(
            f"{counted(evaluation.clipped, 'input')} had tokens beyond the radius and "
            f"{'was' if evaluation.clipped == 1 else 'were'} clipped. Perturbed inputs are clipped too, so "
            "they may have tokens of any norm."
        )
    elif math.isinf(found.radius):
        remarks.append("The counts are proved for all perturbed inputs.")
    else:
        proved = (
            "The counts are proved for perturbed inputs whose tokens have norms of at most "
            f"{found.radius:.6g}; with --clip for all."
        )
        if evaluation.reach > found.radius:
            proved += (
                f" Within the certified radii they reach {evaluation.reach:.4g}: --radius "
                f"{1.001 * evaluation.reach:.4g} covers these too."
            )
        remarks.append(proved)
    return remarks
