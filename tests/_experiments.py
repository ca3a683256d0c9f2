"""What tests of single experiments share: requests, rows of finished units, what a finding must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from howsmooth.reproduce.experiment import Experiment, Request
from howsmooth.reproduce.finding import Finding, read_note
from howsmooth.reproduce.kept import Kept
from howsmooth.study.plan import ModelSpec

from ._reproduce import tiny_tools
from ._tiny_models import tiny

OTHER = "$x_{$\x1b[31m\u202ename\\frac"
"""A text whose name means harm to figures and terminals."""

BERT, DECODER, GPT2, LLAMA = (ModelSpec(name) for name in ("bert", "bert-decoder", "gpt2", "llama"))


def asked(*models: ModelSpec, **changes: Any) -> Request:
    values: dict[str, Any] = {"models": models, "texts": ("prose", OTHER), "samples": 2}
    return Request(**(values | changes))


def measured(experiment: Experiment, request: Request, folder: Path) -> pd.DataFrame:
    """Carry an experiment out, and return the rows of its units."""
    experiment.measure(request, folder, tiny_tools(), lambda step: None)
    return units(folder)


def units(folder: Path) -> pd.DataFrame:
    note = read_note(folder)
    parts = note.get("models", note.get("columns", [note]))
    return Kept(folder / "units").table([unit for part in parts for unit in part["units"]])


def checked(finding: Finding) -> Finding:
    """What every finding must be: pictures that are there, with words for them, and no nan in a sentence."""
    for picture in finding.pictures:
        assert picture.png.read_bytes().startswith(b"\x89PNG")
        content = picture.pdf.read_bytes()
        assert content.startswith(b"%PDF")
        assert b"/Type3" not in content
        assert len(picture.alt) > 40
        assert len(picture.caption) > 40
    assert finding.seen
    assert not [line for line in finding.seen if "nan" in line.lower() or "inf" in line.split()]
    assert finding.made
    return finding


def bert_head(layer: int, h: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and query bias of a head, read from the model's own weights, in float64."""
    part = tiny("bert").encoder.layer[layer].attention.self
    width = 24 // 4
    place = slice(h * width, (h + 1) * width)
    weights = [getattr(part, name).weight[place].detach().double() for name in ("query", "key", "value")]
    return weights[0], weights[1], weights[2], part.query.bias[place].detach().double()
