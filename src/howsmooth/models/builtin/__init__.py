"""The two small trained models that ship with the library, each as a folder in the Hugging Face format."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BUILTIN_MODELS", "builtin_folder"]

#: The names of the built-in models: a BERT type, trained by masked-token prediction, and a GPT-2 type,
#: trained by next-token prediction.
BUILTIN_MODELS = ("builtin-encoder", "builtin-decoder")


def builtin_folder(name: str) -> Path:
    """Return the folder of a built-in model, with its configuration, weights, tokenizer and model card."""
    return Path(__file__).parent / name.removeprefix("builtin-")
