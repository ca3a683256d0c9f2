"""``howsmooth attack``: what is found and kept, what is printed, what is refused."""

from __future__ import annotations

import json
import math
import pickle
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from transformers import ViTConfig, ViTModel

from howsmooth.bounds import best, norm_radius
from howsmooth.cli import main
from howsmooth.errors import ModelError
from howsmooth.models.attention_parameter_files import read_parameter_file, save_parameters
from howsmooth.study import attack_outputs
from howsmooth.study.attack_run import AttackTask
from howsmooth.study.attention_sources import Ball, Target
from howsmooth.study.figures import draw_attacks
from howsmooth.study.plans import AttackPlan
from howsmooth.study.records import ATTACK_PLACE, Attack, Failure
from howsmooth.study.store import STORE_NAME, Store
from howsmooth.study.tasks.task import Failed
from tests._cases import dense_jacobian, random_attention
from tests._cases import tokens as gaussian
from tests._documented import check_documented
from tests._sources import HEADS, AttackWork, SmallModel, norm, small_sources

Result = tuple[int, str, str]
Howsmooth = Callable[..., Result]

SMALL = ["attack", "small", "--text", "prose", "--lengths", "3,4,6"]
ONE = [*SMALL, "--layers", "0", "--lengths", "4"]


@pytest.fixture
def howsmooth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Howsmooth:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.chdir(tmp_path)
    drawn = draw_attacks

    def run(
        *arguments: str, work: AttackWork | None = None, model: SmallModel | None = None, draw: bool = False
    ) -> Result:
        monkeypatch.setattr(attack_outputs, "draw_attacks", drawn if draw else lambda *_: [])
        capsys.readouterr()
        with small_sources(model), (work or AttackWork()).installed():
            code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def summary(folder: Path | str = "howsmooth-attack") -> pd.DataFrame:
    return pd.read_csv(Path(folder) / "summary.csv")


def test_everything_is_written_and_said(howsmooth: Howsmooth) -> None:
    code, out, err = howsmooth(*SMALL, draw=True)
    assert code == 0
    for name in (STORE_NAME, "attacks.csv", "summary.csv", "exponents.csv"):
        assert (Path("howsmooth-attack") / name).exists()
    table = summary()
    assert list(zip(table["layer"], table["head"], table["n"], strict=True)) == [
        (layer, 0, n) for layer in (0, 1) for n in (3, 4, 6)
    ]
    assert "small, layer 0, head 0, scope head, unmasked, R = " in out
    assert "small, layer 1, head 0, scope head, causal, R = " in out
    assert "growth, with the scatter of the lengths: found like n^" in out
    assert "6 attacks made" in out
    assert "Computing 6 attacks" in err
    figures = {path.name for path in (Path("howsmooth-attack") / "figures").glob("*.png")}
    assert figures == {
        "small--attack--overview.png",
        "small--attack--layer-00--head-00.png",
        "small--attack--layer-01--head-00.png",
    }


def test_a_row_of_the_table_stays_on_one_line_of_80_columns(
    howsmooth: Howsmooth, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = AttackWork()
    one_head = random_attention(3, heads=1, d_out=None)
    monkeypatch.setattr(work, "best", lambda _, **options: best(one_head, **options))
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = howsmooth(*SMALL, "--layers", "0", work=work)
    begun = [line for line in out.splitlines() if "ball_upper_bound" in line]
    assert [line.split()[0] for line in begun] == ["3", "4", "6"], out


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


def test_limits_hold_as_printed(howsmooth: Howsmooth) -> None:
    _, out, _ = howsmooth(*SMALL, "--lengths", "2,3,4")
    printed = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit() and "÷" not in line]
    found = [float(row[3]) for row in printed[: len(summary())]]
    assert (found <= summary()["found"]).all()
    assert found == pytest.approx(summary()["found"].to_list(), rel=1e-3)


def test_tokens_that_leave_the_ball_by_rounding_count_as_in_it(howsmooth: Howsmooth) -> None:
    howsmooth(*SMALL, "--layers", "0", "--lengths", "4", "--radius", "data")
    longest = summary()["tokens_norm"].item()
    for shorter, marked in ((1e-7, False), (1e-4, True)):
        radius = longest * (1 - shorter)
        options = ["--radius", repr(radius), "--out", str(shorter)]
        _, out, _ = howsmooth(*SMALL, "--layers", "0", "--lengths", "4", *options)
        assert ("outside" in out) == marked
        beyond = pd.read_csv(f"{shorter}/summary.csv")["tokens_norm"].item() > radius * (1 + 1e-12)
        assert beyond == marked


def test_given_tokens_outside_of_the_ball_are_marked(howsmooth: Howsmooth) -> None:
    _, out, _ = howsmooth(*SMALL, "--layers", "0", "--lengths", "4", "--radius", "0.1")
    assert "at tokens outside of the ball" in out
    assert summary()["tokens_norm"].item() > 0.1
    _, out, _ = howsmooth(*SMALL, "--layers", "0", "--lengths", "4", "--radius", "100", "--out", "wide")
    assert "outside" not in out


