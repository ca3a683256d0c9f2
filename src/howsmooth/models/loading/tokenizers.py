"""Conversion of text to token ids, by the model's own tokenizer or by one that is trained on the text."""

from __future__ import annotations

import json
import os
from typing import Any

from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from howsmooth.errors import ModelError

__all__ = ["Tokenizer", "own_tokenizer", "token_text", "trained_tokenizer"]

#: Largest vocabulary of a trained tokenizer; a text of the size of a book needs no more.
TRAINED_VOCABULARY = 8000

#: A sentence that every usable tokenizer encodes mostly without its unknown token.
_PROBE = "The cat sat on a mat, and it was all that it had to do."

#: The byte that a character stands for in the vocabulary of a byte-level tokenizer.
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}


class Tokenizer:
    """A tokenizer of transformers that adds special tokens only on request.

    Without one (None), :meth:`encode` raises a ModelError with the message ``obstacle``.
    """

    def __init__(self, backend: PreTrainedTokenizerBase | None, obstacle: str = "") -> None:
        self._backend = backend
        self._obstacle = obstacle

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text, by default without special tokens."""
        if self._backend is None:
            raise ModelError(self._obstacle)
        # verbose=False: no warning about texts longer than the model, which are cut into sequences later.
        ids = self._backend(text, add_special_tokens=special, verbose=False)["input_ids"]
        return [int(i) for i in ids]

    def located(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and for each token the position of its first character in the text.

        The second list is empty if the tokenizer does not know these indices.
        """
        if not isinstance(self._backend, PreTrainedTokenizerFast):
            return self.encode(text), []
        found = self._backend(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        return [int(i) for i in found["input_ids"]], [int(start) for start, _ in found["offset_mapping"]]

    def decoded(self, ids: list[int]) -> list[str]:
        """Return the text of each token id, or texts such as "id 17" if there is no tokenizer."""
        return [f"id {i}" if self._backend is None else token_text(self._backend, i) for i in ids]

    @property
    def special_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids of the special tokens that are put before a text, and of those put after it.

        Raises
        ------
        ModelError
            If the tokenizer does more to a text with special tokens than to put tokens around it.

        """
        plain, whole = self.encode(_PROBE), self.encode(_PROBE, special=True)
        for first in range(len(whole) - len(plain) + 1):
            end = first + len(plain)
            if whole[first:end] == plain:
                return tuple(whole[:first]), tuple(whole[end:])
        raise ModelError("The tokenizer changes a text that it puts special tokens around.")

    @property
    def serialized(self) -> str:
        """A text that identifies the tokenizer in fingerprints. It is empty if there is no tokenizer."""
        if self._backend is None:
            return ""
        if isinstance(self._backend, PreTrainedTokenizerFast):
            return str(self._backend.backend_tokenizer.to_str())
        return json.dumps([type(self._backend).__name__, self._backend.get_vocab()], sort_keys=True)


def token_text(backend: Any, i: int) -> str:
    """Return the text of one token id, with the leading space that SentencePiece drops when it decodes.

    Bytes that are only a part of a character are written as in ``<0xE2>``. ``backend`` is a tokenizer of
    transformers, or any object with ``decode(ids)``.
    """
    decoded = str(backend.decode([i]))
    if not hasattr(backend, "convert_ids_to_tokens"):
        return decoded
    token = str(backend.convert_ids_to_tokens(i))
    if "\N{REPLACEMENT CHARACTER}" in decoded and all(c in _BYTES for c in token):
        text = bytes(_BYTES[c] for c in token).decode("utf-8", "surrogateescape")
        return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if "\udc80" <= c <= "\udcff" else c for c in text)
    spaced = token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
    return spaced if decoded == spaced.removeprefix(" ") else decoded


def own_tokenizer(name: str | os.PathLike[str], *, local_files_only: bool) -> Tokenizer | None:
    """Return the tokenizer of a model. Return None if there is none, or if it cannot encode plain text.

    transformers builds an *empty* tokenizer if it finds no vocabulary. So a tokenizer is accepted only if it
    encodes most of a plain sentence without the unknown token.
    """
    try:
        backend: Any = AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, local_files_only=local_files_only
        )
        tokenizer = Tokenizer(backend)
        ids = tokenizer.encode(_PROBE)
    except Exception:  # after any error there is no usable tokenizer, which the caller reports
        return None
    unknown = getattr(backend, "unk_token_id", None)
    return tokenizer if sum(i != unknown for i in ids) > len(ids) // 2 else None


def trained_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on a text. The same text gives the same tokenizer.

    It has at most ``vocabulary`` token ids, the number that the model knows, and at most 8000.

    Raises
    ------
    ModelError
        If ``vocabulary`` is less than 256, the number of bytes.

    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary < len(alphabet):
        raise ModelError(
            f"No tokenizer can be trained for a model that knows {vocabulary} token ids: a byte-level one "
            f"needs at least {len(alphabet)}."
        )
    tokenizer = BpeTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment, unused-ignore]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment, unused-ignore]
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, TRAINED_VOCABULARY), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
