"""The kind of input (text, vision, audio) that a model takes, and the models of each kind inside it."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from howsmooth.errors import ModelError
from howsmooth.models.inputs.model_inputs import embedding_of, vocabulary_size

__all__ = ["MODALITIES", "choose_part", "modality_of", "named_parts", "token_width"]

MODALITIES = {
    "text": "text",
    "image": "images",
    "audio": "audio",
    "embeddings": "embedded tokens",
    "other": "other inputs",
}
"""The kinds of input of a model, in words; ``embeddings`` means tokens that are embedded already."""

_BY_INPUT = {"pixel_values": "image", "input_values": "audio", "input_features": "audio"}
_WORDS = {"text": "text", "vision": "image", "audio": "audio"}


def modality_of(model: nn.Module) -> str:
    """Return the kind of input that a model takes, one of :data:`MODALITIES`."""
    if not isinstance(model, PreTrainedModel):
        return "embeddings"
    if model.main_input_name == "input_ids":
        return "embeddings" if vocabulary_size(model) is None else "text"
    return _BY_INPUT.get(model.main_input_name, "other")


def token_width(model: nn.Module) -> int | None:
    """Return the dimension d of the embedded tokens of a model, or None if the model does not state it."""
    table = embedding_of(model)
    if table is not None:
        return table.embedding_dim
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    return width if isinstance(width, int) else None


def named_parts(model: nn.Module) -> dict[str, str]:
    """Return the paths of the outermost transformers models inside a model, each with its kind of input."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and isinstance(module, PreTrainedModel):
            found[name] = modality_of(module)
    return found


def choose_part(model: nn.Module, part: str, name: str) -> tuple[str, nn.Module]:
    """Return the path of a part of a model, and the part itself. Messages call the model ``name``.

    ``part`` is ``text``, ``vision`` or ``audio``, if the model contains exactly one such model; or the path
    of a module in the model, such as ``encoder``.

    Raises
    ------
    ModelError
        If the model has no such part, or several parts of that kind.

    """
    inner = named_parts(model)
    fitting = [path for path, takes in inner.items() if takes == _WORDS.get(part)]
    if len(fitting) == 1:
        return fitting[0], model.get_submodule(fitting[0])
    try:
        module = model.get_submodule(part)
    except AttributeError:
        module = None
    if module is None or next(module.parameters(), None) is None:
        # If there are no models inside, the message lists the child modules.
        plain = [child for child, _ in model.named_children()]
        listed = ", ".join(f"{path} ({takes})" for path, takes in inner.items()) or ", ".join(plain)
        many = f", and {len(fitting)} parts take that" if fitting else ""
        raise ModelError(f"{name!r} has no part {part[:60]!r}{many}. Its parts: {listed}.")
    return part, module
