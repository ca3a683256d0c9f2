"""``howsmooth measure``: from models and texts to a store, tables, figures and a report."""

from __future__ import annotations

import shlex
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.forecast import CalibrateOption, DryRunOption, check_calibrate, tell_forecast
from howsmooth.cli.options import (
    HOW,
    OUTPUT,
    WHAT,
    AsDecoderOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    ExecutorOption,
    HeadsOption,
    JsonOption,
    LayersOption,
    PartOption,
    QuietOption,
    RandomInitOption,
    SchedulerOption,
    SeedOption,
    WorkersOption,
    refuse_workers,
)
from howsmooth.cli.progress import choose
from howsmooth.cli.watch import INTERRUPTED, Watch
from howsmooth.study.names import encodable

__all__ = ["TYPED", "measure"]

TYPED: ContextVar[tuple[str, ...]] = ContextVar("typed", default=("measure",))
"""The words after ``howsmooth``, as typed."""

Scope = StrEnum("Scope", ["head", "heads", "attention", "residual", "block"])

_EXAMPLES = (
    "Into --out go a store with one row a measurement, measurements.csv, exponents.csv, figures, and a "
    "report.html that says what it all means.",
    "Examples:",
    "[cyan]howsmooth measure[/]  the two built-in models on the prose that every Python carries",
    "[cyan]howsmooth measure builtin-encoder --layers 0,-1 --lengths 4:64:4 --samples 5[/]  a quick look",
    "[cyan]howsmooth measure ./my-model --text alice.txt --scope head --heads 0:3 --layers 2[/]  four heads",
    "[cyan]howsmooth measure gpt2 --random-init --text alice.txt --layers 6[/]  the architecture, untrained",
    "[cyan]howsmooth measure builtin-encoder --as-decoder[/]  an encoder with a causal mask",
    "[cyan]howsmooth measure vit --random-init --images builtin --layers 0,5[/]  images instead of a text",
    "[cyan]howsmooth measure ./model --embeddings sentences.safetensors --lengths 4,8 --samples 2[/]  "
    "tokens that were embedded elsewhere",
    "[cyan]howsmooth measure builtin-encoder --as-published all[/]  beside what the paper's code computes",
    "[cyan]howsmooth measure ./my-model --lengths 1024,4096 --dry-run[/]  how long that would take",
    "[cyan]howsmooth measure builtin-decoder --executor processes --workers 2[/]  two processes at a time",
    "[cyan]howsmooth measure builtin-decoder --json --quiet > result.json[/]  for a machine",
    "The same command again continues where it was interrupted, and repeats nothing. Lengths, samples, "
    "layers, heads, scopes, texts and models can be added to a folder at any time.",
)


