"""Section 5.2: compare the constants at the paper's worst inputs with the constants on text and, if asked
for, with the constants at inputs found by a search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pandas as pd

from howsmooth.attention import SelfAttention
from howsmooth.errors import ArgumentError
from howsmooth.paper.bench import Bench, Unit, Values
from howsmooth.paper.bound_ratios import display_name
from howsmooth.paper.model_with_texts import (
    ModelWithTexts,
    attention_of,
    measure_constants,
    models_of,
    other_scores,
)
from howsmooth.paper.published_code import has_fused_weight
from howsmooth.paper.worst_input_constants import at_papers_tokens, at_published_tokens, at_searched_tokens
from howsmooth.paper.worst_input_pictures import HEAD, show
from howsmooth.seeds import derive_seed

__all__ = ["RADII", "measure", "show", "side_by_side"]

RADII = (15.5, 21.5, 100.0)
"""The paper's radii. For each layer, the norm of its longest real token is added."""

# A short search, which starts from all constructions: longer ones improve the best by less than 1 % here. For
# scores that the paper does not treat, constructions are poor and only the ascent itself searches.
_EFFORT = {"steps": 1, "random_starts": 0, "atom_restarts": 8, "atom_steps": 40}
_OTHER_EFFORT = _EFFORT | {"steps": 30, "random_starts": 2}


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of one model: the attention of all heads with the output projection, and the numbers of
    tokens of its worst inputs.

    If the scores differ from the paper's, for example by rotary positions, ``heads`` has the attacked head
    for each length that the model can read. ``fused`` says whether queries, keys and values have one weight.
    """

    model: ModelWithTexts
    layer: int
    attention: SelfAttention
    heads: dict[int, SelfAttention]
    fused: bool
    lengths: list[int]


def measure(bench: Bench) -> pd.DataFrame:
    """Measure the heads of each layer on text, and at the worst tokens in balls of several radii. The table
    has a row of :func:`side_by_side` for each model, layer, radius (``R``) and length. ``real`` says whether
    the radius is the largest norm of a token of the texts, ``fused`` whether the layer has a fused weight.
    """
    lengths = [n for n in bench.lengths if n >= 2]
    if not lengths:
        raise ArgumentError("lengths", expected="some of at least 2, for two clusters", got="1")
    models = models_of(bench, scopes=("head",), fitting=True)
    layers = [layer for model in models for layer in _layers(model, lengths)]
    measure_constants(models)
    texts = {model.label: model.measured() for model in models}
    found, units = list[tuple[Values, pd.DataFrame]](), list[Unit]()
    for one in layers:
        text = texts[one.model.label]
        text = text[text["layer"] == one.layer]
        longest = float(text["radius_max"].max())
        for radius, n in product(dict.fromkeys((*RADII, longest)), one.lengths):
            units += _units(one, radius, n)
            what = {"model": one.model.label, "layer": one.layer, "head": HEAD, "R": radius, "n": n}
            beside = {"real": radius == longest, "fused": one.fused}
            found.append((what | beside, text[text["converged"] & (text["n"] == n)]))
    rows = bench.kept("worst inputs", units).astype({"ball": float})
    parts = dict(iter(rows.groupby(["model", "layer", "ball", "n"], sort=False)))
    table = []
    for what, on_text in found:
        part = parts[what["model"], what["layer"], what["R"], what["n"]]
        table.append(what | side_by_side(part, on_text, HEAD))
    return pd.DataFrame(table)


def _layers(model: ModelWithTexts, lengths: list[int]) -> Iterator[_Layer]:
    """Capture the layers of a model at one sequence of each length of the first text, and yield them."""
    subject = model.subjects[0]
    captured = {n: model.sites(subject, n, samples=1) for n in model.plan.lengths}
    inner = getattr(model.study.models.load_for(subject), "model", None)
    for place, layer in enumerate(model.layers):
        sites = {n: found[place] for n, found in captured.items()}
        site = sites[max(sites)]  # a window is seen in long sequences only
        attention, heads, possible = attention_of(site, model.label), {}, lengths
        if other_scores(attention):
            heads = {n: attention_of(one, model.label).head(HEAD) for n, one in sites.items()}
            possible = [n for n in lengths if n in heads]
        if not possible:
            most = f"lengths of at most {max(heads)}, which {model.label} can read"
            raise ArgumentError("lengths", expected=most, got=str(min(lengths)))
        fused = inner is not None and has_fused_weight(inner.get_submodule(site.name))
        yield _Layer(model, layer, attention, heads, fused, possible)


def _units(one: _Layer, radius: float, n: int) -> Iterator[Unit]:
    """Yield the units of work for one layer, ball and number of tokens."""
    options, f = one.model.bench.options, None if one.heads else one.attention
    head, effort = one.heads.get(n) or one.attention.head(HEAD), _OTHER_EFFORT if one.heads else _EFFORT
    tasks: dict[str, Any] = {"paper": partial(at_papers_tokens, f, head)}
    if options.search:
        tasks["search"] = partial(at_searched_tokens, head, effort)
    if options.as_published and f is not None:
        tasks["published"] = partial(at_published_tokens, f, one.fused)
    for task, compute in tasks.items():
        search, published = ",".join(map(str, effort.values())), int(task == "published")
        place = {"layer": one.layer, "ball": repr(radius), "n": n}
        key = one.model.key(published=published, search=search, **place)
        seed = derive_seed(purpose="adversarial", **key)
        words = f"{one.model.label}, layer {one.layer}, R = {radius:.4g}, n = {n}"
        yield Unit({**key, "task": task}, partial(compute, radius, n, seed), words)


def side_by_side(rows: pd.DataFrame, text: pd.DataFrame, head: int) -> Values:
    """Combine all constants and bounds for one ball and one length (``rows``), and the converged measurements
    on text at this length (``text``), into a single row about one head. Missing values are NaN or None.

    Its constants are ``paper`` at the paper's tokens, ``wrong slices`` at the tokens of the published code,
    ``as published`` as the published code computes it, and after a search ``found``, the largest known,
    ``found by`` the search or a construction. ``upper`` and ``theirs`` are the logarithms of this library's
    and the paper's bound, by its ``theorem``. The median, minimum and maximum over all heads (``median``,
    ``low``, ``high``) are at the ``paper``'s tokens and on ``text``; ``text own`` is the median of the one
    head there. ``unsettled`` counts the values that did not converge; they are left out.
    """
    values = rows[rows["converged"] == True]  # noqa: E712
    own = values[values["head"] == head]
    by_kind = own.groupby("kind")["value"].first()
    bounds = rows.drop_duplicates("kind").set_index("kind").reindex(["upper", "theirs"])
    theorem = bounds.loc["theirs", "name"]
    searched = ["paper", "search"] if (rows["kind"] == "search").any() else []
    worst = own[own["kind"].isin(searched)].sort_values("value").tail(1)
    return (
        {f"text {name}": value for name, value in _span(text["lipschitz"]).items()}
        | {f"paper {name}": one for name, one in _span(values[values["kind"] == "paper"]["value"]).items()}
        | {kind: by_kind.get(kind, math.nan) for kind in ("paper", "wrong slices", "as published")}
        | {
            "text own": text[text["head"] == head]["lipschitz"].median(),
            "found": worst["value"].max(),
            "found by": "".join(worst["name"]) or None,
            "upper": bounds.loc["upper", "log_value"],
            "theirs": bounds.loc["theirs", "log_value"],
            "theorem": display_name(theorem) if isinstance(theorem, str) else None,
            "unsettled": int((rows["converged"] == False).sum()),  # noqa: E712
        }
    )


def _span(values: pd.Series) -> Values:
    return {"median": values.median(), "low": values.min(), "high": values.max()}
