"""Plan files and ``howsmooth measure --plan``: every key checked, studies begun and continued."""

from __future__ import annotations

import contextlib
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
from tests._study import FakeModel, digest, installed, make_tools, rows_of, run


def test_a_model_is_all_that_a_plan_needs_and_what_is_said_of_all_holds_for_the_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "plan.toml").write_bytes(b"\xef\xbb\xbf" + b'models = "small"')  # a byte order mark
    study = read_plan(tmp_path / "plan.toml")
    assert study.plan == Plan(models=(ModelSpec("small"),))
    assert study.execution == Execution(tmp_path / "plan-out")
    content = 'models = ["a", {name = "b", random_init = false, part = "text"}]\nrandom_init = true'
    models = read_plan(written(tmp_path, content)).plan.models
    assert models == (ModelSpec("a", random_init=True), ModelSpec("b", part="text"))
    labels = {ModelSpec("clip", part=part, random_init=True).label for part in (None, "vision", "text")}
    assert labels == {"clip (random init)", "clip (vision, random init)", "clip (text, random init)"}


starts = st.integers(1, 200)


@given(st.lists(st.tuples(starts, st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=5))
def test_values_are_the_union_of_what_is_written(spans: list[tuple[int, int, int]]) -> None:
    text = ",".join(f"{start}:{start + more}:{step}" for start, more, step in spans)
    by_hand = {
        n for start, more, step in spans for n in range(start, start + more + 1) if (n - start) % step == 0
    }
    assert Ranges.parse(f" {text} ", "lengths").values() == tuple(sorted(by_hand))


@given(st.integers(1, 40), st.data())
def test_negative_indices_count_from_the_end(count: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(-count, count - 1))
    assert Ranges.parse(str(index), "layers").resolve(count, "m", "layers") == (list(range(count))[index],)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("all", (0, 1, 2, 3)), ("1:-1", (1, 2, 3)), ("0:3:2,-1", (0, 2, 3)), ("4", None), ("-5", None),
     ("0:4", None), ("3:1", None), ("-1:0", None)],
)  # fmt: skip
def test_layers_are_those_of_the_model(text: str, layers: tuple[int, ...] | None) -> None:
    if layers is not None:
        assert Ranges.parse(text, "layers").resolve(4, "m", "layers") == layers
        return
    with pytest.raises(
        ArgumentError, match=r"layers of m, which has 4: 0 to 3, -4 to -1, got|not empty .* got .(3:1|-1:0)"
    ):
        Ranges.parse(text, "layers").resolve(4, "m", "layers")


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_in_one_sentence(text: str) -> None:
    # Anything but an ArgumentError of this argument fails the test.
    with contextlib.suppress(ArgumentError):
        values = Ranges.parse(text, "lengths").values()
        assert values == tuple(sorted(set(values)))
        assert values[0] >= 1


@pytest.mark.parametrize(
    "text", ["", "a", "1:2:3:4", "1:", ":4", "5:1", "1:5:0", "1:5:-1", "0", "-3", "0:4", "all", "1;2",
             "1:1000000", "9999999999999999999999"]
)  # fmt: skip
def test_impossible_lengths_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="lengths"):
        Ranges.parse(text, "lengths").values()


A = 'models = ["a"]\n'


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


