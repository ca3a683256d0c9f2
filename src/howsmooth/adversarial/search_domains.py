"""Sets of inputs to which a search for large Lipschitz constants is restricted: balls, and outputs of norm
layers.

Each domain has coordinates in which it is a ball or a product of balls. Steps of the ascent are made in
these coordinates. For Ball and Around they are the tokens themselves.
"""

from __future__ import annotations

import abc
import math

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm
from howsmooth.bounds.bound import check_radius
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.rounding import LEAST_DIVISOR

__all__ = ["Around", "Ball", "Domain", "Ellipsoid"]


class Domain(abc.ABC):
    """Base class of sets of token sequences that are searched for an input with a large Lipschitz constant.

    The tokens are described by coordinates, in which the set consists of balls.
    """

    @property
    @abc.abstractmethod
    def radius(self) -> float:
        """The radius of the ball of coordinates, which restricts each token or the whole sequence."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Return one phrase that describes this set of inputs."""

    @abc.abstractmethod
    def project_coordinates(self, u: Tensor) -> Tensor:
        """Project coordinates ``u`` to the nearest coordinates of tokens in this set of inputs."""

    @abc.abstractmethod
    def random(self, generator: torch.Generator, n: int, d: int) -> Float[Tensor, "n d"]:
        """Return random tokens from this set of inputs, in float64 on the CPU."""

    def coordinates(self, x: Tensor) -> Tensor:
        """Return the coordinates u (..., n, d) of tokens x, in which the set consists of balls."""
        return x

    def tokens(self, u: Tensor) -> Tensor:
        """Return the tokens that the coordinates u (..., n, d) of this set of inputs represent."""
        return u

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Convert a gradient with respect to tokens into the gradient with respect to their coordinates."""
        return gradient

    def project(self, X: Tensor) -> Tensor:
        """Project tokens X (..., n, d) onto the point of this set that is nearest in coordinates."""
        return self.tokens(self.project_coordinates(self.coordinates(X)))

    def contains(self, X: Tensor, tol: float = 1e-9) -> bool:
        """Return whether the tokens X lie in this set of inputs, up to a tolerance.

        The tolerance is ``tol`` times the largest entry of X, or times the domain's radius if that is larger.
        """
        x = X.detach().double()
        size = max(float(x.abs().max()), self.radius)
        return bool(((self.project(x) - x).abs() <= tol * size).all())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"


class Ball(Domain):
    """The set of all sequences whose tokens have norm at most R: B_R^n, as in the paper's theorems.

    Parameters
    ----------
    radius
        R, a finite number > 0.

    Raises
    ------
    ArgumentError
        If the radius is not such a number.

    """

    def __init__(self, radius: float) -> None:
        self._radius = check_radius(radius)

    @property
    def radius(self) -> float:
        """The radius R of the ball that contains every token."""
        return self._radius

    def describe(self) -> str:
        """Return one phrase that describes this ball."""
        return f"tokens of norm at most {self.radius:g}"

    def project_coordinates(self, u: Tensor) -> Tensor:
        """Return the tokens u after scaling every token of norm above R down to norm R."""
        return _shrink(u, self.radius)

    def random(self, generator: torch.Generator, n: int, d: int) -> Float[Tensor, "n d"]:
        """Return random tokens on the sphere of radius R."""
        x = torch.randn(n, d, generator=generator, dtype=torch.float64)
        return self.project(self.radius * x / torch.linalg.vector_norm(x, dim=1, keepdim=True))


class Ellipsoid(Domain):
    """The set of all outputs of a norm layer: an ellipsoid, or only the surface of an ellipsoid if ε = 0.

    The tokens are β + √d γ∘u with the gain γ, the shift β and |u| <= 1; for LayerNorm, u has mean zero. This
    set is the closure of the layer's image if ε > 0. If ε = 0, the image is the surface |u| = 1, and then the
    domain is that surface.

    Parameters
    ----------
    norm
        A LayerNorm or RMSNorm.

    Raises
    ------
    ArgumentError
        If ``norm`` is of another type.

    """

    def __init__(self, norm: object) -> None:
        if not isinstance(norm, LayerNorm | RMSNorm):
            raise ArgumentError(
                "norm",
                expected="an hs.LayerNorm or hs.RMSNorm, such as the norm of a captured site",
                got=f"{type(norm).__module__}.{type(norm).__qualname__}",
            )
        self.norm = norm
        gain = norm.weight.double().cpu()
        self._gain = math.sqrt(norm.d) * gain
        self._shift = torch.zeros_like(gain) if norm.bias is None else norm.bias.double().cpu()

    @property
    def radius(self) -> float:
        """The radius of the coordinates of a token, which is 1, since they lie in the unit ball."""
        return 1.0

    def describe(self) -> str:
        """Return one phrase that names the norm layer whose outputs this set contains."""
        return f"outputs of {self.norm.describe()}"

    def coordinates(self, x: Tensor) -> Tensor:
        """Return u with x = β + √d γ∘u; entries with γ = 0 get u = 0."""
        # The inner where avoids a division by zero, whose NaN would survive in gradients.
        gain, shift = self._gain.to(x), self._shift.to(x)
        return torch.where(gain == 0, 0.0, (x - shift) / torch.where(gain == 0, 1.0, gain))

    def tokens(self, u: Tensor) -> Tensor:
        """Return the tokens β + √d γ∘u."""
        return self._shift.to(u) + self._gain.to(u) * u

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return √d γ∘gradient; for LayerNorm, less its mean over each token."""
        return self._centred(self._gain.to(gradient) * gradient)

    def project_coordinates(self, u: Tensor) -> Tensor:
        """Return the points nearest to u in the unit ball, or on its surface if the norm layer has ε = 0.

        For LayerNorm, each token's mean is subtracted first. If ε > 0, tokens outside the unit ball are
        scaled to norm 1. If ε = 0, all tokens but zero are scaled to norm 1.
        """
        u = self._centred(u)
        if self.norm.eps > 0:
            return _shrink(u, 1.0)
        # For ε = 0 the layer normalises every token to the surface.
        length = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        on_surface: Tensor = torch.where(length > 0, u / length.clamp_min(LEAST_DIVISOR), u)
        return on_surface

    def random(self, generator: torch.Generator, n: int, d: int) -> Float[Tensor, "n d"]:
        """Return β + √d γ∘u for random u with |u| = 1."""
        u = self._centred(torch.randn(n, d, generator=generator, dtype=torch.float64))
        u = u / torch.linalg.vector_norm(u, dim=1, keepdim=True)
        return self.tokens(self.project_coordinates(u))

    def _centred(self, u: Tensor) -> Tensor:
        if not self.norm.centred:
            return u
        centred: Tensor = u - u.mean(dim=-1, keepdim=True)
        return centred


