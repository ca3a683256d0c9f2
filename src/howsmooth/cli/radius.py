"""The command ``howsmooth radius``, which proves how far words may move without changing a classifier's
answer.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from howsmooth.cli.one_input import OneInputPlan, find_and_show
from howsmooth.cli.typer_command import Shown, command, resumable
from howsmooth.errors import ArgumentError
from howsmooth.study.execution_options import Out
from howsmooth.study.options import HOW, Integer, Real, Selection, Told, options
from howsmooth.study.plans import RADIUS_TOKENS, SPAN, Embeddings, Span
from howsmooth.study.progress_listener import Listener
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


@options
class RadiusPlan(OneInputPlan):
    """The options of the command ``howsmooth radius``: the model, the input, and how the tokens may move."""

    PHASE: ClassVar[str] = "Bounding"
    CLASSIFIER: ClassVar[bool] = True  #: Whether the model has to be a classifier.
    NO_SPAN: ClassVar[str] = f"{OneInputPlan.NO_SPAN} --positions chooses the tokens that move."
    OTHERWISE: ClassVar[str] = "Give the embedded tokens of one input: --embeddings FILE."

    span: Annotated[Span, Told("START:END"), SPAN.format(RADIUS_TOKENS)] = None
    positions: Annotated[
        Selection | None,
        "The tokens that move: all, or a list such as 0,6 or 1:4 or -1 (the last). Default: all.",
    ] = None
    jointly: Annotated[bool, "Let these tokens move at once: one radius."] = False
    norm: Annotated[Literal["2", "inf"], "Norm of a change: 2, Euclidean; inf, its largest entry."] = "2"
    embeddings: Annotated[
        Embeddings,
        Told("FILE", several=True),
        "Embedded tokens instead of a text, as the first layer reads them: a .npy file of one array (n, d).",
    ] = ()
    target: Annotated[
        Annotated[Integer, Field(ge=0)] | None,
        "The class that the answer must not become. Default: any other.",
    ] = None
    order: Annotated[Literal["2", "3"], HOW, "Order of the expansion: 2 is fast, 3 reaches further."] = "2"
    seconds: Annotated[
        Annotated[Real, Field(gt=0, allow_inf_nan=False)] | None,
        HOW,
        "After all tokens in second order, spend so many seconds on the third, the smallest radius "
        "first; what --out has of it counts, and the larger radius of a token is kept.",
    ] = None
    no_attack: Annotated[bool, HOW, "Do not search attacks beside the radii."] = False
    out: Out = Path("howsmooth-radius")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is not None and (self.order == "3" or self.jointly):
            got = "order 3" if self.order == "3" else "jointly"
            raise ArgumentError("seconds", expected="it with order 2 and single tokens", got=got)

    def _loaded(self, load: Any) -> Any:
        return load(head=True)

    def beside(self, found: Any) -> tuple[dict[str, Any], list[str]]:
        """Return a note if the text has several lines, because these lines are read as a single input."""
        written = self.words().content.splitlines() if self.kind == "text" else []
        if (lines := sum(bool(line.strip()) for line in written)) < 2:
            return {}, []
        said = (
            f"The {lines} lines of the text are one input, of which {found.n} tokens were taken. For the "
            "radii of each sentence by itself, give it in a file of its own."
        )
        return {"note": said}, [said]

    def find(self, loaded: Any, inputs: Any, display: Listener) -> Any:
        """Compute the radii. After Ctrl-C, print how many radii are saved and how to continue."""
        from howsmooth.files import writable_folder
        from howsmooth.profiling import word_radii

        done = 0
        on_step = display.counter("step" if self.jointly else "token")

        def count(finished: int, total: int) -> None:
            nonlocal done
            done = finished
            on_step(finished, total)

        def kept() -> str:
            saved = 0 if self.jointly else done
            return f"radii of {saved} tokens are saved in {encodable(str(self.out))}" if saved else ""

        same = ("positions", "jointly", "target", "seconds", "span", "seed")
        with resumable(kept), writable_folder(self.out) as out:
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


@command(*_EXAMPLES)
def radius(plan: RadiusPlan, shown: Shown) -> int:
    """Prove how far each word of a text may move before a classifier can change its answer."""
    find_and_show(plan, shown)
    return 0
