"""Read the inputs of a study (texts, token ids, embedded tokens and images), and cut them into sequences.

Sequences of tokens are windows that do not overlap, whatever their lengths, so that no two points of a study
share a token. A seed determines where they lie. Windows that were measured keep their places when more are
added.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch

from howsmooth import texts
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.study.plans import InputSpec
from howsmooth.study.records import TextRecord
from howsmooth.study.token_files import TokenStream, load_tokens
from howsmooth.words import encodable

if TYPE_CHECKING:
    from howsmooth.models.inputs.image_sources import Images  # imports transformers, which takes seconds
    from howsmooth.study.image_sequences import ImageFeed

__all__ = [
    "Inputs", "OpenedInput", "SequenceData", "Sequences", "TokenFeed", "arrange", "draw_distinct", "feed_of",
    "file_feed", "open_data", "sequence_starts",
]  # fmt: skip

Inputs = torch.Tensor | dict[str, torch.Tensor]
"""The inputs of a model: token ids of shape (batch, n), or tensors by argument name."""

Sequences = Mapping[tuple[int, int], int]
"""The index of the first token of each sequence, by (length, sample)."""


class OpenedInput(NamedTuple):
    """A text or another input of a study after it has been read."""

    record: TextRecord
    content: str = ""
    data: Any = None  #: The tokens or images of another input than a text.


@dataclass(frozen=True, eq=False)
class TokenFeed:
    """The token ids or embedded tokens of an input, from which sequences are cut."""

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
    #: The ids of the special tokens before and after the tokens of each sequence. They count as its tokens.
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    lengths: ClassVar[tuple[int, ...]] = ()  # every length is possible
    usual: ClassVar[tuple[int, ...]] = ()

    @property
    def count(self) -> int:
        """The number of tokens of the input."""
        return len(self.tokens)

    @property
    def special(self) -> int:
        """The number of special tokens of each sequence."""
        return sum(map(len, self.around))

    def inputs(self, starts: Sequence[int], n: int) -> Inputs:
        """Return the inputs of the model for the sequences of n tokens that begin at ``starts``."""
        windows = torch.stack([self.tokens[start : start + n - self.special] for start in starts])
        if self.special:
            before, after = (windows.new_tensor(ids).expand(len(starts), -1) for ids in self.around)
            windows = torch.cat([before, windows, after], dim=1)
        return {self.argument: windows} if self.argument else windows

    def words(self, start: int, n: int) -> tuple[str, ...]:
        """Return a label for each token of a sequence: its piece of the text. Special tokens, and tokens
        whose places in the text are unknown, are decoded. Without a text, the labels are the tokens' indices.
        """
        if self.decoded is None:
            return tuple(map(str, range(start, start + n)))
        end = start + n - self.special
        if self.places:
            # Include the token after the last: its first character is the end of the last piece.
            pieces = token_pieces(self.content, self.places[: end + 1], start, end - start)
        else:
            pieces = self.decoded(self.tokens[start:end].tolist())
        before, after = (self.decoded(list(ids)) if ids else [] for ids in self.around)
        return (*before, *pieces, *after)

    def place(self, start: int) -> int | None:
        """Return the index of the first character of token ``start`` in the text, if it is known."""
        return self.places[start] if self.places else None


@dataclass(frozen=True, eq=False)
class SequenceData:
    """A model's inputs for some sequences, ready to be sent to a worker process, with token labels of the
    first sequence. The arrays are in NumPy, since each tensor of PyTorch would need an open file.
    """

    arrays: Mapping[str, Any]
    place: int | None
    words: tuple[str, ...]

    @classmethod
    def of(cls, feed: TokenFeed | ImageFeed, starts: Sequence[int], n: int, *, worded: bool) -> SequenceData:
        """Cut sequences of n tokens out of an input; if ``worded``, label the tokens of the first one."""
        inputs = feed.inputs(starts, n)
        named = {"": inputs} if isinstance(inputs, torch.Tensor) else inputs
        arrays = {name: value.cpu().numpy().copy() for name, value in named.items()}
        if not worded:
            return cls(arrays, None, ())
        return cls(arrays, feed.place(starts[0]), feed.words(starts[0], n))

    def inputs(self, device: str) -> Inputs:
        """Return the inputs as tensors on a device, in the form that the model takes."""
        tensors = {name: torch.tensor(array, device=device) for name, array in self.arrays.items()}
        return tensors.get("", tensors)


def open_data(spec: InputSpec) -> OpenedInput:
    """Read a text or another input that the user named."""
    found: Any
    if spec.kind == "text":
        found = texts.load_text(spec.places[0])
    elif spec.kind == "images":
        from howsmooth.models.inputs.image_sources import load_images

        found = load_images(list(spec.places))
    else:
        found = load_tokens(spec.places[0], spec.kind)
    content, data = (found.content, None) if spec.kind == "text" else ("", found)
    size = len(content if data is None else data)
    record = TextRecord(encodable(found.name), found.digest, encodable(found.source), size, spec.kind)
    return OpenedInput(record, content, data)


def feed_of(
    source: OpenedInput, model: Any, layers: tuple[int, ...], *, special_tokens: bool = False
) -> TokenFeed | ImageFeed:
    """Prepare an input for a model whose ``layers`` are to be measured: turn a text or images into tokens."""
    if source.data is not None:
        return file_feed(source.data, model, layers)
    ids, places = model.tokenizer.located(source.content)
    around = model.tokenizer.special_tokens if special_tokens else ((), ())
    before, after = (" ".join(model.tokenizer.decoded(list(one))) or "nothing" for one in around)
    said = f"with special tokens: {before} before and {after} after each sequence"
    if not any(around):
        said = "without special tokens" + (", of which it has none" if special_tokens else "")
    return TokenFeed(
        torch.tensor(ids, dtype=torch.int64),
        ((0, len(ids)),),
        f"{model.tokenizer_source}, {said}",
        decoded=model.tokenizer.decoded,
        content=source.content,
        places=places,
        around=around,
    )


def file_feed(
    data: TokenStream | Images, model: Any, layers: Sequence[int] | None = None
) -> TokenFeed | ImageFeed:
    """Prepare tokens or images from files for a model, as :func:`feed_of` does."""
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
    said = "embedded tokens as given" + instead * ", in place of the model's embedding of ids"
    argument = "inputs_embeds" if instead else ""
    return TokenFeed(tokens.to(computing_dtype(model.model)), parts, said, argument)


def sequence_starts(
    feed: TokenFeed | ImageFeed, lengths: Sequence[int], samples: int, seed: int, held: Sequences
) -> dict[tuple[int, int], int]:
    """Choose where each sequence begins. Return the index of its first token, or of its image, by (length,
    sample). Images are drawn at random, the same ones for every length. Too small an input raises ValueError.
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
    """Cut the text of n tokens, from the token ``first`` on, into one piece for each token. Joined, the
    pieces give the text up to the beginning of the next token.

    ``places`` has the index of the first character of each token of the whole text. Characters that the
    tokenizer drops between two tokens, such as a space, belong to the first of the two. If several tokens
    share one character, it belongs to the first, and the pieces of the others are empty.
    """
    # Make the cuts monotone from the end: a tokenizer may report positions out of order.
    cuts = np.minimum.accumulate([*places[first : first + n + 1], len(content)][n::-1])[::-1]
    ends = np.append(cuts, cuts[-1])[np.searchsorted(cuts, cuts, side="right")]
    begins = np.diff(cuts, prepend=-1) > 0
    return [content[a:b] if new else "" for a, b, new in zip(cuts[:n], ends, begins, strict=False)]


