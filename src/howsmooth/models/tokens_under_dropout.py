"""Dropout rates of a model, and the tokens at its attention layers in training mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from howsmooth.errors import CaptureError
from howsmooth.models.captured_layer import Site
from howsmooth.models.measurement_mode import measurement_mode
from howsmooth.models.tracing.layer_trace import bound_arguments, first_tokens
from howsmooth.models.tracing.module_call_tracer import run
from howsmooth.seeds import torch_seed

__all__ = ["DropoutRates", "dropout_rates", "training_tokens"]

# The names of the two rates in the configurations of transformers, GPT-2's first
_WEIGHTS = ("attn_pdrop", "attention_probs_dropout_prob", "attention_dropout")
_OUTPUTS = ("resid_pdrop", "hidden_dropout_prob", "resid_dropout")


@dataclass(frozen=True)
class DropoutRates:
    """The dropout probabilities of the attention weights and of the attention output."""

    weights: float
    outputs: float


def dropout_rates(model: PreTrainedModel) -> DropoutRates | None:
    """Return the dropout rates in the configuration of a model, or None if no rate is above zero."""
    weights, outputs = (
        next((float(rate) for name in names if (rate := getattr(model.config, name, None)) is not None), 0.0)
        for names in (_WEIGHTS, _OUTPUTS)
    )
    return DropoutRates(weights, outputs) if weights or outputs else None


def training_tokens(
    model: PreTrainedModel, inputs: Tensor, sites: Sequence[Site], seeds: Sequence[int]
) -> list[Tensor]:
    """Run each sequence of token ids (batch, n) with dropout, from its own seed, and return the tokens
    (batch, n, d) of each captured attention layer.

    The settings of the model and the random state are restored afterwards.

    Raises
    ------
    CaptureError
        If the model uses one attention module for several layers.

    """
    seen: dict[str, list[Tensor]] = {site.name: [] for site in sites}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tokens = first_tokens(bound_arguments(module, args, kwargs))
            if tokens is not None:
                seen[name].append(tokens.detach().clone())

        return hook

    with ExitStack() as stack:
        for name in seen:
            module = model.get_submodule(name)
            stack.enter_context(module.register_forward_pre_hook(keep(name), with_kwargs=True))
        stack.enter_context(measurement_mode(model))
        for module in model.modules():
            module.training = True
        for sequence, seed in zip(inputs, seeds, strict=True):
            torch.manual_seed(torch_seed(seed))
            run(model, {"input_ids": sequence[None].to(model.device)})
    if len(seen) != len(sites) or any(len(tokens) != len(inputs) for tokens in seen.values()):
        raise CaptureError(
            f"{type(model).__name__} uses one attention module for several layers, so that the tokens of one "
            "layer in training mode cannot be distinguished from another's. Leave dropout out."
        )
    return [torch.cat(seen[site.name]) for site in sites]
