"""The function ``growth``, which measures how the constant of any map grows with the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.lipschitz import local_lipschitz
from howsmooth.lipschitz_estimate import Method
from howsmooth.printed_table import PrintedTable
from howsmooth.profiling.model_input import shown_progress
from howsmooth.results.curves import SOLID, Curve, Panel, add_legend, draw
from howsmooth.results.drawing import Figure, styled
from howsmooth.results.result import Result, intervals
from howsmooth.seeds import derive_seed
from howsmooth.study.exponents import Exponent, fit_exponent, radius_correlation
from howsmooth.study.plans import Plan
from howsmooth.words import counted, decimal

__all__ = ["LengthGrowth", "growth"]


@dataclass(frozen=True, eq=False, repr=False)
class LengthGrowth(Result):
    """The local Lipschitz constants of a map at inputs of several lengths n, and the power law c · n^s that
    is fitted to those that converged.
    """

    NAME: ClassVar[str] = "growth"
    TITLE: ClassVar[str] = "Growth with the length"

    #: One row for each sequence: its length ``n``, the root mean square norm of its tokens ``radius``, and
    #: ``value``, ``lower``, ``upper``, ``converged`` and ``iterations`` as in
    #: :class:`~howsmooth.LipschitzEstimate`.
    table: pd.DataFrame
    #: The fit. Its interval says how far the exponent would move with other inputs of the same kind; the
    #: widths of the constants' intervals are no part of it.
    exponent: Exponent
    #: Probability with which the interval of each constant holds.
    confidence: float
    #: How the Jacobian was applied: "closed form" or "autodiff".
    method: Method
    #: A description of the measured map.
    scope: str

    def __repr__(self) -> str:
        fit, (value, low, high) = self.exponent, radius_correlation(*self.table[["n", "radius"]].to_numpy().T)
        found = f"no exponent: {fit.note}"
        if not fit.note:
            found = f"exponent {decimal(fit.slope, 3)} in {fit.ends()} at 95 % confidence ({fit.interval})"
        found += f", {counted(fit.n_points, 'constant')} at lengths {fit.n_min} to {fit.n_max}"
        found += f", {fit.left_out} left out" if fit.left_out else ""
        if value == value:
            found += f"; radius correlated with length: {value:.2f} in [{low:.2f}, {high:.2f}]"
        return f"LengthGrowth({found}; {self.scope}; {self.method})"

    @styled
    def plot(self) -> Figure:
        """Draw the constants against the length, with the fitted line; hollow ones did not converge."""
        curves, fit = [intervals(self.table, "n")], self.exponent
        if not fit.note:
            ends, label = [fit.n_min, fit.n_max], f"$n^{{{fit.slope:.3f}}}$"
            curves.append(Curve(ends, [fit.at(n) for n in ends], label, dashes=SOLID, fit=True))
        figure, _ = draw([[Panel(curves)]], (5.4, 3.4))
        add_legend(figure, 2)
        return figure

    def _in_latex(self) -> tuple[pd.DataFrame, str]:
        fit = self.exponent
        ends = {"exponent": fit.slope, "lower": fit.low, "upper": fit.high}
        row = {"map": self.scope, **ends, "constants": fit.n_points, "n from": fit.n_min, "n to": fit.n_max}
        caption = f"Exponent of the constant in the length n, with a 95 % interval; {fit.left_out} left out"
        return pd.DataFrame([row]), caption


def growth(
    f: Callable[[Tensor], Tensor],
    inputs: Sequence[Tensor],
    *,
    rtol: float = Plan.rtol,
    confidence: float = Plan.confidence,
    max_iterations: int = Plan.max_iterations,
    seed: int = Plan.seed,
    memory: int | None = None,
    on_input: Callable[[int, int], None] | None = None,
) -> LengthGrowth:
    """Measure how the local Lipschitz constant of a map grows with the number n of its tokens.

    Parameters
    ----------
    f
        A map or module as for :func:`howsmooth.local_lipschitz`, that takes inputs of every length.
    inputs
        Tensors (n, d), or batches (b, n, d) of sequences that do not depend on each other, which ``f``
        takes as they are. An exponent needs three lengths, and several sequences of each for its interval.
    rtol, confidence, max_iterations, seed, memory
        As for :func:`howsmooth.local_lipschitz`.
    on_input
        Called with the numbers of measured and of all inputs; by default a progress bar is shown.

    Raises
    ------
    ArgumentError, NonFiniteError, DerivativeError
        As :func:`howsmooth.local_lipschitz` raises them.

    """
    if not len(inputs) or any(not isinstance(x, Tensor) or x.ndim not in (2, 3) for x in inputs):
        kinds = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in inputs]
        expected = "a list of tensors (n, d) or (b, n, d)"
        raise ArgumentError("inputs", expected=expected, got=str(kinds)[:60])
    how: dict[str, Any] = {"rtol": rtol, "confidence": confidence, "max_iterations": max_iterations}
    tables = []
    with shown_progress(on_input, len(inputs), "input") as told:
        for i, x in enumerate(inputs):
            start = derive_seed(purpose="growth", seed=seed, input=i)
            found = local_lipschitz(f, x, seed=start, memory=memory, batch_dims=x.ndim - 2, **how)
            table = found.table[["value", "lower", "upper", "converged", "iterations"]]
            table.insert(0, "n", x.shape[-2])
            squares = x.detach().double().square().sum(dim=-1).mean(dim=-1)
            table.insert(1, "radius", squares.sqrt().flatten().cpu().numpy())
            tables.append(table)
            told(i + 1, len(inputs))
    rows = pd.concat(tables, ignore_index=True)
    fit = fit_exponent(rows["n"].to_numpy(), rows["value"].to_numpy(), rows["converged"].to_numpy(bool))
    return LengthGrowth(PrintedTable(rows), fit, confidence, found.method, found.scope)
