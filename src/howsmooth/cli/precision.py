"""The command ``howsmooth precision``, which shows how quantised keys and values change a model's output."""

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

_EXAMPLES = (
    "For each layer, key/value head and number of bits, keys or values are quantised as in a KV cache. The "
    "change of the attention's output is predicted, bounded and simulated, and so is the divergence of the "
    "model's predictions if it has logits. The ranking is printed; a page, a figure and a table are written "
    "into --out.",
    "Examples:",
    "[cyan]howsmooth precision builtin-decoder --span 0:32 --bits 8,4,3[/]  32 tokens of Alice in Wonderland",
    "[cyan]howsmooth precision builtin-encoder --bits 4 --quantisers token,kivi-32[/]  two quantisers",
    "[cyan]howsmooth precision ./model --text letter.txt --bits 2,3,4,6,8 --average 4[/]  bits for each head",
    "[cyan]howsmooth precision builtin-encoder --layers 0 --no-logits --json[/]  one layer alone, as JSON",
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
        "Numbers of bits, from 2 to 16, separated by commas.",
    ] = (3, 4, 8)
    quantisers: Annotated[
        str,
        PlainValidator(
            some_of("token", "channel", "group-32", "group-64", "kivi", also=r"kivi(-[1-9]\d*){1,2}")
        ),
        Told("LIST"),
        "Which entries share a step: all, or some of token, channel, group-32, group-64, kivi; also kivi-G "
        "in groups of G, and kivi-G-R beside a window of R exact tokens.",
    ] = "all"
    average: Annotated[
        Annotated[Real, Field(gt=0, allow_inf_nan=False)] | None,
        "Also choose how many bits to give to each head's keys and values, for this average number of "
        "bits. The choice is among --bits, such as 2,3,4,5,6,8.",
    ] = None
    no_logits: Annotated[bool, HOW, "Do not run the whole model for the divergence of its predictions."] = (
        False
    )
    random_init: RandomInit = False
    device: Device = "cpu"
    out: Out = Path("howsmooth-precision")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average is None:
            return
        if len(set(self.bits)) < 2:
            expected = "several beside --average, which chooses among them"
            remedy = "Give --bits 2,3,4,5,6,8 or others."
            raise ArgumentError("bits", expected=expected, got=str(self.bits[0]), remedy=remedy)
        if self.average < min(self.bits):
            expected = f"at least {min(self.bits)}, the fewest --bits"
            raise ArgumentError("average", expected=expected, got=f"{self.average:g}")

    def _loaded(self, load: Any) -> Any:
        from howsmooth.profiling.quantisation_effects import with_head

        return super()._loaded(load) if self.no_logits else with_head(load)

    def find(self, loaded: Any, inputs: Any, display: Listener) -> Any:
        """Predict and simulate the effects of quantised keys and values on the output of the model."""
        from howsmooth import profiling

        names = ("bits", "span", "seed", "average")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
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
    """Rank a model's layers and heads by how far quantising their keys or values changes the output."""
    find_and_show(plan, shown)
    return 0
