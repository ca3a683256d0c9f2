"""The ``howsmooth`` command line, a typer application. Each command has a module of its own."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from howsmooth.cli.bound import bound
from howsmooth.cli.inspect import inspect
from howsmooth.cli.measure import measure
from howsmooth.cli.precision import precision
from howsmooth.cli.profile import profile
from howsmooth.cli.radius import radius
from howsmooth.cli.reproduce import reproduce
from howsmooth.cli.typer_command import INTERRUPTED, TYPED
from howsmooth.errors import HowsmoothError
from howsmooth.words import encodable, readable

__all__ = ["app", "main"]

REFUSED = 2
PIPE_CLOSED = 141
"""The exit code that a shell reports for a program that SIGPIPE ended: 128 + 13."""

_BIBTEX = r"""@inproceedings{castin2024smooth,
  title     = {How Smooth Is Attention?},
  author    = {Castin, Val{\'e}rie and Ablin, Pierre and Peyr{\'e}, Gabriel},
  booktitle = {Proceedings of the 41st International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {235},
  year      = {2024}
}

@software{howsmooth,
  title   = {howsmooth: the local Lipschitz constant of self-attention,
             with an interval},
  author  = {{The howsmooth developers}},
  version = {VERSION},
  license = {Apache-2.0}
}"""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _told(flag: str, help: str, words: str) -> Any:
    """Return an option that prints ``words``, in which VERSION stands for howsmooth's version, and exits."""

    def tell(wanted: bool) -> None:
        if wanted:
            typer.echo(words.replace("VERSION", version("howsmooth")))
            raise typer.Exit

    return typer.Option(flag, callback=tell, is_eager=True, help=help)


@app.callback()
def _root(
    version: Annotated[bool, _told("--version", "Show the version and exit.", "howsmooth VERSION")] = False,
    cite: Annotated[bool, _told("--cite", "Show BibTeX entries and exit.", _BIBTEX)] = False,
) -> None:
    """How smooth is attention? Measure the Lipschitz constant of self-attention in any Transformer."""


class _Command(typer.core.TyperCommand):
    """A command whose help does not show the Python types of arguments and flags."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        for one in params:
            if getattr(one, "is_flag", True):
                vars(one)["display_type_rich"] = lambda ctx: ""
        return params


for _command in (profile, measure, bound, radius, precision, inspect, reproduce):
    app.command(_command.__name__, cls=_Command, epilog=_command.__dict__["examples"])(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on the words typed after ``howsmooth``, by default those of ``sys.argv``.

    The exit codes: 0, the command succeeded; 2, it refused its arguments or inputs, and printed the reason to
    standard error; 3, some measurements or figures failed; 130, the user interrupted it, or a batch system
    ended it with SIGTERM; 141, the program that reads the output, such as ``head``, has ended. A traceback
    with exit code 1 is a bug of howsmooth.
    """
    # Without arguments, show the help. TYPED is recorded in the store with each run.
    typed = tuple(sys.argv[1:] if arguments is None else arguments) or ("--help",)
    TYPED.set(typed)
    if arguments is None:  # as a program, not called by another one, whose signals are its own
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # Without a writable home, matplotlib would say on standard error where it keeps its cache.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        code = app(args=list(typed), prog_name="howsmooth", standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        # typer turns a BrokenPipeError into SystemExit(1).
        if not isinstance(error.__context__ or error, BrokenPipeError):
            raise
        _drop_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        return _refuse(
            "The output cannot be written: the disk is full. Make room, and run the command again."
        )
    except HowsmoothError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted: nothing was written.", err=True)
        return INTERRUPTED
    except Exception as error:
        # Recognise click's usage errors by their attributes: typer has changed the name of their class
        # several times, but not the method `format_message`.
        described = getattr(error, "format_message", None)
        if described is None or getattr(error, "exit_code", None) is None:
            raise
        place = getattr(getattr(error, "ctx", None), "command_path", "howsmooth")
        sentence = described().replace("Value error, ", "").rstrip(".")
        stop = "" if sentence.endswith("?") else "."
        file = next((word for word in typed[2:] if sentence.endswith(f"extra argument(s) ({word})")), "")
        if file and Path(file).is_file():
            stop += f" Is --text {file} meant?"
        return _refuse(f"{sentence}{stop} See {place} --help.")
    return code if isinstance(code, int) else 0


def _drop_output() -> None:
    # At exit, Python flushes what is left in the buffer of standard output, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(sentence: str) -> int:
    # Print a single line, even if a file name or a library's message contains line breaks.
    # An argument such as part="vision" is told as the option --part vision.
    def option(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')} {found[2] or ''}".rstrip()

    told = re.sub(r'\b([a-z_]+)=(?:True|"(\w+)")', option, " ".join(sentence.split()))
    words = readable(encodable(told), longest=2000)
    typer.echo(f"error: {words}", err=True)
    return REFUSED
