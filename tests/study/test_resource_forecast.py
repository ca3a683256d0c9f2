"""What a run would take, told without carrying it out."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from howsmooth import lipschitz
from howsmooth.attention import SelfAttention
from howsmooth.batching import footprint
from howsmooth.cli import main
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.lipschitz import mixed_precision
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.records import Run
from howsmooth.study.resource_forecast import Forecast, TaskTimes, forecast
from howsmooth.study.status import status
from howsmooth.study.store import Store
from howsmooth.study.tasks.task import Task
from tests._documented import check_documented
from tests._study import FakeModel, Tools, Work, installed, make_plan, make_tools, run

# ---- The rule, number by number


def task(n: int, size: int = 1, alike: tuple[str, ...] = ("a",)) -> Any:
    return create_autospec(Task, alike=alike, n=n, size=size)


def learnt(*done: tuple[int, float]) -> TaskTimes:
    times = TaskTimes()
    for n, seconds in done:
        times.learn(("a",), n, 1, seconds)
    return times


@pytest.mark.parametrize(
    ("done", "n", "expected"),
    [
        ([(64, 3.0)], 128, 6.0),  # with one length, like n from 64 tokens on,
        ([(64, 3.0)], 2, 3.0),  # and flat below
        ([(4, 3.0)], 32, 3.0),
        ([(4, 3.0)], 128, 6.0),
        ([(128, 4.0)], 4, 2.0),
        ([(10, 1.0), (40, 4.0)], 20, 2.0),  # with two, a power of n
        ([(40, 1.0), (160, 8.0)], 360, 27.0),
        ([(40, 1.0), (160, 8.0)], 40, 1.0),
        ([(40, 1.0), (80, 16.0)], 160, 64.0),  # which is 2 at most
        ([(10, 1.0), (40, 8.0)], 90, 18.0),  # and 1 among short lengths
        ([(10, 5.0), (20, 1.0)], 40, 1.0),  # and 0 at least
        ([(1, 100.0), (10, 1.0), (40, 4.0), (9000, 1.0)], 20, 2.0),  # between the nearest lengths
        ([(24, 1.0), (60, 2.0), (72, 3.0)], 1152, 3 * 16.0),  # and not of two that are close to each other
        ([(10, 2.0), (12, 3.0)], 128, 6.0),
        ([(64, 0.0), (128, 3.0)], 128, 3.0),  # what took no time has no power
    ],
)
def test_a_row_takes_what_the_nearest_lengths_say(
    done: list[tuple[int, float]], n: int, expected: float
) -> None:
    assert learnt(*done).a_row(("a",), n) == pytest.approx(expected)


def test_rows_of_a_length_are_averaged_and_a_task_is_the_sum_of_its_rows() -> None:
    times = learnt((8, 1.0))
    times.learn(("a",), 8, 3, 7.0)
    assert times.expect(task(8, size=5)) == pytest.approx(10.0)
    assert times.expect(task(8, alike=("b",))) is None


def test_without_a_task_that_is_alike_the_same_kind_of_rows_counts() -> None:
    times = TaskTimes()
    times.learn(("rows", "one model"), 64, 1, 2.0)
    assert times.a_row(("rows", "another"), 128) == pytest.approx(4.0)
    assert times.a_row(("bounds", "one model"), 128) is None


def test_the_time_left_is_the_time_spent_by_the_seconds_of_rows_left_and_done() -> None:
    a, times = ("a",), learnt((64, 2.0), (128, 4.0))
    done, left = {(a, 64): 1, (a, 128): 1}, {(a, 256): 3}
    assert times.left(6.0, done, left) == pytest.approx(24.0)
    assert times.left(9.0, done, left) == pytest.approx(36.0)  # half as long again as the rows alone
    # As long as nothing is known, a row counts n times, but at least 64 times.
    assert TaskTimes().left(2.0, {(a, 64): 1}, {(a, 128): 1, (a, 16): 1}) == pytest.approx(6.0)


# ---- What a run would take


class Clock:
    """A clock that only the stand-ins move."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("howsmooth.study.resource_forecast.time", made)
    return made


