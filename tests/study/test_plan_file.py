"""Plan files and ``howsmooth measure --plan``: every key checked, studies begun and continued."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from howsmooth.cli import main
from howsmooth.errors import ArgumentError
from howsmooth.study.execution_options import Execution
from howsmooth.study.options import described
from howsmooth.study.plan_file import KEYS, read_plan
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.ranges import Ranges
from tests._documented import check_documented
from tests._study import FakeModel, digest, installed, make_tools, rows_of

FULL = """
models = ["small", {name = "other", as_decoder = true, layers = "0:1", heads = [0], lengths = 8}]
texts = ["prose", "notes.txt"]
lengths = "2:6:2"
samples = 3
special_tokens = true
scopes = ["attention", "head", "model"]
output = "logits"
side = "memory"
layers = [0, "-1"]
heads = 1
random_init = false
as_decoder = false
part = "text"
rtol = 0.001
confidence = 0.99
max_iterations = 50
seed = 7
device = "cpu"
dtype = "float64"
threads = 2
memory = "3GiB"
bounds = "none"
as_published = ["output", "stopping"]
out = "results"
executor = "processes"
workers = 3
"""

SMALL = 'models = ["small"]\ntexts = ["prose"]\nlengths = [2, 4, 8]\nsamples = 5\n'

Result = tuple[int, str, str]
Howsmooth = Callable[..., Result]


def written(folder: Path, content: str) -> Path:
    path = folder / "plan.toml"
    path.write_text(content, encoding="utf-8")
    return path


def test_every_key_is_read(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("words")
    study = read_plan(written(tmp_path, FULL))
    assert study.plan == Plan(
        models=(
            ModelSpec("small", part="text"),
            ModelSpec(
                "other",
                as_decoder=True,
                layers=Ranges.parse("0:1", "layers"),
                heads=Ranges.parse("0", "heads"),
                lengths=(8,),
                part="text",
            ),
        ),
        texts=("prose", str(tmp_path / "notes.txt")),
        lengths=(2, 4, 6),
        samples=3,
        special_tokens=True,
        scopes=("attention", "head", "model"),
        output="logits",
        side="memory",
        layers=Ranges.parse("0,-1", "layers"),
        heads=Ranges.parse("1", "heads"),
        rtol=1e-3,
        confidence=0.99,
        max_iterations=50,
        seed=7,
        dtype="float64",
        memory=3 << 30,
        part="text",
        bounds="none",
        as_published="output,stopping",
    )
    assert study.execution == Execution(tmp_path / "results", "processes", 3, threads=2)
    others = {"images", "tokens", "embeddings", "scheduler"}
    assert {key for key in KEYS if f"\n{key} =" not in FULL} == others


def test_a_model_is_all_that_a_plan_needs(tmp_path: Path) -> None:
    study = read_plan(written(tmp_path, 'models = "small"'))
    assert study.plan == Plan(models=(ModelSpec("small"),))
    assert study.execution == Execution(tmp_path / "plan-out")


def test_what_a_plan_says_of_all_models_holds_for_those_that_do_not_say_it(tmp_path: Path) -> None:
    content = 'models = ["a", {name = "b", random_init = false, part = "text"}]\nrandom_init = true'
    models = read_plan(written(tmp_path, content)).plan.models
    assert models == (ModelSpec("a", random_init=True), ModelSpec("b", part="text"))


def test_a_plan_is_written_the_same_way_in_python_and_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    content = 'models = "a"\nimages = ["a.png"]\nlayers = "0,-1"\nlengths = [8, "2:4:2"]\nmemory = "1kB"'
    plan = Plan("a", images=str(tmp_path / "a.png"), layers=[0, -1], lengths="2:4:2,8", memory=1000)
    assert read_plan(written(tmp_path, content)).plan == plan
    assert replace(plan) == plan
    assert (plan.texts, plan.lengths, plan.models[0].label) == ((), (2, 4, 8), "a")
    assert [source.kind for source in plan.sources] == ["images"]
    assert json.loads(json.dumps(described(plan)))["layers"] == "0,-1"


def test_paths_are_those_beside_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    written(tmp_path, 'models = ["my-model", "small"]\nout = "../there"')
    monkeypatch.chdir(tmp_path.parent)
    study = read_plan(Path(tmp_path.name) / "plan.toml")
    assert [model.label for model in study.plan.models] == ["my-model", "small"]
    assert study.plan.models[0].name == f"{tmp_path.name}/my-model"
    assert study.execution.out == Path(tmp_path.name) / "../there"


BAD: dict[str, tuple[str, str]] = {
    "unknown key": ('model = ["small"]', "plan.toml: model: expected one of the keys .* Is models meant?"),
    "keys in a table": ('[plan]\nmodels = ["a"]', "plan: expected .* got a table. .* leave out .plan."),
    "unknown key of a model": ('models = [{name = "a", texts = 1}]', "models: texts: expected one of"),
    "layers of a model": ('models = [{name = "a", layers = "x"}]', "plan.toml: models: layers: expected num"),
    "lengths of a model": ('models = [{name = "a", lengths = 0}]', "models: lengths: expected numbers of"),
    "heads of a model": ('models = [{name = "a", heads = 0}]', "plan.toml: heads: expected heads only tog"),
    "bounds": ('models = ["a"]\nbounds = 1', "plan.toml: bounds: expected one of auto, all, none, got 1"),
    "items": ('models = ["a"]\nas_published = ["x"]', "plan.toml: as_published: expected all, or some of"),
    "items of true": ('models = ["a"]\nas_published = true', "as_published: expected a non-empty string"),
    "items without attention": (
        'models = ["a"]\nas_published = "all"\nscopes = ["block"]',
        "plan.toml: as_published: expected the scope attention among the scopes",
    ),
    "no models": ("samples = 1", "plan.toml: models: expected the names of the models, got a file without"),
    "empty models": ("models = []", "models: expected at least one, got none"),
    "model of a number": ("models = [1]", "models: expected names or tables"),
    "model without a name": ("models = [{random_init = true}]", "models: name: expected a value, got none"),
    "model with a flag of words": ('models = [{name = "a", as_decoder = "yes"}]', "as_decoder: expected"),
    "model twice": ('models = ["a", "a"]', "models: expected each only once, got 'a' twice"),
    "empty name": ('models = [" "]', "models: name: expected a non-empty string"),
    "scope": ('models = ["a"]\nscopes = ["whole"]', "scopes: expected one of head, heads"),
    "rtol of nan": ('models = ["a"]\nrtol = nan', "plan.toml: rtol: expected"),
    "dtype": ('models = ["a"]\ndtype = "half"', "plan.toml: dtype: expected one of float32, float64"),
    "images and text": ('models = ["a"]\ntexts = "a"\nimages = "b"', "inputs: expected only text input"),
    "out": ('models = ["a"]\nout = 3', "plan.toml: out: expected a non-empty string"),
    "syntax": ("models = [", "plan: expected a plan file in TOML, got .*plan.toml"),
    "endless number": ("samples = " + "9" * 9000, "plan: expected a plan file in TOML"),
    "huge number": ('models = ["a"]\nrtol = ' + "9" * 400, "rtol: expected a finite number"),
    "deep": ("models = " + "[" * 20000, "plan: expected a plan file in TOML"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_plan_is_refused_with_the_key(tmp_path: Path, case: str) -> None:
    content, message = BAD[case]
    with pytest.raises(ArgumentError, match=message) as refusal:
        read_plan(written(tmp_path, content))
    assert "--" not in str(refusal.value)


def test_options_of_the_command_line_complete_those_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, 'models = "small"\nexecutor = "dask"\nout = "here"')
    assert read_plan(path).execution.scheduler is None
    execution = read_plan(path, scheduler="tcp://10.0.0.1:8786").execution
    assert (execution.executor, execution.scheduler) == ("dask", "tcp://10.0.0.1:8786")
    assert execution.out == tmp_path / "here"
    assert read_plan(path, scheduler="tcp://x:1", out=Path("there")).execution.out == Path("there")
    with pytest.raises(ArgumentError, match=r"^threads: expected a number"):  # not the file is to blame
        read_plan(path, threads=0)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(b"\xef\xbb\xbf" + SMALL.encode())
    assert read_plan(tmp_path / "plan.toml").plan.samples


def test_what_is_no_plan_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"models": ["small"]}')
    with pytest.raises(ArgumentError, match=r"Write it in TOML: lines such as lengths ="):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(ArgumentError, match="no such file"):
        read_plan(tmp_path / "none.toml")
    with pytest.raises(ArgumentError, match="Is a directory"):
        read_plan(tmp_path)
    with pytest.raises(ArgumentError, match="null byte"):
        read_plan(Path("a\0b"))
    (tmp_path / "plan.toml").write_bytes(b'models = ["\xe9"]')
    with pytest.raises(ArgumentError, match="not written in UTF-8"):
        read_plan(tmp_path / "plan.toml")


VALUES = st.recursive(
    st.none().map(lambda _: "nan")
    | st.integers().map(str)
    | st.booleans().map(lambda value: str(value).lower())
    | st.floats(allow_nan=False, allow_infinity=False).map(repr)
    | st.text(max_size=8).map(lambda value: json.dumps(value, ensure_ascii=True)),
    lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
    max_leaves=4,
)


@settings(max_examples=100, deadline=None)
@given(
    entries=st.dictionaries(st.sampled_from([*KEYS, "other"]), VALUES, max_size=5), tail=st.text(max_size=5)
)
def test_whatever_is_written_is_a_plan_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, str], tail: str
) -> None:
    folder = tmp_path_factory.getbasetemp()
    content = "".join(f"{key} = {value}\n" for key, value in entries.items()) + tail
    path = folder / "fuzz.toml"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    refusal = ""
    try:
        read_plan(path)
    except ArgumentError as error:
        refusal = str(error)
    assert not refusal or refusal.startswith(("plan: ", "fuzz.toml: "))


# ---- the command


@pytest.fixture
def howsmooth(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Howsmooth:
    monkeypatch.setenv("COLUMNS", "120")

    def command(*arguments: str, tools: Any = None) -> Result:
        chosen = tools or make_tools()[0]
        capsys.readouterr()
        with installed(chosen):
            code = main(("measure", "--plan", *arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


def test_a_study_is_carried_out_and_continued_by_the_same_command(
    howsmooth: Howsmooth, tmp_path: Path
) -> None:
    plan = str(written(tmp_path, SMALL))
    code, out, _ = howsmooth(plan)
    assert code == 0
    assert "45 measurements made" in out
    assert (tmp_path / "plan-out" / "report.html").exists()
    before = rows_of(tmp_path / "plan-out")
    tools, work = make_tools()
    code, out, _ = howsmooth(plan, tools=tools)
    assert code == 0
    assert work.measured == []
    assert "45 were already there" in out
    assert rows_of(tmp_path / "plan-out") == before


def test_options_on_the_command_line_replace_those_of_the_file(howsmooth: Howsmooth, tmp_path: Path) -> None:
    plan = str(written(tmp_path, f'{SMALL}bounds = "all"\n'))
    code, out, err = howsmooth(plan, "--lengths", "2,4", "--layers", "-1", "--json")
    assert (code, err.count("error")) == (0, 0)
    found = json.loads(out)
    assert found["measurements"]["made"] == 2 * 5
    assert (found["settings"]["samples"], found["settings"]["bounds"]) == (5, "all")
    code, _, err = howsmooth(plan, "--seed", "3")
    assert code == 2
    assert "made with --seed 0, not 3" in err
    code, _, err = howsmooth(plan, "--heads", "0")
    assert code == 2
    assert "error: --heads: expected" in err or "error: heads: expected" in err


def test_out_on_the_command_line_comes_first(howsmooth: Howsmooth, tmp_path: Path) -> None:
    assert howsmooth(str(written(tmp_path, SMALL)), "--out", str(tmp_path / "mine"), "--quiet") == (0, "", "")
    assert len(rows_of(tmp_path / "mine")) == 45
    assert not (tmp_path / "plan-out").exists()


def test_a_failure_stops_nothing_else_and_the_exit_code_says_so(howsmooth: Howsmooth, tmp_path: Path) -> None:
    plan = str(written(tmp_path, SMALL.replace('"small"', '"missing", "small"')))
    code, out, err = howsmooth(plan)
    assert code == 3
    assert "45 measurements made" in out
    assert "1 computation failed. Reason of the first failure: model: 'missing' is not known." in err
    assert shlex.split(err.splitlines()[-1]) == ["howsmooth", "measure", "--plan", plan]
    assert "Reason of the first failure" not in out
    said = json.loads(howsmooth(plan, "--json")[1])
    check_documented("measure", said)
    (failure,) = said["failures"]
    assert (failure["model"], failure["text"], failure["kind"]) == ("missing", None, "ModelError")
    assert failure["error"] == "model: 'missing' is not known."
    models = {"small": FakeModel(), "missing": FakeModel(fingerprint=digest("found"))}
    code, _, err = howsmooth(plan, "--quiet", tools=make_tools(models=models)[0])
    assert (code, err) == (0, "")


def test_a_model_may_have_layers_heads_and_lengths_of_its_own(howsmooth: Howsmooth, tmp_path: Path) -> None:
    own = """
