"""What comes from elsewhere is data: nothing of it is run, unpickled or unpacked, or names where to write.

Models, arrays, texts, plans and stores of strangers are met here as they might be made by someone
who wants them to do harm. Each bomb makes a file if it goes off.
"""

from __future__ import annotations

import ast
import json
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

import howsmooth
from howsmooth.cli import main
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.models import load_model
from howsmooth.study.measurement_outputs import write_outputs
from howsmooth.study.plans import ModelSpec
from howsmooth.words import file_stem
from tests._sources import SmallModel, plain_table, small_tools
from tests._study import make_plan, make_tools, run, words
from tests._tiny_models import tiny

BOMB = "went-off"
"""The file that is there if something of a stranger's was run."""


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / BOMB


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of torch.load, which must not happen at all: not even with weights_only."""
    calls: list[str] = []
    real = torch.load

    def spy(source: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(str(source))
        return real(source, *arguments, **options)

    monkeypatch.setattr(torch, "load", spy)
    return calls


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("gpt2")


@pytest.fixture
def folder(tmp_path: Path, model: PreTrainedModel) -> Path:
    """A good model of the caller's own."""
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | values))


def test_the_bombs_work(mark: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(mark))).close()
    assert mark.exists()


# ---- weights


def into_parts(folder: Path, model: PreTrainedModel, part: str) -> None:
    """Let the index of the weights name a part beside one that is safe."""
    save_file({"x": torch.zeros(1)}, folder / "other.safetensors")
    change(folder / "model.safetensors.index.json", weight_map=dict.fromkeys(model.state_dict(), part))


def only_a_pickle(folder: Path, model: PreTrainedModel, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"w": Bomb(mark)}, folder / "pytorch_model.bin")


def a_pickle_called_safetensors(folder: Path, model: PreTrainedModel, mark: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(mark)))


def a_torch_archive_called_safetensors(folder: Path, model: PreTrainedModel, mark: Path) -> None:
    torch.save({"w": Bomb(mark)}, folder / "model.safetensors")


def a_pickle_among_the_parts(folder: Path, model: PreTrainedModel, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "w.bin")
    into_parts(folder, model, "w.bin")


def a_pickle_named_by_the_configuration(folder: Path, model: PreTrainedModel, mark: Path) -> None:
    torch.save(model.state_dict(), folder / "adapter_model.bin")
    change(folder / "config.json", transformers_weights="adapter_model.bin")


def parts_outside(folder: Path, model: PreTrainedModel, mark: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "w.safetensors")
    into_parts(folder, model, "../w.safetensors")


def weights_outside(folder: Path, model: PreTrainedModel, mark: Path) -> None:
    change(folder / "config.json", transformers_weights=str(folder / "model.safetensors"))


def no_index(folder: Path, model: PreTrainedModel, mark: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)


def an_adapter(folder: Path, model: PreTrainedModel, mark: Path) -> None:
    change(folder / "adapter_config.json", base_model_name_or_path="somebody/else")
    torch.save({"w": Bomb(mark)}, folder / "adapter_model.bin")


def quantised(folder: Path, model: PreTrainedModel, mark: Path) -> None:
    change(folder / "config.json", quantization_config={"quant_method": "fp8"})


def a_configuration_that_is_a_pickle(folder: Path, model: PreTrainedModel, mark: Path) -> None:
    (folder / "config.json").write_bytes(pickle.dumps(Bomb(mark)))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (only_a_pickle, "weights are pickled, which howsmooth never reads; convert them to safetensors"),
        (a_pickle_called_safetensors, "cannot be read: SafetensorError"),
        (a_torch_archive_called_safetensors, "cannot be read: SafetensorError"),
        (
            a_pickle_among_the_parts,
            "index of its weights names the weights 'w.bin', and howsmooth reads safe",
        ),
        (a_pickle_named_by_the_configuration, "configuration names the weights 'adapter_model.bin', and how"),
        (parts_outside, "'../w.safetensors', outside the model's folder"),
        (weights_outside, "outside the model's folder"),
        (no_index, "is not an index of weights (RecursionError)"),
        (quantised, "its weights are quantised. Give the model in full precision"),
        (an_adapter, "holds an adapter (adapter_config.json), which is not read. Merge it"),
        (a_configuration_that_is_a_pickle, "cannot be read: "),
    ],
)
def test_weights_in_anything_but_safetensors(folder, model, mark, unpickled, spoil, sentence) -> None:
    spoil(folder, model, mark)
    with pytest.raises(ModelError) as error:
        load_model(folder)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert unpickled == []
    assert not mark.exists()


