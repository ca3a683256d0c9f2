"""Read the inputs of a study (texts, token ids, embedded tokens and images), and cut them into sequences for
a model.

For all of these inputs, this module chooses where the sequences begin.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from howsmooth import texts
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.study.plans import InputSpec
from howsmooth.study.records import TextRecord
from howsmooth.study.token_files import TokenStream, load_tokens
from howsmooth.study.window_placement import Sequences, arrange, draw_distinct
from howsmooth.words import encodable

if TYPE_CHECKING:
    from howsmooth.models.inputs.image_sources import Images  # imports transformers, which takes seconds
    from howsmooth.study.image_sequences import ImageFeed

__all__ = [
    "Inputs",
    "OpenedInput",
    "SequenceData",
    "TokenFeed",
    "feed_of",
    "file_feed",
    "open_data",
    "sequence_starts",
]

Inputs = torch.Tensor | dict[str, torch.Tensor]
"""The inputs of a model: token ids of shape (batch, n), or tensors by argument name."""


@dataclass(frozen=True, eq=False)
class OpenedInput:
    """A text or another input of a study after it has been read: its name, its digest and its content.

    ``data`` has the tokens or images of another input, and is ``None`` for a text.
    """

    record: TextRecord
    content: str = field(default="", repr=False)
    data: Any = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class TokenFeed:
    """Token ids or embedded tokens, from which sequences are cut."""

    tokens: torch.Tensor  #: Token ids (tokens,), or embedded tokens (tokens, d).
    #: The stretches of the tokens in which a sequence may lie, each as (first token, number of tokens).
    parts: tuple[tuple[int, int], ...]
    preparation: str  #: A phrase that says how the input becomes tokens.
    #: The argument under which the model takes embedded tokens; empty for the first argument.
    argument: str = ""
    #: Gives the text of each token id; None if there is no text.
    decoded: Callable[[list[int]], list[str]] | None = None
    content: str = ""  #: The text of which these are the tokens.
    #: The index of the first character of each token in the text; empty if it is not known.
    places: Sequence[int] = ()

    lengths: ClassVar[tuple[int, ...]] = ()  # every length is possible
    usual: ClassVar[tuple[int, ...]] = ()

    @property
    def count(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    def inputs(self, starts: Sequence[int], n: int) -> Inputs:
        """Return the inputs of the model for the sequences of n tokens that begin at ``starts``."""
        windows = torch.stack([self.tokens[start : start + n] for start in starts])
        return {self.argument: windows} if self.argument else windows

    def words(self, start: int, n: int) -> tuple[str, ...]:
        """Return the piece of text for each token of the sequence of n tokens that begins at token ``start``.

        Without the places of the tokens, it is the decoded form of each token; without a text, its index.
        """
        if self.decoded is None:
            return tuple(map(str, range(start, start + n)))
        if not self.places:
            return tuple(self.decoded(self.tokens[start : start + n].tolist()))
        # Include the token after the last: its first character is the end of the last piece.
        return tuple(token_pieces(self.content, self.places[: start + n + 1], start, n))

    def place(self, start: int) -> int | None:
        """Return the index of the first character of token ``start`` in the text; None if it is not known."""
        return self.places[start] if self.places else None


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
    def of(cls, feed: TokenFeed | ImageFeed, starts: Sequence[int], n: int, *, worded: bool) -> SequenceData:
        """Cut the sequences of n tokens that begin at ``starts`` out of an input, to send them to a worker.

        With ``worded``, they include the token labels of the first sequence.
        """
        inputs = feed.inputs(starts, n)
        named = {"": inputs} if isinstance(inputs, torch.Tensor) else inputs
        arrays = {name: value.cpu().numpy().copy() for name, value in named.items()}
        if not worded:
            return cls(arrays, None, ())
        return cls(arrays, feed.place(starts[0]), feed.words(starts[0], n))

    def inputs(self, device: str) -> Inputs:
        """Return what the model is given for these sequences, on a device."""
        tensors = {name: torch.tensor(array, device=device) for name, array in self.arrays.items()}
        return tensors.get("", tensors)


def open_data(spec: InputSpec) -> OpenedInput:
    """Read a text or another input that the user named."""
    found: Any
    if spec.kind == "text":
        found = texts.load_text(spec.places[0])
        content, size, data = found.content, len(found.content), None
    elif spec.kind == "images":
        from howsmooth.models.inputs.image_sources import load_images

        found = load_images(list(spec.places))
        content, size, data = "", len(found), found
    else:
        found = load_tokens(spec.places[0], spec.kind)
        content, size, data = "", found.size, found
    record = TextRecord(encodable(found.name), found.digest, encodable(found.source), size, spec.kind)
    return OpenedInput(record, content, data)


def feed_of(source: OpenedInput, model: Any, layers: tuple[int, ...]) -> TokenFeed | ImageFeed:
    """Prepare a text or another input for a model, for example by tokenising a text.

    ``layers`` are the layers that will be captured.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the model takes another kind of input.

    """
    if source.data is not None:
        return file_feed(source.data, model, layers)
    ids, places = model.tokenizer.located(source.content)
    return TokenFeed(
        torch.tensor(ids, dtype=torch.int64),
        ((0, len(ids)),),
        model.tokenizer_source,
        decoded=model.tokenizer.decoded,
        content=source.content,
        places=places,
    )


def file_feed(
    data: TokenStream | Images, model: Any, layers: Sequence[int] | None = None
) -> TokenFeed | ImageFeed:
    """Prepare tokens or images for a model, as :func:`feed_of`."""
    from howsmooth.models.float32_weights import computing_dtype
    from howsmooth.models.inputs.submodels_by_modality import MODALITIES, token_width
    from howsmooth.study.image_sequences import ImageFeed

    if not isinstance(data, TokenStream):
        return ImageFeed(data, model, layers)
    name, tokens, taken = model.name, data.tokens, MODALITIES[model.modality]
    firsts = np.cumsum((0, *data.lengths[:-1])).tolist()
    parts = tuple(zip(firsts, data.lengths, strict=True))
    if not tokens.is_floating_point():
        if model.vocab_size is None:
            raise ModelError(f"{name!r} takes {taken}, not token ids.")
        if (largest := int(tokens.max())) >= model.vocab_size:
            expected = f"ids from 0 to {model.vocab_size - 1}, the embedding table of {name}"
            raise ArgumentError("tokens", expected=expected, got=f"id {largest}")
        return TokenFeed(tokens, parts, "token ids as given", decoded=model.tokenizer.decoded)
    if model.modality not in ("text", "embeddings"):
        raise ModelError(f"{name!r} takes {taken}, not embedded tokens.")
    d = token_width(model.model)
    if d is not None and tokens.shape[1] != d:
        expected = f"tokens of dimension {d}, as {name}"
        raise ArgumentError("embeddings", expected=expected, got=str(tokens.shape[1]))
    instead = hasattr(model.model, "get_input_embeddings")
    return TokenFeed(
        tokens.to(computing_dtype(model.model)),
        parts,
        "embedded tokens as given" + instead * ", in place of the model's embedding of ids",
        argument="inputs_embeds" if instead else "",
    )


def sequence_starts(
    feed: TokenFeed | ImageFeed, lengths: Sequence[int], samples: int, seed: int, held: Sequences
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
