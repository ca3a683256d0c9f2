"""What all commands that examine one model on one input share: their options, loading and printing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from howsmooth import texts
from howsmooth.cli.progress import shown_progress
from howsmooth.cli.terminal_output import as_json, say
from howsmooth.cli.typer_command import Shown
from howsmooth.errors import ArgumentError
from howsmooth.quick_imports import quick_imports
from howsmooth.study.execution_options import Threads
from howsmooth.study.options import options
from howsmooth.study.plans import DEFAULT_TEXT, InputPlan, Span
from howsmooth.study.progress_listener import Listener

if TYPE_CHECKING:
    from howsmooth.models import LoadedModel
    from howsmooth.results.result import Result

__all__ = ["OneInputPlan", "find_and_show"]


@options
class OneInputPlan(InputPlan):
    """Base class of the options of a command that examines one model on one input."""

    PHASE: ClassVar[str] = "Measuring"
    NO_SPAN: ClassVar[str] = "It chooses the part of a text or of token ids that is read."
    #: How another input than a text is given, for a model that takes none.
    OTHERWISE: ClassVar[str] = (
        "howsmooth profile takes --images; in Python, hs.profile(model, inputs) takes tensors of any model."
    )

    span: Span = None
    threads: Threads = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.span is not None and self.kind not in ("text", "tokens"):
            expected = f"none beside {self.kind}"
            raise ArgumentError("span", expected=expected, got=self.span, remedy=self.NO_SPAN)
        if len(images := self.inputs.get("images", ())) > 1:
            raise ArgumentError("images", expected="one image", got=str(len(images)))

    def load(self) -> LoadedModel:
        """Load the model, and keep its weights in the dtype of the weights file."""
        from howsmooth.models import load_model

        names = ("random_init", "as_decoder", "part", "seed", "device")
        given = {name: getattr(self, name) for name in names if hasattr(self, name)}
        if getattr(self, "random_init", False) and not self.tokens:
            # Most types of models have no tokenizer of their own: one is then trained on the text.
            given["tokenizer_text"] = self.words().content
        return self._loaded(partial(load_model, self.source, dtype=None, **given))

    def _loaded(self, load: Callable[..., LoadedModel]) -> LoadedModel:
        return load(head=getattr(self, "output", "hidden") != "hidden")

    def layers_of(self, loaded: Any) -> tuple[int, ...] | None:
        """Return the indices of the chosen layers, or None for all self-attention layers."""
        chosen: Any = getattr(self, "layers")  # noqa: B009 - of subclasses
        if loaded.layers is None or not chosen.items:
            return None
        return tuple(chosen.resolve(loaded.layers, self.source, "layers"))

    def words(self) -> texts.Text:
        """Return the chosen text, to be read with special tokens if the user asked for them."""
        found = texts.load_text(self.text or getattr(self, "texts_file", None) or DEFAULT_TEXT)
        return replace(found, special_tokens=getattr(self, "special_tokens", False))

    def input_of(self, loaded: Any) -> Any:
        """Return the input of a loaded model in a form that :func:`howsmooth.profile` takes."""
        from howsmooth.models import image_inputs

        given: Any = self.inputs.get(self.kind)
        if self.kind == "images":
            made = image_inputs(loaded, given[0])
            # The built-in images are thirty, of which the first is taken.
            return {name: one[:1] for name, one in made.items()} if given == ("builtin",) else made
        if self.kind in ("tokens", "embeddings"):
            from howsmooth.study.token_files import load_tokens

            found = load_tokens(given[0], self.kind)
            if len(found.lengths) > 1:
                got = f"{found.name} with {len(found.lengths)}"
                remedy = "Write one of them into a file of its own."
                raise ArgumentError(self.kind, expected="a file with one sequence", got=got, remedy=remedy)
            return found.tokens
        if loaded.modality != "text":
            expected = f"an input that the model takes: {loaded.modality}"
            raise ArgumentError("text", expected=expected, got="a text", remedy=self.OTHERWISE)
        return self.words()

    def find(self, loaded: Any, inputs: Any, display: Listener) -> Result:
        """Compute the result of the command, and report finished layers or tokens to ``display``."""
        raise NotImplementedError

    def beside(self, found: Any) -> tuple[dict[str, Any], list[str]]:
        """Return additions to the printed result: entries for the JSON object, and lines for the terminal."""
        return {}, []


def find_and_show(plan: Any, shown: Shown) -> Any:
    """Load the model and the input of a plan, compute the result, write it, print it and return it."""
    with shown_progress(quiet=shown.quiet) as display:
        display.phase("Reading")
        with quick_imports():
            import howsmooth.profiling  # noqa: F401 - and all that it needs
            from howsmooth.threads import fastest_threads
        loaded = plan.load()
        inputs = plan.input_of(loaded)
        display.phase(plan.PHASE)
        with fastest_threads() as threads:
            found = plan.find(loaded, inputs, display)
        more, lines = plan.beside(found)
        display.phase(f"Writing ({threads.words})" if threads.words else "Writing")
        written = found.write(plan.out)
    if shown.json:
        typer.echo(as_json(**found.described(), **more, files=written))
    else:
        for line in (repr(found), *lines):
            say(line)
        say(f"\nPage: {written[0]}, with {', '.join(path.name for path in written[1:])}.")
    return found
