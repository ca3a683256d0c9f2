"""Settings of all tests, and the runner of the documentation's blocks of code.

A page is one session: its Python blocks share their names, its console blocks a scratch folder.
Blocks of ``python`` run as they stand; with prompts (``>>>``) they are compared like doctests, with ``...``
for what varies. Blocks of ``console`` hold commands after ``$``: each must end with exit code 0, unless
``$ echo $?`` follows and shows another, and each must print what stands below it, again with ``...``.
Of numbers with decimals the digits shown are compared, to one unit of the last one or 1 %, whichever is more;
only times vary freely. What a Python block prints is compared so with a block of ``text`` right below it. A
block that is not to be run is written as ``sh``, or as ``text`` below one that prints nothing.
"""

from __future__ import annotations

import doctest
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial, wraps
from io import StringIO
from pathlib import Path
from types import FunctionType
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import settings
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parent
RUNNABLE = ("howsmooth", "python", "ls", "head", "cat")
DOCTEST = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
DECIMAL = r"-?\d+\.\d+"
SECONDS = 120

# Triton is imported by others too, and what it imports then decides what its interpreter can run.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# Workers of pytest-xdist share the cores: threads of one would wait for cores that another one uses.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests begin
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


# What is imported and collected lives as long as the run. The garbage collector need not look for garbage
# in it, neither while it grows nor later.
gc.disable()


def pytest_collection_finish() -> None:
    """Take the collected tests out of the garbage collector's sight, and begin with garbage of tests."""
    gc.freeze()
    gc.enable()


# Few examples by default; `--hypothesis-profile=thorough` for many. Times vary with the machine.
settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("thorough", max_examples=200, deadline=None)
settings.load_profile("quick")


def _names_a_shape(decorated: Any) -> bool:
    """Tell whether an annotation of a function, a method or a dataclass is one of jaxtyping's."""
    if isinstance(decorated, type):
        decorated = decorated.__init__
    function = getattr(decorated, "__func__", None) or getattr(decorated, "fget", None) or decorated
    words = re.findall(r"\w+", " ".join(map(str, getattr(function, "__annotations__", {}).values())))
    return any(getattr(function.__globals__.get(word), "__module__", "") == "jaxtyping" for word in words)


# The arguments for which the running test has seen a function's shapes checked, by the identity of its code.
_checked: dict[int, set[Any]] = {}


def pytest_runtest_setup() -> None:
    """Forget what was checked in the tests before."""
    _checked.clear()


def _shapes_of(value: Any) -> Any:
    """Return what a check of shapes depends on: shapes and dtypes, whole numbers and words, other types."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return kind, value.shape, value.dtype
    if kind is tuple or kind is list:
        return kind, *map(_shapes_of, value)
    if kind is dict:
        return kind, *((name, _shapes_of(one)) for name, one in value.items())
    if kind is np.ndarray:
        return kind, value.shape, value.dtype
    return value if kind is int or kind is bool or kind is str else kind


def _checking_new_shapes(function: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function checked whenever a test calls it with shapes that it has not had in this test yet.

    A check takes longer than many a function, and a solver calls a function thousands of times with the same
    shapes.
    """
    code = id(function.__code__)
    checked: list[Callable[..., Any]] = []  # compiled at the first call: some functions are never called

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        shapes = (*map(_shapes_of, args), _shapes_of(kwargs)) if kwargs else (*map(_shapes_of, args),)
        seen = _checked.get(code)
        if seen is None:
            seen = _checked[code] = set()
        elif shapes in seen:
            return function(*args, **kwargs)
        if not checked:
            checked.append(check(function))
        found = checked[0](*args, **kwargs)
        seen.add(shapes)
        return found

    return called


def _checking_shapes_only(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """Let jaxtyping's import hook decorate what names a shape alone: all other types are checked by mypy.

    Decorated, each of some three thousand functions binds its arguments twice a call, and functions inside
    of functions are compiled anew in every call of the outer one.
    """

    def decorate(decorated: Any = None, *, typechecker: Any) -> Any:
        if decorated is None:
            return partial(decorate, typechecker=typechecker)
        if not _names_a_shape(decorated):
            return decorated
        check = partial(jaxtyped, typechecker=typechecker)
        if isinstance(decorated, FunctionType):
            return _checking_new_shapes(decorated, check)
        if isinstance(decorated, type):
            decorated.__init__ = _checking_new_shapes(decorated.__init__, check)
            return decorated
        return check(decorated)

    return decorate


jaxtyping.jaxtyped = _checking_shapes_only(jaxtyping.jaxtyped)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Execute no annotations, as for a user: what they would stop must be refused in words."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let figures be built and files be written, but nothing rendered, which takes most of their time."""
    from matplotlib.figure import Figure

    def saved(_: Figure, target: Any, **options: Any) -> None:
        target.write(b"PNG") if hasattr(target, "write") else Path(target).write_bytes(b"PNG")

    monkeypatch.setattr(Figure, "savefig", saved)


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """Yield the device of the tests in ``tests/gpu``, whose judge is the CPU in float64.

    Without a CUDA device they skip. ``HOWSMOOTH_GPU_TESTS_DEVICE=cpu`` runs them on the CPU, so that the
    tests themselves are tested, and ``=pretended`` on a CPU under the rules of another device, where a tensor
    left behind on the CPU is seen.
    """
    from tests import _pretended_device

    variable = "HOWSMOOTH_GPU_TESTS_DEVICE"
    chosen = os.environ.get(variable, "cuda")
    if chosen == _pretended_device.NAME:
        with _pretended_device.pretended() as pretended:
            yield pretended
        return
    if torch.device(chosen).type == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"no CUDA device on this machine; {variable}=cpu runs the same tests on the CPU")
    yield torch.device(chosen)


