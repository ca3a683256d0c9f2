"""The command ``howsmooth precision``, which shows what quantised keys, values or weights change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator

from howsmooth.cli.one_input import OneInputPlan, find_and_show
from howsmooth.cli.typer_command import Shown, command
from howsmooth.errors import ArgumentError
from howsmooth.study.execution_options import Out
from howsmooth.study.options import HOW, Real, Told, options, some_of, token_counts
from howsmooth.study.plans import Device, Layers, RandomInit, SpecialTokens
from howsmooth.study.progress_listener import Listener
from howsmooth.study.ranges import ALL

__all__ = ["PrecisionPlan", "precision"]

_BITS = (3, 4, 8)

_EXAMPLES = (
    "For each layer, key/value head and number of bits, keys or values are quantised as in a KV cache; with "
    "--weights, the linear weights of each block's attention and MLP. The change of the output is predicted, "
    "simulated and, for keys and values, bounded; so is the divergence of the model's predictions if it has "
    "logits. The ranking is printed; a page, a figure and a table are written into --out.",
    "Examples:",
    "[cyan]howsmooth precision builtin-decoder --span 0:32 --bits 8,4,3[/]  32 tokens of Alice in Wonderland",
    "[cyan]howsmooth precision builtin-encoder --bits 4 --quantisers token,kivi-32[/]  two quantisers",
    "[cyan]howsmooth precision ./model --text letter.txt --bits 2,3,4,6,8 --average 4[/]  bits for each head",
    "[cyan]howsmooth precision builtin-encoder --layers 0 --no-logits --json[/]  one layer alone, as JSON",
    "[cyan]howsmooth precision builtin-decoder --weights 4,8 --quantisers channel[/]  weights of each layer",
)


@options
class PrecisionPlan(OneInputPlan):
    """The options of the command ``howsmooth precision``: the model, the input, and how to quantise."""

    PHASE: ClassVar[str] = "Quantising"

    special_tokens: SpecialTokens = False
    layers: Layers = ALL
    bits: Annotated[
        tuple[int, ...],
        PlainValidator(token_counts(2)),
        Told("LIST"),
        "Numbers of bits of keys and values, from 2 to 16, separated by commas; 3,4,8 if not given.",
    ] = ()
    weights: Annotated[
        tuple[int, ...],
        PlainValidator(token_counts(2)),
        Told("LIST"),
        "Quantise the linear weights of blocks instead, to these numbers of bits.",
    ] = ()
    quantisers: Annotated[
        str,
        PlainValidator(
            some_of(
                "token", "channel", "group-32", "group-64", "kivi", also=r"kivi(-[1-9]\d*){1,2}|group-128"
            )
        ),
        Told("LIST"),
        "Which entries share a step: all, or some of token, channel, group-32, group-64, kivi; also kivi-G "
        "in groups of G, and kivi-G-R beside a window of R exact tokens. Of weights: channel, group-128, "
        "group-64, group-32.",
    ] = "all"
    average: Annotated[
        Annotated[Real, Field(gt=0, allow_inf_nan=False)] | None,
        "Also choose how many bits to give to each head's keys and values, or to each part's weights, for "
        "this average number of bits. The choice is among --bits or --weights, such as 2,3,4,5,6,8.",
    ] = None
    no_logits: Annotated[bool, HOW, "Do not run the whole model for the divergence of its predictions."] = (
        False
    )
    random_init: RandomInit = False
    device: Device = "cpu"
    out: Out = Path("howsmooth-precision")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits and self.weights:
            raise ArgumentError("bits", expected="none beside --weights", got=",".join(map(str, self.bits)))
        if self.average is None:
            return
        name, counts = ("weights", self.weights) if self.weights else ("bits", self.bits or _BITS)
        if len(set(counts)) < 2:
            expected = "several beside --average, which chooses among them"
            remedy = f"Give --{name} 2,3,4,5,6,8 or others."
            raise ArgumentError(name, expected=expected, got=str(counts[0]), remedy=remedy)
        if self.average < min(counts):
            expected = f"at least {min(counts)}, the fewest --{name}"
            raise ArgumentError("average", expected=expected, got=f"{self.average:g}")

    def _loaded(self, load: Any) -> Any:
        from howsmooth.profiling.quantisation_effects import with_head

        return super()._loaded(load) if self.no_logits else with_head(load)

    def find(self, loaded: Any, inputs: Any, display: Listener) -> Any:
        """Predict and simulate the effects of quantised numbers on the output of the model."""
        from howsmooth import profiling

        settings: dict[str, Any] = {name: getattr(self, name) for name in ("span", "seed", "average")}
        settings |= {"weights": self.weights} if self.weights else {"bits": self.bits or _BITS}
        if self.quantisers != "all":
            settings["quantisers"] = self.quantisers.split(",")
        return profiling.precision(
            loaded,
            inputs,
            layers=self.layers_of(loaded),
            logits=not self.no_logits,
            on_layer=display.counter("layer"),
            **settings,
        )


@command(*_EXAMPLES)
def precision(plan: PrecisionPlan, shown: Shown) -> int:
    """Rank a model's layers by how far quantising keys, values or weights changes the output."""
    find_and_show(plan, shown)
    return 0
