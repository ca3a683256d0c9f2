"""QK-clip against logits that are computed by hand from the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3Model

from howsmooth.errors import ArgumentError
from howsmooth.nn import LipschitzMonitor
from tests._tiny_models import tiny, token_ids


def logits(model: Any, ids: Tensor) -> Tensor:
    """The largest logit of each head of the first layer of GPT-2, (heads,)."""
    seen: list[Tensor] = []
    layer = model.h[0]
    hook = layer.ln_1.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    model.eval()(ids)
    hook.remove()
    q, k, _ = layer.attn.c_attn(seen[0]).detach().chunk(3, dim=-1)
    q, k = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k))
    scores = (q @ k.mT) / q.shape[-1] ** 0.5
    largest: Tensor = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).amax((0, 2, 3))
    return largest


def test_heads_above_the_limit_come_down_to_it_and_the_others_stay() -> None:
    model, ids = tiny("gpt2", torch.float64), token_ids(3, 5)
    before = logits(model, ids)
    limit = float(before.quantile(0.5))
    weight = model.h[0].attn.c_attn.weight.detach().clone()
    monitor = LipschitzMonitor(model, ids, clip_logits=limit, strict=True)
    rows = monitor.measure()
    assert rows[0].clipped == "2 of 4 heads"
    assert rows[0].logit_max == pytest.approx(float(before.max()))
    torch.testing.assert_close(logits(model, ids), before.clamp(max=limit))
    q, k, v = (model.h[0].attn.c_attn.weight / weight).detach().unflatten(1, (3, 4, 6)).movedim(1, 0)
    factor = (limit / before).clamp(max=1.0).sqrt()[None, :, None].expand_as(q)
    torch.testing.assert_close(q, factor)
    torch.testing.assert_close(k, factor)
    assert bool((v == 1).all())


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_no_logit_of_any_layer_is_larger_afterwards(name: str) -> None:
    """With separate projections and biases; with rotary positions and keys that heads share."""
    model, ids = tiny(name), token_ids(3, 5)
    first = LipschitzMonitor(model, ids).measure()
    limit = 0.3 * max(row.logit_max or 0.0 for row in first)
    LipschitzMonitor(model, ids, clip_logits=limit, strict=True).measure()
    after = [row.logit_max for row in LipschitzMonitor(model, ids).measure()]
    assert all(value is not None and value <= limit * (1 + 1e-5) for value in after)
    assert max(value or 0.0 for value in after) > 0.99 * limit


def test_layers_that_cannot_be_clipped_say_so_and_stay() -> None:
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = Qwen3Model(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=6, vocab_size=60)).eval()
    before = [p.clone() for p in model.parameters()]
    (row,) = LipschitzMonitor(model, token_ids(1, 5), clip_logits=1e-3).measure()
    assert row.clipped.startswith("not clipped: its logits are not just products")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ArgumentError, match="clip_logits"):
        LipschitzMonitor(model, token_ids(1, 5), clip_logits=0.0)
