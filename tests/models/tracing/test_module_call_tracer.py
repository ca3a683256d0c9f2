"""What a capture costs: one pass, no further than needed, and the tensors of the layers asked for."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from torch import Tensor

from howsmooth.models import capture
from tests._tiny_models import CONFIGS, tiny, token_ids


def _counted(model: Any, names: list[str]) -> dict[str, int]:
    """How often modules are called, from now on."""
    calls = dict.fromkeys(names, 0)

    def count(name: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            calls[name] += 1

        return hook

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(count(name))
    return calls


@pytest.mark.parametrize(
    ("layers", "last"), [([0], 0), ([1, 0], 1), ([-1], 2), (None, 2), ([0, 1, 2], 2), ([-3], 2)]
)
def test_the_model_runs_once_and_no_further_than_needed(layers: list[int] | None, last: int) -> None:
    model = tiny("llama")
    model.config.use_cache = False  # with a cache, the model runs once more as it is called
    calls = _counted(model, ["embed_tokens", "rotary_emb", "norm", *(f"layers.{i}.mlp" for i in range(3))])
    capture(model, token_ids(2, 5), layers=layers, scope="block")
    assert (calls["embed_tokens"], calls["rotary_emb"]) == (1, 1)
    # Layers that were asked for are run by themselves; the others in the pass only.
    asked = {0, 1, 2} if layers is None else {i % 3 for i in layers}
    for i in range(3):
        if i not in asked:
            assert calls[f"layers.{i}.mlp"] == (1 if i <= last else 0)
    stopped = layers is not None and min(layers) >= 0
    assert calls["norm"] == (0 if stopped else 1)


def _held(layers: int, asked: list[int] | None) -> int:
    """How many numbers of activations are alive when the last layer of the pass has ended."""
    make, config = CONFIGS["llama"]()
    config.num_hidden_layers = layers
    config.use_cache = False  # with a cache, the model runs once more as it is called
    model = make(config).eval()
    found: list[int] = []

    def count(module: Any, args: Any) -> None:
        alive = (t for t in gc.get_objects() if type(t) is Tensor and t.shape[:2] == (2, 29))
        found.append(sum(t.numel() for t in alive if t.is_floating_point()))

    model.norm.register_forward_pre_hook(count)
    capture(model, token_ids(2, 29), layers=asked)
    return found[0]


def test_only_the_layers_asked_for_are_kept() -> None:
    few, many = 2, 5
    last = _held(few, [-1])
    assert _held(many, [-1]) == last
    assert _held(many, [0, -1]) > last  # which shows that the count sees them
    assert _held(many, None) > 3 * last
