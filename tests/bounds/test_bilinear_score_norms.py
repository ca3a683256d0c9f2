"""Norms of the forms of scores against dense matrices of every pair of positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from howsmooth.attention import Rotary
from howsmooth.attention.masks import Visibility
from howsmooth.bounds.bilinear_score_norms import BilinearScoreNorms, largest_spectral_norm
from tests._cases import tokens


def rotary(n: int, rot_dim: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Rotary:
    """The tables of Llama, of which those in float32 are off by rounding."""
    speeds = 10_000.0 ** (-torch.arange(0, rot_dim, 2, dtype=dtype) / rot_dim)
    angles = torch.arange(n, dtype=dtype)[:, None] * speeds.repeat(2)
    return Rotary(scale * angles.cos(), scale * angles.sin()).to(dtype=torch.float64)


def dense(turn: Rotary, weights: tuple[Tensor, ...], seen: Visibility) -> list[float]:
    """The largest norm of each form over the pairs that are seen, from turned queries and keys."""
    n, largest = seen.n, [0.0] * 4
    # Queries and keys of every unit token at every position, (d, n, key_dim), and biases (n, key_dim)
    query, key = (turn.rotate(t.mT[:, None].expand(-1, n, -1)) for t in weights[:2])
    b_q, b_k = (turn.rotate(t.expand(n, -1)) for t in weights[2:])
    every = torch.ones(n, n, dtype=torch.bool)
    pairs = every.tril() if seen.causal else every
    pairs = pairs if seen.window is None else pairs.triu(1 - seen.window).tril(seen.window - 1)
    for i, j in pairs.nonzero().tolist():
        forms = (
            torch.linalg.matrix_norm(key[:, j] @ query[:, i].mT, 2),
            (key[:, j] @ b_q[i]).norm(), (query[:, i] @ b_k[j]).norm(), (b_q[i] @ b_k[j]).abs(),
        )  # fmt: skip
        largest = [max(old, float(new)) for old, new in zip(largest, forms, strict=True)]
    return largest


def found(turn: Rotary, weights: tuple[Tensor, ...], seen: Visibility) -> list[float]:
    norms = BilinearScoreNorms.with_rotary_positions(turn, *weights, seen)
    assert norms is not None
    return [norms.tokens, norms.query_bias, norms.key_bias, norms.biases]


def head(seed: int, key_dim: int, d: int) -> tuple[Tensor, ...]:
    return (*tokens(seed, 2, key_dim, d), *tokens(seed + 1, 2, key_dim))


@pytest.mark.parametrize(
    ("key_dim", "d", "rot_dim", "scale"), [(6, 9, 6, 1.0), (8, 5, 4, 1.3), (4, 3, 4, 0.2), (2, 1, 2, 1)]
)
@pytest.mark.parametrize(
    "seen", [Visibility(7, True, None), Visibility(7, False, None), Visibility(7, False, 3)]
)
def test_the_norms_are_those_of_the_steepest_pair(
    key_dim: int, d: int, rot_dim: int, scale: float, seen: Visibility
) -> None:
    weights = head(key_dim + d, key_dim, d)
    for dtype, excess in ((torch.float64, 1e-8), (torch.float32, 1e-5)):
        turn = rotary(7, rot_dim, scale=scale, dtype=dtype)
        exact = dense(turn, weights, seen)
        got = found(turn, weights, seen)
        # The spectral norm is an upper limit of its own, at most one percent above.
        for i, (ours, wanted) in enumerate(zip(got, exact, strict=True)):
            assert wanted <= ours <= wanted * (1.01 if i == 0 else 1 + excess) + excess


def test_tables_that_are_no_rotations_keep_the_norms_upper_bounds() -> None:
    seen = Visibility(5, False, None)
    for seed in range(20):
        turn = Rotary(*(tokens(100 + seed, 2, 5, 4)))
        weights = head(seed, 4, 3)
        for ours, wanted in zip(found(turn, weights, seen), dense(turn, weights, seen), strict=True):
            assert wanted <= ours


def test_without_positions() -> None:
    query, key, b_q, b_k = head(3, 4, 6)
    norms = BilinearScoreNorms.without_positions(query, key, b_q, b_k)
    exact = (
        torch.linalg.matrix_norm(key.mT @ query, 2),
        (key.mT @ b_q).norm(),
        (query.mT @ b_k).norm(),
        (b_q @ b_k).abs(),
    )
    got = (norms.tokens, norms.query_bias, norms.key_bias, norms.biases)
    for ours, wanted in zip(got, exact, strict=True):
        assert float(wanted) <= ours <= float(wanted) * (1 + 1e-9)
    bare = BilinearScoreNorms.without_positions(query, key, None, None)
    assert (bare.query_bias, bare.key_bias, bare.biases) == (0.0, 0.0, 0.0)


def test_so_many_offsets_are_left_out() -> None:
    query, key, *_ = head(5, 2, 2)
    turn = rotary(2, 2)
    turn = Rotary(turn.cos[:1].expand(20_000, 2), turn.sin[:1].expand(20_000, 2))
    many, few = Visibility(20_000, True, None), Visibility(20_000, True, 30)
    assert BilinearScoreNorms.with_rotary_positions(turn, query, key, None, None, many) is None
    assert BilinearScoreNorms.with_rotary_positions(turn, query, key, None, None, few) is not None


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_the_largest_spectral_norm(size: float) -> None:
    for seed, shape in enumerate([(1, 1, 1), (9, 4, 4), (30, 3, 8), (5, 8, 2)]):
        matrices = tokens(seed, *shape)
        matrices[-1] *= 1e-3
        exact = float(torch.linalg.matrix_norm(matrices, 2).max())
        assert exact * size <= largest_spectral_norm(matrices * size) <= 1.0101 * exact * size
    # A matrix of rank one is the largest, though another one has a larger Frobenius norm.
    matrices = torch.stack([torch.eye(64), torch.zeros(64, 64)]).double() * size
    matrices[1, 3, 5] = 1.2 * size
    assert 1.2 * size <= largest_spectral_norm(matrices) <= 1.22 * size
    assert largest_spectral_norm(torch.zeros(3, 2, 2, dtype=torch.float64)) == 0.0
