"""One tile of softmax attention: parts of the keys, and whole rows, against PyTorch's derivatives."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import jvp, vjp

from howsmooth.jacobian.softmax_tile import Tile, WholeRows, derivative_in_own_query
from tests._cases import tokens

B, ROWS, N, KEY_DIM, VALUE_DIM, CUT = 2, 4, 7, 3, 5, 3
CAP = 1.5


def heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(CAP * torch.tanh(q @ k.mT / CAP), dim=-1) @ v


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, ROWS, KEY_DIM), (B, N, KEY_DIM), (B, N, VALUE_DIM)
    q, k, v = (tokens(seed + i, *shape) for i, shape in enumerate(shapes))
    return q, k, v


def probabilities(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """P, and P∘D with the derivative D of the cap."""
    tanh = torch.tanh(q @ k.mT / CAP)
    p = torch.softmax(CAP * tanh, dim=-1)
    return p, p * (1 - tanh**2)


def test_parts_of_the_keys_and_whole_rows_give_the_derivative_of_softmax_attention() -> None:
    (q, k, v), (dq, dk, dv), u = drawn(0), drawn(3), tokens(9, B, ROWS, VALUE_DIM)
    (p, slope), (output, tangent) = probabilities(q, k), jvp(heads, (q, k, v), (dq, dk, dv))
    cotangents = vjp(heads, q, k, v)[1](u)
    common = (u * output).sum(dim=-1, keepdim=True)
    sums, found = None, [torch.zeros_like(q), [], []]
    for some in (slice(0, CUT), slice(CUT, N)):
        of_keys = slope[..., some].contiguous()
        tile = Tile(q, k[:, some], v[:, some], p[..., some].contiguous(), of_keys, of_keys)
        sums = tile.tangent(dq, dk[:, some], dv[:, some], sums)
        s, _ = tile.scores_adjoint(u, common)
        found[0] += s @ tile.k
        found[1].append(s.mT @ q)
        found[2].append(tile.p.mT @ u)
    assert sums is not None
    torch.testing.assert_close(sums[0] - sums[1] * output, tangent)
    torch.testing.assert_close((found[0], *(torch.cat(part, dim=1) for part in found[1:])), cotangents)
    # One query head, on an axis of its own.
    x = {"q": q[:, None], "k": k[:, None], "v": v[:, None]}
    rows = WholeRows(x, 1.0, p[:, None], CAP, torch.tanh(q @ k.mT / CAP)[:, None])
    torch.testing.assert_close(rows.value()[:, 0], output)
    moved = {"q": dq[:, None], "k": dk[:, None], "v": dv[:, None]}
    torch.testing.assert_close(rows.tangent(moved)[:, 0], tangent)
    whole = rows.adjoint(u[:, None], "qkv")
    torch.testing.assert_close(tuple(whole[name][:, 0] for name in "qkv"), cotangents)
    second = jvp(lambda *y: vjp(heads, *y)[1](u), (q, k, v), (dq, dk, dv))[1]
    again = rows.second(u[:, None], moved, None, "qkv")
    torch.testing.assert_close(tuple(again[name][:, 0] for name in "qkv"), second)


def test_the_derivative_in_the_own_query_keeps_its_digits_where_one_key_has_all_the_weight() -> None:
    q, k, v = drawn(20)
    large = 40 * q
    p, slope = probabilities(q, k)
    own = derivative_in_own_query(p, slope, v, k)
    dense = torch.func.jacrev(heads)(q, k, v).diagonal(dim1=0, dim2=3).diagonal(dim1=0, dim2=2)
    torch.testing.assert_close(own, dense.permute(2, 3, 0, 1))
    # Without a cap one key has nearly all; what is left is far smaller than the terms of the sum.
    p = torch.softmax(large @ k.mT, dim=-1)
    own = derivative_in_own_query(p, p, v, k)
    scores = large @ k.mT
    order = scores.argmax(dim=-1, keepdim=True)
    rest = torch.exp(scores - scores.gather(-1, order)).scatter(-1, order, 0.0)
    rest = rest / (1 + rest.sum(dim=-1, keepdim=True))
    away = v[:, None] - v.gather(1, order.expand(-1, -1, VALUE_DIM))[:, :, None]
    mean = (rest[..., None] * away).sum(dim=2, keepdim=True)
    near = k[:, None] - k.gather(1, order.expand(-1, -1, KEY_DIM))[:, :, None]
    exact = (rest[..., None] * (away - mean)).mT @ near
    size = exact.abs().amax(dim=(-2, -1), keepdim=True)
    assert float(p.amax(dim=-1).max()) > 1 - 1e-12
    torch.testing.assert_close(own / size, exact / size, rtol=0, atol=1e-12)
