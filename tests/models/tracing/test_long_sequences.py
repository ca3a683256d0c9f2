"""Capture of long sequences: no matrix of n² numbers is formed, kept or asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    BertConfig,
    BertModel,
    DiffLlamaConfig,
    DiffLlamaModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
)

import howsmooth as hs
from howsmooth import batching
from howsmooth.attention import StagedAttention, scaled_dot_product
from howsmooth.jacobian import tiling
from howsmooth.models import capture
from howsmooth.models.tracing import mask_and_bias, softmax_call
from tests._selection import others_slow
from tests.models.tracing.test_softmax_tracer import plain

N = 1200
D = 8
SIZES = {"vocab_size": 50, "num_hidden_layers": 2, "hidden_size": D, "num_attention_heads": 2}
LONG = {**SIZES, "intermediate_size": 2 * D, "max_position_embeddings": N}


def gpt2() -> nn.Module:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2Model(GPT2Config(n_embd=D, n_layer=2, n_head=2, vocab_size=50, n_positions=N, **ends))


def llama() -> nn.Module:
    return LlamaModel(LlamaConfig(num_key_value_heads=1, **LONG))


def bert() -> nn.Module:
    return BertModel(BertConfig(**LONG))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 2 * D, batch_first=True), 2)


def diffllama() -> nn.Module:
    """Two softmaxes: attention in stages."""
    return DiffLlamaModel(DiffLlamaConfig(num_key_value_heads=2, **LONG))


class Largest(TorchDispatchMode):
    """Notes the largest tensor, in bytes, that any operation of PyTorch makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.made_by = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage().nbytes() > self.bytes:
                self.bytes, self.made_by = t.untyped_storage().nbytes(), str(func)
        return result


@pytest.mark.parametrize("make", [gpt2, llama, bert, encoder])
def test_capture_of_a_layer_and_its_block_makes_no_tensor_of_n_squared_bytes(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is formed in blocks of a fixed size is long here at 1,200 tokens.
    monkeypatch.setattr(softmax_call, "_ENTRIES", N * N // 16)
    monkeypatch.setattr(mask_and_bias, "_ENTRIES", N * N // 16)
    torch.manual_seed(0)
    model = make().eval()
    given = torch.randn(1, N, D) if make is encoder else torch.randint(0, 50, (1, N))
    for scope in ("attention", "block"):
        with Largest() as largest:
            (site,) = capture(model, given, layers=[1], scope=scope)
        assert largest.bytes < N * N, largest.made_by
        assert site.causal == (make in (gpt2, llama))
        assert site.path_reason == "every parameter is known"
        # The same as at a length at which nothing is long.
        few = capture(model, given[:, :40], layers=[1], scope=scope)[0]
        if site.causal:
            np.testing.assert_allclose(site.map(site.x)[:, :40], few.map(few.x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", others_slow([llama, diffllama], [llama]))
def test_a_measurement_in_a_small_budget_makes_none_either(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    (site,) = capture(model, torch.randint(0, 50, (1, N)), layers=[1], scope="residual")
    stages = make is diffllama
    assert isinstance(site.map, hs.Residual)
    assert isinstance(site.map.inner, StagedAttention if stages else hs.SelfAttention)
    monkeypatch.setattr(batching, "_STREAMED_FROM", N + 1)
    kept = hs.local_lipschitz(site.map, site.x, max_iterations=1)
    monkeypatch.setattr(batching, "cached_bytes", lambda *arguments: 1 << 60)
    monkeypatch.setattr(scaled_dot_product, "_ENTRIES", {"cpu": N * N // 16})
    monkeypatch.setitem(tiling._TILE, "cpu", N * N // 16)
    monkeypatch.setattr(tiling, "_ROWS", N // 16)
    with Largest() as largest:
        found = hs.local_lipschitz(site.map, site.x, max_iterations=1)
    assert largest.bytes < N * N, largest.made_by
    np.testing.assert_allclose(found.value, kept.value, rtol=1e-6)  # the same steps from the same start


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value_dim", [3, 5])  # of one size with the keys: the fused kernel
@pytest.mark.parametrize("more", ["nothing", "mask", "additive"])
@pytest.mark.parametrize("entries", [1, 40, 150, 10_000])
def test_plain_attention_in_blocks_of_heads_and_rows(
    entries: int, more: str, value_dim: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_call, "_ENTRIES", entries)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 9, 3, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 9, d, generator=generator, dtype=torch.float64) for d in (3, value_dim))
    given: dict[str, Any] = {"query": q, "key": k, "value": v, "scale": 0.3, "causal": causal}
    if more != "nothing":
        mask = torch.rand(4, 9, 9, generator=generator) > 0.3
        mask = torch.where(mask, 0.0, -math.inf).double() if more == "additive" else mask
        sinks = torch.randn(4, generator=generator, dtype=torch.float64)
        given |= {"mask": mask, "softcap": 2.0, "sinks": sinks}
    call = softmax_call.SoftmaxCall(**given)
    torch.testing.assert_close(softmax_call.plain_attention(call), plain(call), rtol=0, atol=1e-14)


@pytest.mark.parametrize("entries", [1, 20, 10_000])
def test_masks_are_looked_at_in_blocks(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_and_bias, "_ENTRIES", entries)
    n = 7
    triangle = torch.ones(n, n, dtype=torch.bool).tril()
    for row, column in ((0, 1), (0, 6), (5, 6), (3, 4)):
        later, earlier = triangle.clone(), triangle.clone()
        later[row, column] = True
        earlier[column, row] = False
        assert not mask_and_bias.hides_later_keys(later)
        assert mask_and_bias.hides_later_keys(earlier)
        assert mask_and_bias.order_and_window(later) is None
        # The corner alone is what a window of n − 1 keys hides.
        assert (mask_and_bias.order_and_window(earlier) is None) == ((row, column) != (0, 6))
        additive = torch.where(later, 0.0, -1e9)[None, None]
        assert not mask_and_bias.hides_later_keys(additive)
    assert mask_and_bias.hides_later_keys(triangle.expand(2, 3, n, n))
    assert mask_and_bias.hides_later_keys(torch.where(triangle, 0.5, -1e9)[None])
    rules = mask_and_bias.order_and_window(triangle[None, None])
    assert rules is not None
    assert rules.triangle
    assert mask_and_bias.order_and_window(triangle[:-1]) is None
    assert mask_and_bias.order_and_window(triangle.expand(2, n, n)) is None
    assert mask_and_bias.hides_later_keys(torch.ones(1, 1, dtype=torch.bool))
    assert not mask_and_bias.hides_later_keys(torch.ones(n, 1, dtype=torch.bool))
