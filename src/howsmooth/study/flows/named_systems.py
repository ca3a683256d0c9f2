"""Build the attention of named systems, after Geshkovski, Letrouit, Polyanskiy, Rigollet (2023, 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from howsmooth.attention import L2Attention, SelfAttention, SinkhornAttention, TokenMap
from howsmooth.seeds import derive_seed
from howsmooth.study.flows.flow_plan import FlowPlan

__all__ = ["SYSTEMS", "build_system"]


Matrices = Callable[[int, torch.Generator], tuple[Tensor, Tensor, Tensor]]
"""A function of the dimension d and a generator that returns the matrices Q, K, V of shape (d, d)."""


def _eye(d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64)


def _one_direction(d: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    value = -0.5 * _eye(d)
    value[0, 0] = 1.0
    return _eye(d), _eye(d), value


def _turning(d: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    value = _eye(d)
    if d > 1:
        value[:2, :2] = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    return _eye(d), _eye(d), value


def _random(d: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, d, d, generator=generator, dtype=torch.float64) / d**0.5
    return query, key, value


SYSTEMS: Mapping[str, tuple[str, Matrices]] = {
    "identity": ("queries, keys and values are the tokens", lambda d, _: (_eye(d),) * 3),
    "negative": (
        "queries and keys are the tokens, values their negatives",
        lambda d, _: (_eye(d), _eye(d), -_eye(d)),
    ),
    "one-direction": ("values grow along the first axis and shrink along the others", _one_direction),
    "turning": ("values are the tokens, turned and stretched in the first plane", _turning),
    "random": ("queries, keys and values by Gaussian matrices", _random),
}
"""A description and the matrices of each named system. Random matrices come from the generator."""


def build_system(plan: FlowPlan, d: int) -> TokenMap:
    """Build the attention of a named system in dimension d; random matrices depend on the plan's seed.

    Scores are β⟨q_i, k_j⟩, or −β|q_i − k_j|² for the attention ``l2``. ``sinkhorn`` makes the attention
    weights doubly stochastic.
    """
    seed = derive_seed(purpose="system", name=plan.source, seed=plan.seed)
    matrices = SYSTEMS[plan.source][1](d, torch.Generator().manual_seed(seed))
    query, key, value = (matrix[None] for matrix in matrices)
    if plan.attention == "l2":
        return L2Attention(query, key, value, scale=plan.beta, causal=plan.causal)
    if plan.attention == "sinkhorn":
        return SinkhornAttention(query, key, value, scale=plan.beta)
    return SelfAttention(query, key, value, scale=plan.beta, causal=plan.causal)