def test_the_summary_holds_the_ratios(howsmooth: Howsmooth) -> None:
    howsmooth(*ONE)
    rows = pd.read_csv("howsmooth-attack/attacks.csv")
    for row in summary().to_dict("records"):
        mine = rows[(rows["layer"] == row["layer"]) & (rows["n"] == row["n"])].set_index("name")["value"]
        assert row["paper"] == mine["two_cluster"]
        assert row["construction"] == max(
            mine[["two_cluster", "two_cluster, other eigenvalue", "two_heavy_tokens"]].to_list()
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
    # One ball for all lengths, with the tokens of all.
    work = AttackWork()
    howsmooth(*SMALL, "--lengths", "2,4", "--layers", "0", "--radius", "data", "--out", "lengths", work=work)
    shorter, longer = pd.read_csv("lengths/summary.csv")["tokens_norm"]
    assert {radius for _, radius, _ in work.ascents} == {max(shorter, longer)}
    assert shorter != longer
    work = AttackWork()
    howsmooth(*SMALL, "--lengths", "4", "--radius", "2.5", "--out", "given", work=work)
    assert [radius for _, radius, _ in work.ascents] == [2.5, 2.5]


def test_lengths_beyond_the_model_have_no_tokens_but_are_attacked(howsmooth: Howsmooth) -> None:
    code, _, _ = howsmooth(*SMALL, "--lengths", "4,5", "--layers", "0", model=SmallModel(max_length=4))
    table = summary()
    assert code == 0
    assert table["tokens"].isna().tolist() == [False, True]
    assert (table["found"] > 0).all()


def test_images_are_attacked_at_lengths_that_the_model_makes_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4)).save_pretrained("vit")
    with AttackWork().installed():
        assert main(["attack", "vit", "--images", "builtin", "-q"]) == 0
    found = summary()["n"].tolist()
    assert found[0] > 1
    assert found[-1] == 17


def test_tokens_outside_the_ball_are_told_but_not_counted_as_found(howsmooth: Howsmooth) -> None:
    howsmooth(*ONE, "--radius", "0.01")
    (row,) = summary().to_dict("records")
    assert row["tokens"] > row["found"]
    assert row["found_by"] != "tokens"


def test_the_same_command_again_attacks_nothing_and_more_lengths_only_those(howsmooth: Howsmooth) -> None:
    howsmooth(*ONE)
    work = AttackWork()
    code, out, _ = howsmooth(*ONE, work=work)
    assert (code, work.ascents) == (0, [])
    assert "0 attacks made" in out
    assert "1 were already there" in out
    howsmooth(*ONE, "--lengths", "4,9", work=work)
    assert [n for n, *_ in work.ascents] == [9]
    fresh = AttackWork()
    howsmooth(*ONE, "--lengths", "9", "--out", "fresh", work=fresh)
    assert fresh.ascents == work.ascents  # the seed of one length does not depend on the others


def test_interrupted_it_keeps_what_is_finished_and_continues(howsmooth: Howsmooth) -> None:
    def interrupt(calls: int) -> None:
        if calls == 2:
            raise KeyboardInterrupt

    code, out, err = howsmooth(*SMALL, "--layers", "0", "--out", "my out", work=AttackWork(interrupt))
    assert (code, out) == (130, "")
    assert "interrupted: 2 attacks are saved in my out" in err
    command = err.splitlines()[-1].strip()
    work = AttackWork()
    code, out, _ = howsmooth(*shlex.split(command)[1:], work=work)
    assert code == 0
    assert len(work.ascents) == 1
    howsmooth(*SMALL, "--layers", "0", "--out", "whole")
    columns = ["layer", "n", "found", "paper", "file"]
    pd.testing.assert_frame_equal(summary("my out")[columns], summary("whole")[columns])


def test_a_failure_is_recorded_until_the_attack_succeeds(howsmooth: Howsmooth) -> None:
    def fail(calls: int) -> None:
        if calls == 1:
            raise ModelError("The ascent fell.")

    def kept() -> tuple[int, list[Any]]:
        with Store.open(Path("howsmooth-attack"), write=False) as store:
            failures = [(row.model, row.layer, row.n, row.error) for row, _ in store.rows(Failure)]
            return len(store.keys(Attack, ATTACK_PLACE)), failures

    code, _, err = howsmooth(*ONE, "--lengths", "3,4,6", work=AttackWork(fail))
    assert code == 2
    assert "The ascent fell." in err
    assert kept() == (1, [("small", 0, 4, "The ascent fell.")])
    assert howsmooth(*ONE, "--lengths", "3,4,6")[0] == 0
    assert kept() == (3, [])


def test_a_task_sent_to_another_process_finds_the_same(tmp_path: Path) -> None:
    target = Target(0, None, "attention", "none", random_attention(40, heads=1), None, None)
    asked = AttackPlan(source="small", lengths=(4,), steps=1, restarts=1)
    task = AttackTask(asked, "small", "prose", target, 4, Ball(2.0, "given"), 7, tmp_path)
    with AttackWork().installed():
        (here,) = task.found(None)
        (there,) = pickle.loads(pickle.dumps(task)).found(None)
    assert not isinstance(here, Failed)
    assert not isinstance(there, Failed)
    seconds = {"seconds": 0.0}
    assert [vars(row) | seconds for row in here] == [vars(row) | seconds for row in there]


