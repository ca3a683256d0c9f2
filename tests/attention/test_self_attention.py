"""The maps against independent implementations, and their argument checks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import howsmooth as hs
from howsmooth.attention.map import as_parameter
from howsmooth.errors import ArgumentError, NonFiniteError
from tests._cases import CASES, D, random_attention, rotary, tokens


@pytest.mark.parametrize("causal", [False, True])
def test_equals_torch_multihead_attention(causal: bool) -> None:
    heads, head_dim, n = 4, 3, 7
    d = heads * head_dim
    theirs = nn.MultiheadAttention(d, heads, batch_first=True, dtype=torch.float64).requires_grad_(False)
    theirs.in_proj_bias.copy_(torch.randn(3 * d))
    theirs.out_proj.bias.copy_(torch.randn(d))
    q, k, v = theirs.in_proj_weight.view(3, heads, head_dim, d)
    bq, bk, bv = theirs.in_proj_bias.view(3, heads, head_dim)
    ours = hs.SelfAttention(
        q,
        k,
        v,
        theirs.out_proj.weight,
        query_bias=bq,
        key_bias=bk,
        value_bias=bv,
        output_bias=theirs.out_proj.bias,
        causal=causal,
    )
    x = tokens(0, 2, n, d)
    blocked = torch.ones(n, n).triu(1).bool() if causal else None
    expected, _ = theirs(x, x, x, attn_mask=blocked, need_weights=False)
    torch.testing.assert_close(ours(x), expected, rtol=1e-12, atol=1e-12)


def test_grouped_heads_equal_repeated_heads() -> None:
    grouped = random_attention(0, heads=6, kv_heads=2)

    def repeated(t: torch.Tensor) -> torch.Tensor:
        return t.repeat_interleave(3, dim=0)

    full = hs.SelfAttention(
        grouped.query,
        repeated(grouped.key),
        repeated(grouped.value),
        grouped.output,
        query_bias=grouped.query_bias,
        key_bias=repeated(grouped.key_bias),
        value_bias=repeated(grouped.value_bias),
        output_bias=grouped.output_bias,
    )
    x = tokens(1, 5, D)
    torch.testing.assert_close(grouped(x), full(x), rtol=1e-13, atol=1e-13)


def test_causal_map_is_the_unmasked_map_of_each_prefix() -> None:
    causal, plain = random_attention(2, causal=True), random_attention(2)
    x = tokens(2, 6, D)
    rows = torch.stack([plain(x[: i + 1])[i] for i in range(6)])
    torch.testing.assert_close(causal(x), rows, rtol=1e-12, atol=1e-12)


def test_unmasked_map_is_permutation_equivariant() -> None:
    f, x = random_attention(3), tokens(3, 6, D)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(f(x[order]), f(x)[order], rtol=1e-12, atol=1e-12)


def test_key_bias_has_no_effect_without_rotary() -> None:
    f = random_attention(4)
    without = f._rebuilt(key_bias=None)
    x = tokens(4, 6, D)
    torch.testing.assert_close(f(x), without(x), rtol=1e-12, atol=1e-12)


def test_heads_concatenated_and_single_heads_agree() -> None:
    f, x = random_attention(5, heads=4, kv_heads=2), tokens(5, 3, 6, D)
    single = torch.cat([f.head(h)(x) for h in range(4)], dim=-1)
    torch.testing.assert_close(f.without_output()(x), single, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(f(x), single @ f.output.mT + f.output_bias, rtol=1e-12, atol=1e-12)


def test_rotary_is_a_rotation_by_relative_position() -> None:
    table = rotary(9, 4)
    q, k = tokens(6, 1, 4).expand(9, 4), tokens(7, 1, 4).expand(9, 4)
    scores = table.rotate(q) @ table.rotate(k).mT
    # Only the difference of the positions matters: the scores are constant along diagonals.
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-12, atol=1e-12)
    u, w = tokens(8, 9, 6), tokens(9, 9, 6)
    torch.testing.assert_close((table.rotate(u) * w).sum(), (u * table.rotate_adjoint(w)).sum())


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_norms_equal_torch(eps: float) -> None:
    gain, shift, x = tokens(1, D), tokens(2, D), tokens(3, 2, 4, D)
    torch.testing.assert_close(
        hs.LayerNorm(gain, shift, eps)(x), nn.functional.layer_norm(x, (D,), gain, shift, eps)
    )
    torch.testing.assert_close(hs.RMSNorm(gain, eps)(x), nn.functional.rms_norm(x, (D,), gain, eps))


@pytest.mark.parametrize("name", CASES)
def test_to_changes_dtype_and_nothing_else(name: str) -> None:
    f, x = CASES[name](5), tokens(4, 5, D)
    single = f.to(dtype=torch.float32)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single(x.float()).double(), f(x), rtol=1e-4, atol=1e-4)
    assert single.describe() == f.describe()


def _parameters() -> dict[str, torch.Tensor]:
    return {"query": torch.ones(2, 3, 4), "key": torch.ones(2, 3, 4), "value": torch.ones(2, 3, 4)}


@pytest.mark.parametrize(
    ("changes", "argument", "words"),
    [
        ({"query": torch.ones(3, 4)}, "query", "(heads, key_dim, d)"),
        ({"query": torch.ones(2, 3, 4, dtype=torch.half)}, "query", "float16"),
        ({"query": torch.ones(2, 3, 4, dtype=torch.int64)}, "query", "int64"),
        ({"key": torch.ones(2, 3, 5)}, "key", "(2, 3, 5)"),
        ({"key": torch.ones(2, 3, 4).double()}, "key", "float64"),
        ({"query": torch.ones(3, 3, 4)}, "key", "divides"),
        ({"value": torch.ones(1, 3, 4)}, "value", "(1, 3, 4)"),
        ({"output": torch.ones(5, 5)}, "output", "(d_out, 6)"),
        ({"query_bias": torch.ones(3)}, "query_bias", "(2, 3)"),
        ({"output_bias": torch.ones(4)}, "output_bias", "output"),
        ({"output": torch.ones(5, 6), "output_bias": torch.ones(4)}, "output_bias", "(5)"),
        ({"scale": float("nan")}, "scale", "nan"),
        ({"mask": torch.ones(4, 4)}, "mask", "boolean"),
        ({"mask": torch.ones(4, 5, dtype=torch.bool)}, "mask", "(4, 5)"),
        ({"mask": torch.eye(4, dtype=torch.bool).logical_not(), "causal": True}, "mask", "query 0"),
        ({"rotary": rotary(4, 6, torch.float32)}, "rotary", "key_dim = 3"),
        ({"rotary": rotary(4, 2)}, "rotary.cos", "float64"),
    ],
)
def test_refusals_name_argument_and_remedy(changes: dict, argument: str, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        hs.SelfAttention(**(_parameters() | changes))
    assert caught.value.argument == argument
    assert words in str(caught.value)


def test_refuses_parameters_that_are_no_tensors() -> None:
    with pytest.raises(ArgumentError, match=r"query: expected a floating-point tensor .* got list"):
        as_parameter("query", [[1.0]], ("heads", "d"))


def test_refuses_parameters_that_are_not_finite() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteError, match="value"):
            hs.SelfAttention(**(_parameters() | {"value": torch.full((2, 3, 4), bad)}))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.ones(4), "shape (4,)"),
        (torch.ones(3, 5), "(..., n, 4)"),
        (torch.ones(0, 4), "n >= 1"),
        (torch.ones(3, 4).double(), "float64"),
    ],
)
def test_refuses_tokens_that_do_not_fit(x: torch.Tensor, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        hs.SelfAttention(**_parameters())(x)
    assert caught.value.argument == "X"
    assert words in str(caught.value)


def test_mask_and_rotary_fix_the_length() -> None:
    masked = random_attention(0, mask=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="n = 4"):
        masked(tokens(0, 5, D))
    turned = random_attention(0, rotary=rotary(4, 2))
    with pytest.raises(ArgumentError, match="at most 4"):
        turned(tokens(0, 5, D))


def test_compositions_refuse_what_does_not_fit() -> None:
    wide = random_attention(0, d_out=9)
    with pytest.raises(ArgumentError, match="d_out = 9"):
        hs.Residual(wide)
    with pytest.raises(ArgumentError, match="dimension 9"):
        hs.Compose(hs.RMSNorm(torch.ones(D).double()), wide)
    with pytest.raises(ArgumentError, match="float32"):
        hs.Compose(hs.RMSNorm(torch.ones(D)), random_attention(0))
    with pytest.raises(ArgumentError, match="0 to 2"):
        random_attention(0).head(3)
    with pytest.raises(ArgumentError, match="eps"):
        hs.RMSNorm(torch.ones(D), eps=-1.0)


def test_the_matrices_of_one_head_without_an_axis_of_heads_are_refused_with_the_remedy() -> None:
    w = torch.eye(3)
    with pytest.raises(ArgumentError, match=r"got shape \(3, 3\)\. For a single head give query\[None\]\."):
        hs.SelfAttention(w, w, w)
    one = hs.SelfAttention(w[None], w[None], w[None])
    assert one.heads == 1
