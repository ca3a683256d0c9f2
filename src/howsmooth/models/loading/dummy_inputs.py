"""Short dummy inputs for a model, which suffice to see what its layers compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from howsmooth.errors import ArgumentError
from howsmooth.models.float32_weights import computing_dtype
from howsmooth.models.inputs.image_sources import load_images
from howsmooth.models.inputs.model_inputs import in_dtype, max_length, vocabulary_size
from howsmooth.models.inputs.submodels_by_modality import modality_of, token_width
from howsmooth.models.loading.processors import ImagePreparation, Preparation

__all__ = ["sample_inputs"]

_TOKENS = 16  # the default length


def sample_inputs(
    model: nn.Module, preparation: Preparation, tokens: object = None
) -> Tensor | dict[str, Tensor]:
    """Return dummy inputs for a model: a sequence of random tokens, a built-in image or noise as audio.

    ``preparation`` is that of a :class:`~howsmooth.models.LoadedModel`. ``tokens`` is the number of token ids
    or embedded tokens, at least 2; None means 16, or fewer if the model has fewer positions.

    Raises
    ------
    ArgumentError
        If the kind of input is not supported, or the model does not take this number of tokens.

    """
    modality, d = modality_of(model), token_width(model)
    generator = torch.Generator("cpu").manual_seed(0)
    if modality not in ("text", "embeddings") and tokens is not None:
        expected = f"no number: the {modality} that the model takes has a fixed size"
        raise ArgumentError("tokens", expected=expected, got=repr(tokens))
    if modality == "text":
        size = vocabulary_size(model) or 1
        ids = torch.randint(size, (1, _length(model, tokens)), generator=generator, device="cpu")
        padding = getattr(getattr(model, "config", None), "pad_token_id", None)
        # The padding id is replaced, because some models give padding no position.
        return torch.where(ids == padding, (ids + 1) % size, ids) if isinstance(padding, int) else ids
    if modality == "embeddings" and d is not None:
        x = torch.randn(1, _length(model, tokens), d, generator=generator, device="cpu")
        x = x.to(computing_dtype(model))
        return {"inputs_embeds": x} if isinstance(model, PreTrainedModel) else x
    if isinstance(preparation, ImagePreparation):
        preparation = preparation.prepared([load_images()[0]])
    if preparation is not None:
        return in_dtype(model, preparation)
    taken = model.main_input_name if isinstance(model, PreTrainedModel) else "its first argument"
    raise ArgumentError(
        "inputs",
        expected=f"the inputs of {type(model).__name__}, for which none can be made up",
        got="None",
        remedy=f"Give a tensor or a dict with {taken}.",
    )


def _length(model: nn.Module, tokens: object) -> int:
    limit = max_length(model)
    if tokens is None:
        return _TOKENS if limit is None else min(_TOKENS, limit)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise ArgumentError("tokens", expected="an integer of at least 2", got=repr(tokens))
    if limit is not None and tokens > limit:
        raise ArgumentError("tokens", expected=f"at most {limit}, the model's positions", got=repr(tokens))
    return tokens
