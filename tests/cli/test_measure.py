"""``howsmooth measure``: what is typed, what is said, what is written, and the exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import T5Config, T5Model

import howsmooth as hs
from howsmooth.cli import main
from howsmooth.errors import HowsmoothError
from howsmooth.scopes import SIDES
from tests._documented import check_documented
from tests._selection import others_slow
from tests._study import FakeModel, Tools, digest, installed, make_tools, words

BASE = ["measure", "small", "--text", "prose", "--lengths", "2,4,8", "--samples", "5"]


class Said(NamedTuple):
    code: int
    out: str
    err: str


def typed(arguments: Sequence[str], tools: Tools | None = None) -> Said:
    """Run a command line in this process, with stand-ins for models and texts."""
    if tools is None:
        models = dict.fromkeys(("small", "builtin-encoder", "builtin-decoder"), FakeModel())
        tools, _ = make_tools(models=models, texts={"prose": words(400), "alice": words(400)})
    out, err = io.StringIO(), io.StringIO()
    with installed(tools), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return Said(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, Said]:
    """A command line, its folder, and what it said."""
    folder = tmp_path_factory.mktemp("studies") / "a folder"
    arguments = [*BASE, "--out", str(folder)]
    return arguments, folder, typed(arguments)


def test_measure_writes_everything_and_says_where(study: tuple[list[str], Path, Said]) -> None:
    arguments, folder, (code, out, err) = study
    assert code == 0
    for name in ("study.sqlite", "measurements.csv", "exponents.csv"):
        assert (folder / name).exists()
    assert f"Report: {folder / 'report.html'}" in out
    assert "45 measurements made" in out
    assert "Computing 45 constants" in err
    assert "Drawing" not in err
    assert len(pd.read_csv(folder / "measurements.csv")) == 45
    drawn = sorted(path.name for path in (folder / "figures").iterdir())
    assert drawn[:2] == [f"small--prose--attention--overview.{end}" for end in ("pdf", "png")]
    assert shlex.join(["howsmooth", *arguments]).replace("'", "&#39;") in (folder / "report.html").read_text()
    one = ["--lengths", "3", "--samples", "1", "--layers", "0", "--out", str(folder.with_name("one"))]
    assert "1 measurement made" in typed([*BASE[:4], *one]).out


def test_json_is_all_there_is_on_standard_output(study: tuple[list[str], Path, Said]) -> None:
    arguments, folder, before = study
    code, out, err = typed([*arguments, "--json", "--figures", "all", "--parquet"])
    assert code == 0
    said = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    check_documented("measure", said)
    counts = {"made": 0, "kept": 45, "in_store": 45, "unconverged_in_store": 0}
    assert (said["measurements"], said["failed"], said["published"]) == (counts, 0, None)
    assert [row["layer"] for row in said["exponents"]] == [0, 1, 2]
    assert all(0.1 < row["slope"] < 0.4 for row in said["exponents"])
    assert all(row["head"] is None for row in said["exponents"])
    assert "Drawing figures" in err
    assert len(said["files"]["figures"]) == len(list((folder / "figures").iterdir())) == 8
    assert all(Path(path).exists() for path in (said["files"]["report"], *said["files"]["figures"]))
    assert "figures" in re.findall('id="(.*?)"', (folder / "report.html").read_text("utf-8"))
    # The largest exponent can be cited.
    rows = pd.read_csv(folder / "exponents.csv")
    top = rows.loc[rows["slope"].idxmax()]
    (line,) = said["citations"]
    assert line in " ".join(before.out.split())
    text = f"prose (SHA-256 {digest(words(400))[:12]})"
    assert line.startswith(f"Local Lipschitz constant of small, scope attention, on {text}: n to the power")
    numbers = f"{top['slope']:.3f}, interval of level 0.95 from {top['low']:.3f} to {top['high']:.3f}"
    assert f"{numbers} (the largest of 3 fits, layer {top['layer']}), 15 points from n = 2 to 8" in line
    measured, fitted = (pd.read_parquet(folder / f"{name}.parquet") for name in ("measurements", "exponents"))
    assert measured.attrs["howsmooth"] == fitted.attrs["howsmooth"] == line
    assert len(measured) == 45
    assert list(fitted["slope"]) == list(rows["slope"])


def test_bibtex_is_that_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cite"]) == 0
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"```bibtex\n{capsys.readouterr().out}```" in readme


@pytest.mark.usefixtures("undrawn")
def test_the_defaults_are_the_two_models_that_ship_and_alice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = typed(["measure", *BASE[4:], "--layers", "0"])
    assert code == 0
    table = pd.read_csv(tmp_path / "howsmooth-out" / "measurements.csv")
    assert set(table["model"]) == {"builtin-encoder", "builtin-decoder"}
    assert set(table["text"]) == {"alice"}
    assert set(table["scope"]) == {"attention"}
    assert "builtin-decoder, scope attention, text alice" in out


@pytest.mark.usefixtures("undrawn")
def test_memory_and_threads_are_used_and_quiet_says_nothing(tmp_path: Path) -> None:
    tools, _ = make_tools()
    given: list[object] = []

    def measure(*arguments: Any, memory: object, **options: Any) -> Any:
        given.append((memory, torch.get_num_threads()))
        return tools.measure(*arguments, **options)

    before = torch.get_num_threads()
    line = [*BASE, "--memory", "2GiB", "--threads", "3", "-q", "--out", str(tmp_path)]
    assert typed(line, replace(tools, measure=measure)) == (0, "", "")
    assert set(given) == {(2 << 30, 3)}
    assert torch.get_num_threads() == before
    assert "threads 3" in (tmp_path / "report.html").read_text()


def make_other_study(folder: Path) -> str:
    typed([*BASE, "--out", str(folder), "--seed", "7"])
    return "it was made with --seed 7, not 0. Choose another --out, or repeat --seed 7"


def make_damage(folder: Path) -> str:
    folder.mkdir()
    (folder / "study.sqlite").write_text("no database " * 50)
    return "file is not a database"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("make", [make_other_study, make_damage], ids=lambda make: make.__name__)
def test_an_out_that_cannot_be_used_is_refused_and_left_alone(
    tmp_path: Path, make: Callable[[Path], str]
) -> None:
    sentence = make(tmp_path / "out")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, out, err = typed([*BASE, "--out", str(tmp_path / "out")])
    assert (code, out) == (2, "")
    assert sentence in err
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("calls_before", "kept"), [(0, "nothing was measured yet"), (4, "20 measurements are saved in ")]
)
def test_interrupted_it_says_what_was_kept_and_how_to_go_on(
    tmp_path: Path, calls_before: int, kept: str
) -> None:
    def interrupt(calls: int) -> None:
        if calls == calls_before:
            raise KeyboardInterrupt

    arguments = [*BASE, "--out", str(tmp_path / "my out")]
    code, out, err = typed(arguments, make_tools(before_measure=interrupt)[0])
    assert (code, out) == (130, "")
    assert f"interrupted: {kept}" in err
    command = err.splitlines()[-1].strip()
    assert shlex.split(command) == ["howsmooth", *arguments]
    tools, work = make_tools()
    code, out, _ = typed(shlex.split(command)[1:], tools)
    assert code == 0
    assert len(work.measured) == 45 - 5 * calls_before
    assert f"{len(work.measured)} measurements made" in out
    assert ("20 were already there" in out) == (calls_before == 4)


def test_interrupted_while_drawing_everything_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("howsmooth.study.measurement_outputs.write_outputs", interrupt)
    code, _, err = typed([*BASE, "--out", str(tmp_path)])
    assert code == 130
    assert "interrupted: 45 measurements are saved" in err


@pytest.mark.usefixtures("undrawn")
@pytest.mark.skipif(os.name != "posix", reason="file names that are not UTF-8")
def test_names_that_are_no_utf8_are_written_out(tmp_path: Path) -> None:
    name = "caf\udce9"
    tools, _ = make_tools(models={name: FakeModel()}, texts={name: words(400)})
    line = ["measure", name, "--text", name, *BASE[4:], "--out", str(tmp_path / name)]
    code, out, _ = typed(line, tools)
    assert code == 0
    out.encode()
    table = pd.read_csv(tmp_path / name / "measurements.csv")
    assert set(table["model"]) == set(table["text"]) == {r"caf\udce9"}


def test_errors_are_said_in_one_line_and_mistakes_of_ours_are_not_hidden(tmp_path: Path) -> None:
    def raising(error: Exception) -> Tools:
        def fail(calls: int) -> None:
            raise error

        return make_tools(before_measure=fail)[0]

    line = [*BASE, "--out", str(tmp_path)]
    code, _, err = typed(line, raising(HowsmoothError("one\nand  two\x1b[31m")))
    assert code == 2
    assert err.splitlines()[-1] == "error: one and two\N{REPLACEMENT CHARACTER}[31m"
    with pytest.raises(ZeroDivisionError, match="ours"):
        typed(line, raising(ZeroDivisionError("ours")))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="terminals of POSIX")
def test_on_a_terminal_there_is_a_bar_with_the_time_left(tmp_path: Path) -> None:
    process, terminal = pty.fork()
    if not process:
        try:
            os.environ["COLUMNS"] = "160"
            sys.stdout = (tmp_path / "said").open("w")
            sys.stderr = os.fdopen(2, "w")
            with installed(make_tools(before_measure=lambda calls: time.sleep(0.05))[0]):
                main([*BASE, "--layers", "0", "--out", str(tmp_path)])
            sys.stdout.flush()
        finally:
            os._exit(0)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other side is closed
        while block := os.read(terminal, 4096):
            shown += block
    os.close(terminal)
    assert os.waitpid(process, 0)[1] == 0
    for part in ("Computing 15 constants", "left", "━"):
        assert part in shown.decode()
    assert "Report:" in (tmp_path / "said").read_text()


# ---- maps of two sequences and whole models, against dense Jacobians


def rows_of(folder: Path) -> list[tuple[int, float, float, slice]]:
    """The rows of a run: layer, limits, and which tokens."""
    table = hs.read(folder)["measurements"]
    return [
        (row.layer, row.lower, row.upper, slice(row.start, row.start + row.n)) for row in table.itertuples()
    ]


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder-decoder and the ids of twelve tokens."""
    folder = tmp_path_factory.mktemp("encoder-decoder")
    np.save(folder / "ids.npy", [range(3, 15)])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        T5Model(T5Config(**config)).save_pretrained(folder / "t5")
    return folder


