"""Detection of rotary positions, norm layers and scales between the linear projections and the softmax.

The query of token i in one head is s·R_i N(W x_i): W is a linear projection, N a norm or the identity, s a
scale, and R_i rotates pairs of entries by angles that depend on the position i. All heads of queries and keys
share R_i. Models store rotary tables in many forms, so R_i is fitted: for each position and pair it is the
least-squares rotation over all heads. It is accepted only if it explains every head up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, Rotary
from howsmooth.models.tolerance import lowest_epsilon, relative_error, tolerance

__all__ = ["FittedRotary", "ProjectionReading", "fit_rotary", "projection_readings", "reordered"]

Norm = LayerNorm | RMSNorm
# A float64 model may compute norms and rotary tables in float32.
_LOOSE = tolerance(lowest_epsilon(torch.float32))


@dataclass(frozen=True, eq=False)
class ProjectionReading:
    """Columns of linear modules' outputs that may be the queries or keys before rotary positions."""

    columns: Int64[Tensor, " wanted"]
    norm: Norm | None  # the norm of each head, or of all heads as one vector, after the projection
    base: Float[Tensor, "heads n dim"]  # the columns after the norm
    given: Float[Tensor, "heads n dim"]  # the queries or keys of the softmax, divided by the factor
    factor: float  # the scale s


@dataclass(frozen=True, eq=False)
class FittedRotary:
    """The rotation that turns linear projections of the tokens into the queries and keys of the softmax."""

    rotary: Rotary | None  # None if nothing is rotated
    #: The order of the entries of a head in which rotated pairs are half the width apart.
    order: Int64[Tensor, " dim"]
    factor: float  # the scale of the queries times the scale of the keys


def projection_readings(
    given: Float[Tensor, "heads n dim"],
    outputs: Float[Tensor, "n columns"],
    slices: Sequence[Int64[Tensor, " wanted"]],
    norms: Sequence[Norm],
) -> Iterator[ProjectionReading]:
    """Yield those ``slices`` of the outputs of linear maps that may be the queries (or keys) before rotary
    positions, each with one of the ``norms`` or with none.

    Rotations preserve lengths. So the columns are yielded only if, up to one common factor, their vectors
    have the lengths of the queries (or keys) ``given`` to the softmax.
    """
    heads, n, dim = given.shape
    for columns in slices:
        plain = outputs[:, columns]
        for norm in (None, *(norm for norm in norms if norm.d in (dim, heads * dim))):
            over_all = norm is not None and norm.d != dim  # OLMo 2 norms all heads as one vector
            base = (plain if norm is None or not over_all else norm(plain)).reshape(n, heads, dim)
            base = base.transpose(0, 1)
            base = base if norm is None or over_all else norm(base)
            lengths, own = (torch.linalg.vector_norm(t, dim=-1) for t in (given, base))
            factor = float(torch.linalg.vector_norm(given) / torch.linalg.vector_norm(base))
            if 0.0 < factor < float("inf") and relative_error(own * factor, lengths) <= _LOOSE:
                factor = _usual(factor, dim)
                yield ProjectionReading(columns, norm, base, given / factor, factor)


def _usual(factor: float, dim: int) -> float:
    """Return a usual scale of queries or keys that is close to a measured factor, else the factor itself."""
    usual = (dim**power for power in (0.0, -0.5, -0.25, 0.25, 0.5))
    return next((u for u in usual if abs(factor - u) <= _LOOSE * u), factor)


def fit_rotary(query: ProjectionReading, key: ProjectionReading) -> FittedRotary | None:
    """Return the rotation that turns the projections into the queries and keys, or None if there is none."""
    dim = query.base.shape[-1]
    # Rotary tables may hold a factor of their own (YaRN), in float32 in a float64 model. It is measured with
    # other errors in the queries than in the keys, and only their quotient must be exact: the fitted rotation
    # has the rest.
    of_key = query.factor * _usual(key.factor / query.factor, dim)
    wanted = torch.cat((query.given, key.given * (key.factor / of_key)))
    base, factor = torch.cat((query.base, key.base)), query.factor * of_key
    plain = query.norm is None and key.norm is None
    tol = tolerance(lowest_epsilon(base.dtype, downcast=not plain))
    order = torch.arange(dim, device=base.device)
    if relative_error(base, wanted) <= tol:
        return FittedRotary(None, order, factor)
    # Entries that are not rotated agree exactly if there is neither a norm nor a scale.
    slack = 0.0 if plain and query.factor == key.factor == 1.0 else tol
    differ = ((wanted - base).abs() > slack * wanted.abs().max()).flatten(0, 1).any(dim=0).nonzero()
    # Rotated entries come first in a head. Their number is at least ``least`` and mostly a quarter, a half,
    # three quarters or all of the head; pairs are a half of it apart, or neighbours.
    least = int(differ.max()) // 2 * 2 + 2
    for width in sorted({least, dim // 4, dim // 2, 3 * dim // 4, dim // 2 * 2}):
        if width < least or width > dim or width % 2:
            continue
        first, rest = order[:width], order[width:]
        for pairs in (first, torch.cat((first[::2], first[1::2]))):
            order_tried = torch.cat((pairs, rest))
            rotary = _rotary(wanted[..., order_tried], base[..., order_tried], width, tol)
            if rotary is not None:
                return FittedRotary(rotary, order_tried, factor)
    return None


def _rotary(
    wanted: Float[Tensor, "heads n dim"], base: Float[Tensor, "heads n dim"], width: int, tol: float
) -> Rotary | None:
    half = width // 2
    z, w = (torch.complex(t[..., :half].double(), t[..., half:width].double()) for t in (base, wanted))
    # A pair of entries is a complex number, and a rotation multiplies it by a number. For w ≈ turn * z the
    # least-squares solution over the heads is Σ w z̄ / Σ |z|²; pairs that are zero everywhere are not
    # rotated.
    size = z.abs().square().sum(dim=0)
    turn = (w * z.conj()).sum(dim=0) / size.clamp(min=torch.finfo(torch.float64).tiny)
    turn = torch.where(size > 0, turn, 1.0)
    cos, sin = (t.to(base.dtype).repeat(1, 2) for t in (turn.real, turn.imag))
    rotary = Rotary(cos, sin)
    return rotary if relative_error(rotary.rotate(base), wanted) <= tol else None


def reordered(norm: Norm | None, order: Int64[Tensor, " dim"]) -> Norm | None:
    """Return a norm layer whose weight and bias have their entries in another order within each head."""
    if norm is None:
        return None
    starts = torch.arange(0, norm.d, len(order), device=order.device)  # of each head, if it is over all
    order = (starts[:, None] + order).flatten()
    if isinstance(norm, LayerNorm):
        return LayerNorm(norm.weight[order], None if norm.bias is None else norm.bias[order], norm.eps)
    return RMSNorm(norm.weight[order], norm.eps)