def measure(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="A built-in model, a local folder, or a Hub id; several are measured into one store. "
            "Default: builtin-encoder builtin-decoder.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|PATH",
            help="A path (.txt, or AG_NEWS-format .csv), python-docs, python-code, alice or ag_news. May be "
            "repeated. Default: python-docs.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    images: Annotated[
        list[str] | None,
        typer.Option(
            metavar="builtin|PATH",
            help="Measure on images: a file, a folder, or builtin (made by code). May be repeated. The "
            "length of an image is the number of its patches.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    audio: Annotated[
        list[str] | None,
        typer.Option(
            metavar="builtin|FILE",
            help="Measure on sound: a .wav or .npy file, or builtin (made by code).",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    tokens: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Measure on token ids: a .npy or .json file, or numbers between spaces, a sequence a line.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    embeddings: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Measure on tokens that were embedded elsewhere: a .safetensors file of tensors (n, d).",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    part: PartOption = None,
    layers: LayersOption = "all",
    heads: HeadsOption = "all",
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="RANGES",
            help="Numbers of tokens: start:stop:step with the stop included, or a list such as 8,16,32. "
            "Default: 2:100:2; of images and sound some that the model has.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            help="Sequences a length: windows of the text that do not overlap, without special tokens.",
            rich_help_panel=WHAT,
        ),
    ] = 10,
    scope: Annotated[
        list[Scope] | None,
        typer.Option(
            metavar="SCOPE",
            help="What is called attention. head: one head, values only; heads: all, before the output "
            "projection; attention: with it; residual: input plus attention; block: with the norm too. "
            "May be repeated. Default: attention.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    random_init: RandomInitOption = False,
    as_decoder: AsDecoderOption = False,
    as_published: Annotated[
        str | None,
        typer.Option(
            metavar="all|ITEMS",
            help="Measure what the paper's published code computes beside the corrected constant, into "
            "published.csv. Items: output, block, unmasked, dropout, stopping; all takes those that apply.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = None,
    rtol: Annotated[
        float, typer.Option(help="Relative width of the interval to reach.", rich_help_panel=HOW)
    ] = 1e-4,
    confidence: Annotated[
        float,
        typer.Option(help="Probability that the interval holds the constant.", rich_help_panel=HOW),
    ] = 0.999,
    max_iterations: Annotated[
        int, typer.Option(help="Golub-Kahan steps at most.", rich_help_panel=HOW)
    ] = 200,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = Dtype.float32,
    no_bounds: Annotated[
        bool,
        typer.Option("--no-bounds", help="Compute no bounds beside the constants.", rich_help_panel=HOW),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPU threads, with --executor of each worker; fewer can be faster on a busy machine. "
            "Default: what PyTorch chooses, or the cores shared out among the workers.",
            show_default=False,
            rich_help_panel=HOW,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory that one measurement may use, such as 8GiB. Sequences whose attention probabilities "
            "do not fit are measured without them. Default: half of what is free.",
            show_default=False,
            rich_help_panel=HOW,
        ),
    ] = None,
    executor: ExecutorOption = None,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the store, tables, figures and report.", rich_help_panel=OUTPUT)
    ] = Path("howsmooth-out"),
    dry_run: DryRunOption = False,
    calibrate: CalibrateOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Measure the local Lipschitz constant of a model's attention on real inputs, with an interval."""
    from howsmooth.cli.parsing import build_inputs, build_plan, use_threads
    from howsmooth.study.executors import opened_executor, threads_each
    from howsmooth.study.publish import publish
    from howsmooth.study.run import run
    from howsmooth.study.tools import default_tools

    plan = build_plan(
        models=models,
        texts=text,
        layers=layers,
        heads=heads,
        lengths=lengths,
        samples=samples,
        scopes=[str(one) for one in scope] if scope else None,
        random_init=random_init,
        as_decoder=as_decoder,
        rtol=rtol,
        confidence=confidence,
        max_iterations=max_iterations,
        seed=seed,
        device=device,
        dtype=str(dtype),
        bounds=not no_bounds,
        inputs=build_inputs(tokens=tokens, embeddings=embeddings, images=images, audio=audio),
        part=part,
        memory=memory,
    )
    use_threads(threads)
    check_calibrate(calibrate=calibrate, dry_run=dry_run)
    if dry_run:
        refuse_workers(executor, "--dry-run")
        tell_forecast(
            plan,
            out,
            calibrate=calibrate,
            as_json=json,
            quiet=quiet,
            published=as_published is not None,
        )
        return 0
    command = encodable(shlex.join(["howsmooth", *TYPED.get()]))
    display = choose(quiet=quiet)
    watch = Watch(display, command)
    try:
        if as_published is not None:
            from howsmooth.cli.published import measure_as_published

            with opened_executor(executor, workers=workers, scheduler=scheduler) as pool:
                measure_as_published(
                    plan,
                    as_published,
                    out,
                    display,
                    watch,
                    command=command,
                    as_json=json,
                    quiet=quiet,
                    executor=pool,
                    threads=threads_each(pool, threads),
                )
            return 0
        with display:
            with opened_executor(executor, workers=workers, scheduler=scheduler) as pool:
                display.phase("Reading texts and models" if plan.texts else "Reading inputs and models")
                outcome = run(
                    plan,
                    out,
                    default_tools(),
                    command=command,
                    on_progress=watch,
                    executor=pool,
                    threads=threads_each(pool, threads),
                )
            watch.finished = outcome
            display.phase("Drawing figures")
            published = publish(
                out, lambda done, total: display.advance(done / total, 1.0, f"{done} of {total}")
            )
    except KeyboardInterrupt:
        typer.echo(watch.interrupted(out), err=True)
        return INTERRUPTED
    if json:
        from howsmooth.cli.result import as_json

        typer.echo(as_json(plan, outcome, published, out))
    elif not quiet:
        from howsmooth.cli.result import show

        show(plan, outcome, published, out)
    return 0


measure.__dict__["examples"] = "\n\n".join(_EXAMPLES)
