"""Constants of several lengths in one call, beside those of each length by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from howsmooth import lipschitz
from howsmooth.study import measurement_run
from howsmooth.study.measurement_run import run
from howsmooth.study.plans import Plan
from howsmooth.study.records import Measurement
from howsmooth.study.runner import Means
from howsmooth.study.store import Store

PLAN = Plan(models=["builtin-encoder"], lengths="3,5,8", samples=2, layers="0,1", bounds="none")


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[Any]]:
    """Run the plan; return the number of sequences of each call of the measurement, and the rows."""
    calls: list[int] = []
    once = lipschitz.local_lipschitz

    def counted(f: Any, x: Sequence[Any], **options: Any) -> Any:
        calls.append(len(x))
        return once(f, x, **options)

    with monkeypatch.context() as patch:
        patch.setattr(lipschitz, "local_lipschitz", counted)
        run(PLAN, folder)
    with Store.open(folder, write=False) as store:
        names = ("layer", "n", "sample", "lipschitz", "upper", "iterations", "seed", "start")
        return calls, sorted(store.keys(Measurement, names))


def test_a_layer_is_measured_at_all_lengths_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, rows = measured(tmp_path / "joined", monkeypatch)
    assert calls == [3 * 2, 3 * 2]
    monkeypatch.setattr(measurement_run, "joined", lambda work, _: work)
    calls, apart = measured(tmp_path / "apart", monkeypatch)
    assert calls == [2] * 6
    assert [row[:3] + row[5:] for row in rows] == [row[:3] + row[5:] for row in apart]
    for one, other in zip(rows, apart, strict=True):
        assert one[3:5] == pytest.approx(other[3:5], rel=1e-6)


def test_a_length_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call for all lengths fails, and so does that of five tokens by itself."""
    once = lipschitz.local_lipschitz

    def failing(f: Any, x: Any, **options: Any) -> Any:
        if any(len(one) == 5 for one in x):
            raise ValueError("five")
        return once(f, x, **options)

    monkeypatch.setattr(lipschitz, "local_lipschitz", failing)
    assert run(PLAN, tmp_path, Means(keep_going=True)).failed == 4
    with Store.open(tmp_path, write=False) as store:
        kept = store.keys(Measurement, ("layer", "n", "sample"))
    assert sorted(kept) == [(layer, n, sample) for layer in (0, 1) for n in (3, 8) for sample in (0, 1)]
