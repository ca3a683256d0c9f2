"""The command ``howsmooth influence``, which measures how much each output token changes if one input token
is changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.cli.progress import shown_progress
from howsmooth.cli.single_input_command_base import OneInputPlan, say_files
from howsmooth.cli.terminal_output import as_json, paragraph, show_table
from howsmooth.cli.typer_command import ONE_PROCESS, OTHER_INPUTS, Shown, command
from howsmooth.errors import ArgumentError
from howsmooth.scopes import SCOPES
from howsmooth.study.execution_options import Execution
from howsmooth.study.options import choice, option, selection
from howsmooth.study.plans import INFLUENCE_RTOL, INFLUENCE_TOKENS, SPAN, check_output, shared
from howsmooth.study.ranges import Ranges
from howsmooth.study.text_formatting import counted, place_in_words, precision_in_words, readable

if TYPE_CHECKING:
    from howsmooth.profiling import Influence

__all__ = ["InfluencePlan", "influence"]

_EXAMPLES = (
    "Token j, moved by a small amount, moves the output of token i by at most so many times as much: the "
    "norm ‖∂y_i/∂x_j‖₂, with an interval. The largest are printed; a figure and a table of all are written "
    "into --out.",
    "Examples:",
    "[cyan]howsmooth influence builtin-decoder --span 0:16[/]  the last layer, 16 tokens of a text",
    "[cyan]howsmooth influence ./model --text letter.txt --layers 0[/]  your own model and text",
    "[cyan]howsmooth influence builtin-decoder --span 0:12 --scope model[/]  "
    "the whole model, at its last token",
    "[cyan]howsmooth influence gpt2 --random-init --span 0:8 --outputs 7 --json[/]  JSON for a program",
)

_PRINTED = 10


@dataclass(frozen=True)
class InfluencePlan(OneInputPlan):
    """The options of the command ``howsmooth influence``: the model, the input, and the layer or whole model
    whose input tokens are moved.
    """

    span: str | None = shared(
        "span", help=f"{SPAN.format(INFLUENCE_TOKENS)} Time grows with the square of the length."
    )
    layers: Ranges = shared(
        "layers", default="-1", help="One layer, such as 0 or -1 (the last layer).", metavar="INDEX"
    )
    scope: str = option(
        "attention",
        choice(*SCOPES[2:], "model"),
        "attention: all heads with output projection; residual: input plus attention; block: residual with "
        "the norm layer; model: the whole model from its embeddings, without --layers.",
        metavar="SCOPE",
    )
    output: str = shared("output")
    outputs: Ranges | None = option(
        None,
        selection(),
        "The output tokens: all, or a list such as 0,6 or 0:4 (with the output 4) or -1 (the last). Default: "
        "all; with the scope model the last, which takes as many derivatives of the whole model as its last "
        "layer is wide; so does each other output.",
        metavar="RANGES",
    )
    rtol: float = shared("rtol", default=INFLUENCE_RTOL)
    confidence: float = shared("confidence")
    max_iterations: int = shared("max_iterations")

    def check(self) -> None:
        """Refuse the option ``output`` if the scope is not ``model``, and the option ``layers`` if the scope
        is ``model``.
        """
        super().check()
        # The model is not loaded yet: refuse what even float64 cannot reach.
        check_accuracy(self.rtol, self.confidence, "float64")
        check_output(self.output, (self.scope,))
        if self.scope == "model" and self.layers.text != "-1":
            raise ArgumentError("layers", expected="none with the scope model", got=self.layers.text)

    def site_of(self, loaded: Any, inputs: Any) -> Any:
        """Return the chosen layer, or the whole model, as a captured map with its input tokens."""
        from howsmooth.models import capture
        from howsmooth.models.identification.self_attention_module import CrossAttention

        if self.scope == "model":
            return capture(loaded, inputs, scope="model", output=self.output)[0]
        layers = self.layers_of(loaded)
        if (layers is not None and len(layers) > 1) or not self.layers.items:
            raise ArgumentError("layers", expected="one layer, such as -1", got=self.layers.text)
        try:
            return capture(loaded, inputs, layers=layers, scope=self.scope)[0]
        except CrossAttention:
            raise ArgumentError(
                "layers",
                expected="a layer of self-attention",
                got=f"{self.layers.text}, which is cross-attention",
                remedy="Choose another (howsmooth inspect lists them), or the encoder with --part encoder.",
            ) from None

    def outputs_of(self, site: Any) -> tuple[int, ...]:
        """Return the indices of the output tokens to show. A map to a single vector has one output."""
        shape = site.map(site.x)[0].shape
        count = shape[0] if len(shape) == 2 else 1
        if self.outputs is not None:
            return self.outputs.resolve(count, self.source, "outputs")
        return (count - 1,) if self.scope == "model" else tuple(range(count))


@command(*_EXAMPLES, without=(*OTHER_INPUTS, *ONE_PROCESS), out="howsmooth-influence")
def influence(plan: InfluencePlan, execution: Execution, shown: Shown) -> int:
    """Measure how far each output token moves if one input token moves, in one layer or the whole model."""
    from howsmooth.profiling import influence as measured
    from howsmooth.profiling.model_input import given_inputs
    from howsmooth.profiling.token_influence import derivative_count
    from howsmooth.study.figures.drawing import save
    from howsmooth.study.file_writing import writable_folder, write_parquet, write_table
    from howsmooth.study.records import plain_rows

    with shown_progress(quiet=shown.quiet) as display:
        display.phase("Reading")
        loaded = plan.load()
        given = given_inputs(
            loaded, plan.input_of(loaded), plan.span, loaded.tokenizer, longest=INFLUENCE_TOKENS
        )
        site = plan.site_of(loaded, given.inputs)
        outputs, n = plan.outputs_of(site), site.x.shape[1]
        told = f"Measuring {counted(len(outputs), 'output')} of {counted(n, 'token')}"
        if plan.scope == "model":
            passes = derivative_count(site.map, site.x, len(outputs))
            told += f", {counted(passes, 'derivative')} of the whole model"
        display.phase(told)
        settings = {name: getattr(plan, name) for name in ("rtol", "confidence", "max_iterations", "seed")}

        def on_output(done: float, total: int) -> None:
            display.advance(done, float(total), f"output {math.ceil(done)} of {total}")

        found = measured(site, outputs=outputs, on_output=on_output, **settings)
        display.phase("Writing")
        names = given.words if given.words is not None and len(given.words) == n else None
        table = found.table
        if names is not None:
            for side in ("output", "input") if found.token_outputs else ("input",):
                table[f"{side}_token"] = [names[i] for i in table[side]]
        with writable_folder(execution.out) as folder:
            written = [*save(found.plot(names), folder, "influence", f"Influence in {loaded.label}")]
            written.append(write_table(table, folder, "influence.csv"))
            if plan.parquet:
                written.append(folder / "influence.parquet")
                write_parquet(table, written[-1], found.citation)
    origin = given.origin()
    most = plain_rows(table.nlargest(_PRINTED, "value"))
    if shown.json:
        described = {
            **origin,
            "n": n,
            "scope": plan.scope,
            "layer": None if plan.scope == "model" else site.layer,
            **settings,
            "unconverged": int((~found.converged).sum()),
            "token_wise": {"lower": found.token_wise.lower, "upper": found.token_wise.upper},
            "largest": most,
        }
        typer.echo(as_json(**described, files=written))
    else:
        precision = precision_in_words(origin["stored"], origin["computed"])
        where = "the whole model" if plan.scope == "model" else place_in_words(site.layer, None)
        place = f"{loaded.label}, {where}, scope {plan.scope}, {counted(n, 'token')} ({given.description})"
        place = f"{place}, {precision}"
        _show(found, most, f"{len(most)} of {counted(len(table), 'norm')}", place, plan.output)
        say_files("Figure", written)
    return 0


def _show(found: Influence, most: list[dict[str, Any]], count: str, place: str, output: str) -> None:
    """Print the largest norms of Jacobian blocks, and limits for how far an output moves if all input tokens
    move at once.
    """
    from howsmooth.roundoff import interval_in_digits

    def token(row: dict[str, Any], side: str) -> str:
        if side == "output" and not found.token_outputs:
            return output if len(found.outputs) == 1 else str(row[side])
        word = row.get(f"{side}_token", "")
        return f"{row[side]} {readable(word)!r}" if word else str(row[side])

    paragraph(
        f"Influence in {place}: how far an output moves, to first order, if one token moves by 1. The "
        f"largest {count}:"
    )
    rows = [
        [
            token(row, "input"),
            token(row, "output"),
            f"{row['value']:.4g}",
            interval_in_digits(row["lower"], row["upper"], 4)
            + ("" if row["converged"] else " not converged"),
        ]
        for row in most
    ]
    names = ["moved token", "output", "moves by", "interval"]
    show_table(names, rows, left=["moved token", "output", "interval"])
    whole = interval_in_digits(found.token_wise.lower, found.token_wise.upper, 4)
    paragraph(
        f"Each interval holds with probability {found.confidence:.4g}. If all tokens move at once, each by "
        f"at most 1, the largest move of an output lies in {whole}."
    )
