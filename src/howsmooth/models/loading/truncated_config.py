"""Removal of layers from the configuration of a large model, so that a layer of every kind remains."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModel

from howsmooth.models.measurement_mode import nested_configs

__all__ = ["count_weights", "shorten"]

_DEPTHS = (
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
)
_KINDS = ("layer_types", "layers_block_type")


def count_weights(config: Any) -> int:
    """Return the number of weights of a model with a given configuration, without allocating the weights."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModel.from_config(config, trust_remote_code=False).parameters())


def shorten(config: Any, most: int) -> str:
    """Remove layers from a configuration, in place, if its model has more than ``most`` weights. Return a
    phrase that says what was changed, or "" if nothing was.

    The first layers of each stack are kept: at least two, and enough for every kind of layer that the
    configuration names. Whether the other layers are like them is not checked.
    """
    weights = count_weights(config)
    if weights <= most:
        return ""
    done = []
    for part in nested_configs(config):
        for name in _DEPTHS:
            depth = getattr(part, name, None)
            if not isinstance(depth, int) or depth <= 2:
                continue
            named = (list(getattr(part, of, None) or []) for of in _KINDS)
            kinds: list[Any] = next((k for k in named if len(k) == depth), [])
            kept = max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])
            if kept >= depth:
                continue
            setattr(part, name, kept)
            for key, value in vars(part).items():
                if isinstance(value, list) and len(value) == depth:
                    setattr(part, key, value[:kept])
            done.append(f"{kept} of {depth}")
    layers = ", ".join(dict.fromkeys(done))
    return f"built with {layers} layers, as all have {weights / 1e9:.1f} billion weights" if done else ""
