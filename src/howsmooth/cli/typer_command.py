"""Turn dataclasses of options into typer commands, with an option or argument for each field."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from howsmooth.study.execution_options import Execution
from howsmooth.study.options import OUTPUT, Option, Options, flag, option, options_of, renamed
from howsmooth.study.plan_file import read_options
from howsmooth.study.text_formatting import encodable

__all__ = [
    "ONE_PROCESS",
    "OTHER_INPUTS",
    "OUTPUT",
    "TYPED",
    "Shown",
    "ShownOrQuiet",
    "as_typed",
    "command",
    "folder_option",
    "use_threads",
]

TYPED: ContextVar[tuple[str, ...]] = ContextVar("typed", default=("measure",))
"""The command-line arguments after ``howsmooth``, as the user typed them."""

ONE_PROCESS = ("executor", "workers", "scheduler")
"""The options of an execution that a command without workers leaves out."""

OTHER_INPUTS = ("images", "audio", "embeddings")
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


def folder_option(help: str) -> Any:
    """Return the typer option ``--out`` for a command that writes files only if this option is given."""
    return typer.Option(metavar="FOLDER", help=help, show_default=False, rich_help_panel=OUTPUT)


def command(
    *examples: str, without: Sequence[str] = (), **defaults: Any
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that turns a function into a typer command. The parameters of the function are
    annotated with dataclasses of options.

    A parameter that is annotated with a dataclass becomes one option or argument for each field of the
    dataclass, and the function receives an instance of the dataclass. A parameter that is annotated
    ``Annotated[dict, dataclass]`` receives a dictionary of only those options that the user typed. Other
    parameters are passed to typer.

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
        plans = {name: plan for name, hint in hints.items() if (plan := _plan_of(hint))}
        parameters: dict[str, inspect.Parameter] = {}
        flags: dict[str, str] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in plans:
                parameters[name] = parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)
                continue
            partly = not isinstance(hints[name], type)
            for one in _parameters(plans[name], None if partly else defaults, without):
                parameters[one.name] = one
            flags |= {field: _flag(field, option) for field, option in options_of(plans[name]).items()}

        parameters["context"] = inspect.Parameter(
            "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
        )

        @wraps(function)
        def typed(context: typer.Context, **values: Any) -> int:
            with renamed(lambda name: flags.get(name, name)):
                for name, plan in plans.items():
                    given = _given(plan, values, without)
                    if str(given.get("source", "")).endswith(".toml"):
                        given = _of_file(plan, given, context, without)
                    values[name] = plan(**given) if isinstance(hints[name], type) else given
                if isinstance(how := values.get("execution"), Execution):
                    use_threads(how.threads)
                try:
                    return function(**values)
                except KeyboardInterrupt:  # which typer would turn into a silent exit
                    raise typer.Abort from None

        # typer reads the parameters of a command from its signature and annotations.
        typed.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        typed.__annotations__ = {name: one.annotation for name, one in parameters.items()} | {"return": int}
        typed.__dict__["examples"] = "\n\n".join(map(_above, examples))
        return typed

    return decorate


def _above(paragraph: str) -> str:
    """Move the explanation of an example above the command, so that the whole line can be copied."""
    example, end, told = paragraph.partition("[/]  ")
    return f"{told}:\n\n{example}[/]" if end else paragraph


def as_typed(*more: str) -> str:
    """Return the ``howsmooth`` command that the user typed, with the arguments ``more`` appended."""
    return encodable(shlex.join(["howsmooth", *TYPED.get(), *more]))


def use_threads(count: int | None) -> None:
    """Set the number of CPU threads of PyTorch; ``None`` leaves the number unchanged."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


def _plan_of(hint: Any) -> type[Options] | None:
    """Return the dataclass of options in a type annotation, or ``None`` if there is none."""
    named = (hint, *get_args(hint)[1:])
    return next((one for one in named if isinstance(one, type) and issubclass(one, Options)), None)


def _flag(field: str, option: Option) -> str:
    return option.flag or field.replace("_", "-")


def _parameters(
    plan: type[Options], defaults: Mapping[str, Any] | None, without: Sequence[str]
) -> Iterator[inspect.Parameter]:
    """Yield a typer parameter for each field of a dataclass of options. If ``defaults`` is None, the
    parameters have no default values.
    """
    for field in dataclasses.fields(plan):
        if field.name in without:
            continue
        option: Option = field.metadata["option"]
        default = None if defaults is None else defaults.get(field.name, field.default)
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
    """Remove the options of a dataclass from the dictionary ``values``, and return the options that the user
    gave.
    """
    # The value of an omitted option is None or an empty list.
    taken = {name: values.pop(name) for name in set(options_of(plan)) - set(without)}
    return {name: value for name, value in taken.items() if value is not None and value != []}


def _of_file(
    plan: type[Options], given: dict[str, Any], context: typer.Context, without: Sequence[str]
) -> dict[str, Any]:
    """Return the options of a plan file, which is given as the option ``source``. Options that the user typed
    replace those in the file.
    """
    path = Path(given["source"])
    sources = {name: context.get_parameter_source(name) for name in given if name != "source"}
    typed = {name: given[name] for name, one in sources.items() if one and one.name == "COMMANDLINE"}
    with renamed(lambda name: f"{path.name}: {name}"):
        known = [name for name in options_of(plan) if name not in without]
        return read_options(path, plan, "source", known) | typed
