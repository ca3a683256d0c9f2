"""How strong the scores of each head can be: the eigenvalues and norms of its parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from howsmooth.bounds.parameters import Head, parameters_of, spectral_norm

__all__ = ["Strength", "strengths"]


@dataclass(frozen=True)
class Strength:
    """What the parameters of one head say by themselves.

    Attributes
    ----------
    gamma_min, gamma_max
        The smallest and the largest real eigenvalue of A; None if it has none.
    gamma
        max(−γ_min, γ_max/8), as in Proposition 3.4 of the paper.
    a_norm, v_norm
        ‖A‖, and ‖W V‖ with the head's part of the output projection.

    """

    gamma_min: float | None
    gamma_max: float | None
    gamma: float | None
    a_norm: float
    v_norm: float


def strengths(attention: object) -> list[Strength]:
    """Return the strength of every head.

    Parameters
    ----------
    attention
        As for :func:`howsmooth.bounds.parameters_of`.

    Raises
    ------
    ArgumentError
        If it is none of these, or has rotary positions.

    """
    parameters = parameters_of(attention)
    found = []
    for head, output in zip(parameters.heads, parameters.outputs, strict=True):
        values = _real_eigenvalues(head)
        low, high = (min(values), max(values)) if values else (None, None)
        gamma = None if low is None or high is None else max(-low, high / 8)
        # ‖W V‖ by the triangular factor of W: a matrix of value_dim rows instead of d_out.
        factor = torch.linalg.qr(output, mode="r").R
        found.append(Strength(low, high, gamma, head.A_norm, spectral_norm(factor @ head.V)))
    return found


def _real_eigenvalues(head: Head) -> list[float]:
    """List the real eigenvalues of A = left right: those of right left, and zero where A is singular."""
    singular = head.left.shape[1] < head.d
    small = head.right @ head.left if singular else head.A
    values = [value.real for value in torch.linalg.eigvals(small).tolist() if value.imag == 0]
    return [*values, 0.0] if singular else values
