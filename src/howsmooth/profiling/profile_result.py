"""The class ``Profile``, the local Lipschitz constants of the layers and heads of a model as tables, text and
files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

import pandas as pd
from matplotlib.figure import Figure

from howsmooth.errors import ArgumentError
from howsmooth.profiling.figures import draw_heatmap
from howsmooth.profiling.influence import Influence
from howsmooth.profiling.result import Result, in_interval
from howsmooth.study.file_writing import text_or_file
from howsmooth.study.html_assets import data_url, png
from howsmooth.study.records import plain_rows
from howsmooth.study.report.chart_data import visible_token
from howsmooth.study.text_formatting import place_in_words, readable

__all__ = ["Profile"]

_SHOWN = 10  # rows of the ranking in a printed profile
_LEVELS = 9  # shades of a highlighted token


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Profile(Result):
    """The local Lipschitz constants of all attention layers and heads of a model at one input, with the
    tokens.
    """

    NAME: ClassVar[str] = "profile"
    TITLE: ClassVar[str] = "Profile"

    #: One row for each layer (scope ``attention``, no head) and each head (scope ``head``), with the columns
    #: ``layer``, ``head``, ``scope``, ``value``, ``lower``, ``upper``, ``confidence``, ``converged``,
    #: ``iterations``, ``method``, ``masking``, ``name`` (the path of the module), ``stored`` and ``computed``
    #: (the dtypes of the weights and of the computation, as below). It is printed within
    #: 80 columns (:class:`~howsmooth.printed_table.PrintedTable`).
    table: pd.DataFrame
    #: One row for each token of each row of ``table``, with the columns ``layer``, ``head``, ``scope``,
    #: ``position``, ``token`` where the input has words, ``input_share`` (where a change matters) and
    #: ``output_share`` (where it shows). The shares of a side sum to one.
    tokens: pd.DataFrame
    #: The text of each token; empty for inputs without token ids.
    words: tuple[str, ...]
    #: Probability with which each interval holds.
    confidence: float
    #: Relative width of the intervals that was asked for.
    rtol: float
    #: Seed of the random starts.
    seed: int
    #: What was not measured, with the reasons.
    refused: tuple[str, ...]
    #: Which token moves which, in the layer with the largest constant; None where that was not measured.
    influence: Influence | None = None

    @property
    def ranking(self) -> pd.DataFrame:
        """The table of measured constants, sorted in decreasing order within each scope.

        Heads come before whole layers. Columns: ``layer``, ``head``, ``scope``, ``value``, ``lower``,
        ``upper`` and ``converged``.
        """
        return self._sorted[["layer", "head", "scope", "value", "lower", "upper", "converged"]]

    @property
    def _sorted(self) -> pd.DataFrame:
        return self.table.sort_values(["scope", "value"], ascending=False, kind="stable", ignore_index=True)

    @property
    def influence_layer(self) -> int:
        """The index of the layer with the largest constant, for which ``influence`` was measured."""
        ranking = self.ranking
        return int(ranking[ranking["scope"] == "attention"].iloc[0]["layer"])

    @property
    def citation(self) -> str:
        """One line to cite the profile: largest constants with intervals, versions of the libraries and the
        digest.
        """
        found = []
        for scope, rows in self.ranking.groupby("scope", sort=False):
            top = rows.iloc[0]
            found.append(f"largest in scope {scope}: {_place(top)}, {_interval(top)}")
        return (
            f"Local Lipschitz constants of {self.model} at {self.input} (n = {self.n}): {'; '.join(found)}; "
            f"each interval at {self.confidence:.4g} confidence; {self._made_by}"
        )

    def sensitive_tokens(self, layer: int, head: int | None = None) -> pd.DataFrame:
        """Return the tokens of one layer or head, starting with the most sensitive ones.

        The tokens are sorted by ``input_share``.

        Raises
        ------
        ArgumentError
            If the profile has no such layer or head.

        """
        rows = self._tokens_of(layer, head).sort_values("input_share", ascending=False, kind="stable")
        return rows.reset_index(drop=True)

    def _tokens_of(self, layer: int, head: int | None) -> pd.DataFrame:
        heads = self.tokens["head"]
        found = self.tokens[
            (self.tokens["layer"] == layer) & (heads.isna() if head is None else heads == head)
        ]
        if found.empty:
            raise ArgumentError(
                "layer", expected="a layer or head of the table", got=place_in_words(layer, head)
            )
        return found

    # ---- in words, in notebooks, and as files

    def __repr__(self) -> str:
        lines = [
            f"Profile of {self.model}, {self.n} tokens, {self.precision}.",
            f"Intervals of {self.confidence:.4g} confidence; "
            "the token where a change matters → where it shows.",
        ]
        for scope, rows in self.ranking.groupby("scope", sort=False):
            lines.append(f"  scope {scope}, the largest {min(len(rows), _SHOWN)} of {len(rows)}:")
            lines += [
                f"    {_place(row):<18} {_interval(row)}{self._said_of_tokens(row)}"
                for _, row in rows.head(_SHOWN).iterrows()
            ]
        missed = int((~self.table["converged"]).sum())
        lines += [f"  {missed} of {len(self.table)} did not reach rtol = {self.rtol:g}"] if missed else []
        if self.influence is not None:
            lines.append(f"  {place_in_words(self.influence_layer, None)}: {self.influence}")
        lines += [f"  not measured: {reason}" for reason in self.refused]
        return "\n".join(lines)

    def _said_of_tokens(self, row: Any) -> str:
        """Return a phrase that names the most sensitive input token and the most affected output token of a
        row.
        """
        head = None if pd.isna(row["head"]) else int(row["head"])
        rows = plain_rows(self._tokens_of(int(row["layer"]), head))
        said = []
        for column in ("input_share", "output_share"):
            top = max(rows, key=lambda one: one[column] or 0.0)
            if top[column] is not None:
                token = f" {readable(top['token'])!r}" if "token" in top else ""
                said.append(f"{top['position']}{token} {100 * top[column]:.0f} %")
        return f"  {' → '.join(said)}" if said else ""

    def plot(self) -> Figure:
        """Draw the constants as a heatmap of layers and heads, with an additional column for whole layers."""
        title = f"{self.model}, one input of {self.n} tokens: local Lipschitz constants"
        return draw_heatmap(self.table, title)

    def _tables(self) -> dict[str, pd.DataFrame]:
        influence = {} if self.influence is None else {"influence": self.influence.table}
        return {**super()._tables(), "tokens": self.tokens, **influence}

    def _shown(self, most: int) -> dict[str, Any]:
        ranking = [rows.head(most) for _, rows in self.ranking.groupby("scope", sort=False)]
        rows = [
            row
            | {name: f"{row[name]:.6g}" for name in ("value", "lower", "upper")}
            | {"place": place_in_words(row["layer"], row["head"])}
            | {"sides": self._sides(row["layer"], row["head"])}
            for row in plain_rows(pd.concat(ranking))
        ]
        pictured = None
        if self.influence is not None:
            words = self.words if len(self.words) == self.influence.value.shape[1] else None
            pictured = data_url(png(self.influence.plot(words)))
        return {"rows": rows, "shown": len(rows), "total": len(self.table), "influence": pictured}

    def _sides(self, layer: int, head: int | None) -> list[tuple[str, list[tuple[int, str, str]]]]:
        """Return two titled lists of all tokens, shaded by their shares of the input and of the output
        change.

        A token is a triple: its shade, its text, and its share of the change in words.
        """
        rows = self._tokens_of(layer, head)
        words = [visible_token(word) for word in self.words] or [f" {i} " for i in rows["position"]]
        sides = []
        for title, column in (("A change matters at", "input_share"), ("It shows at", "output_share")):
            shares = rows[column].fillna(0.0).to_list()
            most = max(shares) or 1.0
            spans = [
                (round(_LEVELS * share / most), word, f"token {i}: {100 * share:.2g} %")
                for i, (share, word) in enumerate(zip(shares, words, strict=False))
            ]
            sides.append((title, spans))
        return sides

    def to_latex(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write the ranking as a LaTeX table to a file, or return it as text if no path is given.

        The table uses booktabs. Its caption is one sentence with the digest, its label ``tab:howsmooth-`` and
        the digest; the whole citation stands above it as a comment.
        """
        table = self._sorted[["layer", "head", "scope", "value", "lower", "upper", "converged"]]
        caption = (
            f"Local Lipschitz constants of {self.model} at one input of {self.n} tokens, with intervals of "
            f"{self.confidence:.4g} confidence (howsmooth {version('howsmooth')}, digest {self.digest})."
        )
        words: str = table.to_latex(
            index=False,
            float_format="%.6g",
            na_rep="all",
            escape=True,
            caption=_latex(caption),
            label=f"tab:howsmooth-{self.digest}",
        )
        return text_or_file(f"% {' '.join(self.citation.split())}\n{words}", path)

    def described(self) -> dict[str, Any]:
        """Return the settings, the ranking and the most sensitive token of each row, as a dict for JSON."""
        rows = plain_rows(self._sorted)
        for row in rows:
            first = self.sensitive_tokens(row["layer"], row["head"]).iloc[0]
            row["most_sensitive"] = {"position": int(first["position"])} | (
                {"token": first["token"]} if "token" in first else {}
            )
        settings = {name: getattr(self, name) for name in ("confidence", "rtol", "seed")}
        return super().described() | settings | {"refused": list(self.refused), "ranking": rows}


def _place(row: Any) -> str:
    return place_in_words(int(row["layer"]), None if pd.isna(row["head"]) else int(row["head"]))


def _interval(row: Any) -> str:
    return in_interval(row["value"], row["lower"], row["upper"], converged=row["converged"])


def _latex(words: str) -> str:
    return "".join(f"\\{letter}" if letter in "&%$#_{}" else letter for letter in words)
