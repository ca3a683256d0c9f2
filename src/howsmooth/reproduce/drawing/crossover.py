"""Where √n ends, drawn from the finished units of its experiment; nothing here measures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from howsmooth.reproduce.drawing.paper import PAPER, WIDTH, save_picture
from howsmooth.reproduce.finding import Finding, Picture, read_note
from howsmooth.reproduce.kept import Kept
from howsmooth.reproduce.words import ratio
from howsmooth.study.exponents import fit_exponent
from howsmooth.study.figures.style import GREY, new_figure
from howsmooth.study.names import decimal

__all__ = ["draw", "turning"]

_DOT, _TOKENS = "#440154", "#e07b00"
_FORMULA, _SHARP, _THEIRS = (0.0, (4.0, 2.0)), (0.0, ()), (0.0, (6.0, 1.5, 1.0, 1.5))
_FREE = (0.0, (1.0, 1.2))
# The power of n is fitted where n is this far from e^{2γR²}, a factor.
_FAR = 100.0
_DECADE = math.log(10)


def draw(folder: Path) -> Finding:
    """Draw the figure from what ``folder`` holds, and say what is seen in it.

    Raises
    ------
    StoreError
        If something cannot be read or written.

    """
    note = read_note(folder)
    rows = Kept(folder / "units").table(note["units"])
    table = turning(rows)
    with rc_context(PAPER):
        picture = _picture(rows, folder)
    caption = "Where the growth ends; powers of ten"
    return Finding(
        [picture], _words(rows, table), [(caption, table)], [(what, words) for what, words in note["made"]]
    )


def turning(rows: pd.DataFrame) -> pd.DataFrame:
    """Tabulate where the growth ends, for each γR².

    Parameters
    ----------
    rows
        One a γR² and n, with logarithms of n, of the constant and of bounds.

    Returns
    -------
    pandas.DataFrame
        One row a γR² (``strength``): ``exponent`` in n below e^{2γR²}, the powers of ten of e^{2γR²}
        (``expected``), of the n at which the constant is largest (``at``), of the constant there
        (``largest``) and at the largest n (``last``), and the ratio of the bound for every n to the largest
        (``free``).

    """
    found = []
    for _, part in rows.groupby("power", sort=True):
        strength = float(part["g"].iloc[0])
        before = part[(part["log_n"] > math.log(4)) & (part["log_n"] < 2 * strength - math.log(_FAR))]
        fit = fit_exponent(
            np.exp(before["log_n"].to_numpy(np.float64)),
            np.exp(before["log_value"].to_numpy(np.float64)),
            before["converged"].to_numpy(bool),
        )
        best = int(np.argmax(part["log_value"].to_numpy(np.float64)))
        top, last = (part.iloc[place].to_dict() for place in (best, int(np.argmax(part["log_n"].to_numpy()))))
        found.append(
            {
                "strength": strength,
                "exponent": fit.slope,
                "expected": 2 * strength / _DECADE,
                "at": float(top["log_n"]) / _DECADE,
                "largest": float(top["log_value"]) / _DECADE,
                "last": float(last["log_value"]) / _DECADE,
                "free": math.exp(float(top["log_free"]) - float(top["log_value"])),
            }
        )
    return pd.DataFrame(found)


# ---- the picture


def _picture(rows: pd.DataFrame, folder: Path) -> Picture:
    parts = [part for _, part in rows.groupby("power", sort=True)]
    figure = new_figure(WIDTH, 2.9)
    axes = figure.subplots(1, len(parts), squeeze=False, sharey=True)[0]
    for axis, part in zip(axes, parts, strict=True):
        _panel(axis, part)
        axis.set_title(
            f"$e^{{2\\gamma R^2}} = 10^{{{part['power'].iloc[0]}}}$, $R = {part['radius'].iloc[0]:.3g}$"
        )
    axes[0].set_ylabel("constant")
    figure.legend(handles=_handles(), loc="outside lower center", ncols=4, handlelength=2.2)
    pdf, png = save_picture(figure, folder, "crossover", "Where growth like the root of n ends")
    tops = turning(rows)
    alt = "The constant against n on log axes, rising like the root of n and then falling: " + "; ".join(
        f"largest at n = 10 to the power {row.at:.3g}" for row in tops.itertuples()
    )
    caption = (
        "The local constant in W₂ at two Diracs of weights 1/n and 1 − 1/n at ±Ru, A = −I, V = I, for three "
        "radii; circles: n tokens, measured as tokens. Proposition 3.4 is a lower bound, at these very "
        "tokens; Theorem 3.3 and howsmooth's Theorem A are upper bounds for n tokens in the ball, the dotted "
        "line the upper bound for every n. The constant is at least 1: all tokens may move alike, across u."
    )
    return Picture(pdf, png, f"{alt}.", caption)


def _panel(axis: Axes, rows: pd.DataFrame) -> None:
    n = rows["log_n"] / _DECADE
    for name, style, colour in (
        ("log_theorem", _THEIRS, GREY),
        ("log_sharp", _SHARP, "0.15"),
        ("log_free", _FREE, GREY),
        ("log_paper", _FORMULA, GREY),
    ):
        axis.plot(n, rows[name] / _DECADE, linestyle=style, color=colour, linewidth=0.9, zorder=2)
    axis.scatter(n, rows["log_value"] / _DECADE, s=5, color=_DOT, linewidths=0, zorder=4)
    tokens = rows[rows["log_tokens"].notna()]
    axis.scatter(
        tokens["log_n"] / _DECADE, tokens["log_tokens"].astype(float) / _DECADE, s=22, facecolors="none",
        edgecolors=_TOKENS, linewidths=0.8, zorder=5,
    )  # fmt: skip
    top = float(rows[["log_theorem", "log_free"]].to_numpy(np.float64).max()) / _DECADE
    axis.set(xlim=(0, 1.01 * float(n.max())), ylim=(-1, max(top, axis.get_ylim()[1])), xlabel="$n$")
    for which in (axis.xaxis, axis.yaxis):
        which.set_major_locator(MaxNLocator(nbins=6, integer=True))
        which.set_major_formatter(FuncFormatter(lambda value, place: f"$10^{{{value:.0f}}}$"))
    axis.grid(visible=True, which="major", linewidth=0.4, color="0.88", zorder=0)


def _handles() -> list[Line2D]:
    return [
        Line2D([], [], color=_DOT, marker="o", markersize=2.5, linestyle="none", label="measure"),
        Line2D([], [], color=_TOKENS, marker="o", markersize=4.5, markerfacecolor="none", linestyle="none",
               label="$n$ tokens"),
        Line2D([], [], color=GREY, linestyle=_FORMULA, label="Proposition 3.4"),
        Line2D([], [], color=GREY, linestyle=_THEIRS, label="Theorem 3.3"),
        Line2D([], [], color="0.15", linestyle=_SHARP, label="howsmooth's Theorem A"),
        Line2D([], [], color=GREY, linestyle=_FREE, label="howsmooth's bound for every $n$"),
    ]  # fmt: skip


# ---- the words


def _words(rows: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    seen = []
    for row in table.to_dict("records"):
        power = f"grows like n to the power {decimal(row['exponent'], 3)} up to a hundredth of it, "
        seen.append(
            f"γR² = {row['strength']:.4g}, where e^(2γR²) is 10 to the power {row['expected']:.3g}: the "
            f"constant {'' if math.isnan(row['exponent']) else power}is largest at n = 10 to the power "
            f"{row['at']:.3g}, with {ratio(10 ** row['largest'])}, and is {ratio(10 ** row['last'])} at the "
            f"largest n. The bound for every n is {ratio(row['free'])} times the largest value."
        )
    most = rows[rows["log_n"] == rows["log_n"].max()].sort_values("g").iloc[-1].to_dict()
    above = math.exp(float(most["log_theorem"]) - float(most["log_free"]))
    seen.append(
        f"At n = 10 to the power {most['log_n'] / _DECADE:.3g} and γR² = {most['g']:.4g} Theorem 3.3, which "
        f"goes on like the root of n, is {ratio(above)} times the bound for every n."
    )
    tokens = rows[rows["log_tokens"].notna()]
    off = float(np.abs(np.expm1(tokens["log_tokens"].astype(float) - tokens["log_value"])).max())
    wrong = int((rows["log_value"] > rows["log_free"] + 1e-9).sum())
    wrong += int((rows["log_value"] < rows["log_formula"] - 1e-9).sum())
    seen.append(
        f"Measured as tokens, {len(tokens)} of these measures give the same constant up to a share of "
        f"{off:.1g}. Of {len(rows)} measurements {int(rows['converged'].astype(bool).sum())} converged, and "
        f"{wrong} are outside the lower bound at these tokens and the upper bound for every n."
    )
    return seen