def _commands(block: str) -> list[tuple[str, str]]:
    """Split a console block into commands and the output below each."""
    found: list[tuple[str, str]] = []
    lines = iter(block.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command = command[:-1] + next(lines).strip().removeprefix("> ")
            found.append((command, ""))
        elif found:
            found[-1] = (found[-1][0], found[-1][1] + line + "\n")
        elif line.strip():
            raise AssertionError(f"a console block must begin with '$ ', not with {line!r}")
    return found


def _environment() -> dict[str, str]:
    """As a user's shell, at a fixed width, without network, one thread."""
    programs = str(Path(sys.executable).parent)
    fixed = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **fixed, "PATH": programs + os.pathsep + os.environ.get("PATH", "")}


def _same(wanted: str, got: str) -> bool:
    """Tell whether an output is what the page shows, but for progress, times, and last digits of decimals."""
    got = re.sub(r"^ *\d+ %, .*\n", "", got, flags=re.MULTILINE)
    wanted, got = (re.sub(rf"{DECIMAL} s\b", "# s", output) for output in (wanted, got))
    shown = re.findall(DECIMAL, wanted)
    # Without gaps the numbers stand in the order of the page, otherwise each is taken for the nearest.
    in_order = iter(shown) if "..." not in wanted else None

    def as_shown(number: re.Match[str]) -> str:
        value = float(number[0])
        page = next(in_order, "nan") if in_order else min(shown, key=lambda one: abs(float(one) - value))
        digit = 10.0 ** -len(page.partition(".")[2])
        near = abs(float(page) - value) <= max(1.001 * digit, 0.01 * abs(value))
        return page if near else number[0]

    got = re.sub(DECIMAL, as_shown, got) if shown else got
    return doctest.OutputChecker().check_output(wanted, got, DOCTEST)


def _console(example: Example) -> None:
    """Run one console block."""
    commands = _commands(example.parsed)
    last = 0
    for index, (command, wanted) in enumerate(commands):
        if command == "echo $?":
            got = f"{last}\n"
        else:
            assert command.split()[0] in RUNNABLE, f"not run by the tests, write it in an sh block: {command}"
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=example.namespace["_folder"],
                env=_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            last, got = done.returncode, done.stdout
            shown = index + 1 < len(commands) and commands[index + 1][0] == "echo $?"
            assert last == 0 or shown, f"$ {command}\nended with exit code {last}:\n{got}"
        if wanted.strip() and not _same(wanted, got):
            raise AssertionError(f"$ {command}\nprinted\n{got}\nwhere the page says\n{wanted}")


class _Printing(PythonEvaluator):
    """Runs a Python block, and keeps what it prints for a block of text right below it."""

    def __call__(self, example: Example) -> None:
        with redirect_stdout(StringIO()) as printed:
            super().__call__(example)
        example.namespace["_printed"] = example.end, printed.getvalue()


def _text(example: Example) -> None:
    """Compare a block of text with what the Python block right above it has printed, if it has."""
    end, got = example.namespace.get("_printed", (0, ""))
    if got and not example.document.text[end : example.start].strip():
        assert _same(example.parsed, got), f"printed was\n{got}\nwhere the page says\n{example.parsed}"


def _enter(namespace: dict[str, Any]) -> None:
    namespace["_folder"] = tempfile.mkdtemp(prefix="howsmooth-docs-")
    namespace["_left"] = Path.cwd()
    os.chdir(namespace["_folder"])


def _leave(namespace: dict[str, Any]) -> None:
    os.chdir(namespace["_left"])
    shutil.rmtree(namespace["_folder"])


_python = PythonCodeBlockParser(doctest_optionflags=DOCTEST)
_python.codeblock_parser = CodeBlockParser("python", _Printing())

pytest_collect_file = Sybil(
    parsers=[
        _python,
        CodeBlockParser(language="console", evaluator=_console),
        CodeBlockParser(language="text", evaluator=_text),
        SkipParser(),
    ],
    path=str(ROOT),
    patterns=["README.md", "docs/*.md", "docs/*/*.md"],
    excludes=["docs/_build/*", "docs/_build/*/*"],
    setup=_enter,
    teardown=_leave,
).pytest()
