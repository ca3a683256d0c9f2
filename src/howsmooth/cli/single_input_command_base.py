"""The base class of the options of commands that examine one model on one input, and functions that run such
a command and print its result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from howsmooth import texts
from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import as_json, say
from howsmooth.cli.typer_command import Shown
from howsmooth.errors import ArgumentError
from howsmooth.study.plans import DEFAULT_TEXT, InputPlan, shared
from howsmooth.study.token_files import load_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from howsmooth.models import LoadedModel
    from howsmooth.results.result import Result

__all__ = ["OneInputPlan", "Step", "find_and_show"]

Step = Callable[[float, int], None]
"""A function that is told how many steps are done, and how many there are."""


@dataclass(frozen=True)
class OneInputPlan(InputPlan):
    """Base class of the options of a command that examines one model on one input."""

    PHASE: ClassVar[str] = "Measuring"
    NO_SPAN: ClassVar[str] = "It chooses the part of a text or of token ids that is read."
    #: How another input than a text is given, for a model that takes none.
    OTHERWISE: ClassVar[str] = (
        "howsmooth profile takes --images; in Python, hs.profile(model, inputs) takes tensors of any model."
    )

    span: str | None = shared("span")
    device: str = shared("device")
    parquet: bool = shared("parquet")

    def check(self) -> None:
        """Raise ArgumentError if the plan names more than one input, or a span of tokens for an input that is
        neither a text nor token ids.
        """
        super().check()
        if self.span is not None and self.kind not in ("text", "tokens"):
            expected = f"none beside {self.kind}"
            raise ArgumentError("span", expected=expected, got=self.span, remedy=self.NO_SPAN)
        if len(self.images) > 1:
            raise ArgumentError("images", expected="one image", got=str(len(self.images)))

    @property
    def step(self) -> str:
        """What the progress of the command counts."""
        return "layer"

    @property
    def with_head(self) -> bool:
        """Whether the model is loaded together with the output layer that computes its logits."""
        return getattr(self, "output", "hidden") != "hidden"

    def load(self) -> LoadedModel:
        """Load the model, and keep its weights in the dtype of the weights file."""
        from howsmooth.models import load_model

        return self.loaded_by(load_model, head=self.with_head)

    def loaded_by(self, load: Callable[..., LoadedModel], **more: Any) -> LoadedModel:
        """Load the model with a function that takes the arguments of :func:`~howsmooth.models.load_model`."""
        names = ("random_init", "as_decoder", "part", "seed", "device")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.random_init and not self.tokens:
            # Most types of models have no tokenizer of their own: one is then trained on the text.
            options["tokenizer_text"] = self._text().content
        return load(self.source, dtype=None, **options, **more)

    def layers_of(self, loaded: Any) -> tuple[int, ...] | None:
        """Return the indices of the chosen layers, or None for all self-attention layers."""
        if loaded.layers is None or not self.layers.items:
            return None
        return self.layers.resolve(loaded.layers, self.source, "layers")

    def input_of(self, loaded: Any) -> Any:
        """Return the input of a loaded model in a form that :func:`howsmooth.profile` takes."""
        from howsmooth.models import image_inputs

        if self.images:
            made = image_inputs(loaded, self.images[0])
            # The built-in images are thirty, of which the first is taken.
            return {name: one[:1] for name, one in made.items()} if self.images == ("builtin",) else made
        for path in self.tokens or self.embeddings:
            return _one_sequence(self.kind, path)
        if loaded.modality != "text":
            raise ArgumentError(
                "text",
                expected=f"an input that the model takes: {loaded.modality}",
                got="a text",
                remedy=self.OTHERWISE,
            )
        return self._text()

    def _text(self) -> texts.Text:
        return replace(texts.load_text(self.text or DEFAULT_TEXT), special_tokens=self.special_tokens)

    def find(self, loaded: Any, inputs: Any, on_step: Step, folder: Path) -> Result:
        """Compute the result of the command.

        The function ``on_step`` is called with the number of layers or tokens that are done, and the number
        of all. ``folder`` is the folder of the option ``--out``; a command may save partial results there
        before an interruption.
        """
        raise NotImplementedError

    def beside(self, found: Any) -> tuple[dict[str, Any], list[str]]:
        """Return additions to the printed result: entries for the JSON object, and lines for the terminal."""
        return {}, []


def _one_sequence(kind: str, path: str) -> Tensor:
    given = load_tokens(path, kind)
    if len(given.lengths) > 1:
        raise ArgumentError(
            kind,
            expected="a file with one sequence",
            got=f"{given.name} with {len(given.lengths)}",
            remedy="Write one of them into a file of its own.",
        )
    return given.tokens


def find_and_show(plan: OneInputPlan, folder: Path, shown: Shown) -> Any:
    """Load the model and the input of a plan, compute the result, write it, print it and return it."""
    with shown_progress(quiet=shown.quiet) as display:
        display.phase("Reading")
        loaded = plan.load()
        inputs = plan.input_of(loaded)
        display.phase(plan.PHASE)
        found = plan.find(loaded, inputs, display.counter(plan.step), folder)
        more, lines = plan.beside(found)
        display.phase("Writing")
        written = found.write(folder, parquet=plan.parquet)
    if shown.json:
        typer.echo(as_json(**found.described(), **more, files=written))
    else:
        for line in (repr(found), *lines):
            say(line)
        say(f"\nPage: {written[0]}, with {', '.join(path.name for path in written[1:])}.")
    return found
