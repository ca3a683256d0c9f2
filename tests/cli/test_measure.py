"""The command line: what is typed, what is said, and the exit code."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from howsmooth.cli import main
from howsmooth.errors import HowsmoothError
from tests._documented import check_documented
from tests._study import FakeModel, digest, installed, make_tools, words

Result = tuple[int, str, str]
Howsmooth = Callable[..., Result]

SMALL = ["--lengths", "2,4,8", "--samples", "5"]


@pytest.fixture
def howsmooth(capsys: pytest.CaptureFixture[str]) -> Howsmooth:
    """Run the command line in this process, with stand-ins for models and texts."""

    def run(*arguments: str, tools: Any = None) -> Result:
        chosen = (
            tools
            or make_tools(
                models={"small": FakeModel(), "builtin-encoder": FakeModel(), "builtin-decoder": FakeModel()},
                texts={"prose": words(400), "alice": words(400)},
            )[0]
        )
        capsys.readouterr()
        with installed(chosen):
            code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_measure_writes_everything_and_says_where(howsmooth: Howsmooth, tmp_path: Path) -> None:
    code, out, err = howsmooth("measure", "small", "--text", "prose", *SMALL, "--out", str(tmp_path))
    assert code == 0
    for name in ("study.sqlite", "measurements.csv", "exponents.csv", "report.html"):
        assert (tmp_path / name).exists()
    assert f"Report: {tmp_path / 'report.html'}" in out
    assert "45 measurements made" in out
    assert "Computing 45 constants" in err
    assert len(pd.read_csv(tmp_path / "measurements.csv")) == 45
    one = ["--lengths", "3", "--samples", "1", "--layers", "0", "--out", str(tmp_path / "one")]
    assert "1 measurement made" in howsmooth("measure", "small", "--text", "prose", *one)[1]


def test_the_largest_exponent_can_be_cited(howsmooth: Howsmooth, tmp_path: Path) -> None:
    arguments = ["measure", "small", "--text", "prose", *SMALL, "--out", str(tmp_path), "--parquet"]
    _, out, _ = howsmooth(*arguments)
    rows = pd.read_csv(tmp_path / "exponents.csv")
    top = rows.loc[rows["slope"].idxmax()]
    said = " ".join(out.split())
    text = f"prose (SHA-256 {digest(words(400))[:12]})"
    assert f"To cite: Local Lipschitz constant of small, scope attention, on {text}: n to the power" in said
    numbers = f"{top['slope']:.3f}, interval of level 0.95 from {top['low']:.3f} to {top['high']:.3f}"
    assert f"{numbers} (the largest of 3 fits, layer {top['layer']}), 15 points from n = 2 to 8" in said
    _, out, _ = howsmooth(*arguments, "--json")
    (line,) = json.loads(out)["citations"]
    assert line in said
    measured, fitted = (
        pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("measurements", "exponents")
    )
    assert measured.attrs["howsmooth"] == fitted.attrs["howsmooth"] == line
    assert len(measured) == 45
    assert list(fitted["slope"]) == list(rows["slope"])


def test_bibtex_is_that_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cite"]) == 0
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"```bibtex\n{capsys.readouterr().out}```" in readme


def test_each_model_has_one_figure_and_each_layer_if_asked_for(howsmooth: Howsmooth, tmp_path: Path) -> None:
    arguments = ["measure", "small", "--text", "prose", *SMALL, "--layers", "0,1", "--out", str(tmp_path)]
    code, out, err = howsmooth(*arguments)
    assert code == 0
    assert "Drawing" not in err
    assert "figures/" in out
    drawn = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert drawn == [f"small--prose--attention--overview.{end}" for end in ("pdf", "png")]
    code, out, err = howsmooth(*arguments, "--figures", "all")
    assert code == 0
    assert "Drawing figures" in err
    assert len(list((tmp_path / "figures").iterdir())) == 6
    assert "figures" in re.findall('id="(.*?)"', (tmp_path / "report.html").read_text("utf-8"))


def test_the_defaults_are_the_two_models_that_ship_and_alice(
    howsmooth: Howsmooth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = howsmooth("measure", *SMALL, "--layers", "0")
    assert code == 0
    table = pd.read_csv(tmp_path / "howsmooth-out" / "measurements.csv")
    assert set(table["model"]) == {"builtin-encoder", "builtin-decoder"}
    assert set(table["text"]) == {"alice"}
    assert set(table["scope"]) == {"attention"}
    assert "builtin-decoder, scope attention, text alice" in out


def test_json_is_all_there_is_on_standard_output(howsmooth: Howsmooth, tmp_path: Path) -> None:
    arguments = ["measure", "small", "--text", "prose", *SMALL, "--out", str(tmp_path), "--json"]
    arguments += ["--figures", "all"]
    code, out, err = howsmooth(*arguments)
    assert code == 0
    said = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    check_documented("measure", said)
    counts = {"made": 45, "kept": 0, "in_store": 45, "unconverged_in_store": 0}
    assert (said["measurements"], said["failed"], said["published"]) == (counts, 0, None)
    assert [row["layer"] for row in said["exponents"]] == [0, 1, 2]
    assert all(0.1 < row["slope"] < 0.4 for row in said["exponents"])
    assert all(row["head"] is None for row in said["exponents"])
    assert said["files"]["figures"]
    assert all(Path(path).exists() for path in said["files"]["figures"])
    assert Path(said["files"]["report"]).exists()
    assert "Computing 45 constants" in err
    code, out, err = howsmooth(*arguments, "--quiet")
    assert (code, err) == (0, "")
    assert json.loads(out)["measurements"]["kept"] == 45


def test_quiet_says_nothing(howsmooth: Howsmooth, tmp_path: Path) -> None:
    assert howsmooth("measure", "small", "--text", "prose", *SMALL, "--out", str(tmp_path), "-q") == (
        0,
        "",
        "",
    )


def test_the_memory_asked_for_reaches_the_measurement(howsmooth: Howsmooth, tmp_path: Path) -> None:
    tools, _ = make_tools()
    given: list[object] = []

    def measure(*arguments: Any, memory: object, **options: Any) -> Any:
        given.append(memory)
        return tools.measure(*arguments, **options)

    words = ("measure", "small", "--text", "prose", *SMALL, "--out", str(tmp_path), "-q")
    assert howsmooth(*words, "--memory", "2GiB", tools=replace(tools, measure=measure))[0] == 0
    assert set(given) == {2 << 30}
    code, _, err = howsmooth(*words, "--memory", "lots")
    assert code == 2
    assert "memory: expected a number of bytes such as 8GiB" in err


def test_threads_are_set_and_recorded(howsmooth: Howsmooth, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    howsmooth("measure", "small", "--text", "prose", *SMALL, "--threads", "3", "--out", str(tmp_path), "-q")
    assert torch.get_num_threads() == before
    assert "threads 3" in (tmp_path / "report.html").read_text()


def test_the_command_is_recorded_as_it_was_typed(howsmooth: Howsmooth, tmp_path: Path) -> None:
    arguments = ["measure", "small", "--text", "prose", *SMALL, "--out", str(tmp_path / "a folder")]
    howsmooth(*arguments)
    report = (tmp_path / "a folder" / "report.html").read_text()
    assert shlex.join(["howsmooth", *arguments]).replace("'", "&#39;") in report


BASE = ["measure", "small", "--text", "prose"]
REFUSED: dict[str, tuple[list[str], str]] = {
    "no such layer": ([*BASE, *SMALL, "--layers", "0,3"], "layers of small, which has 3: 0 to 2"),
    "layers of a whole model": ([*BASE, "--scope", "model", "--layers", "1"], "Leave layers out"),
    "no such model": (["measure", "nothing", "--text", "prose", *SMALL], "model: 'nothing' is not known"),
    "hostile name": (["measure", "small", "--text", "two\nlines\x1b[31m"], "is not there"),
    "endless name": (["measure", "x" * 5000, "--text", "prose", *SMALL], "There is no model"),
    "no such option": ([*BASE, "--foo"], "No such option: --foo"),
    "figures": ([*BASE, "--figures", "none"], "figures: expected one of page, all, got 'none'"),
    "no such command": (
        ["meazure"],
        "No such command 'meazure'. Did you mean 'measure'? See howsmooth --help.",
    ),
    "no number": ([*BASE, "--samples", "many"], "--samples"),
    "bad lengths": ([*BASE, "--lengths", "2:100:2:7"], "lengths: expected numbers and start:stop:step"),
    "bad rtol": ([*BASE, "--rtol", "nan"], "rtol: expected a number from 2e-05 (in float32)"),
    "rtol too fine": ([*BASE, "--rtol", "1e-7"], "For a smaller rtol measure in float64"),
    "bad confidence": ([*BASE, "--confidence", "1"], "confidence: expected a probability from 0.5"),
    "model twice": (["measure", "small", "small", "--text", "prose"], "models: expected each only once"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_sentence_and_exit_code_2(howsmooth: Howsmooth, tmp_path: Path, case: str) -> None:
    arguments, sentence = REFUSED[case]
    tools, work = make_tools(texts={"prose": words(400)})
    out = tmp_path / "out"
    code, said, err = howsmooth(*arguments, *(["--out", str(out)] if len(arguments) > 1 else []), tools=tools)
    last = err.splitlines()[-1]
    assert code == 2
    assert said == ""
    assert last.startswith("error: ")
    assert sentence in last
    assert "Traceback" not in err
    assert err.replace("Reading texts and models\n", "").count("\n") == 1
    assert work.measured == []
    assert not out.exists()


def make_other_study(folder: Path, howsmooth: Howsmooth) -> str:
    howsmooth("measure", "small", "--text", "prose", *SMALL, "--out", str(folder), "--seed", "7")
    return (
        "belongs to another study: it was made with --seed 7, not 0. Choose another --out, or repeat --seed 7"
    )


def make_file(folder: Path, howsmooth: Howsmooth) -> str:
    folder.write_text("a file")
    return "expected a writable folder, got the file"


def make_damage(folder: Path, howsmooth: Howsmooth) -> str:
    folder.mkdir()
    (folder / "study.sqlite").write_text("no database " * 50)
    return "file is not a database"


@pytest.mark.parametrize("make", [make_other_study, make_file, make_damage], ids=lambda make: make.__name__)
def test_an_out_that_cannot_be_used_is_refused_and_left_alone(
    howsmooth: Howsmooth, tmp_path: Path, make: Callable[[Path, Howsmooth], str]
) -> None:
    folder = tmp_path / "out"
    sentence = make(folder, howsmooth)
    files = [folder] if folder.is_file() else [path for path in folder.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    code, out, err = howsmooth("measure", "small", "--text", "prose", *SMALL, "--out", str(folder))
    assert (code, out) == (2, "")
    assert sentence in err
    assert {path: path.read_bytes() for path in before} == before


def test_no_network_needed_for_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("howsmooth 0.")
    for arguments in (["measure", "--help"], ["--help"], []):
        assert main(arguments) == 0
        assert "Usage: howsmooth" in capsys.readouterr().out


def test_interrupted_before_anything_was_measured(howsmooth: Howsmooth, tmp_path: Path) -> None:
    def interrupt(calls: int) -> None:
        raise KeyboardInterrupt

    tools, _ = make_tools(before_measure=interrupt)
    code, out, err = howsmooth(
        "measure", "small", "--text", "prose", *SMALL, "--out", str(tmp_path), tools=tools
    )
    assert (code, out) == (130, "")
    assert "interrupted: nothing was measured yet. Continue with:\n  howsmooth measure small" in err


def test_interrupted_it_says_what_was_kept_and_how_to_go_on(howsmooth: Howsmooth, tmp_path: Path) -> None:
    def interrupt(calls: int) -> None:
        if calls == 4:
            raise KeyboardInterrupt

    folder = str(tmp_path / "my out")
    arguments = ["measure", "small", "--text", "prose", *SMALL, "--out", folder]
    code, out, err = howsmooth(*arguments, tools=make_tools(before_measure=interrupt)[0])
    assert (code, out) == (130, "")
    assert f"interrupted: 20 measurements are saved in {folder}. Continue with:\n" in err
    command = err.splitlines()[-1].strip()
    assert shlex.split(command) == ["howsmooth", *arguments]
    tools, work = make_tools()
    code, out, _ = howsmooth(*shlex.split(command)[1:], tools=tools)
    assert code == 0
    assert len(work.measured) == 25
    assert "25 measurements made" in out
    assert "20 were already there" in out


def test_interrupted_while_drawing_everything_is_kept(
    howsmooth: Howsmooth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("howsmooth.study.measurement_outputs.write_outputs", interrupt)
    code, _, err = howsmooth("measure", "small", "--text", "prose", *SMALL, "--out", str(tmp_path))
    assert code == 130
    assert "interrupted: 45 measurements are saved" in err


@pytest.mark.skipif(os.name != "posix", reason="file names that are not UTF-8")
def test_names_that_are_no_utf8_are_written_out(howsmooth: Howsmooth, tmp_path: Path) -> None:
    name = "caf\udce9"
    tools, _ = make_tools(models={name: FakeModel()}, texts={name: words(400)})
    folder = str(tmp_path / name)
    code, out, _ = howsmooth("measure", name, "--text", name, *SMALL, "--out", folder, tools=tools)
    assert code == 0
    out.encode()
    table = pd.read_csv(Path(folder) / "measurements.csv")
    assert set(table["model"]) == set(table["text"]) == {r"caf\udce9"}


def test_a_refusal_of_many_lines_is_said_in_one(howsmooth: Howsmooth, tmp_path: Path) -> None:
    def refuse(calls: int) -> None:
        raise HowsmoothError("one\nand  two\x1b[31m")

    tools, _ = make_tools(before_measure=refuse)
    code, _, err = howsmooth(
        "measure", "small", "--text", "prose", *SMALL, "--out", str(tmp_path), tools=tools
    )
    assert code == 2
    assert err.splitlines()[-1] == "error: one and two\N{REPLACEMENT CHARACTER}[31m"


def test_a_mistake_of_ours_is_not_hidden(howsmooth: Howsmooth, tmp_path: Path) -> None:
    def fail(calls: int) -> None:
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError, match="ours"):
        howsmooth(
            "measure",
            "small",
            "--text",
            "prose",
            *SMALL,
            "--out",
            str(tmp_path),
            tools=make_tools(before_measure=fail)[0],
        )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="terminals of POSIX")
def test_on_a_terminal_there_is_a_bar_with_the_time_left(tmp_path: Path) -> None:
    process, terminal = pty.fork()
    if not process:
        try:
            os.environ["COLUMNS"] = "160"
            sys.stdout = (tmp_path / "said").open("w")
            sys.stderr = os.fdopen(2, "w")
            tools = make_tools(before_measure=lambda calls: time.sleep(0.05))[0]
            with installed(tools):
                main(["measure", "small", "--text", "prose", *SMALL, "--layers", "0", "--out", str(tmp_path)])
            sys.stdout.flush()
        finally:
            os._exit(0)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other side is closed
        while block := os.read(terminal, 4096):
            shown += block
    os.close(terminal)
    assert os.waitpid(process, 0)[1] == 0
    said = shown.decode()
    for part in ("Computing 15 constants", "left", "━"):
        assert part in said
    assert "Report:" in (tmp_path / "said").read_text()
