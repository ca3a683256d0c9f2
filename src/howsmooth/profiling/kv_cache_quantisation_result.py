"""The class ``Precision``, the effects of quantised keys and values on the output of a model as tables, text
and files.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import indent
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from howsmooth.errors import ArgumentError
from howsmooth.profiling.figures import draw_precision
from howsmooth.profiling.quantised_forward_pass import simulated_kl
from howsmooth.profiling.quantisers import checked_bits, checked_quantisers
from howsmooth.profiling.result import Result
from howsmooth.study.records import plain_rows

__all__ = ["Precision"]

_SHOWN = 10  # rows of the ranking in a printed result
# In nats. Predictions up to this were within a factor of 5 of the real divergences, which then saturate.
_HOLDS = 0.1
_PLACE = ["layer", "head", "operand"]
_CHANGES, _DIVERGENCES = ("predicted", "change", "bound"), ("predicted_kl", "kl")
_PAIRS = (("predicted", "change"), ("predicted_kl", "kl"), ("predicted", "kl"))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Precision(Result):
    """Predicted and real changes of the output of a model at one input when keys or values are quantised."""

    NAME: ClassVar[str] = "precision"
    TITLE: ClassVar[str] = "Precision"

    #: One row for each layer, key/value head, operand, quantiser and number of bits. Columns: ``layer``,
    #: ``head``, ``operand`` ("K" or "V"), ``bits``, ``quantiser``; of the attention's output, in Frobenius
    #: norm, ``predicted`` (the root mean square of the change to first order, for errors that are
    #: independent and uniform within half a step, or the bound if that is smaller), ``change`` (what the
    #: quantiser really makes), ``bound`` (proved, for all errors of up to half a step) and ``output_norm``
    #: (the norm of the output itself); of the model's predictions ``predicted_kl`` and ``kl``, mean
    #: Kullback–Leibler divergences in nats, NaN for a model without logits; and ``name``, the path of the
    #: module.
    table: pd.DataFrame
    #: The divergence ``kl`` of the model's predictions with all these keys and values quantised at the same
    #: time, for each ``quantiser`` and number of ``bits``; empty without logits.
    together: pd.DataFrame
    #: Seed of the draws from which the divergence is predicted.
    seed: int
    #: What was left out, with the reasons.
    refused: tuple[str, ...]
    #: The model on its input, a ``LogitsOfModel``, for ``simulate``; None without logits.
    logits: Any

    @property
    def has_kl(self) -> bool:
        """True if the table contains simulated KL divergences of the predictions of the model."""
        return bool(self.table["kl"].notna().any())

    @property
    def ranking(self) -> pd.DataFrame:
        """The table of quantised keys and values, sorted by predicted effect in decreasing order.

        The effect is the predicted divergence for a model with logits, and the predicted change of the
        attention's output otherwise. The columns are those of ``table`` without ``output_norm`` and ``name``,
        and without the divergences if there are none.
        """
        columns = [*_PLACE, "bits", "quantiser", *_CHANGES, *(_DIVERGENCES if self.has_kl else ())]
        return self._sorted[columns]

    @property
    def _sorted(self) -> pd.DataFrame:
        return self.table.sort_values(self._key, ascending=False, kind="stable", ignore_index=True)

    @property
    def _key(self) -> str:
        return "predicted_kl" if self.has_kl else "predicted"

    @property
    def agreement(self) -> pd.DataFrame:
        """Spearman's rank correlation between predicted and real effects, for all rows and for each number of
        bits.

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
                found = known[predicted].rank().corr(known[real].rank()) if len(known) > 2 else np.nan
                rows.append({"bits": bits, "predicted": predicted, "real": real, "spearman": float(found)})
        return pd.DataFrame(rows)

    def budget(self, average: float, quantiser: str = "token") -> pd.DataFrame:
        """Choose the number of bits for the keys and values of each head, for a given average number of bits.

        The choice is among the numbers of bits in the table: measure several, such as 2, 3, 4, 5, 6 and 8.
        All heads start with the fewest bits of the table. More bits go where they lower the predicted effect
        most for each bit, until the average is reached. The effect is the predicted divergence for a model
        with logits; otherwise it is the squared predicted change of the attention's output, divided by the
        squared norm of that output. Effects of several heads are added.

        Parameters
        ----------
        average
            The largest average number of bits of an entry, not below the fewest bits of the table.
        quantiser
            The quantiser, one of the table.

        Returns
        -------
        pandas.DataFrame
            One row for each layer, head and operand, with ``bits`` and ``effect``, its predicted effect.

        Raises
        ------
        ArgumentError
            If the table has no such quantiser or only one number of bits, or even its fewest bits are more
            than ``average``.

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
        if len(columns) < 2:
            raise ArgumentError(
                "bits",
                expected="several numbers of bits for a budget to choose from, such as 2,3,4,5,6,8",
                got=str(columns[0]),
            )
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

    def simulate(self, bits: int | pd.DataFrame, quantiser: str = "token") -> float:
        """Return the KL divergence of the predictions of the model when many keys and values are quantised
        together.

        The model runs once, and each layer gets the keys and values that come from the quantised layers
        before it.

        Parameters
        ----------
        bits
            One number of bits for all keys and values of the table, or a table with the columns ``layer``,
            ``head``, ``operand`` and ``bits``, as :meth:`budget` returns it; keys and values that the
            table does not name stay exact. The table may come from another input of the same model.
        quantiser
            The quantiser.

        Returns
        -------
        float
            The mean Kullback–Leibler divergence in nats.

        Raises
        ------
        ArgumentError
            If the model has no logits, or an argument does not fit.

        """
        if self.logits is None:
            raise ArgumentError(
                "logits", expected="the logits of the model, which simulate compares", got="none"
            )
        checked_quantisers(quantiser)
        places = self.table[_PLACE].drop_duplicates()
        if not isinstance(bits, pd.DataFrame):
            bits = places.assign(bits=bits)
        chosen = {tuple(place): count for *place, count in bits[[*_PLACE, "bits"]].itertuples(index=False)}
        checked_bits(list(chosen.values()))
        unknown = set(chosen) - set(places.itertuples(index=False, name=None))
        if unknown:
            raise ArgumentError(
                "bits", expected="layers, heads and operands of the table", got=str(next(iter(unknown)))
            )
        # A dict keeps the last of equal keys: the layer's largest head index.
        last = places.sort_values("head")[["layer", "head"]].itertuples(index=False)
        kv_heads = {layer: head + 1 for layer, head in last}
        return simulated_kl(self.logits, chosen, kv_heads, quantiser)

    # ---- in words, in notebooks, and as files

    @property
    def citation(self) -> str:
        """One line to cite, with the KL divergences for quantising everything, rank correlations and the
        digest.
        """
        at_once = "".join(f" {line};" for line in self._together_in_words())
        return (
            f"Quantised keys and values of {self.model} at {self.input} (n = {self.n}):{at_once} Spearman's "
            f"rank correlation: {self._ranks_in_words()}; {self._made_by}"
        )

    def _ranks_in_words(self) -> str:
        rows = [row for row in plain_rows(self.agreement) if row["bits"] == 0]
        return "; ".join(f"{row['predicted']} and {row['real']} {row['spearman']:.3f}" for row in rows)

    def _together_in_words(self) -> list[str]:
        """Return a phrase for each quantiser with the KL divergences for quantising all keys and values
        together.
        """
        return [
            f"all keys and values at once by {quantiser}: divergence "
            + ", ".join(f"{row['kl']:.3g} at {row['bits']} bits" for row in plain_rows(rows))
            for quantiser, rows in self.together.groupby("quantiser", sort=False)
        ]

    @property
    def remarks(self) -> list[str]:
        """Sentences about quantising everything together, about predictions that are too large, and about the
        ranks.
        """
        found = [f"A{words[1:]}." for words in self._together_in_words()]
        if bool((self.table["predicted_kl"] > _HOLDS).any()):
            found.append(f"* Above {_HOLDS} nats predictions are too large, up to a hundredfold: see kl.")
        return [*found, f"Spearman's rank correlation: {self._ranks_in_words()}."]

    def first_rows(self, most: int) -> pd.DataFrame:
        """Return the first rows of the ranking as text, in which a star marks predictions that are
        too large.
        """
        rows = self.ranking.head(most)
        texts = {name: rows[name].map("{:.4g}".format) for name in rows if name in _CHANGES + _DIVERGENCES}
        if self.has_kl and bool((large := rows["predicted_kl"] > _HOLDS).any()):
            texts["predicted_kl"] += np.where(large, "*", " ")
        return rows.assign(**texts).rename(columns={"head": "kv head"})

    def __repr__(self) -> str:
        rows = self.first_rows(_SHOWN)
        lines = [
            f"Precision of {self.model}, {self.n} tokens: keys or values of one head quantised.",
            f"The first {len(rows)} of {len(self.table)} rows by {self._key}. Norm of the change of the "
            "attention's output: predicted, change (real), bound (proved)"
            + ("; divergence of the predictions in nats: predicted_kl, kl (real)." if self.has_kl else "."),
            indent(rows.to_string(index=False), "  "),
            *self.remarks,
        ]
        lines += [f"  left out: {reason}" for reason in self.refused]
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Draw the predicted effect of quantising each head, and the real effects against the
        predicted ones.
        """
        title = f"{self.model}, one input of {self.n} tokens"
        return draw_precision(self.table, title, divergences=self.has_kl)

    def _shown(self, most: int) -> dict[str, Any]:
        rows = plain_rows(self.first_rows(most))
        agreement = [row | {"spearman": f"{row['spearman']:.3f}"} for row in plain_rows(self.agreement)]
        shown = {"rows": rows, "columns": list(rows[0]), "shown": len(rows), "total": len(self.table)}
        return shown | {"agreement": agreement}

    def described(self) -> dict[str, Any]:
        """Return the settings, the rank correlations and the ranking, as a dict for JSON."""
        return super().described() | {
            "seed": self.seed,
            "refused": list(self.refused),
            "together": plain_rows(self.together),
            "agreement": plain_rows(self.agreement),
            "ranking": plain_rows(self._sorted),
        }
