from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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


def test_all_figures_are_made_in_their_order(
    pretence: Pretence, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "--out", str(tmp_path / "out")]) == 0
    assert [name for name, _ in pretence.asked] == ["one", "two"]
    said = capsys.readouterr()
    assert "  - one was measured 1 times.\n" in said.out
    assert f"Page: {tmp_path / 'out' / 'reproduce.html'}" in said.out
    page = (tmp_path / "out" / "reproduce.html").read_text()
    assert page.index("Title of one") < page.index("Title of two")
    assert f"howsmooth reproduce --out {tmp_path / 'out'}" in page
    assert (tmp_path / "out" / "two" / "table-1.csv").read_text() == "times,value\n2,\n"


def test_what_is_asked_reaches_the_figure(
    pretence: Pretence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "reproduce two --model a --model b,as-decoder --model c,random-init,as-decoder --text x --text y "
        "--layers 0,-1 --lengths 2:6:2 --samples 3 --seed 5 --device cpu:0 --as-published --search --quiet "
        f"--out {tmp_path}"
    )
    monkeypatch.chdir(tmp_path)
    for name in "xy":
        Path(name).write_text("a text")
    assert main(words.split()) == 0
    ((name, asked),) = pretence.asked
    assert name == "two"
    assert asked.models == (
        ModelSpec("a"),
        ModelSpec("b", as_decoder=True),
        ModelSpec("c", random_init=True, as_decoder=True),
    )
    assert (asked.texts, asked.lengths, asked.samples) == (("x", "y"), (2, 4, 6), 3)
    assert asked.layers is not None
    assert asked.layers.text == "0,-1"
    assert (asked.seed, asked.device, asked.as_published, asked.search) == (5, "cpu:0", True, True)


def test_defaults_leave_the_choice_to_the_figure(pretence: Pretence, tmp_path: Path) -> None:
    assert main(["reproduce", "one", "-q", "--out", str(tmp_path)]) == 0
    ((_, asked),) = pretence.asked
    assert asked == FigureOptions()


