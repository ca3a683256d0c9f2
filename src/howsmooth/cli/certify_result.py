"""Certificates for people and for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from howsmooth import __version__
from howsmooth.nn.certificates.evaluation import Evaluation
from howsmooth.study.certifying import Certified
from howsmooth.study.names import encodable, readable

__all__ = ["as_json", "show"]


def as_json(found: Certified, radii: Sequence[float], written: Sequence[Path]) -> str:
    """Describe a certificate as one JSON object; a number that is infinite is null."""
    # With it comes all that draws figures, which takes seconds.
    from howsmooth.cli.result import records

    certificate, evaluation = found.certificate, found.evaluation
    described = {
        "howsmooth": __version__,
        "model": encodable(str(found.asked.model)),
        "notes": {encodable(name): encodable(words) for name, words in found.saved.notes.items()},
        "length": certificate.length,
        "radius": found.radius,
        "clipped": found.asked.clip,
        "constant": _finite(certificate.constant),
        "output_radius": _finite(certificate.output_radius),
        "stored_in": found.precision,
        "computed_in": "float64",
        "modules": records(certificate.table),
        "remarks": [*certificate.notes, *_remarks(found)],
        "data": None if evaluation is None else _evaluated(found, evaluation, radii),
        "files": [encodable(str(path)) for path in written],
    }
    return json.dumps(described, indent=2, allow_nan=False)


def _evaluated(found: Certified, evaluation: Evaluation, radii: Sequence[float]) -> dict[str, object]:
    total = len(evaluation.table)
    correct = evaluation.correct
    return {
        "file": encodable(str(found.asked.data)),
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
        "median_certified_radius": _finite(float(evaluation.table["certified_radius"].median())),
    }


def show(found: Certified, radii: Sequence[float], written: Sequence[Path]) -> None:
    """Print the constant, where it is spent, and the accuracies."""
    console = Console()
    certificate, evaluation = found.certificate, found.evaluation
    name = readable(found.asked.model.name)
    where = "" if math.isinf(certificate.radius) else f" of norm at most {certificate.radius:.6g}"
    where += f", clipped to norm {found.radius:.6g}" if found.asked.clip else ""
    console.print(
        Text(
            encodable(
                f"{name}: Lipschitz constant at most {certificate.constant:.6g} on "
                f"{_count(certificate.length, 'token')}{where}"
            ),
            "bold",
        ),
        soft_wrap=True,
    )
    if certificate.rows:
        console.print(Padding(_modules(found), (0, 0, 0, 2), expand=False))
    if evaluation is not None:
        total = len(evaluation.table)
        words = f"\n{readable(found.asked.data.name if found.asked.data else '')}: {_count(total, 'input')}, "
        words += f"the longest token of norm {evaluation.table['longest'].max():.4g}"
        console.print(Text(encodable(words), "bold"), soft_wrap=True)
        console.print(Padding(_accuracies(evaluation, radii), (0, 0, 0, 2), expand=False))
    print()
    for remark in (*certificate.notes, *_remarks(found)):
        console.print(Text(encodable(remark)), soft_wrap=True)
    for path in written:
        # Not through rich, which would break a long path in two.
        print(encodable(f"Written: {path}"))


def _modules(found: Certified) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("module", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for name in ("constant", "tokens", "radius in", "radius out"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.certificate.rows:
        tokens = (
            str(row.length_in) if row.length_in == row.length_out else f"{row.length_in} to {row.length_out}"
        )
        table.add_row(
            Text(encodable("  " * row.level + readable(row.path or "the model"))),
            Text(row.kind),
            f"{row.constant:.6g}",
            tokens,
            f"{row.radius_in:.4g}",
            f"{row.radius_out:.4g}",
        )
    return table


def _accuracies(evaluation: Evaluation, radii: Sequence[float]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    total, correct = len(evaluation.table), evaluation.correct
    table.add_column("moved by at most", no_wrap=True)
    table.add_column(
        "certified accuracy" if evaluation.labelled else "keep their class", justify="right", no_wrap=True
    )
    table.add_column("inputs", justify="right", no_wrap=True)
    if correct is not None:
        table.add_row("not at all (clean)", f"{correct / total:.4f}", f"{correct} of {total}")
    for radius in radii:
        count = evaluation.certified(radius)
        table.add_row(f"{radius:.6g}", f"{count / total:.4f}", f"{count} of {total}")
    return table


def _remarks(found: Certified) -> list[str]:
    """Say what was computed with which numbers, and which inputs the certificate is about."""
    remarks = []
    half = any(word in found.precision for word in ("float16", "bfloat16"))
    remarks.append(
        f"Weights are stored in {found.precision}; constant and outputs are those of the model in float64."
        + (
            " A run in half precision rounds by more than margins may allow: it is not covered."
            if half
            else ""
        )
    )
    evaluation = found.evaluation
    if evaluation is None:
        return remarks
    if found.asked.clip:
        remarks.append(
            f"{_count(evaluation.clipped, 'input')} had tokens beyond the radius and "
            f"{'was' if evaluation.clipped == 1 else 'were'} clipped. Moved inputs are clipped, too, so "
            "that they may be anywhere."
        )
    else:
        remarks.append("Moved inputs must stay within the radius; with --clip they may be anywhere.")
    return remarks


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
