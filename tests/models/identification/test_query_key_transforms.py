"""Queries and keys that are normed, turned or scaled: read by value, against scores written out naively."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import LayerNorm, RMSNorm, Rotary, SelfAttention
from howsmooth.models import inspect_model
from howsmooth.models.identification.query_key_transforms import (
    FittedRotary,
    ProjectionReading,
    fit_rotary,
    projection_readings,
    reordered,
)
from tests.architectures.build import build, inputs_of

HEADS, KV_HEADS, DIM, N, D = 4, 2, 8, 6, 12
RMS = RMSNorm(torch.linspace(0.5, 1.5, DIM, dtype=torch.float64), 1e-6)
OF_QUERIES = RMSNorm(torch.linspace(0.5, 1.5, HEADS * DIM, dtype=torch.float64), 1e-6)
OF_KEYS = RMSNorm(torch.linspace(1.4, 0.3, KV_HEADS * DIM, dtype=torch.float64), 1e-6)
CENTRED = LayerNorm(RMS.weight, torch.linspace(-1, 1, DIM, dtype=torch.float64), 1e-5)


def _weights(heads: int, seed: int) -> Tensor:
    return torch.randn(heads * DIM, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = torch.randn(N, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
W_Q, W_K = _weights(HEADS, 1), _weights(KV_HEADS, 2)
ANGLES = torch.arange(N, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 0.05, 0.007]).double()


def _turn(t: Tensor, pairs: list[tuple[int, int]], angles: Tensor = ANGLES) -> Tensor:
    """Turn pairs of entries of (heads, n, dim), one by one."""
    out = t.clone()
    for j, (a, b) in enumerate(pairs):
        c, s = angles[:, j].cos(), angles[:, j].sin()
        out[..., a], out[..., b] = t[..., a] * c - t[..., b] * s, t[..., a] * s + t[..., b] * c
    return out


LAYOUTS = {
    "half-split": [(0, 4), (1, 5), (2, 6), (3, 7)],
    "interleaved": [(0, 1), (2, 3), (4, 5), (6, 7)],
    "half-split, partial": [(0, 2), (1, 3)],
    "interleaved, partial": [(0, 1), (2, 3)],
}


def _heads(weight: Tensor, x: Tensor = X) -> Tensor:
    return (x @ weight.mT).unflatten(-1, (-1, DIM)).transpose(0, 1)


def _read(
    q: Tensor, k: Tensor, norms: tuple[RMSNorm | LayerNorm, ...] = ()
) -> tuple[ProjectionReading, ProjectionReading, FittedRotary] | None:
    outputs = torch.cat((X @ W_Q.mT, X @ W_K.mT), dim=1)
    columns = torch.arange(outputs.shape[1])
    for a in projection_readings(q, outputs, [columns[: HEADS * DIM], columns[-HEADS * DIM :]], norms):
        for b in projection_readings(k, outputs, [columns[: KV_HEADS * DIM], columns[HEADS * DIM :]], norms):
            found = fit_rotary(a, b)
            if found is not None:
                return a, b, found
    return None


def _normed(norm: RMSNorm | LayerNorm | None, heads: Tensor) -> Tensor:
    """Heads (h, n, dim) after a norm of each, or, with OF_QUERIES, after one of all heads together."""
    if norm is None:
        return heads
    if norm is OF_QUERIES:
        together = OF_QUERIES if len(heads) == HEADS else OF_KEYS
        return together(heads.transpose(0, 1).flatten(1)).unflatten(1, (-1, DIM)).transpose(0, 1)
    return norm(heads)


@pytest.mark.parametrize("norm", [None, RMS, CENTRED, OF_QUERIES])
@pytest.mark.parametrize("factor", [1.0, DIM**-0.5, 0.37])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_the_scores_of_what_is_read_are_those_of_the_layer(
    layout: str | None, factor: float, norm: RMSNorm | LayerNorm | None
) -> None:
    pairs = LAYOUTS[layout] if layout else []

    def queries_and_keys(x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = _heads(W_Q, x), _heads(W_K, x)
        q, k = _normed(norm, q), _normed(norm, k)
        return factor * _turn(q, pairs), _turn(k, pairs)

    read = _read(*queries_and_keys(X), () if norm is None else (RMS, CENTRED, OF_QUERIES, OF_KEYS))
    assert read is not None
    a, b, found = read
    assert found.factor == pytest.approx(factor, rel=1e-14)
    if factor != 0.37:
        assert a.factor == factor  # not what rounding left of it
    assert (found.rotary is None) == (layout is None)
    weights = [w.unflatten(0, (-1, DIM))[:, found.order] for w in (W_Q, W_K)]
    attention = SelfAttention(
        *weights,
        torch.eye(D, dtype=torch.float64)[None].expand(KV_HEADS, D, D),
        scale=found.factor,
        rotary=found.rotary,
        query_norm=reordered(a.norm, found.order),
        key_norm=reordered(b.norm, found.order),
    )
    other = X.flip(0) * 1.7 + 0.3  # the reading has not seen these tokens
    q, k = queries_and_keys(other)
    p = (q @ k.repeat_interleave(2, dim=0).mT).softmax(dim=-1)
    torch.testing.assert_close(attention(other), (p @ other).transpose(0, 1).flatten(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("factor", [1.0, DIM**-0.5])
def test_tables_in_float32_with_a_factor_of_their_own_are_read_in_float64(factor: float) -> None:
    cos, sin = ((1.3466 * table).float().double().repeat(1, 2) for table in (ANGLES.cos(), ANGLES.sin()))
    turn = Rotary(cos, sin).rotate
    q, k = factor * turn(_heads(W_Q)), turn(_heads(W_K))
    read = _read(q, k)
    assert read is not None
    a, b, found = read
    assert found.rotary is not None
    q_read, k_read = (found.rotary.rotate(one.base[..., found.order]) for one in (a, b))
    scores = found.factor * (q_read @ k_read.repeat_interleave(2, dim=0).mT)
    torch.testing.assert_close(scores, q @ k.repeat_interleave(2, dim=0).mT, rtol=0, atol=1e-12)


def test_no_rotation_is_found_where_there_is_none_in_common() -> None:
    q, k = _heads(W_Q), _heads(W_K)
    pairs = LAYOUTS["half-split"]
    assert _read(_turn(q, pairs), _turn(k, pairs)) is not None
    assert _read(_turn(q, pairs), _turn(k, pairs, 1.01 * ANGLES)) is None
    one = _turn(q, pairs)
    one[2] = _turn(q[2:3], pairs, ANGLES + 0.01)[0]  # a head of its own
    assert _read(one, _turn(k, pairs)) is None
    swapped = _turn(q, pairs)
    swapped[1, 3, 0] *= 1.001
    assert _read(swapped, _turn(k, pairs)) is None


def test_a_norm_that_is_not_the_layers_is_not_read() -> None:
    q, k = RMS(_heads(W_Q)), RMS(_heads(W_K))
    assert _read(q, k, (CENTRED,)) is None
    assert _read(q, k) is None


@pytest.mark.parametrize(
    ("model_type", "positions", "normed"),
    [
        ("opt", "none", False),
        ("gpt_oss", "rotary", False),
        ("qwen3", "rotary", True),
        ("olmo2", "rotary", True),
    ],
)
def test_models_of_which_every_parameter_is_known_now(model_type: str, positions: str, normed: bool) -> None:
    model = build(model_type)
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs_of(model_type, model).items()}
    found = inspect_model(model.float(), inputs)
    assert {site.path_reason for site in found.sites} == {"every parameter is known"}
    assert {site.positions for site in found.sites} == {positions}
    (site, *_) = hs.capture(model, inputs)
    assert isinstance(site.map, SelfAttention)
    assert (site.map.query_norm is not None) == (site.map.key_norm is not None) == normed
    assert (site.map.rotary is None) == (positions == "none")


def test_a_head_under_a_norm_of_all_heads_is_taken_alone_in_stages() -> None:
    model = build("olmo2").requires_grad_(False)
    inputs = inputs_of("olmo2", model)
    (together,) = hs.capture(model, inputs, layers=0, scope="heads")
    alone = hs.capture(model, inputs, layers=0, scope="head")
    assert isinstance(together.map, SelfAttention)
    assert "acts on all heads together" in alone[0].path_reason
    heads = torch.cat([site.map(site.x) for site in alone], dim=-1)
    torch.testing.assert_close(heads, together.map(together.x), rtol=1e-6, atol=1e-6)
    assert len(hs.capture(model, inputs, layers=0, scope="head", heads=[1, 3])) == 2


def test_interleaved_positions_become_half_split_ones() -> None:
    """The tables of GPT-J are those of its own code, and its weights those of the model in another order."""
    model = build("gptj").float()
    (site, *_) = hs.capture(model, inputs_of("gptj", model))
    attention = model.h[0].attn
    rotary = site.map.rotary
    assert isinstance(rotary, Rotary)
    width, n = rotary.rot_dim, site.x.shape[1]
    sin, cos = attention.embed_positions[:n].chunk(2, dim=-1)
    torch.testing.assert_close(rotary.cos, cos.repeat(1, 2), rtol=0, atol=2e-5)
    torch.testing.assert_close(rotary.sin, sin.repeat(1, 2), rtol=0, atol=2e-5)
    order = [*range(0, width, 2), *range(1, width, 2), *range(width, site.map.key_dim)]
    own = attention.q_proj.weight.unflatten(0, (site.map.heads, -1))[:, order]
    torch.testing.assert_close(site.map.query, own, rtol=0, atol=0)