BAD: list[tuple[str | bytes, str]] = [
    ('model = ["small"]', "plan.toml: model: expected one of the keys .* Is models meant?"),
    ('[plan]\nmodels = ["a"]', "plan: expected .* got a table. .* leave out .plan."),
    ('models = [{name = "a", texts = 1}]', "models: texts: expected one of"),
    ('models = [{name = "a", layers = "x"}]', "plan.toml: models: layers: expected num"),
    ('models = [{name = "a", lengths = 0}]', "models: lengths: expected numbers of"),
    ('models = [{name = "a", heads = 0}]', "plan.toml: heads: expected heads only tog"),
    ('models = [{name = "a", as_decoder = "yes"}]', "as_decoder: expected"),
    ("models = [{random_init = true}]", "models: name: expected a value, got none"),
    ("samples = 1", "plan.toml: models: expected the names of the models, got a file without"),
    ("models = []", "models: expected at least one, got none"),
    ("models = [1]", "models: expected names or tables"),
    ('models = ["a", "a"]', "models: expected each only once, got 'a' twice"),
    ('models = [" "]', "models: name: expected a non-empty string"),
    (A + "bounds = 1", "plan.toml: bounds: expected one of auto, all, none, got 1"),
    (A + 'scopes = ["whole"]', "scopes: expected one of head, heads"),
    (A + "rtol = nan", "plan.toml: rtol: expected"),
    (A + "rtol = " + "9" * 400, "rtol: expected a finite number"),
    (A + 'dtype = "half"', "plan.toml: dtype: expected one of float32, float64"),
    (A + 'texts = "a"\nimages = "b"', "inputs: expected only text input.* got images and text"),
    (A + 'images = ["a", "a"]', "images: expected each only once, got .* twice"),
    (A + 'images = " "', "images: expected a non-empty string"),
    (
        A + 'tokens = "ids.npy"\nspecial_tokens = true',
        "special_tokens: expected them around a text, got tokens",
    ),
    (A + 'as_published = ["output", "x"]', "plan.toml: as_published: expected all, or some of .* got 'x'"),
    (A + 'as_published = ["output", "output"]', "'output' twice"),
    (A + 'as_published = "slices"', "howsmooth reproduce adversarial --as-published"),
    (A + 'as_published = "output,c-3"', "howsmooth reproduce bounds --as-published"),
    (A + "as_published = true", "as_published: expected a non-empty string"),
    (A + 'as_published = "all"\nscopes = ["block"]', "as_published: expected the scope attention among"),
    (A + "out = 3", "plan.toml: out: expected a non-empty string"),
    ("models = [", "plan: expected a plan file in TOML, got .*plan.toml"),
    ("samples = " + "9" * 9000, "plan: expected a plan file in TOML"),
    ("models = " + "[" * 20000, "plan: expected a plan file in TOML"),
    (b'models = ["\xe9"]', "not written in UTF-8"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_a_bad_plan_is_refused_with_the_key(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ArgumentError, match=message):
        read_plan(path)


def test_options_of_the_command_line_complete_those_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, 'models = "small"\nexecutor = "dask"\nout = "here"')
    assert read_plan(path).execution.scheduler is None
    execution = read_plan(path, scheduler="tcp://10.0.0.1:8786").execution
    assert (execution.executor, execution.scheduler) == ("dask", "tcp://10.0.0.1:8786")
    assert execution.out == tmp_path / "here"
    assert read_plan(path, scheduler="tcp://x:1", out=Path("there")).execution.out == Path("there")


def test_what_is_no_plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(tmp_path, SMALL)
    (tmp_path / "plan.json").write_text('{"models": ["small"]}')
    for path, message in (
        (tmp_path / "plan.json", r"Write it in TOML: lines such as lengths ="),
        (tmp_path / "none.toml", "no such file"),
        (tmp_path, "Is a directory"),
        (Path("a\0b"), "null byte"),
    ):
        with pytest.raises(ArgumentError, match=message):
            read_plan(path)
    with pytest.raises(ArgumentError, match=r"^threads: expected a number"):  # not the file is to blame
        read_plan(plan, threads=0)
    with pytest.raises(ArgumentError, match=r"models: expected names .* measured with hs\.profile"):
        Plan(models=torch.nn.Tanh())
    with pytest.raises(ArgumentError, match="models: expected the name of a model together with images"):
        Plan(images="builtin")
    assert main(["measure", str(plan), "--out", str(tmp_path / "out")]) == 2
    assert "A plan file is given as howsmooth measure --plan FILE." in capsys.readouterr().err


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
def howsmooth(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def command(*arguments: str, tools: Any = None) -> tuple[int, str, str]:
        capsys.readouterr()
        with installed(tools or make_tools()[0]):
            code = main(("measure", "--plan", *arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


def test_a_study_is_carried_out_and_continued_by_the_same_command(howsmooth: Any, tmp_path: Path) -> None:
    plan = str(written(tmp_path, f'{SMALL}bounds = "all"\n'))
    code, out, _ = howsmooth(plan)
    assert code == 0
    assert "45 measurements made" in out
    assert (tmp_path / "plan-out" / "report.html").exists()
    before = rows_of(tmp_path / "plan-out")
    tools, work = make_tools()
    # What is typed replaces what is written.
    code, out, err = howsmooth(plan, "--lengths", "2,4", "--layers", "-1", "--json", tools=tools)
    assert (code, err.count("error"), work.measured) == (0, 0, [])
    found = json.loads(out)
    assert (found["measurements"]["made"], found["measurements"]["kept"]) == (0, 2 * 5)
    assert (found["settings"]["samples"], found["settings"]["bounds"]) == (5, "all")
    assert rows_of(tmp_path / "plan-out") == before
    code, _, err = howsmooth(plan, "--seed", "3")
    assert code == 2
    assert "made with --seed 0, not 3" in err
    assert howsmooth(plan, "--out", str(tmp_path / "mine"), "--quiet") == (0, "", "")
    assert rows_of(tmp_path / "mine") == before


def test_a_failure_stops_nothing_else_and_the_exit_code_says_so(howsmooth: Any, tmp_path: Path) -> None:
    plan = str(written(tmp_path, SMALL.replace('"small"', '"missing", "small"')))
    code, out, err = howsmooth(plan, "--json")
    assert code == 3
    assert "1 computation failed. Reason of the first failure: model: 'missing' is not known." in err
    assert shlex.split(err.splitlines()[-1]) == ["howsmooth", "measure", "--plan", plan, "--json"]
    said = json.loads(out)
    check_documented("measure", said)
    assert said["measurements"]["made"] == 45
    (failure,) = said["failures"]
    assert (failure["model"], failure["text"], failure["kind"]) == ("missing", None, "ModelError")


OWN = """
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


def test_a_model_may_have_layers_heads_and_lengths_of_its_own(tmp_path: Path) -> None:
    models = {"small": FakeModel(), "other": FakeModel(fingerprint=digest("other"), max_length=5)}
    tools, out = make_tools(models=models)[0], tmp_path / "out"
    run(read_plan(written(tmp_path, OWN)).plan, out, tools)
    assert {(row[0], row[2], row[3], row[4], row[5]) for row in rows_of(out)} == {
        *(("small", "attention", 0, None, n) for n in (2, 4)),
        *(("small", "head", 0, head, n) for n in (2, 4) for head in (0, 1)),
        *(("other", "attention", layer, None, n) for n in (3, 5) for layer in (1, 2)),
        *(("other", "head", layer, 1, n) for n in (3, 5) for layer in (1, 2)),
    }
    with pytest.raises(ArgumentError, match="expected at most 5 tokens, the positions of other, got 6"):
        run(read_plan(written(tmp_path, OWN.replace("3:5:2", "3:6"))).plan, out, tools)
