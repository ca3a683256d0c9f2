"""hs.qkv_sensitivity against dense Jacobians in queries, keys and values, and against closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention.scaled_dot_product import attend
from howsmooth.errors import ArgumentError
from tests._cases import CASES, random_attention, tokens
from tests._tiny_models import tiny, token_ids

N = 6
OPERANDS = ("query", "key", "value")
LAYERS = [name for name in CASES if isinstance(CASES[name](N), hs.SelfAttention)]


def jacobians(f: hs.SelfAttention, x: Tensor) -> tuple[Tensor, ...]:
    """The dense derivatives (outputs, heads, n, dim) of the layer in its queries, keys and values."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = f._grouped(q)[None], k[None], v[None], f.scale, f.visibility(len(x))
        return f._projected(attend(*given, features=f.features))[0]

    found = torch.func.jacrev(layer, (0, 1, 2))(*f.projections(x))
    return tuple(j.flatten(0, 1) for j in found)


@pytest.mark.parametrize("name", LAYERS)
def test_norms_are_those_of_the_dense_jacobian(name: str) -> None:
    f, x = CASES[name](N), tokens(3, N, 6)
    assert isinstance(f, hs.SelfAttention)
    found = hs.qkv_sensitivity(f, x)
    for operand, dense in zip(OPERANDS, jacobians(f, x), strict=True):
        part = getattr(found, operand)
        truth = torch.linalg.matrix_norm(dense.movedim(1, 0).flatten(2), 2)
        assert torch.allclose(part.value, truth, rtol=1e-3)
        assert bool((part.lower <= truth * (1 + 1e-12)).all())
        assert bool((truth * (1 - 1e-12) <= part.upper).all())
        assert bool(part.converged.all())
        one = torch.linalg.matrix_norm(dense.permute(1, 2, 0, 3), 2)
        assert torch.allclose(part.tokens, one, rtol=1e-7, atol=1e-9)
        assert torch.allclose(part.entries, dense.norm(dim=0), rtol=1e-7, atol=1e-9)


def test_one_head_without_output_has_the_norm_of_its_probabilities() -> None:
    f, x = random_attention(31, heads=1, d_out=None, causal=True), tokens(4, 9, 6)
    q, k = f.queries_and_keys(x)
    scores = f.scale * (q[0] @ k[0].mT)
    p = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(dim=-1)
    found = hs.qkv_sensitivity(f, x, rtol=1e-8).value
    assert float(found.value) == pytest.approx(float(torch.linalg.matrix_norm(p, 2)), rel=1e-8)
    assert torch.allclose(found.tokens[0], p.norm(dim=0))


def test_a_site_gives_the_operands_of_the_cache() -> None:
    model, ids = tiny("llama", torch.float64), token_ids(1, 8)
    (site,) = hs.capture(model, ids, layers=[1])
    cache = model(ids, use_cache=True).past_key_values
    _, k, v = site.map.projections(site.x[0])
    assert torch.allclose(k, cache.layers[1].keys[0], atol=1e-12)
    assert torch.allclose(v, cache.layers[1].values[0], atol=1e-12)
    found = hs.qkv_sensitivity(site)
    assert torch.equal(found.key.tokens, hs.qkv_sensitivity(site.map, site.x[0]).key.tokens)
    table, by_token = found.to_pandas(), found.tokens()
    assert list(table["operand"].value_counts()[list(OPERANDS)]) == [4, 2, 2]
    row = by_token[(by_token["operand"] == "key") & (by_token["head"] == 1)].iloc[5]
    assert (row["position"], row["value"]) == (5, float(found.key.tokens[1, 5]))
    assert "query" in repr(found)


def test_wrong_arguments_are_named() -> None:
    f, x = random_attention(1), tokens(1, 5, 6)
    with pytest.raises(ArgumentError, match="residual"):
        hs.qkv_sensitivity(hs.capture(tiny("gpt2"), token_ids(1, 5), layers=[0], scope="residual")[0])
    with pytest.raises(ArgumentError, match="2 sequences"):
        hs.qkv_sensitivity(hs.capture(tiny("gpt2"), token_ids(2, 5), layers=[0])[0])
    with pytest.raises(ArgumentError, match="SelfAttention"):
        hs.qkv_sensitivity(hs.LayerNorm(x[0], x[1]), x)
    with pytest.raises(ArgumentError, match="one sequence"):
        hs.qkv_sensitivity(f, x[None])
    with pytest.raises(ArgumentError, match="seed"):
        hs.qkv_sensitivity(f, x, seed=-1)
