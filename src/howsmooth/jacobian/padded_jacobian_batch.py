"""The Jacobians of one map at several sequences of unequal lengths, joined to one batched operator by padding
with zeros.

For short sequences, above all on a GPU, starting an operation takes longer than the operation. One padded
batch then takes less time than an operator for each length. The Jacobians are padded, not the tokens: each is
computed at its own length, and is zero in the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from howsmooth.jacobian.attention import AttentionJacobian
from howsmooth.jacobian.closed_form import ComposedJacobian, ResidualJacobian
from howsmooth.jacobian.norm_layers import NormJacobian, ScaleJacobian
from howsmooth.jacobian.packed_sequences import instances
from howsmooth.jacobian.softmax import Sink, SoftmaxDerivative
from howsmooth.spectral import LinearOperator
from howsmooth.spectral.operator import ProductError

__all__ = ["filled", "joined"]


def joined(operators: Sequence[LinearOperator]) -> LinearOperator:
    """Join the Jacobians of one map at sequences of different lengths to one batched operator.

    Products take vectors (batch, n, d) that are zero from each sequence's own length on, and return the
    products of the separate operators, padded with zeros.

    Parameters
    ----------
    operators
        Jacobians of one map in one dtype, from one call of ``closed_form_jacobians``: attention with
        probabilities in memory, norms, layer scales, residuals and compositions of them.

    Raises
    ------
    TypeError
        If the operators are of different or of other types.

    """
    if len(operators) == 1:
        return operators[0]
    if (attention := instances(operators, AttentionJacobian)) is not None:
        return _attention(attention)
    if (norms := instances(operators, NormJacobian)) is not None:
        return _norm(norms)
    if (scales := instances(operators, ScaleJacobian)) is not None:
        n = max(op.in_shape[0] for op in scales)
        return ScaleJacobian(scales[0].weight, sum(op.batch for op in scales), n)
    if (residuals := instances(operators, ResidualJacobian)) is not None:
        return ResidualJacobian(joined([op.inner for op in residuals]))
    if (composed := instances(operators, ComposedJacobian)) is not None:
        return ComposedJacobian(joined([op.outer for op in composed]), joined([op.inner for op in composed]))
    raise TypeError(f"no common operator of {sorted({type(op).__name__ for op in operators})}")


def filled(rows: Float[Tensor, "*lead n d"], n: int) -> Float[Tensor, "*lead longest d"]:
    """Append rows of zeros to the matrix ``rows`` until it has ``n`` rows."""
    return rows if rows.shape[-2] == n else pad(rows, (0, 0, 0, n - rows.shape[-2]))


def _attention(operators: Sequence[AttentionJacobian]) -> AttentionJacobian:
    first = operators[0]
    query_norms, key_norms = zip(*(op.norms for op in operators), strict=True)
    return AttentionJacobian(
        first.projection,
        _softmax([(op.core, op.in_shape[0]) for op in operators]),
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


def _softmax(cores: Sequence[tuple[SoftmaxDerivative, int]]) -> SoftmaxDerivative:
    """Join the derivatives of softmax attention at several sequences, padded to the longest sequence.

    The query heads of a group lie one after the other on one axis, and each is padded by itself. Padded rows
    and columns of P are zero, so that the padding neither gives nor takes anything.
    """
    longest = max(n for _, n in cores)

    def of_queries(rows: Tensor, n: int) -> Tensor:
        return filled(rows.unflatten(1, (-1, n)), longest).flatten(1, 2)

    def of_keys(rows: Tensor, n: int) -> Tensor:
        return filled(rows, longest)

    def of_both(entries: Tensor, n: int) -> Tensor:
        return of_queries(of_keys(entries.mT, n).mT, n)

    def of_all(name: str, one: Callable[[Tensor, int], Tensor]) -> Tensor:
        return torch.cat([one(getattr(core, name), n) for core, n in cores])

    sinks = [(core.sink, n) for core, n in cores if core.sink is not None]
    # Without a cap P∘D is the tensor P itself, and stays so.
    p = of_all("p", of_both)
    slope = p if all(core.slope is core.p for core, _ in cores) else of_all("slope", of_both)
    return SoftmaxDerivative(
        q=of_all("q", of_queries),
        k=of_all("k", of_keys),
        v=of_all("v", of_keys),
        p=p,
        slope=slope,
        slope_of_keys=slope,
        mean=of_all("mean", of_queries),
        sink=None
        if not sinks
        else Sink(
            p=torch.cat([of_queries(sink.p[..., None], n)[..., 0] for sink, n in sinks]),
            k=torch.cat([sink.k for sink, _ in sinks]),
            away=torch.cat([of_queries(sink.away, n) for sink, n in sinks]),
        ),
    )
