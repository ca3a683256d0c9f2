"""The command ``howsmooth radius``, which proves how far words may move without changing a classifier's
answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from howsmooth.cli.single_input_command_base import OneInputPlan, Step, find_and_show
from howsmooth.cli.typer_command import ONE_PROCESS, Shown, command, resumable
from howsmooth.errors import ArgumentError
from howsmooth.study.execution_options import Execution
from howsmooth.study.options import HOW, choice, flag, number, option, selection, whole
from howsmooth.study.plans import RADIUS_TOKENS, SPAN, shared
from howsmooth.study.ranges import Ranges
from howsmooth.words import encodable

__all__ = ["RadiusPlan", "radius"]

_EXAMPLES = (
    "Each token moves alone, or some jointly, and a radius is proved within which the model's answer stays "
    "the same; the rounding of its computation is enclosed. The radii are printed; a page with the text "
    "coloured by them, a figure and a table are written into --out. MODEL is a classifier.",
    "Examples:",
    "[cyan]howsmooth radius ./model --text letter.txt[/]  every token of a text",
    "[cyan]howsmooth radius ./model --text letter.txt --seconds 600[/]  then ten minutes in third order",
    "[cyan]howsmooth radius ./model --tokens ids.npy --jointly --norm inf[/]  all tokens at once",
    "[cyan]howsmooth radius ./model --tokens ids.npy --positions 1,3 --jointly[/]  two tokens at once",
    "[cyan]howsmooth radius ./model --embeddings x.npy --order 3 --json[/]  embedded tokens",
    "Run the same command again to continue after an interruption.",
)


@dataclass(frozen=True)
class RadiusPlan(OneInputPlan):
    """The options of the command ``howsmooth radius``: the model, the input, and how the tokens may move."""

    PHASE: ClassVar[str] = "Bounding"
    NO_SPAN: ClassVar[str] = f"{OneInputPlan.NO_SPAN} --positions chooses the tokens that move."
    OTHERWISE: ClassVar[str] = "Give the embedded tokens of one input: --embeddings FILE."

    span: str | None = shared("span", help=SPAN.format(RADIUS_TOKENS))
    positions: Ranges | None = option(
        None,
        selection(),
        "The tokens that move: all, or a list such as 0,6 or 1:4 or -1 (the last). Default: all.",
        metavar="RANGES",
    )
    jointly: bool = option(False, flag(), "Let these tokens move at once: one radius.")
    norm: str = option(
        "2",
        choice("2", "inf"),
        "Norm of a change: 2, Euclidean; inf, its largest entry.",
        metavar="2|inf",
    )
    embeddings: tuple[str, ...] = shared(
        "embeddings",
        help="Embedded tokens instead of a text, as the first layer reads them: a .npy file of one array "
        "(n, d).",
    )
    target: int | None = option(
        None, whole(0), "The class that the answer must not become. Default: any other."
    )
    order: str = option(
        "2",
        choice("2", "3"),
        "Order of the expansion: 2 is fast, 3 reaches further.",
        metavar="2|3",
        panel=HOW,
    )
    seconds: float | None = option(
        None,
        number(positive=True),
        "After all tokens in second order, spend so many seconds on the third, the smallest radius first; "
        "what --out has of it counts, and the larger radius of a token is kept.",
        panel=HOW,
    )
    no_attack: bool = option(False, flag(), "Do not search attacks beside the radii.", panel=HOW)

    def check(self) -> None:
        """Refuse the option ``seconds`` if all radii are computed to third order, or if tokens move
        jointly.
        """
        super().check()
        if self.seconds is not None and (self.order == "3" or self.jointly):
            got = "order 3" if self.order == "3" else "jointly"
            raise ArgumentError("seconds", expected="it with order 2 and single tokens", got=got)

    def beside(self, found: Any) -> tuple[dict[str, Any], list[str]]:
        """Return a note if the text has several lines, because these lines are read as a single input."""
        if self.kind != "text":
            return {}, []
        lines = sum(bool(line.strip()) for line in self._text().content.splitlines())
        if lines < 2:
            return {}, []
        said = (
            f"The {lines} lines of the text are one input, of which {found.n} tokens were taken. For the "
            "radii of each sentence by itself, give it in a file of its own."
        )
        return {"note": said}, [said]

    @property
    def step(self) -> str:
        """What is counted: tokens, or steps of the search for the radius of tokens that move jointly."""
        return "step" if self.jointly else "token"

    @property
    def with_head(self) -> bool:
        """Always true: a classifier needs its output layer for its logits."""
        return True

    def find(self, loaded: Any, inputs: Any, on_step: Step, folder: Path) -> Any:
        """Compute the radii. After Ctrl-C, print how many radii are saved and how to continue."""
        from howsmooth.files import writable_folder
        from howsmooth.profiling import word_radii

        done = 0

        def count(finished: int, total: int) -> None:
            nonlocal done
            done = finished
            on_step(finished, total)

        def kept() -> str:
            saved = 0 if self.jointly else done
            return f"radii of {saved} tokens are saved in {encodable(str(folder))}" if saved else ""

        same = ("positions", "jointly", "target", "seconds", "span", "seed")
        with resumable(kept), writable_folder(folder) as out:
            return word_radii(
                loaded,
                inputs,
                norm=math.inf if self.norm == "inf" else 2,
                order=int(self.order),
                attack=not self.no_attack,
                file=out / "radius.jsonl",
                on_token=count,
                **{name: getattr(self, name) for name in same},
            )


@command(
    *_EXAMPLES,
    without=("images", "layers", "as_decoder", "part", "device", "special_tokens", *ONE_PROCESS),
    out="howsmooth-radius",
)
def radius(plan: RadiusPlan, execution: Execution, shown: Shown) -> int:
    """Prove how far each word of a text may move before a classifier can change its answer."""
    find_and_show(plan, execution.out, shown)
    return 0
