"""The two small trained models that ship with the library, each as a folder in the Hugging Face format."""

from __future__ import annotations

from pathlib import Path

__all__ = ["builtin_folder"]


def builtin_folder(name: str) -> Path:
    """Return the folder of a built-in model, with its configuration, weights, tokenizer and model card."""
    return Path(__file__).parent / name.removeprefix("builtin-")
