"""A table of all bounds that apply to an attention, beside its measured local Lipschitz constant."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
import torch

from howsmooth.attention import SelfAttention
from howsmooth.bounds.applicable_bounds import all_bounds
from howsmooth.bounds.bound_problem import Problem
from howsmooth.lipschitz import local_lipschitz
from howsmooth.printed_table import PrintedTable
from howsmooth.results.result import Result, made_by
from howsmooth.rounding import interval_in_digits

if TYPE_CHECKING:
    from howsmooth.results.drawing import Figure

__all__ = ["BoundsTable", "table"]

COLUMNS = ["name", "side", "value", "holds", "source"]


class BoundsTable(Result, PrintedTable):  # type: ignore[misc]
    """The table of all bounds on one attention, printed within 80 columns."""

    NAME: ClassVar[str] = "bounds"
    TITLE: ClassVar[str] = "Bounds on the Lipschitz constant of attention"

    def _repr_html_(self) -> str:
        words: str = self.to_html()
        return words

    @property
    def table(self) -> pd.DataFrame:
        """The rows of the table, with the bounded quantity as a column."""
        return pd.DataFrame(self).reset_index()

    @property
    def citation(self) -> str:
        """One line to cite, with the sharpest upper bound on each quantity, and what was measured."""
        holding = self.table[self.table["holds"]]
        upper = holding[(holding["side"] == "upper") & (holding["name"] != "measured")]
        sharpest = upper.drop_duplicates("quantity").itertuples(index=False)
        said = [f"{row.quantity} at most {row.value:.6g} ({row.name})" for row in sharpest]
        measured = self.table.loc[self.table["name"] == "measured", "value"]
        said += [f"measured in {interval_in_digits(measured.min(), measured.max())}"] if len(measured) else []
        radius = f"R = {self.attrs['radius']:.6g} ({self.attrs['radius_from']})"
        return (
            f"{self.TITLE}, n = {self.attrs['length']}, {radius}: {'; '.join(said)}; {made_by('torch')}; "
            f"digest {self.digest}."
        )

    def plot(self) -> Figure:  # type: ignore[override]
        """Draw the finite bounds that hold, upper and lower ones, and the measured constant as lines."""
        from howsmooth.results.curves import SOLID, Curve, Panel, add_legend, draw
        from howsmooth.results.drawing import STYLE, rc_context

        table = self.table
        there = table[table["holds"] & np.isfinite(table["value"]) & (table["value"] > 0)]
        rows = there[there["name"] != "measured"].reset_index(drop=True)
        curves = [
            Curve(some.index, some["value"], f"{side} bound", colour, mark, size=36)
            for side, mark, colour in (("upper", "v", "#c1121f"), ("lower", "^", "#3b528b"))
            for some in [rows[rows["side"] == side]]
        ]
        curves += [
            Curve([0, max(len(rows) - 1, 1)], [end, end], "measured", dashes=SOLID)
            for end in there.loc[there["name"] == "measured", "value"]
        ]
        with rc_context(STYLE):
            names = [f"{one.name}, {one.quantity}" for one in rows.itertuples()]
            panel = Panel(curves, x="", y="Lipschitz constant", scales=("linear", "log"), names=names)
            figure, _ = draw([[panel]], (max(4.6, 1.6 + 0.24 * len(rows)), 4.6))
            add_legend(figure, 3)
        return figure


def table(
    attention: object,
    X: object = None,
    length: object = None,
    radius: object = None,
    *,
    rtol: float = 1e-6,
    confidence: float = 0.999,
    seed: int = 0,
) -> BoundsTable:
    """Return a table of all bounds that apply to an attention. With tokens X, the table also has the local
    Lipschitz constant measured at X.

    Parameters
    ----------
    attention, X, length, radius
        As for :func:`~howsmooth.bounds.best`.
    rtol, confidence, seed
        Relative tolerance, confidence and seed of the measurement, which runs in float64.

    Returns
    -------
    BoundsTable
        A DataFrame with the columns ``name, side, value, holds, source``, sorted by value; the index is the
        bounded quantity. If a hypothesis fails, the value is inf for an upper and 0 for a lower bound, and
        ``source`` says which hypothesis. With tokens X, two rows named ``measured`` are the ends of the
        interval of :func:`~howsmooth.local_lipschitz`. ``attrs`` holds ``length``, ``radius``,
        ``radius_from``, and as ``log_values`` the natural logarithms of the values, row by row, finite where
        a value overflows. It is printed within 80 columns, with the sources below the rows
        (:class:`~howsmooth.printed_table.PrintedTable`), and has ``plot()``, ``to_latex()``, ``citation`` and
        ``write(folder)``.

    """
    problem = Problem.of(attention, X, length, radius)
    rows: list[tuple[str, float, str, str, float, bool, str]] = []
    for bound in all_bounds(problem):
        failed = "; ".join(h.statement for h in bound.hypotheses if not h.holds)
        where = f"{bound.source} (needs: {failed})" if failed else bound.source
        rows.append(
            (str(bound.quantity), bound.log_value, bound.name, bound.side, bound.value, bound.holds, where)
        )
    if problem.X is not None and isinstance(problem.attention, SelfAttention):
        f = problem.attention.to(dtype=torch.float64, device="cpu")
        found = local_lipschitz(f, problem.X, rtol=rtol, confidence=confidence, seed=seed)
        status = "" if bool(found.converged) else f", rtol {rtol:g} not reached"
        words = f"local_lipschitz, {found.confidence:.4g} confidence{status}"
        for side, end in (("lower", found.lower), ("upper", found.upper)):
            value = float(end)
            log = float(end.log())
            rows.append(("‖D_X f‖", log, "measured", side, value, True, words))
    rows.sort(key=lambda row: (row[1], row[3] == "upper"))
    frame = BoundsTable(
        [row[2:] for row in rows], columns=COLUMNS, index=pd.Index([row[0] for row in rows], name="quantity")
    )
    frame.attrs = {
        "length": problem.length,
        "radius": problem.radius,
        "radius_from": problem.radius_from,
        "log_values": [row[1] for row in rows],
    }
    return frame
