"""The function ``precision``, which shows how quantised keys, values or weights change a model's output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from numbers import Real
from textwrap import indent
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.attention.scaled_dot_product import attend
from howsmooth.bounds import kv_error_upper_bound
from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError, ModelError
from howsmooth.models import LoadedModel
from howsmooth.models.capture import checked_selection
from howsmooth.models.identification.layer_identification import indices_of
from howsmooth.models.identification.non_softmax_layers import NO_SOFTMAX
from howsmooth.models.recorded_softmaxes import RecordedModel, RecordedSoftmax
from howsmooth.printed_table import PrintedTable
from howsmooth.profiling import model_input
from howsmooth.profiling.entry_sensitivities import entry_sensitivities
from howsmooth.profiling.model_input import InputResult, Inputs, Layers, Model
from howsmooth.profiling.quantisers import (
    OF_WEIGHTS,
    QUANTISERS,
    checked_bits,
    checked_quantisers,
    group_of,
    quantised_tokens,
    rounded,
    simulated_kl,
    steps_and_zeros,
)
from howsmooth.profiling.weight_quantisation import QuantisedWeights, refuse_quantised
from howsmooth.results.curves import SOLID, Curve, Panel
from howsmooth.results.drawing import Figure, add_colourbar, logarithmic, new_figure, styled, titled
from howsmooth.results.heatmaps import Cells
from howsmooth.results.page import frame, parts
from howsmooth.seeds import derive_seed
from howsmooth.study.records import plain_rows
from howsmooth.threads import renew_threads, with_fastest_threads

__all__ = ["Precision", "precision", "with_head"]

_SHOWN = 10  # rows of the ranking in a printed result
_CELL, _SCATTER = 0.3, 4.2  # inches
# In nats. Predictions up to this were within a factor of 5 of the real divergences, which then saturate.
_HOLDS = 0.1
_BITS = (8, 4, 3)
_MARKS = (("o", "#1f77b4"), ("^", "#ff7f0e"), ("s", "#2ca02c"))
_IN_WORDS = {"K": "keys", "V": "values", "head": "key/value head"}
_MEANT = (
    "Predicted, change and bound are Frobenius norms of the change of the attention's output: the root mean "
    "square to first order, what the quantiser makes, and a proved limit for all errors of up to half a "
    "step. Divergences are in nats a token. A kv head is a head of keys and values."
)
_MEANT_OF_WEIGHTS = "Norms are of the change of the block's output; divergences are in nats a token."
_MIXED = ["quantiser", "average", "bits", "kl", "equal_bits", "equal_kl"]
_CHANGES, _DIVERGENCES = ("predicted", "change", "bound"), ("predicted_kl", "kl")
_PAIRS = (("predicted", "change"), ("predicted_kl", "kl"), ("predicted", "kl"))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Precision(InputResult):
    """The changes of a model's output at one input if keys, values or weights are quantised."""

    NAME: ClassVar[str] = "precision"
    TITLE: ClassVar[str] = "Precision"
    WHAT: ClassVar[str] = "What quantising one head or one part of a block does to the output,"
    ALT: ClassVar[str] = "Effects by layer, and predicted beside real ones; the numbers are in precision.csv."
    LEFT_OUT: ClassVar[str] = "left out"

    #: One row for each layer, key/value head, operand, quantiser and number of bits. Columns: ``layer``,
    #: ``head``, ``operand`` ("K" or "V"), ``bits``, ``quantiser``; of the attention's output (of its heads
    #: where ``refused`` leaves out the projection), in Frobenius norm, ``predicted`` (the root mean square of
    #: the change to first order, for errors that are independent and uniform within half a step, or the bound
    #: if that is smaller), ``change`` (what the quantiser really makes), ``bound`` (proved, for all errors of
    #: up to half a step) and ``output_norm`` (the norm of the output itself); of the model's predictions
    #: ``predicted_kl`` and ``kl``, mean Kullback–Leibler divergences in nats, NaN for a model without logits;
    #: ``entries``, how many numbers are quantised; ``name``, the path of the module; and with an ``average``
    #: ``in_budget``, whether the budget of the quantiser gives the row's bits. For weights ``part`` stands in
    #: place of head and operand ("attention", "MLP", or "block" if these are not told apart), the changes are
    #: of the block's output without a bound, and both predictions are for the very error that the quantiser
    #: makes: ``predicted_kl`` is half the variance, under the model's own probabilities, of the derivative of
    #: the logits along it. They foresee no other choice of experts.
    table: pd.DataFrame
    #: The divergence ``kl`` of the model's predictions with all places of the table quantised at the same
    #: time, for each ``quantiser`` and number of ``bits``; empty without logits.
    together: pd.DataFrame
    #: The :meth:`budget` of each ``quantiser`` for an ``average``; empty without one.
    budgets: pd.DataFrame
    #: For each ``quantiser`` and its budget: the ``average`` that was asked for, the exact mean ``bits`` of a
    #: quantised number, the divergence ``kl`` with all places quantised at once, and ``equal_kl``
    #: with the same ``equal_bits`` for all, the most in the table up to the average.
    mixed: pd.DataFrame
    #: Seed of the draws from which the divergence is predicted.
    seed: int
    #: What runs the model for ``simulate``; None without logits.
    logits: Any

    @property
    def _of_weights(self) -> bool:
        return "part" in self.table

    @property
    def _place(self) -> list[str]:
        return ["layer", "part"] if self._of_weights else ["layer", "head", "operand"]

    @property
    def has_kl(self) -> bool:
        """True if the table contains simulated KL divergences of the model's predictions."""
        return bool(self.table["kl"].notna().any())

    @property
    def ranking(self) -> pd.DataFrame:
        """The table in decreasing order of the divergence ``kl`` or, without logits, the predicted change.

        The columns are the place, ``bits``, ``quantiser``, the changes and, if there are any, the
        divergences.
        """
        columns = [*self._place, "bits", "quantiser", *_CHANGES, *(_DIVERGENCES if self.has_kl else ())]
        return self._sorted.filter(columns)

    @property
    def _sorted(self) -> pd.DataFrame:
        return self.table.sort_values(self._key, ascending=False, kind="stable", ignore_index=True)

    @property
    def _key(self) -> str:
        return "kl" if self.has_kl else "predicted"

    @property
    def agreement(self) -> pd.DataFrame:
        """Spearman's rank correlations between predicted and simulated effects.

        The columns are ``bits`` (0 for all rows together), ``predicted``, ``real`` and ``spearman``. Only a
        model with logits has rows on divergences, and only several numbers of bits have rows of their own.
        """
        rows = []
        every = self.table["bits"].unique()
        for bits in (0, *(every if len(every) > 1 else ())):
            chosen = self.table if bits == 0 else self.table[self.table["bits"] == bits]
            ranks = chosen.filter([*_CHANGES, *_DIVERGENCES]).corr("spearman", min_periods=3)
            for predicted, real in _PAIRS if self.has_kl else _PAIRS[:1]:
                spearman = ranks.at[predicted, real]
                rows.append({"bits": bits, "predicted": predicted, "real": real, "spearman": spearman})
        return pd.DataFrame(rows)

    def budget(self, average: float, quantiser: str | None = None) -> pd.DataFrame:
        """Choose how many bits each head's keys and values, or each part's weights, get: at most ``average``
        on average over all quantised numbers. Steps and zero points are not counted.

        The numbers of bits are chosen among those in the table for the quantiser, so measure several, such as
        2, 3, 4, 5, 6 and 8. All places start with the smallest number. Bits are then added where they lower
        the effect most for each bit. With logits the effect is ``predicted_kl``, or its geometric mean with
        ``kl``, in which the chance of one rounding counts less. Of these two results, and one number of bits
        for all, the one is taken that has the smallest divergence with all places quantised at once. Without
        logits the effect is the squared predicted change of the output relative to this output.

        The result has one row for each place, with ``bits``, ``entries`` (how many numbers
        are quantised) and ``effect``, that of the row of the table, ``kl`` with logits. An ArgumentError says
        that the table has no such quantiser or only one number of bits, or that even its fewest bits are more
        than ``average``.
        """
        quantiser = quantiser or ("channel" if self._of_weights else "token")
        rows = self.table[self.table["quantiser"] == quantiser]
        if rows.empty:
            known = ", ".join(self.table["quantiser"].unique())
            raise ArgumentError("quantiser", expected=f"one of the table: {known}", got=repr(quantiser))
        mean = (rows["kl"] * rows["predicted_kl"]).pow(0.5)
        rows = rows.assign(mean=mean, relative=(rows["predicted"] / rows["output_norm"]).pow(2))
        told, *effects = ["kl", "mean", "predicted_kl"] if self.has_kl else ["relative", "relative"]
        wide = rows.pivot(index=self._place, columns="bits", values=list({told, *effects, "entries"}))
        entries, bits = wide["entries"].to_numpy(dtype=int)[:, 0], wide["entries"].columns.to_numpy(dtype=int)
        average = _checked_average(average, bits.tolist())
        chosen = [_spent(wide[effect].to_numpy(), bits, entries, average) for effect in effects]
        chosen.append(np.full(len(entries), np.flatnonzero(bits <= average)[-1]))

        def at_once(choice: np.ndarray) -> float:
            given = dict(zip(wide.index, bits[choice].tolist(), strict=True))
            return float(self.logits(given, quantiser))

        best = chosen[0] if self.logits is None else min(chosen, key=at_once)
        effect = wide[told].to_numpy()[np.arange(len(best)), best]
        places = wide.index.to_frame(index=False)
        return places.assign(bits=bits[best], entries=entries, effect=effect)

    def simulate(self, bits: int | pd.DataFrame, quantiser: str | None = None) -> float:
        """Run the model with many places quantised at once, and return the mean Kullback–Leibler divergence
        of its predictions in nats.

        The keys and values of a layer are computed from the quantised layers before it. An ArgumentError says
        that the model has no logits, or that an argument does not fit.

        Parameters
        ----------
        bits
            One number of bits for all places of the table, or a table with the columns ``layer``, ``head``,
            ``operand`` (or ``part``) and ``bits``, as :meth:`budget` returns it; what it does not name stays
            exact. The table may come from another input of the same model.
        quantiser
            The quantiser; by default "token" of keys and values, "channel" of weights.

        """
        if self.logits is None:
            expected = "the logits of the model, which simulate compares"
            raise ArgumentError("logits", expected=expected, got="none")
        quantiser = quantiser or ("channel" if self._of_weights else "token")
        checked_quantisers(quantiser, OF_WEIGHTS if self._of_weights else QUANTISERS)
        places = self.table[self._place].drop_duplicates()
        if not isinstance(bits, pd.DataFrame):
            bits = places.assign(bits=bits)
        columns = bits[[*self._place, "bits"]]
        chosen = {tuple(place): count for *place, count in columns.itertuples(index=False)}
        checked_bits(list(chosen.values()))
        unknown = set(chosen) - set(places.itertuples(index=False, name=None))
        if unknown:
            expected = "layers and parts" if self._of_weights else "layers, heads and operands"
            raise ArgumentError("bits", expected=f"{expected} of the table", got=str(next(iter(unknown))))
        return float(self.logits(chosen, quantiser))

    # ---- in words, in notebooks, and as files

    @property
    def citation(self) -> str:
        """One line to cite, with the divergences for all keys and values quantised, and rank correlations."""
        at_once = "".join(f" {line};" for line in self._together_in_words())
        return (
            f"Quantised {self._all(' at the softmax')} of {self.model} at {self.input} (n = {self.n}):"
            f"{at_once} Spearman's rank correlation: {self._ranks_in_words()}; {self._made_by}"
        )

    def _ranks_in_words(self) -> str:
        rows = [row for row in plain_rows(self.agreement) if row["bits"] == 0]
        found = ("none exists" if row["spearman"] is None else f"{row['spearman']:.3f}" for row in rows)
        return "; ".join(f"{row['predicted']} and {row['real']} {next(found)}" for row in rows)

    def _all(self, where: str = "") -> str:
        return "linear weights in blocks" if self._of_weights else f"keys and values{where}"

    def _together_in_words(self) -> list[str]:
        layers = sorted({int(layer) for layer in self.table["layer"]})
        run = len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1
        listed = f"{layers[0]} to {layers[-1]}" if run else ", ".join(map(str, layers))
        where = f"layer{'' if len(layers) == 1 else 's'} {listed}"
        return [
            f"all {self._all()} of {where} at once by {quantiser}: divergence "
            + ", ".join(f"{row['kl']:.3g} at {row['bits']} bits" for row in plain_rows(rows))
            for quantiser, rows in self.together.groupby("quantiser", sort=False)
        ]

    @property
    def remarks(self) -> list[str]:
        """Sentences on quantising all keys and values, unreliable predictions, and rank correlations."""
        found = [f"A{words[1:]}." for words in self._together_in_words()]
        for row in plain_rows(self.mixed):
            asked, equal = (
                f"{row['average']:g} ({row['quantiser']})",
                f"with {row['equal_bits']} bits for all",
            )
            said = f"Bits for an average of {asked}, in fact {row['bits']:.4g}"
            real = (
                f"; at once: divergence {row['kl']:.3g}, {equal} {row['equal_kl']:.3g}" if self.has_kl else ""
            )
            found.append(f"{said}{real}.")
        if bool((self.table["predicted_kl"] > _HOLDS).any()):
            found.append(
                f"* Above {_HOLDS} nats predictions are unreliable, up to a hundredfold too large: see kl."
            )
        return [*found, f"Spearman's rank correlation: {self._ranks_in_words()}."]

    def first_rows(self, most: int) -> pd.DataFrame:
        """Return the first rows of the ranking as text; a star marks an unreliable prediction."""
        rows = self.ranking.head(most)
        texts = {name: rows[name].map("{:.4g}".format) for name in rows if name in _CHANGES + _DIVERGENCES}
        if self.has_kl and bool((large := rows["predicted_kl"] > _HOLDS).any()):
            texts["predicted_kl"] += np.where(large, "*", " ")
        return rows.assign(**texts).rename(columns={"head": "kv head"})

    def _lines(self) -> list[str]:
        rows = self.first_rows(_SHOWN)
        one, how = "keys or values of one head", "Keys and values as the softmax takes them"
        if self._of_weights:
            one, how = "linear weights of one part of a block", "Rounded to nearest by absmax; all else exact"
        of = "block" if self._of_weights else "attention"
        return [
            f"Precision of {self.model}, {self.length}: {one} quantised.",
            f"Input: {self.input}.",
            f"{self.precision.capitalize()}. {how}.",
            f"The first {len(rows)} of {len(self.table)} rows by {self._key}. Norm of the change of the "
            f"{of}'s output: predicted, change (real){', bound (proved)' * ('bound' in rows)}"
            + ("; divergence of the predictions in nats: predicted_kl, kl (real)." if self.has_kl else "."),
            indent(rows.to_string(index=False), "  "),
            *self.remarks,
            *([indent(self._bits_of_heads.to_string(index=False), "  ")] if len(self.budgets) else []),
        ]

    @property
    def _bits_of_heads(self) -> pd.DataFrame:
        others = ["quantiser", *(["part"] if self._of_weights else ["layer", "operand"])]
        words = self.budgets.groupby(others, sort=False)["bits"].agg(lambda bits: " ".join(map(str, bits)))
        return words.reset_index(name=f"bits of {'layers' if self._of_weights else 'kv heads'} from 0")

    @styled
    def plot(self) -> Figure:
        """Draw heatmaps of the effect of quantising each head's keys and values to the fewest bits, and a
        scatter plot of real against predicted effects. An effect is a divergence or a change of the output;
        the heatmaps show the real divergence or, without logits, the predicted change.
        """
        predicted, real = ("predicted_kl", "kl") if self.has_kl else ("predicted", "change")
        what = "divergence (nats)" if self.has_kl else "change of the output"
        bits, quantiser = int(self.table["bits"].min()), self.table["quantiser"].iloc[0]
        kind, across = self._place[-1], "bits" if self._of_weights else "head"
        shown = self.table[self.table["quantiser"] == quantiser]
        shown = shown if across == "bits" else shown[shown["bits"] == bits]
        cells = shown.pivot_table(index="layer", columns=[kind, across], values=self._key)
        kinds = list(shown[kind].unique())
        width = max(1.6, _CELL * cells.shape[1] / len(kinds))
        figure = new_figure(_SCATTER + 2.4 + len(kinds) * width, max(3.0, 1.6 + _CELL * len(cells)))
        *axes, scatter = figure.subplots(1, len(kinds) + 1, width_ratios=[width] * len(kinds) + [_SCATTER])
        norm = logarithmic(shown[self._key].to_numpy())
        rows, place = [str(layer) for layer in cells.index], _IN_WORDS.get(across, across)
        for axis, one in zip(axes, kinds, strict=True):
            some, name, label = cells[one], _IN_WORDS.get(one, one), "layer" if rows else ""
            Cells(some.to_numpy(), rows, [*map(str, some)], place, label, name, most=8).draw(axis, norm)
            rows = []
        add_colourbar(figure, axes[-1], norm)
        there = self.table[(self.table[predicted] > 0) & (self.table[real] > 0)]
        both = pd.concat([there[predicted], there[real]])
        ends = [both.min(), both.max()]
        curves = [Curve(ends, ends, dashes=SOLID)]
        for one, (mark, colour) in zip(kinds, _MARKS, strict=False):
            some = there[there[kind] == one]
            curves.append(Curve(some[predicted], some[real], one, colour, mark, size=9, alpha=0.6))
        labels = f"predicted {what}", f"real {what}"
        Panel(curves, "each row of the table", *labels, scales=("log", "log")).draw(scatter)
        if len(there):
            scatter.legend()
        shown_is = f"{labels[self.has_kl]}{f', {bits} bits' * (across != 'bits')}, {quantiser}"
        title = f"{self.model}, one input of {self.length}; colours: {shown_is}"
        figure.suptitle(titled(title, figure.get_figwidth()), fontsize=10)
        return figure

    def _body(self, images: Mapping[str, str], most: int) -> list[str]:
        html = parts()
        agreement = self.agreement.replace({"bits": {0: "all"}}).astype({"bits": str})
        rows = self.first_rows(most)
        few = f"{len(rows)} of {len(self.table)} rows are shown here; precision.csv has all."
        return [
            *(html.words(sentence) for sentence in self.remarks[:-1]),
            *([html.heading("The budgets"), frame(self._bits_of_heads)] if len(self.budgets) else []),
            html.heading("Rank correlation of predicted and real effects"),
            frame(agreement.rename(columns={"spearman": "Spearman"})),
            html.heading(f"The largest effects, by {self._key}"),
            frame(rows),
            html.words(_MEANT_OF_WEIGHTS if self._of_weights else _MEANT, "soft"),
            *([html.words(few, "note")] if len(rows) < len(self.table) else []),
        ]

    def _told(self) -> dict[str, Any]:
        tables = {
            "together": self.together,
            "agreement": self.agreement,
            "ranking": self._sorted.drop(columns="in_budget", errors="ignore"),
        }
        if len(self.budgets):
            tables |= {"budget": self.budgets, "mixed": self.mixed}
        rows = {name: plain_rows(table) for name, table in tables.items()}
        return {"seed": self.seed, "refused": self.refused} | rows


