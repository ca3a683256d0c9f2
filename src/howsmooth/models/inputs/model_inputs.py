"""Functions that check the inputs of a model, and return them as named arguments on its device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from howsmooth.errors import ArgumentError
from howsmooth.models.float32_weights import HALF, computing_dtype, device_of, has_weights, stored_dtype
from howsmooth.models.model_call import ModelCall

__all__ = [
    "check_ids", "check_model", "check_value", "embedding_of", "in_dtype", "max_length", "model_inputs",
    "takes_decoder_ids", "vocabulary_size",
]  # fmt: skip


# Arguments of transformers' models that say what is returned beside the outputs, and in which form.
_FORM = frozenset({"output_attentions", "output_hidden_states", "return_dict"})


def check_model(model: nn.Module) -> None:
    """Raise ArgumentError unless the model runs as Python code and its weights have supported dtypes.

    The weights are all float64, or a mixture of float32, bfloat16 and float16.
    """
    for name, module in model.named_modules():
        exported = isinstance(module, fx.GraphModule) and hasattr(module.graph._codegen, "pytree_info")
        if exported or isinstance(module, torch.jit.ScriptModule):
            how = "exported (torch.export)" if exported else "compiled by torch.jit"
            remedy = "Give the model that it was made from."
            if exported or isinstance(module, torch.jit._trace.TopLevelTracedModule):
                remedy += " A map of tokens is also measured as it is by hs.local_lipschitz(module, x)."
            raise ArgumentError(
                "model",
                expected="modules in Python, whose calls can be seen",
                got=f"{name or 'a module'} that is {how}",
                remedy=remedy,
            )
    tensors = [p for p in model.parameters() if p.is_floating_point()]
    if not has_weights(model):
        raise ArgumentError("model", expected="a model with weights", got="parameters on the meta device")
    dtypes = {p.dtype for p in tensors}
    if not dtypes or not (dtypes == {torch.float64} or dtypes <= {torch.float32, *HALF}):
        found = ", ".join(sorted(str(dtype) for dtype in dtypes)) or "no floating-point parameters"
        raise ArgumentError(
            "model",
            expected="parameters in float32, bfloat16 or float16, or all in float64",
            got=found,
            remedy="Convert it with model.float().",
        )


def check_value(name: str, value: object) -> None:
    """Raise ArgumentError unless a model's input ``name`` is a tensor or a plain value, such as True."""
    if not isinstance(value, Tensor | bool | int | float | str | None):
        remedy = 'Call the tokenizer with return_tensors="pt".' if isinstance(value, list) else ""
        expected = "a tensor, a number, a word, True, False or None"
        raise ArgumentError(f"inputs[{name!r}]", expected=expected, got=type(value).__name__, remedy=remedy)


