"""Turn functions into typer commands, with an option for each field of the dataclasses that they take."""

from __future__ import annotations

import inspect
import os
import shlex
import typing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import typer

from howsmooth.cli.first_checks import check_at_once
from howsmooth.study.execution_options import Execution
from howsmooth.study.options import OUTPUT, WHAT, Told, in_words, options, options_of, renamed
from howsmooth.study.plan_file import KEYS, read_plan
from howsmooth.study.progress_listener import Listener
from howsmooth.words import counted, encodable

if TYPE_CHECKING:
    from howsmooth.study.runner import Means

__all__ = ["FAILED", "INTERRUPTED", "TYPED", "Quiet", "Shown", "as_typed", "command", "means_of", "resumable"]

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

FAILED = 3
"""The exit code if some measurements failed and the others were made."""

TYPED: ContextVar[tuple[str, ...]] = ContextVar("typed", default=("measure",))
"""The command-line arguments after ``howsmooth``, as the user typed them."""


# How the help calls a value of a type.
_KINDS = {bool: None, int: "INTEGER", float: "NUMBER", str: "TEXT"}


@options
class Shown:
    """The options for showing progress and the result."""

    PANEL: ClassVar[str] = OUTPUT.panel

    json: Annotated[bool, "Print only the result, as JSON."] = False
    quiet: Annotated[bool, Told(short="-q"), "Show no progress."] = False


Quiet = Annotated[bool, Told(short="-q"), "Show no progress and no result, which is in the files."]


def command(*examples: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that turns a function, which takes dataclasses of options, into a typer command.

    The command has an option or an argument for each field, and ``examples``, paragraphs below the help. If
    one of the fields is named ``plan_file`` and the user gives it, the parameters ``plan`` and ``execution``
    are read from this file; options that the user typed replace those in the file.
    """

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        hints = get_type_hints(function)
        plans: dict[str, type] = {name: hint for name, hint in hints.items() if name != "return"}
        flags = {
            name: _flag(name, option) for plan in plans.values() for name, option in options_of(plan).items()
        }

        @wraps(function)
        def run(**values: Any) -> int:
            # What is left out is None, an empty list or, of a flag, False.
            typed = {name: one for name, one in values.items() if one not in (None, []) and one is not False}
            with renamed(lambda name: flags.get(name, name)):
                made: dict[str, Any] = {}
                if file := typed.get("plan_file"):
                    replaced = {name: value for name, value in typed.items() if name in KEYS}
                    made = read_plan(file, **replaced)._asdict()
                for name, plan in plans.items():
                    own = {field: value for field, value in typed.items() if field in options_of(plan)}
                    made[name] = made[name] if name in made else plan(**own)
                writes = not any(getattr(one, "dry_run", False) for one in made.values())
                for one in made.values():
                    check_at_once(one, keep_going=bool(file), writes=writes)
                threads = next((one.threads for one in made.values() if hasattr(one, "threads")), None)
                with ExitStack() as opened:
                    if threads is not None:
                        from howsmooth.threads import fastest_threads

                        opened.enter_context(fastest_threads(threads))
                    try:
                        return function(**made)
                    except KeyboardInterrupt:  # which typer would turn into a silent exit
                        raise typer.Abort from None

        # typer reads the parameters of a command from its signature.
        parameters = [one for plan in plans.values() for one in _parameters(plan)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": int}
        run.__dict__["examples"] = "\n\n".join(map(_above, examples))
        return run

    return decorate


def _flag(field: str, option: Told) -> str:
    return option.flag or field.replace("_", "-")


def _parameters(plan: Any) -> Iterator[inspect.Parameter]:
    """Yield a typer parameter for each option. Its default is None; the help states the option's default."""
    for name, option in options_of(plan).items():
        field = plan.__pydantic_fields__[name]
        members = _members(field.annotation)
        choices = [word for one in members if get_origin(one) is Literal for word in get_args(one)]
        # The type to which the command line converts a word.
        kind = next((one for one in (bool, int, float) if one in members and str not in members), str)
        needed = field.is_required()
        usual = "" if needed or not field.default else f" Default: {in_words(field.default)}."
        told: dict[str, Any] = {
            "help": option.help + usual,
            "metavar": option.metavar or "|".join(choices) or _KINDS[kind],
            "show_default": False,
        }
        if option.positional:
            typed = typer.Argument(**told)
        else:
            names = [f"--{_flag(name, option)}", *([option.short] if option.short else [])]
            panel = option.panel or getattr(plan, "PANEL", WHAT)
            typed = typer.Option(*names, **told, rich_help_panel=panel)
        given: Any = list[str] if option.several else kind
        default = False if kind is bool else None
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if needed else default,
            annotation=Annotated[given if needed or kind is bool else given | None, typed],
        )


def _members(annotation: Any) -> list[Any]:
    members = get_args(annotation) if get_origin(annotation) in (typing.Union, UnionType) else (annotation,)
    return [get_args(one)[0] if get_origin(one) is Annotated else one for one in members]


def _above(paragraph: str) -> str:
    # The explanation of an example stands above it, so that the whole line can be copied.
    example, end, told = paragraph.partition("[/]  ")
    return f"{told}:\n\n{example}[/]" if end else paragraph


def as_typed() -> str:
    """Return the ``howsmooth`` command line that the user typed, so that it can be run again."""
    return encodable(f"{os.environ.get('HOWSMOOTH_COMMAND', 'howsmooth')} {shlex.join(TYPED.get())}")


@contextmanager
def means_of(execution: Execution, display: Listener, *, keep_going: bool = False) -> Iterator[Means]:
    """Start the workers that the user asked for, yield a ``Means`` with them, and stop them at the end."""
    from howsmooth.study.executors import opened_executor, threads_each
    from howsmooth.study.runner import Means

    if execution.scheduler is not None:
        workers = counted(execution.workers or 1, "Dask worker")
        display.phase(f"Waiting for {workers} at {execution.scheduler}")
    with opened_executor(execution) as pool:
        yield Means(display, as_typed(), keep_going, pool, threads_each(pool, execution.threads))


@contextmanager
def resumable(kept: Callable[[], str]) -> Iterator[None]:
    """If Ctrl-C ends the block, print what is saved (``kept()``) and how to continue, and exit with 130."""
    try:
        yield
    except KeyboardInterrupt:
        if not (said := kept()):
            raise
        typer.echo(f"interrupted: {said}. Continue with:\n  {as_typed()}", err=True)
        raise typer.Exit(INTERRUPTED) from None
