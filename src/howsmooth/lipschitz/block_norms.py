"""The spectral norms of the blocks ∂y_i/∂x_j of a Jacobian, which measure how much output token i changes
when input token j changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.errors import DerivativeError
from howsmooth.jacobian import AutodiffJacobian, closed_form_jacobian
from howsmooth.jacobian.closed_form import has_closed_form, in_double
from howsmooth.jacobian.token_pair_blocks import DenseBlocks, TokenBlocks
from howsmooth.lipschitz.singular_value_solver import Solver
from howsmooth.rounding import spectral_norm_above
from howsmooth.spectral import LeadingTriplet, LinearOperator
from howsmooth.spectral.float32_products import CheckedProducts
from howsmooth.spectral.scaling import Scaled, unscaled

__all__ = ["BlockNorms", "block_norms", "sequence_jacobian"]

# Number of blocks that are iterated together: their vectors should stay in the caches of a processor.
_PAIRS = 256
# Products with the adjoint that PyTorch makes together.
_TOGETHER = 32
# Bytes of the columns of one input token that are kept for a group of output tokens.
_COLUMN_BYTES = 2**29
# The error of float32 products shows how far the terms of a block cancel: float64 products err by that, times
# the operator's relative rounding error as a multiple of the unit of float32, times this margin. A weight
# P = e^s is as uncertain as s, by up to 4 units of rounding times the largest score κ (as in
# ``SoftmaxDerivative.rounding``), and the operator's error contains κ / 25.
_MARGIN = 100.0
_SMALLEST = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class BlockNorms:
    """The spectral norms of the blocks ∂y_i/∂x_j of a Jacobian, for some output tokens i and all input tokens
    j, with intervals.
    """

    value: Float[Tensor, "outputs n"]
    lower: Float[Tensor, "outputs n"]
    upper: Float[Tensor, "outputs n"]
    converged: Bool[Tensor, "outputs n"]
    iterations: Int[Tensor, "outputs n"]

    @classmethod
    def zeros(cls, outputs: int, n: int) -> BlockNorms:
        """Return a table of zeros, into which :meth:`write` writes the measured norms."""
        value, lower, upper = torch.zeros(3, outputs, n, dtype=torch.float64)
        steps = torch.zeros(outputs, n, dtype=torch.int64)
        return cls(value, lower, upper, torch.ones(outputs, n, dtype=torch.bool), steps)

    def write(
        self,
        rows: Int[Tensor, " pairs"],
        columns: Int[Tensor, " pairs"],
        found: LeadingTriplet,
        error: Float[Tensor, " pairs"],
        rtol: float,
        factor: Float[Tensor, " pairs"] | float = 1.0,
        jacobian: LinearOperator | None = None,
    ) -> None:
        """Store the spectral norms of some blocks ∂y_i/∂x_j in the table. They are computed from the singular
        values ``found`` for these blocks after scaling.

        The blocks were multiplied by ``factor``, or are those of the scaled ``jacobian``. Intervals are
        widened by ``error`` on each side.
        """
        limits = found.sigma, (found.lower - error).clamp_min(0.0), found.upper + error
        if isinstance(jacobian, Scaled):
            made = unscaled(torch.stack(limits).numpy(), jacobian.powers.total, jacobian.dtype)
            value, lower, upper = torch.from_numpy(made)
        else:
            value, lower, upper = (limit / factor for limit in limits)
        place = rows.cpu(), columns.cpu()
        self.value[place], self.lower[place], self.upper[place] = value, lower, upper
        self.converged[place] = upper - lower <= rtol * value
        self.iterations[place] = found.steps


def block_norms(
    jacobian: TokenBlocks | LinearOperator,
    outputs: Int[Tensor, " outputs"],
    dtype: torch.dtype,
    solver: Solver,
    on_output: Callable[[float, int], None] | None = None,
    readout: Float[Tensor, "width d_out"] | None = None,
) -> BlockNorms:
    """Measure the spectral norms of the blocks ∂y_i/∂x_j of a Jacobian, for some output tokens i and all
    input tokens j.

    ``jacobian`` are the blocks in closed form, which are measured in tiles of pairs of tokens; or it is the
    Jacobian of one sequence as an operator, whose blocks are formed as matrices: by rows for one output
    token at a time, or by columns for one input token at a time. ``dtype`` is that of the solver with blocks
    in closed form; its results are checked in float64. ``solver`` has a seed for each input token times the
    number of outputs. ``on_output`` is called with the number of output tokens that are done, with a
    fraction for the current one, and the number of all; blocks in closed form are done in the order of their
    tiles, so the first number is then an average. ``readout``, only for an operator, is the matrix of a
    linear layer that follows the map: then the blocks of the composition are measured.
    """
    told = on_output or (lambda done, total: None)
    if isinstance(jacobian, TokenBlocks):
        return _of_tiles(jacobian, outputs, dtype, solver, told)
    return _of_rows(jacobian, outputs, solver, told, readout)


def sequence_jacobian(f: Callable[[Tensor], Tensor], x: Float[Tensor, "n d"]) -> LinearOperator:
    """Return the Jacobian of a map at one sequence (n, d) as a linear operator. It is scaled if it is so
    small or large that squares leave the range of its dtype.

    Maps of this library are differentiated in float64, other maps in the dtype of ``x``. The output of a map
    is (n_out, d_out), or one vector (d_out,).
    """
    if isinstance(f, TokenMap):
        f, x = in_double(f), x.double()
        if has_closed_form(f):
            return closed_form_jacobian(f, x[None])
    jacobian = AutodiffJacobian(f, x)
    return Scaled(jacobian, jacobian.powers) if jacobian.powers else jacobian


def _cut(pairs: Int[Tensor, " pairs"]) -> Iterator[Tensor]:
    return iter(pairs.split(_PAIRS) if len(pairs) else ())


# ---- blocks in closed form


def _of_tiles(
    blocks: TokenBlocks,
    outputs: Tensor,
    dtype: torch.dtype,
    solver: Solver,
    told: Callable[[float, int], None],
) -> BlockNorms:
    weights = blocks.weights[outputs]
    norms = BlockNorms.zeros(*weights.shape)
    row, j = torch.nonzero(weights, as_tuple=True)
    i, weights = outputs[row], weights[row, j]
    # Powers of two, which scale without rounding, keep the squares of faint blocks in range.
    factor = torch.exp2(-torch.log2(weights).round().clamp_min(-1000.0))
    done = 0
    for some in (i == j, i != j):  # the blocks of the diagonal have tiles of their own
        for part in _cut(torch.nonzero(some)[:, 0]):
            members = (row[part] * norms.value.shape[1] + j[part]).tolist()
            found, error = _of_tile(blocks, i[part], j[part], factor[part], dtype, members, solver)
            # Below the smallest normal number, a weight has no digits.
            error = torch.where(weights[part].cpu() < _SMALLEST, found.upper, error)
            norms.write(row[part], j[part], found, error, solver.rtol, factor[part].cpu())
            done += len(part)
            told(done * len(outputs) // len(i), len(outputs))
    return norms


def _of_tile(
    blocks: TokenBlocks,
    i: Tensor,
    j: Tensor,
    factor: Tensor,
    dtype: torch.dtype,
    members: Sequence[int],
    solver: Solver,
) -> tuple[LeadingTriplet, Float[Tensor, " pairs"]]:
    """Return the largest singular value of each block J_ij in a group of pairs, and the rounding error."""
    exact, single = blocks.tile(i, j, factor, (torch.float64, torch.float32))
    found = solver.alone(exact if dtype == torch.float64 else CheckedProducts(single, exact), members)
    # J v in float64 is σ times the left vector. Its rounding to float32 makes the difference a little larger.
    image = found.sigma.to(found.left.device)[:, None, None] * found.left.double()
    apart = single.product(found.right.float()).double() - image
    cancelling = torch.linalg.vector_norm(apart[:, 0], dim=1).cpu() / torch.finfo(torch.float32).eps
    return found, _MARGIN * exact.rounding * cancelling


# ---- rows and columns of any Jacobian


def _groups(n: int, d: int, d_out: int, outputs: int, dtype: torch.dtype) -> tuple[bool, list[range]]:
    """Divide the output tokens into groups that are measured together. Also decide whether their blocks are
    formed from columns of the Jacobian.

    A product with J gives a column of the blocks of all output tokens, of which a group is kept whose blocks
    of one input token fit into memory.
    """
    size = max(1, _COLUMN_BYTES // (d * d_out * dtype.itemsize))
    groups = [range(first, min(first + size, outputs)) for first in range(0, outputs, size)]
    # A product with J takes up to twice as long as one with its transpose, which gives a row of one output.
    if 2 * n * d * len(groups) < outputs * d_out:
        return True, groups
    return False, [range(row, row + 1) for row in range(outputs)]


def _of_rows(
    jacobian: LinearOperator,
    outputs: Tensor,
    solver: Solver,
    told: Callable[[float, int], None],
    readout: Tensor | None,
) -> BlockNorms:
    n, d = jacobian.in_shape
    rounding, factor, gain = float(jacobian.rounding.max()), None, 1.0
    if readout is not None:
        # W = QR has the singular values of R, and so have W J and R J. The error of R is relative to ‖W‖.
        factor = torch.linalg.qr(readout.double(), mode="r").R
        gain = spectral_norm_above(factor)
        rounding += len(readout) * torch.finfo(torch.float64).eps
    norms = BlockNorms.zeros(len(outputs), n)
    by_columns, groups = _groups(n, d, jacobian.out_shape[-1], len(outputs), jacobian.dtype)
    for group in groups:

        def of_group(share: float, group: range = group) -> None:
            told(group.start + round(share * len(group), 2), len(outputs))

        parts = []
        largest = torch.zeros(len(outputs), dtype=torch.float64)
        chosen = outputs[group.start : group.stop]
        for row, tokens, matrices in (_columns if by_columns else _rows)(jacobian, chosen, of_group):
            for part in _cut(torch.nonzero(matrices.flatten(1).any(dim=1))[:, 0]):
                moved, at = tokens[part.cpu()], group.start + row
                members, blocks = (at * n + moved).tolist(), matrices[part].double()
                of_all = blocks if factor is None else factor @ blocks
                found = solver.alone(DenseBlocks(of_all), members)
                sizes = found.sigma if factor is None else gain * torch.linalg.matrix_norm(blocks)
                largest[at] = max(float(largest[at]), float(sizes.max()))
                parts.append((torch.full_like(moved, at), moved, found))
        # The error of a row's products is relative to its largest block.
        for rows, moved, found in parts:
            norms.write(rows, moved, found, rounding * largest[rows], solver.rtol, jacobian=jacobian)
        told(group.stop, len(outputs))
    return norms


Blocks = tuple[int, Int[Tensor, " tokens"], Float[Tensor, "tokens d_out d"]]
"""An output token by its position among the chosen ones, input tokens, and their blocks as matrices."""


def _rows(
    jacobian: LinearOperator, outputs: Int[Tensor, " one"], told: Callable[[float], None]
) -> Iterator[Blocks]:
    width = jacobian.out_shape[-1]
    (i,) = outputs.tolist()

    def row(c: Tensor) -> Tensor:
        u = torch.zeros(jacobian.out_size, dtype=jacobian.dtype, device=jacobian.device)
        u = u.index_put((i * width + c,), u.new_ones(()))
        return jacobian.adjoint_product(u.view(1, *jacobian.out_shape))[0]

    rows = _products(jacobian, row, torch.arange(width), told)
    yield 0, torch.arange(jacobian.in_shape[0]), rows.transpose(0, 1)


def _columns(
    jacobian: LinearOperator, outputs: Int[Tensor, " outputs"], told: Callable[[float], None]
) -> Iterator[Blocks]:
    n, d = jacobian.in_shape

    def column(c: Tensor) -> Tensor:
        e = torch.zeros(jacobian.in_size, dtype=jacobian.dtype, device=jacobian.device)
        e = e.index_put((c,), e.new_ones(()))
        return jacobian.product(e.view(1, n, d)).view(-1, jacobian.out_shape[-1])[outputs]

    for j in range(n):

        def of_token(share: float, j: int = j) -> None:
            told((j + share) / n)

        columns = _products(jacobian, column, torch.arange(j * d, (j + 1) * d), of_token)
        for row in range(len(outputs)):
            yield row, torch.tensor([j]), columns[:, row].mT[None]


def _products(
    jacobian: LinearOperator,
    product: Callable[[Tensor], Tensor],
    numbers: Int[Tensor, " products"],
    told: Callable[[float], None],
) -> Float[Tensor, "products *shape"]:
    """Compute the columns or rows of a Jacobian with the given indices, several at a time if the map allows
    it.
    """
    found: list[Tensor] = []
    together = isinstance(jacobian, AutodiffJacobian | Scaled)
    for part in numbers.to(jacobian.device).split(_TOGETHER):
        if together:
            try:
                found.extend(torch.func.vmap(product)(part))
            except DerivativeError:  # an operation without a batching rule
                together = False
        if not together:
            found.extend(product(c) for c in part)
        told(len(found) / len(numbers))
    return torch.stack(found)
