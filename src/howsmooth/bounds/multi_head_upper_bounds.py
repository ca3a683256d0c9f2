"""Upper bounds on the Lipschitz constant of multi-head attention f(X) = Σ_h W_h f_h(X) on a ball.

Each function combines upper bounds L_h on the heads f_h, which include their value matrices V_h
(:func:`head_upper_bound`). Proofs: documentation page "Bounds on a ball", section "Several heads".
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.bounds.attention_parameters import (
    Head,
    Parameters,
    log_size,
    log_spectral_norm,
    parameters_of,
    unit,
)
from howsmooth.bounds.ball_upper_bounds import (
    OURS,
    PAPER,
    log_product,
    log_sum,
    mean_field_upper_bound,
    upper,
)
from howsmooth.bounds.bound import Bound, Hypothesis, Quantity, check_length, check_radius
from howsmooth.bounds.masked_ball_upper_bounds import causal_mean_field_upper_bound, masked_ball_upper_bound

__all__ = [
    "folded_gram_upper_bound",
    "gram_upper_bound",
    "head_upper_bound",
    "lemma_3_8",
    "output_norm_upper_bound",
]


def head_upper_bound(attention: SelfAttention | Parameters, length: object, radius: object) -> Bound:
    """Return the smallest upper bound on Lip(f on B_R^n) for one head with its mask: Theorem A, or the bound
    that does not depend on n.
    """
    candidates = (
        masked_ball_upper_bound(attention, length, radius),
        mean_field_upper_bound(attention, radius),
        causal_mean_field_upper_bound(attention, radius),
    )
    return min(candidates, key=lambda bound: bound.log_value)


def lemma_3_8(attention: object, length: object, radius: object) -> Bound:
    """Bound the Lipschitz constant of multi-head attention by Lemma 3.8 of the paper.

    The bound is Σ_h ‖W_h‖ L_h, where W_h is the output map of head h and L_h an upper bound on the head.

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.SelfAttention` with any number of heads and any mask, or a
        captured site.
    length
        Number n >= 1 of tokens.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper bound on Lip(f on B_R^n), with the hypotheses of the bounds on the heads.

    Raises
    ------
    ArgumentError
        If there are rotary positions, or length or radius do not fit.

    References
    ----------
    Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, Lemma 3.8.

    """
    parameters = parameters_of(attention)
    logs, hypotheses = _bounds_of_heads(parameters, length, radius)
    terms = [
        log_product(log_spectral_norm(W), log_l) for W, log_l in zip(parameters.outputs, logs, strict=True)
    ]
    return upper("lemma_3_8", _quantity(parameters), f"{PAPER}, Lemma 3.8", log_sum(*terms), *hypotheses)


def output_norm_upper_bound(attention: object, length: object, radius: object) -> Bound:
    """Bound the Lipschitz constant of multi-head attention by the norm of its output projection W_O.

    The bound is ‖W_O‖ (Σ_h L_h²)^{1/2}, where L_h is an upper bound on head h.

    Parameters
    ----------
    attention, length, radius
        As for :func:`lemma_3_8`.

    Returns
    -------
    Bound
        Upper bound on Lip(f on B_R^n), with the hypotheses of the bounds on the heads.

    Raises
    ------
    ArgumentError
        As for :func:`lemma_3_8`.

    References
    ----------
    Documentation page "Bounds on a ball", section "Several heads".

    """
    parameters = parameters_of(attention)
    logs, hypotheses = _bounds_of_heads(parameters, length, radius)
    squares = log_sum(*(2 * log_l for log_l in logs))
    return upper(
        "output_norm_upper_bound",
        _quantity(parameters),
        f"{OURS}, Several heads",
        log_product(log_spectral_norm(parameters.W), 0.5 * squares),
        *hypotheses,
    )


def gram_upper_bound(attention: object, length: object, radius: object) -> Bound:
    """Bound the Lipschitz constant of multi-head attention by upper bounds on its heads and the norms
    ‖W_hᵀ W_g‖, where W_h is the output map of head h.

    The bound is (Σ_{h,g} ‖W_hᵀ W_g‖ L_h L_g)^{1/2}, where W_h is the output map of head h and L_h an upper
    bound on the head. It is at most the bound of Lemma 3.8, and sharper the more orthogonal the output maps
    of different heads are.

    Parameters
    ----------
    attention, length, radius
        As for :func:`lemma_3_8`.

    Returns
    -------
    Bound
        Upper bound on Lip(f on B_R^n), with the hypotheses of the bounds on the heads.

    Raises
    ------
    ArgumentError
        As for :func:`lemma_3_8`.

    References
    ----------
    Documentation page "Bounds on a ball", section "Several heads".

    """
    parameters = parameters_of(attention)
    logs, hypotheses = _bounds_of_heads(parameters, length, radius)
    return upper(
        "gram_upper_bound",
        _quantity(parameters),
        f"{OURS}, Several heads",
        log_quadratic_form(list(parameters.outputs), logs),
        *hypotheses,
    )


def folded_gram_upper_bound(attention: object, length: object, radius: object) -> Bound:
    """Bound the Lipschitz constant of multi-head attention by upper bounds on its heads and the norms
    ‖(W_h V_h)ᵀ W_g V_g‖, where W_h is the output map of head h and V_h its value matrix.

    The bound is (Σ_{h,g} ‖O_hᵀ O_g‖ c_h c_g)^{1/2} with O_h = W_h V_h. V_h is factorised into a triangular
    matrix, which moves to the output map, and a matrix of orthonormal rows. c_h is the upper bound on head h
    with this matrix in place of V_h. For bounds proportional to ‖V‖, as all of this library are, the result
    is at most :func:`gram_upper_bound`.
    """
    parameters = parameters_of(attention)
    heads, maps, sizes = [], [], []
    for head, W in zip(parameters.heads, parameters.outputs, strict=True):
        rows, triangle = torch.linalg.qr(unit(head.V).mT)  # V = triangleᵀ rowsᵀ, up to its size
        heads.append(Head((head.left, head.right), rows.mT, head.b))
        maps.append(unit(W) @ triangle.mT)
        sizes.append(log_size(W) + log_size(head.V))
    balanced = replace(parameters, heads=tuple(heads), outputs=tuple(maps))
    logs, hypotheses = _bounds_of_heads(balanced, length, radius)
    logs = [log_product(*pair) for pair in zip(logs, sizes, strict=True)]
    return upper(
        "folded_gram_upper_bound",
        _quantity(parameters),
        f"{OURS}, Several heads",
        log_quadratic_form(maps, logs),
        *hypotheses,
    )


def log_quadratic_form(maps: list[Tensor], logs: list[float]) -> float:
    """Return the log of an upper bound on the Lipschitz constant of multi-head attention, given the logs of
    bounds on its heads.

    It is log (Σ_{h,g} ‖M_hᵀ M_g‖ e^{l_h + l_g})^{1/2} for the output maps M_h and the logarithms l_h of
    bounds on heads.
    """
    terms = []
    for h, M in enumerate(maps):
        terms.append(log_product(2 * log_spectral_norm(M), 2 * logs[h]))
        terms += [
            log_product(math.log(2) + log_spectral_norm(M.mT, maps[g]), logs[h], logs[g]) for g in range(h)
        ]
    return 0.5 * log_sum(*terms)


def _bounds_of_heads(
    parameters: Parameters, length: object, radius: object
) -> tuple[list[float], tuple[Hypothesis, ...]]:
    """Return an upper bound for each head, as a logarithm, and all hypotheses of these bounds."""
    n, R = check_length(length), check_radius(radius)
    logs: list[float] = []
    holds: dict[str, bool] = {}
    for head in parameters.heads:
        identity = torch.eye(head.V.shape[0], dtype=torch.float64)
        alone = replace(parameters, heads=(head,), outputs=(identity,))
        bound = head_upper_bound(alone, n, R)
        logs.append(bound.log_formula)
        for hypothesis in bound.hypotheses:
            holds[hypothesis.statement] = holds.get(hypothesis.statement, True) and hypothesis.holds
    return logs, tuple(Hypothesis(statement, value) for statement, value in holds.items())


def _quantity(parameters: Parameters) -> Quantity:
    return Quantity.MASKED if parameters.masking == "causal" else Quantity.GLOBAL
