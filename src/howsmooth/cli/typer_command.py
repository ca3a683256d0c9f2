"""Turn dataclasses of options into typer commands, with an option or argument for each field."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from howsmooth.study.execution_options import Execution
from howsmooth.study.options import OUTPUT, Option, Options, flag, option, options_of, renamed
from howsmooth.study.plan_file import KEYS, read_plan
from howsmooth.study.progress_listener import Listener
from howsmooth.words import counted, encodable

if TYPE_CHECKING:
    from howsmooth.study.runner import Means

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "ONE_PROCESS",
    "OTHER_INPUTS",
    "OUTPUT",
    "TYPED",
    "Shown",
    "ShownOrQuiet",
    "as_typed",
    "command",
    "means_of",
    "resumable",
]

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

FAILED = 3
"""The exit code if some measurements failed and the others were made."""

TYPED: ContextVar[tuple[str, ...]] = ContextVar("typed", default=("measure",))
"""The command-line arguments after ``howsmooth``, as the user typed them."""

ONE_PROCESS = ("executor", "workers", "scheduler")
"""The options of an execution that a command without workers leaves out."""

OTHER_INPUTS = ("images", "embeddings")
"""The inputs that a command of texts and token ids leaves out."""


@dataclasses.dataclass(frozen=True)
class Shown(Options):
    """The options that choose how a command shows its progress and its result."""

    PANEL: ClassVar[str] = OUTPUT

    json: bool = option(False, flag(), "Print only the result, as JSON.")
    quiet: bool = option(False, flag(), "Show no progress; the result is printed.", short="-q")


@dataclasses.dataclass(frozen=True)
class ShownOrQuiet(Shown):
    """The options that choose how a command that also writes files shows its progress and its result."""

    quiet: bool = option(
        False, flag(), "Show no progress, and print no result: it is in the files.", short="-q"
    )


def command(
    *examples: str, without: Sequence[str] = (), **defaults: Any
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that turns a function into a typer command. The parameters of the function are
    annotated with dataclasses of options.

    A parameter that is annotated with a dataclass becomes one option or argument for each field of the
    dataclass, and the function receives an instance of the dataclass. Other parameters are passed to typer.
    If one of them is named ``plan_file`` and the user gives it, the parameters ``plan`` and ``execution`` are
    read from this file; options that the user typed replace those in the file.

    Parameters
    ----------
    *examples
        Paragraphs to print below the help.
    without
        Names of fields that do not become options.
    **defaults
        Default values that replace the default values of the fields in the dataclass.

    """

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        hints = get_type_hints(function, include_extras=True)
        plans = {
            name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Options)
        }
        parameters: dict[str, inspect.Parameter] = {}
        flags: dict[str, str] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in plans:
                parameters[name] = parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)
                continue
            for one in _parameters(plans[name], defaults, without):
                parameters[one.name] = one
            flags |= {field: _flag(field, option) for field, option in options_of(plans[name]).items()}

        parameters["context"] = inspect.Parameter(
            "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
        )

        @wraps(function)
        def run(context: typer.Context, **values: Any) -> int:
            with renamed(lambda name: flags.get(name, name)):
                read: dict[str, Any] = {}
                if values.get("plan_file") is not None:
                    sources = {key: context.get_parameter_source(key) for key in KEYS if key in values}
                    typed = [key for key, one in sources.items() if one and one.name == "COMMANDLINE"]
                    read = read_plan(values["plan_file"], **{key: values[key] for key in typed})._asdict()
                for name, plan in plans.items():
                    given = _given(plan, values, without)
                    values[name] = read.get(name) or plan(**given)
                how = values.get("execution")
                if isinstance(how, Execution) and how.threads is not None:
                    import torch

                    torch.set_num_threads(how.threads)
                try:
                    return function(**values)
                except KeyboardInterrupt:  # which typer would turn into a silent exit
                    raise typer.Abort from None

        # typer reads the parameters of a command from its signature and annotations.
        run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: one.annotation for name, one in parameters.items()} | {"return": int}
        run.__dict__["examples"] = "\n\n".join(map(_above, examples))
        return run

    return decorate


def _above(paragraph: str) -> str:
    """Move the explanation of an example above the command, so that the whole line can be copied."""
    example, end, told = paragraph.partition("[/]  ")
    return f"{told}:\n\n{example}[/]" if end else paragraph


def as_typed() -> str:
    """Return the ``howsmooth`` command that the user typed."""
    return encodable(shlex.join(["howsmooth", *TYPED.get()]))


@contextmanager
def means_of(execution: Execution, display: Listener, *, keep_going: bool = False) -> Iterator[Means]:
    """Start the workers that the options ask for, yield the means of carrying out tasks, and stop the workers
    at the end.
    """
    from howsmooth.study.executors import opened_executor, threads_each
    from howsmooth.study.runner import Means

    if execution.scheduler is not None:
        workers = counted(execution.workers or 1, "Dask worker")
        display.phase(f"Waiting for {workers} at {execution.scheduler}")
    with opened_executor(execution) as pool:
        yield Means(display, as_typed(), keep_going, pool, threads_each(pool, execution.threads))


@contextmanager
def resumable(kept: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C, print what is saved and the command that continues the work, and exit with code 130.

    The function ``kept`` returns a phrase that says what is saved. If the phrase is empty, the
    KeyboardInterrupt is raised again.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not (said := kept()):
            raise
        typer.echo(f"interrupted: {said}. Continue with:\n  {as_typed()}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _flag(field: str, option: Option) -> str:
    return option.flag or field.replace("_", "-")


def _parameters(
    plan: type[Options], defaults: Mapping[str, Any], without: Sequence[str]
) -> Iterator[inspect.Parameter]:
    """Yield a typer parameter for each field of a dataclass of options."""
    for field in dataclasses.fields(plan):
        if field.name in without:
            continue
        option: Option = field.metadata["option"]
        default = defaults.get(field.name, field.default)
        needed = default is dataclasses.MISSING
        open_ = default is None or default in ("", ())
        told: dict[str, Any] = {
            "help": option.help,
            "metavar": option.metavar or None,
            "show_default": not (needed or open_ or default is False),
        }
        if option.positional:
            typed = typer.Argument(**told)
        else:
            names = [f"--{_flag(field.name, option)}", *([option.short] if option.short else [])]
            typed = typer.Option(*names, **told, rich_help_panel=option.panel or plan.PANEL)
        kind: Any = option.kind.typed
        if option.kind.several:
            kind, default = list[kind], default and list(default)
        if open_:
            kind, default = kind | None, None
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if needed else default,
            annotation=Annotated[kind, typed],
        )


def _given(plan: type[Options], values: dict[str, Any], without: Sequence[str]) -> dict[str, Any]:
    """Take the options of a dataclass out of ``values``, and return those that are not omitted."""
    # The value of an omitted option is None or an empty list.
    taken = {name: values.pop(name) for name in set(options_of(plan)) - set(without)}
    return {name: value for name, value in taken.items() if value is not None and value != []}
