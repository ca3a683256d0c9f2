"""Section 5.2: the constant of one head at the paper's worst inputs, at ours, and on real text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from howsmooth.adversarial import ascend, two_cluster
from howsmooth.attention import SelfAttention
from howsmooth.bounds import best, theorem_3_3, theorem_4_3, theorem_e_3
from howsmooth.errors import ArgumentError
from howsmooth.published import has_fused_weight, power_iteration, wrong_slices
from howsmooth.reproduce.columns import Column, columns_of
from howsmooth.reproduce.drawing.adversarial_figure import draw
from howsmooth.reproduce.experiment import Experiment, OnStep, Request, Step
from howsmooth.reproduce.finding import write_note
from howsmooth.reproduce.kept import Kept, Key
from howsmooth.reproduce.loading import remembering
from howsmooth.reproduce.subjects import Setting, bilinear, loaded, setting, usual_length
from howsmooth.study.names import encodable, file_stem
from howsmooth.study.plan import derive_seed
from howsmooth.study.progress import Progress
from howsmooth.study.ranges import Ranges
from howsmooth.study.run import run
from howsmooth.study.store import Store
from howsmooth.study.strengths import strengths
from howsmooth.study.tools import Tools

__all__ = ["ADVERSARIAL", "RADII"]

RADII = (15.5, 21.5, 100.0)
"""The paper's radii; that of real tokens is added for each layer."""

_LENGTHS = (12, 24, 64, 160, 392)
_SAMPLES = 4
_HEAD = 0
_RTOL = 1e-4
# Of the search, which begins at all constructions: here it adds less than 1 % to the best of them.
_STEPS, _RESTARTS, _ATOM_STEPS = 1, 8, 40
# Of the time of one model, what its text needs.
_TEXT = 0.15


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of one model, and what is known of its tokens."""

    column: Column
    attention: SelfAttention
    fingerprint: str
    fused: bool
    radius: float
    text_lengths: tuple[int, ...]

    @property
    def stem(self) -> str:
        return file_stem(self.column.spec.label, f"layer-{self.column.layer:02d}")


def _measure(request: Request, folder: Path, tools: Tools, on_step: OnStep) -> None:
    tools, kept = remembering(tools), Kept(folder / "units")
    lengths = tuple(n for n in request.lengths or _LENGTHS if n >= 2)
    if not lengths:
        raise ArgumentError("lengths", expected="some of at least 2, for two clusters", got="1")
    columns = columns_of(request, tools)
    # Time goes like the dimension; only shares matter.
    costs = [column.width / 64 for column in columns]
    total = sum(costs)
    made: dict[str, str] = {}
    noted = []
    for place, column in enumerate(columns):
        before, cost = sum(costs[:place], 0.0), costs[place]
        layer, settings = _on_text(
            request, column, folder, tools, partial(_tell, on_step, before, _TEXT * cost, total)
        )
        made |= settings
        units = []
        jobs = [(radius, n) for radius in dict.fromkeys((*RADII, layer.radius)) for n in lengths]
        weights = [float(n) + 100 for _, n in jobs]
        for job, (radius, n) in enumerate(jobs):
            share = sum(weights[:job]) / sum(weights)
            words = f"{column.spec.label}, R = {radius:.4g}, n = {n}"
            on_step(Step(before + cost * (_TEXT + (1 - _TEXT) * share), total, words))
            for published in (False, True) if request.as_published else (False,):
                key = _key(layer, radius, n, request, published=published)
                units.append(dict(key))
                if not kept.has(key):
                    rows = _published_rows if published else _rows
                    kept.add(key, list(rows(layer, radius, n, _seed(key), tools)))
        noted.append(
            {
                "model": column.spec.label,
                "layer": column.layer,
                "causal": column.causal,
                "store": f"studies/{layer.stem}",
                "text_lengths": list(layer.text_lengths),
                "radius": layer.radius,
                "fused": layer.fused,
                "units": units,
            }
        )
    on_step(Step(total, total, ""))
    write_note(
        folder,
        {
            "columns": noted,
            "texts": [encodable(tools.load_text(name).name) for name in request.texts],
            "samples": request.samples or _SAMPLES,
            "lengths": list(lengths),
            "head": _HEAD,
            "as_published": request.as_published,
            "made": list(made.items()),
        },
    )


def _on_text(
    request: Request, column: Column, folder: Path, tools: Tools, listen: partial[None]
) -> tuple[_Layer, dict[str, str]]:
    """Measure every head on text, and take the layer with the largest norm of its tokens there."""
    longest = loaded(request, column.spec, tools).max_length
    asked = request.lengths or _LENGTHS
    lengths = tuple(n for n in asked if longest is None or n <= longest)
    here = setting(
        request,
        column.spec,
        tools,
        lengths=lengths or (usual_length(request, column.spec, tools),),
        samples=request.samples or _SAMPLES,
        layers=Ranges.parse(str(column.layer), "layers"),
        scopes=("head",),
    )
    place = folder / "studies" / file_stem(column.spec.label, f"layer-{column.layer:02d}")
    attention, fused = _attention(here, column)
    run(here.plan, place, tools, command=request.command, on_progress=listen)
    with Store.open(place, write=False) as store:
        rows = store.measurements()
    texts = [one.text.name for one in here.subjects]
    rows = rows[
        rows["text"].isin(texts) & rows["n"].isin(here.plan.lengths) & (rows["sample"] < here.plan.samples)
    ]
    radius = float(rows["radius_max"].max())
    layer = _Layer(column, attention, here.subjects[0].fingerprint, fused, radius, here.plan.lengths)
    return layer, here.made()


def _attention(here: Setting, column: Column) -> tuple[SelfAttention, bool]:
    """Return all heads of the layer with its output, and whether their weights are fused and transposed."""
    subject = here.subjects[0]
    _, tokens = next(here.sequences(subject))
    (site,) = here.sites(subject, tokens[:1], "attention")
    model = getattr(here.models.load_for(subject), "model", None)
    fused = model is not None and has_fused_weight(model.get_submodule(site.name))
    return bilinear(site, column.spec.label), fused


def _tell(on_step: OnStep, before: float, cost: float, total: float, progress: Progress) -> None:
    share = progress.cost_done / progress.cost_planned if progress.cost_planned else 1.0
    words = f"{progress.model}, {progress.text}, n = {progress.n}"
    on_step(Step(before + cost * share, total, words))


def _key(layer: _Layer, radius: float, n: int, request: Request, *, published: bool) -> Key:
    return {
        "model": layer.column.spec.label,
        "fingerprint": layer.fingerprint,
        "layer": layer.column.layer,
        "ball": repr(radius),
        "n": n,
        "published": int(published),
        "search": f"{_STEPS},{_RESTARTS},{_ATOM_STEPS}",
        "seed": request.seed,
        "dtype": request.dtype,
    }


def _seed(key: Key) -> int:
    return derive_seed(purpose="adversarial", **key)


# ---- what is measured at one radius and length; a row is a kind, a head and a number


def _rows(layer: _Layer, radius: float, n: int, seed: int, tools: Tools) -> Iterator[dict[str, object]]:
    """Give the paper's tokens for every head; for one head ours and the bounds besides."""
    f = layer.attention
    for h in _real(f):
        yield _measured("paper", "two_cluster", f.head(h), h, _clusters(f.head(h), n, radius), seed, tools)
    head = f.head(_HEAD)
    found = ascend(
        head,
        n,
        radius,
        random_starts=0,
        steps=_STEPS,
        atom_restarts=_RESTARTS,
        atom_steps=_ATOM_STEPS,
        seed=seed,
    )
    yield _measured("search", found.start, head, _HEAD, found.x, seed, tools)
    biased = f.query_bias is not None
    theirs = (theorem_4_3 if f.causal else theorem_e_3 if biased else theorem_3_3)(head, n, radius)
    for kind, bound in (("upper", best(head, length=n, radius=radius)), ("theirs", theirs)):
        yield {"kind": kind, "name": bound.name, "head": _HEAD, "log_value": bound.log_value}


