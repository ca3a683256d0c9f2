"""``howsmooth certify``: the constant of a saved model, where it is spent, and what it says of data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.options import HOW, OUTPUT, JsonOption, ThreadsOption
from howsmooth.cli.progress import choose

__all__ = ["certify"]

WHAT = "What to certify"

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


def certify(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A file that howsmooth.nn.save wrote.", show_default=False),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Inputs, as the model takes them: .npy, .npz or .safetensors. Of "
            "several arrays, X are the inputs and y the labels.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Their classes, in such a file.", show_default=False, rich_help_panel=WHAT
        ),
    ] = None,
    radii: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Distances at which to tell the certified accuracy, in the norm of the whole input.",
            rich_help_panel=WHAT,
        ),
    ] = "0.1,0.25,0.5,1",
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of tokens of an input; of patches, for images. Default: as saved, or of the data.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    radius: Annotated[
        str | None,
        typer.Option(
            metavar="R",
            help="Largest norm of a token. Default: as saved.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    clip: Annotated[
        bool,
        typer.Option(
            "--clip",
            help="Project tokens beyond the radius on its ball, where they are refused otherwise. The "
            "certificate is then that of the model that does so, for all inputs.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    batch: Annotated[
        int,
        typer.Option(min=1, max=2**31, help="How many inputs are run at a time.", rich_help_panel=HOW),
    ] = 256,
    threads: ThreadsOption = None,
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
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=OUTPUT)
    ] = False,
) -> int:
    """Certify a saved model: its Lipschitz constant, where it is spent, and accuracy under any attack."""
    from howsmooth.cli.certify_result import as_json, show
    from howsmooth.cli.parsing import parse_radii, parse_radius, use_threads
    from howsmooth.study.certifying import Asked, certify_file
    from howsmooth.study.files import write_table

    distances = parse_radii(radii)
    ball = None if radius is None else parse_radius(radius, words=())
    assert not isinstance(ball, str)
    use_threads(threads)
    display = choose(quiet=quiet)
    with display:
        display.phase("Certifying")
        found = certify_file(
            Asked(model, data, labels, length, ball, clip, batch),
            on_batch=lambda done, total: display.advance(float(done), float(total), f"input {done}"),
        )
    written = [] if out is None else [write_table(found.certificate.table, out, "modules.csv")]
    if out is not None and found.evaluation is not None:
        written.append(write_table(found.evaluation.table, out, "inputs.csv"))
    if json:
        typer.echo(as_json(found, distances, written))
    else:
        show(found, distances, written)
    return 0


certify.__dict__["examples"] = "\n\n".join(_EXAMPLES)
