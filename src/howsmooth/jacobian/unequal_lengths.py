"""The Jacobians of one map at several sequences of unequal lengths.

Their products are packed without padding (:func:`energy_products_together`): a projection maps each token by
itself, so the tokens of all sequences go through it in one matrix product, and the softmax of each sequence
is computed by itself, at its own length. Or they are joined to one batched operator
(:func:`joined_jacobian`), padded with zeros: for short sequences, above all on a GPU, starting an operation
takes longer than the operation.
The Jacobians are padded, not the tokens: each is computed at its own length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from howsmooth.attention import SelfAttention
from howsmooth.attention.compositions import layers
from howsmooth.jacobian.attention import AttentionJacobian
from howsmooth.jacobian.closed_form import ComposedJacobian, ResidualJacobian
from howsmooth.jacobian.norm_layers import NormJacobian, ScaleJacobian
from howsmooth.jacobian.softmax import Sink, SoftmaxDerivative
from howsmooth.spectral import LinearOperator
from howsmooth.spectral.operator import ProductError, squared_lengths

_Kind = TypeVar("_Kind", bound=LinearOperator)

__all__ = ["energy_products_together", "filled", "joined_jacobian", "shares_products"]


def shares_products(f: Callable[[Tensor], Tensor]) -> bool:
    """Return True if the map ``f`` has an attention layer. Then its Jacobians at sequences of different
    lengths can share matrix products.
    """
    return any(isinstance(layer, SelfAttention) for layer in layers(f))


def energy_products_together(
    operators: Sequence[LinearOperator], vectors: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return |J E|² (batch,) and JᵀJ E (batch, n, d) for each operator J and its tangent E (batch, n, d).

    The operators come from one call of ``closed_form_jacobians``, or are selected members of such operators.
    """
    attention = _instances(operators, AttentionJacobian)
    if attention is None:
        images = _products(operators, vectors)
        energies = [squared_lengths(image.flatten(1)) for image in images]
        return list(zip(energies, _products(operators, images, adjoint=True), strict=True))
    # The tokens of all sequences go through W_O, or W_Oᵀ W_O, in one product.
    energy, through = attention[0].projection.through(_heads(attention, vectors))
    grams = _heads_adjoint(attention, through, vectors)
    energies = _unpacked(energy, vectors)
    return [(energy.sum(dim=1), gram) for energy, gram in zip(energies, grams, strict=True)]


def _products(
    operators: Sequence[LinearOperator], vectors: Sequence[Tensor], *, adjoint: bool = False
) -> list[Tensor]:
    if (attention := _instances(operators, AttentionJacobian)) is not None:
        projection = attention[0].projection
        if adjoint:
            return _heads_adjoint(attention, projection.out_adjoint(_packed(vectors)), vectors)
        return _unpacked(projection.out(_heads(attention, vectors)), vectors)
    if (residual := _instances(operators, ResidualJacobian)) is not None:
        images = _products([op.inner for op in residual], vectors, adjoint=adjoint)
        return [e + image for e, image in zip(vectors, images, strict=True)]
    if (composed := _instances(operators, ComposedJacobian)) is not None:
        for parts in ([op.inner for op in composed], [op.outer for op in composed])[:: -1 if adjoint else 1]:
            vectors = _products(parts, vectors, adjoint=adjoint)
        return list(vectors)
    return [
        (op.adjoint_product if adjoint else op.product)(v) for op, v in zip(operators, vectors, strict=True)
    ]


def _heads(attention: Sequence[AttentionJacobian], vectors: Sequence[Tensor]) -> Tensor:
    projection = attention[0].projection
    rows = projection.into(_packed(vectors))
    heads = rows.new_empty(len(rows), projection.attention.heads * projection.attention.value_dim)
    for op, part, out in zip(attention, _unpacked(rows, vectors), _unpacked(heads, vectors), strict=True):
        op.heads(part, out)
    return heads


def _heads_adjoint(
    attention: Sequence[AttentionJacobian], heads: Tensor, vectors: Sequence[Tensor]
) -> list[Tensor]:
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


def _instances(operators: Sequence[LinearOperator], kind: type[_Kind]) -> list[_Kind] | None:
    """Return the operators if all are of the class ``kind``, not of a subclass, and otherwise None."""
    found = [op for op in operators if type(op) is kind]
    return found if len(found) == len(operators) else None