def _published_rows(
    layer: _Layer, radius: float, n: int, seed: int, tools: Tools
) -> Iterator[dict[str, object]]:
    """Give the published tokens, measured right and as the published code does.

    They are the paper's, but for weights that are fused and transposed: then of slices along the wrong axis.
    """
    f = layer.attention
    wrong = wrong_slices(f) if layer.fused else None
    for h in _real(f if wrong is None else wrong):
        head = f.head(h)
        x = _clusters(head if wrong is None else wrong.head(h), n, radius)
        if wrong is not None:
            yield _measured("wrong slices", "two_cluster", head, h, x, seed, tools)
        theirs = power_iteration(head, x, output=True, absolute=True, seed=seed)
        yield {
            "kind": "as published",
            "name": "two_cluster",
            "head": h,
            "value": theirs.value,
            "converged": theirs.settled,
        }


def _real(f: SelfAttention) -> list[int]:
    """List the heads whose A has a real eigenvalue: the others have no clusters."""
    return [h for h, strength in enumerate(strengths(f)) if strength.gamma is not None]


def _clusters(head: SelfAttention, n: int, radius: float) -> Tensor:
    return two_cluster(head, n, radius).x


def _measured(
    kind: str, name: str, head: SelfAttention, h: int, x: Tensor, seed: int, tools: Tools
) -> dict[str, object]:
    found = tools.measure(head, x, rtol=_RTOL, seed=seed)
    return {
        "kind": kind,
        "name": name,
        "head": h,
        "value": float(found.value),
        "lower": float(found.lower),
        "upper": float(found.upper),
        "converged": bool(found.converged),
    }


ADVERSARIAL = Experiment(
    name="adversarial",
    title="One head at its worst inputs, beside text of the same length",
    paper="Section 5.2",
    about=(
        "The local Lipschitz constant of one head, values only, at the paper's two clusters: a token Ru and "
        "copies of Ru/2 or of −Ru, u an eigenvector of A. R is one of the paper's radii, or the norm of the "
        "longest real token that the layer is given. Beside it, the constant at the worst tokens that "
        "howsmooth finds in the same ball, on real text of the same length, and upper bounds on the ball, "
        "which no tokens can exceed."
    ),
    measure=_measure,
    draw=draw,
)