# ---- Places of windows

# The free gaps between windows are on average at least this many times as long as the longest window, or
# there are fewer gaps. So sequences that are added later, even longer ones, find room.
_ROOM = 8


def arrange(
    tokens: int,
    lengths: Iterable[int],
    samples: int,
    seed: int,
    held: Sequences | None = None,
    parts: Sequence[tuple[int, int]] | None = None,
) -> dict[tuple[int, int], int]:
    """Choose where ``samples`` sequences of each length begin in a text, so that no two overlap. Return the
    index of each first token by (length, sample). If the sequences do not fit, ValueError is raised.

    If the text is long enough, all arrangements of the windows are equally likely. In a shorter text, the
    windows form fewer runs without gaps, in random order. Windows that were measured before (``held``), of
    these or other lengths, keep their places; if the arrangement of the seed contains them all, it is used,
    so that a study that was interrupted continues with the same windows. ``parts`` are the parts of the text
    where windows may lie, as (first token, number of tokens), in order; by default the whole text.
    """
    held = held or {}
    wanted = [(n, sample) for n in sorted(set(lengths)) for sample in range(samples)]
    missing = [window for window in wanted if window not in held]
    if not missing:
        return {window: held[window] for window in wanted}
    parts = [(0, tokens)] if parts is None else parts
    # First arrange all windows as if none was held: a study that was interrupted gets its arrangement again.
    # Otherwise the held windows stay, and the missing ones go into the gaps between them.
    try:
        whole = _fill(parts, wanted, random.Random(seed))
    except ValueError:  # the held windows may lie more tightly than a new arrangement
        whole = {}
    if whole and all(whole.get(window) == start for window, start in held.items()):
        return whole
    placed = _fill(_gaps(parts, held), missing, random.Random(seed))
    return {window: held[window] if window in held else placed[window] for window in wanted}


