"""Read the inputs of a study (texts, images and others), and cut them into sequences for a model.

Texts are tokenised here with the tokenizer of the model. :mod:`howsmooth.models.sequence_datasets` reads
images, token ids and embedded tokens. For all of these inputs, this module chooses where the sequences
begin.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from howsmooth import texts
from howsmooth.study.plans import InputSpec
from howsmooth.study.records import TextRecord
from howsmooth.study.text_formatting import encodable
from howsmooth.study.window_placement import Sequences, arrange, draw_distinct

if TYPE_CHECKING:
    from howsmooth.models.sequence_datasets import Dataset  # imports transformers, which takes seconds

__all__ = ["Inputs", "OpenedInput", "SequenceData", "TextFeed", "feed_of", "open_data", "sequence_starts"]

Inputs = torch.Tensor | dict[str, torch.Tensor]
"""The inputs of a model: token ids of shape (batch, n), or tensors by argument name."""


@dataclass(frozen=True, eq=False)
class OpenedInput:
    """A text or another input of a study after it has been read: its name, its digest and its content.

    ``data`` is the opened input of :mod:`howsmooth.models.sequence_datasets`, and ``None`` for a text.
    """

    record: TextRecord
    content: str = field(default="", repr=False)
    data: Any = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class TextFeed:
    """A tokenised text, from which sequences are cut.

    It has the attributes of :class:`howsmooth.models.sequence_datasets.Dataset`, which holds other inputs.
    ``places`` holds the index of the first character of each token in the text. It is empty if the tokenizer
    does not report these positions.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    content: str
    tokenizer: Any
    preparation: str

    lengths: tuple[int, ...] = ()
    usual: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """The number of tokens of the text."""
        return len(self.tokens)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The parts of the text from which sequences are cut, each as (first token, number of tokens).

        The only part is the whole text.
        """
        return ((0, self.count),)

    def inputs(self, starts: Sequence[int], n: int) -> torch.Tensor:
        """Return the token ids (batch, n) of the sequences of n tokens that begin at ``starts``."""
        return torch.stack([self.tokens[start : start + n] for start in starts])

    def words(self, start: int, n: int) -> tuple[str, ...]:
        """Return the piece of text for each token of the sequence of n tokens that begins at token ``start``.

        If the tokenizer does not report positions, return the decoded form of each token instead.
        """
        if not len(self.places):
            return tuple(self.tokenizer.decoded(self.tokens[start : start + n].tolist()))
        # Include the token after the last: its first character is the end of the last piece.
        return tuple(token_pieces(self.content, self.places[: start + n + 1].tolist(), start, n))

    def place(self, start: int) -> int | None:
        """Return the index of the first character of token ``start`` in the text; None if it is not known."""
        return int(self.places[start]) if len(self.places) else None


@dataclass(frozen=True, eq=False)
class SequenceData:
    """The inputs of a model for some sequences, in a form that can be sent to a worker process.

    The token labels of the first sequence may come with them. ``arrays`` maps the names of the model's inputs
    to NumPy arrays; a single input has an empty name. NumPy is used because PyTorch sends tensors between
    processes through shared memory, with one open file for each.
    """

    arrays: Mapping[str, Any]
    place: int | None
    words: tuple[str, ...]

    @classmethod
    def of(cls, feed: TextFeed | Dataset, starts: Sequence[int], n: int, *, worded: bool) -> SequenceData:
        """Cut the sequences of n tokens that begin at ``starts`` out of an input, to send them to a worker.

        With ``worded``, they include the token labels of the first sequence.
        """
        inputs = feed.inputs(starts, n)
        named = {"": inputs} if isinstance(inputs, torch.Tensor) else inputs
        arrays = {name: value.cpu().numpy().copy() for name, value in named.items()}
        place = feed.place(starts[0]) if worded and isinstance(feed, TextFeed) else None
        return cls(arrays, place, feed.words(starts[0], n) if worded else ())

    def inputs(self, device: str) -> Inputs:
        """Return the inputs of the model for these sequences as tensors on a device."""
        tensors = {name: torch.tensor(array, device=device) for name, array in self.arrays.items()}
        return tensors.get("", tensors)


def open_data(spec: InputSpec) -> OpenedInput:
    """Read a text or another input that the user named."""
    found: Any
    if spec.kind == "text":
        found = texts.load_text(spec.places[0])
        content, size, data = found.content, len(found.content), None
    else:
        from howsmooth.models.sequence_datasets import open_input  # imports transformers, which takes seconds

        found = open_input(spec.kind, spec.places)
        content, size, data = "", found.size, found
    record = TextRecord(encodable(found.name), found.digest, encodable(found.source), size, spec.kind)
    return OpenedInput(record, content, data)


def feed_of(source: OpenedInput, model: Any, layers: tuple[int, ...]) -> TextFeed | Dataset:
    """Prepare a text or another input for a model, for example by tokenising a text.

    ``layers`` are the layers that will be captured.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the model takes another kind of input.

    """
    if source.data is not None:
        from howsmooth.models.sequence_datasets import dataset_of

        return dataset_of(source.data, model, layers)
    tokens, places = model.tokenizer.located(source.content)
    return TextFeed(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(places, dtype=torch.int64),
        source.content,
        model.tokenizer,
        model.tokenizer_source,
    )


def sequence_starts(
    feed: TextFeed | Dataset, lengths: Sequence[int], samples: int, seed: int, held: Sequences
) -> dict[tuple[int, int], int]:
    """Choose at random where each sequence of a study begins in its text or other input.

    Windows do not overlap; :func:`howsmooth.study.window_placement.arrange` places them. Images are drawn in
    random order, and the same images serve for every length.

    Returns
    -------
    dict
        For each (length, sample), the first token of the window or the number of the image.

    Raises
    ------
    ValueError
        If the sequences do not fit into the source.

    """
    if feed.parts is None:
        if samples > feed.count:
            raise ValueError(f"it has {feed.count} inputs, fewer than {samples} samples")
        drawn = draw_distinct(samples, feed.count, random.Random(seed))
        return {(n, sample): start for n in lengths for sample, start in enumerate(drawn)}
    if (needed := samples * sum(lengths)) > feed.count:
        raise ValueError(f"its sequences need {needed} tokens, and it has {feed.count}")
    return arrange(feed.count, lengths, samples, seed, held, feed.parts)


def token_pieces(content: str, places: Sequence[int], first: int, n: int) -> list[str]:
    """Cut the text of a sequence of n tokens into one piece for each token.

    ``places`` has the index of the first character of each token of the whole text ``content``; ``first`` is
    the first token of the sequence. Joined, the pieces are the text from the first token up to the token
    after the last. Characters that the tokenizer drops between two tokens, such as a space, belong to the
    first of the two. If several tokens share one character, it belongs to the first, and the pieces of the
    others are empty.
    """
    # Make the cuts monotone from the end: a tokenizer may report positions out of order.
    cuts = np.minimum.accumulate([*places[first : first + n + 1], len(content)][n::-1])[::-1]
    ends = np.append(cuts, cuts[-1])[np.searchsorted(cuts, cuts, side="right")]
    begins = np.diff(cuts, prepend=-1) > 0
    return [content[a:b] if new else "" for a, b, new in zip(cuts[:n], ends, begins, strict=False)]