CROSS = [*others_slow(SIDES, ["memory"]), "queries of the whole model"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("side", CROSS)
def test_rows_of_an_encoder_decoder_hold_the_constants_of_its_own_modules(
    side: str, t5: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(t5)
    model = T5Model.from_pretrained("t5").double().eval()
    model.set_attn_implementation("eager")
    module = model.decoder.block[0].layer[1].EncDecAttention
    whole = side.endswith("model")
    scope = ["model", "--side", "queries"] if whole else ["cross-attention", "--layers", "2", "--side", side]
    how = ["--tokens", "ids.npy", "--lengths", "2,3,4", "--samples", "1", "--bounds", "none", "-q", "--json"]
    assert main(["measure", "t5", "--scope", *scope, *how, "--out", str(tmp_path)]) == 0
    found = rows_of(tmp_path)
    assert [layer for layer, *_ in found] == [0 if whole else 2] * 3
    for _, lower, upper, part in found:
        ids = torch.arange(3, 15)[None, part]
        kept: dict[str, torch.Tensor] = {}
        handle = module.register_forward_pre_hook(
            lambda m, a, k, kept=kept: kept.update(x=a[0], y=k["key_value_states"]), with_kwargs=True
        )
        model(input_ids=ids, decoder_input_ids=ids)
        handle.remove()

        def own(x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor = ids) -> torch.Tensor:
            if whole:
                return model(input_ids=ids, decoder_inputs_embeds=x[None]).last_hidden_state[0]
            return module(x[None], key_value_states=y[None])[0][0]

        x = model.shared(ids) if whole else kept["x"]
        parts = torch.func.jacrev(own, argnums=(0, 1))(x[0].detach(), kept["y"][0].detach())
        of_x, of_y = (part.flatten(2).flatten(0, 1) for part in parts)
        dense = {"memory": of_y, "joint": torch.cat((of_x, of_y), dim=1)}.get(side, of_x)
        exact = float(torch.linalg.matrix_norm(dense.detach(), 2))
        assert lower * (1 - 1e-5) <= exact <= upper * (1 + 1e-5)
    if whole or side == "joint":
        return
    # What moves is in the citation, the tables and the page.
    (line,) = json.loads(capsys.readouterr().out)["citations"]
    assert f"of t5, scope cross-attention, side {side}, on ids (SHA-256" in line
    tables = hs.read(tmp_path)
    assert tables["exponents"].attrs["howsmooth"] == line
    assert {*tables["measurements"]["side"]} == {*tables["exponents"]["side"]} == {side}
    assert f"scope cross-attention, side {side}, " in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_a_whole_model_is_measured_once_for_all_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["measure", "builtin-decoder", "--scope", "model", "--lengths", "2,3", "--samples", "1"]
    line += ["--bounds", "none", "--rtol", "1e-2", "-q", "--out", str(tmp_path), "--output"]
    assert main([*line, "logits"]) == 0
    found = rows_of(tmp_path)
    assert [(layer, part.stop - part.start) for layer, _, _, part in found] == [(0, 2), (0, 3)]
    model = hs.load_model("builtin-decoder", head=True, dtype=torch.float64).model
    ids = hs.load_model("builtin-decoder").tokenizer.encode(hs.texts.load_text("alice").content)
    for _, lower, upper, part in found:
        x = model.get_input_embeddings()(torch.tensor(ids[part]))
        logits = lambda e: model(inputs_embeds=e[None]).logits[0]  # noqa: E731
        with sdpa_kernel(SDPBackend.MATH):
            dense = torch.func.jacfwd(logits)(x).reshape(-1, x.numel())
        exact = torch.linalg.eigvalsh(dense.mT @ dense)[-1].sqrt()
        assert lower * (1 - 1e-9) <= float(exact) <= upper * (1 + 1e-9)
    # Another output is another study.
    assert main([*line, "margin"]) == 2
    assert "belongs to another study" in capsys.readouterr().err
