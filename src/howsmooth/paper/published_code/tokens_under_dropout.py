"""Dropout rates of a model, and the tokens at its attention layers in training mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth.errors import CaptureError
from howsmooth.models.captured_layer import Site
from howsmooth.models.measurement_mode import measurement_mode
from howsmooth.models.model_call import ModelCall
from howsmooth.models.tracing.recorder import run
from howsmooth.seeds import torch_seed
from howsmooth.watching import Call, watched

__all__ = ["DropoutRates", "dropout_rates", "training_tokens"]

# The names of the two rates in the configurations of transformers, GPT-2's first
_WEIGHTS = ("attn_pdrop", "attention_probs_dropout_prob", "attention_dropout")
_OUTPUTS = ("resid_pdrop", "hidden_dropout_prob", "resid_dropout")


@dataclass(frozen=True)
class DropoutRates:
    """The dropout probabilities of the attention weights and of the attention output."""

    weights: float
    outputs: float


def dropout_rates(model: nn.Module) -> DropoutRates | None:
    """Return the dropout rates in the configuration of a model, or None if no rate is above zero."""
    weights, outputs = (
        next((float(rate) for name in names if (rate := getattr(model.config, name, None)) is not None), 0.0)
        for names in (_WEIGHTS, _OUTPUTS)
    )
    return DropoutRates(weights, outputs) if weights or outputs else None


def training_tokens(
    model: nn.Module, inputs: Tensor, sites: Sequence[Site], seeds: Sequence[int]
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

    def keep(call: Call) -> None:
        if call.inputs is not None:
            seen[call.name].append(call.inputs.detach().clone())

    with watched({name: model.get_submodule(name) for name in seen}, keep), measurement_mode(model):
        for module in model.modules():
            module.training = True
        for sequence, seed in zip(inputs, seeds, strict=True):
            torch.manual_seed(torch_seed(seed))
            run(ModelCall(model, {"input_ids": sequence[None].to(model.device)}, 1))
    if len(seen) != len(sites) or any(len(tokens) != len(inputs) for tokens in seen.values()):
        raise CaptureError(
            f"{type(model).__name__} uses one attention module for several layers, so that the tokens of one "
            "layer in training mode cannot be distinguished from another's. Leave dropout out."
        )
    return [torch.cat(seen[site.name]) for site in sites]
