"""Names that came from elsewhere (models, texts, paths), and numbers, made fit for files and for reading."""

from __future__ import annotations

import hashlib
import re
import unicodedata

__all__ = [
    "amount_in_words",
    "decimal",
    "encodable",
    "file_stem",
    "kind_in_words",
    "mask_in_words",
    "place_in_words",
    "readable",
    "sentence",
    "unit_in_words",
]

_KINDS = {"tokens": "token ids", "embeddings": "embedded tokens", "audio": "sound"}
_UNITS = {"images": "tokens: patches of the image", "audio": "tokens: frames of the sound"}
_AMOUNTS = {
    "text": "characters", "tokens": "token ids", "embeddings": "embedded tokens", "audio": "samples of sound"
}  # fmt: skip

_LONGEST_STEM = 120
# Windows keeps these names for itself, with any ending.
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?")
_LONGEST_NAME = 60


def file_stem(*parts: str) -> str:
    """Make a file name of words that may hold anything: unique and harmless.

    A short digest is added wherever letters had to be changed or cut, so that two names never share a
    file.
    """
    # Parts that hold what stands between parts could be those of another name.
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
    """Write out what UTF-8 cannot hold: the letters by which Python stands for odd bytes of file names."""
    return words.encode("utf-8", "backslashreplace").decode("utf-8")


def decimal(value: float, digits: int) -> str:
    """Write a number with fixed digits, a true minus sign, and no negative zero."""
    return f"{value:z.{digits}f}".replace("-", "\N{MINUS SIGN}")


def sentence(words: str) -> str:
    """Make a phrase stand alone: a capital at its beginning, a full stop at its end."""
    words = words.strip()
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def kind_in_words(kind: str) -> str:
    """Say what something to measure on is."""
    return _KINDS.get(kind, kind)


def unit_in_words(kind: str) -> str:
    """Say what the length of a sequence counts."""
    return _UNITS.get(kind, "tokens")


def amount_in_words(kind: str, amount: int) -> str:
    """Say how much there is of something to measure on."""
    return f"{amount} {_AMOUNTS.get(kind, kind)}"


def place_in_words(layer: int, head: int | None) -> str:
    """Name a layer, or a head of it."""
    return f"layer {layer}" + ("" if head is None else f", head {head}")


def mask_in_words(masking: str) -> str:
    """Name the mask of an attention."""
    return "unmasked" if masking == "none" else masking


def readable(words: str, longest: int = _LONGEST_NAME) -> str:
    """Take out what would move, hide or reverse the words around it, and shorten from the middle."""
    plain = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words)
    if len(plain) <= longest:
        return plain
    half = (longest - 3) // 2
    return f"{plain[:half]}...{plain[-half:]}"
