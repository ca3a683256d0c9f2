"""Upper bounds on the Lipschitz constant of attention in the norm max_i |x_i| of sequences.

If every input token moves by at most ε, every output token moves by at most the constant times ε. The
bound on a ball does not depend on the number of tokens. Proofs: documentation page "Influence: the blocks of
the Jacobian", section "Token-wise bounds".
"""

from __future__ import annotations

import torch

from howsmooth.bounds.bound import Quantity
from howsmooth.bounds.bound_problem import Problem, at_tokens, for_every_length
from howsmooth.bounds.catalogue import OURS, statement
from howsmooth.bounds.log_numbers import Log
from howsmooth.bounds.multi_head_bounds import quadratic_form
from howsmooth.rounding import above, spectral_norm_above

__all__ = ["token_wise_ball_upper_bound", "token_wise_upper_bound"]

_PAGE = f'{OURS}"Influence: the blocks of the Jacobian"'


@statement(for_every_length, heads="any", quantity=Quantity.TOKEN_WISE, source=f"{_PAGE}, Theorem T")
def token_wise_ball_upper_bound(p: Problem) -> Log:
    """Bound the Lipschitz constant of attention on the ball B_R^n, for sequences with the norm max_i |x_i|.

    With a_h = ‖A_h‖R² and c_h = √(1 + (a_h + |b_h|R)²) + a_h, the bound is (Σ_{h,g} ‖O_hᵀO_g‖ c_h c_g)^{1/2},
    where O_h = W_h V_h; for one head it is ‖V‖ (√(1 + (‖A‖R² + |b|R)²) + ‖A‖R²). It holds for every number of
    tokens and every mask, and is attained in the limit n → ∞ by one head with A = aI, V = I and d ≥ 2.
    """
    bounds, R = [], Log.of(p.radius)
    for head in p.parameters.heads:
        a = Log(head.log_A_norm) * R**2
        bounds.append((1 + (a + head.b_norm * R) ** 2) ** 0.5 + a)
    return quadratic_form(bounds, p.parameters.outputs, [head.V for head in p.parameters.heads])


@statement(at_tokens, quantity=Quantity.LOCAL_TOKEN_WISE, source=f"{_PAGE}, Token-wise bounds")
def token_wise_upper_bound(p: Problem) -> Log:
    """Bound the operator norm of D_X f of one head at given tokens, for sequences with the norm max_i |x_i|.

    The bound is max_i (‖V Vᵀ + |A x_i + b|² V C_i Vᵀ‖^{1/2} + ‖V C_i A‖), where C_i is the covariance of
    the tokens under row i of P. It is at most :func:`token_wise_ball_upper_bound` on a ball that holds the
    tokens.
    """
    head, largest = p.head, 0.0
    for weights, length in zip(p.weights, p.y.lengths.tolist(), strict=True):
        z = weights.sqrt()[:, None] * (p.tokens - weights @ p.tokens)  # C_i = zᵀ z
        moved = z @ head.V.mT
        # ‖V Vᵀ + |y|² V C Vᵀ‖^{1/2} is the norm of V and |y| z Vᵀ side by side.
        values = spectral_norm_above(torch.cat((head.V.mT, length * moved)))
        keys = spectral_norm_above(moved.mT @ ((z @ head.left) @ head.right))
        largest = max(largest, values + keys)
    # A covariance about a mean that is off is larger than the covariance; products have four factors.
    roundings = 4 * (len(p.tokens) + head.d + sum(head.left.shape))
    return Log.of(above(largest, roundings)) * Log(p.log_error_of_weights)
