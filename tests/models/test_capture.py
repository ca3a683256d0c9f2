"""Captured maps against the model's own sublayers, called by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import howsmooth as hs
from howsmooth.bounds import norm_radius
from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models import capture
from howsmooth.models.identification.layer_identification import _may_be_outputs
from howsmooth.scopes import SCOPES
from tests._selection import others_slow
from tests._tiny_models import CONFIGS, tiny, token_ids


class _PreNorm(torch.nn.Module):
    """A layer of hs.nn behind a LayerNorm, with the radius that the norm gives."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16, eps=0.0)
        radius = norm_radius(hs.LayerNorm(torch.ones(16)))
        self.attn = getattr(hs.nn, name)(16, 2, length=6, radius=radius, constant=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.norm(x))[0]


@pytest.mark.parametrize(
    "name",
    others_slow(
        [
            "SoftmaxAttention",
            "QueryKeyNormAttention",
            "L2Attention",
            "CosineAttention",
            "LipschitzNormAttention",
        ],
        ["SoftmaxAttention", "LipschitzNormAttention"],
    ),
)
def test_a_layer_with_a_radius_behind_a_norm(name: str) -> None:
    """No token that the capture or the measurement makes up leaves the radius, which norms attain."""
    torch.manual_seed(0)
    model, x = _PreNorm(name).double(), torch.randn(1, 6, 16, dtype=torch.float64)
    (site,) = capture(model, x)
    own = model.norm(x)

    def attention(x: torch.Tensor) -> torch.Tensor:
        return model.attn(x)[0]

    torch.testing.assert_close(site.x, own)
    torch.testing.assert_close(site.map(own), attention(own))
    true = float(torch.linalg.matrix_norm(torch.func.jacrev(attention)(own[0]).detach().reshape(96, 96), 2))
    assert float(hs.local_lipschitz(site.map, site.x).value) == pytest.approx(true, rel=1e-3)
    assert float(hs.local_lipschitz(attention, own).value) == pytest.approx(true, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "causal", "masking", "layout"),
    [
        ("bert", False, "none", "post-norm"),
        ("bert-decoder", True, "causal", "post-norm"),
        ("gpt2", True, "causal", "pre-norm"),
        ("llama", True, "causal", "pre-norm"),
        ("mistral", True, "sliding window 3, causal", "pre-norm"),
    ],
)
def test_what_a_site_says(name: str, causal: bool, masking: str, layout: str) -> None:
    model, ids = tiny(name), token_ids(2, 8)
    sites = capture(model, ids)
    assert [s.layer for s in sites] == [0, 1, 2]
    for site in sites:
        assert (site.causal, site.masking, site.layout, site.scope) == (causal, masking, layout, "attention")
        assert type(model.get_submodule(site.name)).__name__.endswith("Attention")
        assert (site.path, site.x.dtype, site.map.dtype) == ("closed form", torch.float32, torch.float32)
        assert not site.x.requires_grad
        norms = site.x.double().norm(dim=-1)
        torch.testing.assert_close(site.radius_mean, norms.square().mean(dim=1).sqrt())
        torch.testing.assert_close(site.radius_max, norms.amax(dim=1))
        assert f"layer {site.layer}" in repr(site)


@pytest.mark.parametrize(("n", "scope"), [(1, "block"), (2, "head")])
@pytest.mark.parametrize("name", CONFIGS)
def test_shortest_sequences(name: str, n: int, scope: str) -> None:
    model, ids = tiny(name), token_ids(3, n)
    for site in capture(model, ids, layers=[1], scope=scope):
        assert site.x.shape == (3, n, 24)
        assert site.causal == (name != "bert")
        assert site.path == "closed form"


def test_more_inputs_than_token_ids() -> None:
    ids = token_ids(2, 6)
    plain = capture(tiny("bert"), ids, layers=[0])
    named = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
    }
    for a, b in zip(plain, capture(tiny("bert"), named, layers=[0]), strict=True):
        assert torch.equal(a.x, b.x)
        assert b.masking == "none"
    types = {**named, "token_type_ids": torch.ones_like(ids)}
    assert not torch.equal(capture(tiny("bert"), types, layers=[0])[0].x, plain[0].x)


def test_a_mask_of_ones_own_is_part_of_the_map() -> None:
    n = 6
    mask = torch.rand(n, n, generator=torch.Generator().manual_seed(1)) > 0.5
    mask |= torch.eye(n, dtype=torch.bool)
    inputs = {"input_ids": token_ids(1, n), "attention_mask": mask[None, None]}
    (site,) = capture(tiny("bert"), inputs, layers=[1])
    assert site.masking == "a mask of its own"
    moved = site.x.clone()
    moved[:, 4] += 1.0
    change = (site.map(moved) - site.map(site.x)).abs().amax(dim=-1)[0]
    assert torch.equal(change > 0, mask[:, 4])


# ---- training mode, and leaving things as they were


def _state(model: Any) -> dict[str, Any]:
    hooks = [
        name for name in vars(model) if name.endswith("_hooks") or "hooks_" in name
    ]  # the same dictionaries exist on every module
    return {
        "training": [m.training for m in model.modules()],
        "hooks": [{name: dict(getattr(m, name)) for name in hooks} for m in model.modules()],
        "attention": model.config._attn_implementation,
        "use_cache": getattr(model.config, "use_cache", None),
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grads": [p.grad for p in model.parameters()],
        "random": torch.get_rng_state().tolist(),
        "registered": (sorted(AttentionInterface().keys()), sorted(AttentionMaskInterface().keys())),
        "grad_enabled": torch.is_grad_enabled(),
        "experts": getattr(model.config, "_experts_implementation", None),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "modes": len(torch.overrides._get_current_function_mode_stack()),
    }


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_training_mode_is_measured_without_dropout_and_restored(name: str) -> None:
    model, ids = tiny(name), token_ids(2, 6)
    expected = capture(model, ids, scope="block")
    weights = copy.deepcopy(model.state_dict())
    model.train()
    frozen = list(model.modules())[3]
    frozen.eval()  # some users keep a part in evaluation mode
    next(iter(model.parameters())).requires_grad_(requires_grad=False)
    before = _state(model)
    sites = capture(model, ids, scope="block")
    assert _state(model) == before
    assert model.training
    assert not frozen.training
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    for a, b in zip(expected, sites, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.map(a.x), b.map(b.x))


