"""What a run would take, told without carrying it out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from howsmooth import lipschitz
from howsmooth.attention import Compose, LayerNorm, Residual, SelfAttention
from howsmooth.batching import footprint
from howsmooth.cli import main
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.study import calibration
from howsmooth.study.calibration import calibrated, measure_rates
from howsmooth.study.cost import (
    NOMINAL,
    Layer,
    bounds_seconds,
    capture_seconds,
    estimate_cost,
    measurement_cost,
    read,
    usual_layer,
)
from howsmooth.study.forecast import forecast
from howsmooth.study.plan import ModelSpec, Plan
from howsmooth.study.progress import Progress
from howsmooth.study.run import run
from howsmooth.study.store import Store
from howsmooth.study.tools import default_tools
from howsmooth.study.trial import layer_of
from tests._study import make_plan, make_tools

LAYER = Layer(64, 64, 4, 2, 16, 32)


def rates_of(rate: float = 1.0) -> Any:
    """Rates that take the same time at all sizes, ``rate`` times as fast as the first."""
    flat = ((1.0, 1e-9 / rate),)
    return replace(
        NOMINAL,
        matrix=(1e9 * rate, 5e8 * rate),
        weights=(1e9 * rate, 1e9 * rate),
        narrow=(flat, flat),
        wide=(flat, flat),
        softmax=flat,
        streamed_narrow=(flat, flat, flat),
        streamed_wide=(flat, flat, flat),
        streamed_softmax=flat,
        basis=1e9 * rate,
        step=1e-3 / rate,
        member=1e-4 / rate,
        eigen=flat,
    )


# ---- the model of cost


def test_a_curve_is_a_power_between_its_points_and_flat_beyond() -> None:
    curve = ((4.0, 1.0), (16.0, 16.0), (64.0, 16.0))
    assert read(curve, 8.0) == pytest.approx(4.0)
    assert read(curve, 32.0) == pytest.approx(16.0)
    assert (read(curve, 1.0), read(curve, 1000.0)) == (1.0, 16.0)
    assert read(curve, 4.0) == 1.0
    assert read(curve, 64.0) == 16.0


def test_a_step_counts_its_operations() -> None:
    """Each part of one step beside a count by hand, from the difference between two numbers of steps."""
    rates, n, members = rates_of(), 50, 3

    def seconds(steps: float) -> float:
        return estimate_cost(rates, LAYER, n, members=members, steps=steps, dtype="float64", last=1.0).seconds

    queries, keys, values = 4 * 16 * 64, 2 * 16 * 64, 2 * 32 * 64
    weights = queries + keys + values + 64 * 4 * 32
    # There and back, a multiplication and an addition for each entry and token; each time all are read.
    projections = 2 * (2 * weights * members * n / 5e8 + 8 * weights / 1e9)
    softmax = members * 4 * n * n * 1e-9
    basis = members * n * 64 * 8 * (20**2 - 10**2) / 1e9
    assert seconds(20) - seconds(10) == pytest.approx(
        10 * (projections + softmax + 1e-3 + members * 1e-4) + basis
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_costs_scale_with_the_machine_and_with_n_squared(dtype: str) -> None:
    def cost(rates: Any, n: int) -> tuple[float, float]:
        found = estimate_cost(rates, LAYER, n, members=1, steps=10.0, dtype=dtype)
        return found.seconds, found.memory

    slow, fast = cost(rates_of(), 100), cost(rates_of(2.0), 100)
    assert slow[0] == pytest.approx(2 * fast[0])
    assert slow[1] == fast[1]
    before, after = cost(rates_of(), 2**19), cost(rates_of(), 2**20)
    assert after[0] / before[0] == pytest.approx(4.0, rel=0.1)
    assert after[1] / before[1] == pytest.approx(2.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
def test_the_share_of_keys_that_are_seen(causal: bool, window: int | None) -> None:
    n = 7
    rows, columns = torch.arange(n)[:, None], torch.arange(n)
    seen = (rows - columns).abs() < (window or n)
    seen &= (columns <= rows) | (not causal)
    assert replace(LAYER, causal=causal, window=window).seen(n) == pytest.approx(float(seen.double().mean()))


def test_without_probabilities_each_member_costs_the_same_and_only_what_is_seen() -> None:
    def cost(layer: Layer, n: int, members: int) -> float:
        return estimate_cost(
            rates_of(), layer, n, members=members, steps=10.0, dtype="float32", streamed=True, last=1.0
        ).seconds

    assert cost(LAYER, 3000, 4) == pytest.approx(4 * cost(LAYER, 3000, 1))
    n = 2**21
    assert cost(replace(LAYER, causal=True), n, 1) / cost(LAYER, n, 1) == pytest.approx(0.5, rel=1e-2)
    near = replace(LAYER, causal=True, window=64)
    assert cost(near, 2 * n, 1) / cost(near, n, 1) == pytest.approx(2.0, rel=1e-2)


def test_large_scores_are_formed_in_float64_where_probabilities_are_not_kept() -> None:
    slow = ((1.0, 1e-8),)
    rates = replace(rates_of(), streamed_narrow=(*rates_of().streamed_narrow[:2], slow))
    rates = replace(rates, streamed_wide=(*rates.streamed_wide[:2], slow))

    def seconds(layer: Layer, dtype: str, streamed: bool) -> float:
        return estimate_cost(
            rates, layer, 2**16, members=1, steps=10.0, dtype=dtype, streamed=streamed
        ).seconds

    sharp = replace(LAYER, sharp=True)
    assert seconds(sharp, "float32", True) > 3 * seconds(LAYER, "float32", True)
    assert seconds(sharp, "float64", True) == seconds(LAYER, "float64", True)
    assert seconds(sharp, "float32", False) == seconds(LAYER, "float32", False)


def test_bounds_leave_certificates_out_above_a_length() -> None:
    wide = usual_layer(12)
    below, above = (bounds_seconds(NOMINAL, wide, n, most=64) for n in (64, 65))
    assert below > 5 * above
    assert above == bounds_seconds(NOMINAL, wide, 1000, most=64)


def test_longer_sequences_and_more_heads_cost_more() -> None:
    assert measurement_cost(8, 12) < measurement_cost(80, 12) < measurement_cost(800, 12)
    assert measurement_cost(80, 4) < measurement_cost(80, 12)
    short, long = (
        capture_seconds(NOMINAL, LAYER, 30, members=2, layers=layers, captured=2) for layers in (4, 12)
    )
    assert short < long


# ---- the calibration


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A cache folder of its own, and a calibration that takes no time and is counted."""
    calls: list[str] = []

    def quick(device: str, clock: Any = None) -> Any:
        calls.append(device)
        return rates_of(float(len(calls)))

    monkeypatch.setenv("HOWSMOOTH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "measure_rates", quick)
    return calls


def test_a_calibration_is_kept_until_it_is_old_or_asked_for_anew(
    counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = calibrated("cpu")
    assert calibrated("cpu") == first
    assert len(counted) == 1
    assert calibrated("cpu", fresh=True) != first
    assert len(counted) == 2
    assert calibrated("cpu") == rates_of(2.0)
    assert len(counted) == 2
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 40 * 86400)
    assert calibrated("cpu") == rates_of(3.0)


def test_other_threads_are_calibrated_by_themselves(counted: list[str]) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = calibrated("cpu")
        torch.set_num_threads(2)
        assert calibrated("cpu") != one
        torch.set_num_threads(1)
        assert calibrated("cpu") == one
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("words", ["", "{}", "[1]", '{"matrix": "fast"}'])
def test_a_damaged_calibration_is_made_again(counted: list[str], words: str, tmp_path: Path) -> None:
    calibrated("cpu")
    (kept,) = (tmp_path / "cache").glob("calibration-*.json")
    kept.write_text(words, "utf-8")
    assert calibrated("cpu") == rates_of(2.0)
    assert json.loads(kept.read_text("utf-8"))["step"] == 5e-4


def test_without_a_cache_folder_each_call_calibrates(
    counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOWSMOOTH_CACHE", "")
    calibrated("cpu")
    calibrated("cpu")
    assert len(counted) == 2


def test_a_timing_is_the_median_of_one_call() -> None:
    """A clock that only the work moves: what the timer says is what the work takes."""
    now, durations = 0.0, iter([5.0, 0.002, 0.001, 0.001, 0.003, 0.003, 0.001, 0.001])

    def work() -> None:
        nonlocal now
        now += next(durations)

    assert calibration._Timer(torch.device("cpu"), lambda: now)(work) == pytest.approx(0.001)


# ---- how one sequence is measured


def attention(heads: int = 2, d: int = 8) -> SelfAttention:
    query, key, value = (
        torch.randn(heads, 4, d, generator=torch.Generator().manual_seed(0)) for _ in range(3)
    )
    return SelfAttention(query, key, value)


def test_a_footprint_says_how_a_sequence_will_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against what ``local_lipschitz`` then does."""
    asked: list[bool] = []
    linearised = lipschitz.closed_form_jacobian

    def streamed(*args: Any, **options: Any) -> Any:
        asked.append(options["streamed"])
        return linearised(*args, **options)

    monkeypatch.setattr(lipschitz, "closed_form_jacobian", streamed)
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


def test_a_footprint_of_a_map_without_closed_form_is_not_known() -> None:
    found = footprint(torch.sin, (4, 3), dtype=torch.float32, device=torch.device("cpu"))
    assert (found.streamed, found.size) == (False, 0)


# ---- a plan


def test_a_forecast_counts_what_a_run_would_measure_and_writes_nothing(tmp_path: Path) -> None:
    plan, (tools, work) = make_plan(scopes=("attention", "head")), make_tools()
    found = forecast(plan, tmp_path / "out", tools, rates_of())
    assert not (tmp_path / "out").exists()
    assert {(part.scope, part.n): part.measurements for part in found.parts} == {
        (scope, n): 3 * 5 * maps for scope, maps in (("attention", 1), ("head", 2)) for n in (2, 4, 8)
    }
    assert found.kept == 0
    tried = len(work.measured)
    run(plan, tmp_path / "out", tools)
    assert len(work.measured) - tried == sum(part.measurements for part in found.parts)


def test_the_sum_is_that_of_its_parts(tmp_path: Path) -> None:
    found = forecast(make_plan(), tmp_path, make_tools()[0], rates_of())
    beside = found.preparing + found.bounds + found.drawing
    assert found.seconds == pytest.approx(beside + sum(part.seconds for part in found.parts))
    assert found.low < found.seconds < found.high
    assert found.memory == max(part.memory for part in found.parts)
    assert found.bounds > 0
    assert forecast(make_plan(bounds=False), tmp_path, make_tools()[0], rates_of()).bounds == 0


def test_what_the_store_has_is_not_counted_again(tmp_path: Path) -> None:
    tools, _ = make_tools()
    run(make_plan(lengths=(2, 4)), tmp_path, tools)
    with Store.open(tmp_path, write=False) as store:
        before = store.measurements()
    found = forecast(make_plan(), tmp_path, tools, rates_of())
    assert [(part.n, part.measurements) for part in found.parts] == [(8, 15)]
    assert found.kept == 30
    (steps,) = found.steps.values()
    assert (steps.likely, steps.source) == (12.0, "the store")
    run(make_plan(), tmp_path, tools)
    all_done = forecast(make_plan(), tmp_path, tools, rates_of())
    assert all_done.parts == ()
    assert all_done.bounds == 0
    assert all_done.kept == 45
    with Store.open(tmp_path, write=False) as store:
        assert len(store.measurements()) > len(before)


def test_a_trial_tells_the_steps_and_how_far_the_machine_is_from_what_is_expected(tmp_path: Path) -> None:
    """Measuring takes 30 times as long as expected, by a clock that only measuring and capturing move."""
    plan, rates, now = make_plan(samples=4, bounds=False), rates_of(), 0.0
    tools, work = make_tools()
    layer = replace(usual_layer(2), d=1, d_out=1, key_dim=1, value_dim=1)

    def slow(function: Any, x: torch.Tensor, **options: Any) -> Any:
        nonlocal now
        n, members = x.shape[1], x.shape[0]
        now += (
            30
            * estimate_cost(rates, layer, n, members=members, steps=12.0, dtype="float32", last=1.0).seconds
        )
        return tools.measure(function, x, **options)

    found = forecast(plan, tmp_path, replace(tools, measure=slow), rates, clock=lambda: now)
    (steps,) = found.steps.values()
    assert steps.likely == 12.0
    assert steps.source == "a trial at n = 8"
    assert {n for _, _, _, n, _ in work.measured} == {8}
    (last,) = (part for part in found.parts if part.n == 8)
    expected = 30 * 3 * estimate_cost(rates, layer, 8, members=4, steps=12.0, dtype="float32").seconds
    assert last.seconds == pytest.approx(expected, rel=1e-3)


def test_what_would_take_too_long_is_not_tried(tmp_path: Path) -> None:
    tools, work = make_tools()
    found = forecast(make_plan(), tmp_path, tools, rates_of(1e-7))
    assert work.measured == []
    (steps,) = found.steps.values()
    assert steps.source == "other models"
    assert found.seconds > 1e3


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
        return lipschitz.local_lipschitz(function, x, **options)

    real = replace(tools, capture=capture, measure=measure)
    plan = make_plan(lengths=(2, 64), samples=1, bounds=False, memory=400_000)
    said = forecast(plan, tmp_path, real, rates_of(1e-3))
    assert [(part.n, part.fits) for part in said.parts] == [(2, True), (64, False)]
    with pytest.raises(ArgumentError, match="memory"):
        lipschitz.local_lipschitz(f, torch.randn(64, 8), memory=400_000)
    lipschitz.local_lipschitz(f, torch.randn(2, 8), memory=400_000)


def test_models_that_cannot_be_loaded_are_told_if_a_study_keeps_going(tmp_path: Path) -> None:
    plan, (tools, _) = make_plan(models=(ModelSpec("small"), ModelSpec("gone"))), make_tools()
    with pytest.raises(ModelError):
        forecast(plan, tmp_path, tools, rates_of())
    found = forecast(plan, tmp_path, tools, rates_of(), keep_going=True)
    assert found.impossible == (("gone", None, "model: 'gone' is not known."),)
    assert {part.model for part in found.parts} == {"small"}


def test_the_sizes_of_a_map_are_read_through_what_is_around_it() -> None:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    inner = SelfAttention(normal(4, 16, 8), normal(2, 16, 8), normal(2, 32, 8), normal(8, 128))
    sizes = Layer(8, 8, 4, 2, 16, 32, True)
    norm = LayerNorm(torch.ones(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64))
    for f in (inner, Residual(inner), Compose(norm, Residual(inner)), Residual(Compose(inner, norm))):
        assert layer_of(f, 0.1 * normal(2, 5, 8), usual_layer(4)) == sizes
    assert not layer_of(inner.head(0), normal(2, 5, 8), usual_layer(1)).projected
    assert layer_of(torch.sin, normal(2, 5, 12), usual_layer(4)) == Layer(12, 12, 4, 4, 3, 3)
    # Where float32 would form scores in float64, which takes longer.
    assert layer_of(inner, 1000 * normal(2, 5, 8), usual_layer(4)) == replace(sizes, sharp=True)


# ---- the command line


@pytest.fixture
def typed(
    counted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Type a command, with stand-ins for models, texts and the calibration."""
    tools, _ = make_tools()
    monkeypatch.setattr("howsmooth.study.tools.default_tools", lambda: tools)

    def run_(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run_


MEASURE = ("measure", "small", "--text", "prose", "--lengths", "2,4,8", "--samples", "5")


def test_a_dry_run_prints_each_length_and_writes_nothing(
    typed: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    code, out, _ = typed(*MEASURE, "--dry-run", "--out", str(folder))
    assert code == 0
    assert not folder.exists()
    rows = [line.split() for line in out.splitlines()]
    assert [row[:2] for row in rows if row[:1] in (["2"], ["4"], ["8"])] == [
        ["2", "15"],
        ["4", "15"],
        ["8", "15"],
    ]
    assert "small, prose, attention: about 12 steps a measurement" in out
    assert "Nothing was written." in out


def test_a_dry_run_for_machines_is_the_forecast(
    typed: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, err = typed(*MEASURE, "--dry-run", "--json", "--as-published", "all", "--out", str(tmp_path))
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [(part["n"], part["measurements"]) for part in found["parts"]] == [(2, 15), (4, 15), (8, 15)]
    assert all(part["low"] <= part["seconds"] <= part["high"] for part in found["parts"])
    assert found["steps"][0]["likely"] == 12.0
    assert found["without_published_values"]
    assert list(tmp_path.glob("*.sqlite")) == []


def test_calibrate_times_the_machine_anew(
    typed: Callable[..., tuple[int, str, str]], counted: list[str], tmp_path: Path
) -> None:
    out = ("--out", str(tmp_path / "out"), "--quiet")
    typed(*MEASURE, "--dry-run", *out)
    typed(*MEASURE, "--dry-run", *out)
    assert len(counted) == 1
    typed(*MEASURE, "--dry-run", "--calibrate", *out)
    assert len(counted) == 2
    code, _, err = typed(*MEASURE, "--calibrate", *out)
    assert code == 2
    assert "error: calibrate: expected it together with --dry-run" in err


def test_a_plan_file_is_told_with_what_cannot_be_measured(
    typed: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    plan = tmp_path / "sweep.toml"
    plan.write_text(
        'models = ["small", "gone"]\ntexts = ["prose"]\nlengths = [2, 4]\nsamples = 5\nout = "o"', "utf-8"
    )
    code, out, _ = typed("study", str(plan), "--dry-run", "--quiet")
    assert code == 0
    assert "Cannot be measured: gone: model: 'gone' is not known." in out
    assert not (tmp_path / "o").exists()
    for also in ("--status", "--merge"):
        code, _, err = typed("study", str(plan), "--dry-run", also)
        assert code == 2
        assert "alone" in err


# ---- against the clock


@pytest.mark.slow
def test_the_protocol_takes_what_was_predicted(tmp_path: Path) -> None:
    """Within a factor of two, length by length and in all; in processor time, for machines that are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = measure_rates("cpu", time.process_time)
        for name in ("builtin-encoder", "builtin-decoder"):
            plan = Plan(models=(ModelSpec(name),), lengths=(2, 6, 16, 34, 66, 100), samples=10)
            said = forecast(plan, tmp_path / name, default_tools(), rates, clock=time.process_time)
            spent: dict[int, float] = dict.fromkeys(plan.lengths, 0.0)
            last = began = time.process_time()

            def heard(progress: Progress, spent: dict[int, float] = spent) -> None:
                nonlocal last
                now = time.process_time()
                if progress.layer >= 0 and not progress.bounding:
                    spent[progress.n] += now - last
                last = now

            run(plan, tmp_path / name, default_tools(), on_progress=heard)
            total = time.process_time() - began
            ratios = {part.n: part.seconds / spent[part.n] for part in said.parts}
            ratios[0] = (said.seconds - said.drawing) / total
            assert all(0.5 < ratio < 2 for ratio in ratios.values()), (name, ratios)
    finally:
        torch.set_num_threads(threads)
