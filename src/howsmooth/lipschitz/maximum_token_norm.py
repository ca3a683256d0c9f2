"""The Lipschitz constant of a map in the norm max_i |x_i|, with a lower and an upper limit.

It is the largest change of one output token if every input token changes by at most one in norm.

For output token i it is the largest |Σ_j J_ij e_j| over tangents with |e_j| ≤ 1 for every token j. For a
fixed direction u of the output the best tangents are e_j = J_ijᵀ u / |J_ijᵀ u|, and for fixed tangents the
best u is the direction of Σ_j J_ij e_j. Taking the two in turn never lowers the value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.jacobian import closed_form_jacobian
from howsmooth.jacobian.closed_form import has_closed_form, in_double
from howsmooth.lipschitz.block_norms import BlockNorms
from howsmooth.rounding import interval_in_digits
from howsmooth.seeds import torch_seed
from howsmooth.spectral import LinearOperator
from howsmooth.spectral.scaling import Scaled, unscaled

__all__ = ["TokenWise", "attained", "token_wise_ascent", "token_wise_lipschitz", "unit_rows"]

# The constant is sought at this many outputs, those of the largest sums of norms.
_CANDIDATES = 3
# Random directions of the output from which the ascent starts.
_STARTS = 2
_STEPS = 200


@dataclass(frozen=True, eq=False)
class TokenWise:
    """How far one output token of a map can move, to first order, while every input token moves by at most
    one in norm.

    The constant is max_i sup |Σ_j J_ij e_j| over tangents with |e_j| ≤ 1, the local Lipschitz constant of the
    map between the norms max_j |e_j| of tokens.
    """

    #: Lower limit, which the directions attain.
    lower: float
    #: Upper limit max_i Σ_j ‖J_ij‖, from the upper limits of the blocks.
    upper: float
    #: The output token i at which the lower limit is attained.
    output: int
    #: The tangents e_j (n, d) that attain the lower limit; each has a norm of at most one.
    input_direction: Float[Tensor, "n d"]
    #: The unit vector (d_out,) along which the output token moves.
    output_direction: Float[Tensor, " d_out"]

    @property
    def value(self) -> float:
        """The largest change of an output token that was found, which is a lower limit of the maximum."""
        return self.lower

    def __repr__(self) -> str:
        return f"TokenWise(in {interval_in_digits(self.lower, self.upper)}, at output {self.output})"


def token_wise_lipschitz(
    f: Callable[[Tensor], Tensor],
    x: Float[Tensor, "n d"],
    jacobian: LinearOperator,
    norms: BlockNorms,
    outputs: Sequence[int],
    *,
    rtol: float,
    seed: int,
) -> TokenWise:
    """Bound from both sides the largest change of the given output tokens if every input token changes by at
    most one in norm.

    ``jacobian`` is that of ``f`` at its tokens ``x``
    (:func:`~howsmooth.lipschitz.block_norms.sequence_jacobian`), and ``norms`` are those of its blocks, with
    a row for each of the ``outputs``. ``rtol`` and ``seed`` are as for :func:`token_wise_ascent`.
    """
    sums = norms.value.sum(dim=1)
    tried = [outputs[k] for k in sums.argsort(descending=True)[:_CANDIDATES].tolist()]
    climbing = jacobian
    if isinstance(f, TokenMap) and x.dtype != jacobian.dtype and has_closed_form(f):
        climbing = closed_form_jacobian(in_double(f), x.double()[None], dtype=x.dtype)
    i, e, _ = token_wise_ascent(climbing, tried, rtol=rtol, seed=seed)
    # Rounded to the dtype of the tokens, the tangents may be longer than one by a few units of rounding.
    e = unit_rows(e.double()).to(x.dtype)
    longest = max(1.0, float(torch.linalg.vector_norm(e.double(), dim=-1).max()))
    value, u, error = attained(jacobian, i, e.to(jacobian.dtype))
    if isinstance(jacobian, Scaled):
        limits = np.array([[value], [max(value - error, 0.0)], [value + error]])
        lower = unscaled(limits, jacobian.powers.total, jacobian.dtype)[1].item() / longest
    else:
        lower = max(value - error, 0.0) / longest
    return TokenWise(lower, float(norms.upper.sum(dim=1).max()), i, e, u.to(x.dtype))


def token_wise_ascent(
    operator: LinearOperator, outputs: Sequence[int], *, rtol: float, seed: int
) -> tuple[int, Float[Tensor, "n d"], float]:
    """Search for changes of all input tokens, each of norm at most one, that maximise the change of one of
    the given output tokens. Return that token i, the tangents e (n, d), and the value |Σ_j J_ij e_j|.

    ``operator`` is the Jacobian at one sequence, with tokens (n, d) as input, and (n_out, d_out) or (d_out,)
    as output. The ascent ends when a step raises the value by less than the share ``rtol``.
    """
    generator = torch.Generator().manual_seed(torch_seed(seed))
    best = (outputs[0], torch.zeros(operator.in_shape, dtype=operator.dtype, device=operator.device), -1.0)
    for i in outputs:
        for _ in range(_STARTS):
            u = torch.randn(operator.out_shape[-1], generator=generator, dtype=torch.float64)
            e, value = _climbed(operator, i, u.to(dtype=operator.dtype, device=operator.device), rtol)
            if value > best[2]:
                best = (i, e, value)
    return best


def attained(
    operator: LinearOperator, i: int, e: Float[Tensor, "n d"]
) -> tuple[float, Float[Tensor, " d_out"], float]:
    """Return the norm and the direction of the change of output token ``i`` for given changes ``e`` of all
    input tokens. The third result is the rounding error of the norm.

    The operator is the Jacobian at one sequence, in the dtype of the tangents ``e``.
    """
    image = operator.product(e[None]).view(-1, operator.out_shape[-1])
    value = float(image[i].double().norm())
    if operator.proved is not None:
        error = float(operator.proved.total.max()) * float(e.double().norm())
    else:
        error = float(operator.rounding.max()) * float(image.double().norm())
    return value, image[i] / value if value else image[i], error


def _climbed(
    operator: LinearOperator, i: int, u: Float[Tensor, " d_out"], rtol: float
) -> tuple[Float[Tensor, "n d"], float]:
    """Climb from ``u`` to changes of the tokens, each of norm <= 1, that change output token ``i`` most."""
    value = 0.0
    for _ in range(_STEPS):
        cotangent = torch.zeros(operator.out_size // len(u), len(u), dtype=u.dtype, device=u.device)
        cotangent[i] = u
        e = unit_rows(operator.adjoint_product(cotangent.view(1, *operator.out_shape))[0])
        before = value
        value, u, _ = attained(operator, i, e)
        if value <= before * (1 + rtol):
            break
    return e, value


def unit_rows(e: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Divide each row of a matrix by its norm, and leave zero rows unchanged."""
    length = torch.linalg.vector_norm(e, dim=-1, keepdim=True)
    return torch.where(length > 0, e / length, 0.0)
