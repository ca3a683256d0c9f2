"""Ellipsoid, radius, absorbed parameters, bounds and searches on sites captured from models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, Gemma2Config, GPTNeoXConfig

import howsmooth as hs
from howsmooth.adversarial import ascend, constructions
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.bounds.norm_layer_outputs import ellipsoid
from howsmooth.bounds.pre_norm_bounds import absorb_norm
from howsmooth.errors import ArgumentError
from tests._cases import tokens
from tests._tiny_models import VOCABULARY, tiny, token_ids

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "bert": BertConfig(**SMALL),
    "gpt_neox": GPTNeoXConfig(**SMALL),
    "gemma2": Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=6),
}


def _model(name: str) -> nn.Module:
    if name not in CONFIGS:
        return tiny(name, torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModel.from_config(CONFIGS[name], attn_implementation="eager")
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
    return model.double().eval()


class Gated(nn.Module):
    """Attention with a gate between its heads and its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.gate = (nn.Linear(8, 8) for _ in range(5))

    def bias(self, x: Tensor) -> Tensor | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x)[:, None] for m in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(x))
        return self.o(mixed[:, 0] * self.gate(x).sigmoid())


class Tilted(Gated):
    """The same, with a bias of the scores that depends on the tokens."""

    def bias(self, x: Tensor) -> Tensor | None:
        return x.square().mean(-1)[:, None, None, :]


@pytest.mark.parametrize("scope", ["head", "heads", "attention"])
@pytest.mark.parametrize("name", ["bert", "gpt_neox", "gemma2", "llama"])
def test_absorbed_parameters_of_a_site(name: str, scope: str) -> None:
    model, ids = _model(name), token_ids(1, 6)
    site = hs.capture(model, ids, layers=[1], scope=scope)[0]
    norm = site.norm
    assert norm is not None
    centre, axes = ellipsoid(site)
    gain = norm.weight.double()
    shift = torch.zeros_like(gain) if norm.bias is None else norm.bias.double()
    # The normalised tokens, from X by hand: on the sphere, up to ε.
    u = (site.x[0] - shift) / (math.sqrt(24) * gain)
    assert float((u.norm(dim=-1) - 1).abs().max()) < 1e-3
    torch.testing.assert_close(centre + u @ axes.mT, site.x[0], rtol=1e-6, atol=1e-6)
    assert float(site.x.norm(dim=-1).max()) <= hs.bounds.norm_radius(site) * (1 + 1e-6)
    absorbed = absorb_norm(site.map, norm)
    torch.testing.assert_close(absorbed(u), site.map(site.x)[0], rtol=1e-6, atol=1e-6)


def test_bounds_of_a_site_hold() -> None:
    site = hs.capture(_model("bert"), token_ids(1, 6), layers=[1])[0]
    measured = float(hs.local_lipschitz(site.map, site.x).lower)
    best = hs.bounds.best(site)
    assert measured <= best.value
    certified = float(hs.bounds.certificate(site).value)
    assert measured <= certified
    # A search from the norm's outputs: above what is measured there, below what holds on the ball.
    found = ascend(site, random_starts=1, steps=3, atom_restarts=1, atom_steps=4)
    centre, axes = ellipsoid(site)
    u = torch.linalg.lstsq(axes, (found.x - centre).mT, driver="gelsd").solution
    assert float(u.norm(dim=0).max()) <= 1 + 1e-6
    torch.testing.assert_close(axes @ u, (found.x - centre).mT, rtol=0, atol=1e-8)
    assert found.x.shape == site.x.shape[1:]
    ball = hs.bounds.best(site, length=6, radius=hs.bounds.norm_radius(site))
    assert 0 < found.value <= ball.value


def test_a_search_on_a_site_may_have_another_domain_and_length() -> None:
    site = hs.capture(_model("bert"), token_ids(1, 6), layers=[0], scope="head", heads=[1])[0]
    found = ascend(site, 3, 2.0, random_starts=1, steps=2, atom_restarts=0)
    assert found.x.shape == (3, 24)
    assert float(found.x.norm(dim=-1).max()) <= 2.0 * (1 + 1e-9)
    near = hs.adversarial.Around(site.x[0], 0.1)
    assert ascend(site, domain=near, random_starts=0, steps=1, atom_restarts=0).x.shape == (6, 24)


@pytest.mark.parametrize(
    "ask",
    [
        hs.bounds.certificate,
        parameters_of,
        lambda site: constructions(site, 4, 1.0),
    ],
    ids=["certificate", "parameters", "constructions"],
)
def test_attention_without_matrices_is_refused_by_name(ask: Any) -> None:
    for kind, path, words in (
        (Gated, "closed form", "(attention in stages|Gated, 1 head)"),
        (Tilted, "autodiff", "the model's own Tilted"),
    ):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = kind().double().eval()
        site = hs.capture(module, tokens(0, 1, 5, 8))[0]
        assert site.path == path
        with pytest.raises(ArgumentError, match=rf"given by its matrices.*cannot use any other, got {words}"):
            ask(site)


@pytest.mark.parametrize("kind", [Gated, Tilted])
def test_no_bound_is_known_for_a_site_without_matrices(kind: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = kind().double().eval()
    site = hs.capture(module, tokens(0, 1, 5, 8))[0]
    for ask in (hs.bounds.best, hs.bounds.table):
        with pytest.raises(ArgumentError, match=r"no bound is known.*got .*local_lipschitz measures"):
            ask(site)
        with pytest.raises(ArgumentError, match=r"attention: .* no bound is known"):
            ask(site.map, length=5, radius=2.0)
    if kind is Gated:
        assert ascend(site, 5, 2.0, random_starts=1, steps=4).value > 0
    else:
        with pytest.raises(ArgumentError, match=r"given by its matrices.*got the model's own Tilted"):
            ascend(site, 5, 2.0)


def test_scores_and_scopes_that_bounds_do_not_know_are_named() -> None:
    gemma = hs.capture(_model("gemma2"), token_ids(1, 6), layers=[1])[0]
    with pytest.raises(ArgumentError, match="got soft-capped scores"):
        hs.bounds.lemma_3_8(gemma, 6, 1.0)
    bound = hs.bounds.best(gemma)
    assert bound.name == "certificate"
    assert float(hs.local_lipschitz(gemma.map, gemma.x).lower) <= bound.value
    assert hs.bounds.best(gemma, length=6).name == "any_scores_ball_upper_bound"
    block = hs.capture(_model("gpt2"), token_ids(1, 6), layers=[1], scope="block")[0]
    with pytest.raises(ArgumentError, match=r"out of a norm layer, got Site\(h\.1\.attn.*scope block"):
        hs.bounds.norm_radius(block)
    with pytest.raises(ArgumentError, match="a radius or a domain"):
        ascend(block)
