"""Appendix C.5: γR² of every head, which decides how long the worst inputs go on growing like √n."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import torch

from howsmooth.reproduce.columns import MODELS
from howsmooth.reproduce.drawing.gamma_radius import draw
from howsmooth.reproduce.experiment import Experiment, OnStep, Request, Step
from howsmooth.reproduce.finding import write_note
from howsmooth.reproduce.kept import Kept, Key
from howsmooth.reproduce.loading import remembering
from howsmooth.reproduce.subjects import Setting, bilinear, setting, usual_length
from howsmooth.study.prepare import Subject
from howsmooth.study.ranges import Ranges
from howsmooth.study.strengths import strengths
from howsmooth.study.tools import Tools

__all__ = ["GAMMA_RADIUS"]

_SAMPLES = 8


def _measure(request: Request, folder: Path, tools: Tools, on_step: OnStep) -> None:
    tools, kept = remembering(tools), Kept(folder / "units")
    specs = request.models or MODELS
    keys: list[Key] = []
    made: dict[str, str] = {}
    for done, spec in enumerate(specs):
        on_step(Step(float(done), float(len(specs)), spec.label))
        here = setting(
            request,
            spec,
            tools,
            lengths=request.lengths or (usual_length(request, spec, tools),),
            samples=request.samples or _SAMPLES,
            layers=request.layers or Ranges.parse("all", "layers"),
        )
        made |= here.made()
        for subject in here.subjects:
            for n, tokens in here.sequences(subject):
                key: Key = {
                    "model": subject.model.label,
                    "fingerprint": subject.fingerprint,
                    "text": subject.text.name,
                    "digest": subject.text.digest,
                    "layers": here.plan.layers.text,
                    "n": n,
                    "samples": here.plan.samples,
                    "seed": request.seed,
                    "dtype": request.dtype,
                }
                keys.append(key)
                if not kept.has(key):
                    kept.add(key, _rows(here, subject, tokens))
    on_step(Step(float(len(specs)), float(len(specs)), ""))
    write_note(folder, {"units": [dict(key) for key in keys], "made": list(made.items())})


def _rows(here: Setting, subject: Subject, tokens: torch.Tensor) -> list[dict[str, object]]:
    """Take the radius of every layer at the sequences, and the eigenvalues of its heads."""
    rows: list[dict[str, object]] = []
    for site in here.sites(subject, tokens):
        radius = site.radius_mean.numpy()
        for head, strength in enumerate(strengths(bilinear(site, subject.model.label))):
            rows.append(
                {
                    "layer": site.layer,
                    "head": head,
                    **asdict(strength),
                    "radius": math.sqrt(float((radius**2).mean())),
                    "radius_from": float(radius.min()),
                    "radius_to": float(radius.max()),
                    "radius_max": float(site.radius_max.max()),
                }
            )
    return rows


GAMMA_RADIUS = Experiment(
    name="gamma-r2",
    title="How strong the scores of each head are on real text: γR²",
    paper="Appendix C.5",
    about=(
        "γ = max(−γ_min, γ_max/8), with the smallest and the largest real eigenvalue of A = KᵀQ/√k, for "
        "every head of every layer; R is the root mean square norm of the tokens that real text gives the "
        "layer. The lower bound of Proposition 3.4, √(n−1)/(1 + (n−1)e^(−2γR²)), grows like √n only while n "
        "is well below e^(2γR²)."
    ),
    measure=_measure,
    draw=draw,
)