class Around(Domain):
    """The set of all token sequences whose distance from given tokens X0 is at most a given number.

    X belongs to it if |X − X0| <= radius in the Frobenius norm or, with ``per_token``, if |x_i − x0_i| <=
    radius for each token i.

    Parameters
    ----------
    X0
        The tokens (n, d) at the centre.
    radius
        A finite number > 0.
    per_token
        Whether the radius bounds the change of each token instead of the Frobenius norm of all changes.

    Raises
    ------
    ArgumentError
        If ``X0`` is not a matrix of tokens, or the radius is not a finite number > 0.
    NonFiniteError
        If ``X0`` contains NaN or infinity.

    """

    def __init__(self, X0: Tensor, radius: float, *, per_token: bool = False) -> None:
        if not isinstance(X0, Tensor) or X0.ndim != 2 or X0.numel() == 0 or not X0.is_floating_point():
            got = f"shape {tuple(X0.shape)}" if isinstance(X0, Tensor) else type(X0).__name__
            remedy = "" if isinstance(X0, Tensor) else "Use torch.as_tensor."
            raise ArgumentError("X0", expected="floating-point tokens (n, d)", got=got, remedy=remedy)
        if not bool(torch.isfinite(X0).all()):
            raise NonFiniteError("X0", expected="finite numbers", got="NaN or infinity")
        self.X0 = X0.detach().double().cpu()
        self._radius = check_radius(radius)
        self.per_token = bool(per_token)

    @property
    def radius(self) -> float:
        """The largest distance that tokens may have from the centre X0."""
        return self._radius

    def describe(self) -> str:
        """Return a phrase that describes this neighbourhood of the given tokens X0."""
        n, d = self.X0.shape
        each = "each token" if self.per_token else "in the Frobenius norm"
        return f"within {self.radius:g} of given {n} tokens of dimension {d}, {each}"

    def project_coordinates(self, u: Tensor) -> Tensor:
        """Project the tokens u onto the ball around the given tokens X0."""
        centre = self.X0.to(u)
        difference = u - centre
        if self.per_token:
            return centre + _shrink(difference, self.radius)
        return centre + _shrink(difference.flatten(-2), self.radius).reshape(u.shape)

    def random(self, generator: torch.Generator, n: int, d: int) -> Float[Tensor, "n d"]:
        """Return random tokens at the largest allowed distance from the given tokens X0."""
        if (n, d) != tuple(self.X0.shape):
            raise ArgumentError("n", expected=f"tokens of shape {tuple(self.X0.shape)}", got=f"({n}, {d})")
        x = torch.randn(n, d, generator=generator, dtype=torch.float64)
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True) if self.per_token else x.norm()
        return self.project(self.X0 + self.radius * x / length)


def _shrink(x: Tensor, radius: float) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inside: Tensor = x * torch.where(length > radius, radius / length.clamp_min(LEAST_DIVISOR), 1.0)
    return inside
