"""Spectral norms and largest eigenvalues with proved upper bounds.

An eigenvalue routine only suggests a value; what is returned is verified. Two forms serve two needs. The
tight one is verified by a Cholesky factorisation. The fast one, the norm of a power of the Gram matrix, needs
matrix products alone and may be some percent too large. Proofs: documentation page "Certificates at given
tokens", section "Verified norms".

A norm of a matrix A with s columns and at most as many rows, or of its transpose, is the root of the largest
eigenvalue of G = A Aᵀ. A is divided by a power of two, so that its largest entry is between 1 and 2: neither
overflow nor what underflows then matters. The computed Gram matrix is wrong by at most γ_s |A| |A|ᵀ entry by
entry, a matrix whose norm is at most γ_s ‖A‖_F².
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.rounding.directed_rounding import LOST, TINY, U, above, below, gamma, up
from howsmooth.rounding.unproved_eigenvalue_estimates import largest_eigenvalue_estimates

__all__ = [
    "Enclosed", "MatrixNorms", "Triangles", "absolute_norms_above", "largest_eigenvalues_above",
    "largest_eigenvalues_by_squaring", "product_norms_above", "shrink", "spectral_norm_above",
    "spectral_norm_below", "spectral_norms", "spectral_norms_above", "spectral_norms_with_vectors",
    "with_gradient",
]  # fmt: skip

# For larger matrices only the leading eigenvector is computed, instead of all.
_LARGE = 96


class Enclosed(NamedTuple):
    """A number computed by a formula, with a proved upper bound that covers all rounding errors."""

    upper: Tensor
    plain: Tensor

    def root(self) -> Enclosed:
        """Return the square root of the computed number and of its proved upper bound.

        The root of the proved bound is rounded up.
        """
        return Enclosed(above(self.upper.sqrt(), 1), self.plain.sqrt())


# ---- norms


def spectral_norm_above(matrix: Float[Tensor, "m r"]) -> float:
    """Return a tight upper bound on the spectral norm of a matrix of floats, on any device.

    It is zero for a matrix of zeros or without entries, and inf if an entry is not finite. For r
    rows and s ≥ r columns, or the other way around, it is too large by about (r γ_r + γ_s ‖A‖_F²/‖A‖²) / 2
    relative: some 10^-12 for r = s = 64, and 10^-10 for r = s = 1000.
    """
    return float(spectral_norms_above(matrix.detach().to(device="cpu", dtype=torch.float64)))


def spectral_norm_below(matrix: Float[Tensor, "m r"]) -> float:
    """Return a tight lower bound on the spectral norm of a matrix A of finite floats. It is |A v| for a
    vector v of length at most one.
    """
    size, a = _in_units(matrix.detach().to(device="cpu", dtype=torch.float64))
    if not a.numel():
        return 0.0
    a = a if a.shape[0] >= a.shape[1] else a.mT
    v = torch.linalg.eigh(a.mT @ a)[1][:, -1]
    # Entry by entry, A v is wrong by γ_r |A| |v|, and this has at most the norm ‖A‖_F |v|.
    length = torch.linalg.vector_norm(a @ v) - up(gamma(a.shape[1])) * torch.linalg.vector_norm(a)
    shortest = below(max(0.0, float(length / torch.linalg.vector_norm(v))), 2 * len(a))
    found = shortest * float(size)
    return found if size >= 1 else max(0.0, found - 2.0**-1074)


def spectral_norms_above(
    matrices: Float[Tensor, "*batch m r"], squarings: int | None = None
) -> Float[Tensor, "*batch"]:
    """Return upper bounds on the spectral norms of float64 matrices, as :func:`spectral_norm_above` does.

    They are differentiable: the gradient holds the leading singular vectors fixed. If the largest singular
    value is multiple, it is one of the subgradients, and at the zero matrix it is zero.

    With a number of ``squarings`` only matrix products are taken (:func:`largest_eigenvalues_by_squaring`):
    the bounds are at most min(m, r)^(1/2^(squarings + 2)) times too large, and have no gradient of use.
    """
    if squarings is not None:
        size, _, gram, slack = _gram(matrices)
        upper = largest_eigenvalues_by_squaring(gram, squarings, slack).sqrt()
        return _in_size(above(upper, 1), size)
    if not (torch.is_grad_enabled() and matrices.requires_grad):
        return spectral_norms(matrices.detach()).upper
    with torch.no_grad():
        found, u, v = spectral_norms_with_vectors(matrices)
    return with_gradient(found, torch.einsum("...m,...mk,...k->...", u, matrices, v))


def spectral_norms(matrices: Float[Tensor, "*batch m r"]) -> Enclosed:
    """Return the computed spectral norms of float64 matrices, with tight upper bounds."""
    batch = matrices.shape[:-2]
    if not matrices.numel():
        return Enclosed(matrices.new_zeros(batch), matrices.new_zeros(batch))
    size, _, gram, slack = _gram(matrices.flatten(0, -3) if batch else matrices[None])
    upper, plain = largest_eigenvalues_above(gram, slack).root()
    return Enclosed(_in_size(upper, size).reshape(batch), _in_size(plain, size, 0.0).reshape(batch))


def spectral_norms_with_vectors(
    matrices: Float[Tensor, "*batch m r"],
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch m"], Float[Tensor, "*batch r"]]:
    """Return tight upper bounds on spectral norms, and the leading singular vectors up to rounding.

    v is an eigenvector of the Gram matrix and u = A v / |A v|, or the other way around for a wide matrix.
    Both are zero if A is zero or not finite.
    """
    batch = matrices.shape[:-2]
    matrices = matrices.flatten(0, -3) if batch else matrices[None]
    size, scaled, gram, slack = _gram(matrices)
    if len(gram) == 1 and gram.shape[-1] > _LARGE:
        v = _last_eigenvector(gram[0])[None]
    else:
        v = torch.linalg.eigh(gram)[1][..., -1]
    value = ((gram @ v[..., None])[..., 0] * v).sum(-1)
    upper = _in_size(largest_eigenvalues_above(gram, slack, value, rise=1e-12).root().upper, size)
    wide = matrices.shape[-2] <= matrices.shape[-1]
    image = ((scaled.mT if wide else scaled) @ v[..., None])[..., 0]
    length = torch.linalg.vector_norm(image, dim=-1, keepdim=True)
    image, v = image / torch.where(length > 0, length, 1.0), v * (length > 0)
    u, v = (v, image) if wide else (image, v)
    return upper.reshape(batch), u.reshape(*batch, -1), v.reshape(*batch, -1)


def _in_units(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each matrix by a power of two, so that its largest entry lies between 1 and 2.

    The quotient of a number and twice its mantissa is exactly a power of two. Matrices of zeros stay, with
    the size zero. Those that are not finite become zeros, with the size inf.
    """
    if not matrices.numel():
        return matrices.new_zeros(matrices.shape[:-2]), matrices
    largest = torch.linalg.vector_norm(matrices, torch.inf, dim=(-2, -1))
    usual = (largest > 0) & (largest < torch.inf)
    if bool(usual.all()):
        size = largest / (2 * torch.frexp(largest).mantissa)
        return size, matrices / size[..., None, None]
    mantissa = torch.frexp(torch.where(usual, largest, 1.0)).mantissa
    size = torch.where(usual, largest / (2 * mantissa), torch.where(largest == 0, 0.0, torch.inf))
    finite = torch.where((size < torch.inf)[..., None, None], matrices, 0.0)
    return size, finite / torch.where(usual, size, 1.0)[..., None, None]


