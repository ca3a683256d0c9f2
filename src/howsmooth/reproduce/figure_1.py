"""Figure 1: the local Lipschitz constant against the length on two texts, for three models."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from howsmooth.reproduce.columns import columns_of
from howsmooth.reproduce.drawing.figure_1 import draw
from howsmooth.reproduce.experiment import Experiment, OnStep, Request, Step
from howsmooth.reproduce.finding import write_note
from howsmooth.reproduce.loading import remembering
from howsmooth.study.names import encodable
from howsmooth.study.progress import Progress
from howsmooth.study.published_run import run_as_published
from howsmooth.study.run import run
from howsmooth.study.tools import Tools

__all__ = ["FIGURE_1"]

_LENGTHS = tuple(range(4, 101, 4))
_SAMPLES = 10
# Of the published rows, which hold the corrected quantity, that with each item, and that with all of them.
_PUBLISHED_COST = 6.0


def _measure(request: Request, folder: Path, tools: Tools, on_step: OnStep) -> None:
    tools = remembering(tools)
    lengths, samples = request.lengths or _LENGTHS, request.samples or _SAMPLES
    columns = columns_of(request, tools)
    kinds = (False, True) if request.as_published else (False,)
    parts = [(column, published) for column in columns for published in kinds]
    # Between the width and its square, as most sequences are short; only shares matter.
    costs = [column.width**1.5 * (_PUBLISHED_COST if published else 1.0) for column, published in parts]
    for index, (column, published) in enumerate(parts):
        plan, place = column.plan(request, lengths, samples), folder / "columns" / column.stem
        listen = partial(_tell, on_step, sum(costs[:index], 0.0), costs[index], sum(costs, 0.0))
        if published:
            run_as_published(plan, None, place, tools, on_progress=listen)
        else:
            run(plan, place, tools, command=request.command, on_progress=listen)
    write_note(
        folder,
        {
            "columns": [
                {"folder": f"columns/{one.stem}", "model": one.spec.label, "layer": one.layer}
                for one in columns
            ],
            "texts": [encodable(tools.load_text(name).name) for name in request.texts],
            "lengths": list(lengths),
            "samples": samples,
            "as_published": request.as_published,
        },
    )


def _tell(on_step: OnStep, before: float, cost: float, total: float, progress: Progress) -> None:
    share = progress.cost_done / progress.cost_planned if progress.cost_planned else 1.0
    words = f"{progress.model}, {progress.text}, n = {progress.n}"
    on_step(Step(before + cost * share, total, words))


FIGURE_1 = Experiment(
    name="figure-1",
    title="The constant of attention on text, against the length",
    paper="Figure 1",
    about=(
        "Each point is a sequence of n tokens of a text. Its height is the local Lipschitz constant there of "
        "an attention layer, all heads and the output projection, without residual and norm; its colour is "
        "the root mean square norm of its tokens. The paper's columns are the first layer of an encoder, "
        "layer 6 (or the last) of the same encoder run as a decoder with its causal mask, and layer 6 of an "
        "untrained GPT-2. The solid line is the least-squares fit of a power of n; the dashed one is n to "
        "the power 1/4 with only its factor fitted to the same points."
    ),
    measure=_measure,
    draw=draw,
)
