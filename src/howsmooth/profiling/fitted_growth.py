"""The function ``growth``, which measures how the constant of any map grows with the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import pandas as pd
from torch import Tensor

from howsmooth.errors import ArgumentError, similar_name
from howsmooth.lipschitz import local_lipschitz
from howsmooth.printed_table import PrintedTable
from howsmooth.results.curves import SOLID, Curve, Panel, add_legend, draw
from howsmooth.results.drawing import Figure, styled
from howsmooth.results.result import Result, intervals
from howsmooth.study.exponents import Exponent, fit_exponent
from howsmooth.words import counted, decimal

__all__ = ["LengthGrowth", "growth"]


@dataclass(frozen=True, eq=False, repr=False)
class LengthGrowth(Result):
    """Local Lipschitz constants of a map at several lengths n, and the power law c · n^s fitted to them."""

    NAME: ClassVar[str] = "growth"
    TITLE: ClassVar[str] = "Growth with the length"

    #: The tables of :class:`~howsmooth.LipschitzEstimate`, with a column ``n``.
    table: pd.DataFrame
    #: The fit to the constants that converged. Its interval says how far the exponent would move with other
    #: inputs of the same kind; the widths of the constants' intervals are no part of it.
    exponent: Exponent

    def __repr__(self) -> str:
        fit = self.exponent
        found = f"exponent {decimal(fit.slope, 3)} in {fit.ends()} at 95 % confidence ({fit.interval})"
        found = f"no exponent: {fit.note}" if fit.note else found
        if fit.n_points:
            found += f", {counted(fit.n_points, 'constant')} at n = {fit.n_min} to {fit.n_max}"
        if fit.left_out:
            missed = int((~self.table["converged"]).sum())
            why = f"{missed} not converged: take float64, more max_iterations or a larger rtol" * (missed > 0)
            zeros = f"{fit.left_out - missed} of value 0" * (fit.left_out > missed)
            found += f", {fit.left_out} left out ({'; '.join(filter(None, (why, zeros)))})"
        return f"LengthGrowth({found}; {self.table['scope'].iloc[0]}; {self.table['method'].iloc[0]})"

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
        row = {"map": self.table["scope"].iloc[0], "exponent": fit.slope, "lower": fit.low, "upper": fit.high}
        row |= {
            "constants": fit.n_points,
            "n from": fit.n_min or None,
            "n to": fit.n_max or None,
            "left out": fit.left_out,
        }
        return pd.DataFrame([row]), "Exponent of the constant in the length n, with a 95 % interval"


def growth(f: Callable[[Tensor], Tensor], inputs: Sequence[Tensor], **options: Any) -> LengthGrowth:
    """Measure how the local Lipschitz constant of a map or module grows with the number n of its tokens.

    ``f`` takes the ``inputs`` as they are: tensors (n, d), or batches (b, n, d) of independent sequences. An
    exponent needs three lengths. ``options`` and errors are those of :func:`howsmooth.local_lipschitz`.
    """
    xs = list(inputs) if isinstance(inputs, Sequence) else []
    if not xs or not all(isinstance(x, Tensor) and x.ndim in (2, 3) for x in xs):
        got = f"{[tuple(x.shape) if isinstance(x, Tensor) else type(x) for x in xs] or type(inputs)}"
        raise ArgumentError("inputs", expected="a list of tensors (n, d) or (b, n, d)", got=got)
    known = [p.name for p in signature(local_lipschitz).parameters.values() if p.kind == p.KEYWORD_ONLY]
    known.remove("batch_dims")  # the inputs have the batch
    for name in options:
        if name not in known:
            expected, remedy = f"no option but {', '.join(known)}", similar_name(name, known)
            raise ArgumentError(name, expected=expected, got=repr(options[name]), remedy=remedy)
    tables = []
    for x in inputs:
        table = local_lipschitz(f, x, batch_dims=x.ndim - 2, **options).table
        table.insert(0, "n", x.shape[-2])
        tables.append(table)
    rows = PrintedTable(pd.concat(tables, ignore_index=True))
    return LengthGrowth(rows, fit_exponent(rows["n"], rows["value"], rows["converged"]))
