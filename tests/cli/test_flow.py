"""``howsmooth flow``: what is written, printed, continued and refused."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from howsmooth.cli import main
from howsmooth.cli.flow import _growth
from howsmooth.dynamics import flow
from howsmooth.errors import HowsmoothError
from howsmooth.study.records import FrameRow
from howsmooth.study.store import Store
from tests._documented import check_documented

Result = tuple[int, str, str]
Howsmooth = Callable[..., Result]

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["flow", "random", "--tokens", "6", "--until", "1", "--frames", "4"]


@pytest.fixture
def howsmooth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Howsmooth:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.chdir(tmp_path)
    outputs = "howsmooth.study.flows.flow_outputs"
    monkeypatch.setattr(
        f"{outputs}.draw_flow", lambda view, folder: (folder / "flow.png", folder / "flow.pdf")
    )
    monkeypatch.setattr(
        f"{outputs}.animate_flow",
        lambda view, folder, listener: folder / "flow.gif",
    )

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def trajectory(folder: str | Path = "howsmooth-flow") -> np.ndarray:
    with np.load(Path(folder) / "trajectory.npz", allow_pickle=False) as archive:
        return np.asarray(archive["states"])


def test_everything_is_written_and_said_and_the_same_command_again_makes_nothing(
    howsmooth: Howsmooth,
) -> None:
    code, out, err = howsmooth(*SMALL)
    assert code == 0
    names = {path.name for path in Path("howsmooth-flow").iterdir() if not path.name.startswith(".")}
    assert names == {"study.sqlite", "metrics.csv", "trajectory.npz"}
    before = trajectory()
    assert before.shape == (5, 6, 2)
    assert "random: queries, keys and values by Gaussian matrices; softmax attention" in out
    assert "6 tokens in dimension 2, until t = 1" in out
    assert "4 frames made" in out
    assert "times; metrics.csv has all" not in out
    assert f"Animation: {Path('howsmooth-flow/flow.gif')}" in out
    assert err.splitlines() == ["Reading", "Computing 4 frames", "Measuring clusters", "Drawing"]
    code, out, err = howsmooth(*SMALL, "--animation", "none")
    assert code == 0
    assert "0 frames made" in out
    assert "4 were already there" in out
    assert "Animation" not in out
    assert err.splitlines() == ["Reading", "Measuring clusters", "Drawing"]
    np.testing.assert_array_equal(trajectory(), before)
    code, out, err = howsmooth(*SMALL, "--seed", "1")
    assert (code, out) == (2, "")
    assert "belongs to another study: it was made with --seed 0, not 1." in err
    _, out, _ = howsmooth(*SMALL, "--animation", "none", "--sphere", "--radius", "2", "--out", "sphere")
    assert "6 tokens in dimension 2 on the sphere of radius 2, until t = 1" in out


def test_a_table_that_leaves_out_times_says_so(howsmooth: Howsmooth) -> None:
    code, out, _ = howsmooth(
        "flow", "random", "--tokens", "6", "--until", "1", "--frames", "20", "--animation", "none"
    )
    assert code == 0
    assert "6 of 21 times; metrics.csv has all." in out


def test_json_is_all_there_is_on_standard_output_and_quiet_says_nothing(howsmooth: Howsmooth) -> None:
    _, out, _ = howsmooth(*SMALL, "--json", "--out", "a b")
    told = json.loads(out)
    assert (told["source"], told["norms"], told["status"], told["ending"]) == (
        "random",
        None,
        "finished",
        None,
    )
    assert told["frames"] == {"made": 4, "kept": 0}
    assert [row["time"] for row in told["metrics"]] == [0.0, 0.25, 0.5, 0.75, told["last_time"]]
    assert Path(told["files"]["trajectory"]) == Path("a b/trajectory.npz")
    assert all(Path(told["files"][name]).exists() for name in ("store", "trajectory", "metrics"))
    assert howsmooth(*SMALL, "--quiet") == (0, "", "")


def test_growth_is_said_and_written(howsmooth: Howsmooth) -> None:
    options = ["--tokens", "1", "--until", "0.5", "--frames", "2", "--growth", "--method", "rk4"]
    code, out, err = howsmooth("flow", "one-direction", *options)
    assert code == 0
    assert "Perturbations have grown by a factor of 1.6487 [1.648" in out
    assert "the product of the steps' constants is 1.648" in " ".join(out.split())
    assert "Computing 3 growths of perturbations" in err
    assert len(pd.read_csv("howsmooth-flow/growth.csv")) == 3
    _, out, err = howsmooth("flow", "one-direction", *options, "--json")
    check_documented("flow", json.loads(out))
    assert json.loads(out)["growth"][-1]["value"] == pytest.approx(math.exp(0.5), rel=1e-4)
    assert "Computing" not in err


def test_growth_is_rounded_outwards() -> None:
    row = {"value": 64.062543, "lower": 64.062542, "upper": 64.067601, "discretisation_error": None}
    assert "64.063 [64.062, 64.068]" in _growth(pd.DataFrame([row | {"product": 70.0}]))


def test_a_model_says_whether_its_norms_take_part(howsmooth: Howsmooth) -> None:
    Path("prose.txt").write_text("As many words as eight tokens need, or a few more. " * 3)
    options = ["--text", "prose.txt", "--tokens", "5", "--method", "residual", "--norms"]
    code, out, _ = howsmooth("flow", "builtin-decoder", *options, "--json")
    assert code == 0
    told = json.loads(out)
    assert (told["norms"], told["text"], told["last_time"]) == (True, "prose", 4.0)
    assert told["description"].startswith("4 layers in sequence, with norm layers; self-attention, 8 heads")


def test_a_gaussian_measure_that_blows_up_is_kept_until_then(howsmooth: Howsmooth) -> None:
    # One dimension, A = V = 1: the variance s' = 2 s² from 4 is 1 / (1/4 − 2 t), infinite at t = 1/8.
    options = ["--tokens", "20", "--dimension", "1", "--radius", "2", "--closure", "--until", "0.2"]
    options += ["--frames", "8", "--rtol", "1e-5"]
    code, out, _ = howsmooth("flow", "identity", *options)
    assert code == 3
    assert "The Gaussian measure blew up" in out
    with np.load("howsmooth-flow/trajectory.npz") as archive:
        times, variance = archive["times"], archive["covariance"][:, 0, 0]
        assert archive["states"].shape == (len(times), 20, 1)
        np.testing.assert_array_equal(archive["mean"], np.zeros((len(times), 1)))
    assert times[-1] == pytest.approx(0.1)
    np.testing.assert_allclose(variance, 1 / (1 / 4 - 2 * times), rtol=1e-4)
    code, out, _ = howsmooth("flow", "identity", *options, "--json")
    assert code == 3
    told = json.loads(out)
    assert told["status"] == "blew up"
    assert told["ending"]["lower"] <= 1 / 8 <= told["ending"]["upper"]
    assert told["ending"]["upper"] - told["ending"]["lower"] < 1e-3
    assert told["frames"] == {"made": 0, "kept": 4}


def test_interrupted_it_keeps_what_is_finished_and_continues(
    howsmooth: Howsmooth, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(field: Any, state: Any, times: Any, **options: Any) -> Any:
        if times[0] == 0.5:
            raise KeyboardInterrupt
        return flow(field, state, times, **options)

    with monkeypatch.context() as patch:
        patch.setattr("howsmooth.study.flows.flow_run.flow", interrupt)
        code, out, err = howsmooth(*SMALL, "--out", "my out")
    assert (code, out) == (130, "")
    assert "interrupted: 2 frames are saved in my out" in err  # as many as it says then are there
    code, out, _ = howsmooth(*shlex.split(err.splitlines()[-1])[1:])
    assert code == 0
    assert re.search(r"2 frames made in .* s, 2 were already there", out)
    howsmooth(*SMALL, "--out", "whole")
    np.testing.assert_array_equal(trajectory("my out"), trajectory("whole"))


def test_a_refusal_is_one_sentence_and_exit_code_2(howsmooth: Howsmooth) -> None:
    cases = (
        ("--animation", "mp4", "animation: expected one of gif, none, got 'mp4'"),
        ("--tolerance", "0", "tolerance: expected a finite number > 0"),
        ("--start", "text", "a source with tokens of its own for text"),
    )
    for option, value, sentence in cases:
        code, out, err = howsmooth(*SMALL, option, value)
        assert (code, out) == (2, "")
        assert err.splitlines()[-1].startswith("error: ")
        assert sentence in err.splitlines()[-1]
    assert not Path("howsmooth-flow").exists()
    code, out, err = howsmooth("flow", "./identiti")
    assert (code, out) == (2, "")
    assert "The named systems are identity, negative, one-direction, turning, random." in err


def test_the_help_gives_examples_that_can_be_typed(
    howsmooth: Howsmooth, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def stop(plan: Any) -> None:
        seen.append(plan)
        raise KeyboardInterrupt

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("howsmooth.study.flows.flow_system.load_system", stop)
    lines = [line.strip() for line in howsmooth("flow", "--help")[1].splitlines()]
    examples = [line.split("  ")[0] for line in lines if line.startswith("howsmooth flow")]
    assert len(examples) >= 5
    for example in examples:
        code, _, err = howsmooth(*shlex.split(example)[1:])
        assert code == 130
        assert "interrupted: nothing" in err
    assert len(seen) == len(examples)


CHILD = """
import sys, time
from howsmooth.cli import main
from howsmooth.study.store import Store
add = Store.add
def slow(self, rows, *rest, **options):
    add(self, rows, *rest, **options)
    time.sleep(float(sys.argv[1]))
Store.add = slow
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_at_any_moment_and_continued_gives_the_same_file(tmp_path: Path, how: signal.Signals) -> None:
    arguments = ["flow", "random", "--tokens", "9", "--until", "4", "--frames", "60", "--animation", "none"]
    command = [sys.executable, "-c", CHILD]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def count(folder: Path) -> int:
        try:
            with Store.open(folder, write=False) as store:
                return store.count(FrameRow)
        except HowsmoothError:
            return 0

    out = tmp_path / "killed"
    process = subprocess.Popen([*command, "0.05", *arguments, "--out", str(out)], env=environment)
    limit = time.monotonic() + 120
    while count(out) < 15 and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(how)
    assert process.wait(60) == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert 15 <= count(out) < 61
    for folder in (out, tmp_path / "whole"):
        subprocess.run(
            [*command, "0", *arguments, "--out", str(folder)], env=environment, check=True, timeout=120
        )
    names = ("trajectory.npz", "flow.png")
    assert [(out / name).read_bytes() for name in names] == [
        (tmp_path / "whole" / name).read_bytes() for name in names
    ]
