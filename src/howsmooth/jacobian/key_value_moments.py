"""Second moments of keys and values under the attention probabilities, from which rounding errors are
bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.jacobian.centred_projections import Operands
from howsmooth.rounding import gamma

__all__ = ["Deviations", "moment_columns"]


@dataclass(frozen=True, eq=False)
class Deviations:
    """Upper bounds on how far keys and values deviate from their means under the attention probabilities P,
    and on norms of P.

    Axes: b = batch member times key/value head, m = query rows of all its query heads.
    """

    total: Float[Tensor, "b m"]  # Σ_j P_ij over the keys without the sink
    sink: Float[Tensor, "b m"]  # the probability of the sink
    # (Σ_j P_ij |k_j − c_i|²)^½, sink included, c_i the average of the keys under P. If the scores have a cap,
    # keys are not shifted and c_i is zero.
    keys: Float[Tensor, "b m"]
    values: Float[Tensor, "b m"]  # (Σ_j P_ij |v_j − O_i|²)^½, sink included
    squares: Float[Tensor, "b m"]  # (Σ_j P_ij²)^½ over the keys without the sink
    spread: Float[Tensor, " b"]  # the spectral norm ‖P‖

    @classmethod
    def of(
        cls,
        operands: Operands,
        averages: Float[Tensor, "b m columns"],
        mean: Float[Tensor, "b m value_dim"],
        total: Float[Tensor, "b m"],
        sink: Float[Tensor, "b m"],
        p: Float[Tensor, "b m n"] | None = None,
    ) -> Deviations:
        """Compute the bounds from averages under the attention probabilities P. ``averages`` are those of the
        columns of :func:`moment_columns`, and ``mean`` those of the shifted values. If P is not kept, ``p``
        is None, and ``squares`` and ``spread`` are bounded by row sums.
        """
        key_dim, n = operands.k.shape[-1], operands.k.shape[2]
        centre = averages[..., :key_dim]
        key_square, value_square, *whole = averages[..., key_dim:].unbind(-1)
        slack = gamma(n + key_dim + mean.shape[-1] + 16)

        def variance(square: Tensor, middle: Tensor) -> Tensor:
            # E|x|² − |E x|², with an allowance for the rounding of both, which may cancel.
            less = middle.square().sum(dim=-1)
            return (square - less).clamp_min(0.0) + slack * (square + less)

        if operands.features.sinks is None:
            values = variance(value_square, mean)
        else:
            shift = operands.value_shift.reshape(operands.heads, 1, -1).square().sum(dim=-1)
            # Two upper bounds: about O with the sink's shifted value, or about zero, where the unshifted
            # value of the sink lies and contributes nothing.
            values = torch.minimum(variance(value_square + sink * shift, mean), (1 + slack) * whole[1])
        if operands.features.softcap is not None:
            keys = (1 + slack) * key_square
        elif operands.features.sinks is None:
            keys = variance(key_square, centre)
        else:
            shift = operands.key_shift.reshape(operands.heads, 1, -1)
            square = key_square + sink * shift.square().sum(dim=-1)
            keys = torch.minimum(variance(square, centre - sink[..., None] * shift), (1 + slack) * whole[0])
        if p is None:
            squares, spread = total, torch.linalg.vector_norm(total, dim=-1)
        else:
            squares = torch.linalg.vector_norm(p, dim=-1)
            spread = (total.amax(dim=-1) * p.sum(dim=1).amax(dim=-1)).sqrt()
        return cls(total, sink, keys.sqrt(), values.sqrt(), squares, spread)


def moment_columns(operands: Operands) -> Float[Tensor, "b n columns"]:
    """Return a table with a row for each key. Averages of its columns under P determine :class:`Deviations`.

    They are k, |k|² and |v|². If there is a sink, |k|² and |v|² of the unshifted keys and values follow.
    """
    k, v = operands.k.flatten(0, 1), operands.v.flatten(0, 1)
    squared = [k, v]
    if operands.features.sinks is not None:
        squared += [operands.whole_keys.flatten(0, 1), operands.whole_values.flatten(0, 1)]
    return torch.cat((k, *(t.square().sum(dim=-1, keepdim=True) for t in squared)), dim=-1)
