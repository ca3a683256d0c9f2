"""Commands that look at one model and one input: their options, and how their results are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from howsmooth.cli.progress import shown_progress
from howsmooth.errors import ArgumentError
from howsmooth.study.options import OUTPUT, Options, flag, option, words
from howsmooth.study.plans import shared
from howsmooth.study.ranges import Ranges

if TYPE_CHECKING:
    from howsmooth.models import LoadedModel
    from howsmooth.profiling.result import Result

__all__ = ["OneInputPlan", "Step", "find_and_show", "say_files"]

Step = Callable[[int, int], None]
"""A function that is told how many steps are done, and how many there are."""


@dataclass(frozen=True)
class OneInputPlan(Options):
    """The options that name one model and one input of it, for commands that look at both."""

    PHASE: ClassVar[str] = "Measuring"
    STEP: ClassVar[str] = "layer"

    model: str = option(
        ...,
        words(place=True),
        "A built-in model, a local folder or a Hub id; with --random-init also a model type.",
        metavar="MODEL",
        positional=True,
    )
    text: str = shared("text")
    tokens: str | None = option(
        None, words(place=True), "Token ids instead of a text: a .npy, .json or text file.", metavar="FILE"
    )
    span: str | None = option(
        None,
        words(),
        "Which tokens of a text or of token ids, counted from 0, such as 0:128. Default: all, or the first "
        "512 of a longer input, or as many as the model takes.",
        metavar="START:END",
    )
    layers: Ranges = shared("layers")
    random_init: bool = shared("random_init")
    as_decoder: bool = shared("as_decoder")
    part: str | None = shared("part")
    seed: int = shared("seed")
    device: str = shared("device")
    parquet: bool = option(
        False, flag(), "Also write the tables as parquet, with the line to cite.", panel=OUTPUT
    )

    #: How another input than a text is given, for a model that takes none.
    OTHERWISE: ClassVar[str] = "howsmooth profile takes --images and --audio."

    @property
    def with_head(self) -> bool:
        """Whether the model is loaded with the output layer for its logits."""
        return getattr(self, "output", "hidden") != "hidden"

    def load(self) -> LoadedModel:
        """Load the model, with the weights in the dtype of their file."""
        from howsmooth.models import load_model

        return self.loaded_by(load_model, head=self.with_head)

    def loaded_by(self, load: Callable[..., LoadedModel], **more: Any) -> LoadedModel:
        """Load the model by :func:`~howsmooth.models.load_model` or another function of its arguments."""
        names = ("random_init", "as_decoder", "part", "seed", "device")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.random_init and self.tokens is None:
            # Most types of models have no tokenizer of their own: one is then trained on the text.
            options["tokenizer_text"] = self._text()
        return load(self.model, dtype=None, **options, **more)

    def layers_of(self, loaded: Any) -> tuple[int, ...] | None:
        """Return the indices of the chosen layers, or None for all self-attention layers."""
        if loaded.layers is None or not self.layers.items:
            return None
        return self.layers.resolve(loaded.layers, self.model, "layers")

    def input_of(self, loaded: Any) -> Any:
        """Return the input of a loaded model, as :func:`howsmooth.profile` takes it."""
        from howsmooth.models import load_token_ids

        if self.tokens is not None:
            return load_token_ids(self.tokens).tokens
        if loaded.modality != "text":
            raise ArgumentError(
                "text",
                expected=f"an input that the model takes: {loaded.modality}",
                got="a text",
                remedy=self.OTHERWISE,
            )
        return self._text()

    def _text(self) -> str:
        from howsmooth.texts import load_text

        return load_text(self.text).content

    def find(self, loaded: Any, inputs: Any, on_step: Step, folder: Path) -> Result:
        """Find what the command shows.

        ``on_step`` is told how many layers or tokens are done, and how many there are; ``folder`` is that of
        ``--out``, for what is kept in case of an interruption.
        """
        raise NotImplementedError

    def beside(self, found: Any) -> tuple[dict[str, Any], list[str]]:
        """Return what is shown beside the result: entries of the JSON object, and lines."""
        return {}, []


def find_and_show(plan: OneInputPlan, folder: Path, *, json: bool, quiet: bool) -> Any:
    """Find what a plan asks for at one input of a model, write it into a folder, print it, and return it."""
    from howsmooth.cli.terminal_output import as_json, say
    from howsmooth.study.file_writing import check_parquet

    with shown_progress(quiet=quiet) as display:
        display.phase("Reading")
        if plan.parquet:
            check_parquet("parquet")
        loaded = plan.load()
        inputs = plan.input_of(loaded)
        display.phase(plan.PHASE)

        def on_step(done: int, total: int) -> None:
            display.advance(float(done), float(total), f"{plan.STEP} {done}")

        found = plan.find(loaded, inputs, on_step, folder)
        more, lines = plan.beside(found)
        display.phase("Writing")
        written = found.write(folder, parquet=plan.parquet)
    if json:
        typer.echo(as_json(**found.described(), **more, files=written))
    else:
        for line in (repr(found), *lines):
            say(line)
        say_files("Page", written)
    return found


def say_files(what: str, written: Sequence[Path]) -> None:
    """Print the path of the first file that a command wrote, and the names of the others."""
    from howsmooth.cli.terminal_output import say

    say(f"\n{what}: {written[0]}, with {', '.join(path.name for path in written[1:])}.")