def _in_size(values: Tensor, size: Tensor, least: float = 2.0**-1074) -> Tensor:
    """Convert norms of scaled matrices to norms of the original ones: multiply them by the scales ``size``.

    Only if the product is not normal does it round, by half of the smallest positive number, which is added.
    """
    found = values * size
    if bool(((found > 2.0**-1000) & (found < torch.inf)).all()):
        return found
    found = found + least * ((size < 1) & (size > 0)).to(size.dtype)
    return torch.where(size < torch.inf, found, torch.inf)


def _gram(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the scales of matrices, the scaled matrices A, the smaller of A Aᵀ and AᵀA for each, and a bound
    on the spectral norm of the error of this product.
    """
    size, scaled = _in_units(matrices)
    rows = scaled if scaled.shape[-2] <= scaled.shape[-1] else scaled.mT
    gram = rows @ rows.mT
    return size, scaled, gram, gamma(rows.shape[-1] + 1) * _trace(gram)


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


# ---- norms of products, and gradients


class Triangles(NamedTuple):
    """Factors Q and R of matrices A ≈ Q R (*batch, m, k), with bounds on the error. The columns of Q are
    nearly orthonormal.

    For every matrix M, ‖A M‖ ≤ ``stretch`` ‖R M‖ + ``rest`` ‖M‖. For A = Q R + E and Qᵀ Q = I + D the
    stretch is (1 + ‖D‖_F)^(1/2) ≥ ‖Q‖, and the rest ‖E‖_F. D and E are computed from the factors, so that it
    does not matter how these were found. A product of computed factors is off by γ of the product of their
    Frobenius norms.
    """

    q: Float[Tensor, "*batch m r"]
    r: Float[Tensor, "*batch r k"]
    stretch: Float[Tensor, "*batch"]
    rest: Float[Tensor, "*batch"]

    @classmethod
    def of(cls, matrices: Float[Tensor, "*batch m k"]) -> Triangles:
        """Compute the QR factors of matrices, with bounds on their errors."""
        q, r = torch.linalg.qr(matrices)
        norm = torch.linalg.matrix_norm
        defect = norm(q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device))
        defect = defect + gamma(q.shape[-2] + 1) * norm(q).square()
        rest = norm(matrices - q @ r) + gamma(r.shape[-2] + 1) * norm(q) * norm(r)
        return cls(q, r, above((1 + up(defect)).sqrt(), 2), up(rest))

    def at(self, index: Tensor) -> Triangles:
        """Return the factors of the matrices with these indices in the batch."""
        return Triangles(*(part[index] for part in self))

    def product_norms(self, other: Triangles, between: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return upper bounds on the norms of the products A M Bᵀ, with the products' leading singular
        vectors.

        ``self`` stands for A, ``other`` for B, and ``between`` (*batch, k, l) for M, by default the identity.
        """
        norm = torch.linalg.matrix_norm
        left = self.r if between is None else self.r @ between
        core = left @ other.r.mT
        sizes, other_size = norm(self.r), norm(other.r)
        middle = 1.0 if between is None else norm(between)
        # Two products of matrices round, and each of the two rests meets all that is beside it.
        roundings = gamma(sum(self.r.shape[-2:]) + sum(other.r.shape[-2:]))
        lost = roundings * sizes * other_size + other.rest * sizes
        rest = self.stretch * lost + self.rest * (other.stretch * other_size + other.rest)
        proved, u, v = spectral_norms_with_vectors(core)
        found = above(self.stretch * other.stretch * proved + up(middle * rest), 4)
        return found, (self.q @ u[..., None])[..., 0], (other.q @ v[..., None])[..., 0]


def product_norms_above(
    left: Float[Tensor, "*batch m k"], right: Float[Tensor, "*batch k d"]
) -> Float[Tensor, "*batch"]:
    """Return tight upper bounds on the spectral norms of the products left @ right of float64 matrices.

    Only matrices of the smallest of the three sizes are decomposed. Where the product nearly cancels, the
    bound stays above some 10^-13 of the product of the Frobenius norms. Gradients are those of
    :func:`spectral_norms_above`.
    """
    with torch.no_grad():
        if left.shape[-1] < min(left.shape[-2], right.shape[-1]):
            found, u, v = Triangles.of(left).product_norms(Triangles.of(right.mT))
        else:
            sizes = torch.linalg.matrix_norm(left) * torch.linalg.matrix_norm(right)
            found, u, v = spectral_norms_with_vectors(left @ right)
            found = above(found + up(gamma(left.shape[-1]) * sizes), 1)
    if not (torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)):
        return found
    linear = ((left.mT @ u[..., None]) * (right @ v[..., None])).sum(dim=(-2, -1))
    return with_gradient(found, linear)


