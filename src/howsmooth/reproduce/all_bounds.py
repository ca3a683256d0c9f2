"""All bounds of the paper and of this library against measurements, at real tokens of each model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from howsmooth.bounds import norm_radius, table
from howsmooth.published import c_3_as_coded
from howsmooth.reproduce.columns import Column, columns_of
from howsmooth.reproduce.drawing.all_bounds import AS_CODED, draw
from howsmooth.reproduce.experiment import Experiment, OnStep, Request, Step
from howsmooth.reproduce.finding import write_note
from howsmooth.reproduce.kept import Kept, Key
from howsmooth.reproduce.loading import remembering
from howsmooth.reproduce.subjects import Setting, setting
from howsmooth.study.prepare import Subject
from howsmooth.study.ranges import Ranges
from howsmooth.study.tools import SiteLike, Tools

__all__ = ["ALL_BOUNDS", "WIDE"]

_LENGTHS = (8, 32, 96)

WIDE = 512
"""From this width on, the bounds of all heads together are computed at the shortest length of one text only:
their certificate takes minutes a sequence there."""

# Of all heads together, beside one head: the certificate's forms are of another size.
_TOGETHER = 6.0


def _measure(request: Request, folder: Path, tools: Tools, on_step: OnStep) -> None:
    tools, kept = remembering(tools), Kept(folder / "units")
    lengths = request.lengths or _LENGTHS
    columns = columns_of(request, tools)
    keys: list[Key] = []
    made: dict[str, str] = {}
    # Roughly; only shares matter.
    costs = [column.width**1.5 * len(request.texts) * len(lengths) for column in columns]
    for index, column in enumerate(columns):
        here = setting(
            request,
            column.spec,
            tools,
            lengths=lengths,
            samples=1,
            layers=Ranges.parse(str(column.layer), "layers"),
            scopes=("head", "attention"),
        )
        made |= here.made()
        units = _units(column, here, request)
        for done, (key, subject, tokens) in enumerate(units):
            keys.append(key)
            words = f"{column.spec.label}, layer {column.layer}, n = {key['n']}, scope {key['scope']}"
            before = sum(costs[:index], 0.0) + costs[index] * done / len(units)
            on_step(Step(before, sum(costs, 0.0), words))
            if not kept.has(key):
                kept.add(key, _rows(here, subject, tokens, str(key["scope"])))
    on_step(Step(sum(costs, 0.0), sum(costs, 0.0), ""))
    write_note(
        folder,
        {
            "units": [dict(key) for key in keys],
            "made": list(made.items()),
            "as_published": request.as_published,
        },
    )


def _units(column: Column, here: Setting, request: Request) -> list[tuple[Key, Subject, torch.Tensor]]:
    """List what is measured of a column: the first sequence of each text and length, in both scopes."""
    found: list[tuple[Key, Subject, torch.Tensor]] = []
    shortest = min(here.plan.lengths)
    for subject in here.subjects:
        for n, tokens in here.sequences(subject):
            for scope in ("head", "attention"):
                first = subject is here.subjects[0] and n == shortest
                if scope == "attention" and column.width >= WIDE and not first:
                    continue
                key: Key = {
                    "model": subject.model.label,
                    "fingerprint": subject.fingerprint,
                    "text": subject.text.name,
                    "digest": subject.text.digest,
                    "layer": column.layer,
                    "n": n,
                    "scope": scope,
                    "seed": request.seed,
                    "dtype": request.dtype,
                }
                found.append((key, subject, tokens))
    return found


def _rows(here: Setting, subject: Subject, tokens: torch.Tensor, scope: str) -> list[dict[str, Any]]:
    """Put all bounds of the chosen layer beside the measurement, head by head or all together."""
    rows: list[dict[str, Any]] = []
    for site in here.sites(subject, tokens, scope):
        x = site.x[0].detach().cpu()
        longest = float(torch.linalg.vector_norm(x.double(), dim=-1).max())
        norm = getattr(site, "norm", None)
        # The tokens lie in this ball up to their own rounding.
        radius = longest if norm is None else max(norm_radius(norm), longest)
        found = table(site.map, x, radius=radius, seed=here.plan.seed)
        ends = found[found["name"] == "measured"].set_index("side")["value"]
        beside = {
            "head": site.head,
            "masking": site.masking,
            "radius": radius,
            "radius_from": "the longest of the tokens" if norm is None else f"the {type(norm).__name__}",
            "lower": float(ends["lower"]),
            "upper": float(ends["upper"]),
        }
        for (quantity, row), log in zip(found.iterrows(), found.attrs["log_values"], strict=True):
            if row["name"] == "measured":
                continue
            rows.append(
                beside
                | {
                    "name": str(row["name"]),
                    "side": str(row["side"]),
                    "quantity": str(quantity),
                    "log_value": float(log),
                    "holds": bool(row["holds"]),
                    "source": str(row["source"]),
                }
            )
        if scope == "head":
            rows.append(beside | _as_coded(site, x))
    return rows


def _as_coded(site: SiteLike, x: torch.Tensor) -> dict[str, Any]:
    """Give the formula that the published code evaluates for Theorem C.3, which is no bound."""
    value = c_3_as_coded(site.map, x)
    return {
        "name": AS_CODED,
        "side": "upper",
        "quantity": "‖D_X f‖",
        "log_value": math.log(value) if value > 0 else -math.inf,
        "holds": False,
        "source": "the code published with the paper; no bound, as it leaves Aᵀx and the query bias out",
    }


ALL_BOUNDS = Experiment(
    name="bounds",
    title="All bounds against measurements, at real tokens",
    paper="Theorems 3.3 to C.3",
    about=(
        "For the layers of Figure 1, at one sequence of each text and length: every bound of the paper and "
        "of this library that speaks of the layer, divided by the constant measured there, for each head "
        "alone and for all heads with the output projection. Bounds at the tokens are statements about this "
        "sequence. Bounds over the ball speak of all sequences whose tokens have at most the largest norm "
        "that the norm layer before the attention can give: upper ones must lie above the measured constant, "
        "lower ones say how large the constant is at worst tokens, and may lie above it or below. Of models "
        f"with {WIDE} or more numbers a token, all heads together are bounded at the shortest length of the "
        "first text only, as that takes minutes."
    ),
    measure=_measure,
    draw=draw,
)