def test_other_attacks_are_not_mixed_into_a_folder(howsmooth: Howsmooth) -> None:
    howsmooth(*ONE)
    before = Path("howsmooth-attack", STORE_NAME).read_bytes()
    for option, sentence in (
        (["--seed", "1"], "it was made with --seed 0, not 1"),
        (["--steps", "7"], "it was made with --steps 30, not 7"),
        (["--radius", "3"], "it was made with --radius auto, not 3"),
        (["--scope", "attention"], "it was made with --scope head, not attention"),
    ):
        code, _, err = howsmooth(*ONE, *option)
        assert code == 2
        assert sentence in err
    assert Path("howsmooth-attack", STORE_NAME).read_bytes() == before


@pytest.mark.parametrize(("lengths", "marker"), [("4", "_"), ("4,8", "")])
def test_a_bound_at_one_length_is_a_mark(
    lengths: str, marker: str, howsmooth: Howsmooth, monkeypatch: pytest.MonkeyPatch
) -> None:
    plotted: list[str] = []
    plot = Axes.plot

    def seen(axis: Axes, *args: Any, **options: Any) -> Any:
        lines = plot(axis, *args, **options)
        plotted.extend(str(line.get_marker()) for line in lines if line.get_color() == "0.15")
        return lines

    monkeypatch.setattr(Axes, "plot", seen)
    assert howsmooth(*SMALL, "--lengths", lengths, "--layers", "0", draw=True)[0] == 0
    assert set(plotted) == {marker}


def test_rotary_positions_are_attacked_without_constructions(howsmooth: Howsmooth) -> None:
    code, out, _ = howsmooth(*SMALL, "--lengths", "4,8", model=SmallModel(rotary=True), draw=True)
    table = summary()
    assert code == 0
    assert "no construction of the paper: it needs plain scores and no mask" in " ".join(out.split())
    assert table["paper"].isna().all()
    assert table["upper_by"].notna().all()
    assert (table["found"] > 0).all()


def test_a_mask_is_that_of_each_length(howsmooth: Howsmooth) -> None:
    code, _, _ = howsmooth(*SMALL, "--lengths", "4,8", "--layers", "0", model=SmallModel(masked=True))
    assert code == 0
    for n in (4, 8):
        (file,) = summary().query("n == @n")["file"]
        found = read_parameter_file(Path("howsmooth-attack") / file).attention
        assert found.mask is not None
        assert found.mask.shape == (n, n)


def test_json_is_all_there_is_on_standard_output(howsmooth: Howsmooth) -> None:
    code, out, _ = howsmooth(*SMALL, "--layers", "0", "--json")
    said = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert code == 0
    check_documented("attack", said)
    assert (said["attacked"], said["kept"], said["source"], said["seed"]) == (3, 0, "small", 0)
    assert len(said["attacks"]) == 3
    assert {row["series"] for row in said["exponents"]} == {"found", "paper", "upper"}
    assert all(Path(said["files"][name]).exists() for name in ("store", "summary"))
    assert howsmooth(*ONE, "-q") == (0, "", "")


def test_a_parameter_file_is_attacked_with_the_real_tools(
    howsmooth: Howsmooth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = random_attention(40, heads=1, d_out=None, biases=False)
    save_parameters("head.npz", attention, gaussian(3, 4, attention.d))
    monkeypatch.setattr(attack_outputs, "draw_attacks", lambda *_: [])
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


REFUSED: dict[str, tuple[list[str], str]] = {
    "radius zero": ([*SMALL, "--radius", "0"], "radius: expected a finite number > 0, or auto or data"),
    "one token": ([*SMALL, "--lengths", "1"], "lengths: expected numbers of at least 2"),
    "restarts": ([*SMALL, "--restarts", "-1"], "restarts: expected a number from 0 to 1000000, got -1"),
    "Dask": ([*SMALL, "--executor", "dask"], "executor: expected one of processes, got 'dask'"),
    "no radius": (["attack", "head.npz", "--lengths", "4"], "Give --radius."),
    "no tokens": (["attack", "zero.npz", "--lengths", "4"], "a number, because all tokens are zero"),
    "mask too short": ([*SMALL, "--lengths", "65"], "the length of the mask"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_sentence_and_exit_code_2(howsmooth: Howsmooth, tmp_path: Path, case: str) -> None:
    head = random_attention(1, heads=1, d_out=None)
    save_parameters("head.npz", head)
    save_parameters("zero.npz", head, torch.zeros(4, head.d))
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
    (tmp_path / "damaged" / STORE_NAME).write_text("no database " * 50)
    code, _, err = howsmooth(*SMALL, "--out", "damaged")
    assert code == 2
    assert "file is not a database" in err


def test_the_help_gives_examples_that_can_be_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    seen: list[Any] = []

    def stop(request: Any) -> None:
        seen.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr("howsmooth.study.attack_run.open_attention_source", stop)
    monkeypatch.setattr("howsmooth.study.attention_sources.open_attention_source", stop)
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