def test_parts_in_safetensors_are_read(folder: Path, model: PreTrainedModel) -> None:
    whole = load_model(folder).fingerprint
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = dict.fromkeys(model.state_dict(), "part.safetensors")
    change(folder / "model.safetensors.index.json", metadata={}, weight_map=index)
    assert load_model(folder).fingerprint == whole


def test_pickles_beside_the_weights_are_left_alone(folder: Path, mark: Path, unpickled: list[str]) -> None:
    for name in ("training_args.bin", "pytorch_model.bin", "optimizer.pt", "tokenizer.json", "vocab.pkl"):
        torch.save(Bomb(mark), folder / name)
    (folder / "tokenizer.model").write_bytes(pickle.dumps(Bomb(mark)))
    loaded = load_model(folder)
    assert loaded.tokenizer_source == "none"
    assert unpickled == []
    assert not mark.exists()


# ---- code


def put_code(folder: Path, mark: Path) -> None:
    """Put a module into the folder that makes the mark when it is imported."""
    for name in ("code.py", "modeling.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(
            f"open({str(mark)!r}, 'w')\nclass C:\n    pass\ndef generate(*a):\n    pass\n"
        )


AUTO_MAP = dict.fromkeys(("AutoConfig", "AutoModel", "AutoTokenizer", "AutoModelForCausalLM"), "code.C")


def test_code_for_a_type_that_transformers_does_not_know_is_refused(folder: Path, mark: Path) -> None:
    put_code(folder, mark)
    change(folder / "config.json", model_type="of-its-own", auto_map=AUTO_MAP)
    for random_init in (False, True):
        with pytest.raises(
            ModelError, match="needs code that comes with the model, which howsmooth never runs"
        ):
            load_model(folder, random_init=random_init)
    assert not mark.exists()


def test_code_beside_a_known_type_is_ignored(folder: Path, mark: Path) -> None:
    plain = load_model(folder)
    put_code(folder, mark)
    change(folder / "config.json", auto_map=AUTO_MAP, architectures=["C"], custom_pipelines={"x": "code.C"})
    change(
        folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.C", None]}, tokenizer_class="C"
    )
    loaded = load_model(folder)
    assert type(loaded.model) is type(plain.model)
    for ours, theirs in zip(loaded.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not mark.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_named_by_the_configuration_are_not_fetched(folder, mark, monkeypatch, key) -> None:
    plain = load_model(folder)
    change(folder / "config.json", **{key: "somebody/kernel"})

    def fetch(*_: Any, **__: Any) -> None:
        mark.touch()
        raise ImportError("kernels")

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fetch)
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", fetch)
    loaded = load_model(folder)
    assert loaded.model.config._attn_implementation == plain.model.config._attn_implementation
    assert not mark.exists()


# ---- arrays


def npy_of_objects(path: Path, mark: Path) -> None:
    np.save(path, np.array([Bomb(mark)], dtype=object), allow_pickle=True)


def npy_that_is_a_pickle(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(mark)))


def npy_that_announces_too_much(path: Path, mark: Path) -> None:
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (10000000000000,), }".ljust(117) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)


@pytest.mark.parametrize("make", [npy_of_objects, npy_that_is_a_pickle, npy_that_announces_too_much])
@pytest.mark.parametrize("option", ["--tokens", "--embeddings"])
def test_arrays(tmp_path, mark, monkeypatch, capsys, make, option) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    make(Path("a.npy"), mark)
    assert main(["bound", "builtin-encoder", option, "a.npy", "--lengths", "4", "-q", "--out", "out"]) == 2
    assert "expected a .npy file, got a.npy, which cannot be read" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "a.npy"]


# ---- names


HOSTILE = {
    "up": "../../up",
    "absolute": "/absolute-name",
    "nothing": "a\0b",
    "a device": "CON",
    "bidi and unicode": "\u202egnp.exe \u0000 Ärger 漢字 \U0001f4a5",
    "odd bytes": "odd\udcff\ud800",
    "another device": "nul",
    "up as windows writes it": "..\\..\\up",
    "drive": "C:\\Windows\\x",
    "dots": "..",
    "long": "long" * 1000,
    "lines": "two\nlines\r\n\tand a tab",
    "shell": "$(touch went-off); `touch went-off`",
    "markup": "</script><img src=x onerror=alert(1)>",
    "stream": "x.txt::$DATA",
    "dash": "--out=elsewhere",
}

_TWO = list(zip(list(HOSTILE)[::2], list(HOSTILE)[1::2], strict=True))
names = pytest.mark.parametrize(
    ("model", "text"),
    [
        pytest.param(HOSTILE[a], HOSTILE[b], id=f"{a}, {b}", marks=[pytest.mark.slow] if place > 2 else [])
        for place, (a, b) in enumerate(_TWO)
    ],
)
"""Two names a test, one of a model and one of a text; drawing takes long."""

DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


def files_below(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()]


def check_names(root: Path, inside: str) -> None:
    """All files of a root are in one folder, under names that any file system takes."""
    found = files_below(root)
    assert found
    for path in found:
        assert path.parts[0] == inside
        for part in path.parts:
            assert re.fullmatch(r"\.?[a-z0-9][a-z0-9.-]*[a-z0-9]", part), part
            assert not DEVICES.fullmatch(part), part
            assert len(part) <= 150
        assert not (root / path).is_symlink()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> Path:
    """A folder to work in, with room above it, that only one folder in it may be written to."""
    place = tmp_path / "a" / "b" / "root"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    return place


def nothing_above(root: Path) -> None:
    above = root.parents[2]
    assert {path for path in above.rglob("*") if root not in path.parents} == {root, *root.parents[:2]}
    assert not Path("/absolute-name").exists()


@names
def test_names_of_models_and_texts_in_studies_and_bounds(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, text: str
) -> None:
    named, _ = make_tools(models={model: SmallModel()}, texts={text: words(400)})
    possible = "\0" not in model + text  # which no file system, no plan and no command line takes
    if possible:
        plan = make_plan(models=(ModelSpec(model),), texts=(text,), lengths=(2, 4), samples=2)
        run(plan, Path("out"), named)
        write_outputs(Path("out"), figures="all")
        assert any(path.parts[1] == "figures" for path in files_below(root))
    else:
        with pytest.raises(ArgumentError, match="expected a non-empty string"):
            make_plan(models=(ModelSpec(model),), texts=(text,))
    for place, stand_in in {
        "howsmooth.models.load_model": named.load_model,
        "howsmooth.texts.load_text": named.load_text,
        "howsmooth.models.capture": small_tools().capture,
        "howsmooth.bounds.table": plain_table,
        "howsmooth.cli.first_checks.folder_of": lambda name, **_: None,
    }.items():
        monkeypatch.setattr(place, stand_in)
    options = ["--text", text, "--layers", "0", "--lengths", "4", "--out", "out/bounds", "-q"]
    assert main(["bound", *options, "--", model]) == (0 if possible else 2), capsys.readouterr().err
    if possible:
        assert list(Path("out/bounds").iterdir())
        check_names(root, "out")
    nothing_above(root)


def test_names_that_differ_have_files_that_differ() -> None:
    names = {*HOSTILE.values(), *map(str.swapcase, HOSTILE.values()), "", "-", "aux.txt", "com1", "lpt9.x"}
    stems = [file_stem(name) for name in names]
    assert len(set(stems)) == len(names)
    assert not [stem for stem in stems if DEVICES.fullmatch(stem) or not stem]
    parts = [("a", "b", "c"), ("a--b", "c"), ("a", "b--c"), ("a-", "-b", "c"), ("a", "", "b", "c")]
    assert len({file_stem(*names) for names in parts}) == len(parts)


# ---- what no part of the library uses

FORBIDDEN = set(
    """
    pickle _pickle cPickle dill cloudpickle joblib shelve marshal tarfile torch.load torch.jit.load torch.hub
    shutil.unpack_archive eval exec compile __import__ os.system pandas.read_pickle pd.read_pickle yaml.load
    """.split()  # noqa: SIM905 - a column of names would be harder to read
)
"""Modules and functions that unpickle, unpack or run what they are given."""


def dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            names = [dotted(node.func)]
            if names[0].rpartition(".")[2] in ("extract", "extractall"):
                found.append(names[0])
            given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            found += [word for word in ("trust_remote_code", "allow_all_kernels") if given.get(word)]
            if names[0] in ("np.load", "numpy.load") and given.get("allow_pickle", True):
                found.append(names[0])
            if names[0].endswith("AutoModel.from_pretrained") and given.get("use_safetensors") is not True:
                found.append(names[0])
        found += [name for name in names if name in FORBIDDEN or name.partition(".")[0] in FORBIDDEN]
    return found


OFFENCES = """
import pickle; from pickle import loads; from shutil import unpack_archive; torch.load('x'); np.load('x');
np.load('x', allow_pickle=True); archive.extractall(); f(trust_remote_code=True);
AutoModel.from_pretrained('x'); eval('1')
"""


def test_no_module_unpickles_unpacks_or_runs_what_it_reads() -> None:
    assert all(offences(source.strip()) for source in OFFENCES.split(";"))
    modules = list(Path(howsmooth.__file__).parent.rglob("*.py"))
    assert len(modules) > 100
    assert {str(path): found for path in modules if (found := offences(path.read_text("utf-8")))} == {}
