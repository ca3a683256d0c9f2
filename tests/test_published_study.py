"""``howsmooth measure --as-published``: rows, exponents, files, resuming and refusals."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from filelock import FileLock

from howsmooth.cli import main
from howsmooth.errors import StoreError
from howsmooth.published import ITEMS
from howsmooth.study import published_run
from howsmooth.study.published_rows import PUBLISHED_COLUMNS, quantities, read_rows
from howsmooth.study.published_tables import compare

MODEL = ["measure", "builtin-encoder", "--as-decoder", "--layers", "0"]
SMALL = [*MODEL, "--lengths", "2,4,8", "--samples", "2", "--text", "prose.txt", "--as-published"]
# Short, since most of the time of a small run goes into a long text.
PROSE = "A map is smooth if what it gives moves no faster than what it takes, and that is measured. " * 12


@pytest.fixture(scope="module", autouse=True)
def _in_a_folder_with_prose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "prose.txt").write_text(PROSE)
    with contextlib.chdir(folder):
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, _in_a_folder_with_prose: None) -> Path:
    folder = tmp_path_factory.mktemp("published")
    assert main([*SMALL, "all", "-q", "--out", str(folder)]) == 0
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in err if line.startswith("error: ")]) == 1
    return err[-1]


def test_every_quantity_of_every_sequence_is_there(made: Path) -> None:
    rows = read_rows(made)
    names = ["corrected", "only output", "only block", "only unmasked", "only stopping", "as published"]
    assert list(rows["quantity"][:6]) == names
    assert len(rows) == 6 * 3 * 2
    assert not rows.duplicated(["n", "sample", "quantity"]).any()
    last = rows[rows["quantity"] == "as published"]
    assert set(last["items"]) == {"output,block,unmasked,stopping"}
    assert (
        rows["lower"].isna().equals(rows["quantity"].isin(["only output", "only stopping", "as published"]))
    )
    corrected = rows[rows["quantity"] == "corrected"]
    assert bool((corrected["lower"] <= corrected["lipschitz"]).all())
    assert corrected["map"].str.contains("causal").all()
    assert last["map"].str.contains("unmasked").all()


def test_the_corrected_quantity_is_that_of_the_study(made: Path, tmp_path: Path) -> None:
    assert main([*SMALL[:-1], "-q", "--out", str(tmp_path)]) == 0
    study = pd.read_csv(tmp_path / "measurements.csv").set_index(["n", "sample"])
    rows = read_rows(made)
    mine = rows[rows["quantity"] == "corrected"].set_index(["n", "sample"])
    assert len(mine) == len(study) == 6
    np.testing.assert_allclose(mine["lipschitz"].sort_index(), study["lipschitz"].sort_index(), rtol=1e-12)
    assert list(mine["seed"].sort_index()) == list(study["seed"].sort_index())


def test_the_same_command_repeats_nothing_and_another_length_adds_to_it(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(made, folder)
    before = (folder / "published.csv").read_bytes()
    assert main([*SMALL, "all", "--json", "--out", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["measured"], found["kept"]) == (0, 36)
    assert (folder / "published.csv").read_bytes() == before
    longer = ["4,16" if word == "2,4,8" else word for word in SMALL]
    assert main([*longer, "all", "--json", "--out", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["measured"], found["kept"]) == (12, 12)
    old, new = read_rows(made), read_rows(folder)
    assert len(new) == 48
    pd.testing.assert_frame_equal(new[new["n"] < 16].reset_index(drop=True), old)


def test_the_exponents_are_fitted_for_all_and_shown(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pd.read_csv(made / "published-exponents.csv")
    assert len(table) == 6
    rows = read_rows(made)
    mine = rows[rows["quantity"] == "as published"]
    slope = np.polyfit(np.log(mine["n"]), np.log(mine["lipschitz"]), 1)[0]
    line = table.set_index("quantity").loc["as published"]
    assert line["slope"] == pytest.approx(slope, abs=1e-9)
    assert line["low"] < slope < line["high"]
    corrected = rows[rows["quantity"] == "corrected"]
    ratio = np.median(mine["lipschitz"].to_numpy() / corrected["lipschitz"].to_numpy())
    assert line["ratio"] == pytest.approx(ratio, rel=1e-9)
    assert table.set_index("quantity").loc["corrected", "ratio"] == 1
    for kind in ("png", "pdf"):
        assert len(list((made / "figures").glob(f"published-*.{kind}"))) == 1
    capsys.readouterr()
    assert main([*SMALL, "all", "--out", str(made)]) == 0
    out = capsys.readouterr().out
    assert "only unmasked" in out
    assert "36 were there already" in out


def test_unconverged_constants_are_not_fitted_and_published_values_are() -> None:
    n = np.array([2, 4, 8, 16])
    base = {
        "model": "m", "text": "t", "layer": 0, "sample": 0, "steps": 1, "radius_mean": 1.0, "start": 0,
        "seed": 0, "map": "",
    }  # fmt: skip
    rows = [
        {**base, "n": int(k), "quantity": name, "items": items, "lipschitz": value, "lower": lower,
         "upper": lower, "settled": settled}
        for k in n
        for name, items, value, lower, settled in (
            ("corrected", "", k**0.5 if k < 16 else 100.0, 1.0, k < 16),
            ("as published", "output", float(k), np.nan, False),
        )
    ]  # fmt: skip
    table = compare(pd.DataFrame(rows)[list(PUBLISHED_COLUMNS)]).set_index("quantity")
    assert table["slope"].to_dict() == pytest.approx({"corrected": 0.5, "as published": 1.0})
    assert table["n_points"].to_dict() == {"corrected": 3, "as published": 4}


def test_one_item_is_not_measured_twice() -> None:
    assert quantities(("output",)) == {"corrected": (), "as published": ("output",)}
    assert list(quantities(tuple(ITEMS))) == [
        "corrected",
        *(f"only {item}" for item in ITEMS),
        "as published",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--as-published", "tangent"], "expected all, or some of output, block"),
        (["--as-published", "dropout,unmasked"], "'unmasked': it is not an encoder run as a decoder"),
        (["--as-published", "all", "--scope", "block"], "expected attention together with --as-published"),
    ],
)
def test_refusals_before_anything_is_measured(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["measure", "builtin-encoder", "--lengths", "2,4", "--samples", "1", "--text", "prose.txt"]
    command += [*arguments, "--out", str(out)]
    assert words in refusal(capsys, *command)
    assert not out.exists()


def test_rows_of_other_settings_or_weights_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(made, folder)
    out = ["--out", str(folder)]
    assert "made with seed 0, not 1" in refusal(capsys, *SMALL, "all", "--seed", "1", *out)
    settings = folder / "published.json"
    there = json.loads(settings.read_text())
    there["inputs"] = dict.fromkeys(there["inputs"], "0")
    settings.write_text(json.dumps(there))
    assert "with other weights or another text" in refusal(capsys, *SMALL, "all", *out)
    settings.write_text("{")
    assert "cannot be read" in refusal(capsys, *SMALL, "all", *out)


@pytest.mark.parametrize(
    ("content", "words"), [(b"\xff\x00", "cannot be read"), (b"a,b\n1,2\n", "other columns")]
)
def test_a_damaged_file_is_refused(made: Path, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "published.csv").write_bytes(content)
    with pytest.raises(StoreError, match=words):
        read_rows(tmp_path)
    (tmp_path / "published.csv").write_bytes((made / "published.csv").read_bytes()[:-40])
    with pytest.raises(StoreError, match="published rows"):
        read_rows(tmp_path)


def test_an_interrupted_run_keeps_its_rows_and_goes_on(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = published_run.measure_layer, 0

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:  # within the second of three lengths
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(published_run, "measure_layer", interrupted)
        assert main([*SMALL, "all", "-q", "--out", str(tmp_path)]) == 130
    assert "12 of 36 measurements are kept" in capsys.readouterr().err
    assert len(read_rows(tmp_path)) == 12
    assert main([*SMALL, "all", "-q", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "published.csv").read_bytes() == (made / "published.csv").read_bytes()


def test_two_processes_do_not_write_one_file(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "held"
    shutil.copytree(made, folder)
    with FileLock(folder / ".published.lock"):
        assert "in use by another howsmooth process" in refusal(capsys, *SMALL, "all", "--out", str(folder))
    assert (folder / "published.csv").read_bytes() == (made / "published.csv").read_bytes()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "out")
    assert "expected a writable folder" in refusal(capsys, *SMALL, "output", "--out", out)
