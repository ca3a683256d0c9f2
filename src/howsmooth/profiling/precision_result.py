"""``Precision``: predicted and real changes by quantised keys and values, as tables, words and files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from howsmooth.errors import ArgumentError
from howsmooth.study.output_files import csv_of, text_or_file
from howsmooth.study.records import plain_rows
from howsmooth.study.text_formatting import place_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Precision"]

_SHOWN = 10  # rows of the ranking in a printed result
_PLACE = ["layer", "head", "operand"]
_PAIRS = (("predicted", "change"), ("predicted_kl", "kl"), ("predicted", "kl"))


@dataclass(frozen=True, eq=False, repr=False)
class Precision:
    """What quantised keys and values of each head do to a model's output at one input."""

    #: One row for each layer, key/value head, operand, quantiser and number of bits. Columns: ``layer``,
    #: ``head``, ``operand`` ("K" or "V"), ``bits``, ``quantiser``; of the attention's output, in Frobenius
    #: norm, ``predicted`` (the root mean square of the change to first order, for errors that are
    #: independent and uniform within half a step, or the bound if that is smaller), ``change`` (what the
    #: quantiser really makes), ``bound`` (proved, for all errors of up to half a step) and ``output_norm``
    #: (the norm of the output itself); of the model's predictions ``predicted_kl`` and ``kl``, mean
    #: Kullback–Leibler divergences in nats, NaN for a model without logits; and ``name``, the path of the
    #: module.
    table: pd.DataFrame
    #: The name of the model, or of its class.
    model: str
    #: Where the weights come from; empty for a model that was not loaded by its name.
    source: str
    #: SHA-256 of the model.
    fingerprint: str
    #: The input in words.
    input: str
    #: Number of tokens.
    n: int
    #: The dtype in which the weights are stored.
    stored: str
    #: The dtype in which the model runs; changes of a layer's output are computed in float64.
    computed: str
    #: Seed of the draws from which the divergence is predicted.
    seed: int
    #: What was left out, with the reasons.
    refused: tuple[str, ...]

    @property
    def has_kl(self) -> bool:
        """Whether the divergence of the model's predictions was simulated."""
        return bool(self.table["kl"].notna().any())

    @property
    def ranking(self) -> pd.DataFrame:
        """The rows of ``table``, the largest predicted effect first.

        It is the predicted divergence for a model with logits, and the predicted change of the attention's
        output otherwise.
        """
        column = "predicted_kl" if self.has_kl else "predicted"
        return self.table.sort_values(column, ascending=False, kind="stable", ignore_index=True)

    @property
    def agreement(self) -> pd.DataFrame:
        """Spearman's rank correlation between predicted and real effects, over all rows and for each bits.

        Columns: ``bits`` (0 for all), ``predicted``, ``real`` and ``spearman``; rows of divergences only for
        a model with logits.
        """
        rows = []
        for bits in (0, *self.table["bits"].unique()):
            chosen = self.table if bits == 0 else self.table[self.table["bits"] == bits]
            for predicted, real in _PAIRS:
                if real == "kl" and not self.has_kl:
                    continue
                known = chosen[[predicted, real]].dropna()
                found = stats.spearmanr(known[predicted], known[real]).statistic if len(known) > 2 else np.nan
                rows.append({"bits": bits, "predicted": predicted, "real": real, "spearman": float(found)})
        return pd.DataFrame(rows)

    def budget(self, average: float, quantiser: str = "token") -> pd.DataFrame:
        """Return the number of bits of each head's keys and values, for a given average number of bits.

        Starting from the fewest bits of the table, bits are given where they lower the predicted effect most
        for each bit, until the average is reached. The effect is the predicted divergence for a model with
        logits; otherwise it is the squared predicted change of the attention's output, divided by the squared
        norm of that output. Effects of several heads are added.

        Parameters
        ----------
        average
            The largest average number of bits of an entry, not below the fewest bits of the table.
        quantiser
            The quantiser.

        Returns
        -------
        pandas.DataFrame
            One row for each layer, head and operand, with ``bits`` and ``effect``, its predicted effect.

        Raises
        ------
        ArgumentError
            If the table has no such quantiser, or even its fewest bits are more than ``average``.

        """
        rows = self.table[self.table["quantiser"] == quantiser]
        if rows.empty:
            known = ", ".join(self.table["quantiser"].unique())
            raise ArgumentError("quantiser", expected=f"one of the table: {known}", got=repr(quantiser))
        effects = rows["predicted_kl"]
        if not self.has_kl:
            effects = (rows["predicted"] / rows["output_norm"]).pow(2)
        wide = rows.assign(effect=effects).pivot_table(index=_PLACE, columns="bits", values="effect")
        columns = [int(b) for b in wide.columns]
        if not average >= columns[0]:
            raise ArgumentError("average", expected=f"at least {columns[0]} bits", got=repr(average))
        values = wide.to_numpy()
        chosen = np.zeros(len(values), dtype=int)
        left = average * len(values) - columns[0] * len(values)
        while True:
            best, gain = None, 0.0
            for i, at in enumerate(chosen):
                for to in range(at + 1, len(columns)):
                    cost = columns[to] - columns[at]
                    saved = (values[i, at] - values[i, to]) / cost
                    if cost <= left + 1e-9 and saved > gain:
                        best, gain = (i, to, cost), saved
            if best is None:
                break
            chosen[best[0]], left = best[1], left - best[2]
        found = wide.reset_index()[_PLACE]
        found["bits"] = [columns[at] for at in chosen]
        found["effect"] = values[np.arange(len(values)), chosen]
        found.columns.name = None
        return found

    # ---- in words, in notebooks, and as files

    def __repr__(self) -> str:
        kinds = ", ".join(self.table["quantiser"].unique())
        lines = [
            f"Precision of {self.model}, {self.n} tokens: keys and values of one head quantised by {kinds}.",
            f"The largest {min(len(self.table), _SHOWN)} of {len(self.table)} predicted effects"
            " (change of the attention's output: predicted, real, proved bound"
            + ("; divergence of the predictions: predicted, real):" if self.has_kl else "):"),
        ]
        lines += [f"  {_described(row, self.has_kl)}" for row in plain_rows(self.ranking.head(_SHOWN))]
        ranks = [
            f"{row['predicted']} and {row['real']} {row['spearman']:.3f}"
            for row in plain_rows(self.agreement)
            if row["bits"] == 0
        ]
        lines.append(f"Spearman's rank correlation: {'; '.join(ranks)}.")
        lines += [f"  left out: {reason}" for reason in self.refused]
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Draw the predicted effects of the fewest bits by layer and head, and predicted beside real ones."""
        from howsmooth.profiling.precision_figure import draw

        return draw(self)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write the table as CSV to a file; without a path, return the CSV as text."""
        return text_or_file(csv_of(self.table), path)

    def described(self) -> dict[str, Any]:
        """Return the settings, the rank correlations and the ranking, as a dict for JSON."""
        names = ("model", "source", "fingerprint", "input", "n", "stored", "computed", "seed")
        return {name: getattr(self, name) for name in names} | {
            "refused": list(self.refused),
            "agreement": plain_rows(self.agreement),
            "ranking": plain_rows(self.ranking),
        }


def _described(row: dict[str, Any], has_kl: bool) -> str:
    place = f"{place_in_words(row['layer'], row['head'])}, {row['operand']}, {row['bits']} bits"
    words = f"{place}, {row['quantiser']}"
    numbers = f"{row['predicted']:.4g}, {row['change']:.4g}, ≤ {row['bound']:.4g}"
    return f"{words:<42} {numbers}" + (f"; {row['predicted_kl']:.3g}, {row['kl']:.3g}" if has_kl else "")
