"""``howsmooth flow``: what is written, printed, continued and refused."""

from __future__ import annotations

import json
import math
import os
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
from howsmooth.errors import HowsmoothError
from howsmooth.models.parameter_files import save_parameters
from howsmooth.study.flows import publish
from howsmooth.study.flows.store import FlowStore
from tests._cases import random_attention, tokens
from tests._sources import small_tools

Result = tuple[int, str, str]
Howsmooth = Callable[..., Result]

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["flow", "random", "--tokens", "6", "--until", "1", "--frames", "4"]


@pytest.fixture
def howsmooth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Howsmooth:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("howsmooth.study.tools.default_tools", small_tools)

    def draw(view: Any, folder: Path) -> publish.FlowPicture:
        return publish.FlowPicture(folder / "flow.png", folder / "flow.pdf", view.title)

    def animate(view: Any, folder: Path, kind: str, *_: Any) -> Path | None:
        return None if kind == "none" else folder / f"flow.{kind}"

    monkeypatch.setattr(publish, "draw_flow", draw)
    monkeypatch.setattr(publish, "animate_flow", animate)

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def trajectory(folder: str | Path = "howsmooth-flow") -> np.ndarray:
    with np.load(Path(folder) / "trajectory.npz", allow_pickle=False) as archive:
        return np.asarray(archive["states"])


def test_everything_is_written_and_said(howsmooth: Howsmooth) -> None:
    code, out, err = howsmooth(*SMALL)
    assert code == 0
    names = {path.name for path in Path("howsmooth-flow").iterdir() if not path.name.startswith(".")}
    assert names == {"flow.sqlite", "metrics.csv", "trajectory.npz"}
    assert trajectory().shape == (5, 6, 2)
    assert pd.read_csv("howsmooth-flow/metrics.csv")["time"].tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert "random: queries, keys and values by Gaussian matrices; softmax attention" in out
    assert "6 tokens in dimension 2, until t = 1" in out
    assert "4 frames made" in out
    assert f"Animation: {Path('howsmooth-flow/flow.gif')}" in out
    assert err.splitlines() == ["Reading", "Integrating", "Measuring clusters", "Drawing"]
    assert "Animation" not in howsmooth(*SMALL, "--animation", "none")[1]


def test_the_same_command_again_makes_nothing(howsmooth: Howsmooth) -> None:
    howsmooth(*SMALL)
    before = trajectory()
    code, out, err = howsmooth(*SMALL)
    assert code == 0
    assert "0 frames made" in out
    assert "4 were there already" in out
    assert "Integrating" not in err
    np.testing.assert_array_equal(trajectory(), before)
    code, out, err = howsmooth(*SMALL, "--seed", "1")
    assert (code, out) == (2, "")
    assert "holds another flow: it was made with --seed 0, not 1." in err


def test_json_is_all_there_is_on_standard_output(howsmooth: Howsmooth) -> None:
    _, out, _ = howsmooth(*SMALL, "--json", "--out", "a b")
    told = json.loads(out)
    assert (told["source"], told["status"], told["ending"], told["last_time"]) == (
        "random",
        "finished",
        None,
        1.0,
    )
    assert told["frames"] == {"made": 4, "kept": 0}
    assert [row["time"] for row in told["metrics"]] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert Path(told["files"]["trajectory"]) == Path("a b/trajectory.npz")
    assert Path(told["files"]["trajectory"]).exists()


def test_growth_is_said_and_written(howsmooth: Howsmooth) -> None:
    options = ["--tokens", "1", "--until", "0.5", "--frames", "2", "--growth", "--method", "rk4"]
    code, out, err = howsmooth("flow", "one-direction", *options)
    assert code == 0
    assert "Perturbations have grown 1.6487 times [1.648" in out
    assert "the product of the steps' constants is 1.648" in out
    assert "Measuring the growth of perturbations" in err
    assert len(pd.read_csv("howsmooth-flow/growth.csv")) == 3
    _, out, err = howsmooth("flow", "one-direction", *options, "--json")
    assert json.loads(out)["growth"][-1]["value"] == pytest.approx(math.exp(0.5), rel=1e-4)
    assert "Measuring the growth" not in err


def test_quiet_says_nothing(howsmooth: Howsmooth) -> None:
    assert howsmooth(*SMALL, "--quiet") == (0, "", "")


