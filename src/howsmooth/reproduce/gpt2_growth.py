"""Appendix E.2: an untrained GPT-2 of full size, its constant and the norm of its tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from howsmooth.errors import CaptureError
from howsmooth.reproduce.drawing.gpt2_growth import draw
from howsmooth.reproduce.experiment import Experiment, OnStep, Request, Step
from howsmooth.reproduce.finding import write_note
from howsmooth.reproduce.kept import Kept, Key
from howsmooth.reproduce.loading import remembering
from howsmooth.reproduce.subjects import Setting, loaded, setting
from howsmooth.study.names import encodable, file_stem
from howsmooth.study.plan import ModelSpec
from howsmooth.study.prepare import Subject, counted
from howsmooth.study.progress import Progress
from howsmooth.study.published_run import run_as_published
from howsmooth.study.ranges import Ranges
from howsmooth.study.run import run
from howsmooth.study.store import Store
from howsmooth.study.tools import Tools

__all__ = ["GPT2_GROWTH"]

_MODELS = (ModelSpec("gpt2", random_init=True),)
_LENGTHS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_SAMPLES = 4
# Of all time: the norms of the layers' inputs need no more than forward passes.
_MEASURED = 0.9
# Of the published values, which are the corrected one, that with each item, and that with all of them.
_PUBLISHED_COST = 6.0


def _measure(request: Request, folder: Path, tools: Tools, on_step: OnStep) -> None:
    tools, kept = remembering(tools), Kept(folder / "units")
    lengths, samples = request.lengths or _LENGTHS, request.samples or _SAMPLES
    specs = request.models or _MODELS
    made: dict[str, str] = {}
    noted = []
    for place, spec in enumerate(specs):
        here = setting(
            request, spec, tools, lengths=lengths, samples=samples, layers=_layers(request, spec, tools)
        )
        store = f"studies/{file_stem(spec.label)}"
        share = 1 / (1 + _PUBLISHED_COST) if request.as_published else 1.0
        listen = partial(_tell, on_step, float(place), share, float(len(specs)))
        run(here.plan, folder / store, tools, command=request.command, on_progress=listen)
        if request.as_published:
            listen = partial(_tell, on_step, place + _MEASURED * share, 1 - share, float(len(specs)))
            run_as_published(here.plan, None, folder / store, tools, on_progress=listen)
        units, reason = [], ""
        for subject in here.subjects:
            with Store.open(folder / store, write=False) as opened:
                held = opened.sequences(subject.model.label, subject.text.name)
            key = _key(here, subject, held)
            try:
                if not kept.has(key):
                    kept.add(key, _norms(here, subject, held))
            except CaptureError as error:
                reason = encodable(str(error))
                continue
            units.append(dict(key))
        made |= here.made()
        noted.append(
            {
                "model": spec.label,
                "store": store,
                "units": units,
                "reason": reason,
                "layers": list(here.subjects[0].layers),
            }
        )
    on_step(Step(float(len(specs)), float(len(specs)), ""))
    write_note(
        folder,
        {
            "models": noted,
            "texts": [encodable(tools.load_text(name).name) for name in request.texts],
            "lengths": list(lengths),
            "samples": samples,
            "as_published": request.as_published,
            "made": list(made.items()),
        },
    )


def _layers(request: Request, spec: ModelSpec, tools: Tools) -> Ranges:
    """Choose the first, the middle and the last layer, unless layers are asked for."""
    if request.layers is not None:
        return request.layers
    count, _ = counted(loaded(request, spec, tools), spec.label)
    return Ranges.parse(f"0,{count // 2},{count - 1}", "layers")


def _key(here: Setting, subject: Subject, held: dict[tuple[int, int], int]) -> Key:
    return {
        "model": subject.model.label,
        "fingerprint": subject.fingerprint,
        "text": subject.text.name,
        "digest": subject.text.digest,
        "layers": here.plan.layers.text,
        "lengths": ",".join(str(n) for n in here.plan.lengths),
        "samples": here.plan.samples,
        "sequences": repr(sorted(held.items())),
        "dtype": here.plan.dtype,
    }


def _norms(here: Setting, subject: Subject, held: dict[tuple[int, int], int]) -> list[dict[str, object]]:
    """Take the norm of the tokens that enter each layer, before its norm layer, at the study's sequences."""
    rows: list[dict[str, object]] = []
    for n, tokens in here.sequences(subject, held):
        for site in here.sites(subject, tokens, "block"):
            for sample, radius in enumerate(site.radius_mean.tolist()):
                rows.append({"layer": site.layer, "n": n, "sample": sample, "radius": radius})
    return rows


def _tell(on_step: OnStep, before: float, cost: float, total: float, progress: Progress) -> None:
    share = progress.cost_done / progress.cost_planned if progress.cost_planned else 1.0
    words = f"{progress.model}, {progress.text}, n = {progress.n}"
    on_step(Step(before + _MEASURED * cost * share, total, words))


GPT2_GROWTH = Experiment(
    name="gpt2",
    title="The constant and the norm of the tokens, against the length",
    paper="Appendix E.2",
    about=(
        "By default of a GPT-2 of full size with untrained weights. Above, the local Lipschitz constant of "
        "attention, all heads and the output projection, without residual and norm, against the length. "
        "Below, the root mean square norm of the tokens: of those that attention is given, behind the norm "
        "layer, and of those that enter the layer, before it. Where norm and length go together, an exponent "
        "in the length holds a part that belongs to the norm. As published, dropout stays on in an untrained "
        "model, and the output is taken for the tangent."
    ),
    measure=_measure,
    draw=draw,
)
