"""Show up to which number n of tokens the Lipschitz constant of attention grows like √n.

The constant is measured at measures of two Dirac masses with the weights 1/n and 1 − 1/n.
"""

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
from howsmooth.paper.bench import Bench, Key, Unit, Values
from howsmooth.paper.figure_definition import Finding
from howsmooth.paper.identity_head import RTOL, describe, identity_head, two_diracs
from howsmooth.paper.plotting import Curve, Panel
from howsmooth.seeds import derive_seed
from howsmooth.study.exponents import fit_exponent
from howsmooth.words import decimal

__all__ = ["growth_ends", "measure", "result_sentences", "show"]

# log10 of e^{2γR²}, the number of tokens at which growth like √n ends.
_POWERS = (4, 20, 40)
_LENGTHS = (2, 3, 5, *(10 ** (power // 2) * (1 if power % 2 == 0 else 3) for power in range(2, 91)))
# Lengths that are also measured with n tokens, as a check.
_TOKENS = (2, 10, 100, 1000)
_DIMENSION = 2
# The exponent is fitted where n is smaller than e^{2γR²} by at least this factor.
_FAR = 100.0
_DECADE = math.log(10)


def measure(bench: Bench) -> pd.DataFrame:
    """Measure the constant at two Dirac masses with the weights 1/n and 1 − 1/n. The table has one row for
    each n and each radius.
    """
    describe(bench, "two Diracs in two dimensions, A = −I, V = I")
    units = []
    for power, n in product(_POWERS, _LENGTHS):
        key: Key = {"power": power, "seed": bench.options.seed}
        words = f"exp(2γR²) = 10^{power}, n = {n:.3g}"
        units.append(Unit({**key, "n": str(n)}, partial(_rows, key, power * _DECADE / 2, n), words))
    return bench.kept("constants at two Diracs", units)


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
    """Draw the constant and its bounds against n, with one panel for each radius, and say at which n the
    growth ends.
    """
    table = growth_ends(rows)
    top = 1.03 * float(rows[["log_theorem", "log_free"]].max().max()) / _DECADE
    panels = [_panel(part, top) for _, part in rows.groupby("power")]
    canvas, _ = plotting.draw([panels], 2.9, sharey=True)
    picture = plotting.picture(canvas, folder, "crossover", "Where growth like the root of n ends")
    tables = [("Where the growth ends; powers of ten", table)]
    return Finding([picture], result_sentences(rows, table), tables)


def growth_ends(rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate how the constant grows with n, and at which n the constant is largest, with one row for each
    radius.

    The column ``strength`` is γR², and ``exponent`` is the exponent of n, fitted to 4 < n < e^{2γR²}/100.
    Four columns are logarithms to base ten: ``expected`` of e^{2γR²}, ``at`` of the n with the largest
    constant, ``largest`` of the largest constant, and ``last`` of the constant at the largest n. The column
    ``free`` is the ratio of the bound that holds for every n to the largest constant. The argument ``rows``
    is the table that :func:`measure` returns.
    """
    found = []
    for _, part in rows.groupby("power", sort=True):
        strength = float(part["g"].iloc[0])
        before = part[(part["log_n"] > math.log(4)) & (part["log_n"] < 2 * strength - math.log(_FAR))]
        n, value = (np.exp(before[name].to_numpy(np.float64)) for name in ("log_n", "log_value"))
        fit = fit_exponent(n, value, before["converged"].to_numpy(bool))
        top = part.sort_values("log_value", kind="stable").iloc[-1]
        last = part.sort_values("log_n").iloc[-1]
        found.append(
            {
                "strength": strength,
                "exponent": fit.slope,
                "expected": 2 * strength / _DECADE,
                "at": top["log_n"] / _DECADE,
                "largest": top["log_value"] / _DECADE,
                "last": last["log_value"] / _DECADE,
                "free": math.exp(top["log_free"] - top["log_value"]),
            }
        )
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
    """Return sentences that say at which n the constant is largest, and how many measurements violate a
    bound.
    """
    seen = []
    for row in table.to_dict("records"):
        power = f"grows like n to the power {decimal(row['exponent'], 3)} up to a hundredth of it, "
        seen.append(
            f"γR² = {row['strength']:.4g}, where e^(2γR²) is 10 to the power {row['expected']:.3g}: the "
            f"constant {'' if math.isnan(row['exponent']) else power}is largest at n = 10 to the power "
            f"{row['at']:.3g}, with {10 ** row['largest']:.3g}, and is {10 ** row['last']:.3g} at "
            f"the largest n. The bound for every n is {row['free']:.3g} times the largest value."
        )
    most = rows.sort_values(["log_n", "g"]).iloc[-1]
    above = math.exp(most["log_theorem"] - most["log_free"])
    seen.append(
        f"At n = 10 to the power {most['log_n'] / _DECADE:.3g} and γR² = {most['g']:.4g} Theorem 3.3, which "
        f"goes on like the root of n, is {above:.3g} times the bound for every n."
    )
    tokens = rows[rows["log_tokens"].notna()]
    off = float(np.abs(np.expm1(tokens["log_tokens"].astype(float) - tokens["log_value"])).max())
    wrong = int((rows["log_value"] > rows["log_free"] + 1e-9).sum())
    wrong += int((rows["log_value"] < rows["log_formula"] - 1e-9).sum())
    seen.append(
        f"Measured as tokens, {len(tokens)} of these measures give the same constant up to a share of "
        f"{off:.1g}. Of {len(rows)} measurements {int(rows['converged'].sum())} converged, and {wrong} are "
        "outside the lower bound at these tokens and the upper bound for every n."
    )
    return seen
