"""The sensitivity to each entry of keys and values against dense Jacobians."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention.scaled_dot_product import attend
from howsmooth.profiling.entry_sensitivities import entry_sensitivities
from tests._cases import CASES, tokens
from tests._tiny_models import tiny, token_ids

N = 6
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
    for found, dense in zip(entry_sensitivities(f, x), jacobians(f, x)[1:], strict=True):
        assert torch.allclose(found, dense.norm(dim=0), rtol=1e-7, atol=1e-9)


def test_the_keys_and_values_are_those_of_the_cache() -> None:
    model, ids = tiny("llama", torch.float64), token_ids(1, 8)
    (site,) = hs.capture(model, ids, layers=[1])
    cache = model(ids, use_cache=True).past_key_values
    _, k, v = site.map.projections(site.x[0])
    assert torch.allclose(k, cache.layers[1].keys[0], atol=1e-12)
    assert torch.allclose(v, cache.layers[1].values[0], atol=1e-12)