def with_gradient(bounds: Tensor, linear: Tensor) -> Tensor:
    """Return the values of ``bounds`` with the gradient of ``linear``, which has nearly the same values."""
    return bounds + (linear - linear.detach()) if linear.requires_grad else bounds


def _last_eigenvector(gram: Float[Tensor, "k k"]) -> Float[Tensor, "k"]:
    """Return an eigenvector for the largest eigenvalue by inverse iteration, faster than ``eigh``."""
    largest = torch.linalg.eigvalsh(gram)[-1]
    shift = torch.where(largest > 0, largest * (1 + 4 * len(gram) * torch.finfo(gram.dtype).eps), 1.0)
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factors, pivots, _ = torch.linalg.lu_factor_ex(gram - shift * identity)
    # The start has no symmetry by which it could be orthogonal to the eigenvector.
    v = torch.cos(torch.arange(1.0, len(gram) + 1, dtype=gram.dtype, device=gram.device).square())
    for _ in range(3):
        v = torch.linalg.lu_solve(factors, pivots, v[:, None])[:, 0]
        v = v / torch.linalg.vector_norm(v)
    if not bool(v @ gram @ v >= largest * (1 - 1e-13 * len(gram))):  # NaN, or converged to another eigenvalue
        v = torch.linalg.eigh(gram)[1][:, -1]
    return v


