"""``Profile``: the local Lipschitz constants of a model's layers and heads, as tables, words and files."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pandas as pd

from howsmooth.errors import ArgumentError
from howsmooth.study.file_writing import csv_of, text_or_file, write_parquet
from howsmooth.study.records import plain_rows
from howsmooth.study.text_formatting import place_in_words, readable
from howsmooth.token_influence import Influence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Profile"]

_SHOWN = 10  # rows of the ranking in a printed profile


@dataclass(frozen=True, eq=False, repr=False)
class Profile:
    """The local Lipschitz constants of attention layers and heads at one input, with their tokens."""

    #: One row for each layer (scope ``attention``, no head) and each head (scope ``head``), with the columns
    #: ``layer``, ``head``, ``scope``, ``value``, ``lower``, ``upper``, ``confidence``, ``converged``,
    #: ``iterations``, ``method``, ``masking``, ``name`` (the path of the module), ``stored`` and ``computed``
    #: (the dtypes of the weights and of the computation, as below). ``print(p.ranking)`` fits a terminal of
    #: 80 columns; ``table`` is wider.
    table: pd.DataFrame
    #: One row for each token of each row of ``table``, with the columns ``layer``, ``head``, ``scope``,
    #: ``position``, ``token`` where the input has words, ``input_share`` (where a change matters) and
    #: ``output_share`` (where it shows). The shares of a side sum to one.
    tokens: pd.DataFrame
    #: The name of the model or of its folder, or the name of its class.
    model: str
    #: Where the weights come from; empty for a model that was not loaded by its name.
    source: str
    #: SHA-256 of the model.
    fingerprint: str
    #: The input in words.
    input: str
    #: The text of each token; empty for inputs without token ids.
    words: tuple[str, ...]
    #: Number of tokens.
    n: int
    #: The dtype in which the weights are stored.
    stored: str
    #: The dtype of the map, its tokens and the products; values and intervals of closed forms are float64.
    computed: str
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
        """The table of measured constants, sorted within each scope, the largest first.

        Heads come before whole layers. Columns: ``layer``, ``head``, ``scope``, ``value``, ``lower``,
        ``upper`` and ``converged``.
        """
        return self._sorted[["layer", "head", "scope", "value", "lower", "upper", "converged"]]

    @property
    def _sorted(self) -> pd.DataFrame:
        return self.table.sort_values(["scope", "value"], ascending=False, kind="stable", ignore_index=True)

    @property
    def _influence_layer(self) -> int:
        """The layer with the largest constant, for which ``influence`` was measured."""
        ranking = self.ranking
        return int(ranking[ranking["scope"] == "attention"].iloc[0]["layer"])

    @property
    def digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 of the table and the model's weights.

        The digest changes with the seed, which moves the intervals, and with every weight, measured or not.
        """
        return hashlib.sha256(f"{self.fingerprint}\n{csv_of(self.table)}".encode()).hexdigest()[:12]

    @property
    def citation(self) -> str:
        """One line for citing the profile: largest constants with intervals, the versions and the digest."""
        found = []
        for scope, rows in self.ranking.groupby("scope", sort=False):
            top = rows.iloc[0]
            found.append(f"largest in scope {scope}: {_place(top)}, {_interval(top)}")
        return (
            f"Local Lipschitz constants of {self.model} at {self.input} (n = {self.n}): {'; '.join(found)}; "
            f"each interval at {self.confidence:.4g} confidence; {self.precision}; howsmooth "
            f"{version('howsmooth')}, torch {version('torch')}, transformers {version('transformers')}; "
            f"weights {self.fingerprint[:12]}, digest {self.digest}."
        )

    @property
    def precision(self) -> str:
        """The dtypes of the stored weights and of the computation, in words."""
        same = self.stored == self.computed
        return f"weights in {self.stored}" + ("" if same else f", computed in {self.computed}")

    def sensitive_tokens(self, layer: int, head: int | None = None) -> pd.DataFrame:
        """Return the tokens of one layer or head, the most sensitive ones first.

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
            lines.append(f"  {place_in_words(self._influence_layer, None)}: {self.influence}")
        lines += [f"  not measured: {reason}" for reason in self.refused]
        return "\n".join(lines)

    def _said_of_tokens(self, row: Any) -> str:
        """Return a phrase with the most sensitive input token and the most affected output token of a row."""
        head = None if pd.isna(row["head"]) else int(row["head"])
        rows = plain_rows(self._tokens_of(int(row["layer"]), head))
        said = []
        for column in ("input_share", "output_share"):
            top = max(rows, key=lambda one: one[column] or 0.0)
            if top[column] is not None:
                token = f" {readable(top['token'])!r}" if "token" in top else ""
                said.append(f"{top['position']}{token} {100 * top[column]:.0f} %")
        return f"  {' → '.join(said)}" if said else ""

    def _repr_html_(self) -> str:
        """Return the figure, the ranking and the tokens of its first rows as HTML, for notebooks."""
        from howsmooth.profiling.page import fragment

        return fragment(self)

    def plot(self) -> Figure:
        """Draw the constants as a heatmap of layers and heads, with a column for the whole layers."""
        from howsmooth.profiling.heatmap import draw

        return draw(self)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write the table as CSV to a file; without a path, return the CSV as text."""
        return text_or_file(csv_of(self.table), path)

    def to_latex(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write the ranking as a LaTeX table; without a path, return it as text.

        The table uses booktabs, and its caption is the citation.
        """
        table = self._sorted.drop(columns=["iterations", "method", "masking", "name"])
        words: str = table.to_latex(
            index=False, float_format="%.6g", na_rep="all", escape=True, caption=_latex(self.citation)
        )
        return text_or_file(words, path)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the table as parquet, with the citation in its metadata, where pandas reads it as ``attrs``.

        Raises
        ------
        ArgumentError
            If pandas has no engine for parquet.

        """
        write_parquet(self.table, path, self.citation)

    def described(self) -> dict[str, Any]:
        """Return the settings, the ranking and the most sensitive token of each row, as a dict for JSON."""
        rows = plain_rows(self._sorted)
        for row in rows:
            first = self.sensitive_tokens(row["layer"], row["head"]).iloc[0]
            row["most_sensitive"] = {"position": int(first["position"])} | (
                {"token": first["token"]} if "token" in first else {}
            )
        names = (
            "model",
            "source",
            "fingerprint",
            "input",
            "n",
            "stored",
            "computed",
            "confidence",
            "rtol",
            "seed",
        )
        return {name: getattr(self, name) for name in names} | {
            "refused": list(self.refused),
            "citation": self.citation,
            "ranking": rows,
        }


def _place(row: Any) -> str:
    return place_in_words(int(row["layer"]), None if pd.isna(row["head"]) else int(row["head"]))


def _interval(row: Any) -> str:
    status = "" if row["converged"] else " (not converged)"
    return f"{row['value']:.6g} in [{row['lower']:.6g}, {row['upper']:.6g}]{status}"


def _latex(words: str) -> str:
    return "".join(f"\\{letter}" if letter in "&%$#_{}" else letter for letter in words)
