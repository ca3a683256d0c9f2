"""Format names, numbers and phrases for file names and for messages.

Names of models, texts and files come from the user and may contain any characters.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "RUN_AGAIN", "amount_in_words", "counted", "decimal", "duration", "encodable", "file_stem",
    "function_name", "kind_in_words", "place_in_words", "readable", "scope_in_words", "sentence",
    "unit_in_words", "visible_token",
]  # fmt: skip

RUN_AGAIN = "run the same command again"
"""How to continue after an error."""

_KINDS = {"tokens": "token ids", "embeddings": "embedded tokens"}
_UNITS = {"images": "tokens: patches of the image"}
_AMOUNTS = {"text": "characters", "tokens": "token ids", "embeddings": "embedded tokens"}

_LONGEST_STEM = 120
# Names reserved by Windows, with any suffix.
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?")
_LONGEST_NAME = 60
_LONGEST_PIECE = 40

# Tokens of a text often are line ends, which a reader should recognise.
_VISIBLE_SIGNS = str.maketrans({"\n": "↵", "\r": "↵", "\t": "→"})


def function_name(f: object) -> str:
    """Return the name of a function, or of the class of a module."""
    return getattr(f, "__name__", type(f).__name__).replace("<lambda>", "a lambda function")


def file_stem(*parts: str) -> str:
    """Make a file name, without suffix, from one or more texts.

    If characters have to be replaced or cut, a short digest is added, so that different parts never give the
    same file name.
    """
    # Parts that contain the separator "--" could give the same name as other parts, so quote them.
    ambiguous = len(parts) > 1 and any("--" in part or part[:1] == "-" or part[-1:] == "-" for part in parts)
    words = repr(parts) if ambiguous else "--".join(parts)
    plain = unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9.-]+", "-", plain).strip("-.")[:_LONGEST_STEM]
    if _DEVICE.fullmatch(slug):
        slug = f"x-{slug}"
    if slug and slug == words:
        return slug
    return f"{slug}-{hashlib.sha256(words.encode('utf-8', 'surrogatepass')).hexdigest()[:6]}".lstrip("-")


def encodable(words: str) -> str:
    """Escape lone surrogates in a text, which stand for undecodable bytes of file names in Python."""
    return words.encode("utf-8", "backslashreplace").decode("utf-8")


def decimal(value: float, digits: int) -> str:
    """Format a number with fixed digits, a true minus sign, and no negative zero."""
    return f"{value:z.{digits}f}".replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    """Format a time in seconds, minutes or hours.

    A negative time is shown as 0 s.
    """
    seconds = max(seconds, 0.0)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def sentence(words: str) -> str:
    """Make a sentence of a phrase: start with a capital letter and end with a full stop."""
    words = words.strip()
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def counted(number: int, what: str) -> str:
    """Return a number followed by a noun in the singular or plural, such as "3 tokens"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def kind_in_words(kind: str) -> str:
    """Return a noun phrase for a kind of input, such as "token ids"."""
    return _KINDS.get(kind, kind)


def unit_in_words(kind: str) -> str:
    """Return the unit in which a kind of input is counted as a sequence, such as "tokens"."""
    return _UNITS.get(kind, "tokens")


def amount_in_words(kind: str, amount: int) -> str:
    """Return the size of an input with its unit, such as "1000 characters"."""
    return f"{amount} {_AMOUNTS.get(kind, kind)}"


def place_in_words(layer: int, head: int | None, scope: str = "head") -> str:
    """Return the place of a layer, head or expert in words, such as "layer 3" or "layer 3, head 1"."""
    return f"layer {layer}" + ("" if head is None else f", {scope} {head}")


def scope_in_words(row: Mapping[Any, Any] | pd.Series) -> str:
    """Return the scope of a table's row in words, such as "scope model, output logits". The output and the
    sequence that moves are added if the row names them.
    """
    return ", ".join(f"{name} {row[name]}" for name in ("scope", "output", "side") if row.get(name))


def readable(words: str, longest: int = _LONGEST_NAME) -> str:
    """Show line ends and tabs as arrows, replace other control characters, and shorten long text."""
    shown = words.translate(_VISIBLE_SIGNS)
    plain = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in shown)
    if len(plain) <= longest:
        return plain
    half = (longest - 3) // 2
    return f"{plain[:half]}...{plain[-half:]}"


def visible_token(token: str) -> str:
    """Return a token as one visible line: line breaks and control characters become visible signs."""
    if token == "":
        return "∅"
    if len(token) > 2 * _LONGEST_PIECE:  # only its ends will be shown
        token = token[:_LONGEST_PIECE] + token[-_LONGEST_PIECE:]
    signs = token.translate(_VISIBLE_SIGNS)
    return readable("".join(" " if letter.isspace() else letter for letter in signs), longest=_LONGEST_PIECE)
