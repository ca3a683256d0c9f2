"""Configurations of large models with fewer layers, which show the same kinds of layers."""

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
    """Return how many weights a model of this configuration has, without building any."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModel.from_config(config, trust_remote_code=False).parameters())


def shorten(config: Any, most: int) -> str:
    """Change a configuration of more than ``most`` weights to as few layers as show every kind it names.

    At least two are left of each stack. Whether all other layers are as these is not looked at.

    Returns
    -------
    str
        What was done, in a phrase; empty if nothing was.

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
    if not done:
        return ""
    return (
        f"built with {', '.join(dict.fromkeys(done))} layers, as all have {weights / 1e9:.1f} billion weights"
    )
