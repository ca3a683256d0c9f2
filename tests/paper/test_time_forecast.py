"""The expected times of figures, by a clock that the test moves."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from howsmooth.cli import main
from howsmooth.errors import ModelError
from howsmooth.paper import reproduction, time_forecast
from howsmooth.paper.figure_dataclasses import Figure, FigureContext, Finding


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the trials, in seconds."""
    now = [0.0]
    monkeypatch.setattr(time_forecast, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def figure(name: str, clock: list[float], steps: int, seconds: float, reading: float = 0.0) -> Figure:
    """A figure of some steps that take some seconds each, after its models are read."""

    def measure(context: FigureContext) -> None:
        if not steps:
            raise ModelError("no such model")
        clock[0] += reading
        for step in range(steps):
            context.say("", step / steps)
            clock[0] += seconds

    return Figure(name, name, name, "About.", measure, lambda found, folder: Finding([], []))


def test_times_are_extrapolated_from_the_share_that_was_tried(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = (
        figure("long", clock, 100, 3.0, reading=4.0),
        figure("short", clock, 2, 1.0),
        figure("slow", clock, 10, 60.0),
        figure("refused", clock, 0, 0.0),
    )
    monkeypatch.setattr(reproduction, "FIGURES", figures)
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "--dry-run", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    times = {one["name"]: one for one in found["figures"]}
    # 4 s to read, then three of a hundred steps of 3 s until the ten seconds are over
    assert times["long"]["seconds"] == pytest.approx(4.0 + 300.0)
    assert times["long"]["tried"] == 0.03
    assert times["short"]["seconds"] == 2.0
    assert times["short"]["tried"] == 1.0
    assert times["slow"]["seconds"] == pytest.approx(600.0)
    assert times["refused"]["seconds"] is None
    assert "no such model" in times["refused"]["refused"]
    assert found["seconds"] == pytest.approx(304.0 + 2.0 + 600.0)
    assert not list(tmp_path.iterdir())
    assert main(["reproduce", "--dry-run"]) == 3
    said = capsys.readouterr().out
    assert "Cannot be made: refused" in said
    assert "Nothing was written." in said
