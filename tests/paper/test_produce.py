from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from howsmooth.cli import main
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.paper import figure_definition, reproduction
from howsmooth.paper.figure_definition import Finding, PaperFigure
from howsmooth.paper.figure_measurements import Bench
from howsmooth.paper.plotting import Picture
from howsmooth.paper.reproduce_options import FigureOptions
from howsmooth.study.measurement_run import run
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.ranges import Ranges
from howsmooth.study.store import STORE_NAME, Store
from tests._documented import check_documented
from tests._study import installed, make_tools
from tests.paper.test_html_page import PNG


class Pretence:
    """Two figures that note what they are asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, FigureOptions]] = []
        self.before: Callable[[str], None] = lambda name: None

    def figure(self, name: str) -> PaperFigure:
        def measure(bench: Bench) -> int:
            self.before(name)
            self.asked.append((name, bench.options))
            bench.begin()
            return len(self.asked)

        def show(times: int, folder: Path) -> Finding:
            (folder / "a.png").write_bytes(PNG)
            (folder / "a.pdf").write_bytes(b"%PDF")
            return Finding(
                [Picture(folder / "a.pdf", folder / "a.png", "A picture", "It is drawn.", 700)],
                [f"{name} was measured {times} times."],
                [("Times", pd.DataFrame({"times": [times], "value": [float("nan")]}))],
            )

        return PaperFigure(name, f"Title of {name}", f"Figure {name}", "About.", measure, show)


@pytest.fixture
def pretence(monkeypatch: pytest.MonkeyPatch) -> Pretence:
    found = Pretence()
    both = tuple(found.figure(name) for name in ("one", "two"))
    monkeypatch.setattr(figure_definition, "FIGURES", both)
    return found


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Type ``howsmooth reproduce``, whose folder is the one of the test."""

    def type_(words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["reproduce", *words.split(), *([] if "--list" in words else ["--out", str(tmp_path)])])
        return code, *capsys.readouterr()

    return type_


