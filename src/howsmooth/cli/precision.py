"""The command ``howsmooth precision``: what quantised keys and values of each head do to a model's output."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from howsmooth.cli.one_input_options import OneInputPlan
from howsmooth.cli.progress import shown_progress
from howsmooth.cli.typer_command import JsonOption, SilentOption, command
from howsmooth.errors import ArgumentError
from howsmooth.study.execution_options import Execution
from howsmooth.study.options import HOW, flag, number, option, some_of, token_counts

__all__ = ["PrecisionPlan", "precision"]

_EXAMPLES = (
    "For each layer, key/value head and number of bits, keys or values are quantised as in a KV cache. The "
    "change of the attention's output is predicted, bounded and simulated, and so is the divergence of the "
    "model's predictions if it has logits. The ranking is printed; a page, a figure and a table are written "
    "into --out.",
    "Examples:",
    "[cyan]howsmooth precision builtin-decoder --span 0:32 --bits 8,4,3[/]  32 tokens of Alice in Wonderland",
    "[cyan]howsmooth precision builtin-encoder --bits 4 --quantisers token,channel[/]  two quantisers",
    "[cyan]howsmooth precision ./model --text letter.txt --bits 2,3,4,6,8 --average 4[/]  bits for each head",
    "[cyan]howsmooth precision builtin-encoder --layers 0 --no-logits --json[/]  one layer alone, as JSON",
)


@dataclass(frozen=True)
class PrecisionPlan(OneInputPlan):
    """The options of ``howsmooth precision``: the model, the input, and how to quantise keys and values."""

    bits: tuple[int, ...] = option(
        "8,4,3", token_counts(2), "Numbers of bits, from 2 to 16, separated by commas.", metavar="LIST"
    )
    quantisers: str = option(
        "all",
        some_of("token", "channel", "group-32", "group-64", elsewhere={}),
        "Which entries share a step: all, or some of token, channel, group-32, group-64.",
        metavar="LIST",
    )
    average: float | None = option(
        None,
        number(positive=True),
        "Also print how many bits to give to each head's keys and values, for this average number of bits. "
        "The choice is among --bits, such as 2,3,4,5,6,8.",
    )
    no_logits: bool = option(
        False, flag(), "Do not run the whole model for the divergence of its predictions.", panel=HOW
    )

    def check(self) -> None:
        """Refuse an ``average`` number of bits that no choice among ``bits`` can meet, before measuring."""
        if self.average is None:
            return
        if len(set(self.bits)) < 2:
            raise ArgumentError(
                "bits",
                expected="several beside --average, which chooses among them",
                got=str(self.bits[0]),
                remedy="Give --bits 2,3,4,5,6,8 or others.",
            )
        if self.average < min(self.bits):
            raise ArgumentError(
                "average", expected=f"at least {min(self.bits)}, the fewest --bits", got=f"{self.average:g}"
            )


@command(*_EXAMPLES, without=("executor", "workers", "scheduler"), out="howsmooth-precision")
def precision(
    plan: PrecisionPlan, execution: Execution, json: JsonOption = False, quiet: SilentOption = False
) -> int:
    """Rank a model's layers and heads by how far quantising their keys or values changes the output."""
    from howsmooth.cli.terminal_output import as_json, say
    from howsmooth.models import load_model
    from howsmooth.profiling import precision as measured
    from howsmooth.profiling import precision_page
    from howsmooth.profiling.precision import load_with_head
    from howsmooth.profiling.quantisers import QUANTISERS
    from howsmooth.study.records import plain_rows
    from howsmooth.study.text_formatting import encodable

    with shown_progress(quiet=quiet) as display:
        display.phase("Reading")
        # The model is loaded with its head if it has one and its logits are wanted.
        plain = plan.no_logits or plan.part is not None
        loaded = plan.loaded(load_model if plain else load_with_head)
        inputs = plan.input_of(loaded)
        display.phase("Quantising")
        found = measured(
            loaded,
            inputs,
            bits=plan.bits,
            quantisers=QUANTISERS if plan.quantisers == "all" else plan.quantisers.split(","),
            span=plan.span,
            layers=plan.layers_of(loaded),
            logits=not plan.no_logits,
            seed=plan.seed,
            on_layer=lambda done, total: display.advance(float(done), float(total), f"layer {done}"),
        )
        quantiser = found.table["quantiser"].iloc[0]
        budget = None if plan.average is None else found.budget(plan.average, quantiser)
        budget_kl = found.simulate(budget, quantiser) if budget is not None and found.has_kl else None
        display.phase("Writing")
        written = precision_page.write(found, execution.out)
    if json:
        more = {} if budget is None else {"budget": plain_rows(budget), "budget_kl": budget_kl}
        typer.echo(as_json(**found.described(), **more, files=written))
        return 0
    say(encodable(repr(found)))
    if budget is not None:
        real = "" if budget_kl is None else f", at once: divergence {budget_kl:.3g}"
        say(f"\nBits for an average of {plan.average:g} ({quantiser}){real}")
        for (layer, operand), rows in budget.groupby(["layer", "operand"]):
            given = " ".join(str(b) for b in rows.sort_values("head")["bits"])
            say(f"  layer {layer}, {operand}, kv heads from 0: {given}")
    others = ", ".join(path.name for path in written[1:])
    say(f"\nPage: {encodable(str(written[0]))}, with {others}.")
    return 0
