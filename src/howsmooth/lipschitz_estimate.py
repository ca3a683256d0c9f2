"""The results of a measurement: local Lipschitz constants at one or several inputs, with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.results.result import Result
from howsmooth.rounding import COLUMNS_IN_DIGITS, interval_in_digits

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FIELDS", "LipschitzEstimate", "LipschitzEstimates", "Method"]

Method = Literal["closed form", "autodiff"]

FIELDS = {
    "value": "sigma",
    "lower": "lower",
    "upper": "upper",
    "converged": "converged",
    "iterations": "steps",
    "input_direction": "right",
    "output_direction": "left",
}
"""The fields of an estimate with an entry for each input, and the names that they have in the result of the
solver.
"""

_MOST_SHOWN = 12  # members in a printed estimate
_MOST_INTERVALS = 4  # members that are printed with their intervals


@dataclass(frozen=True)
class _Constants(Result):
    """Base class of the two result classes, with measured Lipschitz constants, their intervals and the
    settings of the measurement.
    """

    NAME: ClassVar[str] = "constants"
    TITLE: ClassVar[str] = "Local Lipschitz constants"
    AXIS: ClassVar[str] = "member"

    value: Float[Tensor, "*batch"]
    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]
    confidence: float
    converged: Bool[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    method: Method
    scope: str
    rtol: float
    seed: int | tuple[int, ...]

    @property
    def remedy(self) -> str:
        """Advice on what to do if some interval is too wide, or an empty string if none is."""
        missed = int((~self.converged).sum())
        if not missed:
            return ""
        steps = int(self.iterations[~self.converged].max())
        return (
            f"{missed} of {self.converged.numel()} members did not reach rtol = {self.rtol:g} within {steps} "
            "iterations: raise max_iterations or, if fewer steps were made, memory; loosen rtol, as rounding "
            "may allow no narrower interval; or go to float64. The intervals hold all the same."
        )

    def __repr__(self) -> str:
        name = type(self).__name__
        sure = f"at {100 * self.confidence:.6g} % confidence"
        hint = ", see .remedy" if self.remedy else ""
        ends = (self.value.flatten().tolist(), self.lower.flatten().tolist(), self.upper.flatten().tolist())
        shown = [
            f"{value:.6g} in {interval_in_digits(*interval)}" for value, *interval in zip(*ends, strict=True)
        ]
        if self.value.ndim == 0:
            status = "converged" if bool(self.converged) else "NOT converged"
            steps = f"{int(self.iterations)} iterations"
            return f"{name}({shown[0]} {sure}, {status} in {steps}{hint}; {self.scope}; {self.method})"
        if len(shown) > _MOST_INTERVALS:
            shown = [f"{value:.6g}" for value in ends[0]]
            width = float(
                ((self.upper - self.lower) / self.value.clamp_min(torch.finfo(torch.float64).tiny)).max()
            )
            sure = f"each in its interval of relative width at most {width:.2g} {sure}"
        if len(shown) > _MOST_SHOWN:
            half = _MOST_SHOWN // 2
            shown = [*shown[:half], "...", *shown[-half:]]
        return (
            f"{name}([{', '.join(shown)}], shape {tuple(self.value.shape)}, {sure}, "
            f"{int(self.converged.sum())} of {self.converged.numel()} converged{hint}; {self.scope}; "
            f"{self.method})"
        )

    def __float__(self) -> float:
        """Return the measured local Lipschitz constant of an estimate for one input, as a float.

        An estimate for several inputs has no single constant.

        Raises
        ------
        ArgumentError
            If there are several members.

        """
        if self.value.numel() != 1:
            raise ArgumentError(
                "estimate",
                expected="one constant",
                got=f"shape {tuple(self.value.shape)}",
                remedy="Take one member, as in float(estimate[0]), or the tensor estimate.value.",
            )
        return float(self.value)

    @property
    def table(self) -> pd.DataFrame:
        """The table of the measured Lipschitz constants with one row for each input, in the order of the
        flattened batch.

        Its columns are ``member``, ``value``, ``lower``, ``upper``, ``confidence``, ``converged``,
        ``iterations``, ``method`` and ``scope``.
        """
        import pandas as pd  # takes half a second, which measuring alone does not need

        columns = ("value", "lower", "upper", "converged", "iterations")
        table = pd.DataFrame({name: getattr(self, name).flatten().cpu().numpy() for name in columns})
        table.insert(0, "member", range(len(table)))
        table.insert(4, "confidence", self.confidence)
        return table.assign(method=self.method, scope=self.scope)

    def _repr_html_(self) -> str:
        """Return the table of measured Lipschitz constants as HTML, for display in notebooks."""
        texts: Any = {"float_format": "{:.6g}".format, "formatters": COLUMNS_IN_DIGITS}
        rows: str = self.table.to_html(index=False, max_rows=_MOST_SHOWN, **texts)
        return rows


@dataclass(frozen=True, repr=False)
class LipschitzEstimate(_Constants):
    """The measured local Lipschitz constant at each input of a batch, each with an interval.

    Attributes
    ----------
    value
        The best estimate of each constant, float64, shape (...). It is the leading Ritz value; for the
        closed form in float32 it is ‖J v‖, computed in float64 for the direction v that was found. Up to
        rounding, it is also a lower limit.
    lower, upper
        Limits of an interval that contains ‖D_X f‖₂ with probability at least ``confidence`` for each
        member. The probability is over the random start, and lower <= value <= upper. The interval allows
        for rounding. For the closed form in float64 the allowance is proved. In float32 the lower limit is
        proved and the upper limit is correct to first order. For autodiff the allowance is calibrated by
        experiment (documentation page "Rounding, proved").
    confidence
        Probability that the interval of a member contains its constant.
    converged
        Whether upper − lower <= rtol · value. Where false, the interval is wider than requested, and the
        value may be far below the constant.
    iterations
        Number of Lanczos steps. Each step takes one product with the Jacobian and one with
        its adjoint.
    input_direction, output_direction
        Leading singular vectors of the Jacobian, with Frobenius norm 1, of shapes (..., n, d) and (..., n,
        d_out), or of the shapes of the map's input and output: the perturbation of X that changes the
        output most, and the direction of that change. If the leading singular value is repeated (as at
        symmetric inputs), they are one of many possible choices. The output direction is zero if the
        constant is zero. At a measure, their rows are √a_i e_i, where e_i is the displacement of atom i and
        a_i its weight.
    method
        How the Jacobian was applied: "closed form" or "autodiff".
    scope
        A description of the measured map with its masks, residuals and norms.
    rtol, seed
        The arguments of the call.

    """

    input_direction: Float[Tensor, "..."]
    output_direction: Tensor

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> LipschitzEstimate:
        """Return the measured constants at the inputs with the given indices in the batch."""
        given = index if isinstance(index, tuple) else (index,)
        if len(given) > self.value.ndim:
            raise IndexError(f"{len(given)} indices for estimates of shape {tuple(self.value.shape)}")
        return replace(self, **{name: getattr(self, name)[index] for name in FIELDS})

    def tokens(self, tokenizer: Any = None, ids: Tensor | None = None) -> pd.DataFrame:
        """Return a table with the contribution of each token to the input and output directions of the
        largest change.

        A token with a large share of the input direction is one where a change matters; a token with a large
        share of the output direction is one where the change shows. The shares of a direction are the squared
        norms of its rows, and sum to one.

        Parameters
        ----------
        tokenizer
            A tokenizer with a method ``decode``, or None.
        ids
            The token ids (n,) of the input, which the tokenizer turns into words; None without a tokenizer.

        Returns
        -------
        pandas.DataFrame
            One row for each token, with the columns ``position`` (from 0), ``token`` if a tokenizer is given,
            ``input_share``, and ``output_share``, which is NaN where the output has no such token.

        Raises
        ------
        ArgumentError
            If there are several members, the input has no axis of tokens, or only one of ``tokenizer`` and
            ``ids`` is given.

        """
        import pandas as pd  # takes half a second, which measuring alone does not need

        if self.value.ndim or self.input_direction.ndim != 2:
            raise ArgumentError(
                "estimate",
                expected="the constant of one sequence of tokens (n, d)",
                got=f"shape {tuple(self.value.shape)}, directions {tuple(self.input_direction.shape)}",
                remedy="Take one member, as in estimate[0].tokens().",
            )
        if (tokenizer is None) != (ids is None):
            raise ArgumentError("ids", expected="tokenizer and ids together", got="only one of them")
        shares = _shares(self.input_direction)
        table = pd.DataFrame({"position": range(len(shares)), "input_share": shares})
        output = self.output_direction
        rows = _shares(output) if output.ndim == 2 else []
        table["output_share"] = [*rows[: len(shares)], *[math.nan] * (len(shares) - len(rows))]
        if ids is not None:
            if ids.numel() != len(table):
                raise ArgumentError("ids", expected=f"{len(table)} token ids", got=f"{ids.numel()}")
            table.insert(1, "token", [str(tokenizer.decode([i])) for i in ids.flatten().tolist()])
        return table


def _shares(direction: Tensor) -> list[float]:
    squares = direction.double().square().sum(dim=-1)
    total = float(squares.sum())
    shares: list[float] = (squares / total if total > 0 else squares).tolist()
    return shares


@dataclass(frozen=True, repr=False)
class LipschitzEstimates(_Constants):
    """The measured local Lipschitz constants at several sequences of different lengths, each with an
    interval.

    The attributes are those of :class:`LipschitzEstimate`, with shape (sequences,). The directions are
    tuples with one tensor for each sequence, of shapes (n_i, d) and (n_i, d_out).
    """

    input_direction: tuple[Tensor, ...]
    output_direction: tuple[Tensor, ...]