class OddError(RuntimeError):
    """What a model may raise in the middle of a pass."""


@pytest.mark.parametrize("kind", [OddError, KeyboardInterrupt])
def test_model_is_restored_after_an_exception_at_every_stage(kind: type[BaseException]) -> None:
    model, ids = tiny("llama").train(), token_ids(1, 5)
    model.set_attn_implementation("eager")
    calls, at = 0, 0

    def fail(module: Any, args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if 0 < at <= calls:
            raise kind("on purpose")

    model.layers[0].self_attn.v_proj.register_forward_hook(fail)
    before = _state(model)
    capture(model, ids, layers=[0], scope="block")
    total, calls = calls, 0
    assert total > 9  # four passes to compare, the pass, the search for the owner, the layer, map and block
    for at in range(1, total + 1) if kind is KeyboardInterrupt else (1, 6):
        calls = 0
        with pytest.raises((ArgumentError, CaptureError, KeyboardInterrupt), match="on purpose") as error:
            capture(model, ids, layers=[0], scope="block")
        stage = ArgumentError if at == 1 else CaptureError
        assert error.type is (KeyboardInterrupt if kind is KeyboardInterrupt else stage)
        assert _state(model) == before


def test_works_under_the_callers_modes() -> None:
    model, ids = tiny("bert"), token_ids(1, 5)
    (plain,) = capture(model, ids, layers=[0])
    with torch.inference_mode():
        (site,) = capture(model, ids.clone(), layers=[0])
    assert not site.x.is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (cast,) = capture(model, ids, layers=[0])
    for other in (site, cast):
        assert torch.equal(plain.x, other.x)
    torch.func.jvp(site.map, (site.x,), (site.x,))


def test_sites_do_not_share_memory_with_the_model() -> None:
    model, ids = tiny("gpt2"), token_ids(1, 5)
    for scope in SCOPES:
        site = capture(model, ids, layers=[1], scope=scope)[0]
        before = site.map(site.x)
        saved = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2.0)
        assert torch.equal(site.map(site.x), before)
        model.load_state_dict(saved)


@pytest.mark.parametrize(
    ("layers", "indices"),
    [
        (0, [0]),
        (-1, [2]),
        ("all", [0, 1, 2]),
        ([2, 0], [2, 0]),
        (range(1, 3), [1, 2]),
        (slice(1, None), [1, 2]),
        (slice(None, None, -2), [2, 0]),
    ],
)
def test_layers_and_heads_are_an_index_a_list_a_range_a_slice_or_all(layers: Any, indices: list[int]) -> None:
    assert [site.layer for site in capture(tiny("gpt2"), token_ids(1, 4), layers)] == indices


def test_heads_are_given_like_layers() -> None:
    for heads, indices in ((1, [1]), ("all", [0, 1, 2, 3]), (slice(1, 3), [1, 2]), (range(2), [0, 1])):
        found = capture(tiny("gpt2"), token_ids(1, 4), layers=0, scope="head", heads=heads)
        assert [site.head for site in found] == indices
    with pytest.raises(ArgumentError, match="layers: expected a slice with some of 3 layers in it"):
        capture(tiny("gpt2"), token_ids(1, 4), layers=slice(5, None))


def test_batch_members_do_not_depend_on_each_other() -> None:
    model, ids = tiny("llama", torch.float64), token_ids(3, 6)
    (together,) = capture(model, ids, layers=[1], scope="block")
    (alone,) = capture(model, ids[2:], layers=[1], scope="block")
    torch.testing.assert_close(together.x[2:], alone.x)
    torch.testing.assert_close(together.map(together.x)[2:], alone.map(alone.x))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_site_knows_the_norm_that_gives_its_tokens(name: str) -> None:
    model, ids = tiny(name), token_ids(2, 7)
    given: list[tuple[Any, Any]] = []
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            module.register_forward_hook(lambda m, args, out: given.append((args[0].clone(), out.clone())))
    with torch.no_grad():
        model(ids)
    for scope in ("head", "residual"):
        for site in capture(model, ids, layers=[0 if scope == "head" else 2], scope=scope):
            hidden = next(h for h, x in given if x.shape == site.x.shape and torch.allclose(x, site.x))
            assert site.norm is not None
            torch.testing.assert_close(site.norm(hidden), site.x, rtol=1e-4, atol=1e-5)


def test_the_input_of_a_pre_norm_block_is_no_norms_output() -> None:
    assert capture(tiny("gpt2"), token_ids(1, 5), layers=[1], scope="block")[0].norm is None
    assert capture(tiny("bert"), token_ids(1, 5), layers=[1], scope="block")[0].norm is not None


def test_a_norm_that_cannot_give_the_tokens_is_not_claimed() -> None:
    norm = capture(tiny("bert"), token_ids(1, 5), layers=[0])[0].norm
    assert norm is not None
    x = norm(torch.randn(3, 4, norm.d))
    assert _may_be_outputs(norm, x)
    assert not _may_be_outputs(norm, 1.2 * x)
    assert not _may_be_outputs(None, x)
