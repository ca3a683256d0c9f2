"""Attention as a function: its values and derivatives of the first and second order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import howsmooth as hs
from tests.keep.numbers import Number, case, digest_of, numbers

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window, capped": {"causal": True, "window": 3, "softcap": 1.1},
    "bias and mask": {"score_bias": numbers(610, 4, 5, 5), "mask": numbers(611, 5, 5) > -0.8, "scale": 0.9},
    "sinks": {"sinks": numbers(612, 4)},
}


def _derivatives(name: str) -> Mapping[str, Number]:
    options = dict(OPTIONS[name])
    if "mask" in options:
        options["mask"] = options["mask"] | torch.eye(5, dtype=torch.bool)
    primal = (numbers(600, 2, 4, 5, 3), numbers(601, 2, 2, 5, 3), numbers(602, 2, 2, 5, 2))
    tangent = tuple(numbers(603 + k, *t.shape) for k, t in enumerate(primal))

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hs.functional.attention(q, k, v, **options)

    value, pull = torch.func.vjp(f, *primal)
    cotangent = numbers(606, *value.shape)
    found: dict[str, Number] = {"value": digest_of(value)}
    for words, part in zip("qkv", pull(cotangent), strict=True):
        found[f"vjp, {words}"] = digest_of(part)
    found["jvp"] = digest_of(torch.func.jvp(f, primal, tangent)[1])

    def slope(*at: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.func.vjp(f, *at)[1](cotangent))

    for words, part in zip("qkv", torch.func.jvp(slope, primal, tangent)[1], strict=True):
        found[f"second derivative, {words}"] = digest_of(part)
    single = f(*(t.float() for t in primal)) if not {"score_bias", "sinks"} & options.keys() else None
    if single is not None:
        found["value, float32"] = digest_of(single, rtol=1e-5)
    return found


for _name in OPTIONS:
    case(f"functional/{_name}")(partial(_derivatives, _name))


@case("functional/registered")
def _registered() -> Mapping[str, Number]:
    """A model of transformers whose attention is this one."""
    from transformers import GPT2Config, GPT2Model

    from tests.keep.cases_models import TYPES, filled, token_ids

    hs.functional.register()
    model = filled(GPT2Model(GPT2Config(**TYPES["gpt2"][2], attn_implementation="howsmooth")))
    return {"tokens": digest_of(model(token_ids(7, 40)).last_hidden_state)}
