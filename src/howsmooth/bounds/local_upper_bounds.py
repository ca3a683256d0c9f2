"""Upper bounds on ‖D_X f‖ at given tokens in closed form, for one head with any mask and biases.

They are cheaper than the certificates, which are tighter for tokens of practical interest. Proofs:
documentation page "Certificates at given tokens", section "Local bounds in closed form".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.bounds.attention_parameters import (
    Head,
    SiteLike,
    largest_distance,
    log_largest_weight,
    parameters_of,
)
from howsmooth.bounds.bound import Bound, Quantity
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.rounding import spectral_norm_above

__all__ = [
    "OneHead",
    "diameter_upper_bound",
    "theorem_c_3",
    "yudin_theorem_3",
]

_PAPER = "Castin, Ablin, Peyré, ICML 2024, {}"
_OURS = 'howsmooth documentation, "Certificates at given tokens", {}'

# Norms and distances of tokens are rounded up by this relative error, far above the error of float64.
_MARGIN = 1e-12


def theorem_c_3(attention: object, X: Tensor | None = None) -> Bound:
    """Bound ‖D_X f‖ of one head at given tokens by a corrected version of Theorem C.3.

    The bound is ‖V‖ √(R_A² r² (n+1) + n) with R_A = max_i max(|A x_i + b|, |Aᵀ x_i|). r is the diameter of
    the tokens. The code published with the paper uses the maximum of |A x_i| alone as R_A. That is not a
    bound, because the Jacobian also contains C_i A, which depends on Aᵀ x_j.

    Parameters
    ----------
    attention
        One head: a :class:`~howsmooth.attention.SelfAttention`, a captured site or a
        :class:`~howsmooth.bounds.Head`.
    X
        Tokens (n, d), or None for the tokens of the site.

    Returns
    -------
    Bound
        Upper bound on ‖D_X f‖.

    Raises
    ------
    ArgumentError
        If there are several heads, rotary positions, or an argument does not fit.
    NonFiniteError
        If an entry of X is NaN or infinite.

    References
    ----------
    Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, Theorem C.3.

    """
    at = OneHead.at(attention, X, "theorem_c_3")
    n, r = len(at.X), _diameter(at.X)
    largest = max(_largest(at.y), _largest(at.transposed))
    return _upper(
        "theorem_c_3",
        _PAPER.format("Theorem C.3 (R_A corrected)"),
        at.head.log_V_norm + 0.5 * _log_sum(2 * (_log(largest) + _log(r)) + math.log(n + 1), math.log(n)),
    )


def diameter_upper_bound(attention: object, X: Tensor | None = None) -> Bound:
    """Bound ‖D_X f‖ of one head at given tokens by a sharpened version of Theorem C.3.

    The bound is ‖V‖ (√(Σ_i min{1 + t_i²/8, (1 + t_i²/4) P̄(n_i, t_i/2)}) + r r_A/4). t_i is |A x_i + b| r, r
    is the diameter of the tokens x_i, r_A the diameter of the vectors Aᵀ x_i, n_i the number of keys that
    token i sees, and P̄(n, a) = 1/(1 + (n−1)e^{−2a}). The term of a row with n_i = 1 is 1.

    Parameters
    ----------
    attention, X
        As for :func:`theorem_c_3`.

    Returns
    -------
    Bound
        Upper bound on ‖D_X f‖.

    Raises
    ------
    ArgumentError
        If there are several heads, rotary positions, or an argument does not fit.
    NonFiniteError
        If an entry of X is NaN or infinite.

    """
    at = OneHead.at(attention, X, "diameter_upper_bound")
    r, r_A = _diameter(at.X), _diameter(at.transposed)
    logs = []
    for size, count in zip(_norms(at.y), at.visible.sum(dim=1).tolist(), strict=True):
        if count == 1:
            logs.append(0.0)
            continue
        log_t2 = 2 * (_log(size) + _log(r) + _MARGIN)
        by_spread = _log_sum(0.0, log_t2 - math.log(8))
        by_weight = _log_sum(0.0, log_t2 - math.log(4)) + log_largest_weight(
            count, size * r * (1 + _MARGIN) / 2
        )
        logs.append(min(by_spread, by_weight))
    top = max(logs)
    rows = 0.5 * (top + math.log(math.fsum(math.exp(log - top) for log in logs)))
    diagonal = _log(r) + _log(r_A) - math.log(4)
    return _upper(
        "diameter_upper_bound",
        _OURS.format("Theorem C.3 sharpened"),
        at.head.log_V_norm + _log_sum(rows, diagonal),
    )


def yudin_theorem_3(attention: object, X: Tensor | None = None) -> Bound:
    """Bound ‖D_X f‖ of one head at given tokens by Theorem 3 of Yudin et al. (2025).

    The bound is ‖V‖ (‖P‖ + 2 ‖X‖² ‖A‖ max_i g(P_i)) with g(p) = p₍₁₎ (1 − p₍₁₎ + p₍₂₎). ‖X‖ is the spectral
    norm of the matrix of tokens, and p₍₁₎ ≥ p₍₂₎ are the two largest entries of a row of P. With a query bias
    b, 2 ‖X‖² ‖A‖ becomes ‖X‖ (2 ‖X‖ ‖A‖ + √n |b|).

    Parameters
    ----------
    attention, X
        As for :func:`theorem_c_3`.

    Returns
    -------
    Bound
        Upper bound on ‖D_X f‖.

    Raises
    ------
    ArgumentError
        If there are several heads, rotary positions, or an argument does not fit.
    NonFiniteError
        If an entry of X is NaN or infinite.

    References
    ----------
    Yudin et al., 2025, Theorem 3.

    """
    at = OneHead.at(attention, X, "yudin_theorem_3")
    P = at.weights
    n = len(P)
    two = torch.cat([P, torch.zeros(n, 1, dtype=P.dtype)], dim=1).topk(2, dim=1).values
    g = float((two[:, 0] * (1 - two[:, 0] + two[:, 1])).amax())
    # A rounding error δ of the scores changes a weight p by a factor e^{2δ} at most. Where p rounds to one,
    # 1 − p has an absolute error of n units of rounding.
    largest_score = _largest(at.y) * _largest(at.X)
    moved_by = min(4 * (2 * at.X.shape[1] + 10) * 2.0**-53 * largest_score + _MARGIN, 700.0)
    g = min(1.0, g * math.exp(moved_by) + n * 2.0**-52)
    size = spectral_norm_above(at.X)
    moved = _log_sum(
        math.log(2) + 2 * _log(size) + at.head.log_A_norm,
        _log(size) + _log(at.head.b_norm) + math.log(n) / 2,
    )
    return _upper(
        "yudin_theorem_3",
        "Yudin et al. 2025, Theorem 3",
        at.head.log_V_norm + _log_sum(_log(spectral_norm_above(P)) + moved_by, moved + _log(g)),
    )


@dataclass(frozen=True, eq=False)
class OneHead:
    """One attention head with scores ⟨A x_i + b, x_j⟩ at given tokens x_i, with its mask. ``y`` holds the
    vectors A x_i + b, and ``transposed`` the vectors Aᵀ x_i.
    """

    head: Head
    X: Float[Tensor, "n d"]
    y: Float[Tensor, "n d"]
    transposed: Float[Tensor, "n d"]
    visible: Bool[Tensor, "n n"]

    @classmethod
    def at(cls, attention: object, X: object, name: str) -> OneHead:
        """Check that an attention has one head and that the tokens X fit, and return them as a OneHead.

        For a captured site, the tokens are those of the site unless X is given. The argument ``name`` is the
        statement that needs one head; errors mention it.
        """
        parameters = parameters_of(attention)
        head = parameters.one_head(name)
        if X is None and isinstance(attention, SiteLike):
            X = attention.x
            if len(X) != 1:
                raise ArgumentError(
                    "X",
                    expected="one sequence",
                    got=f"a site with {len(X)}",
                    remedy="Pass one of the sequences, for instance X=site.x[0].",
                )
            X = X[0]
        if not isinstance(X, Tensor) or X.ndim != 2 or X.shape[0] < 1 or X.shape[1] != head.d:
            got = f"shape {tuple(X.shape)}" if isinstance(X, Tensor) else type(X).__name__
            raise ArgumentError("X", expected=f"tokens of shape (n, {head.d})", got=got)
        if not bool(torch.isfinite(X).all()):
            raise NonFiniteError("X", expected="finite numbers", got="NaN or infinity")
        x = X.detach().to(dtype=torch.float64, device="cpu")
        n = len(x)
        if parameters.mask is not None and len(parameters.mask) != n:
            raise ArgumentError(
                "X", expected=f"n = {len(parameters.mask)} tokens, the length of the mask", got=f"{n}"
            )
        seen = parameters.visibility(n).whole()
        visible = torch.ones(n, n, dtype=torch.bool) if seen is None else seen
        y = (x @ head.right.mT) @ head.left.mT + head.b
        transposed = (x @ head.left) @ head.right
        if not bool(torch.isfinite(y).all() & torch.isfinite(transposed).all()):
            raise NonFiniteError("X", expected="scores below the largest float64", got="larger ones")
        return cls(head, x, y, transposed, visible)

    @property
    def weights(self) -> Float[Tensor, "n n"]:
        """The attention weights P of the head, (n, n)."""
        scores = self.y @ (self.X - self.X.mean(dim=0)).mT
        if not bool(torch.isfinite(scores).all()):
            raise NonFiniteError("X", expected="scores below the largest float64", got="larger ones")
        return torch.softmax(scores.masked_fill(~self.visible, -torch.inf), dim=1)


def _diameter(rows: Float[Tensor, "n d"]) -> float:
    """Return the largest distance between two rows of a matrix, computed from their differences and rounded
    up.
    """
    size = float(rows.abs().amax()) or 1.0
    return size * largest_distance(rows / size) * (1 + _MARGIN)


def _norms(rows: Float[Tensor, "n d"]) -> list[float]:
    size = float(rows.abs().amax()) or 1.0  # scaled because squares of large entries overflow
    return [size * length for length in torch.linalg.vector_norm(rows / size, dim=1).tolist()]


def _largest(rows: Float[Tensor, "n d"]) -> float:
    return max(_norms(rows)) * (1 + _MARGIN)


def _log(value: float) -> float:
    return -math.inf if value == 0 else math.log(value)


def _log_sum(*logs: float) -> float:
    """Return the logarithm of a sum, given the logarithms of its terms."""
    top = max(logs)
    if math.isinf(top):
        return top
    return top + math.log(math.fsum(math.exp(log - top) for log in logs))


def _upper(name: str, source: str, log_formula: float) -> Bound:
    return Bound.upper(name, Quantity.LOCAL, source, log_formula=log_formula)