def draw_distinct(samples: int, count: int, generator: random.Random) -> list[int]:
    """Draw ``samples`` distinct integers below ``count`` at random. Longer draws begin with the same ones."""
    # The first steps of a Fisher-Yates shuffle that stores only the moved entries. Python guarantees only for
    # `Random.random` that a seed gives the same numbers in all versions, which continued studies need.
    moved: dict[int, int] = {}
    picked = []
    for place in range(samples):
        other = place + int(generator.random() * (count - place))
        picked.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return picked


def _gaps(parts: Sequence[tuple[int, int]], held: Sequences) -> list[tuple[int, int]]:
    """Return the free gaps between the sequences in ``held``, each as (first token, number of tokens)."""
    gaps = []
    windows = sorted((start, n) for (n, _), start in held.items())
    for first, tokens in parts:
        end = first
        inside = [(start, n) for start, n in windows if first <= start < first + tokens]
        for start, n in [*inside, (first + tokens, 0)]:
            if start > end:
                gaps.append((end, start - end))
            end = max(end, start + n)
    return gaps


def _fill(
    gaps: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]], generator: random.Random
) -> dict[tuple[int, int], int]:
    # Long windows are placed first, because they find room in the fewest places.
    longest_first = sorted(windows, key=lambda window: (-window[0], window[1]))
    # Random gaps can use up room that a later window needs. Then take the tightest gap for each window.
    chosen = _choose(gaps, longest_first, generator) or _choose(gaps, longest_first, None)
    if chosen is None:
        needed, free = sum(n for n, _ in windows), [size for _, size in gaps]
        raise ValueError(
            f"{len(windows)} windows of {needed} tokens do not fit into {sum(free)} free tokens, in pieces "
            f"of at most {max(free, default=0)}"
        )
    placed: dict[tuple[int, int], int] = {}
    for (start, room), inside in zip(gaps, chosen, strict=True):
        order = [inside[place] for place in draw_distinct(len(inside), len(inside), generator)]
        placed |= _lay_out(start, room, order, longest_first[0][0], generator)
    return placed


def _choose(
    gaps: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]], generator: random.Random | None
) -> list[list[tuple[int, int]]] | None:
    """Choose a free gap for each window of tokens: a random one, or without ``generator`` the tightest.
    Return None if a window fits nowhere.
    """
    inside: list[list[tuple[int, int]]] = [[] for _ in gaps]
    room = np.array([size for _, size in gaps], dtype=np.int64)
    for window in windows:
        places = np.maximum(room - window[0] + 1, 0)
        total = int(places.sum())
        if total == 0:
            return None
        if generator is None:
            gap = int(np.where(places > 0, room, np.iinfo(np.int64).max).argmin())
        else:
            gap = int(np.searchsorted(places.cumsum(), int(generator.random() * total), side="right"))
        inside[gap].append(window)
        room[gap] -= window[0]
    return inside


def _lay_out(
    start: int, room: int, windows: Sequence[tuple[int, int]], longest: int, generator: random.Random
) -> dict[tuple[int, int], int]:
    """Place windows of tokens in one gap of a text: in a few groups, at random distances from each other."""
    spare = room - sum(n for n, _ in windows)
    runs = min(len(windows), spare // (_ROOM * longest))
    # Split `spare` into runs + 1 parts, uniformly among all ways; the last part lies after the last run.
    cuts = [cut - index for index, cut in enumerate(sorted(draw_distinct(runs, spare + runs, generator)))]
    # The index of the first window of each run, with the number of the run.
    heads = {len(windows) * run // runs: run for run in range(runs)}
    placed = {}
    used = shift = 0
    for index, window in enumerate(windows):
        if index in heads:
            shift = cuts[heads[index]]
        placed[window] = start + shift + used
        used += window[0]
    return placed
