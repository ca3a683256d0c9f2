"""Compute all bounds on attention layers and heads, as tables. The tables also have the measured constants
and, after a search, the largest constant found.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from howsmooth import adversarial, bounds, lipschitz
from howsmooth.attention import SelfAttention
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.files import writable_folder
from howsmooth.lipschitz_estimate import LipschitzEstimate
from howsmooth.seeds import derive_seed
from howsmooth.study.attention_sources import AttentionSource, Target, TokenBall, largest_norm
from howsmooth.study.plans import BoundPlan
from howsmooth.study.progress_listener import SILENT, Listener

__all__ = [
    "LOCAL", "TABLE_COLUMNS", "Bounded", "Worst", "bound_all", "bounds_frame", "search_ball",
    "write_worst",
]  # fmt: skip

LOCAL = "‖D_X f‖"
"""The quantity that is measured: the local Lipschitz constant at the tokens X."""

ON_BALL = "Lip(f on B_R^n)"
"""The quantity that is bounded on a ball: the Lipschitz constant over all n tokens of norm at most R."""

TABLE_COLUMNS = (
    "source", "layer", "head", "scope", "masking", "n", "radius", "radius_from", "quantity", "name", "side",
    "value", "log_value", "holds", "origin",
)  # fmt: skip
"""The columns of ``bounds.csv``; ``origin`` is the theorem, with the hypotheses that fail."""


# Rounding can make tokens on the sphere longer than its radius: those of a search by less than the first
# fraction, those that a model computed in float32 by less than the second.
_ROUNDING, _ROUNDING_OF_MODEL = 1e-9, 1e-6


@dataclass(frozen=True, eq=False)
class Worst:
    """The tokens ``x`` at which a search found the largest Lipschitz constant, with an interval for it.

    ``by`` says how they were found: they are the ``tokens`` of the input, or the name of a construction, or
    ``ascent``.
    """

    x: Tensor
    by: str
    estimate: LipschitzEstimate

    @property
    def lower(self) -> float:
        """A lower bound on the constant of the ball: the lower limit at the worst tokens that were found."""
        return float(self.estimate.lower)


@dataclass(frozen=True, eq=False)
class Bounded:
    """The table of all bounds on one attention layer or head (``target``) at one length n.

    ``ball`` is the ball of tokens over which the global bounds hold; ``rows`` is the table that
    :func:`howsmooth.bounds.table` returns. ``worst`` are the worst tokens of the ball that a search found;
    None without a search.
    """

    target: Target
    n: int
    ball: TokenBall
    rows: pd.DataFrame
    worst: Worst | None = None

    @property
    def longest_outside(self) -> float | None:
        """The largest norm of the given tokens if it exceeds the radius of the ball; otherwise None."""
        farthest = largest_norm(self.target.x)
        return None if _contains(self.ball.radius, farthest) else farthest


def bound_all(plan: BoundPlan, source: AttentionSource, listener: Listener = SILENT) -> Iterator[Bounded]:
    """Compute a table of bounds for each layer or head of a model at each length.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If a length or the radius is impossible.

    """
    lengths = plan.lengths or (source.usual_length,)
    for round_, n in enumerate(lengths):
        targets = source.attentions(n)
        for place, one in enumerate(targets):
            done, total = round_ * len(targets) + place, float(len(targets) * len(lengths))
            told = partial(_tell, listener, done, total, f"{one.place}, n = {n}")
            told(0.0)
            ball = one.ball(plan.radius)
            try:
                rows = _rows(one, n, ball.radius)
            except ArgumentError as error:
                raise _of_layer(one, error) from error
            ball = TokenBall(float(rows.attrs["radius"]), ball.origin)
            worst = None
            if plan.search:
                worst = search_ball(one, n, ball.radius, steps=plan.steps, seed=plan.seed, told=told)
                rows = _with_worst(rows, worst)
            yield Bounded(one, n, ball, rows, worst)


def _of_layer(one: Target, error: ArgumentError) -> ArgumentError:
    """Name the layer in an error that says that no bound is known; return any other error unchanged."""
    if error.argument != "attention":
        return error
    remedy = "Leave this layer out with --layers, or measure it with howsmooth measure."
    return ArgumentError(
        "layers", expected="layers with a known bound", got=f"{one.place}: {error.got}", remedy=remedy
    )


def _tell(listener: Listener, done: int, total: float, words: str, share: float) -> None:
    listener.advance(done + share, total, words)


def _with_worst(rows: pd.DataFrame, worst: Worst) -> pd.DataFrame:
    """Add the largest constant found by a search to the lower bounds in a table of bounds on a ball."""
    upper = (rows.index != LOCAL) & (rows["side"] == "upper").to_numpy()
    place = int(upper.argmax()) if upper.any() else len(rows)
    source = f"howsmooth.adversarial, {worst.by}, {worst.estimate.confidence:.4g} confidence"
    row = {"name": "found", "side": "lower", "value": worst.lower, "holds": True, "source": source}
    more = pd.DataFrame([row], index=pd.Index([ON_BALL], name=rows.index.name))
    both = pd.concat([rows.iloc[:place], more, rows.iloc[place:]])
    logs = list(rows.attrs["log_values"])
    logs.insert(place, math.log(worst.lower) if worst.lower > 0 else -math.inf)
    both.attrs = rows.attrs | {"log_values": logs}
    return both


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


def write_worst(bounded: Sequence[Bounded], folder: str | os.PathLike[str]) -> Path:
    """Write the worst tokens found, an array for each layer or head and length, into ``worst.npz``."""
    found: dict[str, Any] = {
        f"{one.target.place}, n = {one.n}": one.worst.x.numpy() for one in bounded if one.worst is not None
    }
    with writable_folder(folder) as folder:
        np.savez(folder / "worst.npz", **found)
    return folder / "worst.npz"


def _contains(radius: float, farthest: float) -> bool:
    return radius >= farthest * (1 - 1e-6)


def _rows(one: Target, n: int, radius: float) -> pd.DataFrame:
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


# ---- The search of a ball


def search_ball(
    one: Target, n: int, radius: float, *, steps: int, seed: int, told: Callable[[float], None]
) -> Worst:
    """Search a ball of tokens for the largest constant: by ascent, at the given tokens if they lie in the
    ball, and at known constructions.

    ``told`` is called with the share of the work that is done.
    """
    f = one.attention.to(dtype=torch.float64, device="cpu")
    start = derive_seed(purpose="search", seed=seed, scope=one.scope, layer=one.layer, head=one.head, n=n)
    ascent = adversarial.ascend(
        f,
        length=n,
        radius=radius,
        steps=steps,
        atom_steps=3 * steps,
        seed=start,
        # The search among few distinct tokens, which comes first, takes about as long as the ascent.
        on_evaluation=lambda row: told(0.5 + 0.5 * float(str(row["step"])) / (steps + 1)),
    )
    assert isinstance(ascent.estimate, LipschitzEstimate)
    found = [Worst(ascent.x, "ascent", ascent.estimate)]
    for by, x in _given(one, f, n, radius):
        # Tokens at which float64 loses all digits of the Jacobian are left out.
        with contextlib.suppress(NonFiniteError):
            found.append(Worst(x, by, lipschitz.local_lipschitz(f, x, rtol=1e-4, seed=start)))
    return max(found, key=lambda worst: worst.lower)


def _given(one: Target, f: SelfAttention, n: int, radius: float) -> Iterator[tuple[str, Tensor]]:
    """Yield the given tokens if they lie in the ball up to rounding, then tokens of known constructions."""
    x = one.x.double()
    excess = x.norm(dim=-1, keepdim=True) / radius
    x = torch.where((excess > 1) & (excess < 1 + _ROUNDING_OF_MODEL), x / excess, x)
    if largest_norm(x) <= radius * (1 + _ROUNDING):
        yield "tokens", x
    plain = isinstance(f, SelfAttention) and f.rotary is None and f.mask is None and f.window is None
    if plain and not f.feature_names():
        yield from ((made.name, made.x.double()) for made in adversarial.constructions(f, n, radius))
