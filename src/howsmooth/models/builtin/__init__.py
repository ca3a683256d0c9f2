"""The two small trained models that ship with the library, each as a folder in the Hugging Face format."""

from __future__ import annotations

from pathlib import Path

from howsmooth.errors import ArgumentError, ModelError

__all__ = ["BUILTIN_MODELS", "builtin_folder"]

#: The names under which the built-in models are loaded.
BUILTIN_MODELS = ("builtin-encoder", "builtin-decoder")


def builtin_folder(name: str) -> Path:
    """Return the folder of a built-in model, with its configuration, weights, tokenizer and model card.

    Parameters
    ----------
    name
        ``"builtin-encoder"`` (BERT type, trained by masked-token prediction) or ``"builtin-decoder"``
        (GPT-2 type, trained by next-token prediction).

    Raises
    ------
    ArgumentError
        If no built-in model has this name.
    ModelError
        If the files are missing from the installation.

    """
    if name not in BUILTIN_MODELS:
        raise ArgumentError(
            "name",
            expected=f"the name of a built-in model ({' or '.join(BUILTIN_MODELS)})",
            got=repr(name),
            remedy="Load other models by a local folder or a Hub id with howsmooth.models.load_model.",
        )
    folder = Path(__file__).parent / name.removeprefix("builtin-")
    if not (folder / "model.safetensors").is_file():
        raise ModelError(
            f"The built-in model {name!r} has no weights in {folder}: the installation is incomplete. "
            "Reinstall howsmooth, or train the models again with `python scripts/train_builtin_models.py`."
        )
    return folder