# The error of an entry is predicted as if it were uniform within half a step: its variance is step² / 12.
_VARIANCE = 1.0 / 12.0
# Draws for the Fisher information, each a backward pass; every head averages over its tokens and channels.
_DRAWS = 16
_HEADS = "no linear module alone is given its heads, so that predicted, change and bound are of the heads"


@with_fastest_threads
def precision(
    model: Model,
    inputs: Inputs,
    *,
    bits: int | Sequence[int] | None = None,
    weights: int | Sequence[int] | None = None,
    quantisers: str | Sequence[str] | None = None,
    span: slice | tuple[int, int] | str | None = None,
    layers: Layers = None,
    logits: bool = True,
    average: float | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    on_layer: Callable[[int, int], None] | None = None,
) -> Precision:
    """Predict and simulate how much a model's output changes if the keys or the values of a single head, or
    with ``weights`` the linear weights of one part of a block, are quantised; for each number of bits.

    Keys and values are those that the softmax takes: after norm layers and rotary positions, as most KV
    caches hold them, and expanded from the latent of latent attention. Their change is also bounded. They are
    quantised by absmax (symmetric, 2^bits − 1 levels) or, as by KIVI (arXiv:2402.02750), with zero points and
    2^bits levels.

    If the model has logits, the Kullback–Leibler divergence of its predictions is also predicted and
    simulated: the whole model runs once for each row of the table, and once for each quantiser and number of
    bits with everything quantised at once.

    Parameters
    ----------
    model
        As for :func:`howsmooth.profile`. A model given by its name or folder is loaded with its head if it
        has one. The head of a model with logits needs ``load_model(name, head=True)``.
    inputs, span, layers, tokenizer, on_layer
        As for :func:`howsmooth.profile`; with ``weights``, layers are blocks.
    bits
        Numbers of bits of keys and values, each from 2 to 16; by default 8, 4 and 3.
    weights
        Numbers of bits of the linear weights in blocks instead, each from 2 to 16: of ``nn.Linear``,
        ``nn.MultiheadAttention``, and ``Conv1D`` and experts of transformers, rounded to nearest by absmax.
        Biases, norms, embeddings, the output layer, and what the result names as left out stay exact.
    quantisers
        Which entries share a step, all by default. Of keys and values: "token" and "channel" by absmax,
        "group-32" and "group-64" that many channels of a token, and "kivi" with zero points, keys by channel
        and values by token; also "kivi-G" in groups of G tokens or channels, and "kivi-G-R", where for all
        queries the last R tokens of the input stay exact, and keys of the last group if it is not full. Of
        weights: "channel", all weights of an output channel, and "group-128", "group-64" and "group-32", that
        many neighbours of them.
    logits
        Whether to run the whole model for the divergence of its predictions.
    average
        Also choose the bits of each head or part for this average number, by :meth:`Precision.budget`, for
        each quantiser.
    seed
        Seed of the draws from which the divergence is predicted for keys and values.

    Raises
    ------
    ArgumentError, CaptureError, ModelError
        As for :func:`howsmooth.profile`. Also if both ``bits`` and ``weights`` are given, or weights that are
        quantised already, or a model without blocks.

    """
    if bits is not None and weights is not None:
        raise ArgumentError("bits", expected="None beside weights", got=repr(bits))
    name, given_bits = ("bits", _BITS if bits is None else bits) if weights is None else ("weights", weights)
    known = QUANTISERS if weights is None else OF_WEIGHTS
    wanted = checked_bits(given_bits, name), checked_quantisers(quantisers, known)
    if average is not None:
        average = _checked_average(average, wanted[0], name)
    loaded = with_head(partial(model_input.loaded_if_named, model))
    given = model_input.given_inputs(loaded, inputs, span, tokenizer)
    chosen = checked_selection("layers", layers)
    if weights is not None:
        refuse_quantised(given.module)
    recorded = RecordedModel(given.module, given.inputs)
    whole = recorded if logits and recorded.logits is not None else None
    parts = None if weights is None else QuantisedWeights(recorded, *wanted)
    names = parts.names if parts else [str(at.layer) for at in recorded.layers]
    indices = indices_of(chosen, len(names), "layer")
    draws = derive_seed(purpose="precision", seed=seed)
    fisher = whole.squared_gradients(_DRAWS, draws) if whole and not parts else {}
    left_out: dict[str, list[str]] = {}  # what is left out, by the reason
    rows: list[dict[str, Any]] = []
    with model_input.shown_progress(on_layer, len(indices)) as told:
        for done, index in enumerate(indices):
            told(done, len(indices))
            renew_threads()
            try:
                if parts:
                    rows += parts.rows(index, whole)
                    continue
                at = recorded.layers[index]
                rows += list(_rows(at, whole, fisher.get(index), *wanted))
            except HowsmoothError as error:
                if isinstance(error, ArgumentError) and error.argument == "quantisers":
                    raise
                left_out.setdefault(str(error).rstrip("."), []).append(names[index])
                continue
            if at.projection is None:
                left_out.setdefault(_HEADS, []).append(f"the output projection of {at.layer}")
        told(len(indices), len(indices))
    if parts:
        left_out |= parts.left_out
    elif chosen is None and recorded.without_softmax:
        left_out[f"{NO_SOFTMAX}, which has no keys and values"] = recorded.without_softmax
    refused = [f"{', '.join(names)}: {reason}." for reason, names in left_out.items()]
    name = type(given.module).__name__
    if not rows:
        why = ["No linear weights in full precision are beside an attention in a module list.", *refused][-1]
        raise CaptureError(f"No layer of {name} can be treated. {why}")
    if logits and whole is None:
        refused.insert(0, f"The divergence of predictions is left out: {name} has no logits.")
    read = range(len(recorded.layers)) if parts else {row["layer"] for row in rows}
    found = Precision(
        **given.origin(),
        table=PrintedTable(rows),
        together=pd.DataFrame(),
        budgets=pd.DataFrame(),
        mixed=pd.DataFrame(),
        n=max(recorded.layers[layer].softmax.value.shape[-2] for layer in read),
        seed=seed,
        refused=tuple(refused),
        logits=whole and (parts.simulated_kl if parts else partial(simulated_kl, whole)),
    )
    cases = list(dict.fromkeys((row["quantiser"], count) for row in rows for count in wanted[0]))
    together = [(q, count, found.simulate(count, q)) for q, count in cases if whole]
    found = replace(found, together=pd.DataFrame(together, columns=["quantiser", "bits", "kl"]))
    return found if average is None else _with_budgets(found, average)


