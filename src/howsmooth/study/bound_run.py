"""Compute all bounds on attention layers and heads, in tables that also have the measured constants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from howsmooth import bounds
from howsmooth.errors import ArgumentError
from howsmooth.study.attention_sources import AttentionSource, Ball, Target, largest_norm
from howsmooth.study.plans import BoundPlan
from howsmooth.study.progress_listener import SILENT, Listener

__all__ = ["LOCAL", "TABLE_COLUMNS", "Bounded", "bound_all", "bounds_frame"]

LOCAL = "‖D_X f‖"
"""The quantity that is measured: the local Lipschitz constant at the tokens X."""

TABLE_COLUMNS = (
    "source", "layer", "head", "scope", "masking", "n", "radius", "radius_from", "quantity", "name", "side",
    "value", "log_value", "holds", "origin",
)  # fmt: skip
"""The columns of ``bounds.csv``; ``origin`` is the theorem, with the hypotheses that fail."""


@dataclass(frozen=True, eq=False)
class Bounded:
    """The table of all bounds on one attention layer or head (``target``) at one length n.

    ``ball`` is the ball of tokens over which the global bounds hold; ``rows`` is the table that
    :func:`howsmooth.bounds.table` returns.
    """

    target: Target
    n: int
    ball: Ball
    rows: pd.DataFrame

    @property
    def longest_outside(self) -> float | None:
        """The largest norm of the given tokens if some lie outside the ball; otherwise None."""
        if self.target.x is None:
            return None
        farthest = largest_norm(self.target.x)
        return None if _contains(self.ball.radius, farthest) else farthest


def bound_all(plan: BoundPlan, source: AttentionSource, listener: Listener = SILENT) -> Iterator[Bounded]:
    """Compute a table of bounds for each layer or head of a model or a parameter file at each length.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If a length or the radius is impossible or missing.

    """
    lengths = plan.lengths or (source.usual_length,)
    for round_, n in enumerate(lengths):
        if n is None:
            raise ArgumentError(
                "lengths",
                expected="numbers of tokens, because the file holds no tokens X",
                got="none",
                remedy="Give --lengths and --radius." if plan.radius == "auto" else "Give --lengths.",
            )
        targets = source.attentions(n)
        for place, one in enumerate(targets):
            done = float(round_ * len(targets) + place)
            listener.advance(done, float(len(targets) * len(lengths)), f"{one.place}, n = {n}")
            ball = one.ball(plan.radius)
            rows = _rows(one, n, ball.radius)
            yield Bounded(one, n, Ball(float(rows.attrs["radius"]), ball.origin), rows)


def bounds_frame(label: str, bounded: Sequence[Bounded]) -> pd.DataFrame:
    """Concatenate all tables of bounds into one table with the columns :data:`TABLE_COLUMNS`."""
    tables = []
    for one in bounded:
        table = one.rows.reset_index().rename(columns={"source": "origin"})
        where = {
            "source": label,
            "layer": one.target.layer,
            "head": one.target.head,
            "scope": one.target.scope,
            "masking": one.target.masking,
            "n": one.n,
            "radius": one.ball.radius,
            "radius_from": one.ball.origin,
            "log_value": one.rows.attrs["log_values"],
        }
        tables.append(table.assign(**where).astype({"head": "Int64"})[list(TABLE_COLUMNS)])
    return pd.concat(tables, ignore_index=True)


def _contains(radius: float, farthest: float) -> bool:
    return radius >= farthest * (1 - 1e-6)


def _rows(one: Target, n: int, radius: float) -> pd.DataFrame:
    if one.x is None:
        return bounds.table(one.attention, length=n, radius=radius)
    farthest = largest_norm(one.x)
    if _contains(radius, farthest):
        # If all tokens are zero, `bounds.table` chooses the radius.
        return bounds.table(one.attention, one.x, radius=max(radius, farthest) or None)
    # The ball does not contain the tokens, so compute global bounds for the ball and local ones for the
    # tokens separately.
    ball = bounds.table(one.attention, length=n, radius=radius)
    tokens = bounds.table(one.attention, one.x)
    local = tokens.index == LOCAL
    rows = pd.concat([tokens[local], ball])
    logs = [log for log, here in zip(tokens.attrs["log_values"], local, strict=True) if here]
    rows.attrs = ball.attrs | {"log_values": [*logs, *ball.attrs["log_values"]]}
    return rows
