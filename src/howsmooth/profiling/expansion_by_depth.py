"""The function ``depth_profile``, which measures how much each part of a model amplifies a small change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, ClassVar

import pandas as pd

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.errors import ArgumentError
from howsmooth.lipschitz import local_lipschitz
from howsmooth.models import Site
from howsmooth.models.capture import model_parts
from howsmooth.printed_table import PrintedTable
from howsmooth.profiling.model_input import Inputs, Model, given_inputs, loaded_if_named, shown_progress
from howsmooth.profiling.token_influence import ResultWithInfluence, as_last_step, influence_at
from howsmooth.results.curves import DASHED, SOLID, Curve, Panel, add_legend, draw
from howsmooth.results.drawing import GREY, Figure, styled, titled
from howsmooth.results.page import frame, parts
from howsmooth.results.result import in_interval, intervals
from howsmooth.scopes import OUTPUTS
from howsmooth.seeds import derive_seed
from howsmooth.study.plans import PROFILE_RTOL, Plan
from howsmooth.study.records import plain_rows
from howsmooth.threads import with_fastest_threads

__all__ = ["DepthProfile", "depth_profile"]

_MAPS = ("own", "until", "beyond")
_CURVES = {
    "until": ("embeddings to here", "#3b528b", SOLID),
    "beyond": ("here to the output", "#e07b00", SOLID),
    "own": ("the stage alone", "#21918c", (0.0, (1.0, 1.2))),
}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DepthProfile(ResultWithInfluence):
    """Lipschitz constants at one input: of each stage of a model, of the model up to the end of this stage,
    and of the rest of the model.

    A stage is what comes before the first block (``embeddings``), a block, or what comes after the last one
    (``output``: the last norm layer and the output layer).
    """

    NAME: ClassVar[str] = "depth"
    TITLE: ClassVar[str] = "Depth profile"
    WHAT: ClassVar[str] = "Where in its depth the model expands a change of its embeddings,"
    ALT: ClassVar[str] = "The constants down the depth of the model; the numbers are in the table."

    #: One row for each stage, with the columns ``stage``, ``name`` (the path of the block), ``own`` (the
    #: constant of the stage), ``until`` (of the map from the embeddings to the end of the stage), ``beyond``
    #: (of the map from the end of the stage to the output), each with ``…_lower``, ``…_upper`` and
    #: ``…_converged``; ``product``, the product of ``own`` over the stages up to this one, never less than
    #: ``until``; and ``ratio``, which is until / product.
    table: pd.DataFrame
    #: The output of the model that was measured, in words.
    output: str
    #: Probability with which each interval holds.
    confidence: float

    @property
    def value(self) -> float:
        """The Lipschitz constant of the whole model, from its embeddings to its output."""
        return float(self.table["until"].iloc[-1])

    @property
    def citation(self) -> str:
        """One line to cite, with the constant of the whole model and the product of its stages' constants."""
        last = plain_rows(self.table)[-1]
        return (
            f"Local Lipschitz constant of {self.model} from its embeddings to its {self.output} at "
            f"{self.input} (n = {self.n}): {_interval(last, 'until')} at {self.confidence:.4g} confidence; "
            f"product of its stages {last['product']:.6g}; {self._made_by}"
        )

    @property
    def _whole(self) -> str:
        whole = _interval(plain_rows(self.table)[-1], "until")
        return f"Whole model: {whole} at {self.confidence:.4g} confidence."

    @property
    def _explained(self) -> str:
        return (
            "Own: the constant of the stage; until: of the map from the embeddings to the end of the stage; "
            f"beyond: of the map from there to the {self.output}; product: of the constants of the stages so "
            "far; ratio: until / product."
        )

    def _lines(self) -> list[str]:
        lines = [
            f"Depth profile of {self.model}, {self.length}, embeddings to {self.output}.",
            f"Input: {self.input}.",
            f"{self.precision.capitalize()}.",
            *wrap(self._explained, 90),
            f"{'stage':<12}{'own':>10}{'until':>11}{'beyond':>11}{'product':>11}  ratio",
        ]
        for row in plain_rows(self.table):
            beyond = "" if row["beyond"] is None else f"{row['beyond']:.4g}"
            lines.append(
                f"{row['stage']:<12}{row['own']:>10.4g}{row['until']:>11.4g}{beyond:>11}"
                f"{row['product']:>11.4g}  {row['ratio']:.2g}"
            )
        lines += [self._whole, "The other intervals are in the columns …_lower and …_upper of the table."]
        missed = [f"{row['stage']} ({kind})" for row in plain_rows(self.table) for kind in _MAPS
                  if row[f"{kind}_converged"] is False]  # fmt: skip
        lines += [f"Not converged: {', '.join(missed)}."] if missed else []
        return [*lines, *self._lines_of_influence()]

    @styled
    def plot(self) -> Figure:
        """Draw the columns ``own``, ``until``, ``beyond`` and ``product`` of the table against the stages."""
        table = self.table.assign(place=range(len(self.table)))
        look: dict[str, Any] = {"mark": "o", "size": 9, "dashes": DASHED}
        curves = [Curve(table["place"], table["product"], "product of the stages", GREY, **look)]
        for column, (label, colour, dashes) in _CURVES.items():
            look = {"colour": colour, "dashes": dashes, "size": 9}
            curves.append(intervals(table, "place", label, column, **look))
        width = max(4.6, 2.4 + 0.3 * len(table))
        title = titled(f"{self.model}, {self.length}, to the {self.output}", width - 0.8)
        names = [stage.removeprefix("block ") for stage in table["stage"]]
        panel = Panel(curves, title, "block", scales=("linear", "log"), names=names)
        figure, _ = draw([[panel]], (width, 3.8))
        add_legend(figure, 2)
        return figure

    def _body(self, images: Mapping[str, str], most: int) -> list[str]:
        shown = self.table[["stage", *_MAPS, "product", "ratio"]].map(_short)
        for kind in _MAPS:
            rows = plain_rows(self.table)
            shown[kind] = ["" if row[kind] is None else _interval(row, kind) for row in rows]
        words = parts().words(self._whole, "lead"), parts().words(self._explained, "soft")
        return [*words, frame(shown), *self._parts_of_influence(images)]

    def _told(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("output", "confidence", "value")}
        return own | {"stages": plain_rows(self.table)}