def test_all_figures_are_made_in_their_order_and_stay_on_the_page(
    pretence: Pretence, tmp_path: Path, typed: Any
) -> None:
    (tmp_path / "two").mkdir()  # as if it was begun
    code, out, err = typed("one --quiet --json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    check_documented("reproduce", found)
    (figure,) = found["figures"]
    assert (figure["name"], figure["seen"]) == ("one", ["one was measured 1 times."])
    assert figure["tables"] == [{"caption": "Times", "rows": [{"times": 1, "value": None}]}]
    assert Path(figure["pictures"][0]["pdf"]).is_file()
    page = Path(found["page"])
    assert "Title of two" not in page.read_text()
    code, out, _ = typed("two")
    assert code == 0
    assert "  - two was measured 2 times.\n" in out
    assert "one was measured" not in out
    assert f"Page: {page}" in out
    text = page.read_text()
    assert text.index("Title of one") < text.index("Title of two")
    assert f"howsmooth reproduce two --out {tmp_path}" in text
    assert (tmp_path / "two" / "table-1.csv").read_text() == "times,value\n2,\n"
    assert typed("")[0] == 0
    assert pretence.asked[1:] == [
        ("two", FigureOptions()),
        ("one", FigureOptions()),
        ("two", FigureOptions()),
    ]
    found = json.loads(typed("two --dry-run --json")[1])
    check_documented("reproduce --dry-run", found)
    assert [(one["name"], one["tasks"]) for one in found["figures"]] == [("two", 0)]


def test_what_is_asked_reaches_the_figure(
    pretence: Pretence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Any
) -> None:
    words = (
        "two --model a,x --model b,as-decoder --model a,b,random-init,as-decoder --text x --text y "
        "--layers 0,-1 --lengths 2:6:2 --samples 3 --seed 5 --device cpu:0 --as-published --search --quiet"
    )
    monkeypatch.chdir(tmp_path)
    for name in "xy":
        Path(name).write_text("a text")
    assert typed(words) == (0, "", "")
    ((name, asked),) = pretence.asked
    assert name == "two"
    assert asked.models == (
        ModelSpec("a,x"),
        ModelSpec("b", as_decoder=True),
        ModelSpec("a,b", random_init=True, as_decoder=True),
    )
    assert FigureOptions(models="as-decoder").models == (ModelSpec("as-decoder"),)
    assert (asked.texts, asked.lengths, asked.samples) == (("x", "y"), (2, 4, 6), 3)
    assert asked.layers is not None
    assert asked.layers.text == "0,-1"
    assert (asked.seed, asked.device, asked.as_published, asked.search) == (5, "cpu:0", True, True)


def test_figures_share_models(pretence: Pretence, tmp_path: Path) -> None:
    tools, work = make_tools()

    def load(bench: Bench) -> int:
        bench.loader.load(ModelSpec("small"), "prose")
        bench.begin()
        return 0

    chosen = [replace(one, measure=load) for one in figure_definition.FIGURES]
    with installed(tools):
        reproduction.produce(chosen, FigureOptions(), tmp_path)
    assert work.loads == ["small"]


def test_one_refused_figure_does_not_stop_the_others(pretence: Pretence, tmp_path: Path, typed: Any) -> None:
    def refuse(name: str) -> None:
        if name in refused:
            raise ModelError(f"No heads for {name}.")

    pretence.before, refused = refuse, ["one", "two"]
    assert typed("-q") == (2, "", "error: No heads for one.\n")
    assert not (tmp_path / "reproduce.html").exists()
    refused.remove("two")
    code, out, _ = typed("")
    assert code == 3
    assert "Not made: No heads for one." in out
    page = (tmp_path / "reproduce.html").read_text()
    assert "could not be made" in page
    assert "two was measured" in page


def test_an_interruption_says_how_to_go_on(pretence: Pretence, tmp_path: Path, typed: Any) -> None:
    def interrupt(name: str) -> None:
        if name == interrupted:
            raise KeyboardInterrupt

    pretence.before, interrupted = interrupt, "one"
    code, _, err = typed("one -q")
    assert code == 130
    assert "interrupted: nothing was measured yet. Continue with:" in err
    (tmp_path / "one").mkdir(exist_ok=True)
    (tmp_path / "one" / STORE_NAME).touch()  # as if it had measurements
    code, _, err = typed("one -q")
    assert code == 130
    assert f"saved in {tmp_path}" in err
    assert "There is no page yet, since a figure is drawn once all its measurements are made." in err
    assert not (tmp_path / "reproduce.html").exists()
    assert f"howsmooth reproduce one -q --out {tmp_path}" in err
    (tmp_path / "one" / STORE_NAME).unlink()
    interrupted = "two"
    code, _, err = typed("")
    assert code == 130
    assert "reproduce.html shows the finished figures." in err
    page = (tmp_path / "reproduce.html").read_text()
    assert "one was measured 1 times." in page
    assert "two was measured" not in page


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("three", "figure: expected one of one, two, or a place in the paper such as figure-2, got 'three'"),
        ("--model a --model a", "each only once, got 'a' twice"),
        ("--model a,as-decoder --model a,as-decoder", "'a (as decoder)' twice"),
        ("--lengths 0", "lengths: expected numbers of at least 1"),
        ("one --out FILE", "expected a writable folder"),
    ],
)
def test_impossible_words_are_refused_in_a_sentence(
    pretence: Pretence, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, reason: str
) -> None:
    (tmp_path / "file").write_text("")
    words = arguments.replace("FILE", str(tmp_path / "file")).split()
    if "--out" not in words:
        words += ["--out", str(tmp_path / "out")]
    assert main(["reproduce", *words, "-q"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert reason in said
    assert not (tmp_path / "out").exists()
    assert not any(asked for name, asked in pretence.asked if name != "one")


def test_the_list_names_each_figure_once(typed: Any) -> None:
    code, out, _ = typed("--list")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert names == [one.name for one in figure_definition.FIGURES]
    listed = json.loads(typed("--list --json")[1])
    check_documented("reproduce --list", listed[0])
    assert [one["name"] for one in listed] == names
    # A figure is also named as in the paper.
    chosen = figure_definition.choose_figures(["figure-2", "appendix-c.5", "figure-1"])
    assert [one.name for one in chosen] == ["figure-1", "adversarial", "gamma-r2"]
    with pytest.raises(ArgumentError, match=r"one of figure-1, .* got 'adversaral'\. Is adversarial meant\?"):
        figure_definition.choose_figures(["adversaral"])


def test_figure_1_of_a_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = tmp_path / "book.txt"
    book.write_text(
        " ".join(f"The value of name {k} is read when the function is called." for k in range(99))
    )
    words = f"reproduce figure-1 --model builtin-encoder --text {book} --lengths 2,4,8 --samples 2 -q --json"
    assert main([*words.split(), "--out", str(tmp_path / "out")]) == 0
    (figure,) = json.loads(capsys.readouterr().out)["figures"]
    (row,) = figure["tables"][0]["rows"]
    assert (tmp_path / "out" / "figure-1" / "figure-1.pdf").is_file()
    # The very numbers of a study of the layer.
    plan = Plan(
        (ModelSpec("builtin-encoder"),),
        (str(book),),
        lengths=(2, 4, 8),
        samples=2,
        layers=Ranges.parse("0", "layers"),
    )
    run(plan, tmp_path / "study")
    with Store.open(tmp_path / "study", write=False) as store:
        rows = store.contents().measurements
    assert row["sequences"] == len(rows) == 6
    slope = np.polyfit(np.log(rows["n"]), np.log(rows["lipschitz"]), 1)[0]
    assert row["exponent"] == pytest.approx(slope, rel=1e-9)
