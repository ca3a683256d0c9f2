"""What a study measures on: a source, opened once, and with a model a feed of sequences.

Texts are cut here, with the tokenizer of the model. What becomes of images, sound, token ids and embedded
tokens is the business of :mod:`howsmooth.models.datasets`; where their sequences lie is decided here for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from howsmooth import texts
from howsmooth.study.plan import InputSpec
from howsmooth.study.sequences import Sequences, arrange, draw_distinct

__all__ = [
    "Feed", "Inputs", "SequenceData", "Source", "TextFeed", "feed_of", "open_source", "pieces", "place_in",
]  # fmt: skip


Inputs = torch.Tensor | dict[str, torch.Tensor]
"""Token ids (batch, n), or the inputs of a model by their names."""


@dataclass(frozen=True, eq=False)
class Source:
    """What sequences come from.

    Attributes
    ----------
    kind
        Of :data:`howsmooth.study.plan.KINDS`.
    name, source, digest
        For the store.
    size
        How much there is of it: letters, tokens, images, or samples of sound.
    content
        The text; empty for other kinds.
    opened
        What it was read as; None for a text.

    """

    kind: str
    name: str
    source: str
    digest: str
    size: int
    content: str = field(default="", repr=False)
    opened: Any = field(default=None, repr=False)


@runtime_checkable
class Feed(Protocol):
    """A source brought together with a model: it knows its lengths, and makes the model's inputs."""

    @property
    def count(self) -> int:
        """How many tokens, frames or images there are for this model."""

    @property
    def parts(self) -> tuple[tuple[int, int], ...] | None:
        """Where windows can lie, as (first token, tokens); None if sequences are wholes, such as images."""

    @property
    def beyond(self) -> int:
        """How many tokens' room a window takes beyond its own."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that there are; empty for all."""

    @property
    def usual(self) -> tuple[int, ...]:
        """The lengths to take if none are asked for; empty if it is not for the model to say."""

    @property
    def preparation(self) -> str:
        """How the source becomes inputs, in words."""

    def inputs(self, starts: Sequence[int], n: int) -> Inputs:
        """Return the model's inputs for some sequences of n tokens, each by its first token or its number."""

    def words(self, start: int, n: int) -> tuple[str, ...]:
        """Return a word for each token of a sequence."""


