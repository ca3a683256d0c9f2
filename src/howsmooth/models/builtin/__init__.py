"""The two small trained models that ship with the library, each as a folder in the Hugging Face format."""

from __future__ import annotations

from pathlib import Path

from howsmooth.errors import ArgumentError, ModelError

__all__ = ["BUILTIN_MODELS", "builtin_folder"]

#: The names of the built-in models: a BERT type, trained by masked-token prediction, and a GPT-2 type,
#: trained by next-token prediction.
BUILTIN_MODELS = ("builtin-encoder", "builtin-decoder")


def builtin_folder(name: str) -> Path:
    """Return the folder of a built-in model, with its configuration, weights, tokenizer and model card."""
    if name not in BUILTIN_MODELS:
        expected = f"the name of a built-in model ({' or '.join(BUILTIN_MODELS)})"
        remedy = "Load other models by a local folder or a Hub id with howsmooth.models.load_model."
        raise ArgumentError("name", expected=expected, got=repr(name), remedy=remedy)
    folder = Path(__file__).parent / name.removeprefix("builtin-")
    if not (folder / "model.safetensors").is_file():
        raise ModelError(
            f"The built-in model {name!r} has no weights in {folder}: the installation is incomplete. "
            "Reinstall howsmooth, or train the models again with `python scripts/train_builtin_models.py`."
        )
    return folder
