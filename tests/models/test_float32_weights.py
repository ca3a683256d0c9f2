"""Half-precision models are captured layer by layer in float32, with the numbers of ``model.float()``."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import disk_offload
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

import howsmooth as hs
from howsmooth.errors import ArgumentError
from howsmooth.models.float32_weights import float32_layers
from tests._selection import others_slow
from tests._tiny_models import CONFIGS, tiny

HALF = [torch.bfloat16, torch.float16]
IDS = torch.arange(3, 15)[None]


def vision() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8), add_pooling_layer=False).eval()


@pytest.mark.parametrize(
    ("name", "scope", "dtype"),
    others_slow(
        itertools.product([*CONFIGS, "vit"], ["attention", "block"], HALF),
        [*((name, "attention", torch.float16) for name in (*CONFIGS, "vit")), ("llama", "block", HALF[0])],
    ),
)
def test_the_sites_are_those_of_the_model_in_float32(name: str, scope: str, dtype: torch.dtype) -> None:
    half = (vision() if name == "vit" else tiny(name)).to(dtype)
    inputs = torch.randn(1, 3, 16, 16) if name == "vit" else IDS
    sites, wide = (hs.capture(model, inputs, scope=scope) for model in (half, copy.deepcopy(half).float()))
    assert [site.layer for site in sites] == [site.layer for site in wide]
    for a, b in zip(sites, wide, strict=True):
        assert (a.stored, b.stored, a.x.dtype) == (dtype, torch.float32, torch.float32)
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.map(a.x), b.map(b.x))
        assert str(dtype).removeprefix("torch.") in repr(a)
        assert "stored" not in repr(b)


def test_lists_in_lists_are_converted_by_their_members() -> None:
    """nanoGPT has its blocks in a list in a dictionary of modules, and vision models pairs in a list."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pair = nn.ModuleList([nn.LayerNorm(8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])
            self.parts = nn.ModuleDict({"layers": nn.ModuleList([pair]), "last": nn.LayerNorm(8)})

        def forward(self, x: Tensor) -> Tensor:
            for norm, layer in self.parts["layers"]:
                x = layer(norm(x))
            return self.parts["last"](x)

    torch.manual_seed(0)
    half, x = Pairs().eval().to(torch.bfloat16), torch.randn(1, 5, 8)
    (a,), (b,) = (hs.capture(model, x) for model in (half, copy.deepcopy(half).float()))
    assert torch.equal(a.map(a.x), b.map(b.x))


@pytest.mark.parametrize("within", [False, True])
def test_torchs_own_attention_outside_of_module_lists(within: bool) -> None:
    """Its output projection is a module that is never called."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attention

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x)[0]

    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    half = (Around() if within else attention).to(torch.bfloat16)
    x = torch.randn(1, 5, 8)
    inputs = x if within else {"query": x, "key": x, "value": x}
    (a,), (b,) = (hs.capture(model, inputs) for model in (half, copy.deepcopy(half).float()))
    assert torch.equal(a.map(a.x), b.map(b.x))


@pytest.mark.parametrize("fails", [False, True])
def test_weights_hooks_and_gradients_are_as_before(fails: bool) -> None:
    model = tiny("llama").to(torch.bfloat16)
    before = {name: (t, t.data_ptr(), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    if fails:

        def stop(module: nn.Module, args: Any) -> None:
            raise RuntimeError("no")

        hook = model.layers[1].mlp.register_forward_pre_hook(stop)
        with pytest.raises(ArgumentError, match="no"):
            hs.capture(model, IDS)
        hook.remove()
    else:
        hs.capture(model, IDS)
    after = model.state_dict(keep_vars=True)
    for name, (t, place, values) in before.items():
        assert after[name] is t
        assert t.data_ptr() == place
        assert torch.equal(t, values)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_one_layer_stands_weights_in_memory_at_a_time() -> None:
    model = tiny("llama").to(torch.bfloat16)
    wide: list[list[int]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        dtypes = [layer.mlp.up_proj.weight.dtype for layer in model.layers]
        wide.append([i for i, dtype in enumerate(dtypes) if dtype == torch.float32])

    with float32_layers(model), torch.no_grad():
        for layer in model.layers:
            layer.mlp.register_forward_hook(note)
        model(IDS)
    assert wide == [[0], [1], [2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scope", ["attention", "block"])
def test_weights_on_a_disk_are_loaded_layer_by_layer(dtype: torch.dtype, scope: str, tmp_path: Path) -> None:
    model = tiny("llama").to(dtype)
    whole = hs.capture(model, IDS, scope=scope)
    disk_offload(model, tmp_path, execution_device="cpu", offload_buffers=False)
    assert all(p.is_meta for p in model.parameters())
    for a, b in zip(hs.capture(model, IDS, scope=scope), whole, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.map(a.x), b.map(b.x))
    assert all(p.is_meta for p in model.parameters())
    with torch.no_grad():
        assert torch.isfinite(model(IDS).last_hidden_state).all()  # its own hooks are as before


def test_half_precision_inputs_and_mixed_weights_are_taken() -> None:
    model = tiny("bert").to(torch.bfloat16)
    x = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    (site, *_) = hs.capture(model, {"inputs_embeds": x})
    (wide, *_) = hs.capture(model, {"inputs_embeds": x.float()})
    assert torch.equal(site.x, wide.x)
    model.encoder.layer[0].float()  # the norms of many checkpoints stay in float32
    assert hs.capture(model, IDS)[0].stored == torch.bfloat16


def test_the_constant_is_that_of_the_stored_weights_in_float64() -> None:
    """An oracle without this module: the layer of the stored weights, in float64, by autodiff."""
    half = tiny("gpt2").to(torch.bfloat16)
    site = hs.capture(half, IDS)[1]
    layer = copy.deepcopy(half).double().h[1].attn

    def f(x: Tensor) -> Tensor:
        return layer(x[None])[0][0]

    jacobian = torch.autograd.functional.jacobian(f, site.x[0].double(), vectorize=True)
    truth = float(torch.linalg.matrix_norm(jacobian.flatten(2).flatten(0, 1), 2))
    found = hs.local_lipschitz(site.map, site.x[0])
    assert float(found.lower) * (1 - 1e-6) <= truth <= float(found.upper) * (1 + 1e-6)


def test_hooks_of_gradients_survive() -> None:
    """Data-parallel training reduces gradients by hooks of the nodes that accumulate them."""
    model = tiny("llama").to(torch.bfloat16)
    weights = list(model.parameters())

    def nodes() -> list[object]:
        return [p.expand_as(p).grad_fn.next_functions[0][0] for p in weights]

    before = nodes()
    hs.capture(model, IDS)
    assert all(a is b for a, b in zip(before, nodes(), strict=True))