def timed(
    clock: Clock, row: Callable[[int], float], bound: float = 0.0, **changes: Any
) -> tuple[Tools, Work]:
    """Stand-ins whose measurements of n tokens take ``row(n)`` seconds, and whose bounds take ``bound``."""
    tools, work = make_tools(**changes)

    def measure(function: Any, x: torch.Tensor, **options: Any) -> Any:
        clock.now += row(x.shape[1]) * x.shape[0]
        return tools.measure(function, x, **options)

    def bounded(site: Any) -> Any:
        clock.now += bound
        return tools.bound(site)

    return replace(tools, measure=measure, bound=bounded), work


def told(plan: Plan, folder: Path, tools: Tools, **options: Any) -> Forecast:
    with installed(tools):
        return forecast(plan, folder, **options)


def test_a_footprint_says_how_a_sequence_will_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against what ``local_lipschitz`` then does."""
    asked: list[bool] = []
    linearised = mixed_precision.closed_form_jacobian

    def streamed(*args: Any, **options: Any) -> Any:
        asked.append(options["streamed"])
        return linearised(*args, **options)

    monkeypatch.setattr(mixed_precision, "closed_form_jacobian", streamed)
    f, n = attention(8), 512
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(1))
    kept = footprint(f, (n, 8), dtype=torch.float32, device=torch.device("cpu"), memory=2**30)
    assert not kept.streamed
    little = kept.size - 1
    found = footprint(f, (n, 8), dtype=torch.float32, device=torch.device("cpu"), memory=little)
    assert found.streamed
    assert found.size < kept.size
    for memory, expected in ((2**30, []), (little, [True])):
        asked.clear()
        lipschitz.local_lipschitz(f, x, max_iterations=2, memory=memory)
        assert asked[:1] == expected
    unknown = footprint(torch.sin, (4, 3), dtype=torch.float32, device=torch.device("cpu"))
    assert (unknown.streamed, unknown.size) == (False, 0)


def attention(heads: int = 2, d: int = 8) -> SelfAttention:
    generator = torch.Generator().manual_seed(0)
    return SelfAttention(*(torch.randn(heads, 4, d, generator=generator) for _ in range(3)))


def test_a_forecast_counts_what_a_run_would_measure_and_writes_nothing(tmp_path: Path, clock: Clock) -> None:
    plan, (tools, work) = make_plan(scopes=("attention", "head")), timed(clock, lambda n: 1e-3)
    found = told(plan, tmp_path / "out", tools)
    assert not (tmp_path / "out").exists()
    assert {(part.scope, part.n): part.measurements for part in found.parts} == {
        (scope, n): 3 * 5 * maps for scope, maps in (("attention", 1), ("head", 2)) for n in (2, 4, 8)
    }
    assert found.kept == 0
    tried = len(work.measured)
    run(plan, tmp_path / "out", tools)
    assert len(work.measured) - tried == sum(part.measurements for part in found.parts)


def test_what_all_takes_is_told_from_three_lengths(tmp_path: Path, clock: Clock) -> None:
    """Rows that take n^0.75 milliseconds: the trial finds the power, so that all lengths are exact."""
    plan = make_plan(lengths=(2, 3, 4, 6, 8, 16, 32), bounds="auto")
    tools, work = timed(clock, lambda n: n**0.75 / 1000)
    found = told(plan, tmp_path, tools)
    assert {n for _, _, _, n, _ in work.measured} == {2, 6, 32}
    for part in found.parts:
        assert part.seconds == pytest.approx(15 * part.n**0.75 / 1000)
    measuring = sum(part.seconds for part in found.parts)
    assert found.bounds == pytest.approx(measuring / 5)
    assert found.preparing == 0
    assert found.seconds == pytest.approx(measuring + found.bounds + found.drawing)
    assert (found.low, found.high) == pytest.approx((found.seconds / 2, found.seconds * 2))
    assert found.memory >= max(part.memory or 0.0 for part in found.parts)
    # No bound holds for a scope with more in it than attention.
    found = told(replace(plan, scopes=("block",)), tmp_path, tools)
    assert found.bounds == 0.0 < found.seconds


def test_each_head_has_a_figure_and_overviews_take_longer(tmp_path: Path, clock: Clock) -> None:
    tools, _ = timed(clock, lambda n: 0.0)
    plan = make_plan(scopes=("attention", "head"), bounds="none")
    layers, heads = 3, 2
    # One figure for each, and overviews of 3 and of 6 parts, which take as long as 1 and 2 figures.
    figures = layers + 1 + layers * heads + 2
    found = told(plan, tmp_path, tools)
    assert found.drawing == pytest.approx(1.0 + 0.65 * figures)
    assert told(plan, tmp_path, tools, draw=False).drawing == 1.0


def test_what_a_task_takes_once_is_told_once(tmp_path: Path, clock: Clock) -> None:
    """One capture takes a tenth of a second, for one layer of one sequence as for all of all."""
    tools, _ = timed(clock, lambda n: 0.0)

    def capture(*args: Any, **options: Any) -> list[Any]:
        clock.now += 0.1
        return tools.capture(*args, **options)

    found = told(make_plan(bounds="none"), tmp_path, replace(tools, capture=capture))
    assert [part.seconds for part in found.parts] == pytest.approx([0.1, 0.1, 0.1])


@pytest.mark.parametrize("bounds", ["all", "none"])
def test_all_bounds_are_told_from_those_of_one_layer(tmp_path: Path, clock: Clock, bounds: str) -> None:
    plan = make_plan(lengths=(2, 3, 4, 8), scopes=("attention", "block"), bounds=bounds)
    tools, work = timed(clock, lambda n: 1e-3, bound=0.25)
    found = told(plan, tmp_path, tools)
    # Three lengths of three layers have bounds, and of scopes those that are attention alone.
    assert found.bounds == pytest.approx(9 * 0.25 if bounds == "all" else 0.0)
    assert len(work.bounded) == (3 if bounds == "all" else 0)


def test_what_would_take_too_long_is_tried_in_part_or_not_at_all(tmp_path: Path, clock: Clock) -> None:
    """A minute a row from 128 tokens on: of 128 one row is tried, and nothing longer."""
    models = {"small": FakeModel(max_length=None)}
    tools, work = timed(clock, lambda n: 60.0 if n >= 128 else 0.01, models=models, tokens=20_000)
    found = told(make_plan(lengths=(600, 1200), bounds="none"), tmp_path, tools)
    # Since both lengths are long, shorter ones are tried first.
    assert [n for _, _, _, n, _ in work.measured] == [16, 16, 128]
    assert [part.measurements for part in found.parts] == [15, 15]
    assert [part.seconds for part in found.parts] == pytest.approx(
        [15 * 60.0 * (n / 128) ** 2 for n in (600, 1200)]
    )


def test_what_the_store_has_is_not_counted_again(tmp_path: Path) -> None:
    tools, _ = make_tools()
    run(make_plan(lengths=(2, 4)), tmp_path, tools)
    found = told(make_plan(), tmp_path, tools)
    assert [(part.n, part.measurements) for part in found.parts] == [(8, 15)]
    assert found.kept == 30
    run(make_plan(), tmp_path, tools)
    before = (tmp_path / "study.sqlite").read_bytes()
    all_done = told(make_plan(), tmp_path, tools)
    assert (all_done.parts, all_done.bounds, all_done.kept) == ((), 0, 45)
    assert (tmp_path / "study.sqlite").read_bytes() == before


def test_status_tells_what_a_dry_run_tells(tmp_path: Path) -> None:
    tools, _ = make_tools()
    run(make_plan(lengths=(2, 4)), tmp_path, tools)
    plan = make_plan(bounds="auto")
    found, left = told(plan, tmp_path, tools), status(tmp_path, plan, ["prose"]).remaining
    assert left is not None
    with Store.open(tmp_path, write=False) as store:
        worked = sum(run.worked for run, _ in store.rows(Run))
    # 15 of 45 rows are left: at twice the length a row takes 1 to 4 times as long, and bounds a fifth more.
    assert found.drawing < left < found.drawing + 1.2 * 4 * worked
    assert status(tmp_path, make_plan(lengths=(2, 4)), ["prose"]).remaining == 0
    alone = status(tmp_path, make_plan(bounds="none"), ["prose"]).remaining
    assert alone is not None
    assert left - found.drawing == pytest.approx(1.2 * (alone - found.drawing))


def test_lengths_that_do_not_fit_in_memory_are_told(tmp_path: Path) -> None:
    """Held against the refusal of the measurement itself."""
    tools, _ = make_tools()
    f = attention(8)

    def capture(*args: Any, **options: Any) -> list[Any]:
        sites = tools.capture(*args, **options)
        for site in sites:
            site.map, site.x = f, torch.randn(*site.x.shape[:2], 8)
        return sites

    def measure(function: Any, x: torch.Tensor, **options: Any) -> Any:
        return real(function, x, **options | {"memory": None})

    real = lipschitz.local_lipschitz
    plan = make_plan(lengths=(2, 64), samples=1, bounds="none", memory=400_000)
    found = told(plan, tmp_path, replace(tools, capture=capture, measure=measure))
    ((n, needed),) = ((part.n, part.lacking) for part in found.parts if part.lacking is not None)
    assert n == 64
    with pytest.raises(ArgumentError, match="memory"):
        lipschitz.local_lipschitz(f, torch.randn(64, 8), memory=400_000)
    lipschitz.local_lipschitz(f, torch.randn(64, 8), memory=math.ceil(needed))
    lipschitz.local_lipschitz(f, torch.randn(2, 8), memory=400_000)


def test_what_cannot_be_measured_is_told_if_a_study_keeps_going(tmp_path: Path) -> None:
    plan, (tools, _) = make_plan(models=(ModelSpec("small"), ModelSpec("gone"))), make_tools()
    with pytest.raises(ModelError):
        told(plan, tmp_path, tools)
    found = told(plan, tmp_path, tools, keep_going=True)
    assert found.impossible == (("gone", None, "model: 'gone' is not known."),)
    assert {part.model for part in found.parts} == {"small"}

    def hot(calls: int) -> None:
        raise ModelError("too hot.")

    tools = make_tools(before_measure=hot)[0]
    with pytest.raises(ModelError, match="too hot"):
        told(make_plan(), tmp_path, tools)
    found = told(make_plan(), tmp_path, tools, keep_going=True)
    assert found.impossible == (("small", "prose", "too hot."),)
    assert {part.memory for part in found.parts} == {None}


def test_bounds_that_fail_are_told_as_the_run_records_them(tmp_path: Path) -> None:
    tools, _ = make_tools()

    def bound(site: Any) -> Any:
        raise MemoryError("No room.")

    found = told(make_plan(), tmp_path, replace(tools, bound=bound))
    assert found.impossible == (("small", "prose", "bounds: No room."),)
    assert found.bounds > 0


# ---- the command line

Typed = Callable[..., tuple[int, str, str]]
MEASURE = ("measure", "small", "--text", "prose", "--lengths", "2,4,8", "--samples", "5")


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """Type a command, with stand-ins for models and texts."""

    def type_(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with installed(make_tools()[0]):
            code = main([*words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return type_


def test_a_dry_run_prints_each_length_and_writes_nothing(typed: Typed, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code, out, _ = typed(*MEASURE, "--dry-run", "--out", str(folder))
    assert code == 0
    assert not folder.exists()
    rows = [line.split() for line in out.splitlines()]
    counts = [row[:2] for row in rows if row[:1] in (["2"], ["4"], ["8"])]
    assert counts == [["2", "15"], ["4", "15"], ["8", "15"]]
    assert "small, prose, attention:" in out
    assert "Nothing was written." in out


def test_a_dry_run_for_machines_is_the_forecast(typed: Typed, tmp_path: Path) -> None:
    code, out, err = typed(*MEASURE, "--dry-run", "--json", "--as-published", "all", "--out", str(tmp_path))
    assert (code, err) == (0, "")
    found = json.loads(out)
    check_documented("measure, study with --dry-run", found)
    assert [(part["n"], part["measurements"]) for part in found["parts"]] == [(2, 15), (4, 15), (8, 15)]
    assert found["low"] < found["seconds"] < found["high"]
    assert found["without_published_values"]
    assert list(tmp_path.iterdir()) == []


def test_a_plan_file_is_told_with_what_cannot_be_measured(typed: Typed, tmp_path: Path) -> None:
    plan = tmp_path / "sweep.toml"
    plan.write_text(
        'models = ["small", "gone"]\ntexts = ["prose"]\nlengths = [2, 4]\nsamples = 5\nout = "o"', "utf-8"
    )
    code, out, _ = typed("study", str(plan), "--dry-run", "--quiet")
    assert code == 3  # as the run
    assert "Cannot be measured: gone: model: 'gone' is not known." in out
    assert not (tmp_path / "o").exists()
    for also, expected in (
        ("--status", "--dry-run without --status"),
        ("--merge", "--merge without --resume"),
    ):
        code, _, err = typed("study", str(plan), "--dry-run", also)
        assert code == 2
        assert f"expected {expected}" in err


# ---- against the clock


# In a process without the checks of types that tests have, which take longer than small estimates.
CHILD = """
import json, sys, time
from pathlib import Path
from types import SimpleNamespace
import torch
from howsmooth.study import measurement_run as run, resource_forecast, runner
from howsmooth.study.plans import Plan

