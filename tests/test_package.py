"""The package as others get it: wheel, sdist, imports, and the rule of who imports whom."""

from __future__ import annotations

import ast
import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

import jaxtyping
import pytest
import torch

from howsmooth.adversarial.repeated_token_search import RepeatedTokens
from howsmooth.attention import RMSNorm
from howsmooth.errors import CertificateError, ModelError, NonFiniteError
from howsmooth.jacobian.rounding_bounds import norm_error
from howsmooth.measures.transport_problem import TransportPlan
from howsmooth.rounding import MatrixNorms

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "howsmooth"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _run(command: Sequence[str | Path], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def _python(code: str, folder: Path) -> str:
    done = _run([sys.executable, "-c", code], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- annotations


@pytest.mark.parametrize("call", ["a function", "a method", "a class method", "a dataclass"])
def test_a_shape_that_its_annotation_denies_is_an_error(call: str) -> None:
    x, wrong = torch.ones(2, 3, 4, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
    calls = {
        "a function": lambda: norm_error(RMSNorm(x[0, 0], 1e-6), x, off=wrong),
        "a method": lambda: MatrixNorms().spectral(x[0, 0]),
        "a class method": lambda: TransportPlan.of_matrix(x[0, 0].numpy()),
        "a dataclass": lambda: RepeatedTokens("tokens", x, (1, 1)),
    }
    norm_error(RMSNorm(x[0, 0], 1e-6), x, off=x[..., 0])  # a right call hides no wrong one
    with pytest.raises(jaxtyping.TypeCheckError):
        calls[call]()


def test_public_functions_take_paths_as_strings_too() -> None:
    pages = (path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    modules = [import_module(name) for page in pages for name in re.findall(r"automodule:: (\S+)", page)]
    values = [getattr(module, name) for module in modules for name in getattr(module, "__all__", ())]
    classes = [value for value in values if isinstance(value, type)]
    methods = [getattr(one, name) for one in classes for name in vars(one) if not name.startswith("_")]
    made = [one.__init__ for one in classes if not is_dataclass(one) and one.__name__ != "Store"]
    paths = 0
    for function in (*values, *methods, *made):
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            continue
        for one in inspect.signature(function).parameters.values():
            paths += "PathLike" in str(one.annotation)
            assert not re.search(r"\bPath\b", str(one.annotation)), (function, one)
    assert paths > 20


# ---- imports


def test_import_is_light_and_names_are_public(tmp_path: Path) -> None:
    import howsmooth

    # Processor time, so that a load on the machine is no failure.
    code = """
import sys, time
begun = time.process_time()
import howsmooth
print(time.process_time() - begun)
print(*sys.modules)
print(*dir(howsmooth))
"""
    seconds, loaded, names = _python(code, tmp_path).splitlines()
    assert float(seconds) < 0.5
    heavy = set("torch transformers tokenizers matplotlib pandas sqlite3 typer rich jinja2".split())  # noqa: SIM905
    assert heavy.isdisjoint(loaded.split())
    assert names.split() == sorted([*howsmooth.__all__, "__version__"])


def test_an_exception_keeps_its_fields_on_its_way_from_another_process() -> None:
    for error in (
        NonFiniteError("x", expected="finite numbers", got="NaN", remedy="Look at x."),
        CertificateError("0.norm", kind="Norm", reason="has none"),
        ModelError("no such model"),
    ):
        error.add_note("seen in a worker")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert {**vars(again), "__notes__": error.__notes__} == vars(error)


def test_lazy_names_are_the_real_ones() -> None:
    import howsmooth
    from howsmooth import models

    assert howsmooth.capture is models.capture
    assert howsmooth.load_model is models.load_model
    assert howsmooth.Site is models.Site
    assert all(hasattr(howsmooth, name) for name in howsmooth.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        howsmooth.nonsense  # noqa: B018


@pytest.mark.slow
def test_packages_show_public_names_only(tmp_path: Path) -> None:
    # In a fresh process, since an imported submodule becomes an attribute of its package.
    code = """
import howsmooth
for name in howsmooth.__all__:
    value = getattr(howsmooth, name)
    if hasattr(value, "__path__"):
        own = {one for one in dir(value) if not one.startswith("__")} - set(getattr(value, "__all__", ()))
        stray = sorted(one for one in own if f"{value.__name__}.{one}" not in __import__("sys").modules)
        print(name, *stray)
"""
    import howsmooth

    packages = _python(code, tmp_path).splitlines()
    assert packages == [name for name in howsmooth.__all__ if (SOURCE / name).is_dir()]


def test_what_is_imported_is_declared() -> None:
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    declared = {
        re.split(r"[<>=~! ]", requirement)[0].replace("-", "_")
        for requirements in (
            PROJECT["project"]["dependencies"],
            *PROJECT["project"]["optional-dependencies"].values(),
        )
        for requirement in requirements
    }
    # What is imported under another name than it is installed by.
    others = {"ot": "POT", "mpl_toolkits": "matplotlib", "PIL": "pillow"}
    found = {others.get(name, name) for name in found}
    assert found - set(sys.stdlib_module_names) - {"howsmooth"} <= declared


def test_constraints_pin_every_direct_dependency_and_nothing_else() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if line and not line.startswith("#")}
    wanted = PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["test"]
    assert pinned == {re.split(r"[<>=~!]", requirement)[0] for requirement in wanted}


# ---- the rule of who imports whom


# Of each contract: a module, and a line that it forbids there. That they are kept is a step of dev.py.
VIOLATIONS = {
    "Imports go down only; packages of one level": [
        ("spectral/scaling", "from howsmooth.attention import TokenMap"),
        ("errors", "import howsmooth.texts"),
    ],
    "Inside models": [("models/tolerance", "import howsmooth.models.capture")],
    "transformers, its tokenizers and its hub": [
        ("study/plans", "from transformers import AutoModel"),
        ("lipschitz/local", "import tokenizers"),
    ],
    "matplotlib": [("study/report", "from matplotlib.figure import Figure")],
    "Optimal transport": [("spectral/lanczos", "import ot")],
    "typer and rich": [("study/measurement_run", "import rich")],
    "Dask": [("study/runner", "import distributed")],
    "Bounds share no code": [("bounds/bound", "import howsmooth.spectral")],
    "Figures, tables and report": [("study/figures", "from howsmooth.lipschitz import local_lipschitz")],
    "What the paper's pictures share": [("paper/plotting", "import howsmooth.lipschitz")],
}


def test_import_rule_catches_violations_of_every_contract(tmp_path: Path) -> None:
    copy = tmp_path / "src" / "howsmooth"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    for cases in VIOLATIONS.values():
        for module, line in cases:
            with (copy / f"{module}.py").open("a", encoding="utf-8") as file:
                file.write(f"\n{line}\n")
    (copy / "newcomer.py").touch()  # which has no level
    program = Path(sys.executable).with_name("lint-imports")
    command = [program, "--config", ROOT / "pyproject.toml", "--no-cache"]
    done = _run(command, tmp_path, PYTHONPATH=str(tmp_path / "src"))
    assert done.returncode == 1, done.stdout
    told = " ".join(done.stdout.split())
    contracts = [one["name"] for one in PROJECT["tool"]["importlinter"]["contracts"]]
    assert len(contracts) == len(VIOLATIONS)
    for start, cases in VIOLATIONS.items():
        (name,) = [name for name in contracts if name.startswith(start)]
        assert f"{name} BROKEN" in told, done.stdout
        for module, line in cases:
            imported = line.split()[1].replace("matplotlib.figure", "matplotlib")
            assert re.search(rf"howsmooth\.{module.replace('/', '.')} -> {imported}\b", told), done.stdout
    assert "newcomer" in told


# ---- what is said about the package


def test_version_is_the_same_everywhere() -> None:
    import howsmooth

    version = PROJECT["project"]["version"]
    assert howsmooth.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    command = "python3 dev.py test"
    assert f"\n{command} " in (ROOT / "README.md").read_text(encoding="utf-8")
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


# ---- wheel and sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build sdist and wheel of a copy, without a network: the back end comes from this environment."""
    folder = tmp_path_factory.mktemp("package")
    copy = folder / "clone"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "out", "dist", "_build", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    done = _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", copy], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


def test_wheel_holds_what_the_package_needs(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = {
        f"howsmooth/{path.relative_to(SOURCE).as_posix()}"
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert tracked <= names
    assert {"howsmooth/py.typed", "howsmooth/study/templates/report.html.jinja"} <= names
    for kind in ("encoder", "decoder"):
        files = ("config.json", "model.safetensors", "tokenizer.json", "README.md")
        assert {f"howsmooth/models/builtin/{kind}/{file}" for file in files} <= names
    assert all(name.startswith(("howsmooth/", "howsmooth-")) for name in names)
    assert wheel.stat().st_size < 13_000_000


def test_sdist_holds_what_a_developer_needs(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"dev.py", "conftest.py", "constraints.txt", "pyproject.toml", "LICENSE", "README.md"}
    wanted |= {"CONTRIBUTING.md", "CITATION.cff", "docs/conf.py", "tests/test_package.py"}
    assert wanted <= names


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in an environment of its own; return the folder of its programs."""
    folder = tmp_path_factory.mktemp("installed")
    scratch = folder / "venv"
    venv.create(scratch, with_pip=False)
    site = next(scratch.glob("lib/python*/site-packages"))
    # The other packages are those of this environment, but not its own howsmooth, were it installed there.
    here = Path(pytest.__file__).parents[1]
    for entry in here.iterdir():
        if "howsmooth" not in entry.name and not entry.name.endswith(".pth"):
            (site / entry.name).symlink_to(entry)
    (wheel,) = built.glob("*.whl")
    command = ["-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index", wheel]
    done = _run([scratch / "bin" / "python", *command], folder)
    assert done.returncode == 0, done.stderr
    return scratch / "bin"


@pytest.mark.slow
def test_wheel_runs_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    done = _run([installed / "howsmooth", "--version"], tmp_path)
    assert (done.returncode, done.stdout) == (0, f"howsmooth {PROJECT['project']['version']}\n"), done.stderr
    options = ["--layers", "0", "--lengths", "4,8", "--samples", "2", "--out", "out"]
    command = [installed / "howsmooth", "measure", "builtin-encoder", *options]
    done = _run(command, tmp_path, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONWARNINGS="error")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out" / "measurements.csv").read_text().splitlines()) == 1 + 4
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
