"""Products with the Jacobians of one map at sequences of unequal lengths, without padding.

A projection maps each token by itself, so the tokens of all sequences go through it in one matrix product.
The softmax of each sequence is computed by itself, at its own length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.jacobian.attention import AttentionJacobian
from howsmooth.jacobian.closed_form import ComposedJacobian, ResidualJacobian, layers
from howsmooth.spectral import LinearOperator
from howsmooth.spectral.operator import squared_lengths

_Kind = TypeVar("_Kind", bound=LinearOperator)

__all__ = ["energy_products_together", "instances", "shares_products"]


def shares_products(f: Callable[[Tensor], Tensor]) -> bool:
    """Return True if sequences of different lengths share matrix products in the Jacobian of ``f``: if it has
    an attention layer.
    """
    return any(isinstance(layer, SelfAttention) for layer in layers(f))


def energy_products_together(
    operators: Sequence[LinearOperator], vectors: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return |J E|² (batch,) and JᵀJ E (batch, n, d) for each operator J and its tangent E (batch, n, d).

    The operators come from one call of ``closed_form_jacobians``, or are selected members of such operators.
    """
    attention = instances(operators, AttentionJacobian)
    if attention is None:
        images = _products(operators, vectors)
        energies = [squared_lengths(image.flatten(1)) for image in images]
        return list(zip(energies, _adjoint_products(operators, images), strict=True))
    # The tokens of all sequences go through W_O, or W_Oᵀ W_O, in one product.
    energy, through = attention[0].projection.through(_heads(attention, vectors))
    grams = _heads_adjoint(attention, through, vectors)
    energies = _unpacked(energy, vectors)
    return [(energy.sum(dim=1), gram) for energy, gram in zip(energies, grams, strict=True)]


def _products(operators: Sequence[LinearOperator], vectors: Sequence[Tensor]) -> list[Tensor]:
    if (attention := instances(operators, AttentionJacobian)) is not None:
        return _unpacked(attention[0].projection.out(_heads(attention, vectors)), vectors)
    if (residual := instances(operators, ResidualJacobian)) is not None:
        images = _products([op.inner for op in residual], vectors)
        return [e + image for e, image in zip(vectors, images, strict=True)]
    if (composed := instances(operators, ComposedJacobian)) is not None:
        return _products([op.outer for op in composed], _products([op.inner for op in composed], vectors))
    return [op.product(e) for op, e in zip(operators, vectors, strict=True)]


def _adjoint_products(operators: Sequence[LinearOperator], vectors: Sequence[Tensor]) -> list[Tensor]:
    if (attention := instances(operators, AttentionJacobian)) is not None:
        return _heads_adjoint(attention, attention[0].projection.out_adjoint(_packed(vectors)), vectors)
    if (residual := instances(operators, ResidualJacobian)) is not None:
        images = _adjoint_products([op.inner for op in residual], vectors)
        return [u + image for u, image in zip(vectors, images, strict=True)]
    if (composed := instances(operators, ComposedJacobian)) is not None:
        outer = _adjoint_products([op.outer for op in composed], vectors)
        return _adjoint_products([op.inner for op in composed], outer)
    return [op.adjoint_product(u) for op, u in zip(operators, vectors, strict=True)]


def _heads(attention: Sequence[AttentionJacobian], vectors: Sequence[Tensor]) -> Tensor:
    """Return the tangents of the heads' outputs, with a row for each token of each sequence."""
    projection = attention[0].projection
    rows = projection.into(_packed(vectors))
    heads = rows.new_empty(len(rows), projection.attention.heads * projection.attention.value_dim)
    for op, part, out in zip(attention, _unpacked(rows, vectors), _unpacked(heads, vectors), strict=True):
        op.heads(part, out)
    return heads


def _heads_adjoint(
    attention: Sequence[AttentionJacobian], heads: Tensor, vectors: Sequence[Tensor]
) -> list[Tensor]:
    """Return the cotangents of the tokens of each sequence, in the shapes of ``vectors``."""
    projection = attention[0].projection
    rows = heads.new_empty(len(heads), sum(projection.sizes))
    for op, part, out in zip(attention, _unpacked(heads, vectors), _unpacked(rows, vectors), strict=True):
        op.heads_adjoint(part, out)
    return _unpacked(projection.into_adjoint(rows), vectors)


def _packed(batches: Sequence[Tensor]) -> Tensor:
    first, *more = (batch.flatten(0, 1) for batch in batches)
    return torch.cat((first, *more)) if more else first


def _unpacked(rows: Tensor, batches: Sequence[Tensor]) -> list[Tensor]:
    parts = rows.split([batch.shape[0] * batch.shape[1] for batch in batches])
    return [part.unflatten(0, batch.shape[:2]) for part, batch in zip(parts, batches, strict=True)]


def instances(operators: Sequence[LinearOperator], kind: type[_Kind]) -> list[_Kind] | None:
    """Return the operators if all are of the class ``kind``, not of a subclass, and otherwise None."""
    found = [op for op in operators if type(op) is kind]
    return found if len(found) == len(operators) else None
