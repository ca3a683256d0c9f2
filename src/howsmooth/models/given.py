"""What a model is given: named arguments on its device, and how many sequences there are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from howsmooth.errors import ArgumentError
from howsmooth.models.inputs import check_inputs, check_model, takes_decoder_ids

__all__ = ["ModelInputs", "model_inputs"]


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """Checked inputs."""

    named: dict[str, Tensor]
    batch: int


def model_inputs(model: nn.Module, inputs: Tensor | Mapping[str, Tensor]) -> ModelInputs:
    """Check a model and its inputs.

    Raises
    ------
    ArgumentError
        If the model cannot be measured in its dtype, or the inputs are none that it knows.

    """
    check_model(model)
    if isinstance(model, PreTrainedModel):
        named = check_inputs(model, inputs)
        decoded = {"decoder_input_ids", "decoder_inputs_embeds"} & named.keys()
        if takes_decoder_ids(model) and "input_ids" in named and not decoded:
            named["decoder_input_ids"] = named["input_ids"]
        names = ("input_ids", "inputs_embeds", str(model.main_input_name), *named)
        main = next(name for name in names if name in named)
        return ModelInputs(named, named[main].shape[0] if _is_batched(main, named[main]) else 1)
    named = _of_module(model, inputs)
    name, first = next(iter(named.items()))
    axis = 1 if _sequence_first(model) and first.ndim > 2 else 0
    return ModelInputs(named, first.shape[axis] if _is_batched(name, first) else 1)


def _is_batched(name: str, value: Tensor) -> bool:
    """Whether the first axis counts sequences, of token ids, sounds or tokens; not patches of one image."""
    return value.ndim > 2 or not value.is_floating_point() or name == "input_values"


def _of_module(model: nn.Module, inputs: object) -> dict[str, Tensor]:
    parameters = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if isinstance(inputs, Tensor):
        if not parameters:
            raise ArgumentError(
                "inputs", expected=f"a dict of the arguments of {type(model).__name__}", got="a tensor"
            )
        named: dict[str, Tensor] = {parameters[0]: inputs}
        if isinstance(model, nn.MultiheadAttention):
            named = dict.fromkeys(("query", "key", "value"), inputs)
    elif isinstance(inputs, Mapping) and inputs:
        named = {str(name): value for name, value in inputs.items() if value is not None}
    else:
        raise ArgumentError(
            "inputs",
            expected=f"a tensor, the first argument of {type(model).__name__}, or a dict of its arguments",
            got=type(inputs).__name__
            if inputs is None or not isinstance(inputs, Mapping)
            else "an empty dict",
        )
    takes_any = any(p.kind == p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(f"inputs[{name!r}]", expected="a tensor", got=type(value).__name__)
        if name not in parameters and not takes_any:
            raise ArgumentError(
                "inputs",
                expected=f"arguments that {type(model).__name__} knows ({', '.join(parameters)})",
                got=repr(name),
            )
        if value.numel() == 0:
            raise ArgumentError("inputs", expected="at least one token", got=f"shape {tuple(value.shape)}")
    weights = next((p for p in model.parameters() if p.is_floating_point()), None)
    dtype = torch.float32 if weights is None else weights.dtype
    for name, value in named.items():
        if value.is_floating_point() and value.dtype != dtype:
            raise ArgumentError(f"inputs[{name!r}]", expected=f"{dtype} as the model", got=str(value.dtype))
    device = torch.device("cpu") if weights is None else weights.device
    moved: dict[int, Tensor] = {}  # one tensor that is given twice stays one
    return {name: moved.setdefault(id(value), value.to(device)) for name, value in named.items()}


def _sequence_first(model: nn.Module) -> bool:
    """Whether torch's own attention modules in the model have the sequence before the batch."""
    return any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in model.modules())
