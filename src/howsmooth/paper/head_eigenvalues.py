"""Compute the real eigenvalues and the norm of each head's score matrix A.

The scores of a head are ⟨A x_i + b, x_j⟩, so A determines how large they can be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from howsmooth.bounds.attention_parameters import Head, parameters_of, spectral_norm

__all__ = ["HeadEigenvalues", "head_eigenvalues"]


@dataclass(frozen=True)
class HeadEigenvalues:
    """The extreme real eigenvalues of one head's score matrix A, and the norms of its parameters.

    The scores of the head are ⟨A x_i + b, x_j⟩.

    Attributes
    ----------
    gamma_min, gamma_max
        The smallest and the largest real eigenvalue of A; None if A has no real eigenvalue.
    gamma
        max(−γ_min, γ_max/8), as in Proposition 3.4 of the paper; None if A has no real eigenvalue.
    a_norm, v_norm
        The spectral norms ‖A‖, and ‖W V‖ with W the head's part of the output projection.

    """

    gamma_min: float | None
    gamma_max: float | None
    gamma: float | None
    a_norm: float
    v_norm: float


def head_eigenvalues(attention: object) -> list[HeadEigenvalues]:
    """Return the extreme real eigenvalues and the norms of the parameters of every head.

    Parameters
    ----------
    attention
        An attention that :func:`howsmooth.bounds.parameters_of` accepts.

    Raises
    ------
    ArgumentError
        If it is another object, or has rotary positions.

    """
    parameters = parameters_of(attention)
    found = []
    for head, output in zip(parameters.heads, parameters.outputs, strict=True):
        values = _real_eigenvalues(head)
        low, high = (min(values), max(values)) if values else (None, None)
        gamma = None if low is None or high is None else max(-low, high / 8)
        # W = Q R with orthonormal columns of Q, so ‖W V‖ = ‖R V‖: R has value_dim rows instead of d_out.
        factor = torch.linalg.qr(output, mode="r").R
        found.append(HeadEigenvalues(low, high, gamma, head.A_norm, spectral_norm(factor @ head.V)))
    return found


def _real_eigenvalues(head: Head) -> list[float]:
    """Return the real eigenvalues of a head's score matrix A.

    A is the product left · right. A has the same nonzero eigenvalues as the smaller matrix right · left. If A
    is singular, zero is added.
    """
    singular = head.left.shape[1] < head.d
    small = head.right @ head.left if singular else head.A
    values = [value.real for value in torch.linalg.eigvals(small).tolist() if value.imag == 0]
    return [*values, 0.0] if singular else values
