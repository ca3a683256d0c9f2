"""Every bound of every attention asked for, beside the measurement at its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from howsmooth.errors import ArgumentError
from howsmooth.study.sources import Found, Source

__all__ = ["LOCAL", "TABLE_COLUMNS", "Bounded", "bound_all", "bounds_frame"]

LOCAL = "‖D_X f‖"
"""The quantity that is measured."""

TABLE_COLUMNS = (
    "source", "layer", "head", "scope", "masking", "n", "radius", "radius_from", "quantity", "name", "side",
    "value", "log_value", "holds", "origin",
)  # fmt: skip
"""The columns of ``bounds.csv``; ``origin`` is the theorem, or what its hypotheses lack."""


@dataclass(frozen=True, eq=False)
class Bounded:
    """The bounds of one attention at one length.

    Attributes
    ----------
    found
        The attention.
    n
        The length.
    radius, radius_from
        Of the ball that global bounds speak of, and where it comes from.
    rows
        As :func:`howsmooth.bounds.table` gives them.

    """

    found: Found
    n: int
    radius: float
    radius_from: str
    rows: pd.DataFrame


def bound_all(
    source: Source,
    lengths: Sequence[int],
    radius: float | None,
    tabulate: Callable[..., pd.DataFrame],
    on_progress: Callable[[float, float, str], None] = lambda done, total, words: None,
) -> Iterator[Bounded]:
    """Tabulate the bounds of all attentions of a source.

    Parameters
    ----------
    source
        Where they come from.
    lengths
        Numbers of tokens; empty for that of the tokens which the source holds.
    radius
        Of the ball; None for that of the norm layer before the attention, or else of the tokens.
    tabulate
        As :func:`howsmooth.bounds.table`.
    on_progress
        Told how many tables are made, of how many, and where.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If a length or the radius is impossible, or missing.

    """
    if not lengths:
        if source.usual_length is None:
            raise ArgumentError(
                "lengths",
                expected="numbers of tokens, as the file holds no X",
                got="none",
                remedy="Give --lengths.",
            )
        lengths = (source.usual_length,)
    done = 0
    for n in lengths:
        found = source.attentions(n)
        for one in found:
            on_progress(float(done), float(len(found) * len(lengths)), f"{one.place}, n = {n}")
            yield _bounded(one, n, radius, tabulate)
            done += 1


def bounds_frame(label: str, bounded: Sequence[Bounded]) -> pd.DataFrame:
    """Put all tables into one, with :data:`TABLE_COLUMNS`."""
    rows: list[dict[str, Any]] = []
    for one in bounded:
        logs = one.rows.attrs["log_values"]
        for (quantity, row), log in zip(one.rows.iterrows(), logs, strict=True):
            rows.append(
                {
                    "source": label,
                    "layer": one.found.layer,
                    "head": one.found.head,
                    "scope": one.found.scope,
                    "masking": one.found.masking,
                    "n": one.n,
                    "radius": one.radius,
                    "radius_from": one.radius_from,
                    "quantity": str(quantity),
                    "name": row["name"],
                    "side": row["side"],
                    "value": float(row["value"]),
                    "log_value": float(log),
                    "holds": bool(row["holds"]),
                    "origin": row["source"],
                }
            )
    return pd.DataFrame(rows, columns=list(TABLE_COLUMNS)).astype({"head": "Int64"})


def _bounded(one: Found, n: int, radius: float | None, tabulate: Callable[..., pd.DataFrame]) -> Bounded:
    from howsmooth.bounds.norms import norm_radius

    words = "given" if radius is not None else None
    if radius is None and one.norm is not None:
        radius, words = norm_radius(one.norm), f"the {type(one.norm).__name__} before the attention"
    if radius is None and one.x is None:
        raise ArgumentError(
            "radius",
            expected="a number, as neither a norm layer nor tokens say how long tokens can be",
            got="none",
            remedy="Give --radius.",
        )
    rows = _rows(one, n, radius, tabulate)
    return Bounded(one, n, float(rows.attrs["radius"]), words or "the longest of the tokens", rows)


def _rows(one: Found, n: int, radius: float | None, tabulate: Callable[..., pd.DataFrame]) -> pd.DataFrame:
    if one.x is None:
        return tabulate(one.attention, length=n, radius=radius)
    longest = float(torch.linalg.vector_norm(one.x.double(), dim=-1).max())
    if radius is None or radius >= longest * (1 - 1e-6):
        return tabulate(one.attention, one.x, radius=None if radius is None else max(radius, longest))
    # A ball that does not hold the tokens: what is said of it, and what is said of them.
    ball, tokens = tabulate(one.attention, length=n, radius=radius), tabulate(one.attention, one.x)
    local = tokens.index == LOCAL
    rows = pd.concat([tokens[local], ball])
    logs = [log for log, here in zip(tokens.attrs["log_values"], local, strict=True) if here]
    rows.attrs = ball.attrs | {"log_values": [*logs, *ball.attrs["log_values"]]}
    return rows