def _with_budgets(found: Precision, average: float) -> Precision:
    budgets, mixed = [], []
    for name, rows in found.table.groupby("quantiser", sort=False):
        quantiser, equal = str(name), int(rows["bits"][rows["bits"] <= average].max())
        budget = found.budget(average, quantiser)
        alike = budget.assign(bits=equal)
        kls = [found.simulate(one, quantiser) if found.has_kl else math.nan for one in (budget, alike)]
        mean = float(np.average(budget["bits"], weights=budget["entries"]))
        budgets.append(budget.assign(quantiser=quantiser))
        mixed.append((quantiser, average, mean, kls[0], equal, kls[1]))
    every, keys = pd.concat(budgets, ignore_index=True), [*found._place, "bits", "quantiser"]
    given = set(every[keys].itertuples(index=False, name=None))
    chosen = [row in given for row in found.table[keys].itertuples(index=False, name=None)]
    table = found.table.assign(in_budget=chosen)
    return replace(found, table=table, budgets=every, mixed=pd.DataFrame(mixed, columns=_MIXED))


def _checked_average(average: object, bits: Sequence[int], name: str = "bits") -> float:
    if len(bits) < 2:
        expected = "several numbers of bits for a budget to choose from, such as 2,3,4,5,6,8"
        raise ArgumentError(name, expected=expected, got=str(bits[0]))
    if not isinstance(average, Real) or not min(bits) <= float(average) < math.inf:
        raise ArgumentError("average", expected=f"at least {min(bits)} bits", got=repr(average))
    return float(average)