texts = ["prose"]
lengths = [2, 4]
samples = 2
scopes = ["attention", "head"]
layers = 0

[[models]]
name = "small"

[[models]]
name = "other"
layers = [1, -1]
heads = 1
lengths = "3:5:2"
"""
    models = {"small": FakeModel(), "other": FakeModel(fingerprint=digest("other"), max_length=5)}
    plan = str(written(tmp_path, own))
    code, _, err = howsmooth(plan, "-q", tools=make_tools(models=models)[0])
    assert code == 0, err
    found = {(row[0], row[2], row[3], row[4], row[5]) for row in rows_of(tmp_path / "plan-out")}
    assert found == {
        *(("small", "attention", 0, None, n) for n in (2, 4)),
        *(("small", "head", 0, head, n) for n in (2, 4) for head in (0, 1)),
        *(("other", "attention", layer, None, n) for n in (3, 5) for layer in (1, 2)),
        *(("other", "head", layer, 1, n) for n in (3, 5) for layer in (1, 2)),
    }
    tools, work = make_tools(models=models)
    assert howsmooth(plan, "-q", tools=tools)[0] == 0
    assert work.measured == []
    written(tmp_path, own.replace("3:5:2", "3:6"))
    code, _, err = howsmooth(plan, tools=make_tools(models=models)[0])
    assert code == 3
    assert "expected at most 5 tokens, the positions of other, got 6" in err


def test_a_plan_file_in_place_of_a_model_is_told_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(written(tmp_path, SMALL))
    assert main(["measure", plan, "--out", str(tmp_path / "out")]) == 2
    assert "A plan file is given as howsmooth measure --plan FILE." in capsys.readouterr().err
    assert main(["measure", "--plan", str(tmp_path / "gone.toml")]) == 2
    assert "gone.toml: expected a plan file in TOML, got no such file" in capsys.readouterr().err


def test_a_module_is_told_the_way_in_python() -> None:
    with pytest.raises(ArgumentError, match=r"models: expected names .* measured with hs\.profile"):
        Plan(models=torch.nn.Tanh())
