"""Seeds: every bit counts, wherever a user gives one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.lipschitz.singular_value_solver import member_seeds
from howsmooth.measures import Gaussian
from howsmooth.nn.penalty.singular_value import Directions
from howsmooth.seeds import random_stream, torch_seed
from tests._cases import D, random_attention, tokens

EYE = torch.eye(3, dtype=torch.float64)


def test_every_bit_counts() -> None:
    for seed in (0, 12345, 2**40 + 7, -3):
        flipped = [torch_seed((seed % 2**64) ^ (1 << bit)) for bit in range(64)]
        assert len({torch_seed(seed), *flipped}) == 65
        assert all(0 <= one < 2**32 for one in flipped)


def test_small_seeds_are_pytorchs_own() -> None:
    assert [torch_seed(seed) for seed in (0, 1, 2**32 - 1)] == [0, 1, 2**32 - 1]


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**63 + 5])
def test_members_of_a_batch_have_streams_of_their_own(seed: int) -> None:
    """Those of a neighbouring seed are others, too, and none is a stream of PyTorch."""
    seeds = [*member_seeds(seed, 20_000), *member_seeds(seed + 1, 20_000)]
    drawn = [random_stream(one).standard_normal(2) for one in seeds]
    assert len({tuple(two) for two in drawn}) == 40_000
    mean, spread = np.mean(drawn, axis=0), np.cov(np.array(drawn).T)
    assert np.abs(mean).max() < 0.03
    assert np.abs(spread - np.eye(2)).max() < 0.05
    tokens_of_a_user = torch.randn(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert abs(tokens_of_a_user.numpy() - drawn[0]).max() > 1e-3


def _direction(seed: int) -> Tensor:
    f, x = random_attention(0), tokens(0, 2, 4, D)
    return hs.local_lipschitz(f, x, seed=seed, max_iterations=1).input_direction


DRAWS: dict[str, Callable[[int], Tensor]] = {
    "local_lipschitz": _direction,
    "local_lipschitz, a seed a member": lambda seed: (
        hs.local_lipschitz(
            random_attention(0), tokens(0, 1, 4, D), seed=[seed], max_iterations=1
        ).input_direction
    ),
    "a sample of a Gaussian": lambda seed: Gaussian(EYE[0], EYE).sample(4, seed=seed).points,
    "directions of a penalty": lambda seed: Directions(seed).draw((3, 2), EYE),
}


@pytest.mark.parametrize("name", DRAWS)
def test_seeds_that_differ_by_a_high_bit_draw_otherwise(name: str) -> None:
    draw = DRAWS[name]
    drawn = [draw(seed) for seed in (5, 5 + 2**32, 5 + 2**33, 5 + 2**62)]
    for i, one in enumerate(drawn):
        assert torch.equal(one, draw((5, 5 + 2**32, 5 + 2**33, 5 + 2**62)[i]))
        assert not any(torch.equal(one, other) for other in drawn[i + 1 :])
