"""Upper bounds on ‖D_X f‖ at given tokens in closed form, for one head with any mask and biases.

They are cheaper than the certificates, which are tighter for tokens of practical interest. Proofs:
documentation page "Certificates at given tokens", section "Local bounds in closed form".
"""

from __future__ import annotations

import math

import torch

from howsmooth.attention import SelfAttention
from howsmooth.bounds.ball_upper_bounds import largest_weight
from howsmooth.bounds.bound import Quantity
from howsmooth.bounds.bound_problem import Problem, at_tokens
from howsmooth.bounds.catalogue import CATALOGUE, OURS, PAPER, Statement, statement
from howsmooth.bounds.certificates import certificate
from howsmooth.bounds.log_numbers import Log, maximum, minimum
from howsmooth.rounding import gamma, spectral_norm_above

__all__ = ["diameter_upper_bound", "theorem_c_3", "yudin_theorem_3"]


def _norms_are_of_heads(p: Problem) -> bool:
    """Return whether norm layers of queries and keys act on each head separately, as certificates assume."""
    f = p.attention
    norms = (f.query_norm, f.key_norm) if isinstance(f, SelfAttention) else ()
    return all(norm is None or norm.d == f.key_dim for norm in norms)  # type: ignore[union-attr]


CATALOGUE["certificate"] = Statement(
    name="certificate",
    side="upper",
    quantity=Quantity.LOCAL,
    source=f'{OURS}"Certificates at given tokens"',
    formula=lambda p: certificate(p.attention, p.X).bound(),
    arguments=frozenset({"X"}),
    heads="any",
    masks="any",
    needs=(),
    listed=_norms_are_of_heads,
)


@statement(at_tokens, quantity=Quantity.LOCAL, source=f"{PAPER}, Theorem C.3 (R_A corrected)")
def theorem_c_3(p: Problem) -> Log:
    """Bound ‖D_X f‖ of one head at given tokens by a corrected version of Theorem C.3.

    The bound is ‖V‖ √(R_A² r² (n+1) + n) with R_A = max_i max(|A x_i + b|, |Aᵀ x_i|). r is the diameter of
    the tokens. The code published with the paper uses the maximum of |A x_i| alone as R_A. That is not a
    bound, because the Jacobian also contains C_i A, which depends on Aᵀ x_j.
    """
    largest = maximum(p.y.longest, p.transposed.longest)
    return p.V * (largest**2 * p.diameter**2 * (p.n + 1) + p.n) ** 0.5


@statement(
    at_tokens,
    quantity=Quantity.LOCAL,
    source=f'{OURS}"Certificates at given tokens", Theorem C.3 sharpened',
)
def diameter_upper_bound(p: Problem) -> Log:
    """Bound ‖D_X f‖ of one head at given tokens by a sharpened version of Theorem C.3.

    The bound is ‖V‖ (√(Σ_i min{1 + t_i²/8, (1 + t_i²/4) P̄(n_i, t_i/2)}) + r r_A/4). t_i is |A x_i + b| r, r
    is the diameter of the tokens x_i, r_A the diameter of the vectors Aᵀ x_i, n_i the number of keys that
    token i sees, and P̄(n, a) = 1/(1 + (n−1)e^{−2a}). The term of a row with n_i = 1 is 1.
    """
    t = Log.of(p.y.lengths) * p.diameter
    keys = p.visible.sum(dim=1).double()
    rows = minimum(1 + t**2 / 8, (1 + t**2 / 4) * largest_weight(keys, t.value / 2))
    rows = Log(torch.where(keys == 1, 0.0, rows.log))
    return p.V * (rows.sum() ** 0.5 + p.diameter * p.transposed.diameter / 4)


@statement(at_tokens, quantity=Quantity.LOCAL, source="Yudin et al. 2025, Theorem 3")
def yudin_theorem_3(p: Problem) -> Log:
    """Bound ‖D_X f‖ of one head at given tokens by Theorem 3 of Yudin et al. (2025).

    The bound is ‖V‖ (‖P‖ + 2 ‖X‖² ‖A‖ max_i g(P_i)) with g(p) = p₍₁₎ (1 − p₍₁₎ + p₍₂₎). ‖X‖ is the spectral
    norm of the matrix of tokens, and p₍₁₎ ≥ p₍₂₎ are the two largest entries of a row of P. With a query bias
    b, 2 ‖X‖² ‖A‖ becomes ‖X‖ (2 ‖X‖ ‖A‖ + √n |b|).
    """
    P, n = p.weights, p.n
    two = torch.cat([P, P.new_zeros(n, 1)], dim=1).topk(2, dim=1).values
    g = float((two[:, 0] * (1 - two[:, 0] + two[:, 1])).amax())
    # Where p rounds to one, 1 − p has an absolute error of the roundings of a sum of n weights.
    error = p.log_error_of_weights
    g = min(1.0, g * math.exp(error) + gamma(2 * n + 40))
    size = Log.of(spectral_norm_above(p.tokens))
    moved = size * (2 * size * Log(p.head.log_A_norm) + Log.of(n) ** 0.5 * p.head.b_norm)
    return p.V * (Log.of(spectral_norm_above(P)) * Log(error) + moved * g)