def in_dtype(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the floating-point inputs to the dtype in which the model computes."""
    dtype = computing_dtype(model)
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in named.items()}


def takes_decoder_ids(model: nn.Module) -> bool:
    """Return True if the model has both an encoder and a decoder."""
    whole = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return whole and "decoder_input_ids" in inspect.signature(model.forward).parameters


def embedding_of(model: nn.Module) -> nn.Embedding | None:
    """Return the embedding table for token ids of a transformers model, or None if it has none."""
    if not isinstance(model, PreTrainedModel):
        return None
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return table if isinstance(table, nn.Embedding) else None


def vocabulary_size(model: nn.Module) -> int | None:
    """Return the number of rows in the embedding table for token ids, or None if the model has no table."""
    table = embedding_of(model)
    return None if table is None else table.num_embeddings


def max_length(model: nn.Module) -> int | None:
    """Return the largest number of tokens for which the model has positions, or None if it states
    no limit.
    """
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for name, module in model.named_modules():
        # Models of RoBERTa type count positions from the padding index plus one, and lose the earlier ones.
        if isinstance(module, nn.Embedding) and name.split(".")[-1] == "position_embeddings":
            taken = 0 if module.padding_idx is None else module.padding_idx + 1
            limit = module.num_embeddings - taken
    return limit if isinstance(limit, int) and limit > 0 else None


def model_inputs(model: nn.Module, inputs: Tensor | Mapping[str, Any]) -> ModelCall:
    """Check a model and its inputs, and return both, with the inputs on the device of the model.

    Arguments by which transformers' models only return more, or in another form, are left out. An
    ArgumentError is raised for weights in a dtype that is not measured, and for an input that is unknown to
    the model, empty, a cache, of another dtype, outside of the vocabulary, or longer than the model's
    positions.
    """
    check_model(model)
    stored, dtype, device = stored_dtype(model), computing_dtype(model), device_of(model)
    known = isinstance(model, PreTrainedModel)
    named = _named(model, inputs)
    named = {name: value for name, value in named.items() if not (known and name in _FORM)}
    _check_names(model, named)
    # For a part of a larger model, ``main_input_name`` is not always right.
    usual = ("input_ids", "inputs_embeds", str(model.main_input_name)) if known else ()
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if not tensors:
        got = ", ".join(f"{name} of type {type(value).__name__}" for name, value in named.items())
        raise ArgumentError("inputs", expected="at least one tensor", got=got or "none")
    main = next(name for name in (*usual, *named) if name in tensors)
    if known and main == "input_ids":
        named[main] = _token_ids(model, named[main])
    elif known and main == "inputs_embeds":
        _check_length(model, named[main].shape[1] if named[main].ndim == 3 else 0)
    for name, value in tensors.items():
        if not value.is_floating_point() or value.dtype == dtype:
            continue
        if stored in HALF and value.dtype in HALF:
            named[name] = value.to(dtype)
        elif not (known and "mask" in name):
            raise ArgumentError(f"inputs[{name!r}]", expected=f"{stored} as the model", got=str(value.dtype))
    moved: dict[int, Tensor] = {}  # by id: a tensor that is passed twice stays one tensor
    named |= {
        name: moved.setdefault(id(one), one.to(device)) for name, one in named.items() if name in tensors
    }
    named = dict(sorted(named.items(), key=lambda item: item[0] not in tensors))
    decoded = {"decoder_input_ids", "decoder_inputs_embeds"} & named.keys()
    if known and takes_decoder_ids(model) and "input_ids" in named and not decoded:
        named["decoder_input_ids"] = named["input_ids"]
    first = named[main]
    # Whether the first axis counts sequences: it does for token ids and raw audio (batch, n) and for tokens
    # (batch, n, d), but not for a matrix: the embedded tokens (n, d) of one sequence, or the patches of one
    # image.
    batched = first.ndim > 2 or not first.is_floating_point() or main == "input_values"
    # torch's own attention modules may have the sequence axis before the batch axis.
    swapped = not known and any(
        isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in model.modules()
    )
    return ModelCall(model, named, first.shape[int(swapped and first.ndim > 2)] if batched else 1)


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(model.forward).parameters.values())


def _named(model: nn.Module, inputs: object) -> dict[str, Any]:
    """Name the inputs by the model's arguments; None is left out where it is the default, or no argument."""
    kind = type(model).__name__
    if isinstance(inputs, Tensor):
        if isinstance(model, PreTrainedModel):
            other = inputs.is_floating_point() and model.main_input_name != "input_ids"
            return {model.main_input_name if other else "input_ids": inputs}
        if isinstance(model, nn.MultiheadAttention):
            return dict.fromkeys(("query", "key", "value"), inputs)
        names = [p.name for p in _parameters(model) if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if not names:
            raise ArgumentError("inputs", expected=f"a dict of the arguments of {kind}", got="a tensor")
        return {names[0]: inputs}
    given = inputs if isinstance(inputs, Mapping) else {}
    keeps = {p.name for p in _parameters(model) if p.default is not None}
    named = {str(name): one for name, one in given.items() if one is not None or name in keeps}
    if named:
        return named
    expected, remedy = f"a tensor, the first argument of {kind}, or a dict of its arguments", ""
    if isinstance(model, PreTrainedModel):
        ids = "token ids as an integer tensor (batch, n)"
        expected = f"{ids}, or a dict of arguments of {kind} with {model.main_input_name}"
        remedy = "Turn a text into ids with the tokenizer of load_model(...), then torch.tensor([ids])."
    got = "an empty dict" if isinstance(inputs, Mapping) else type(inputs).__name__
    raise ArgumentError("inputs", expected=expected, got=got, remedy=remedy)


def _check_names(model: nn.Module, named: dict[str, Any]) -> None:
    known = isinstance(model, PreTrainedModel)
    fixed = [p.name for p in _parameters(model) if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_any = not known and any(p.kind == p.VAR_KEYWORD for p in _parameters(model))
    for name, value in named.items():
        expected, remedy, got = "", "", name
        if known and name in ("past_key_values", "cache_params"):
            expected, remedy = "a whole sequence at once", "Give all tokens, and no cache."
            got = f"a cache ({name})"
        elif known and name.startswith("encoder_"):
            expected, got = "inputs of self-attention only", f"{name}: cross-attention"
        elif name not in fixed and not takes_any:
            expected, got = (
                f"inputs that {type(model).__name__} knows ({', '.join(sorted(fixed))})",
                repr(name),
            )
        else:
            check_value(name, value)
        if not expected and isinstance(value, Tensor) and value.numel() == 0:
            expected, got = "at least one sequence of at least one token", f"shape {tuple(value.shape)}"
        if expected:
            raise ArgumentError("inputs", expected=expected, got=got, remedy=remedy)


def _token_ids(model: nn.Module, ids: Tensor) -> Tensor:
    if ids.ndim != 2 or ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ArgumentError(
            "inputs",
            expected="token ids as an integer tensor (batch, n)",
            got=f"{ids.dtype} of shape {tuple(ids.shape)}",
            remedy="For one sequence write torch.tensor([ids]).",
        )
    if vocabulary_size(model) == 1:
        raise ArgumentError(
            "inputs",
            expected="inputs_embeds (batch, n, d): this model's embedding table is a placeholder of one row",
            got="the whole model, which reads token ids",
            remedy='Take the encoder alone with part="encoder", which reads embedded tokens.',
        )
    check_ids(model, ids)
    _check_length(model, ids.shape[1])
    return ids.long()


def check_ids(model: nn.Module, ids: Tensor) -> None:
    """Raise ArgumentError unless token ids are in the embedding table of a model."""
    size = vocabulary_size(model)
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


def _check_length(model: nn.Module, n: int) -> None:
    limit = max_length(model)
    if limit is not None and n > limit:
        raise ArgumentError(
            "inputs",
            expected=f"at most {limit} tokens, the model's positions",
            got=f"{n}",
            remedy="Shorten them.",
        )
