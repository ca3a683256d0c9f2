"""Checks of what is given to a model, before the model sees it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from howsmooth.errors import ArgumentError

__all__ = [
    "check_inputs",
    "check_model",
    "dtype_of",
    "in_dtype",
    "max_length",
    "takes_decoder_ids",
    "vocabulary_size",
]


def check_model(model: nn.Module) -> None:
    """Raise unless the model can be measured: with weights, all in float32 or float64."""
    tensors = [p for p in model.parameters() if p.is_floating_point()]
    if any(p.is_meta for p in tensors):
        raise ArgumentError("model", expected="a model with weights", got="parameters on the meta device")
    dtypes = {p.dtype for p in tensors}
    if dtypes not in ({torch.float32}, {torch.float64}):
        found = ", ".join(sorted(str(dtype) for dtype in dtypes)) or "no floating-point parameters"
        raise ArgumentError(
            "model",
            expected="parameters all in float32, or all in float64",
            got=found,
            remedy="Convert it with model.float(): half precision cannot carry a derivative's interval.",
        )


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the floating-point type of the model's parameters, float32 if it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def in_dtype(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return named inputs, the floating-point ones in the type of the model's parameters."""
    dtype = dtype_of(model)
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in named.items()}


def takes_decoder_ids(model: nn.Module) -> bool:
    """Whether the model is an encoder-decoder as a whole, rather than a part of one."""
    whole = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return whole and "decoder_input_ids" in inspect.signature(model.forward).parameters


def vocabulary_size(model: nn.Module) -> int | None:
    """Return how many token ids the model has an embedding for; None if it takes no token ids."""
    if not isinstance(model, PreTrainedModel):
        return None
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def max_length(model: nn.Module) -> int | None:
    """Longest input in tokens that the model has positions for; None if it states no limit."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa types start counting after the padding index, and so lose that many positions.
        if isinstance(module, nn.Embedding) and name.split(".")[-1] == "position_embeddings":
            taken = 0 if module.padding_idx is None else module.padding_idx + 1
            limit = module.num_embeddings - taken
    return limit if isinstance(limit, int) and limit > 0 else None


def check_inputs(model: PreTrainedModel, inputs: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs as keyword arguments on the model's device, after checking them.

    Raises
    ------
    ArgumentError
        If they are not token ids (batch, n) or named inputs of the model, are empty, lie outside of the
        vocabulary or beyond the last position, or hold a cache.

    """
    if isinstance(inputs, Tensor):
        other = inputs.is_floating_point() and model.main_input_name != "input_ids"
        named: dict[str, Tensor] = {model.main_input_name if other else "input_ids": inputs}
    elif isinstance(inputs, Mapping):
        named = {str(name): value for name, value in inputs.items() if value is not None}
    else:
        raise ArgumentError(
            "inputs",
            expected="token ids as an integer tensor (batch, n), or a dict of the model's inputs",
            got=type(inputs).__name__,
            remedy="Turn a text into ids with the tokenizer of load_model(...), then torch.tensor([ids]).",
        )
    _check_names(model, named)
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(f"inputs[{name!r}]", expected="a tensor", got=type(value).__name__)
    if not named:
        raise ArgumentError("inputs", expected=f"{model.main_input_name} among the inputs", got="nothing")
    # The class of a part of a larger model does not always say what it takes.
    names = ("input_ids", "inputs_embeds", str(model.main_input_name), *named)
    main = next(name for name in names if name in named)
    if named[main].numel() == 0:
        raise ArgumentError(
            "inputs",
            expected="at least one sequence of at least one token",
            got=f"shape {tuple(named[main].shape)}",
        )
    if main == "input_ids":
        named[main] = _check_ids(model, named[main])
    elif main == "inputs_embeds":
        _check_length(model, named[main].shape[1] if named[main].ndim == 3 else 0)
    for name, value in named.items():
        if value.is_floating_point() and value.dtype != model.dtype and "mask" not in name:
            raise ArgumentError(name, expected=f"{model.dtype} as the model", got=str(value.dtype))
    return {name: value.to(model.device) for name, value in named.items()}


def _check_names(model: PreTrainedModel, named: dict[str, Tensor]) -> None:
    known = set(inspect.signature(model.forward).parameters) - {"self", "args", "kwargs"}
    caches = [name for name in named if name in ("past_key_values", "cache_params")]
    if caches:
        raise ArgumentError(
            "inputs",
            expected="a whole sequence at once",
            got=f"a cache ({caches[0]})",
            remedy="Give all tokens, and no cache.",
        )
    crossed = [name for name in named if name.startswith("encoder_")]
    if crossed:
        raise ArgumentError(
            "inputs", expected="inputs of self-attention only", got=f"{crossed[0]}: cross-attention"
        )
    for name in named:
        if name not in known:
            raise ArgumentError(
                "inputs",
                expected=f"inputs that {type(model).__name__} knows ({', '.join(sorted(known))})",
                got=repr(name),
            )


def _check_ids(model: PreTrainedModel, ids: Tensor) -> Tensor:
    if ids.ndim != 2 or ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ArgumentError(
            "inputs",
            expected="token ids as an integer tensor (batch, n)",
            got=f"{ids.dtype} of shape {tuple(ids.shape)}",
            remedy="For one sequence write torch.tensor([ids]).",
        )
    size = vocabulary_size(model)
    if size == 1:
        raise ArgumentError(
            "inputs",
            expected="inputs_embeds (batch, n, d): this model's embedding table is a placeholder of one row",
            got="token ids",
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (size is not None and high >= size):
        raise ArgumentError(
            "inputs",
            expected="token ids that are not negative"
            if size is None
            else f"token ids from 0 to {size - 1}, the model's embedding table",
            got=f"id {low if low < 0 else high}",
            remedy="Use the tokenizer that belongs to the model.",
        )
    _check_length(model, ids.shape[1])
    return ids.long()


def _check_length(model: PreTrainedModel, n: int) -> None:
    limit = max_length(model)
    if limit is not None and n > limit:
        raise ArgumentError(
            "inputs",
            expected=f"at most {limit} tokens, the model's positions",
            got=f"{n}",
            remedy="Shorten them.",
        )
