"""Options that several commands take, said once; what a command means differently stays with the command."""

from __future__ import annotations

from copy import copy
from enum import StrEnum
from typing import Annotated, get_args

import typer
from typer.models import OptionInfo

from howsmooth.errors import ArgumentError

__all__ = [
    "HOW",
    "OUTPUT",
    "WHAT",
    "AsDecoderOption",
    "DeviceOption",
    "Dtype",
    "DtypeOption",
    "Executor",
    "ExecutorOption",
    "HeadsOption",
    "JsonOption",
    "LayersOption",
    "PartOption",
    "QuietOption",
    "RandomInitOption",
    "SchedulerOption",
    "Scope",
    "ScopeOption",
    "SeedOption",
    "SourceArgument",
    "TextOption",
    "ThreadsOption",
    "WorkersOption",
    "refuse_workers",
    "under",
]

WHAT = "What to measure"
HOW = "How to measure"
OUTPUT = "Output"

Scope = StrEnum("Scope", ["head", "heads", "attention"])
Dtype = StrEnum("Dtype", ["float32", "float64"])
Executor = StrEnum("Executor", ["threads", "processes", "dask"])

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A built-in model, a local folder, a Hub id, or a .safetensors or .npz file of parameters.",
        show_default=False,
    ),
]
TextOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|PATH",
        help="The text whose tokens a model is given, as for howsmooth measure.",
        rich_help_panel=WHAT,
    ),
]
LayersOption = Annotated[
    str,
    typer.Option(
        metavar="RANGES", help="all, or a list such as 0,6 or 0:4 or -1 (the last).", rich_help_panel=WHAT
    ),
]
HeadsOption = Annotated[
    str, typer.Option(metavar="RANGES", help="Like --layers; only with --scope head.", rich_help_panel=WHAT)
]
ScopeOption = Annotated[
    Scope,
    typer.Option(
        metavar="SCOPE",
        help="head: one head, values only; heads: all, before the output projection; attention: with it.",
        rich_help_panel=WHAT,
    ),
]
RandomInitOption = Annotated[
    bool,
    typer.Option(
        "--random-init", help="Build the architecture with untrained weights.", rich_help_panel=WHAT
    ),
]
AsDecoderOption = Annotated[
    bool,
    typer.Option(
        "--as-decoder", help="Run an encoder as a decoder, with its causal mask.", rich_help_panel=WHAT
    ),
]
PartOption = Annotated[
    str | None,
    typer.Option(
        metavar="PART",
        help="Of a model made of several: text, vision or audio, or the path of a module such as encoder.",
        show_default=False,
        rich_help_panel=WHAT,
    ),
]
SeedOption = Annotated[int, typer.Option(help="From which all randomness derives.", rich_help_panel=HOW)]
DeviceOption = Annotated[str, typer.Option(help="Such as cpu, cuda or cuda:1.", rich_help_panel=HOW)]
DtypeOption = Annotated[Dtype, typer.Option(help="Precision.", rich_help_panel=HOW)]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="CPU threads. Default: what PyTorch chooses.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
ExecutorOption = Annotated[
    Executor | None,
    typer.Option(
        metavar="threads|processes|dask",
        help="Measure on workers: threads or processes of this machine, or those of a Dask cluster.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        help="How many threads or processes. Default: one a CPU core.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Of the scheduler of the Dask cluster, such as tcp://10.0.0.1:8786.",
        show_default=False,
        rich_help_panel=HOW,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print the result as JSON, and nothing else.", rich_help_panel=OUTPUT),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress and no summary.", rich_help_panel=OUTPUT)
]


def refuse_workers(executor: Executor | None, option: str) -> None:
    """Refuse ``--executor`` beside an option with which nothing is measured.

    Raises
    ------
    howsmooth.errors.ArgumentError
        If there is one.

    """
    if executor is not None:
        raise ArgumentError(
            "executor", expected=f"none beside {option}, which measures nothing", got=str(executor)
        )


def under(panel: str | None, option: object) -> OptionInfo:
    """Give one of these options for another panel of the help; ``None`` is the panel without a name."""
    shared: OptionInfo = get_args(option)[1]
    moved = copy(shared)
    moved.rich_help_panel = panel
    return moved
