"""What a run would measure, counted without carrying it out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from howsmooth import lipschitz
from howsmooth.attention import SelfAttention
from howsmooth.cli import main
from howsmooth.errors import ArgumentError, CaptureError, ModelError
from howsmooth.study.measurement_run import DryRun, dry_run
from howsmooth.study.plans import ModelSpec, Plan
from tests._documented import check_documented
from tests._study import Tools, installed, make_plan, make_tools, run


def told(plan: Plan, folder: Path, tools: Tools, **options: Any) -> DryRun:
    with installed(tools):
        return dry_run(plan, folder, **options)


def test_it_counts_what_a_run_would_measure_and_measures_nothing(tmp_path: Path) -> None:
    plan, (tools, work) = make_plan(scopes=("attention", "head")), make_tools()
    found = told(plan, tmp_path / "out", tools)
    assert not (tmp_path / "out").exists()
    assert work.measured == work.bounded == []
    assert [(part.scope, part.measurements) for part in found.parts] == [("attention", 45), ("head", 90)]
    for part in found.parts:
        assert (part.layers, part.lengths, part.longest, part.sequences) == (3, 3, 8, 15)
    assert found.kept == 0
    run(replace(plan, lengths=(2, 4)), tmp_path / "out", tools)
    found = told(plan, tmp_path / "out", tools)
    assert [(part.longest, part.lengths, part.measurements) for part in found.parts] == [
        (8, 1, 15),
        (8, 1, 30),
    ]
    assert found.kept == len(work.measured) == 90
    run(plan, tmp_path / "out", tools)
    assert len(work.measured) == 135
    before = (tmp_path / "out" / "study.sqlite").read_bytes()
    found = told(plan, tmp_path / "out", tools)
    assert (found.parts, found.kept) == ((), 135)
    assert (tmp_path / "out" / "study.sqlite").read_bytes() == before


def test_a_dry_run_is_printed_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    plan = tmp_path / "sweep.toml"
    plan.write_text(
        'models = ["small", "gone"]\ntexts = ["prose"]\nlengths = [2, 4, 8]\nsamples = 5\nout = "o"', "utf-8"
    )
    with installed(make_tools()[0]):
        assert main(["measure", "--plan", str(plan), "--dry-run", "--quiet"]) == 3  # as the run
        out = capsys.readouterr().out
        asked = ["--dry-run", "--json", "--as-published", "all"]
        assert main(["measure", "--plan", str(plan), *asked]) == 3
    assert out.splitlines()[1].split() == ["small", "prose", "attention", "3", "3", "15", "45", "8", "?"]
    assert "Left to measure: 45 measurements." in out
    assert "Cannot be measured: gone: model: 'gone' is not known." in out
    found = json.loads(capsys.readouterr().out)
    check_documented("measure --dry-run", found)
    assert [(part["longest"], part["measurements"]) for part in found["parts"]] == [(8, 45)]
    assert found["without_published_values"]
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]


def attention() -> SelfAttention:
    generator = torch.Generator().manual_seed(0)
    return SelfAttention(*(torch.randn(8, 4, 8, generator=generator) for _ in range(3)))


def with_attention(f: SelfAttention) -> Tools:
    """Stand-ins whose layers are an attention, so that its memory can be predicted."""
    tools, _ = make_tools()

    def capture(*args: Any, **options: Any) -> list[Any]:
        sites = tools.capture(*args, **options)
        for site in sites:
            site.map, site.x = f, torch.randn(*site.x.shape[:2], 8)
        return sites

    return replace(tools, capture=capture)


def test_the_memory_is_at_least_that_of_the_probabilities_that_are_kept(tmp_path: Path) -> None:
    plan = make_plan(lengths=(2, 32, 64), samples=3, memory=2**30)
    ((memory, lacking),) = (
        (part.memory, part.lacking) for part in told(plan, tmp_path, with_attention(attention())).parts
    )
    kept = 3 * 8 * 64 * 64 * 4  # of three sequences and eight heads
    assert memory is not None
    assert kept < memory < 20 * kept
    assert lacking is None
    assert [part.memory for part in told(plan, tmp_path, make_tools()[0]).parts] == [None]


def test_a_length_that_does_not_fit_in_memory_is_told(tmp_path: Path) -> None:
    """Held against the refusal of the measurement itself."""
    f = attention()
    plan = make_plan(lengths=(2, 64), samples=1, memory=400_000)
    (part,) = told(plan, tmp_path, with_attention(f)).parts
    assert part.longest == 64
    assert part.lacking is not None
    with pytest.raises(ArgumentError, match="memory"):
        lipschitz.local_lipschitz(f, torch.randn(64, 8), memory=400_000)
    lipschitz.local_lipschitz(f, torch.randn(64, 8), memory=math.ceil(part.lacking))


def test_what_cannot_be_measured_is_told_if_a_study_keeps_going(tmp_path: Path) -> None:
    plan, (tools, _) = make_plan(models=(ModelSpec("small"), ModelSpec("gone"))), make_tools()
    with pytest.raises(ModelError):
        told(plan, tmp_path, tools)
    found = told(plan, tmp_path, tools, keep_going=True)
    assert found.impossible == (("gone", None, "model: 'gone' is not known."),)
    assert {part.model for part in found.parts} == {"small"}

    def capture(*args: Any, **options: Any) -> list[Any]:
        raise CaptureError("too hot.")

    tools = replace(tools, capture=capture)
    with pytest.raises(CaptureError, match="too hot"):
        told(make_plan(), tmp_path, tools)
    found = told(make_plan(), tmp_path, tools, keep_going=True)
    assert found.impossible == (("small", "prose", "too hot."),)
    assert {part.memory for part in found.parts} == {None}