def test_the_result_for_machines(
    pretence: Pretence, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "two", "--json", "--quiet", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    found = json.loads(said.out)
    check_documented("reproduce", found)
    (figure,) = found["figures"]
    assert figure["name"] == "two"
    assert figure["seen"] == ["two was measured 1 times."]
    assert figure["tables"] == [{"caption": "Times", "rows": [{"times": 1, "value": None}]}]
    assert Path(found["page"]).is_file()
    assert Path(figure["pictures"][0]["pdf"]).is_file()


def test_the_times_for_machines(
    pretence: Pretence, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "two", "--dry-run", "--json", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    check_documented("reproduce --dry-run", found)
    assert [(one["name"], one["tasks"]) for one in found["figures"]] == [("two", 0)]


def test_what_was_made_before_stays_on_the_page(
    pretence: Pretence, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "two", "-q", "--out", str(tmp_path)]) == 0
    assert main(["reproduce", "one", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "reproduce.html").read_text()
    assert "one was measured 2 times." in page
    assert "two was measured 1 times." in page
    assert "two was measured" not in capsys.readouterr().out
    assert main(["reproduce", "one", "-q", "--json", "--out", str(tmp_path)]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["figures"]] == ["one"]


def test_after_an_interruption_the_page_has_the_finished_figures(
    pretence: Pretence, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str) -> None:
        if name == "two":
            raise KeyboardInterrupt

    pretence.before = interrupt
    assert main(["reproduce", "--out", str(tmp_path)]) == 130
    said = capsys.readouterr().err
    assert "finished figures and measurements are saved" in said
    assert "reproduce.html shows the finished figures." in said
    page = (tmp_path / "reproduce.html").read_text()
    assert "one was measured 1 times." in page
    assert "two was measured" not in page


def test_a_figure_is_also_named_as_in_the_paper() -> None:
    (figure,) = figure_definition.choose_figures(["figure-2"])
    assert figure.name == "adversarial"
    assert [one.name for one in figure_definition.choose_figures(["appendix-c.5", "figure-1"])] == [
        "figure-1",
        "gamma-r2",
    ]
    with pytest.raises(ArgumentError, match=r"one of figure-1, .* got 'adversaral'\. Is adversarial meant\?"):
        figure_definition.choose_figures(["adversaral"])


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


def test_what_was_begun_only_is_not_on_the_page(pretence: Pretence, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir(parents=True)
    assert main(["reproduce", "one", "-q", "--out", str(tmp_path)]) == 0
    assert "Title of two" not in (tmp_path / "reproduce.html").read_text()


def test_one_refused_figure_does_not_stop_the_others(
    pretence: Pretence, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> None:
        if name == "one":
            raise ModelError("This model has no heads.")

    pretence.before = refuse
    assert main(["reproduce", "--out", str(tmp_path)]) == 3
    assert "Not made: This model has no heads." in capsys.readouterr().out
    page = (tmp_path / "reproduce.html").read_text()
    assert "could not be made" in page
    assert "two was measured" in page


def test_if_nothing_can_be_made_it_is_refused(
    pretence: Pretence, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> None:
        raise ModelError(f"No heads for {name}.")

    pretence.before = refuse
    assert main(["reproduce", "-q", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: No heads for one.\n"
    assert not (tmp_path / "reproduce.html").exists()


def test_an_interruption_says_how_to_go_on(
    pretence: Pretence, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    pretence.before = interrupt
    assert main(["reproduce", "one", "-q", "--out", str(tmp_path)]) == 130
    said = capsys.readouterr().err
    assert "interrupted: nothing was measured yet. Continue with:" in said
    (tmp_path / "one").mkdir(exist_ok=True)
    (tmp_path / "one" / STORE_NAME).touch()  # as if it had measurements
    assert main(["reproduce", "one", "-q", "--out", str(tmp_path)]) == 130
    said = capsys.readouterr().err
    assert f"saved in {tmp_path}" in said
    assert "There is no page yet, since a figure is drawn once all its measurements are made." in said
    assert not (tmp_path / "reproduce.html").exists()
    assert f"howsmooth reproduce one -q --out {tmp_path}" in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["three"],
            "figure: expected one of one, two, or a place in the paper such as figure-2, got 'three'",
        ),
        (["--model", "a", "--model", "a"], "each only once, got 'a' twice"),
        (["--model", "a,as-decoder", "--model", "a,as-decoder"], "'a (as decoder)' twice"),
        (["--lengths", "0"], "lengths: expected numbers of at least 1"),
    ],
)
def test_impossible_words_are_refused_in_a_sentence(
    pretence: Pretence, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert main(["reproduce", *arguments, "-q", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert reason in said
    assert not (tmp_path / "out").exists()
    assert not pretence.asked


def test_a_folder_that_cannot_be_written_is_refused(
    pretence: Pretence, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["reproduce", "one", "-q", "--out", str(tmp_path / "file")]) == 2
    assert "writable folder" in capsys.readouterr().err


def test_the_list_names_each_figure_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [one.name for one in figure_definition.FIGURES]
    assert lines[0].startswith("figure-1 ")
    assert main(["reproduce", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    check_documented("reproduce --list", listed[0])
    assert [one["name"] for one in listed] == [line.split()[0] for line in lines]


def test_options_behind_a_name_leave_other_commas_alone() -> None:
    both = ModelSpec("a,b", random_init=True, as_decoder=True)
    assert FigureOptions(models=["a,b,random-init,as-decoder"]).models == (both,)
    assert FigureOptions(models="as-decoder").models == (ModelSpec("as-decoder"),)
    with pytest.raises(ArgumentError):
        FigureOptions(models=["a,as-decoder", "a,as-decoder"])


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