# ---- largest eigenvalues


def largest_eigenvalues_above(
    g: Float[Tensor, "batch r r"],
    slack: Float[Tensor, " batch"],
    guess: Float[Tensor, " batch"] | None = None,
    rise: float = 1e-7,
) -> Enclosed:
    """Return proved upper bounds on the largest eigenvalues of positive semidefinite matrices.

    ``g`` approximates these matrices G. ``slack`` bounds ‖E‖ for a symmetric E with E ≥ |g − G| entry by
    entry. ``g`` is overwritten, and only one triangle of it is read.

    t I − g is factorised. If the factorisation succeeds, then
    λ_max(g) ≤ t + γ_{r+1}/(1 − γ_{r+1}) · tr(t I − g) for any t (Rump, *Verification of positive
    definiteness*, BIT 46, 2006). The estimate ``guess`` is tried first for t, larger by ``rise``, or else a
    computed eigenvalue, larger by 10^-12. If a factorisation fails, t is raised.
    """
    if guess is None:
        guess, rise = largest_eigenvalue_estimates(g), 1e-12
    t = guess.clamp_min(0) * (1 + rise) + TINY
    own = g.diagonal(dim1=-2, dim2=-1).clone()
    shifted = g.neg_()
    m = g.shape[-1] + 2
    # The diagonal of t I − g rounds by u of the trace at most.
    factor = up(gamma(m) / (1 - gamma(m)) + 2 * U)
    shifted.diagonal(dim1=-2, dim2=-1).copy_(t[:, None] - own)
    if not bool(torch.linalg.cholesky_ex(shifted).info.any()):
        upper = t + factor * _trace(shifted)
        return Enclosed(above(upper + up(slack) + TINY, 2), t)
    plain, upper = torch.full_like(t, torch.inf), torch.full_like(t, torch.inf)
    waiting = torch.arange(len(t), device=t.device)
    while len(waiting):
        here = shifted if len(waiting) == len(t) else shifted[waiting]
        here.diagonal(dim1=-2, dim2=-1).copy_(t[waiting, None] - own[waiting])
        done = torch.linalg.cholesky_ex(here).info == 0
        proved = waiting[done]
        plain[proved] = t[proved]
        upper[proved] = t[proved] + factor * here.diagonal(dim1=-2, dim2=-1).sum(-1)[done]
        waiting = waiting[~done]
        t[waiting] = t[waiting] * (1 + rise) + TINY
        rise *= 4
    return Enclosed(above(upper + up(slack) + TINY, 2), plain)


def largest_eigenvalues_by_squaring(
    symmetric: Float[Tensor, "*batch r r"], squarings: int = 4, slack: Tensor | float = 0.0
) -> Float[Tensor, "*batch"]:
    """Return upper bounds on the largest eigenvalues of symmetric matrices, from matrix products alone.

    With p = 2^squarings the bound is (Σ λ^(2p))^(1/2p) = ‖G^p‖_F^(1/p), at most r^(1/2p) times too large.
    ``slack`` (*batch) bounds the norms of the differences from the matrices that are meant.

    The square is taken as P Pᵀ, whose norm is ‖P‖² also where rounding has made P unsymmetric. With P of
    norm s = ‖P‖_F that is off by ε, it is off by ε (2s + ε) + γ_r s², all in the Frobenius norm: the norm of
    |P| |P|ᵀ is at most s². What underflows is below ``LOST``.
    """
    # Lengths of r² numbers, with a few roundings more: roots make their relative errors smaller.
    roundings = 4 * symmetric.shape[-1] ** 2 + 64
    size = torch.linalg.vector_norm(symmetric, dim=(-2, -1))
    power = symmetric / torch.where(size > 0, size, 1.0)[..., None, None]
    found, error = above(1.0, roundings), gamma(8)
    for _ in range(squarings):
        power = power @ power.mT
        error = error * (2 * found + error) + gamma(symmetric.shape[-1] + 8) * found**2
        found = torch.linalg.vector_norm(power, dim=(-2, -1))
    bound: Tensor = above((found + error + LOST) ** (0.5**squarings) * size, roundings)
    return above(bound + slack, roundings)


