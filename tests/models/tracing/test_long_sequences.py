"""Capture of long sequences: no matrix of n² numbers is formed, kept or asked for."""

from __future__ import annotations

import math
import subprocess
import sys
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


@pytest.mark.parametrize("make", others_slow([llama, diffllama], [diffllama]))
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


def naive(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, cap: float, sinks: np.ndarray
) -> np.ndarray:
    """Softmax attention of one head after the other, row by row."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h, i in np.ndindex(q.shape[:3]):
        s = cap * np.tanh(0.3 * k[b, h // 2] @ q[b, h, i] / cap)
        e = np.where(seen[h, i], np.exp(s), 0.0)
        out[b, h, i] = e @ v[b, h // 2] / (e.sum() + np.exp(sinks[h]))
    return out


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("entries", [1, 40, 150, 10_000])
def test_plain_attention_in_blocks_of_heads_and_rows(
    entries: int, causal: bool, additive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_call, "_ENTRIES", entries)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 9, 3, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 9, d, generator=generator, dtype=torch.float64) for d in (3, 5))
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 9, 9, generator=generator) > 0.3
    given = torch.where(mask, 0.0, -math.inf).double() if additive else mask
    call = softmax_call.SoftmaxCall(
        query=q, key=k, value=v, scale=0.3, mask=given, softcap=2.0, sinks=sinks, causal=causal
    )
    got = softmax_call.plain_attention(call)
    seen = mask.tril() if causal else mask
    wanted = naive(*(t.numpy() for t in (q, k, v, seen)), 2.0, sinks.numpy())
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value_dim", [3, 5])  # of one size with the keys: the fused kernel
@pytest.mark.parametrize("entries", [7, 10_000])
def test_plain_attention_without_anything_else(
    entries: int, value_dim: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_call, "_ENTRIES", entries)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 4, 9, 3, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, 2, 9, d, generator=generator, dtype=torch.float64) for d in (3, value_dim))
    seen = np.tril(np.ones((4, 9, 9), dtype=bool)) if causal else np.ones((4, 9, 9), dtype=bool)
    wanted = naive(*(t.numpy() for t in (q, k, v)), seen, 1e9, np.full(4, -np.inf))
    call = softmax_call.SoftmaxCall(query=q, key=k, value=v, scale=0.3, causal=causal)
    got = softmax_call.plain_attention(call)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-14)


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


PROGRAM = """
import resource, sys
import torch, transformers
import howsmooth as hs
from howsmooth.models import capture
torch.set_num_threads(1)
kind, n = sys.argv[1], int(sys.argv[2])
sizes = dict(vocab_size=50, num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64)
config = getattr(transformers, kind + "Config")(num_key_value_heads=2, max_position_embeddings=n, **sizes)
model = getattr(transformers, kind + "Model")(config).eval()
(site,) = capture(model, torch.randint(0, 50, (1, n)), layers=[-1], scope="block")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = hs.local_lipschitz(site.map, site.x[0], rtol=1e-2, max_iterations=4, memory=400 << 20)
assert 0 < float(found.lower) <= float(found.value) <= float(found.upper)
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peaks(kind: str, n: int) -> tuple[int, int]:
    """Return the largest resident size, in bytes, until a block is captured, and until it is measured."""
    command = [sys.executable, "-c", PROGRAM, kind, str(n)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return 1024 * int(said[-2]), 1024 * int(said[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "DiffLlama"])  # every parameter is known; attention in stages
def test_the_peak_of_memory_is_below_one_matrix_of_probabilities(kind: str) -> None:
    n = 10_000
    few, many = peaks(kind, 64), peaks(kind, n)
    probabilities = 4 * n * n  # of one of the two heads, in float32
    assert many[0] - few[0] < probabilities / 2
    assert many[1] - few[1] < probabilities