@dataclass(frozen=True, eq=False)
class TextFeed:
    """Windows of a text that was tokenised once.

    ``places`` says at which letter of the text each token begins; empty if the tokenizer cannot tell.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    content: str
    tokenizer: Any
    preparation: str

    beyond = 0
    lengths: tuple[int, ...] = ()
    usual: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many tokens there are."""
        return len(self.tokens)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The whole text."""
        return ((0, self.count),)

    def inputs(self, starts: Sequence[int], n: int) -> torch.Tensor:
        """Return token ids (batch, n)."""
        return torch.stack([self.tokens[start : start + n] for start in starts])

    def words(self, start: int, n: int) -> tuple[str, ...]:
        """Cut the text into one piece a token or, if that cannot be, say what each token stands for."""
        if not len(self.places):
            return tuple(self.tokenizer.decoded(self.tokens[start : start + n].tolist()))
        # The one after the last says where that ends.
        return tuple(pieces(self.content, self.places[: start + n + 1].tolist(), start, n))

    def place(self, start: int) -> int | None:
        """Return the first letter of a sequence."""
        return int(self.places[start]) if len(self.places) else None


@dataclass(frozen=True, eq=False)
class SequenceData:
    """The inputs of some sequences, and the words of the first: what a task takes along to a worker.

    The inputs are NumPy's arrays by the names of the model's inputs, with an empty name for a single one:
    PyTorch would send tensors between processes through shared memory, one open file each.
    """

    arrays: Mapping[str, Any]
    place: int | None
    words: tuple[str, ...]

    @classmethod
    def of(cls, feed: Feed, starts: Sequence[int], n: int, *, worded: bool) -> SequenceData:
        """Take the inputs of the sequences that begin at ``starts``, and the words of the first if asked."""
        inputs = feed.inputs(starts, n)
        named = {"": inputs} if isinstance(inputs, torch.Tensor) else inputs
        arrays = {name: value.cpu().numpy().copy() for name, value in named.items()}
        place = feed.place(starts[0]) if worded and isinstance(feed, TextFeed) else None
        return cls(arrays, place, feed.words(starts[0], n) if worded else ())

    def inputs(self, device: str) -> Inputs:
        """Return the inputs as tensors on a device."""
        tensors = {name: torch.tensor(array, device=device) for name, array in self.arrays.items()}
        return tensors.get("", tensors)


def open_source(spec: InputSpec) -> Source:
    """Read a source."""
    if spec.kind == "text":
        text = texts.load_text(spec.places[0])
        return Source("text", text.name, text.source, text.digest, len(text.content), text.content)
    from howsmooth.models.datasets import open_input  # it brings transformers, which takes seconds

    opened = open_input(spec.kind, spec.places)
    return Source(spec.kind, opened.name, opened.source, opened.digest, opened.size, "", opened)


def feed_of(source: Source, model: Any, layers: tuple[int, ...]) -> Feed:
    """Bring a source and a model together.

    Parameters
    ----------
    source, model
        What, and for whom.
    layers
        Those that will be captured.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the model takes something else.

    """
    if source.kind != "text":
        from howsmooth.models import datasets

        feed: Feed = datasets.dataset_of(source.opened, model, layers)
        return feed
    tokens, places = model.tokenizer.located(source.content)
    return TextFeed(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(places, dtype=torch.int64),
        source.content,
        model.tokenizer,
        model.tokenizer_source,
    )


def place_in(
    feed: Feed, lengths: Iterable[int], samples: int, seed: int, held: Sequences
) -> dict[tuple[int, int], int]:
    """Say where the sequences of a study lie in a feed.

    Windows lie apart, as :func:`howsmooth.study.sequences.arrange` places them. Wholes, such as images, are
    drawn in random order, and each length has the same ones.

    Parameters
    ----------
    feed
        The source with a model.
    lengths, samples, seed, held
        As for :func:`~howsmooth.study.sequences.arrange`.

    Returns
    -------
    dict
        The first token of each (length, sample), or the number of the image.

    Raises
    ------
    ValueError
        If they do not fit.

    """
    if feed.parts is None:
        if samples > feed.count:
            raise ValueError(f"{samples} samples are more than the {feed.count} that there are")
        drawn = draw_distinct(samples, feed.count, seed)
        return {(n, sample): start for n in lengths for sample, start in enumerate(drawn)}
    beyond = feed.beyond
    room = {(n + beyond, sample): start for (n, sample), start in held.items()}
    placed = arrange(feed.count, [n + beyond for n in lengths], samples, seed, room, feed.parts)
    return {(n - beyond, sample): start for (n, sample), start in placed.items()}


def pieces(content: str, places: Sequence[int], first: int, n: int) -> list[str]:
    """Cut the text of a sequence into one piece a token.

    Parameters
    ----------
    content
        The text.
    places
        Where in it each of its tokens begins, in letters.
    first, n
        The sequence.

    Returns
    -------
    list of str
        Together they are the text from the first token to the one after the last, so that what a tokenizer
        drops between two tokens, such as a space, stands with the first of them. Where several tokens make
        one letter, the first has it and the others are empty.

    """
    ends = [len(content)]
    for place in reversed(places[first : first + n + 1]):
        ends.append(min(ends[-1], place))
    cuts = ends[::-1]
    if first + n < len(places):
        cuts.pop()  # beyond the next token
    found = []
    done = cuts[0]
    for index in range(n):
        end = next((cut for cut in cuts[index + 1 :] if cut > cuts[index]), cuts[-1])
        found.append(content[done:end])
        done = max(done, end)
    return found
