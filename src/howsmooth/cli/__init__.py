"""The command line. Each command is a thin door to a room of the library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from howsmooth.cli.attack import attack
from howsmooth.cli.bound import bound
from howsmooth.cli.certify import certify
from howsmooth.cli.flow import flow
from howsmooth.cli.inspect import inspect
from howsmooth.cli.measure import TYPED, measure
from howsmooth.cli.reproduce import reproduce
from howsmooth.cli.study import study
from howsmooth.errors import HowsmoothError
from howsmooth.study.names import encodable, readable

__all__ = ["app", "main"]

REFUSED = 2
INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> bool:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"howsmooth {version('howsmooth')}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """How smooth is attention? Measure the Lipschitz constant of self-attention in any Transformer."""


for _command in (measure, study, bound, attack, flow, certify, inspect, reproduce):
    app.command(_command.__name__, epilog=_command.__dict__["examples"])(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments
        As typed after ``howsmooth``; ``None`` for those of the process.

    Returns
    -------
    int
        0 if all went well; 2 if something was refused, with one sentence on standard error; 3 if a study
        or the figures went on after failures, or a flow ended early; 130 if interrupted. A traceback, and
        exit code 1, are a mistake of ours.

    """
    # Without a word, what there is to say is the help. What was typed is recorded with the measurements.
    typed = tuple(sys.argv[1:] if arguments is None else arguments) or ("--help",)
    TYPED.set(typed)
    try:
        code = app(args=list(typed), prog_name="howsmooth", standalone_mode=False)
    except HowsmoothError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted: nothing had been measured yet.", err=True)
        return INTERRUPTED
    except Exception as error:
        # Usage errors: typer has kept click's class under three names in its history, but not its method.
        described = getattr(error, "format_message", None)
        if described is None or getattr(error, "exit_code", None) is None:
            raise
        place = getattr(getattr(error, "ctx", None), "command_path", "howsmooth")
        sentence = described().replace("Value error, ", "").rstrip(".")
        return _refuse(f"{sentence}. See {place} --help.")
    return code if isinstance(code, int) else 0


def _refuse(sentence: str) -> int:
    # One line, whatever a file name or a library's message held.
    words = readable(encodable(" ".join(sentence.split())), longest=2000)
    typer.echo(f"error: {words}", err=True)
    return REFUSED
