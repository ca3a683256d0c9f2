"""What several profiles say together: those of one model at many texts, and those of two models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.printed_table import PrintedTable
from howsmooth.profiling.model_input import GivenInputs, InputResult, given_inputs, shown_progress
from howsmooth.profiling.robust_word_radii import row_of
from howsmooth.results.curves import SOLID, Curve, Panel, add_legend, draw
from howsmooth.results.drawing import GREY, Figure, styled, titled
from howsmooth.results.page import frame, parts
from howsmooth.results.result import intervals
from howsmooth.rounding import interval_in_digits
from howsmooth.seeds import derive_seed, random_stream
from howsmooth.study.options import renamed
from howsmooth.study.records import plain_rows
from howsmooth.words import counted, place_in_words

__all__ = ["SHOWN", "ProfileComparison", "ProfileOverTexts", "compared", "profile_over_texts"]

SHOWN = 10  # rows that are printed for each scope
_LEVEL, _RESAMPLES = 0.95, 4999
_quantile = partial(np.quantile, axis=1, method="nearest")
_FEW = 20  # texts, below which the intervals of a bootstrap are clearly too narrow
_PLACE = ["scope", "layer", "head"]
_KEPT = ["layer", "head", "scope", "value", "lower", "upper", "confidence", "converged", "name"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _Ranked(InputResult):
    """Base class of results that rank layers and heads by a column of their table, with its interval."""

    ONE: ClassVar[str] = ""
    COLUMNS: ClassVar[tuple[str, ...]]  # what is printed; the first is drawn, with its interval
    ORDER: ClassVar[str]  # the column by which rows are ranked
    EXPLAINED: ClassVar[str]

    #: How the intervals were found, in words.
    method: str
    #: Probability with which each interval holds; of a bootstrap it is nominal.
    level: float
    #: Seed of the random starts and of the bootstrap.
    seed: int

    @property
    def ranking(self) -> pd.DataFrame:
        """The table in decreasing order of the means or changes, scope by scope."""
        by = ["scope", self.ORDER]
        return self.table.sort_values(by, ascending=False, kind="stable", ignore_index=True)

    @property
    def citation(self) -> str:
        """One line to cite, with the first of the ranking in each scope."""
        tops = plain_rows(self.ranking.groupby("scope", sort=False).head(1))
        found = (f"scope {row['scope']}: {' '.join(_said(row, self.COLUMNS[:1], 6).split())}" for row in tops)
        largest = f"largest {self.ORDER} in {'; '.join(found)}; intervals: {self.method}"
        return f"{self.WHAT} of {self.model} at {self.input} (n = {self.n}); {largest}; {self._made_by}"

    def _lines(self) -> list[str]:
        said = f"At {self.input}, {self.length}. Intervals: {self.method}. {self.EXPLAINED}"
        lines = [f"{self.title}, {self.precision}.", *wrap(said, 94)]
        for scope, rows in self.ranking.groupby("scope", sort=False):
            lines.append(f"  scope {scope}, by {self.ORDER}, {min(len(rows), SHOWN)} of {len(rows)}:")
            lines += [f"    {_said(row, self.COLUMNS)}" for row in plain_rows(rows.head(SHOWN))]
            if "changed" in rows:
                known = rows["ratio"].count()
                chance = f"about {(1 - self.level) * known:.2g} by chance alone"
                lines.append(f"    1 is outside {rows['changed'].sum()} of {known} intervals; {chance}")
        missed = int((~self.table["converged"]).sum())
        return [*lines, *([f"  {missed} of {len(self.table)} did not converge"] if missed else [])]

    @styled
    def plot(self) -> Figure:
        """Draw what is ranked with its intervals, one panel a scope; a hollow dot did not converge."""
        panels, column = [], self.COLUMNS[0]
        for scope, rows in self.ranking.groupby("scope", sort=False):
            rows = rows[rows[column].between(0, np.inf, inclusive="neither")]
            rows = rows.assign(place=range(len(rows)), **{f"{column}_converged": rows["converged"]})
            behind = Curve([0, len(rows) - 1], [1, 1], "no change", GREY, dashes=SOLID)
            if isinstance(self, ProfileOverTexts):
                dots = self.each.merge(rows[[*_PLACE, "place"]], on=_PLACE)
                behind = Curve(dots["place"], dots["value"], "one text", GREY, mark=".", size=5, alpha=0.6)
            x = "layer" if rows["head"].isna().all() else f"layer.{scope!s}"
            names = rows["layer"].astype(str) + ("." + rows["head"].astype("string")).fillna("")
            curves, scales = [intervals(rows, "place", column, column), behind], ("linear", "log")
            panels.append([Panel(curves, f"scope {scope}", x, column, scales, names=list(names))])
        width = max(4.6, min(1.6 + 0.17 * max(len(one.names) for (one,) in panels), 12.0))
        figure, _ = draw(panels, (width, 0.8 + 2.4 * len(panels)))
        figure.suptitle(titled(f"{self.model}, {self.input.split(',')[0]}", width))
        add_legend(figure, 2)
        return figure

    def _body(self, images: Mapping[str, str], most: int) -> list[str]:
        words = f"Intervals: {self.method}. {self.EXPLAINED}"
        return [parts().words(words, "soft"), frame(self.ranking.head(most))]

    def _in_latex(self) -> tuple[pd.DataFrame, str]:
        return self.ranking, f"{self.title} at {self.input}"

    def _told(self) -> dict[str, Any]:
        names = ("method", "level", "seed", "refused")
        return {name: getattr(self, name) for name in names} | {"ranking": plain_rows(self.ranking)}


class ProfileComparison(_Ranked):
    """The constants of one model divided by those of another, for each layer and head at the same inputs.

    ``table`` has one row for each layer and head: ``layer``, ``head``, ``scope``; ``ratio``, ``ratio_lower``,
    ``ratio_upper``; ``change`` (the size of the logarithm of the ratio), ``changed`` (whether 1 lies outside
    of the interval; 0/0 is NaN), ``value`` and ``against`` (the two constants; over texts their means), and
    ``converged`` (of both). Fields in which the models differ name both, with a slash between them.
    """

    NAME, TITLE, ALT = "comparison", "Comparison", "The ratios; the numbers are in comparison.csv."
    WHAT = "The ratios of local Lipschitz constants"
    COLUMNS, ORDER = ("ratio", "value", "against"), "change"
    EXPLAINED = "Ratio: value / against, the constants of the two models; over texts, of their means."


def compared(self: Any, other: Any) -> ProfileComparison:
    """Divide the constants by those of a profile of another model at the same token ids.

    The interval of a ratio contains the quotients of all constants in their intervals. Over texts it is that
    of a paired bootstrap of the means. An ArgumentError says that ``other`` is of other inputs, or has other
    layers, heads or scopes.
    """
    if type(other) is not type(self) or other.input.split()[-1] != self.input.split()[-1]:
        got, ids = getattr(other, "input", type(other).__name__), "the ids" in self.input
        remedy = "If both are of one text, the tokenizers differ: give both models the same ids in Python."
        remedy = remedy if ids and type(other) is type(self) else ""
        raise ArgumentError("other", expected=f"a profile of {self.input}", got=got, remedy=remedy)
    tables = [getattr(one, "each", one.table.assign(text=0)) for one in (self, other)]
    columns = [_by_text(one, name) for one in tables for name in ("value", "lower", "upper", "converged")]
    only = columns[0].index.symmetric_difference(columns[4].index)
    routes = [one for one in only if one[0] == "expert"]  # tokens may go to other experts
    a, low, high, sure, b, below, above, also_sure = (one.drop(routes, errors="ignore") for one in columns)
    if not (a.index.equals(b.index) and a.columns.equals(b.columns)) or a.empty:
        places = (
            f"scope {one[0]}, {place_in_words(one[1], one[2] if one[2] >= 0 else None, one[0])}"
            for one in [*only.drop(routes), *routes][:3]
        )
        got = f"in one of them only: {'; '.join(places) or 'a text'}"
        raise ArgumentError("other", expected="the same layers, heads and scopes", got=got)
    texts = a.shape[1]
    w = _weights(texts, self.seed)
    level = _LEVEL if texts > 1 else self.confidence + other.confidence - 1
    table = _places(a)
    with np.errstate(divide="ignore", invalid="ignore"):
        pairs = ((a, b), (low, above), (high, below))
        ratio, least, most = (x.to_numpy() @ w / (y.to_numpy() @ w) for x, y in pairs)
        table["ratio"], table["change"] = ratio[:, 0], np.abs(np.log(ratio[:, 0]))
    # 0/0 says nothing about an end. An end of 0 or infinity is exact; the others are rounded outwards.
    lower = _quantile(np.nan_to_num(least[:, 1:], nan=0, posinf=np.inf), (1 - _LEVEL) / 2)
    upper = _quantile(np.nan_to_num(most[:, 1:], nan=np.inf, posinf=np.inf), (1 + _LEVEL) / 2)
    known = table["ratio"].notna()
    table["ratio_lower"] = pd.Series(np.where(lower < np.inf, np.nextafter(lower, 0), lower)).where(known)
    table["ratio_upper"] = pd.Series(np.where(upper > 0, np.nextafter(upper, np.inf), upper)).where(known)
    table["changed"] = (table["ratio_lower"] > 1) | (table["ratio_upper"] < 1)
    table["value"], table["against"] = (one.mean(axis=1).to_numpy() for one in (a, b))
    table["converged"] = (sure & also_sure).all(axis=1).to_numpy()
    left_out = [f"{counted(len(routes), 'expert')} that a token reaches in one model only."][: len(routes)]
    both: dict[str, Any] = {"model": f"{self.model} / {other.model}"}
    for name in ("source", "fingerprint", "stored", "computed"):
        both[name] = " / ".join(dict.fromkeys([getattr(self, name), getattr(other, name)]))
    how = f"of both measurements, {level:.6g} confidence"
    return ProfileComparison(
        **both,
        table=table,
        input=self.input,
        n=self.n,
        method=how if texts == 1 else f"{_bootstrap(texts)}, paired, with those of the measurements",
        level=level,
        seed=self.seed,
        refused=tuple(dict.fromkeys((*self.refused, *other.refused, *left_out))),
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ProfileOverTexts(_Ranked):
    """The constants of all attention layers and heads over several texts.

    ``table`` has one row for each layer and head that was measured at all texts: ``layer``, ``head``,
    ``scope``; the ``mean``; the ``spread``, which is the standard deviation over texts; the ``rank`` of the
    mean in its scope, 1 for the largest; each with ``…_lower`` and ``…_upper``; ``top``, the share of texts
    at which the constant is among the largest tenth of its scope (at least one row), so that 1 means
    sensitive at all texts; and ``converged``, whether it did at all texts.

    The intervals are over texts: how far mean, spread and rank may differ for other texts of the same kind.
    They take the measured constants as exact, and with fewer than 20 texts they are too narrow.
    """

    NAME, TITLE, ALT = "profile", "Profile over texts", "The means; the numbers are in profile.csv."
    WHAT = "The local Lipschitz constants of attention layers and heads"
    COLUMNS, ORDER = ("mean", "spread", "rank", "top"), "mean"
    EXPLAINED = (
        "Spread: the standard deviation over texts. Top: the share of texts at which it is among the largest "
        "tenth of its scope; at 1 it is sensitive at all texts, between 0 and 1 at some only."
    )

    #: One row for each text (``text``, from 0), layer and head, with its constant and the interval of the
    #: measurement, in columns of :attr:`howsmooth.Profile.table`.
    each: pd.DataFrame
    #: The texts in words, with their digests.
    inputs: tuple[str, ...]

    compare = compared

    def _tables(self) -> dict[str, pd.DataFrame]:
        return {self.NAME: self.table, "texts": self.each}

    def _told(self) -> dict[str, Any]:
        return super()._told() | {"inputs": self.inputs, "texts": plain_rows(self.each)}


def profile_over_texts(
    model: Any, texts: Sequence[Any], measure: Callable[..., Any], options: Any, file: Any, on_text: Any
) -> ProfileOverTexts:
    """Profile a model at each text by ``measure``, and return statistics. Keep rows in ``file``."""
    if len(texts) < 2:
        raise ArgumentError("inputs", expected="one text, or a list of at least two", got="a list of one")
    every: list[str] = []
    for i, text in enumerate(texts):
        with renamed(f"{{}} of text {i}".format):
            every.append(given_inputs(model, text, options["span"], options["tokenizer"]).description)
    origin, path = GivenInputs(model, None, None, "").origin(), None if file is None else Path(file)
    how = {name: repr(value) for name, value in options.items() if name not in ("span", "tokenizer")}
    found: list[dict[str, Any]] = []

    def measured(i: int, text: Any) -> dict[str, Any]:
        one = measure(text, on_layer=lambda done, of: told(i + (done / of if of else 0), len(texts)))
        return {"n": one.n, "refused": one.refused, "rows": plain_rows(one.table[_KEPT])}

    with shown_progress(on_text, len(texts), "text") as told:
        for i, text in enumerate(texts):
            told(i, len(texts))
            found.append(row_of(path, [origin | {"input": every[i]}, how], partial(measured, i, text)))
        told(len(texts), len(texts))
    rows = [{"text": i} | row for i, one in enumerate(found) for row in one["rows"]]
    each = PrintedTable(rows).astype({"head": "Int64"})
    digest = hashlib.sha256(" ".join(one.split()[-1] for one in every).encode()).hexdigest()[:12]
    table = _statistics(each, len(texts), options["seed"])
    refused = [f"Text {i}: {why}" for i, one in enumerate(found) for why in one["refused"]]
    all_texts, some_text = (one[one["scope"] == "expert"][_PLACE].drop_duplicates() for one in (table, each))
    if some := len(some_text) - len(all_texts):
        refused.append(f"{counted(some, 'expert')} that a token reaches in some texts only.")
    return ProfileOverTexts(
        **origin | {"input": f"{counted(len(texts), 'text')}, SHA-256 of their digests {digest}"},
        table=table,
        n=sum(one["n"] for one in found),
        method=f"{_bootstrap(len(texts))}, the measured constants taken as exact",
        level=_LEVEL,
        seed=options["seed"],
        refused=tuple(refused),
        each=each,
        inputs=tuple(every),
    )


def _statistics(each: pd.DataFrame, texts: int, seed: int) -> pd.DataFrame:
    w, tables = _weights(texts, seed), []
    for _, rows in each.groupby("scope", sort=False):
        values = _by_text(rows, "value")
        if values.shape[1] < texts or values.empty:
            continue
        x, table = values.to_numpy(), _places(values)
        mean, centre = x @ w, x.mean(axis=1, keepdims=True)
        variance = (x - centre) ** 2 @ w - (mean - centre) ** 2
        spread = np.sqrt(np.maximum(variance, 0) * texts / (texts - 1))
        rank = pd.DataFrame(mean).rank(ascending=False, method="min").to_numpy()
        for name, drawn in (("mean", mean), ("spread", spread), ("rank", rank)):
            table[name], table[f"{name}_lower"] = drawn[:, 0], _quantile(drawn[:, 1:], (1 - _LEVEL) / 2)
            table[f"{name}_upper"] = _quantile(drawn[:, 1:], (1 + _LEVEL) / 2)
        table["top"] = (x >= np.sort(x, axis=0)[-1 - (len(x) - 1) // 10]).mean(axis=1)
        table["converged"] = _by_text(rows, "converged").loc[values.index].all(axis=1).to_numpy()
        tables.append(table.astype(dict.fromkeys(("rank", "rank_lower", "rank_upper"), int)))
    if not tables:
        raise CaptureError("No layer or head can be measured at all texts.")
    return PrintedTable(pd.concat(tables, ignore_index=True))


def _weights(texts: int, seed: int) -> np.ndarray:
    """Return weights (texts, 1 + resamples): all equal, then as often as the bootstrap draws a text."""
    stream = random_stream(derive_seed(purpose="bootstrap", seed=seed))
    drawn = stream.multinomial(texts, np.full(texts, 1 / texts), _RESAMPLES if texts > 1 else 1)
    return np.vstack([np.ones(texts), drawn]).T / texts


def _bootstrap(texts: int) -> str:
    few = " (few: such intervals are too narrow)" if texts < _FEW else ""
    return f"percentile bootstrap over {texts} texts{few}, {_LEVEL} confidence, {_RESAMPLES} resamples"


def _by_text(each: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return a column of the rows of each text as a table (layers and heads, texts), without gaps."""
    rows = each.assign(head=each["head"].astype("Int64").fillna(-1))
    return rows.pivot(index=_PLACE, columns="text", values=column).dropna()


def _places(values: pd.DataFrame) -> pd.DataFrame:
    table = values.index.to_frame(index=False)[["layer", "head", "scope"]]
    table["head"] = table["head"].astype("Int64").where(table["head"] >= 0)
    return PrintedTable(table)


def _said(row: Mapping[str, Any], columns: Sequence[str], digits: int = 4) -> str:
    words = []
    for name in columns:
        if row[name] is None:
            words.append(f"{name} none, both are 0")
            continue
        ends = [row[f"{name}_{end}"] for end in ("lower", "upper") if f"{name}_{end}" in row]
        words.append(f"{name} {row[name]:.{digits}g}")
        words[-1] += f" in {interval_in_digits(ends[0], ends[1], digits)}" if ends else ""
    return f"{place_in_words(row['layer'], row['head'], row['scope']):<17} {', '.join(words)}"