@with_fastest_threads
def depth_profile(
    model: Model,
    inputs: Inputs,
    *,
    output: str = "hidden",
    last_token: bool = False,
    span: slice | tuple[int, int] | str | None = None,
    tokenizer: Any = None,
    rtol: float = PROFILE_RTOL,
    confidence: float = Plan.confidence,
    max_iterations: int = Plan.max_iterations,
    seed: int = Plan.seed,
    memory: int | None = None,
    influence: bool = False,
    on_layer: Callable[[float, int], None] | None = None,
) -> DepthProfile:
    """Measure local Lipschitz constants at one input (:func:`howsmooth.local_lipschitz`): of each block of a
    model, of the model up to the end of this block, and of the model after it.

    The product of the constants of all stages is an upper bound on the constant of the whole model. The two
    are equal only if the directions that the stages expand most are aligned: their ratio measures this.

    Parameters
    ----------
    model, inputs, span, tokenizer
        The model and one input, as for :func:`howsmooth.profile`. A model given by its name is loaded with
        its head if ``output`` needs it.
    output, last_token
        The output of the model, as for :func:`~howsmooth.models.capture` in scope ``"model"``.
    rtol, confidence, max_iterations, seed, memory
        As for :func:`howsmooth.local_lipschitz`.
    influence
        Whether :func:`howsmooth.influence` is measured for the whole model at its last output token, or its
        logits or margin. It takes one derivative of the model for each coordinate of this output.
    on_layer
        As for :func:`howsmooth.profile`, with the numbers of stages.

    Raises
    ------
    ArgumentError, CaptureError, ModelError
        As for :func:`howsmooth.profile`.

    """
    if output not in OUTPUTS:
        raise ArgumentError("output", expected=f"one of {', '.join(OUTPUTS)}", got=repr(output))
    given = given_inputs(loaded_if_named(model, head=output != "hidden"), inputs, span, tokenizer)
    check_accuracy(rtol, confidence, given.computed)
    few: dict[str, Any] = {"confidence": confidence, "max_iterations": max_iterations}

    def measured(kind: str, stage: int, site: Site) -> dict[str, Any]:
        start = derive_seed(purpose="depth", seed=seed, layer=stage, scope=kind)
        found = local_lipschitz(site.map, site.x[:1], seed=start, rtol=rtol, memory=memory, **few)
        (row,) = plain_rows(found.table[["value", "lower", "upper", "converged"]])
        return {kind + f"_{name}".removesuffix("_value"): value for name, value in row.items()}

    rows: list[dict[str, Any]] = []
    of_tokens = None
    with model_parts(given.module, given.inputs) as parts:
        blocks = parts.last_layers
        total = len(blocks) + 2
        with shown_progress(on_layer, total, "stage") as told:
            entry = parts.entry()
            if entry is not None:
                own = measured("own", -1, entry)
                beyond = measured("beyond", -1, parts.from_first(output, last_token=last_token))
                rows.append({"stage": "embeddings", "name": entry.name, **own, **_as("until", own), **beyond})
            told(1, total)
            for stage, layer in enumerate(blocks):
                row = {"stage": f"block {stage}", "name": parts.blocks[layer].module}
                row |= measured("own", stage, parts.span(layer, layer))
                row |= measured("until", stage, parts.until(layer))
                row |= measured("beyond", stage, parts.beyond(layer, output, last_token=last_token))
                rows.append(row)
                told(stage + 2, total)
            own = _as("own", rows[-1], "beyond")
            whole = parts.whole(output, last_token=last_token)
            n, read = whole.x.shape[1], _in_words(parts.output(output).kind, last_token)
            rows.append({"stage": "output", "name": "", **own, **measured("until", len(blocks), whole)})
            told(total, total)
        if influence:
            start = derive_seed(purpose="depth", seed=seed, layer=len(blocks), scope="influence")
            how = few | {"seed": start, "outputs": [-1], "on_output": as_last_step(on_layer, total)}
            of_tokens = influence_at(whole, given.words, f"whole model to the {read}", read, **how)
    table = PrintedTable(rows)
    table["product"] = table["own"].cumprod()
    table["ratio"] = table["until"] / table["product"]
    return DepthProfile(
        **given.origin(),
        table=table,
        n=n,
        output=read,
        confidence=confidence,
        words=tuple(given.words or ()),
        influence=of_tokens,
    )


def _short(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) and not math.isnan(value) else value


def _in_words(output: str, last_token: bool) -> str:
    name = {"hidden": "last hidden state", "tokens": "output"}.get(output, output)
    return f"{name} of the last token" if last_token and output != "margin" else name


def _as(kind: str, row: Mapping[str, Any], source: str = "own") -> dict[str, Any]:
    return {kind + name.removeprefix(source): row[name] for name in row if name.startswith(source)}


def _interval(row: Mapping[str, Any], kind: str) -> str:
    limits = row[kind], row[f"{kind}_lower"], row[f"{kind}_upper"]
    return in_interval(*limits, converged=row[f"{kind}_converged"])
