"""Windows of models: a mask that is a band becomes a rule, and no matrix is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2Model,
    Gemma3TextConfig,
    Gemma3TextModel,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
)

import howsmooth as hs
from howsmooth.attention import StagedAttention
from howsmooth.models import capture
from howsmooth.models.tracing.mask_and_bias import describe_mask, order_and_window
from tests._tiny_models import _GROUPED, _SHARED, token_ids
from tests.attention.test_windows import band

N = 11
_KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}
_GEMMA = {**_GROUPED, **_KINDS, "head_dim": 6}

# name -> class and configuration, and the windows and the order of the three layers
MODELS: dict[str, tuple[Callable[[], tuple[type[PreTrainedModel], Any]], list[int | None], bool]] = {
    "mistral": (lambda: (MistralModel, MistralConfig(**_GROUPED, sliding_window=3)), [3, 3, 3], True),
    "gemma 2": (
        lambda: (Gemma2Model, Gemma2Config(**_GEMMA, query_pre_attn_scalar=6)),
        [4, None, 4],
        True,
    ),
    "gemma 3": (lambda: (Gemma3TextModel, Gemma3TextConfig(**_GEMMA)), [4, None, 4], True),
    "modernbert": (
        lambda: (
            ModernBertModel,
            ModernBertConfig(
                **_SHARED, local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
            ),
        ),
        [None, 4, None],
        False,
    ),
}


def _built(name: str) -> PreTrainedModel:
    make, config = MODELS[name][0]()
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(config).eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_band_becomes_a_window(name: str) -> None:
    _, windows, causal = MODELS[name]
    model, ids = _built(name), token_ids(1, N)
    for site, window in zip(capture(model, ids), windows, strict=True):
        f = site.map
        assert isinstance(f, hs.SelfAttention)
        assert (f.window, f.causal, f.mask) == (window, causal, None)
        if window is None:
            continue
        assert site.masking == (
            f"sliding window {window}, causal" if causal else f"sliding window {window - 1} to both sides"
        )
        f, x = f.to(dtype=torch.float64), site.x.double()
        masked = f._rebuilt(window=None, causal=False, mask=band(N, window, causal=causal))
        torch.testing.assert_close(f(x), masked(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            hs.local_lipschitz(f, x, rtol=1e-6).value,
            hs.local_lipschitz(masked, x, rtol=1e-6).value,
            rtol=1e-9,
            atol=0,
        )


@pytest.mark.parametrize("window", [3, 11, 12])
def test_a_window_no_shorter_than_the_sequence_is_order_alone(window: int) -> None:
    model = MistralModel(MistralConfig(**_GROUPED, sliding_window=window)).eval()
    windows = {site.map.window for site in capture(model, token_ids(1, N))}
    assert windows == {3 if window == 3 else None}


def test_stages_have_windows_too() -> None:
    """Heads that are gated stay code; their softmax knows its window."""
    model = _built("gemma 3")
    for layer in model.layers:
        projection = layer.self_attn.o_proj
        layer.self_attn.o_proj = torch.nn.Sequential(torch.nn.Tanh(), projection)
    first = capture(model, token_ids(1, N))[0].map
    assert isinstance(first, StagedAttention)
    assert [(core.window, core.causal, core.mask) for core in first.cores] == [(4, True, None)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_what_is_nearly_a_band_stays_a_mask(window: int, causal: bool) -> None:
    n = 7
    whole = band(n, window, causal=causal)
    rules = order_and_window(whole)
    assert rules is not None
    assert (rules.window, rules.causal) == (window, causal or window == 1)
    for i in range(n):
        for j in range(n):
            other = whole.clone()
            other[i, j] = not other[i, j]
            assert order_and_window(other) is None
            found = describe_mask(other, n)
            assert found.mask is not None
            assert torch.equal(found.mask, other)
            assert found.causal == ((causal and j <= i) or (not causal and window == 1 and j <= i))
