"""The function ``profile``, which measures the constants of all layers and heads at one input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

import pandas as pd
from markupsafe import Markup

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.attention import SelfAttention, StagedAttention
from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError
from howsmooth.lipschitz import local_lipschitz
from howsmooth.lipschitz.heads import head_lipschitz
from howsmooth.lipschitz_estimate import LipschitzEstimate
from howsmooth.models.captured_layer import Site
from howsmooth.models.identification.layer_identification import VerifiedLayer
from howsmooth.printed_table import PrintedTable
from howsmooth.profiling.model_input import (
    Inputs,
    Layers,
    Model,
    chosen_words,
    given_inputs,
    layers_of,
    loaded_if_named,
)
from howsmooth.profiling.token_influence import ResultWithInfluence, as_last_step, influence_at
from howsmooth.results.drawing import Figure, add_colourbar, logarithmic, new_figure, styled, titled
from howsmooth.results.heatmaps import Cells
from howsmooth.results.page import parts
from howsmooth.results.result import in_interval
from howsmooth.rounding import interval_in_digits
from howsmooth.seeds import derive_seed
from howsmooth.study.plans import PROFILE_RTOL, Plan
from howsmooth.study.records import plain_rows
from howsmooth.threads import with_fastest_threads
from howsmooth.words import place_in_words, readable, visible_token

__all__ = ["SCOPES", "Profile", "profile"]

_SHOWN = 10  # rows of the ranking in a printed profile
_LEVELS = 9  # shades of a highlighted token
_CELL = 0.32  # inches
_COLUMNS = ["layer", "head", "scope", "value", "lower", "upper", "confidence", "converged", "iterations",
            "method", "masking", "name"]  # fmt: skip
_SUMMARY = Markup('<span class="place">{}</span> <b>{:.6g}</b> <span class="soft">in {}{}</span>')


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Profile(ResultWithInfluence):
    """The constants of all attention layers and heads at one input, and the sensitivity of each token."""

    NAME: ClassVar[str] = "profile"
    TITLE: ClassVar[str] = "Profile"
    WHAT: ClassVar[str] = "The local Lipschitz constant of each attention layer and head"
    ALT: ClassVar[str] = (
        "Heatmap of the constants by layer and head; the numbers are in the ranking and in profile.csv."
    )

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
    #: Probability with which each interval holds.
    confidence: float
    #: Relative width of the intervals that was asked for.
    rtol: float
    #: Seed of the random starts.
    seed: int

    @property
    def ranking(self) -> pd.DataFrame:
        """The constants in decreasing order, first of heads, then of whole layers.

        Columns: ``layer``, ``head``, ``scope``, ``value``, ``lower``, ``upper`` and ``converged``.
        """
        return self._sorted[["layer", "head", "scope", "value", "lower", "upper", "converged"]]

    @property
    def _sorted(self) -> pd.DataFrame:
        return self.table.sort_values(["scope", "value"], ascending=False, kind="stable", ignore_index=True)

    @property
    def citation(self) -> str:
        """One line to cite, with the largest constants and their intervals."""
        found = []
        for scope, rows in self.ranking.groupby("scope", sort=False):
            top = rows.iloc[0]
            found.append(f"largest in scope {scope}: {_place(top)}, {_interval(top)}")
        return (
            f"Local Lipschitz constants of {self.model} at {self.input} (n = {self.n}): {'; '.join(found)}; "
            f"each interval at {self.confidence:.4g} confidence; {self._made_by}"
        )

    def sensitive_tokens(self, layer: int, head: int | None = None) -> pd.DataFrame:
        """Return the tokens of one layer or head, in decreasing order of their ``input_share``.

        An ArgumentError says that the profile has no such layer or head.
        """
        rows = self._tokens_of(layer, head).sort_values("input_share", ascending=False, kind="stable")
        return rows.reset_index(drop=True)

    def _tokens_of(self, layer: int, head: int | None) -> pd.DataFrame:
        heads = self.tokens["head"]
        of_head = heads.isna() if head is None else heads == head
        found = self.tokens[(self.tokens["layer"] == layer) & of_head]
        if found.empty:
            got = place_in_words(layer, head)
            raise ArgumentError("layer", expected="a layer or head of the table", got=got)
        return found

    # ---- in words, in notebooks, and as files

    def _lines(self) -> list[str]:
        lines = [
            f"Profile of {self.model}, {self.length}, {self.precision}.",
            f"Input: {self.input}.",
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
        return [*lines, *self._lines_of_influence()]

    def _said_of_tokens(self, row: Any) -> str:
        head = None if pd.isna(row["head"]) else int(row["head"])
        rows = plain_rows(self._tokens_of(int(row["layer"]), head))
        said = []
        for column in ("input_share", "output_share"):
            top = max(rows, key=lambda one: one[column] or 0.0)
            if top[column] is not None:
                token = f" {readable(top['token'])!r}" if "token" in top else ""
                said.append(f"{top['position']}{token} {100 * top[column]:.0f} %")
        return f"  {' → '.join(said)}" if said else ""

    @styled
    def plot(self) -> Figure:
        """Draw the constants of all heads as a heatmap, and those of whole layers in a second panel.

        Each panel has its own scale of colours, because heads and layers are maps between different spaces. A
        cell is crossed out if its measurement did not converge, and empty if it was not measured.
        """
        layers = sorted(self.table["layer"].unique())
        of_head = self.table["head"].notna()
        panels = [rows for rows in (self.table[of_head], self.table[~of_head]) if len(rows)]
        columns = [max(1, rows["head"].nunique()) for rows in panels]
        width = max(4.6, _CELL * sum(columns) + 1.3 * len(panels))
        figure = new_figure(width, max(2.6, 1.6 + _CELL * len(layers)))
        # Each panel has its colour bar as a further axis, so that all cells have one size.
        ratios = [ratio for count in columns for ratio in (count, min(0.5, 0.08 * sum(columns)))]
        axes = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
        for axis, bar, rows in zip(axes[::2], axes[1::2], panels, strict=True):
            heads = sorted(rows["head"].dropna().unique())
            place = {"index": "layer", "columns": "head"}
            cells = rows.assign(head=rows["head"].fillna(-1)).pivot(**place, values=["value", "converged"])
            values = cells["value"].reindex(layers).to_numpy(float)
            missed = cells["converged"].reindex(layers).eq(False).to_numpy()
            down, across = ([str(one) for one in some] for some in (layers, heads or [""]))
            norm = logarithmic(values)
            Cells(values, down, across, "head" if heads else "whole layer", missed=missed).draw(axis, norm)
            add_colourbar(figure, axis, norm, inside=bar)
        axes[0].set_ylabel("layer")
        title = f"{self.model}, one input of {self.length}:\nlocal Lipschitz constants"
        figure.suptitle(titled(title, width))
        return figure

    def _tables(self) -> dict[str, pd.DataFrame]:
        return {self.NAME: self.table, "tokens": self.tokens} | super()._tables()

    def _body(self, images: Mapping[str, str], most: int) -> list[str]:
        html, body, shown = parts(), self._parts_of_influence(images), 0
        for scope, rows in self.ranking.groupby("scope", sort=False):
            what = "Heads" if scope == "head" else "Layers"
            body.append(html.heading(f"{what}, the largest constant first"))
            for place, row in enumerate(plain_rows(rows.head(most))):
                status = "" if row["converged"] else ", not converged"
                ends = interval_in_digits(row["lower"], row["upper"])
                summary = _SUMMARY.format(_place(row), row["value"], ends, status)
                body.append(html.folded(summary, self._sides(row["layer"], row["head"]), place == 0))
                shown += 1
        if shown < len(self.table):
            body.append(html.words(f"{shown} of {len(self.table)} rows are shown here.", "note"))
        return body

    def _sides(self, layer: int, head: int | None) -> Markup:
        """Return the tokens as HTML twice: shaded by how much a change of each matters, and by how each
        changes.
        """
        rows = self._tokens_of(layer, head)
        words = [visible_token(word) for word in self.words] or [f" {i} " for i in rows["position"]]
        sides = []
        for title, column in (("A change matters at", "input_share"), ("It shows at", "output_share")):
            shares = rows[column].fillna(0.0).to_list()
            most = max(shares) or 1.0
            shaded = [
                (round(_LEVELS * share / most), word, f"token {i}: {100 * share:.2g} %")
                for i, (share, word) in enumerate(zip(shares, words, strict=False))
            ]
            sides += [parts().words(title, "soft"), parts().tokens(shaded)]
        return Markup("".join(sides))

    def _in_latex(self) -> tuple[pd.DataFrame, str]:
        caption = (
            f"Local Lipschitz constants of {self.model} at one input of {self.length}, with intervals of "
            f"{self.confidence:.4g} confidence"
        )
        table = self.ranking
        return table.assign(head=table["head"].astype("string").fillna("all")), caption

    def _told(self) -> dict[str, Any]:
        rows = plain_rows(self._sorted)
        for row in rows:
            (first, *_) = plain_rows(self.sensitive_tokens(row["layer"], row["head"]).head(1))
            row["most_sensitive"] = {name: first[name] for name in ("position", "token") if name in first}
        settings = {name: getattr(self, name) for name in ("confidence", "rtol", "seed", "refused")}
        return settings | {"ranking": rows}


def _place(row: Any) -> str:
    return place_in_words(int(row["layer"]), None if pd.isna(row["head"]) else int(row["head"]))


def _interval(row: Any) -> str:
    return in_interval(row["value"], row["lower"], row["upper"], converged=row["converged"])


SCOPES = ("attention", "head")
"""The scopes of a profile: each layer with all its heads and output projection, and each head alone."""


@with_fastest_threads
def profile(
    model: Model,
    inputs: Inputs,
    *,
    span: slice | tuple[int, int] | str | None = None,
    layers: Layers = None,
    scopes: Sequence[str] = SCOPES,
    tokenizer: Any = None,
    rtol: float = PROFILE_RTOL,
    confidence: float = Plan.confidence,
    max_iterations: int = Plan.max_iterations,
    seed: int = Plan.seed,
    memory: int | None = None,
    influence: bool = False,
    on_layer: Callable[[float, int], None] | None = None,
) -> Profile:
    """Measure the local Lipschitz constant of every attention layer and head of a model at one input.

    Layer by layer the attention is captured (:func:`~howsmooth.models.capture`) and measured as a whole
    (:func:`howsmooth.local_lipschitz`); then all its heads are measured in one batch.

    Parameters
    ----------
    model
        A model of :func:`~howsmooth.models.load_model`, any ``torch.nn.Module`` with softmax attention, or
        the name or folder of a model, whose weights are then kept in the dtype of their file. Models in
        bfloat16 and float16 are measured in float32, layer by layer.
    inputs
        A text; token ids (n,) or (1, n); or a dict of the model's inputs for one sequence. A text needs a
        tokenizer, and is encoded without special tokens: give token ids to have them.
    span
        Which tokens of a text or of token ids are measured, the last not included: a slice, a pair, or a
        string such as "0:128". By default all, or the first 512 of a longer input; the result says which.
    layers
        Which layers, as for :func:`~howsmooth.models.capture`; all by default.
    scopes
        "attention" for each layer with all its heads and output projection, "head" for each head alone; both
        by default.
    tokenizer
        A tokenizer of transformers, for a model that was not loaded by its name.
    rtol, confidence, max_iterations, memory
        As for :func:`howsmooth.local_lipschitz`.
    seed
        Seed of all random starts; each layer and head has a start of its own.
    influence
        Whether :func:`howsmooth.influence` is measured for the layer with the largest constant, in the scope
        "attention". The time of this measurement grows with n²: some seconds at 64 tokens, a minute at 256.
    on_layer
        Called with the numbers of layers that are done and of all, zero while unknown; with ``influence``
        there is one step more, of which fractions are told. By default a progress bar is shown on a terminal
        and in a notebook.

    Raises
    ------
    ArgumentError
        If an argument does not fit; the message names it.
    CaptureError
        If no layer can be measured; the message says why.
    ModelError
        If a model given by its name cannot be loaded, or has no tokenizer for a text.

    """
    remedy = "hs.capture has the other scopes, such as heads and block."
    wanted = chosen_words("scopes", scopes, SCOPES, remedy)
    if influence and "attention" not in wanted:
        raise ArgumentError("influence", expected='False without the scope "attention"', got="True")
    given = given_inputs(loaded_if_named(model), inputs, span, tokenizer)
    check_accuracy(rtol, confidence, given.computed)
    few: dict[str, Any] = {"confidence": confidence, "max_iterations": max_iterations}
    how = few | {"rtol": rtol, "memory": memory}
    tables: list[pd.DataFrame] = []
    shares: list[pd.DataFrame] = []
    refused: list[str] = []
    largest: tuple[float, Site] | None = None
    of_tokens, n, done = None, 0, 0
    for index, layer in layers_of(given, layers, on_layer):
        done += 1
        if isinstance(layer, CaptureError):
            refused.append(str(layer))
            continue
        n = max(n, layer.tokens.shape[1])
        for scope in wanted:
            start = derive_seed(purpose="profile", seed=seed, layer=index, scope=scope)
            try:
                if scope == "head":
                    found = _heads(layer, seed=start, **how)
                else:
                    (site,) = layer.sites("attention")
                    found = local_lipschitz(site.map, site.x[:1], seed=start, **how)
                    largest = max(largest or (-1.0, site), (float(found), site), key=itemgetter(0))
            except HowsmoothError as error:
                refused.append(f"Layer {index}, scope {scope}: {error}")
                continue
            at = layer.self_attention.layer
            place: dict[str, Any] = {"layer": at.index, "scope": scope}
            tables.append(found.table.assign(**place, masking=layer.found.masking, name=at.name))
            tables[-1]["head"] = tables[-1]["member"] if scope == "head" else pd.NA
            for member, head in enumerate(tables[-1]["head"]):
                shares.append(found[member].tokens().assign(**place, head=head))
                if given.words is not None and len(given.words) == len(shares[-1]):
                    shares[-1]["token"] = given.words
    if largest and influence:
        site = largest[1]
        start = derive_seed(purpose="profile", seed=seed, layer=site.layer, scope="influence")
        where = place_in_words(site.layer, None)
        try:
            told = as_last_step(on_layer, done)
            of_tokens = influence_at(site, given.words, where, seed=start, on_output=told, **few)
        except HowsmoothError as error:
            refused.append(f"Influence in {where}: {error}")
    if not tables:
        raise CaptureError(f"No layer of {type(given.module).__name__} can be measured. {refused[0]}")
    origin = given.origin()
    precision = {name: origin[name] for name in ("stored", "computed")}
    both = (pd.concat(some, ignore_index=True).astype({"head": "Int64"}) for some in (tables, shares))
    table, tokens = both
    return Profile(
        **origin,
        table=PrintedTable(table[_COLUMNS]).assign(**precision),
        tokens=tokens[[*_COLUMNS[:3], *tokens.columns.difference(_COLUMNS, sort=False)]],
        words=tuple(given.words or ()),
        n=n,
        confidence=confidence,
        rtol=rtol,
        seed=seed,
        refused=tuple(refused),
        influence=of_tokens,
    )


def _heads(layer: VerifiedLayer, **how: Any) -> LipschitzEstimate:
    attention = layer.found.map
    if not isinstance(attention, SelfAttention | StagedAttention):
        raise CaptureError(f"its heads cannot be taken alone ({layer.found.reason}).")
    return head_lipschitz(attention, layer.tokens[0], **how)