def joined_jacobian(operators: Sequence[LinearOperator]) -> LinearOperator:
    """Join the Jacobians of one map at sequences of different lengths to one batched operator.

    Products take vectors (batch, n, d) that are zero from each sequence's own length on, and return the
    products of the separate operators, padded with zeros. The operators are in one dtype, from one call of
    ``closed_form_jacobians``: attention with probabilities in memory, norms, layer scales, residuals and
    compositions of them. Raise TypeError for any others.
    """
    if len(operators) == 1:
        return operators[0]
    if (attention := _instances(operators, AttentionJacobian)) is not None:
        return _attention(attention)
    if (norms := _instances(operators, NormJacobian)) is not None:
        return _norm(norms)
    if (scales := _instances(operators, ScaleJacobian)) is not None:
        n = max(op.in_shape[0] for op in scales)
        return ScaleJacobian(scales[0].weight, sum(op.batch for op in scales), n)
    if (residuals := _instances(operators, ResidualJacobian)) is not None:
        return ResidualJacobian(joined_jacobian([op.inner for op in residuals]))
    if (composed := _instances(operators, ComposedJacobian)) is not None:
        return ComposedJacobian(
            joined_jacobian([op.outer for op in composed]), joined_jacobian([op.inner for op in composed])
        )
    raise TypeError(f"no common operator of {sorted({type(op).__name__ for op in operators})}")


def filled(rows: Float[Tensor, "*lead n d"], n: int) -> Float[Tensor, "*lead longest d"]:
    """Append rows of zeros to the matrix ``rows`` until it has ``n`` rows."""
    return rows if rows.shape[-2] == n else pad(rows, (0, 0, 0, n - rows.shape[-2]))


def _attention(operators: Sequence[AttentionJacobian]) -> AttentionJacobian:
    first = operators[0]
    query_norms, key_norms = zip(*(op.norms for op in operators), strict=True)
    return AttentionJacobian(
        _softmax([op.core for op in operators]),
        first.projection,
        (_optional_norm(query_norms), _optional_norm(key_norms)),
        ProductError.of_all([op.proved for op in operators]),
    )


def _optional_norm(norms: Sequence[NormJacobian | None]) -> NormJacobian | None:
    given = [norm for norm in norms if norm is not None]
    return _norm(given) if given else None


def _norm(norms: Sequence[NormJacobian]) -> NormJacobian:
    n = max(norm.in_shape[0] for norm in norms)
    unit, factor = (
        torch.cat([filled(getattr(norm, name), n) for norm in norms]) for name in ("unit", "factor")
    )
    proved = ProductError.of_all([norm.proved for norm in norms])
    return NormJacobian(norms[0].gain, unit, factor, proved, centred=norms[0].centred)


def _softmax(cores: Sequence[SoftmaxDerivative]) -> SoftmaxDerivative:
    """Join padded softmaxes. Zero rows and columns of P keep the padding from giving or taking anything."""
    lengths = [core.k.shape[1] for core in cores]
    longest = max(lengths)

    def of_queries(rows: Tensor, n: int) -> Tensor:
        return filled(rows.unflatten(1, (-1, n)), longest).flatten(1, 2)

    def of_keys(rows: Tensor, n: int) -> Tensor:
        return filled(rows, longest)

    def of_both(entries: Tensor, n: int) -> Tensor:
        return of_queries(of_keys(entries.mT, n).mT, n)

    def of_all(name: str, one: Callable[[Tensor, int], Tensor]) -> Tensor:
        parts = zip(map(attrgetter(name), cores), lengths, strict=True)
        return torch.cat([one(part, n) for part, n in parts])

    sink = None
    if cores[0].sink is not None:
        of_rows = of_all("sink.p", lambda p, n: of_queries(p[..., None], n)[..., 0])
        sink = Sink(of_rows, of_all("sink.k", lambda k, n: k), of_all("sink.away", of_queries))
    # Without a cap P∘D is the tensor P itself, and stays so.
    p = of_all("p", of_both)
    slope = p if all(core.slope is core.p for core in cores) else of_all("slope", of_both)
    return SoftmaxDerivative(
        q=of_all("q", of_queries),
        k=of_all("k", of_keys),
        v=of_all("v", of_keys),
        p=p,
        slope=slope,
        slope_of_keys=slope,
        mean=of_all("mean", of_queries),
        sink=sink,
    )
