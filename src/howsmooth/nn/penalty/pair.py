"""The leading singular pair of a Jacobian as a differentiable number.

For unit vectors u, v that do not depend on the weights θ, d/dθ ⟨u, J_θ v⟩ is the derivative of the singular
value where (u, v) is its pair (Hellmann and Feynman; the pair is simple). One graph serves for all: y = f(X),
g = Jᵀu = ∂⟨u, y⟩/∂X kept differentiable, v = g/|g|, σ = ⟨g, v⟩ = |Jᵀu|. Its derivative by θ is the gradient,
its derivative by u is J v. Derivation: docs/theory/enforce.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.errors import ArgumentError, DerivativeError, HowsmoothError, NonFiniteError
from howsmooth.jacobian.autodiff import one_backend
from howsmooth.nn.penalty.directions import Directions
from howsmooth.spectral import LinearOperator, golub_kahan

__all__ = ["Pair", "SingularValue", "leading_singular_value", "relative_residual"]

# Of the interval at a cold start; it is reported, and nothing else depends on it.
CONFIDENCE = 0.999


class Pair(LinearOperator):
    """Products with the Jacobian of ``f`` at ``x`` from one graph in reverse mode, twice.

    Reverse mode alone is used: in forward mode PyTorch's safe softmax cannot be differentiated again.

    Parameters
    ----------
    f
        A map of (members, ...) to (members, ...), each member for itself.
    x
        Where; it must require a gradient.
    real
        (members, n), 1 where a token counts: the others are neither moved nor looked at.

    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor, real: Tensor | None = None) -> None:
        with torch.enable_grad(), one_backend(), _as_derivative_errors():
            y = f(x)
            if y.ndim < 2 or y.shape[0] != x.shape[0]:
                raise ArgumentError(
                    "f",
                    expected=f"a map to ({x.shape[0]}, ...), as the members of X",
                    got=f"{tuple(y.shape)}",
                )
            if not y.requires_grad:
                raise DerivativeError(
                    "f: its output does not depend on X, or a detach cuts the derivative off."
                )
            self._zero = torch.zeros_like(y, requires_grad=True)
        if y.dtype != x.dtype:
            raise ArgumentError("f", expected=f"an output in {x.dtype}, as X", got=str(y.dtype))
        self.x, self.y, self._real = x, y, real
        self._transposed: Tensor | None = None
        super().__init__(x.shape[0], tuple(x.shape[1:]), tuple(y.shape[1:]), x.dtype, x.device)

    def pull_back(self, u: Tensor) -> Tensor:
        """Return Jᵀu, differentiable by u and by whatever f depends on."""
        with torch.enable_grad(), _as_derivative_errors():
            (g,) = torch.autograd.grad(self.y, self.x, self._among(u), create_graph=True)
            return self._among(g)

    def _product(self, e: Tensor) -> Tensor:
        if self._transposed is None:
            self._transposed = self.pull_back(self._zero)
        return self.push_forward(self._transposed, self._zero, e)

    def push_forward(self, g: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Return J v, where g = Jᵀu was made by :meth:`pull_back`."""
        with _as_derivative_errors():
            (jv,) = torch.autograd.grad(g, u, v, retain_graph=True)
        return jv.detach()

    def _adjoint_product(self, u: Tensor) -> Tensor:
        with _as_derivative_errors():
            (g,) = torch.autograd.grad(self.y, self.x, self._among(u), retain_graph=True)
        return self._among(g).detach()

    def _among(self, t: Tensor) -> Tensor:
        return t if self._real is None else t * self._real.view(*self._real.shape, *(1,) * (t.ndim - 2))

    def improved(self, u: Tensor, steps: int) -> Tensor:
        """Return the best left directions in the Krylov spaces of u after ``steps`` products with J Jᵀ.

        Rayleigh and Ritz: orthonormal v_1, …, v_k span Jᵀu, (JᵀJ) Jᵀu, …; the leading left singular vector of
        J on their span. All members at once, without an interval.
        """
        rights: list[Tensor] = []
        images: list[Tensor] = []
        for _ in range(steps):
            z = self.adjoint_product(u).flatten(1)
            for _ in range(2 if rights else 0):  # twice is enough (Daniel, Gragg, Kaufman, Stewart 1976)
                basis = torch.stack(rights, dim=1)
                z = z - ((basis @ z[:, :, None]).mT @ basis)[:, 0]
            z = unit(z)
            rights.append(z)
            u = self.product(z.view(-1, *self.in_shape))
            images.append(u.flatten(1))
        stacked = torch.stack(images, dim=1)
        best = torch.linalg.eigh(stacked @ stacked.mT).eigenvectors[:, :, -1]
        return unit((best[:, None] @ stacked)[:, 0].view(-1, *self.out_shape))

    def refined(self, start: Tensor, steps: int, rtol: float) -> tuple[Tensor, Tensor]:
        """Return left directions after some steps of Golub and Kahan, and upper limits of the norms.

        The limits hold where ``start`` was drawn at random, with the stated confidence.
        """
        # The error of the value is of the order of the residual's square.
        narrow = max(rtol**2, 16 * torch.finfo(self.dtype).eps)
        found = golub_kahan(
            self, self._among(start), rtol=narrow, confidence=CONFIDENCE, max_iterations=max(2, steps)
        )
        return found.left, found.upper


@dataclass(frozen=True, eq=False)
class SingularValue:
    """What one step found for the members of a batch; ``value`` is a lower estimate unless converged.

    Attributes
    ----------
    value
        (members,), differentiable: |Jᵀu| for a unit vector u, so never above ‖J‖ but for rounding.
    residual
        (members,): |J v − σ u| / σ. There is a singular value of J within residual · value of ``value``. Only
        a start at random tells, with a confidence, that it is the leading one.
    converged
        residual <= rtol.
    upper
        (members,): an upper limit of ‖J‖ where the directions were found from a random start in this very
        step, with confidence 0.999; infinite elsewhere, as a warm start certifies nothing.
    right
        v, unit vectors in the space of X.
    directions
        Where the next step begins.

    """

    value: Float[Tensor, " members"]
    residual: Float[Tensor, " members"]
    converged: Bool[Tensor, " members"]
    upper: Float[Tensor, " members"]
    right: Tensor
    directions: Directions

    def __repr__(self) -> str:
        found = f"{int(self.converged.sum())} of {self.converged.numel()} converged"
        return f"SingularValue(mean {float(self.value.detach().mean()):.6g}, {found}; lower estimates)"


def leading_singular_value(
    f: Callable[[Tensor], Tensor],
    X: Tensor,
    state: Directions | None = None,
    *,
    steps: int = 1,
    first_steps: int = 8,
    rtol: float = 1e-2,
    seed: int = 0,
) -> SingularValue:
    """Return the leading singular value of the Jacobian of ``f`` at each member of ``X``, differentiably.

    A step is one product with JᵀJ, by a direction that is remembered from the last step. The gradient of
    the value, by the weights that ``f`` uses and by X where it requires one, is exact where the pair has
    converged and the leading singular value is simple.

    Parameters
    ----------
    f
        A map (members, ...) -> (members, ...) of any module or function that can be differentiated twice in
        reverse mode, each member for itself. PyTorch's fused attention cannot: within this call it
        computes with its plain kernel. What is random inside f must be turned off by the caller.
    X
        (members, ...), float32 or float64.
    state
        ``directions`` of the last result; None begins at random, from ``seed``.
    steps
        Products with JᵀJ a call: one is a step of power iteration, more find the best direction in their
        Krylov space.
    first_steps
        Products for members that have no direction yet.
    rtol
        Relative residual at which a pair counts as converged.
    seed
        Of the random directions. The global random state is not touched.

    Raises
    ------
    ArgumentError
        If an argument does not fit.
    NonFiniteError
        If X or f(X) is not finite.
    DerivativeError
        If f cannot be differentiated twice.

    References
    ----------
    The gradient: docs/theory/enforce.md. Power iteration on JᵀJ with remembered vectors, for weights: Miyato,
    Kataoka, Koyama, Yoshida, *Spectral Normalization for Generative Adversarial Networks*, ICLR 2018.

    """
    check_steps(steps, first_steps, rtol)
    if not isinstance(X, Tensor) or X.ndim < 2 or X.dtype not in (torch.float32, torch.float64):
        got = f"{X.dtype} of shape {tuple(X.shape)}" if isinstance(X, Tensor) else type(X).__name__
        raise ArgumentError("X", expected="float32 or float64 (members, ...)", got=got)
    state = Directions(seed) if state is None else state.copy()
    x = X if X.requires_grad else X.detach().requires_grad_()
    pair = Pair(f, x)
    u, upper = begin(pair, state, steps, first_steps, rtol)
    u.requires_grad_()
    g = pair.pull_back(u)
    v = unit(g.detach())
    value = (g * v).flatten(1).sum(1)
    jv = pair.push_forward(g, u, v)
    residual = relative_residual(jv, u.detach())
    state.keep(jv)
    check_finite(value)
    return SingularValue(value, residual, residual <= rtol, upper, v, state)


def begin(pair: Pair, state: Directions, steps: int, first_steps: int, rtol: float) -> tuple[Tensor, Tensor]:
    """Return unit vectors u to begin with, (members, *out_shape), and limits where they were random."""
    u, cold = state.recall(pair.batch, pair.out_shape, pair.y)
    upper = torch.full((pair.batch,), torch.inf, dtype=torch.float64)
    if not bool(torch.isfinite(pair.y.detach()).all()):
        raise NonFiniteError("X", expected="finite tokens and outputs of the layer", got="NaN or infinity")
    if bool(cold.any()):
        start = state.draw((pair.batch, *pair.in_shape), pair.y)
        left, limit = pair.refined(start, first_steps, rtol)
        new = cold.to(u.device).view(-1, *(1,) * (u.ndim - 1))
        u = torch.where(new, left, u)
        upper[cold] = limit[cold]
    if steps > 1 and not bool(cold.all()):
        u = pair.improved(u, steps - 1)
    return u.detach().clone(), upper


def relative_residual(jv: Tensor, u: Tensor) -> Tensor:
    """Return |J v − σ u| / σ, from J v times any positive number: σ = ⟨u, J v⟩ as v is Jᵀu, normalised."""
    along = (jv * u).flatten(1).sum(1)
    shape = (-1, *(1,) * (jv.ndim - 1))
    off = (jv - along.view(shape) * u).flatten(1).norm(dim=1)
    # A Jacobian that is zero is known exactly.
    return torch.where(along > 0, off / along, torch.where(off == 0, 0.0, torch.inf))


def unit(t: Tensor) -> Tensor:
    """Return each member divided by its norm; zero stays zero."""
    length = t.flatten(1).norm(dim=1).view(-1, *(1,) * (t.ndim - 1))
    return torch.where(length > 0, t / length, torch.zeros_like(t))


def check_finite(value: Tensor) -> None:
    """Refuse a singular value that is not finite."""
    if not bool(torch.isfinite(value.detach()).all()):
        raise NonFiniteError("X", expected="finite derivatives", got="NaN or infinity")


def check_steps(steps: object, first_steps: object, rtol: object) -> None:
    """Refuse what is no number of steps, or no tolerance."""
    for name, number, least in (("steps", steps, 1), ("first_steps", first_steps, 2)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ArgumentError(name, expected=f"an integer >= {least}", got=repr(number))
    if isinstance(rtol, bool) or not isinstance(rtol, int | float) or not 0 < rtol < 1:
        raise ArgumentError("rtol", expected="a number between 0 and 1", got=repr(rtol))


class _as_derivative_errors:  # noqa: N801 - reads as the function of the same name in jacobian
    """Turn PyTorch's refusals to differentiate twice into one clear error."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NotImplementedError | RuntimeError) and not isinstance(error, HowsmoothError):
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise DerivativeError(
                f"f: it cannot be differentiated twice in reverse mode: {lines[0]} Use operations that have "
                "second derivatives (PyTorch's plain attention, or howsmooth.functional.attention)."
            ) from error
