"""The function ``profile``, which measures the constants of all layers and heads at one input or several."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, overload

import pandas as pd
import torch
from markupsafe import Markup
from torch import Tensor

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.attention import SelfAttention, StagedAttention
from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError
from howsmooth.lipschitz import local_lipschitz
from howsmooth.lipschitz.heads import head_lipschitz
from howsmooth.lipschitz_estimate import LipschitzEstimate
from howsmooth.models.capture import model_parts
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
from howsmooth.profiling.several_profiles import SHOWN, ProfileOverTexts, compared, profile_over_texts
from howsmooth.profiling.token_influence import ResultWithInfluence, as_last_step, influence_at
from howsmooth.results.drawing import Figure, add_colourbar, logarithmic, new_figure, styled, titled
from howsmooth.results.heatmaps import Cells
from howsmooth.results.page import parts
from howsmooth.results.result import in_interval
from howsmooth.rounding import interval_in_digits
from howsmooth.seeds import derive_seed
from howsmooth.study.plans import PROFILE_RTOL, Plan
from howsmooth.study.records import plain_rows
from howsmooth.texts import Text
from howsmooth.threads import with_fastest_threads
from howsmooth.words import place_in_words, readable, visible_token

__all__ = ["SCOPES", "Profile", "profile"]

_PARTS = ("mlp", "whole-block", "expert")  # further scopes
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

    #: One row for each layer (scopes ``attention``, ``mlp``, ``whole-block``), head (``head``), and expert
    #: that a token reaches (``expert``), columns ``layer``, ``head`` (the number of a head or expert),
    #: ``scope``, ``value``, ``lower``, ``upper``, ``confidence``, ``converged``, ``iterations``, ``method``,
    #: ``masking``, ``name`` (the path of the module), ``stored`` and ``computed``
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
        """The constants in decreasing order, scope by scope: first heads, then attention layers.

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
            (top,) = plain_rows(rows.head(1))
            place = place_in_words(top["layer"], top["head"], top["scope"])
            found.append(f"largest in scope {scope}: {place}, {_interval(top)}")
        return (
            f"Local Lipschitz constants of {self.model} at {self.input} (n = {self.n}): {'; '.join(found)}; "
            f"each interval at {self.confidence:.4g} confidence; {self._made_by}"
        )

    compare = compared

    def sensitive_tokens(self, layer: int, head: int | None = None, scope: str = "") -> pd.DataFrame:
        """Return the tokens of one layer or head, in decreasing order of their ``input_share``.

        Without ``scope``, it is the first that was measured. An ArgumentError says that the profile has no
        such layer, head or scope.
        """
        rows = self._tokens_of(layer, head, scope).sort_values("input_share", ascending=False, kind="stable")
        return rows.reset_index(drop=True)

    def _tokens_of(self, layer: int, head: int | None, scope: str) -> pd.DataFrame:
        heads = self.tokens["head"]
        of_head = heads.isna() if head is None else heads == head
        found = self.tokens[(self.tokens["layer"] == layer) & of_head]
        found = found[found["scope"] == (scope or next(iter(found["scope"]), ""))]
        if found.empty:
            got = place_in_words(layer, head, scope or "head")
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
            lines.append(f"  scope {scope}, the largest {min(len(rows), SHOWN)} of {len(rows)}:")
            for row in plain_rows(rows.head(SHOWN)):
                place = place_in_words(row["layer"], row["head"], row["scope"])
                lines.append(f"    {place:<18} {_interval(row)}{self._said_of_tokens(row)}")
        missed = int((~self.table["converged"]).sum())
        lines += [f"  {missed} of {len(self.table)} did not reach rtol = {self.rtol:g}"] if missed else []
        return [*lines, *self._lines_of_influence()]

    def _said_of_tokens(self, row: Any) -> str:
        rows = plain_rows(self._tokens_of(row["layer"], row["head"], row["scope"]))
        said = []
        for column in ("input_share", "output_share"):
            top = max(rows, key=lambda one: one[column] or 0.0)
            if top[column] is not None:
                token = f" {readable(top['token'])!r}" if "token" in top else ""
                said.append(f"{top['position']}{token} {100 * top[column]:.0f} %")
        return f"  {' → '.join(said)}" if said else ""

    @styled
    def plot(self) -> Figure:
        """Draw the constants of experts, of heads, and of layers by scope as heatmaps, each in a panel.

        Each panel has its own scale of colours, because heads and layers are maps between different spaces. A
        cell is crossed out if its measurement did not converge, and empty if it was not measured.
        """
        layers = sorted(self.table["layer"].unique())
        panels = list(self.table.groupby(self.table["scope"].where(self.table["head"].notna(), "scope")))
        columns = [rows["head"].nunique() or rows["scope"].nunique() for _, rows in panels]
        width = max(4.6, _CELL * sum(columns) + 1.3 * len(panels))
        figure = new_figure(width, max(2.6, 1.6 + _CELL * len(layers)))
        # Each panel has its colour bar as a further axis, so that all cells have one size.
        ratios = [ratio for count in columns for ratio in (count, min(0.5, 0.08 * sum(columns)))]
        axes = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
        for axis, bar, (by, rows) in zip(axes[::2], axes[1::2], panels, strict=True):
            column, wanted = "scope" if by == "scope" else "head", ["value", "converged"]
            cells = rows.pivot(index="layer", columns=column, values=wanted).reindex(layers)
            values, missed = cells["value"].to_numpy(float), cells["converged"].eq(False).to_numpy()
            down, across = ([str(one) for one in some] for some in (layers, cells["value"].columns))
            across, x = ([""], "whole layer") if across == ["attention"] else (across, by)
            norm = logarithmic(values)
            Cells(values, down, across, x, missed=missed, words=by == "scope").draw(axis, norm)
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
            what = {"head": "Heads", "attention": "Layers"}.get(str(scope), f"Scope {scope}")
            body.append(html.heading(f"{what}, the largest constant first"))
            for place, row in enumerate(plain_rows(rows.head(most))):
                status = "" if row["converged"] else ", not converged"
                ends = interval_in_digits(row["lower"], row["upper"])
                where = place_in_words(row["layer"], row["head"], row["scope"])
                summary = _SUMMARY.format(where, row["value"], ends, status)
                body.append(html.folded(summary, self._sides(row), place == 0))
                shown += 1
        if shown < len(self.table):
            body.append(html.words(f"{shown} of {len(self.table)} rows are shown here.", "note"))
        return body

    def _sides(self, row: Mapping[str, Any]) -> Markup:
        rows = self._tokens_of(row["layer"], row["head"], row["scope"])
        words = dict(enumerate(map(visible_token, self.words)))
        sides = []
        for title, column in (("A change matters at", "input_share"), ("It shows at", "output_share")):
            shares = rows[column].fillna(0.0).to_list()
            most = max(shares) or 1.0
            shaded = [
                (round(_LEVELS * share / most), words.get(i, f" {i} "), f"token {i}: {100 * share:.2g} %")
                for i, share in zip(rows["position"], shares, strict=True)
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
            (first, *_) = plain_rows(self.sensitive_tokens(row["layer"], row["head"], row["scope"]).head(1))
            row["most_sensitive"] = {name: first[name] for name in ("position", "token") if name in first}
        settings = {name: getattr(self, name) for name in ("confidence", "rtol", "seed", "refused")}
        return settings | {"ranking": rows}


def _interval(row: Any) -> str:
    return in_interval(row["value"], row["lower"], row["upper"], converged=row["converged"])


SCOPES = ("attention", "head")
"""The scopes of a profile: each layer with all its heads and output projection, and each head alone."""


@overload
def profile(
    model: Model,
    inputs: Inputs,
    *,
    span: slice | tuple[int, int] | str | None = ...,
    layers: Layers = ...,
    scopes: Sequence[str] = ...,
    tokenizer: Any = ...,
    rtol: float = ...,
    confidence: float = ...,
    max_iterations: int = ...,
    seed: int = ...,
    memory: int | None = ...,
    influence: bool = ...,
    on_layer: Callable[[float, int], None] | None = ...,
) -> Profile: ...


@overload
def profile(model: Model, inputs: list[Any] | tuple[Any, ...], **options: Any) -> ProfileOverTexts: ...


@with_fastest_threads  # type: ignore[misc]  # the second form leaves its options to the first
def profile(
    model: Model,
    inputs: Any,
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
    file: str | os.PathLike[str] | None = None,
    on_layer: Callable[[float, int], None] | None = None,
) -> Profile | ProfileOverTexts:
    """Measure the local Lipschitz constant of every attention layer and head of a model at one input, or at
    each of several.

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
        tokenizer, and is encoded without special tokens: give token ids to have them. A list of at least two
        of these, with token ids as tensors, gives means, spreads and ranks over them.
    span
        Which tokens of a text or of token ids are measured, the last not included: a slice, a pair, or a
        string such as "0:128". By default all, or the first 512 of a longer input; the result says which.
    layers
        Which layers, as for :func:`~howsmooth.models.capture`; all by default.
    scopes
        "attention" for each layer with all its heads and output projection, "head" for each head alone; both
        by default. "mlp" for the MLP of each block without its residual connection: the smallest module with
        all weights beside those of attention or, if that is the block, from the first module with weights to
        the last; the experts of a mixture count together. "expert" for each of them alone, at its tokens and
        without its weight. "whole-block" for the block with its MLP.
    tokenizer
        A tokenizer of transformers, for a model that was not loaded by its name.
    rtol, confidence, max_iterations, memory
        As for :func:`howsmooth.local_lipschitz`.
    seed
        Seed of all random starts; each layer and head has a start of its own.
    influence
        Whether :func:`howsmooth.influence` is measured for the layer with the largest constant, in the scope
        "attention". The time of this measurement grows with n²: some seconds at 64 tokens, a minute at 256.
    file
        With several inputs, a file to which the rows of each are added as soon as they are measured. A later
        call with the same model, input and options reads what is there.
    on_layer
        Called with the numbers of layers that are done and of all, zero while unknown; with ``influence``
        there is one step more, of which fractions are told. Several inputs are counted instead, with
        fractions. By default a progress bar is shown on a terminal and in a notebook.

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
    wanted = chosen_words("scopes", scopes, (*SCOPES, *_PARTS), remedy)
    several = isinstance(inputs, list | tuple) and any(
        isinstance(one, str | Text | Mapping) or (isinstance(one, Tensor) and one.ndim) for one in inputs
    )
    if influence and ("attention" not in wanted or several):
        expected = 'False without the scope "attention", and with several inputs'
        raise ArgumentError("influence", expected=expected, got="True")
    loaded: Any = loaded_if_named(model)
    if several:
        options: dict[str, Any] = {"span": span, "layers": layers, "scopes": wanted, "tokenizer": tokenizer}
        options |= {"rtol": rtol, "confidence": confidence, "max_iterations": max_iterations, "seed": seed}
        one_by_one = partial(profile, loaded, memory=memory, **options)
        return profile_over_texts(loaded, inputs, one_by_one, options, file, on_layer)
    if file is not None:
        raise ArgumentError("file", expected="None with one input", got=repr(file))
    given = given_inputs(loaded, inputs, span, tokenizer)
    check_accuracy(rtol, confidence, given.computed)
    few: dict[str, Any] = {"confidence": confidence, "max_iterations": max_iterations}
    how = few | {"rtol": rtol, "memory": memory}
    tables: list[pd.DataFrame] = []
    shares: list[pd.DataFrame] = []
    refused: list[str] = []
    largest: tuple[float, Site] | None = None
    of_tokens, n, done = None, 0, 0
    with model_parts(given.module, given.inputs) if set(wanted) & set(_PARTS) else nullcontext() as read:
        for index, layer in layers_of(given, layers, on_layer):
            done += 1
            if isinstance(layer, CaptureError):
                refused.append(str(layer))
                continue
            n = max(n, layer.tokens.shape[1])
            at = layer.self_attention.layer
            for scope in wanted:
                start = derive_seed(purpose="profile", seed=seed, layer=index, scope=scope)
                place: dict[str, Any] = {"layer": at.index, "scope": scope}
                masking = "none" if scope in ("mlp", "expert") else layer.found.masking
                inner = read if scope in _PARTS else None
                measured: list[tuple[LipschitzEstimate, str, Sequence[Any]]] = []  # with names and heads
                experts: list[tuple[str, Tensor, Any]] = []
                try:
                    if scope == "head":
                        found = _heads(layer, seed=start, **how)
                        measured.append((found, at.name, range(len(found.value))))
                    elif inner and scope == "expert":
                        for i, (name, _, f) in enumerate(experts := inner.experts(index)):
                            if f.n:
                                found = local_lipschitz(f, f.own.x[None], seed=start + i, **how)
                                measured.append((found, name, [i]))
                        if left := len(experts) - len(measured):
                            refused.append(f"Layer {index}: {left} of {len(experts)} experts have no token.")
                    else:
                        site = inner.with_mlp(index, scope) if inner else layer.sites(scope)[0]
                        found = local_lipschitz(site.map, site.x[:1], seed=start, **how)
                        measured.append((found, " to ".join(dict.fromkeys(site.name.split(" to "))), [pd.NA]))
                        if scope == "attention":
                            largest = max(largest or (-1.0, site), (float(found), site), key=itemgetter(0))
                except HowsmoothError as error:
                    refused.append(f"Layer {index}, scope {scope}: {error}")
                    continue
                for found, name, heads in measured:
                    tables.append(found.table.assign(**place, masking=masking, name=name, head=heads))
                    for member, head in enumerate(heads):
                        shares.append(found[member].tokens().assign(**place, head=head))
                        sent = experts[head][1] if experts else torch.ones(len(shares[-1]))
                        shares[-1]["position"] = sent.nonzero().flatten().tolist()
                        if given.words is not None and len(given.words) == len(sent):
                            shares[-1]["token"] = [given.words[i] for i in shares[-1]["position"]]
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
        why = next(iter(refused), "It has no mixture of experts.")
        raise CaptureError(f"No layer of {type(given.module).__name__} can be measured. {why}")
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
