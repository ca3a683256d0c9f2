"""``howsmooth attack``: what is found and kept, what is printed, what is refused."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import howsmooth as hs
from howsmooth.bounds import best, norm_radius
from howsmooth.cli import main
from howsmooth.models.parameter_files import read_parameter_file, save_parameters
from howsmooth.study import attack_tables
from howsmooth.study.attack_plan import attack_tools
from tests._cases import dense_jacobian, random_attention
from tests._cases import tokens as gaussian
from tests._sources import HEADS, AttackWork, SmallModel, norm, small_tools

Result = tuple[int, str, str]
Howsmooth = Callable[..., Result]

SMALL = ["attack", "small", "--text", "prose", "--lengths", "3,4,6"]


@pytest.fixture
def howsmooth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Howsmooth:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.chdir(tmp_path)
    drawn = attack_tables.draw_attacks

    def run(
        *arguments: str, work: AttackWork | None = None, model: SmallModel | None = None, draw: bool = False
    ) -> Result:
        tools = (work or AttackWork()).tools()
        monkeypatch.setattr("howsmooth.study.attack_plan.attack_tools", lambda: tools)
        monkeypatch.setattr("howsmooth.study.tools.default_tools", lambda: small_tools(model))
        monkeypatch.setattr(attack_tables, "draw_attacks", drawn if draw else lambda *_: [])
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def summary(folder: Path | str = "howsmooth-attack") -> pd.DataFrame:
    return pd.read_csv(Path(folder) / "summary.csv")


def test_everything_is_written_and_said(howsmooth: Howsmooth) -> None:
    code, out, err = howsmooth(*SMALL, draw=True)
    assert code == 0
    for name in ("attacks.sqlite", "attacks.csv", "summary.csv", "exponents.csv", "heads.csv"):
        assert (Path("howsmooth-attack") / name).exists()
    table = summary()
    assert list(zip(table["layer"], table["head"], table["n"], strict=True)) == [
        (layer, 0, n) for layer in (0, 1) for n in (3, 4, 6)
    ]
    assert "small, layer 0, head 0, scope head, unmasked, R = " in out
    assert "small, layer 1, head 0, scope head, causal, R = " in out
    assert "growth: found like n^" in out
    assert "6 attacks made" in out
    assert "Attacking 6 attentions and lengths" in err
    figures = {path.name for path in (Path("howsmooth-attack") / "figures").glob("*.png")}
    assert figures == {
        "small--attack--overview.png",
        "small--gamma.png",
        "small--attack--layer-00--head-00.png",
        "small--attack--layer-01--head-00.png",
    }


def test_what_was_found_is_saved_and_reaches_its_constant(howsmooth: Howsmooth) -> None:
    howsmooth(*SMALL, "--layers", "1", "--lengths", "6")
    (row,) = summary().to_dict("records")
    found = read_parameter_file(Path("howsmooth-attack") / str(row["file"]))
    assert found.x is not None
    assert found.x.shape[0] == 6
    assert found.attention.causal
    true = float(torch.linalg.matrix_norm(dense_jacobian(found.attention, found.x), 2))
    assert row["found"] == pytest.approx(true, rel=1e-4)
    assert float(found.x.norm(dim=1).max()) <= row["radius"]
    rows = pd.read_csv("howsmooth-attack/attacks.csv")
    inside = rows[(rows["kind"] != "upper") & (rows["radius_max"] <= row["radius"] * (1 + 1e-9))]
    assert row["found"] == inside["value"].max()
    assert row["found_by"] == inside.loc[inside["value"].idxmax(), "name"]


def test_the_summary_holds_the_ratios(howsmooth: Howsmooth) -> None:
    howsmooth(*SMALL)
    rows = pd.read_csv("howsmooth-attack/attacks.csv")
    for row in summary().to_dict("records"):
        mine = rows[(rows["layer"] == row["layer"]) & (rows["n"] == row["n"])].set_index("name")["value"]
        assert row["paper"] == mine["two_cluster"]
        assert row["construction"] == max(
            mine[["two_cluster", "two_cluster, other eigenvalue", "tie"]].to_list()
        )
        assert row["found_to_paper"] == pytest.approx(row["found"] / row["paper"])
        assert row["found_to_upper"] == pytest.approx(row["found"] / 1e6)
        assert row["upper_by"] == "theorem"


def test_several_heads_have_the_best_of_the_papers_constructions(howsmooth: Howsmooth) -> None:
    howsmooth(*SMALL, "--scope", "attention", "--layers", "0", "--lengths", "5")
    rows = pd.read_csv("howsmooth-attack/attacks.csv").set_index("name")["value"]
    (row,) = summary().to_dict("records")
    assert math.isnan(row["head"])
    assert row["paper"] == max(rows[[f"two_cluster, head {h}" for h in range(HEADS)]].to_list())


def test_the_radius_is_that_of_the_norm_or_of_the_tokens(howsmooth: Howsmooth) -> None:
    work = AttackWork()
    howsmooth(*SMALL, "--lengths", "4", work=work)
    norm_first, tokens_second = (radius for _, radius, _ in work.ascents)
    assert norm_first == norm_radius(norm())
    longest = tokens_second
    work = AttackWork()
    howsmooth(*SMALL, "--lengths", "4", "--radius", "data", "--out", "data", work=work)
    assert [radius for _, radius, _ in work.ascents] == [longest, longest]  # the same tokens in both layers
    assert longest < norm_first
    work = AttackWork()
    howsmooth(*SMALL, "--lengths", "4", "--radius", "2.5", "--out", "given", work=work)
    assert [radius for _, radius, _ in work.ascents] == [2.5, 2.5]


def test_gammas_of_all_heads_are_tabulated_whatever_is_attacked(howsmooth: Howsmooth) -> None:
    howsmooth(*SMALL, "--layers", "0", "--lengths", "4")
    heads = pd.read_csv("howsmooth-attack/heads.csv")
    assert len(heads) == 2 * HEADS
    for row in heads.to_dict("records"):
        f = SmallModel().attention(int(row["layer"]), 64).to(dtype=torch.float64)
        h = int(row["head"])
        values = torch.linalg.eigvals(f.scale * f.key[h].mT @ f.query[h])
        real = values.real[values.imag.abs() < 1e-12]
        low, high = float(real.min()), float(real.max())
        assert row["gamma_min"] == pytest.approx(low, abs=1e-9)
        assert row["gamma_max"] == pytest.approx(high, abs=1e-9)
        assert row["gamma"] == pytest.approx(max(-low, high / 8), abs=1e-9)


def test_lengths_beyond_the_model_have_no_tokens_but_are_attacked(howsmooth: Howsmooth) -> None:
    code, _, _ = howsmooth(*SMALL, "--lengths", "4,5", "--layers", "0", model=SmallModel(max_length=4))
    table = summary()
    assert code == 0
    assert table["tokens"].isna().tolist() == [False, True]
    assert (table["found"] > 0).all()


def test_tokens_outside_the_ball_are_told_but_not_counted_as_found(howsmooth: Howsmooth) -> None:
    howsmooth(*SMALL, "--lengths", "4", "--layers", "0", "--radius", "0.01")
    (row,) = summary().to_dict("records")
    assert row["tokens"] > row["found"]
    assert row["found_by"] != "tokens"


def test_the_same_command_again_attacks_nothing_and_more_lengths_only_those(howsmooth: Howsmooth) -> None:
    howsmooth(*SMALL)
    before = summary()
    work = AttackWork()
    code, out, _ = howsmooth(*SMALL, work=work)
    assert (code, work.ascents) == (0, [])
    assert "0 attacks made" in out
    assert "6 were there already" in out
    pd.testing.assert_frame_equal(summary(), before)
    howsmooth(*SMALL, "--lengths", "3,4,6,9", work=work)
    assert [n for n, *_ in work.ascents] == [9, 9]
    fresh = AttackWork()
    howsmooth(*SMALL, "--lengths", "9", "--out", "fresh", work=fresh)
    assert fresh.ascents == work.ascents  # the seed of one length does not depend on the others


def test_interrupted_it_keeps_what_is_finished_and_continues(howsmooth: Howsmooth) -> None:
    def interrupt(calls: int) -> None:
        if calls == 4:
            raise KeyboardInterrupt

    code, out, err = howsmooth(*SMALL, "--out", "my out", work=AttackWork(interrupt))
    assert (code, out) == (130, "")
    assert "interrupted: 4 finished attacks are kept in my out" in err
    command = err.splitlines()[-1].strip()
    work = AttackWork()
    code, out, _ = howsmooth(*shlex.split(command)[1:], work=work)
    assert code == 0
    assert len(work.ascents) == 2
    whole = AttackWork()
    howsmooth(*SMALL, "--out", "whole", work=whole)
    columns = ["layer", "n", "found", "paper", "file"]
    pd.testing.assert_frame_equal(summary("my out")[columns], summary("whole")[columns])


def test_interrupted_before_anything(howsmooth: Howsmooth, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("howsmooth.study.sources.open_source", interrupt)
    code, _, err = howsmooth(*SMALL)
    assert code == 130
    assert "interrupted: nothing had been attacked yet." in err


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["--seed", "1"], "it was made with seed 0, not 1"),
        (["--steps", "7"], "it was made with steps 30, not 7"),
        (["--radius", "3"], "it was made with radius auto, not 3.0"),
        (["--scope", "attention"], "it was made with scope head, not attention"),
    ],
)
def test_other_attacks_are_not_mixed_into_a_folder(
    howsmooth: Howsmooth, option: list[str], sentence: str
) -> None:
    howsmooth(*SMALL, "--lengths", "4")
    before = summary()
    code, _, err = howsmooth(*SMALL, "--lengths", "4", *option)
    assert code == 2
    assert sentence in err
    pd.testing.assert_frame_equal(summary(), before)


def test_attacks_at_sequences_of_an_earlier_kind_are_not_mixed_with_others(howsmooth: Howsmooth) -> None:
    howsmooth(*SMALL, "--lengths", "4")
    with contextlib.closing(sqlite3.connect("howsmooth-attack/attacks.sqlite")) as store, store:
        (words,) = store.execute("SELECT identity FROM studies").fetchone()
        identity = json.loads(words)
        assert identity.pop("windows") == "disjoint"
        store.execute("UPDATE studies SET identity = ?", (json.dumps(identity),))
    code, _, err = howsmooth(*SMALL, "--lengths", "4,6")
    assert code == 2
    assert "made with windows of an earlier kind, not disjoint. Choose another --out.\n" in err


def test_rotary_positions_are_attacked_without_constructions_or_bounds(howsmooth: Howsmooth) -> None:
    code, _, _ = howsmooth(*SMALL, "--lengths", "4,8", model=SmallModel(rotary=True), draw=True)
    table = summary()
    assert code == 0
    assert table["paper"].isna().all()
    assert table["upper"].isna().all()
    assert (table["found"] > 0).all()
    assert pd.read_csv("howsmooth-attack/heads.csv").empty


def test_a_mask_is_that_of_each_length(howsmooth: Howsmooth) -> None:
    code, _, _ = howsmooth(*SMALL, "--lengths", "4,8", "--layers", "0", model=SmallModel(masked=True))
    assert code == 0
    for n in (4, 8):
        (file,) = summary().query("n == @n")["file"]
        found = read_parameter_file(Path("howsmooth-attack") / file).attention
        assert found.mask is not None
        assert found.mask.shape == (n, n)


def test_json_is_all_there_is_on_standard_output(howsmooth: Howsmooth) -> None:
    code, out, _ = howsmooth(*SMALL, "--json")
    said = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert code == 0
    assert (said["attacked"], said["kept"], said["source"], said["seed"]) == (6, 0, "small", 0)
    assert len(said["attacks"]) == 6
    assert {row["series"] for row in said["exponents"]} == {"found", "paper", "upper"}
    assert len(said["heads"]) == 2 * HEADS
    assert Path(said["files"]["summary"]).exists()
    assert howsmooth(*SMALL, "-q") == (0, "", "")


def test_a_parameter_file_is_attacked_with_the_real_tools(
    howsmooth: Howsmooth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = random_attention(40, heads=1, d_out=None, biases=False)
    save_parameters("head.npz", attention, gaussian(3, 4, attention.d))
    monkeypatch.setattr(attack_tables, "draw_attacks", lambda *_: [])
    options = ["--lengths", "4", "--radius", "3", "--steps", "3", "--restarts", "2", "--json", "-q"]
    code = main(["attack", "head.npz", *options])
    assert code == 0
    (row,) = json.loads(capsys.readouterr().out)["attacks"]
    bound = best(attention, length=4, radius=3.0)
    assert row["paper"] <= row["found"] <= row["upper"]
    assert (row["upper"], row["upper_by"]) == (bound.value, bound.name)
    assert row["tokens"] == pytest.approx(
        float(torch.linalg.matrix_norm(dense_jacobian(attention, gaussian(3, 4, attention.d)), 2)), rel=1e-4
    )
    found = read_parameter_file(Path("howsmooth-attack") / row["file"])
    assert found.x is not None
    true = float(torch.linalg.matrix_norm(dense_jacobian(found.attention, found.x), 2))
    assert row["found"] == pytest.approx(true, rel=1e-4)


def test_the_tools_are_those_of_the_library() -> None:
    tools = attack_tools()
    assert tools.ascend is hs.adversarial.ascend
    assert tools.constructions is hs.adversarial.constructions
    assert tools.best is hs.bounds.best
    assert tools.measure is hs.local_lipschitz


REFUSED: dict[str, tuple[list[str], str]] = {
    "radius zero": ([*SMALL, "--radius", "0"], "radius: expected a finite number > 0, or auto or data"),
    "radius inf": ([*SMALL, "--radius", "inf"], "radius: expected a finite number > 0"),
    "length zero": ([*SMALL, "--lengths", "0:4"], "lengths: expected numbers of at least 1"),
    "one token": ([*SMALL, "--lengths", "1"], "lengths: expected numbers of at least 2"),
    "no such layer": ([*SMALL, "--layers", "2"], "layers of small, which has 2"),
    "no such head": ([*SMALL, "--heads", "3"], "heads of small, which has 3"),
    "heads of another scope": ([*SMALL, "--scope", "heads", "--heads", "1"], "Add --scope head"),
    "no steps": ([*SMALL, "--steps", "0"], "steps: expected at least 1, got 0"),
    "too many restarts": ([*SMALL, "--restarts", "9" * 30], "restarts: expected at most 1000000, got 999"),
    "restarts": ([*SMALL, "--restarts", "-1"], "restarts: expected at least 0, got -1"),
    "no such model": (["attack", "nothing", "--text", "prose"], "'nothing' is not known"),
    "no file": (["attack", "none.safetensors"], "There is no parameter file"),
    "pickle": (["attack", "pickled.npz", "--lengths", "4"], "never read"),
    "no radius": (["attack", "head.npz", "--lengths", "4"], "Give --radius."),
    "mask too short": ([*SMALL, "--lengths", "65"], "the length of the mask"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_sentence_and_exit_code_2(howsmooth: Howsmooth, tmp_path: Path, case: str) -> None:
    import numpy as np

    save_parameters("head.npz", random_attention(1, heads=1, d_out=None))
    np.savez("pickled.npz", A=np.array([{}], dtype=object))
    arguments, sentence = REFUSED[case]
    code, out, err = howsmooth(*arguments, model=SmallModel(masked=case == "mask too short"))
    last = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("error: ")
    assert sentence in last
    assert not (tmp_path / "howsmooth-attack").exists()


def test_an_out_that_cannot_be_used(howsmooth: Howsmooth, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = howsmooth(*SMALL, "--out", "file")
    assert code == 2
    assert "out: expected a folder, got the file file" in err
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "attacks.sqlite").write_text("no database " * 50)
    code, _, err = howsmooth(*SMALL, "--out", "damaged")
    assert code == 2
    assert "file is not a database" in err


def test_the_help_gives_examples_that_can_be_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    seen: list[Any] = []

    def stop(request: Any, tools: Any) -> None:
        seen.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr("howsmooth.study.sources.open_source", stop)
    for command in ("attack", "bound"):
        main([command, "--help"])
        said = capsys.readouterr().out
        examples = [
            line.split("  ")[0]
            for line in (line.strip() for line in said.splitlines())
            if line.startswith(f"howsmooth {command}")
        ]
        assert len(examples) >= 4
        seen.clear()
        for example in examples:
            assert main(shlex.split(example)[1:]) == 130
        assert len(seen) == len(examples)


def test_the_mask_of_a_file_is_cut_to_shorter_lengths(howsmooth: Howsmooth) -> None:
    window = SmallModel(masked=True).attention(0, 6).head(0)
    save_parameters("window.npz", window)
    code, _, _ = howsmooth("attack", "window.npz", "--lengths", "4,6", "--radius", "2")
    assert code == 0
    for n, file in zip((4, 6), summary()["file"], strict=True):
        found = read_parameter_file(Path("howsmooth-attack") / file).attention
        assert window.mask is not None
        assert found.mask is not None
        assert torch.equal(found.mask, window.mask[:n, :n])
    code, _, err = howsmooth("attack", "window.npz", "--lengths", "7", "--radius", "2")
    assert code == 2
    assert "the length of the mask" in err
