"""The leading singular value of a Jacobian as a differentiable number.

For unit vectors u and v that do not depend on the weights θ, d/dθ ⟨u, J_θ v⟩ is the derivative of the
singular value if (u, v) is its singular pair and the singular value is simple (Hellmann and Feynman). One
graph is enough for all computations. With y = f(X), the gradient g = Jᵀu = ∂⟨u, y⟩/∂X is kept differentiable.
Then v = g/|g| and σ = ⟨g, v⟩ = |Jᵀu|. The derivative of σ by θ is the gradient, and its derivative by u is J
v. Derivation: documentation page "Enforce: layers with a constant that is proved", section "A penalty on the
leading singular value".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from howsmooth.errors import ArgumentError, DerivativeError, NonFiniteError
from howsmooth.jacobian.autodiff import as_derivative_errors, one_backend
from howsmooth.nn.penalty.singular_vector_storage import Directions, lengths, unit
from howsmooth.spectral import LinearOperator, lanczos

__all__ = ["Pair", "begin", "relative_residual"]

# Confidence of the upper limits at random starts, which are reported only.
_CONFIDENCE = 0.999
_TWICE = "repeated reverse"  # how a penalty differentiates


class Pair(LinearOperator):
    """The Jacobian J of a function at a point, as a linear operator with products J v and Jᵀu.

    Both products use one autograd graph in reverse mode. Products J v come from differentiating Jᵀu by u.
    Forward mode is not used, because PyTorch's safe softmax cannot be differentiated again in forward mode.

    Parameters
    ----------
    f
        A map from (members, ...) to (members, ...) that treats each member separately.
    x
        The point of linearisation; it must require gradients.
    real
        Mask (members, n), 1 for tokens that count. Other tokens, such as padding, are not perturbed, and
        their outputs are ignored.

    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor, real: Tensor | None = None) -> None:
        with torch.enable_grad(), one_backend(), as_derivative_errors(_TWICE):
            y = f(x)
            if y.ndim < 2 or y.shape[0] != x.shape[0]:
                raise ArgumentError(
                    "f",
                    expected=f"a map whose output has as many members as X, shape ({x.shape[0]}, ...)",
                    got=f"{tuple(y.shape)}",
                )
            if not y.requires_grad:
                raise DerivativeError(
                    "f: its output does not depend on X, or a detach interrupts the derivative."
                )
            # Jᵀu is differentiated by u at this point; J v does not depend on u.
            self._zero = torch.zeros_like(y, requires_grad=True)
        if y.dtype != x.dtype:
            raise ArgumentError("f", expected=f"an output in {x.dtype}, the dtype of X", got=str(y.dtype))
        self.x, self.y, self._real = x, y, real
        self._transposed: Tensor | None = None
        super().__init__(x.shape[0], tuple(x.shape[1:]), tuple(y.shape[1:]), x.dtype, x.device)

    def pull_back(self, u: Tensor) -> Tensor:
        """Return Jᵀu, differentiable with respect to u and everything that f depends on."""
        with torch.enable_grad(), as_derivative_errors(_TWICE):
            (g,) = torch.autograd.grad(self.y, self.x, self.among(u), create_graph=True)
            return self.among(g)

    def _product(self, e: Tensor) -> Tensor:
        # Jᵀu is linear in u, so its derivative by u can be taken at u = 0, with one graph for all v.
        if self._transposed is None:
            self._transposed = self.pull_back(self._zero)
        return self.push_forward(self._transposed, self._zero, e)

    def push_forward(self, g: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Return J v, where ``g`` is the product Jᵀu that :meth:`pull_back` returned for ``u``."""
        with as_derivative_errors(_TWICE):
            (jv,) = torch.autograd.grad(g, u, v, retain_graph=True)
        return jv.detach()

    def _adjoint_product(self, u: Tensor) -> Tensor:
        with as_derivative_errors(_TWICE):
            (g,) = torch.autograd.grad(self.y, self.x, self.among(u), retain_graph=True)
        return self.among(g).detach()

    def among(self, t: Tensor) -> Tensor:
        """Set the entries of tokens that do not count to zero."""
        return t if self._real is None else t * self._real.view(*self._real.shape, *(1,) * (t.ndim - 2))

    def improved(self, u: Tensor, steps: int) -> Tensor:
        """Improve approximate leading left singular vectors ``u`` by ``steps`` products with J Jᵀ.

        The method is that of Rayleigh and Ritz: orthonormal v_1, …, v_k span Jᵀu, (JᵀJ) Jᵀu, …, and the
        result is the leading left singular vector of J on their span, for all members at once.
        """
        rights: list[Tensor] = []
        images: list[Tensor] = []
        for _ in range(steps):
            z = self.adjoint_product(u).flatten(1)
            for _ in range(2 if rights else 0):  # Gram–Schmidt twice (Daniel, Gragg, Kaufman, Stewart 1976)
                basis = torch.stack(rights, dim=1)
                # Orthogonalise against all earlier vectors.
                z = z - ((basis @ z[:, :, None]).mT @ basis)[:, 0]
            z = unit(z)
            rights.append(z)
            u = self.product(z.view(-1, *self.in_shape))
            images.append(u.flatten(1))
        stacked = torch.stack(images, dim=1)
        # The images J v_i span the left space; the leading eigenvector of their Gram matrix gives the best
        # combination.
        best = torch.linalg.eigh(stacked @ stacked.mT).eigenvectors[:, :, -1]
        return unit((best[:, None] @ stacked)[:, 0].view(-1, *self.out_shape))


def begin(pair: Pair, state: Directions, steps: int, first_steps: int, rtol: float) -> tuple[Tensor, Tensor]:
    """Return approximate leading left singular vectors of Jacobians, and upper limits of the spectral norms.

    The vectors are computed from the vectors stored in ``state``, or by a few Lanczos steps from a random
    start for batch indices that have no stored vector. From there, the limits hold with probability 0.999;
    otherwise they are infinite.
    """
    u, cold = state.recall(pair.batch, pair.out_shape, pair.y)
    upper = torch.full((pair.batch,), torch.inf, dtype=torch.float64)
    if not bool(torch.isfinite(pair.y.detach()).all()):
        raise NonFiniteError("X", expected="finite tokens and outputs of the layer", got="NaN or infinity")
    if bool(cold.any()):
        start = state.draw((pair.batch, *pair.in_shape), pair.y)
        # The error of a singular value is of the order of the squared residual.
        narrow = max(rtol**2, 16 * torch.finfo(pair.dtype).eps)
        found = lanczos(
            pair,
            pair.among(start),
            rtol=narrow,
            confidence=_CONFIDENCE,
            max_iterations=max(2, first_steps),
        )
        # Only members without a direction take the result of the random start.
        new = cold.to(u.device).view(-1, *(1,) * (u.ndim - 1))
        u = torch.where(new, found.left, u)
        upper[cold] = found.upper[cold]
    if steps > 1 and not bool(cold.all()):
        u = pair.improved(u, steps - 1)
    return u.detach().clone(), upper


def relative_residual(jv: Tensor, u: Tensor) -> Tensor:
    """Return the relative residuals |J v − σ u| / σ of approximate singular triplets of Jacobians J.

    ``jv`` is a positive multiple of J v. Since v is the normalised Jᵀu, σ = ⟨u, J v⟩.
    """
    along = (jv * u).flatten(1).sum(1)
    off = lengths(jv - along.view(-1, *(1,) * (jv.ndim - 1)) * u).flatten()
    # The singular pair of a zero Jacobian is exact, so its residual is 0.
    return torch.where(along > 0, off / along, torch.where(off == 0, 0.0, torch.inf))