def test_a_model_and_a_file(howsmooth: Howsmooth) -> None:
    code, out, _ = howsmooth("flow", "small", "--text", "prose", "--tokens", "5", "--method", "residual")
    assert code == 0
    assert "small: 2 layers in sequence, without norm layers; self-attention, 3 heads, unmasked" in out
    assert trajectory().shape == (3, 5, 6)
    options = ["--text", "prose", "--tokens", "5", "--method", "residual", "--norms", "--out", "n"]
    code, out, _ = howsmooth("flow", "small", *options)
    assert code == 0
    assert "small: 2 layers in sequence, with norm layers; self-attention, 3 heads, unmasked" in out
    assert json.loads(howsmooth("flow", "small", *options, "--json")[1])["norms"] is True
    f, x = random_attention(3), tokens(4, 5, 6)
    save_parameters("head.npz", f, x)
    code, out, _ = howsmooth(
        "flow", "head.npz", "--method", "euler", "--until", "0.5", "--step", "0.5", "--out", "f"
    )
    assert code == 0
    np.testing.assert_allclose(trajectory("f"), [x, x + 0.5 * f(x)], rtol=1e-12)
    drawn = ["--start", "gaussian", "--tokens", "9", "--method", "euler", "--until", "0.1", "--frames", "1"]
    code, _, err = howsmooth("flow", "head.npz", *drawn, "--out", "g")
    assert code == 0, err
    assert trajectory("g").shape == (2, 9, 6)


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
    add = FlowStore.add

    def interrupt(store: FlowStore, frame: Any, run: int) -> None:
        add(store, frame, run)
        if frame.place == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FlowStore, "add", interrupt)
        code, out, err = howsmooth(*SMALL, "--out", "my out")
    assert (code, out) == (130, "")
    assert "interrupted: 1 of 4 frames are kept in my out" in err
    code, out, _ = howsmooth(*shlex.split(err.splitlines()[-1])[1:])
    assert code == 0
    assert "2 frames made" in out
    howsmooth(*SMALL, "--out", "whole")
    np.testing.assert_array_equal(trajectory("my out"), trajectory("whole"))


