"""Every rule against what its operation does on the ball: values, norms and the Jacobian, at many tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from howsmooth.attention.custom_code_attention import SoftmaxCore
from howsmooth.bounds.pytorch_operation_bounds import NoRuleError
from howsmooth.bounds.recorded_operations_upper_bounds import Recording

N, D, R = 4, 6, 1.7
_DRAW = torch.Generator().manual_seed(7)


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=_DRAW)


W, B, C, P, S = _draw(D, D), _draw(D), _draw(N, D), _draw(N, N), _draw(N, 1)
CONV = _draw(3, D, 2)
HIDDEN = torch.tensor([[True, False, True, True], [True] * 4, [False, True, True, False], [True] * 4])


def _buffer(x: Tensor) -> Tensor:
    made = x.new_zeros(N, D + 2)
    made[:, 1:4] = x[:, :3]
    made[:, 6:] = 0.5
    made[:, 4:6] = 2 * x[:, 3:5]
    return made


def _in_place(x: Tensor) -> Tensor:
    y = x @ W
    y += B
    y.mul_(0.5)
    return y


def _gated(x: Tensor) -> Tensor:
    return (x @ W) * (x @ W.T)[:, :1].sigmoid()


def _heads(t: Tensor) -> Tensor:
    return t.view(N, 2, D // 2).transpose(0, 1)


def _eager(x: Tensor) -> Tensor:
    q, k, v = _heads(x @ W), _heads(x @ W.T), _heads(x)
    scores = (q @ k.transpose(1, 2) * 0.3).masked_fill(HIDDEN.tril().logical_not(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(N, D)


def _fused(x: Tensor) -> Tensor:
    q, k, v = (_heads(t)[None] for t in (x @ W, x @ W.T, x))
    bias = (x @ B[:, None]).T[None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)[0].transpose(0, 1).reshape(N, D)


# For each rule a function, and how much of the bound on the derivative is reached at least.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "linear map": (lambda x: F.linear(x, W, B), 0.99),
    "matrix from the left": (lambda x: P @ x, 0.99),
    "matrices of a batch": (lambda x: x[None].expand(2, N, D) @ torch.stack((W, W)), 0.99),
    "baddbmm": (lambda x: torch.baddbmm(C[None], x[None], W[None], beta=0.5, alpha=3.0), 0.99),
    "sum": (lambda x: x + 2.0 * x.roll(1, 0), 0.99),
    "sum with a constant": (lambda x: torch.add(C, x, alpha=-3.0), 0.99),
    "broadcast sum": (lambda x: x[:1] + x * 0.0, 0.5),
    "difference": (lambda x: x - x.flip(0), 0.99),
    "constant minus tokens": (lambda x: 1.0 - x, 0.99),
    "product with constants": (lambda x: x * C, 0.99),
    "product with one for each token": (lambda x: x * S, 0.99),
    "one for each token times constants": (lambda x: x[:, :1] * C, 0.99),
    "product": (lambda x: x * x.roll(1, 1), 0.49),
    "one number of a token times the token": (lambda x: x[:, :1] * x, 0.99),
    "gate": (_gated, 0.1),
    "quotient by constants": (lambda x: x / S, 0.99),
    "square": (lambda x: x.square(), 0.99),
    "second power": (lambda x: x**2, 0.99),
    "third power": (lambda x: x.pow(3), 0.99),
    "sum over tokens": (lambda x: x.sum(0), 0.99),
    "mean of a token": (lambda x: x.mean(-1, keepdim=True), 0.99),
    "sum of all": (lambda x: x.sum()[None], 0.99),
    "mean square": (lambda x: x.pow(2).mean(-1, keepdim=True), 0.99),
    "root of the mean square": (lambda x: (x.square().mean(-1, keepdim=True) + 1e-2).sqrt(), 0.8),
    "RMS norm": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2), 0.99),
    "RMS norm by division": (lambda x: x / ((x * x).sum(-1, keepdim=True) + 1e-2).sqrt(), 0.99),
    "inverse root": (lambda x: torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 0.04), 0.3),
    "inverse norm": (lambda x: 1.0 / x.norm(dim=-1, keepdim=True).clamp_min(0.1), 0.2),
    "product of matrices": (lambda x: x @ x.T, 0.55),
    "product of the transposed matrix": (lambda x: x.T @ x, 0.55),
    "unit length": (lambda x: F.normalize(x, dim=-1, eps=0.1), 0.9),
    "layer norm": (lambda x: F.layer_norm(x, (D,), B, C[0], 1e-2), 0.9),
    "batch norm": (lambda x: F.batch_norm(x, B, B.abs() + 0.1, C[0], C[1]), 0.99),
    "clamped": (lambda x: x.clamp(0.2, 0.9) + x.clamp_min(-0.3) - x.clamp_max(0.4), 0.3),
    "clamped from below, everywhere": (lambda x: x.clamp_min(2.0), 0.0),
    "negative": (lambda x: -x, 0.99),
    "absolute value": (lambda x: x.abs(), 0.99),
    "relu": (lambda x: x.relu(), 0.99),
    "tanh": (lambda x: x.tanh(), 0.99),
    "sigmoid": (lambda x: x.sigmoid(), 0.99),
    "silu": (lambda x: F.silu(3 * x), 0.97),
    "gelu": (lambda x: F.gelu(3 * x), 0.97),
    "gelu, tanh": (lambda x: F.gelu(3 * x, approximate="tanh"), 0.97),
    "hardswish": (lambda x: F.hardswish(9 * x), 0.9),
    "softplus": (lambda x: F.softplus(3 * x, beta=2.0), 0.9),
    "softplus of zero": (lambda x: F.softplus(0.0 * x, beta=0.5), 0.0),
    "sine": (lambda x: x.sin(), 0.99),
    "cosine": (lambda x: x.cos(), 0.9),
    "softmax": (lambda x: (3 * x).softmax(-1), 0.5),
    "softmax over tokens": (lambda x: (3 * x).softmax(0), 0.5),
    "convolution": (lambda x: F.conv1d(F.pad(x.T[None], (1, 0)), CONV, stride=1)[0], 0.4),
    "patches": (lambda x: F.conv1d(x.T[None], CONV, B[:3], stride=2)[0], 0.4),
    "selected": (lambda x: x.T.reshape(2, -1)[:, ::2].unsqueeze(0).permute(2, 1, 0), 0.99),
    "repeated": (lambda x: x.repeat(3, 1), 0.99),
    "gathered": (lambda x: x.gather(1, torch.tensor([[0, 0, 2], [1, 2, 3], [5, 5, 5], [0, 1, 2]])), 0.99),
    "indexed": (lambda x: x[torch.tensor([0, 2, 2, 1])], 0.99),
    "side by side": (lambda x: torch.cat((x, C, 2 * x.split(3, dim=1)[0]), dim=1), 0.8),
    "stacked": (lambda x: torch.stack((x, x)), 0.99),
    "chosen": (lambda x: torch.where(HIDDEN[:, :1], x, 2 * x), 0.8),
    "padded": (lambda x: F.pad(x, (1, 2), value=-3.0), 0.99),
    "written": (_buffer, 0.8),
    "in place": (_in_place, 0.99),
    "rotated": (lambda x: x * C[:, :1].cos() + torch.cat((-x[:, 3:], x[:, :3]), 1) * C[:, :1].sin(), 0.5),
    "eager attention": (_eager, 0.01),
    "fused attention with a bias of the tokens": (_fused, 0.01),
}


def _tokens() -> list[Tensor]:
    """Return tokens of the ball: random ones, long ones, equal ones, small ones, and single long entries."""
    directions = [_draw(N, D) for _ in range(6)]
    directions += [torch.eye(D, dtype=torch.float64)[torch.full((N,), i)] for i in range(D)]
    directions += [torch.ones(N, D, dtype=torch.float64)]
    unit = [t / t.norm(dim=-1, keepdim=True) for t in directions]
    return [s * R * t for t in unit for s in (1.0, -1.0, 0.5, 0.27, 0.1, 0.0)]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_holds_on_the_ball_and_is_not_far_from_it(name: str) -> None:
    f, share = CASES[name]
    found = Recording(_tokens()[0], R).range_of(f)
    steepest = 0.0
    for x in _tokens():
        y = f(x)
        assert y.shape == found.size.shape
        assert bool((y.abs() <= found.size).all())
        assert bool((torch.linalg.vector_norm(y, dim=-1) <= found.norm).all())
        jacobian = torch.autograd.functional.jacobian(f, x, vectorize=True).reshape(y.numel(), -1)
        steepest = max(steepest, float(torch.linalg.matrix_norm(jacobian, 2)))
    assert share * found.slope <= steepest <= found.slope


@pytest.mark.parametrize("core", ["plain", "causal", "window", "mask", "sinks", "cap", "grouped"])
def test_softmax_attention_holds_for_tangents_of_queries_keys_and_values(core: str) -> None:
    features = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": 2},
        "mask": {"mask": HIDDEN},
        "sinks": {"sinks": _draw(2)},
        "cap": {"softcap": 0.7},
        "grouped": {},
    }[core]
    softmax = SoftmaxCore(1.3, **features)  # type: ignore[arg-type]
    key_heads = 1 if core == "grouped" else 2

    def f(x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q = (x @ W).view(N, 2, 3).transpose(0, 1)
        k, v = (t.view(N, 2, 3).transpose(0, 1)[:key_heads] for t in (x @ W.T, x * S + B))
        return attend(0, q, k, v)

    recording = Recording(_tokens()[0], R)
    found = recording.range_of(lambda x: f(x, recording.core((softmax,))))
    steepest = 0.0
    for x in _tokens():

        def plain(x: Tensor) -> Tensor:
            return f(x, lambda _, *qkv: softmax.attend(*qkv))

        y = plain(x)
        assert bool((y.abs() <= found.size).all())
        assert bool((torch.linalg.vector_norm(y, dim=-1) <= found.norm).all())
        jacobian = torch.autograd.functional.jacobian(plain, x, vectorize=True).reshape(y.numel(), -1)
        steepest = max(steepest, float(torch.linalg.matrix_norm(jacobian, 2)))
    assert 0.01 * found.slope <= steepest <= found.slope


@pytest.mark.parametrize("part", ["queries", "keys", "values", "bias"])
def test_softmax_attention_of_one_argument_that_moves(part: str) -> None:
    """With the others constant, each term of the bound is reached up to a small factor."""
    fixed = {"queries": 2 * C, "keys": -C, "values": C.flip(0)}

    def f(x: Tensor) -> Tensor:
        q, k, v = (x if name == part else fixed[name] for name in ("queries", "keys", "values"))
        bias = (x @ W)[:, :N] if part == "bias" else None
        return F.scaled_dot_product_attention(
            q[None, None], k[None, None], v[None, None], attn_mask=bias, scale=0.4
        )[0, 0]

    found = Recording(_tokens()[0], R).range_of(f)
    jacobians = [
        torch.autograd.functional.jacobian(f, x, vectorize=True).reshape(N * D, -1) for x in _tokens()
    ]
    steepest = max(float(torch.linalg.matrix_norm(j, 2)) for j in jacobians)
    assert 0.05 * found.slope <= steepest <= found.slope


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda x: x.topk(2, dim=-1).values, "topk"),
        (lambda x: x * (x.sum() > 0), "gt"),
        (lambda x: x if float(x.sum()) > 0 else -x, "_local_scalar_dense"),
        (lambda x: x / x.norm(dim=-1, keepdim=True), "may be zero"),
        (lambda x: x / (x.square().sum(-1) + 1.0).sqrt()[:, None], "a root"),
        (lambda x: x.sqrt(), "a root"),
        (lambda x: x.argsort(-1), "argsort|sort"),
        (lambda x: x[x[:, 0].long()], "_to_copy"),
        (lambda x: torch.ones(N, D), "does not depend on the tokens"),
        (lambda x: x + math.inf, "not finite"),
        (lambda x: x.view(-1)[:3].mul_(2.0) + x.view(-1)[3:6], "writes into a part"),
        (lambda x: F.batch_norm(x, B.clone(), B.abs(), training=True), "in training"),
        (lambda x: 2.0**x, "the operation pow"),
    ],
)
def test_an_operation_without_a_rule_is_named(f: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(NoRuleError, match=words):
        Recording(_tokens()[0].clone(), R).range_of(f)