# In processor time, for machines that are busy.
resource_forecast.time = runner.time = run.time = SimpleNamespace(monotonic=time.process_time)
runner._BETWEEN_TELLING = 0.0
torch.set_num_threads(1)

class Heard(list):
    def phase(self, words): pass
    def advance(self, done, total, words): self.append((done, words))

plan = Plan(sys.argv[1], lengths="2,6,16,34,66,100", samples=10)

def ratios(folder):
    heard, said = Heard(), resource_forecast.forecast(plan, folder)
    outcome = run.run(plan, folder, runner.Means(heard))
    found = {"all": (said.seconds - said.drawing) / outcome.seconds}
    constants = [(done, words) for done, words in heard if not words.endswith("bounds")]
    for part in said.parts:
        ends = [done for done, words in constants if words.endswith(f"n = {part.n}")]
        before = max((done for done, _ in constants if done < ends[0]), default=0.0)
        found[part.n] = part.seconds / (ends[-1] - before)
    return found

print(json.dumps([ratios(Path(sys.argv[2], str(turn))) for turn in range(3)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["builtin-encoder", "builtin-decoder"])
def test_the_protocol_takes_what_was_predicted(tmp_path: Path, name: str) -> None:
    """Within a factor of two, length by length and in all, in the middle one of three runs.

    Processor time varies, too, with what else the machine does.
    """
    command = [sys.executable, "-c", CHILD, name, str(tmp_path / "out")]
    runs = json.loads(subprocess.check_output(command, env=os.environ | {"OMP_NUM_THREADS": "1"}))
    ratios = {part: median(one[part] for one in runs) for part in runs[0]}
    assert len(ratios) == 7
    assert all(0.5 < ratio < 2 for ratio in ratios.values()), ratios