def test_interrupted_before_anything(howsmooth: Howsmooth, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("howsmooth.study.flows.opening.open_system", interrupt)
    code, _, err = howsmooth(*SMALL)
    assert code == 130
    assert "interrupted. What was finished before is kept." in err
    assert not Path("howsmooth-flow").exists()


REFUSED: dict[str, tuple[list[str], str]] = {
    "no such source": (["flow", "nothing", "--text", "prose"], "'nothing' is not known"),
    "no file": (["flow", "none.npz"], "There is no parameter file"),
    "until zero": ([*SMALL, "--until", "0"], "until: expected a finite number > 0, got 0"),
    "until nan": ([*SMALL, "--until", "nan"], "until: expected a finite number > 0, got nan"),
    "tokens zero": ([*SMALL, "--tokens", "0"], "tokens: expected a number from 1 to"),
    "too large": ([*SMALL, "--tokens", "99999999", "--dimension", "99999"], "coordinates together"),
    "frames": ([*SMALL, "--frames", "0"], "frames: expected a number from 1 to 10000, got 0"),
    "radius": ([*SMALL, "--radius", "-1"], "radius: expected a finite number > 0, got -1"),
    "beta": ([*SMALL, "--beta", "0"], "beta: expected a finite number > 0"),
    "seed": ([*SMALL, "--seed", "-1"], "seed: expected an integer from 0"),
    "method": ([*SMALL, "--method", "heun"], "method: expected one of dopri5, dopri8"),
    "step": ([*SMALL, "--step", "0.1"], "step: expected none with the method dopri5"),
    "rtol": ([*SMALL, "--rtol", "2"], "rtol: expected a number from 1e-13"),
    "tolerance": ([*SMALL, "--tolerance", "0"], "tolerance: expected a finite number > 0"),
    "attention": ([*SMALL, "--attention", "linear"], "--attention"),
    "animation": ([*SMALL, "--animation", "avi"], "--animation"),
    "sinkhorn": (
        [*SMALL, "--attention", "sinkhorn", "--causal"],
        "as no causal weights are doubly stochastic",
    ),
    "sphere": ([*SMALL, "--sphere", "--rescale"], "rescale: expected --rescale without --sphere"),
    "closure": ([*SMALL, "--closure", "--start", "sphere"], "closure: expected tokens drawn with"),
    "causal closure": ([*SMALL, "--closure", "--causal"], "unmasked"),
    "rescaled l2": ([*SMALL, "--rescale", "--attention", "l2"], "attention: expected self-attention"),
    "start": (
        [*SMALL, "--start", "nowhere"],
        "start: expected auto, gaussian, sphere, text, file, or a name",
    ),
    "text": ([*SMALL, "--start", "text"], "start: expected a source with tokens of its own for text"),
    "no start": ([*SMALL, "--start", "none.npy"], "a file that cannot be read: No such file"),
    "pickle": ([*SMALL, "--start", "pickled.npy"], "it holds no array of numbers"),
    "no X": ([*SMALL, "--start", "other.npz"], "it has no array X"),
    "infinite": ([*SMALL, "--start", "infinite.npy"], "start: expected finite numbers in infinite.npy"),
    "cube": ([*SMALL, "--start", "cube.npy"], "start: expected an array (n, d) of numbers in cube.npy"),
    "count": ([*SMALL, "--start", "good.npy"], "tokens: expected 3, as in good.npy, got 6"),
    "layers": ([*SMALL, "--layers", "0"], "source: expected a model with --layers, got the system random"),
    "norms": ([*SMALL, "--norms"], "source: expected a model with --norms, got the system random"),
    "norms of a file": (["flow", "head.npz", "--norms"], "expected a model with --norms, got the parameter"),
    "norms rescaled": (
        ["flow", "small", "--norms", "--rescale"],
        "norms: expected --norms without --rescale",
    ),
    "norms, Gaussian": (
        ["flow", "small", "--norms", "--closure"],
        "norms: expected --norms without --closure",
    ),
    "a model": (["flow", "small", "--text", "prose", "--beta", "2"], "with --beta"),
    "no layer": (["flow", "small", "--text", "prose", "--layers", "2"], "layers of small, which has 2"),
    "too long": (["flow", "small", "--text", "prose", "--until", "3"], "each of the 2 layers lasts one unit"),
    "rescaled layers": (["flow", "small", "--text", "prose", "--rescale"], "rescale: expected one layer"),
    "a file": (["flow", "head.npz", "--start", "file"], "start: expected a file with tokens X"),
    "not square": (["flow", "wide.npz", "--start", "gaussian"], "values have the dimension of its tokens"),
    "misfit": (["flow", "head.npz", "--start", "good.npy"], "start: expected tokens (n, 6)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_sentence_and_exit_code_2(howsmooth: Howsmooth, case: str) -> None:
    save_parameters("head.npz", random_attention(1))
    save_parameters("wide.npz", random_attention(1, d_out=None))
    np.save("pickled.npy", np.array([{}], dtype=object))
    np.savez("other.npz", Y=np.eye(2))
    np.save("infinite.npy", np.full((2, 2), math.inf))
    np.save("cube.npy", np.zeros((2, 2, 2)))
    np.save("good.npy", np.eye(3))
    arguments, sentence = REFUSED[case]
    code, out, err = howsmooth(*arguments)
    last = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("error: ")
    assert sentence in last
    assert not Path("howsmooth-flow").exists()


def test_mp4_needs_ffmpeg(howsmooth: Howsmooth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matplotlib.animation.FFMpegWriter.isAvailable", lambda: False)
    code, _, err = howsmooth(*SMALL, "--animation", "mp4")
    assert code == 2
    assert "as there is no program ffmpeg here, got mp4. Install ffmpeg, or choose --animation gif." in err


def test_an_out_that_cannot_be_used(howsmooth: Howsmooth) -> None:
    Path("file").write_text("")
    code, _, err = howsmooth(*SMALL, "--out", "file")
    assert code == 2
    assert "out: expected a folder, got the file file" in err
    Path("damaged").mkdir()
    Path("damaged/flow.sqlite").write_text("no database " * 50)
    code, _, err = howsmooth(*SMALL, "--out", "damaged")
    assert code == 2
    assert "file is not a database" in err


def test_the_help_gives_examples_that_can_be_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    seen: list[Any] = []

    def stop(plan: Any, tools: Any) -> None:
        seen.append(plan)
        raise KeyboardInterrupt

    monkeypatch.setattr("howsmooth.study.flows.opening.open_system", stop)
    main(["flow", "--help"])
    said = capsys.readouterr().out
    lines = [line.strip() for line in said.splitlines()]
    examples = [line.split("  ")[0] for line in lines if line.startswith("howsmooth flow")]
    assert len(examples) >= 5
    for example in examples:
        assert main(shlex.split(example)[1:]) == 130
    assert len(seen) == len(examples)


CHILD = """
import sys, time
from howsmooth.study.flows import run, store
from howsmooth.cli import main
add = store.FlowStore.add
def slow(self, frame, number):
    add(self, frame, number)
    time.sleep(float(sys.argv[1]))
store.FlowStore.add = slow
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
            with FlowStore.open(folder, write=False) as store:
                return store.count()
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
