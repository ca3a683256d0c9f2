"""dev.py: set up once, again when something changed, and one sentence when it cannot."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return dev.py as if it lay in a folder with its two files and nothing else."""
    spec = importlib.util.spec_from_file_location("dev", ROOT / "dev.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    environment, lines = tmp_path / ".venv", tmp_path / "src" / "lines.txt"
    places = {"ROOT": tmp_path, "VENV": environment, "BIN": environment / "bin", "LINES": lines}
    places |= {"PYTHON": environment / "bin" / "python", "STAMP": environment / "stamp.json"}
    places["LOG"] = environment / "pip.log"
    lines.parent.mkdir()
    lines.write_text("0\n")
    for name, place in places.items():
        monkeypatch.setattr(module, name, place)
    return module


@pytest.fixture
def calls(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what is made and installed, instead of doing it."""
    done: list[str] = []

    def create() -> None:
        done.append("create")
        dev.BIN.mkdir(parents=True, exist_ok=True)
        dev.PYTHON.touch()

    monkeypatch.setattr(dev, "create", create)
    monkeypatch.setattr(dev, "pip", lambda *words: done.append(f"pip with {len(words)} words"))
    return done


def test_loads_under_an_old_python() -> None:
    ast.parse((ROOT / "dev.py").read_text(encoding="utf-8"), feature_version=(3, 8))


def test_old_python_gets_a_sentence(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev.sys, "version_info", (3, 10, 2))
    with pytest.raises(dev.SetUpError, match=r"^Python 3\.11 or newer is needed, this is .*\.$"):
        dev.main(["measure"])


def test_unknown_command() -> None:
    for words in (["frobnicate"], ["run"], ["docs", "more"]):
        done = subprocess.run(
            [sys.executable, ROOT / "dev.py", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr.startswith(f"dev.py: cannot do {' '.join(words)!r}")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda dev: (dev.ROOT / "pyproject.toml").write_text("another"),
        lambda dev: (dev.ROOT / "constraints.txt").write_text("another"),
        lambda dev: dev.PYTHON.unlink(),
        lambda dev: dev.STAMP.unlink(),
        lambda dev: dev.STAMP.write_text("["),
    ],
    ids=["requirements", "constraints", "no python", "unfinished", "nonsense in the stamp"],
)
def test_a_change_or_a_damage_installs_again(
    dev: ModuleType, calls: list[str], change: Callable[[ModuleType], object]
) -> None:
    dev.prepare(test=False)
    dev.prepare(test=False)
    assert calls == ["create", "pip with 5 words"]
    change(dev)
    dev.prepare(test=False)
    assert calls.count("pip with 5 words") == 2
    assert json.loads(dev.STAMP.read_text())["key"] == dev.key()


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands for a program")
def test_pip_tells_its_steps_and_its_failure_and_leaves_no_stamp(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def create() -> None:
        dev.BIN.mkdir(parents=True)
        dev.PYTHON.write_text(
            "#!/bin/sh\nseq 1000\necho '  Downloading torch.whl (191.2 MB)'\n"
            "echo WARNING: of no use\necho ERROR: no such package\nexit 7\n"
        )
        dev.PYTHON.chmod(0o755)

    monkeypatch.setattr(dev, "create", create)
    with pytest.raises(dev.SetUpError, match="exit code 7") as caught:
        dev.prepare(test=False)
    lines = str(caught.value).splitlines()
    assert "  ERROR: no such package" in lines
    assert "  1000" in lines
    assert len(lines) < 16
    assert "of no use" not in str(caught.value)
    assert not dev.STAMP.exists()
    assert "of no use" in dev.LOG.read_text()
    assert "dev.py: Downloading torch.whl (191.2 MB)\n" in capsys.readouterr().err


def test_a_file_in_the_way_is_not_deleted(dev: ModuleType) -> None:
    dev.VENV.write_text("mine")
    with pytest.raises(dev.SetUpError, match="is not a folder"):
        dev.create()
    assert dev.VENV.read_text() == "mine"


def test_measure_takes_a_sample_and_goes_to_out_unless_told_otherwise(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(dev, "prepare", lambda *, test: None)
    monkeypatch.setattr(dev, "run", lambda command, cwd: commands.append(tuple(command)) or 0)
    monkeypatch.chdir(dev.ROOT)
    monkeypatch.setattr(dev.sys, "argv", ["../tool/dev.py", "measure"])
    monkeypatch.setenv("HOWSMOOTH_COMMAND", "")
    assert dev.main(["measure"]) == 0
    assert os.environ["HOWSMOOTH_COMMAND"] == "python3 ../tool/dev.py"
    told = "all 490 of the paper: python3 ../tool/dev.py measure --lengths 2:98:2 --samples 10\n"
    assert capsys.readouterr().err.endswith(told)
    dev.main(["measure", "gpt2", "--out=there"])
    dev.main(["measure", "--out", "there"])
    assert commands == [
        ("howsmooth", "measure", *dev.SAMPLE, "--out", "out"),
        ("howsmooth", "measure", "gpt2", "--out=there"),
        ("howsmooth", "measure", "--out", "there"),
    ]


def test_all_steps_run_and_the_failed_ones_are_named(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev, "prepare", lambda *, test: None)
    seen: list[str] = []

    def run(command: tuple[str, ...], threads: int | None) -> int:
        seen.append(command[0])
        return int(command[0] == "mypy")

    monkeypatch.setattr(dev, "run", run)
    assert dev.main(["test"]) == 1
    assert seen == ["ruff", "ruff", "lint-imports", "mypy", "sphinx-build", "pytest", "pytest"]
    assert capsys.readouterr().err.endswith("dev.py: FAILED: mypy\n")


def test_the_lines_of_the_source_only_go_down(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = tmp_path / "src" / "package" / "module.py"
    module.parent.mkdir()
    module.write_text("a = 1\nb = 2\n")
    dev.LINES.write_text("1\n")
    assert dev.size() == 1
    module.write_text("a = 1\n")
    assert dev.size() == 0
    module.write_text("")
    assert dev.size() == 0
    assert dev.LINES.read_text() == "0\n"
    monkeypatch.setattr(dev, "prepare", lambda *, test: None)
    monkeypatch.setattr(dev, "steps", lambda *_arguments, **_options: 0)
    module.write_text("a = 1\n")
    assert dev.main(["check"]) == dev.main(["test"]) == 1


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands for a program")
def test_a_program_is_ended_by_a_signal(dev: ModuleType) -> None:
    dev.BIN.mkdir(parents=True)
    program = dev.BIN / "ended"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    assert dev.run(("ended",)) == 137
    with pytest.raises(dev.SetUpError, match="no program 'nothing'"):
        dev.run(("nothing",))
