"""Queries and keys that are turned, scaled or normed on their way from X to the softmax, found by value.

A head's queries are s·R_i N(W x_i): a linear map that was recorded, perhaps a norm N, a rotation R_i of pairs
of entries by the position i, the same for all heads and for the keys, and a factor s. The rotations are not
read from tables, which models keep in many forms: each is the least-squares solution over all heads of
queries and keys, and the reading holds only if one rotation a position and pair explains every head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, Rotary
from howsmooth.models.tolerance import precision, relative_error, tolerance

__all__ = ["FittedRotary", "ProjectionReading", "fit_rotary", "projection_readings", "reordered"]

Norm = LayerNorm | RMSNorm


@dataclass(frozen=True, eq=False)
class ProjectionReading:
    """A reading of the queries, or of the keys, up to a rotation and a factor."""

    columns: Int64[Tensor, " wanted"]  # of the linear outputs
    norm: Norm | None
    base: Float[Tensor, "heads n dim"]  # these columns, normed
    given: Float[Tensor, "heads n dim"]  # what the softmax was given, without the factor
    factor: float


@dataclass(frozen=True, eq=False)
class FittedRotary:
    """A rotation that explains queries and keys."""

    rotary: Rotary | None
    order: Int64[Tensor, " dim"]  # of the entries of a head, in which pairs are a half apart


def projection_readings(
    given: Float[Tensor, "heads n dim"],
    outputs: Float[Tensor, "n columns"],
    slices: Sequence[Int64[Tensor, " wanted"]],
    norms: Sequence[Norm],
) -> Iterator[ProjectionReading]:
    """Yield readings in which each head's vectors are as long as those of the linear map, up to one factor.

    ``given`` are the queries or keys of one sequence, ``outputs`` all linear maps of X side by side,
    ``slices`` the columns of these that may be theirs, and ``norms`` those that ran before the softmax.
    """
    heads, n, dim = given.shape
    loose = tolerance(precision(torch.float32))  # norms and tables may be float32 in a float64 model
    for columns in slices:
        plain = outputs[:, columns]
        # A norm of all heads together would leave the map without scope "head": the stages keep it.
        for norm in (None, *(norm for norm in norms if norm.d == dim)):
            base = plain.reshape(n, heads, dim).transpose(0, 1)
            base = base if norm is None else norm(base)
            lengths, own = (torch.linalg.vector_norm(t, dim=-1) for t in (given, base))
            factor = float(torch.linalg.vector_norm(given) / torch.linalg.vector_norm(base))
            if not 0.0 < factor < float("inf") or relative_error(own * factor, lengths) > loose:
                continue
            usual = (1.0, dim**-0.5, dim**-0.25)
            factor = next((u for u in usual if abs(factor - u) <= loose * u), factor)
            yield ProjectionReading(columns, norm, base, given / factor, factor)


def fit_rotary(query: ProjectionReading, key: ProjectionReading) -> FittedRotary | None:
    """Find the rotation that is common to all heads of queries and keys; None if there is none."""
    wanted, base = torch.cat((query.given, key.given)), torch.cat((query.base, key.base))
    dim = base.shape[-1]
    plain = query.norm is None and key.norm is None
    tol = tolerance(precision(base.dtype, downcast=not plain))
    order = torch.arange(dim, device=base.device)
    if relative_error(base, wanted) <= tol:
        return FittedRotary(None, order)
    # Entries that are not turned are the same to the last digit, if nothing else was done to them.
    slack = 0.0 if plain and query.factor == key.factor == 1.0 else tol
    differ = ((wanted - base).abs() > slack * wanted.abs().max()).flatten(0, 1).any(dim=0).nonzero()
    least = int(differ.max()) // 2 * 2 + 2
    for width in sorted({least, dim // 4, dim // 2, 3 * dim // 4, dim // 2 * 2}):
        if width < least or width > dim or width % 2:
            continue
        first, rest = order[:width], order[width:]
        for pairs in (first, torch.cat((first[::2], first[1::2]))):
            order_tried = torch.cat((pairs, rest))
            rotary = _rotary(wanted[..., order_tried], base[..., order_tried], width, tol)
            if rotary is not None:
                return FittedRotary(rotary, order_tried)
    return None


def _rotary(
    wanted: Float[Tensor, "heads n dim"], base: Float[Tensor, "heads n dim"], width: int, tol: float
) -> Rotary | None:
    half = width // 2
    z, w = (torch.complex(t[..., :half].double(), t[..., half:width].double()) for t in (base, wanted))
    size = z.abs().square().sum(dim=0)
    turn = (w * z.conj()).sum(dim=0) / size.clamp(min=torch.finfo(torch.float64).tiny)
    turn = torch.where(size > 0, turn, 1.0)
    cos, sin = (t.to(base.dtype).repeat(1, 2) for t in (turn.real, turn.imag))
    rotary = Rotary(cos, sin)
    return rotary if relative_error(rotary.rotate(base), wanted) <= tol else None


def reordered(norm: Norm | None, order: Int64[Tensor, " dim"]) -> Norm | None:
    """Return the norm of a head whose entries were put in another order."""
    if norm is None:
        return None

    if isinstance(norm, LayerNorm):
        return LayerNorm(norm.weight[order], None if norm.bias is None else norm.bias[order], norm.eps)
    return RMSNorm(norm.weight[order], norm.eps)