def shrink(o: Float[Tensor, "rows m"]) -> Float[Tensor, "fewer m"]:
    """Replace a tall matrix O by a matrix T with fewer rows, such that ‖O B‖ <= ‖T B‖ for every matrix B.

    T has at most m rows, and TᵀT ≥ OᵀO. It is the Cholesky factor of OᵀO plus a shift that exceeds all
    rounding errors. The columns are first scaled by powers of two, so that the shift is small compared to
    each of them.
    """
    rows, m = o.shape
    if rows <= m:
        return o
    size = o.abs().amax(0)
    scale = torch.where(size > 0, torch.ldexp(torch.ones_like(size), -torch.frexp(size).exponent), 1.0)
    scaled = o * scale
    gram = scaled.mT @ scaled
    shift = 1.1 * (gamma(rows + 2) + gamma(m + 4)) * gram.diagonal().sum() + TINY
    for _ in range(8):
        shifted = gram.clone()
        shifted.diagonal().add_(shift)
        factor, info = torch.linalg.cholesky_ex(shifted, upper=True)
        if int(info) == 0:
            triangle: Tensor = factor / scale
            return triangle
        shift = shift * 4
    return o


# ---- norms that are asked for again and again


class MatrixNorms:
    """Upper bounds on the norms of matrices, each computed once and then cached.

    A matrix is identified by its address in memory, shape and strides. The cache keeps a reference to the
    matrix, so that no other tensor can reuse its address. The matrices must not be changed in place.
    """

    def __init__(self) -> None:
        self._found: dict[object, tuple[Tensor, Tensor, Tensor]] = {}

    def spectral(self, matrices: Float[Tensor, "*batch m r"]) -> Float[Tensor, "*batch"]:
        """Return an upper bound on the spectral norm ‖W‖₂ of each matrix W, from two matrix products.

        The bound is the Schatten norm (Σ σ⁸)^(1/8).
        """
        return self._of(matrices)[1]

    def absolute(self, matrices: Float[Tensor, "*batch m r"]) -> Float[Tensor, "*batch"]:
        """Return, for each matrix W, an upper bound on the spectral norm of the matrix |W| of absolute
        values.

        The bound is √(‖W‖₁ ‖W‖_∞), computed from the largest column sum and the largest row sum of |W|.
        """
        return self._of(matrices)[2]

    def learn(self, *several: Tensor) -> None:
        """Compute and cache the norms of several matrices. Matrices of one shape are computed together,
        because the time for small ones depends on the number of operations.
        """
        unknown = [matrices for matrices in several if _place(matrices) not in self._found]
        for shape in {matrices.shape for matrices in unknown}:
            alike = [matrices for matrices in unknown if matrices.shape == shape]
            stacked = torch.stack(alike)
            found = spectral_norms_above(stacked, squarings=1), absolute_norms_above(stacked)
            self._found |= zip(map(_place, alike), zip(alike, *found, strict=True), strict=True)

    def _of(self, matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.learn(matrices)
        return self._found[_place(matrices)]


def _place(matrices: Tensor) -> object:
    return matrices.data_ptr(), matrices.shape, matrices.stride()


def absolute_norms_above(matrices: Float[Tensor, "*batch m r"]) -> Float[Tensor, "*batch"]:
    """Return √(‖W‖₁ ‖W‖_∞), rounded up, for each matrix W: an upper bound on the spectral norm of |W|."""
    size = matrices.abs()
    found: Tensor = size.sum(dim=-1).amax(dim=-1).sqrt() * size.sum(dim=-2).amax(dim=-1).sqrt()
    return above(found, size.shape[-2] + size.shape[-1])
