"""Show up to which n the constant at two Dirac masses of weights 1/n and 1 − 1/n grows like √n."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from howsmooth import lipschitz
from howsmooth.bounds import (
    ball_upper_bound,
    mean_field_upper_bound,
    proposition_3_4,
    theorem_3_3,
    two_cluster_lower_bound,
)
from howsmooth.measures import wasserstein_lipschitz
from howsmooth.paper import plotting
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.figure_measurements import Bench, Key, Unit, Values
from howsmooth.paper.identity_head import RTOL, describe, identity_head, two_diracs
from howsmooth.paper.plotting import Curve, Panel
from howsmooth.seeds import derive_seed
from howsmooth.study.exponents import fit_exponent

__all__ = ["growth_ends", "measure", "result_sentences", "show"]

_POWERS = (4, 20, 40)  # log10 of e^{2γR²}, the number of tokens at which growth like √n ends
_LENGTHS = (2, 3, 5, *(10 ** (power // 2) * (1 if power % 2 == 0 else 3) for power in range(2, 91)))
_TOKENS = (2, 10, 100, 1000)  # lengths that are also measured with n tokens, as a check
_DIMENSION = 2
_FAR = 100.0  # the exponent is fitted where n is smaller than e^{2γR²} by at least this factor
_DECADE = math.log(10)


def measure(bench: Bench) -> pd.DataFrame:
    """Return the constants at two Dirac masses of weights 1/n and 1 − 1/n, a row for each n and radius."""
    describe(bench, "two Diracs in two dimensions, A = −I, V = I")
    units = []
    for power, n in product(_POWERS, _LENGTHS):
        key: Key = {"power": power, "seed": bench.options.seed}
        words = f"exp(2γR²) = 10^{power}, n = {n:.3g}"
        units.append(Unit({**key, "n": str(n)}, partial(_rows, key, power * _DECADE / 2, n), words))
    return bench.kept(units)


def _rows(key: Key, g: float, n: int) -> Iterator[Values]:
    radius, f = math.sqrt(g), identity_head(-1.0, _DIMENSION)
    logs = torch.tensor([-math.log(n), math.log1p(-1 / n)], dtype=torch.float64)
    at = two_diracs(radius, -1.0, logs, _DIMENSION)
    start = derive_seed(purpose="crossover", n=str(n), **key)
    found = wasserstein_lipschitz(f, at, rtol=RTOL, seed=start)
    tokens = None
    if n in _TOKENS:
        x = at.points[torch.ones(n, dtype=torch.long).index_fill_(0, torch.tensor([0]), 0)]
        tokens = math.log(float(lipschitz.local_lipschitz(f, x, rtol=RTOL, seed=start).value))
    yield {
        "log_n": math.log(n),
        "g": g,
        "radius": radius,
        "log_value": math.log(found.value),
        "converged": found.converged,
        "log_tokens": tokens,
        "log_paper": proposition_3_4(f, n, radius).log_value,
        "log_formula": two_cluster_lower_bound(f, n, radius).log_value,
        "log_sharp": ball_upper_bound(f, n, radius).log_value,
        "log_theorem": theorem_3_3(f, n, radius).log_value,
        "log_free": mean_field_upper_bound(f, radius).log_value,
    }


def show(rows: pd.DataFrame, folder: Path) -> Finding:
    """Draw the constant and its bounds against n for each radius, and say where growth like √n ends."""
    table = growth_ends(rows)
    top = 1.03 * float(rows[["log_theorem", "log_free"]].max().max()) / _DECADE
    panels = [_panel(part, top) for _, part in rows.groupby("power")]
    canvas, _ = plotting.draw_panels([panels], 2.9, sharey=True)
    picture = plotting.write_picture(canvas, folder, "crossover", "Where growth like the root of n ends")
    caption = "Where the growth ends; powers of ten"
    return Finding([picture], result_sentences(rows, table), [(caption, table)])


def growth_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate for each γR² (``strength``) at which n the growth like √n ends.

    ``exponent`` is that of n, fitted to 4 < n < e^{2γR²}/100. Logarithms to base ten are ``expected`` of
    e^{2γR²}, ``at`` of the n with the largest constant, ``largest`` of this constant, and ``last`` of the
    constant at the largest n. ``free`` is the bound for every n divided by the largest constant.
    """
    found = []
    for _, part in rows.groupby("power", sort=True):
        strength = float(part["g"].iloc[0])
        before = part[(part["log_n"] > math.log(4)) & (part["log_n"] < 2 * strength - math.log(_FAR))]
        n, value = (np.exp(before[name].to_numpy(np.float64)) for name in ("log_n", "log_value"))
        fit = fit_exponent(n, value, before["converged"].to_numpy(bool))
        top = part.sort_values("log_value", kind="stable").iloc[-1]
        last = part.sort_values("log_n").iloc[-1]
        logs = {"expected": 2 * strength, "at": top["log_n"]}
        logs |= {"largest": top["log_value"], "last": last["log_value"]}
        decades = {name: log / _DECADE for name, log in logs.items()}
        free = math.exp(top["log_free"] - top["log_value"])
        found.append({"strength": strength, "exponent": fit.slope, **decades, "free": free})
    return pd.DataFrame(found)


def _panel(rows: pd.DataFrame, top: float) -> Panel:
    decades = rows.filter(like="log_").astype(float) / _DECADE
    n = decades["log_n"]
    curves = [
        Curve(n, decades["log_value"], "measure", plotting.VIOLET, "o", size=4),
        Curve(n, decades["log_tokens"], "$n$ tokens", plotting.ORANGE, "o", size=22, filled=False),
        *plotting.lines(
            n,
            decades,
            ("log_paper", plotting.GREY, plotting.DASHED, "Proposition 3.4"),
            ("log_theorem", plotting.GREY, plotting.DASHDOT, "Theorem 3.3"),
            ("log_sharp", plotting.BLACK, plotting.SOLID, "howsmooth's Theorem A"),
            ("log_free", plotting.GREY, plotting.DOTTED, "howsmooth's bound for every $n$"),
        ),
    ]
    power, radius = rows["power"].iloc[0], rows["radius"].iloc[0]
    title = f"$e^{{2\\gamma R^2}} = 10^{{{power}}}$, $R = {radius:.3g}$"
    return Panel(curves, title, "$n$", "constant", ("decades", "decades"), (0, 1.01 * n.max(), -1, top))


def result_sentences(rows: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Return sentences on the n with the largest constant, and on measurements that violate a bound."""
    expected, at, free = (", ".join(f"{x:.3g}" for x in table[name]) for name in ("expected", "at", "free"))
    seen = [
        f"Where e^(2γR²) is 10 to the power {expected}, the constant is largest at n = 10 to the power {at}, "
        f"and the bound for every n is {free} times the largest value."
    ]
    tokens = rows[rows["log_tokens"].notna()]
    off = float(np.abs(np.expm1(tokens["log_tokens"].astype(float) - tokens["log_value"])).max())
    logs = rows["log_value"]
    wrong = (logs > rows["log_free"] + 1e-9) | (logs < rows["log_formula"] - 1e-9)
    seen.append(
        f"Of {len(rows)} measurements {int(rows['converged'].sum())} converged, and {int(wrong.sum())} are "
        f"outside the lower bound at these tokens and the upper bound for every n. {len(tokens)} of them, "
        f"measured with n tokens, differ by a share of at most {off:.1g}."
    )
    return seen