def _spent(
    effects: Float64[np.ndarray, "places counts"], bits: np.ndarray, entries: np.ndarray, average: float
) -> np.ndarray:
    """Return which of ``bits`` each place gets, for ``average`` over the entries of all places."""
    every, chosen = np.arange(len(effects)), np.zeros(len(effects), dtype=int)
    left = (average - bits[0]) * entries.sum()
    while True:
        costs = (bits - bits[chosen][:, None]) * entries[:, None]
        saved = (effects[every, chosen][:, None] - effects) / np.where(costs > 0, costs, np.inf)
        saved[costs > left + 1e-9] = 0.0
        place, to = divmod(int(saved.argmax()), len(bits))
        if not saved[place, to] > 0.0:
            return chosen
        chosen[place], left = to, left - costs[place, to]


def with_head(load: Callable[..., LoadedModel]) -> LoadedModel:
    """Load a model with the output layer that computes its logits, or without it if there is none."""
    try:
        return load(head=True)
    except ModelError:
        return load()


def _rows(
    at: RecordedSoftmax,
    whole: RecordedModel | None,
    fisher: Sequence[Tensor] | None,
    bits: Sequence[int],
    quantisers: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield the table's rows for one layer. If quantisers act alike on the layer, only the first has rows."""
    f, x = at.attention()
    q, *operands = f.projections(x)
    heads, size = _heads(f, q, *operands), float(torch.linalg.vector_norm(f(x)))
    for i, sensitivity in enumerate(entry_sensitivities(f, x)):
        t = operands[i]
        different = {group_of(quantiser, t.shape[-1]): quantiser for quantiser in reversed(quantisers)}
        for quantiser, count in product(quantisers, bits):
            if quantiser not in different.values():
                continue
            step, zero = steps_and_zeros(t, count, quantiser, "KV"[i])
            variance = _VARIANCE * step.square()
            predicted = (sensitivity.square() * variance).flatten(1).sum(dim=1).sqrt()
            near = rounded(t, step, zero)
            moved = _heads(f, q, *(near if j == i else operands[j] for j in range(2))) - heads
            if f.output is not None:
                output = f.output.unflatten(1, (*moved.shape[:2], moved.shape[-1]))
                moved = torch.einsum("bgnv,obgv->bno", moved, output)
            change = torch.linalg.vector_norm(moved.flatten(1), dim=1)
            for head in range(f.kv_heads):
                limits = torch.zeros_like(step)
                limits[head] = step[head] / 2
                bound = kv_error_upper_bound(f, x, **{("keys", "values")[i]: limits}).value
                predicted_kl = kl = math.nan
                if whole is not None and whole.logits is not None and fisher is not None:
                    # To second order ½ Σ σ_a² F_aa over the entries a of the head.
                    predicted_kl = 0.5 * float((fisher[i][head] * variance[head]).sum()) / len(whole.logits)
                    kl = simulated_kl(whole, {(at.layer.index, head, "KV"[i]): count}, quantiser)
                place = {"layer": at.layer.index, "head": head, "operand": "KV"[i]}
                yield place | {
                    "bits": count,
                    "quantiser": quantiser,
                    "predicted": min(float(predicted[head]), bound),
                    "change": float(change[head]),
                    "bound": bound,
                    "output_norm": size,
                    "predicted_kl": predicted_kl,
                    "kl": kl,
                    "entries": quantised_tokens(t.shape[-2], quantiser, "KV"[i]) * t.shape[-1],
                    "name": at.layer.name,
                }


def _heads(
    f: SelfAttention, q: Tensor, k: Tensor, v: Tensor
) -> Float64[Tensor, "kv_heads group n value_dim"]:
    visible = f.visibility(q.shape[-2])
    return attend(f._grouped(q)[None], k[None], v[None], f.scale, visible, features=f.features)[0]
