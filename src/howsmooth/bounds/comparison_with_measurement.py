"""A table of all bounds that apply to an attention, beside its measured local Lipschitz constant."""

from __future__ import annotations

import pandas as pd
import torch

from howsmooth.attention import SelfAttention
from howsmooth.bounds.applicable_bounds import all_bounds
from howsmooth.bounds.bound_problem import Problem
from howsmooth.lipschitz import local_lipschitz
from howsmooth.printed_table import PrintedTable

__all__ = ["table"]

COLUMNS = ["name", "side", "value", "holds", "source"]


def table(
    attention: object,
    X: object = None,
    length: object = None,
    radius: object = None,
    *,
    rtol: float = 1e-6,
    confidence: float = 0.999,
    seed: int = 0,
) -> PrintedTable:
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
    DataFrame
        Columns ``name, side, value, holds, source``, sorted by value; the index is the bounded quantity. If a
        hypothesis fails, the value is inf for an upper and 0 for a lower bound, and ``source`` says which
        hypothesis. With tokens X, two rows named ``measured`` are the ends of the interval of
        :func:`~howsmooth.local_lipschitz`. ``attrs`` holds ``length``, ``radius``, ``radius_from``, and as
        ``log_values`` the natural logarithms of the values, row by row, finite where a value overflows.
        It is printed within 80 columns, with the sources below the rows
        (:class:`~howsmooth.printed_table.PrintedTable`).

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
    frame = PrintedTable(
        [row[2:] for row in rows], columns=COLUMNS, index=pd.Index([row[0] for row in rows], name="quantity")
    )
    frame.attrs = {
        "length": problem.length,
        "radius": problem.radius,
        "radius_from": problem.radius_from,
        "log_values": [row[1] for row in rows],
    }
    return frame
