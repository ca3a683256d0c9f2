"""Layers that are read from the record of the forward pass, and the runs that this saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from howsmooth.models import capture
from howsmooth.models.tracing import attention_recorder
from tests._tiny_models import tiny, token_ids


def runs_of(model: nn.Module, part: str, **how: Any) -> tuple[list[Any], int]:
    """The sites of a model, and how often one of its modules runs while they are captured."""
    runs: list[object] = []
    hook = model.get_submodule(part).register_forward_hook(lambda *_: runs.append(None))
    sites = capture(model, token_ids(1, 7), **how)
    hook.remove()
    return sites, len(runs)


@pytest.mark.parametrize(
    ("name", "part", "together"), [("bert", "encoder.layer.1.output", 1), ("llama", "layers.1.mlp", 2)]
)
def test_a_layer_runs_in_the_pass_and_not_by_itself(
    name: str, part: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with a cache runs twice, with it and without; the layer by itself once more."""
    sites, runs = runs_of(tiny(name), part)
    assert runs == together
    monkeypatch.setattr(attention_recorder, "_MOST", 0)
    again, runs = runs_of(tiny(name), part)
    assert runs == together + 1
    for one, other in zip(sites, again, strict=True):
        assert (one.masking, one.layout, one.path, one.path_reason) == (
            other.masking, other.layout, other.path, other.path_reason,
        )  # fmt: skip
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.map(one.x), other.map(other.x))


class Attention(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.mT, -1) @ v)


class InPlace(nn.Module):
    """A block with pre-norm whose residual is added in place, into the tensor that its norm was given."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(d), Attention(d)

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone()
        h += self.attention(self.norm(h))
        return h


def test_tensors_that_the_model_changes_are_not_read_from_the_record() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = nn.Sequential(InPlace(), InPlace()).eval(), torch.randn(1, 5, 8)
    first, second = capture(model, x, scope="block")
    assert first.layout == second.layout == "pre-norm"
    h = model[0](x)
    assert torch.allclose(first.map(first.x), h, atol=1e-5)
    assert torch.allclose(second.map(second.x), model[1](h), atol=1e-5)


class Keeps(nn.Module):
    """An attention that keeps its last values, as a cache that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.kept = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, self.kept = self.qkv(x).chunk(3, dim=-1)
        return torch.tanh(torch.softmax(q @ k.mT, dim=-1) @ self.kept)


@pytest.mark.parametrize("scope", ["attention", "model"])
def test_a_tensor_that_a_module_keeps_is_copied_without_its_graph(scope: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, model = torch.randn(1, 4, 8), Keeps()
    (site,) = capture(model, x, scope=scope)
    site.map(site.x.requires_grad_())  # the copy keeps a tensor with a graph now
    other = site.map.to(dtype=torch.float64)
    torch.testing.assert_close(other(x.double()), model.double()(x.double()))
