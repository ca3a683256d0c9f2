"""The leading singular value of a Jacobian with its gradient. Singular vectors are kept for the next step.

For unit vectors u and v that do not depend on the weights θ, d/dθ ⟨u, J_θ v⟩ is the derivative of the
singular value if (u, v) is its singular pair and the singular value is simple (Hellmann and Feynman). One
graph is enough for all computations. With y = f(X), the gradient g = Jᵀu = ∂⟨u, y⟩/∂X is kept differentiable.
Then v = g/|g| and σ = ⟨g, v⟩ = |Jᵀu|. The derivative of σ by θ is the gradient, and its derivative by u is J
v. Derivation: documentation page "Enforce: layers with a constant that is proved", section "A penalty on the
leading singular value".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.errors import DerivativeError, NonFiniteError, check_whole
from howsmooth.jacobian.autodiff import as_derivative_errors, one_backend
from howsmooth.nn.checks import check
from howsmooth.seeds import torch_seed
from howsmooth.spectral import LinearOperator, lanczos

__all__ = ["Directions", "JacobianOperator", "begin", "relative_residual", "unit"]

# Confidence of the upper limits at random starts, which are reported only.
_CONFIDENCE = 0.999
_TWICE = "repeated reverse"  # how a penalty differentiates


def lengths(t: Tensor) -> Tensor:
    """Return the norm of each tensor of a batch, in a shape that broadcasts with the batch."""
    length: Tensor = t.flatten(1).norm(dim=1)
    return length.view(-1, *(1,) * (t.ndim - 1))


def unit(t: Tensor) -> Tensor:
    """Divide each tensor of a batch by its norm, and leave zero tensors unchanged."""
    length = lengths(t)
    return torch.where(length > 0, t / length, torch.zeros_like(t))


class Directions:
    """Stored estimates of singular vectors, one for each index in the batch.

    The next training step starts from these vectors. A smaller batch uses the first vectors and keeps the
    others. In a larger batch, the additional places start at random. For sequences of another length, each
    vector is cut, or continued with random numbers. For outputs of another shape, all vectors start at random
    again. ``seed`` is that of the random directions, which come from a separate generator.
    """

    def __init__(self, seed: int = 0) -> None:
        check_whole("seed", seed, least=0)
        self._generator = torch.Generator().manual_seed(torch_seed(seed))
        self._left: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self._left is None else len(self._left)

    def state_dict(self) -> dict[str, Any]:
        """Return the singular vectors and the state of the random generator, for :meth:`load_state_dict`."""
        return {"left": self._left, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the singular vectors and the random generator that :meth:`state_dict` returned."""
        self._left = state["left"]
        self._generator.set_state(state["generator"])

    def draw(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return Gaussian numbers, drawn on the CPU so that every device gets the same ones."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(like)

    def recall(
        self, members: int, shape: tuple[int, ...], like: Tensor
    ) -> tuple[Tensor, Bool[Tensor, " members"]]:
        """Return the stored vectors (members, *shape), and a mask that is True where none is stored. Vectors
        are zero there.
        """
        left = self._left
        if left is not None and tuple(left.shape[1:]) != shape:
            left = self._left = self._relengthened(left, shape)
        found = torch.zeros(members, *shape, dtype=like.dtype, device=like.device)
        if left is not None:
            known = min(len(left), members)
            found[:known] = left[:known].to(like)
        return found, ~(lengths(found).flatten() > 0).cpu()

    def _relengthened(self, left: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        if len(shape) < 2 or left.ndim != len(shape) + 1 or tuple(left.shape[2:]) != shape[1:]:
            return None
        n, before = shape[0], left.shape[1]
        if n < before:
            return unit(left[:, :n])
        # Random numbers of the same size as the known entries continue the vectors.
        further = self.draw((len(left), n - before, *shape[1:]), left)
        return unit(torch.cat((left, left.square().mean().sqrt() * further), dim=1))

    def keep(self, left: Tensor) -> None:
        """Normalise and store singular vectors (members, ...), except those that are zero or not finite."""
        left = left.detach()
        length = lengths(left)
        good = torch.isfinite(length) & (length > 0)
        new = torch.where(good, left / length, torch.zeros_like(left))
        before = self._left
        if before is not None and before.shape[1:] == new.shape[1:]:
            before = before.to(new)
            common = min(len(before), len(new))
            # Places that have no new vector keep the old one.
            kept = torch.where(good[:common], new[:common], before[:common])
            new = torch.cat((kept, new[common:], before[common:]))
        self._left = new


class JacobianOperator(LinearOperator):
    """The Jacobian J of a function f at a point, as a linear operator with products J v and Jᵀu.

    Both products use one autograd graph in reverse mode. Products J v come from differentiating Jᵀu by u.
    Forward mode is not used, because PyTorch's safe softmax cannot be differentiated again in forward mode.
    ``f`` maps (members, ...) to (members, ...), each member separately; ``x``, the point, requires gradients.
    ``real`` is a mask (members, n), 1 for tokens that count: others, such as padding, are not perturbed, and
    their outputs are ignored.
    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor, real: Tensor | None = None) -> None:
        with torch.enable_grad(), one_backend(), as_derivative_errors(_TWICE):
            y = f(x)
            expected = f"a map whose output has as many members as X, shape ({x.shape[0]}, ...)"
            check(y.ndim > 1 and y.shape[0] == x.shape[0], "f", expected, tuple(y.shape))
            if not y.requires_grad:
                raise DerivativeError(
                    "f: its output does not depend on X, or a detach interrupts the derivative."
                )
            # Jᵀu is differentiated by u at this point; J v does not depend on u.
            self._zero = torch.zeros_like(y, requires_grad=True)
        check(y.dtype == x.dtype, "f", f"an output in {x.dtype}, the dtype of X", y.dtype)
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
        """Set the entries of tokens that do not count, such as padding, to zero."""
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


def begin(
    pair: JacobianOperator, state: Directions, steps: int, first_steps: int, rtol: float
) -> tuple[Tensor, Tensor]:
    """Return approximate leading left singular vectors of Jacobians, and upper limits of the spectral norms.

    They come from the vectors stored in ``state``, or where there is none from a few Lanczos steps after
    a random start. From there, the limits hold with probability 0.999; otherwise they are infinite.
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
            pair, pair.among(start), rtol=narrow, confidence=_CONFIDENCE, max_iterations=max(2, first_steps)
        )
        # Only members without a direction take the result of the random start.
        new = cold.to(u.device).view(-1, *(1,) * (u.ndim - 1))
        u = torch.where(new, found.left, u)
        upper[cold] = found.upper[cold]
    if steps > 1 and not bool(cold.all()):
        u = pair.improved(u, steps - 1)
    return u.detach().clone(), upper


def relative_residual(jv: Tensor, u: Tensor) -> Tensor:
    """Return the relative residuals |J v − σ u| / σ; ``jv`` is a positive multiple of J v."""
    along = (jv * u).flatten(1).sum(1)
    off = lengths(jv - along.view(-1, *(1,) * (jv.ndim - 1)) * u).flatten()
    # The singular pair of a zero Jacobian is exact, so its residual is 0.
    return torch.where(along > 0, off / along, torch.where(off == 0, 0.0, torch.inf))
