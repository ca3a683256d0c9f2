"""Cross-attention as a map of two sequences, against plain PyTorch and dense Jacobians."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import StagedCrossAttention
from howsmooth.errors import ArgumentError
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.scopes import SIDES

M, N, D, D_MEMORY = 4, 6, 3, 5


def random_cross_attention(
    seed: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    d_out: int | None = 7,
    temperature: float = 1.0,
    **options: object,
) -> hs.CrossAttention:
    """Cross-attention with Gaussian parameters, from tokens of dimension D to a memory of another one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return hs.CrossAttention(
        draw(heads, 2, D) * temperature,
        draw(kv_heads, 2, D_MEMORY),
        draw(kv_heads, 3, D_MEMORY),
        None if d_out is None else draw(d_out, heads * 3),
        query_bias=draw(heads, 2),
        key_bias=draw(kv_heads, 2),
        value_bias=draw(kv_heads, 3),
        output_bias=None if d_out is None else draw(d_out),
        **options,  # type: ignore[arg-type]
    )


def sequences(seed: int, m: int = M, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, D, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, D_MEMORY, generator=generator, dtype=torch.float64)


def plain(f: hs.CrossAttention, x: Tensor, y: Tensor) -> Tensor:
    """The definition, head by head."""
    heads = []
    for h in range(f.heads):
        g = h // (f.heads // f.kv_heads)
        q = x @ f.query[h].T + f.query_bias[h]
        k, v = y @ f.key[g].T + f.key_bias[g], y @ f.value[g].T + f.value_bias[g]
        scores = f.scale * q @ k.T
        if f.softcap is not None:
            scores = f.softcap * torch.tanh(scores / f.softcap)
        if f.score_bias is not None:
            scores = scores + f.score_bias[h if len(f.score_bias) > 1 else 0]
        if f.mask is not None:
            scores = scores.masked_fill(~f.mask, -math.inf)
        heads.append(torch.softmax(scores, dim=1) @ v)
    out = torch.cat(heads, dim=1)
    return out if f.output is None else out @ f.output.T + f.output_bias


def padding(n: int) -> Tensor:
    return (torch.arange(n) < n - 2)[None]


def cases() -> dict[str, hs.CrossAttention]:
    bias = torch.randn(4, M, N, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return {
        "plain": random_cross_attention(0),
        "heads side by side": random_cross_attention(1, d_out=None, scale=1.0),
        "padding": random_cross_attention(2, mask=padding(N)),
        "mask, bias, cap": random_cross_attention(
            3, mask=padding(N).repeat(M, 1), score_bias=bias, softcap=2.0
        ),
    }


@pytest.mark.parametrize("name", cases())
def test_values_and_constants(name: str) -> None:
    f = cases()[name]
    x, y = sequences(0)
    torch.testing.assert_close(f(x, y), plain(f, x, y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(f(torch.stack((x, 2 * x)), torch.stack((y, y)))[1], f(2 * x, y))
    of_x, of_y = torch.func.jacrev(lambda x, y: plain(f, x, y), argnums=(0, 1))(x, y)
    dense = {"queries": of_x.flatten(2).flatten(0, 1), "memory": of_y.flatten(2).flatten(0, 1)}
    dense["joint"] = torch.cat((dense["queries"], dense["memory"]), dim=1)
    for side in SIDES:
        view, z = f.view(side, x, y), f.tokens(side, x, y)
        torch.testing.assert_close(view(z), f(x, y))
        found = hs.local_lipschitz(view, z, rtol=1e-8)
        assert found.method == "closed form"
        assert float(found.value) == pytest.approx(float(torch.linalg.matrix_norm(dense[side], 2)), rel=1e-8)
        assert bool(found.converged)
        # float32 work, judged in float64
        single = f.to(dtype=torch.float32)
        low = hs.local_lipschitz(single.view(side, x.float(), y.float()), z.float())
        assert float(low.value) == pytest.approx(float(found.value), rel=1e-3)
        # in memory O((m + n) d), by blocks
        blocks = closed_form_jacobian(view, z[None], streamed=True)
        e = found.input_direction[None]
        assert float(blocks.product(e).norm()) == pytest.approx(float(found.value), rel=1e-8)
        by_autodiff = hs.local_lipschitz(view, z, rtol=1e-8, method="autodiff")
        assert float(by_autodiff.value) == pytest.approx(float(found.value), rel=1e-8)


def test_joint_direction_splits() -> None:
    f = cases()["plain"]
    x, y = sequences(0)
    found = hs.local_lipschitz(f.view("joint", x, y), f.joined(x, y), rtol=1e-10)
    dx, dy = f.apart(found.input_direction, M)
    assert dx.shape == x.shape
    assert dy.shape == y.shape
    _, moved = torch.func.jvp(f, (x, y), (dx.contiguous(), dy.contiguous()))
    assert float(moved.norm()) == pytest.approx(float(found.value), rel=1e-8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": torch.zeros(1, N, dtype=torch.bool)}, "query 0 sees none"),
        ({"mask": torch.ones(1, N)}, r"mask: .*boolean"),
        ({"score_bias": torch.zeros(3, M, N, dtype=torch.float64)}, r"\(4, m, n\) or \(1, m, n\)"),
        ({"kv_heads": 3}, "divides the 4 query heads"),
        ({"softcap": -1.0}, "softcap"),
    ],
)
def test_bad_parameters(options: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        random_cross_attention(0, **options)  # type: ignore[arg-type]


def test_bad_sequences() -> None:
    f = cases()["mask, bias, cap"]
    x, y = sequences(0)
    for bad, words in (
        ((x[:2], y), "m = 4 tokens, the rows of the mask"),
        ((x, y[:3]), "n = 6 tokens, the columns of the mask"),
        ((x.float(), y), "float64"),
        ((x, x), r"rows, 5"),
        ((x[None], y), "leading axes"),
    ):
        with pytest.raises(ArgumentError, match=words):
            f(*bad)
    with pytest.raises(ArgumentError, match="queries, memory, joint"):
        f.view("both", x, y)


@pytest.mark.parametrize(
    "use", [hs.local_lipschitz, hs.bounds.best, lambda f, x: hs.adversarial.ascend(f, len(x), 1.0)]
)
def test_functions_of_one_sequence_name_the_way_to_one(use) -> None:
    with pytest.raises(ArgumentError, match=r"f\.view\(side, x, memory\)"):
        use(random_cross_attention(1), sequences(1)[0])


def test_a_layer_that_is_code() -> None:
    f = cases()["plain"]

    class Layer:
        def __init__(self, f: hs.CrossAttention) -> None:
            self.f = f

        def to(self, **placed: object) -> Layer:
            return Layer(self.f.to(**placed))  # type: ignore[arg-type]

        def run(self, x: Tensor, memory: Tensor, core: object) -> Tensor:
            return torch.tanh(self.f.run(x, memory, core))  # type: ignore[arg-type]

    staged = StagedCrossAttention(
        Layer(f), f.cores, d=D, d_memory=D_MEMORY, d_out=7, heads=4, m=M, n=N, dtype=f.dtype, device=f.device
    )
    x, y = sequences(1)
    of_y = torch.func.jacrev(lambda y: torch.tanh(plain(f, x, y)))(y).flatten(2).flatten(0, 1)
    found = hs.local_lipschitz(staged.view("memory", x, y), y, rtol=1e-8)
    assert float(found.value) == pytest.approx(float(torch.linalg.matrix_norm(of_y, 2)), rel=1e-8)
    with pytest.raises(ArgumentError, match="6 tokens, as captured"):
        staged(x, y[:2])
