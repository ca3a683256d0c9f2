"""Build the tokens of Appendix C.7, at which the constant of a head grows like the squared radius R²."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.bounds.attention_parameters import Head
from howsmooth.errors import ArgumentError

__all__ = ["Balanced", "balanced_direction"]


@dataclass(frozen=True, eq=False)
class Balanced:
    """The tokens of Appendix C.7 for one head: pairs Ru and −Ru for a unit vector u, and one or two zeros.

    The last token is zero. Its attention weights are equal, with or without a causal mask and for every query
    bias, because u is orthogonal to the bias.
    """

    head: Head
    u: Float64[Tensor, " d"]

    def tokens(self, n: int, radius: float) -> Float64[Tensor, "n d"]:
        """Return the n tokens as a tensor (n, d), for R = ``radius``. One is zero, or two if n is even."""
        pairs = (n - 1) // 2
        signs = torch.zeros(n, dtype=torch.float64)
        signs[: 2 * pairs : 2], signs[1 : 2 * pairs : 2] = 1.0, -1.0
        return radius * signs[:, None] * self.u

    def formula(self, n: int, radius: float) -> float:
        """Return a lower bound on the constant: ‖V(I/n + (m/n)R² u(Aᵀu)ᵀ)‖, if m tokens are ±Ru.

        It is the norm of the diagonal block ∂y_n/∂x_n of the last token. For A = γI, V = I and odd n it is
        1/n + γR²(n−1)/n.
        """
        head, m = self.head, 2 * ((n - 1) // 2)
        form = (self.u @ head.left) @ head.right
        block = head.V / n + (m / n * radius**2) * torch.outer(head.V @ self.u, form)
        return float(torch.linalg.matrix_norm(block, 2))


def balanced_direction(head: Head) -> Balanced:
    """Choose the unit vector u for which the constant of a head at its balanced tokens is large.

    Of two left singular vectors of the score matrix A and two right ones of the value matrix V, without their
    component along the query bias, it is the one with the largest ‖Vu‖ ‖Aᵀu‖. An ArgumentError is raised if
    scores or values are zero along all of them.
    """
    left, right = torch.linalg.qr(head.left), torch.linalg.qr(head.right.mT)
    inner = torch.linalg.svd(left.R @ right.R.mT)
    candidates = torch.cat([(left.Q @ inner.U)[:, :2], torch.linalg.svd(head.V).Vh[:2].mT], dim=1).mT
    if bool(head.b.any()):
        unit = head.b / torch.linalg.vector_norm(head.b)
        candidates = candidates - torch.outer(candidates @ unit, unit)
    sizes = torch.linalg.vector_norm(candidates, dim=1)
    candidates = candidates[sizes > 1e-6] / sizes[sizes > 1e-6, None]
    gains = torch.linalg.vector_norm(candidates @ head.V.mT, dim=1) * torch.linalg.vector_norm(
        candidates @ head.left @ head.right, dim=1
    )
    if not len(gains) or not float(gains.max()) > 0:
        raise ArgumentError("model", expected="heads whose scores and values are not zero", got=repr(head))
    return Balanced(head, candidates[int(gains.argmax())])
