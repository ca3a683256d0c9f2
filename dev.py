#!/usr/bin/env python3
"""One tool for a clone of howsmooth: sets up its own environment, measures, tests, builds the docs.

    python3 dev.py measure                         a sample of the paper's protocol, into out/
    python3 dev.py measure [MODEL ...] [options]   howsmooth measure, into out/
    python3 dev.py test [pytest arguments]         every check and test; with arguments: pytest alone
    python3 dev.py check                           ruff, mypy, the import rule and the size of src alone
    python3 dev.py docs                            build the documentation, and say where its pages are
    python3 dev.py links                           try its links to elsewhere; needs a network
    python3 dev.py run PROGRAM [arguments]         any program of the environment

Needs Python 3.11 or newer and nothing else. The environment is the folder .venv beside this file; it
is made at the first call, and again when pyproject.toml, constraints.txt or the Python changes.
Delete it at any time. To check another Python, start this file with it: python3.13 dev.py test
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# This file must load under any Python 3.8, so that an old one gets the sentence below and no traceback.
OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMP = VENV / "howsmooth-stamp.json"
LOG = VENV / "howsmooth-pip.log"


# A line of pip about a download of ten megabytes or more.
LARGE = re.compile(r"Downloading .*\(\d\d+(\.\d+)? [MG]B\)")


class SetUpError(Exception):
    """Something that the user must hear of, in one sentence."""


# ---- the environment


def key() -> str:
    """Digest of everything that the environment is made from."""
    digest = hashlib.sha256(f"{sys.version}\n{sys.base_prefix}\n{ROOT}\n".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def stamp() -> dict[str, object]:
    """Return what the environment was made with, or nothing if it was not finished."""
    try:
        found = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def home() -> str:
    """Say which Python the environment belongs to, and where it lies; it works nowhere else."""
    return f"{sys.version_info[0]}.{sys.version_info[1]} {sys.base_prefix} {ROOT}"


def prepare(*, test: bool) -> None:
    """Make .venv, or bring it up to date; at once if nothing changed."""
    made = stamp()
    if PYTHON.exists() and made.get("key") == key() and (made.get("test") or not test):
        return
    begun = time.monotonic()
    test = test or bool(made.get("test"))
    if not PYTHON.exists() or made.get("home", home()) != home():
        create()
    STAMP.unlink(missing_ok=True)
    wanted = ["-e", str(ROOT), *(test_requirements() if test else [])]
    pip("install", "-c", str(ROOT / "constraints.txt"), *wanted)
    STAMP.write_text(json.dumps({"key": key(), "home": home(), "test": test}))
    say(f"environment ready in {time.monotonic() - begun:.0f} s")


def create() -> None:
    """Make an empty environment in .venv, in place of any that is there."""
    try:
        import ensurepip  # noqa: F401 - Debian ships venv without it
        import venv
    except ImportError as error:
        raise SetUpError(
            f"this Python lacks the module {error.name}: install it "
            f"(Debian and Ubuntu: apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv)."
        ) from None
    say(f"making {VENV.name} with Python {sys.version.split()[0]}")
    if VENV.is_symlink() or VENV.is_file():
        raise SetUpError(f"{VENV} is not a folder: move it away.")
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        venv.create(VENV, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetUpError(f"{VENV} could not be made: {error}.") from None


def test_requirements() -> list[str]:
    """Read the dependency group ``test``; pip knows such groups only since 25.1."""
    import tomllib

    with (ROOT / "pyproject.toml").open("rb") as file:
        group = tomllib.load(file)["dependency-groups"]["test"]
    return [str(requirement) for requirement in group]


def pip(*arguments: str) -> None:
    """Run pip, its output in a log; tell its larger steps, and its last lines if it fails."""
    say("installing packages with pip, some minutes the first time")
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    live = sys.stderr.isatty()
    width = shutil.get_terminal_size().columns - 1
    lines: list[str] = []
    command = [*command, "--progress-bar", "off"]
    with LOG.open("w", encoding="utf-8") as log:  # noqa: SIM117 - one "with" would not load under 3.8
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                lines.append(line.rstrip())
                step = line.strip()
                if live:
                    print("\r\033[K" + step[:width], end="", file=sys.stderr, flush=True)
                elif step.startswith("Installing collected") or LARGE.match(step):
                    say(step.partition(":")[0])
    if live:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if process.returncode:
        told = [line for line in lines if line.strip() and not line.startswith("WARNING")][-12:]
        raise SetUpError(
            f"pip could not install the packages (exit code {process.returncode}). Its last lines:\n  "
            + "\n  ".join(told)
            + f"\nThe whole log: {LOG.relative_to(ROOT)}. Run the same command again once this is mended."
        )


# ---- what it is for


def environment() -> dict[str, str]:
    """Return the variables under which programs of the environment run."""
    found = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
    found["PATH"] = f"{BIN}{os.pathsep}{found.get('PATH', '')}"
    found["VIRTUAL_ENV"] = str(VENV)
    # Tests begin many processes: each would compile the package anew where no bytecode is kept.
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found


def run(command: Sequence[str], *, cwd: Path = ROOT, threads: int | None = None) -> int:
    """Run a program of the environment, on so many threads, and return its exit code."""
    variables = environment() | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    program = shutil.which(command[0], path=str(BIN))
    if program is None:
        raise SetUpError(f"there is no program {command[0]!r} in {BIN.relative_to(ROOT)}.")
    interrupted = False
    with subprocess.Popen([program, *command[1:]], cwd=cwd, env=variables) as process:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                # The program got the same signal: let it put its results in order and say so itself.
                interrupted = True
    if interrupted:
        raise KeyboardInterrupt
    return code if code >= 0 else 128 - code  # as a shell says that a signal ended it


# What suffices for the exponents of the built-in models, and what the paper measures.
SAMPLE = ("--lengths", "4:100:6", "--samples", "4")
PROTOCOL = ("--lengths", "2:98:2", "--samples", "10")


def measure(arguments: Sequence[str]) -> int:
    """Run ``howsmooth measure``, into out/ beside this file unless told otherwise; without arguments, on a
    sample.
    """
    prepare(test=False)
    # The first words of the commands that howsmooth tells to run
    os.environ["HOWSMOOTH_COMMAND"] = typed = shlex.join(("python3", sys.argv[0]))
    if not arguments:
        say(f"a sample of 68 sequences; all 490 of the paper: {typed} measure {shlex.join(PROTOCOL)}")
    elsewhere = any(word == "--out" or word.startswith("--out=") for word in arguments)
    out = () if elsewhere else ("--out", os.path.relpath(ROOT / "out"))
    return run(("howsmooth", "measure", *(arguments or SAMPLE), *out), cwd=Path.cwd())


CHECKS: tuple[tuple[str, ...], ...] = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("lint-imports",),
    ("mypy",),
)
# -E: every page anew, so that a warning of the last build is not forgotten; and pages that went are deleted.
DOCS = ("sphinx-build", "-E", "-W", "--keep-going", "-n", "-b", "html", "docs", "docs/_build/html")

# The documentation's blocks of code and the notebooks, which pytest runs where it is given their paths.
SNIPPETS = ("docs", "README.md", "notebooks")

# The gallery need not be run for its links.
LINKS = ("sphinx-build", "-q", "-b", "linkcheck", "-D", "plot_gallery=0", "docs", "docs/_build/linkcheck")


# The most lines of Python that src may have: what is added replaces something, so the number only goes down.
LINES = ROOT / "src" / "lines.txt"


def size() -> int:
    """Compare the lines of Python in src with the most that are allowed, and lower that number to them."""
    lines = sum(file.read_bytes().count(b"\n") for file in (ROOT / "src").rglob("*.py"))
    allowed = int(LINES.read_text())
    if lines > allowed:
        say(f"src has {lines:,} lines of Python, at most {allowed:,} are allowed by {LINES.name}.")
        return 1
    if lines < allowed:
        LINES.write_text(f"{lines}\n")
        say(f"src has {lines:,} lines of Python, not {allowed:,}: commit {LINES.name}.")
    return 0


def steps(commands: Sequence[tuple[str, ...]], *, threads: int | None = None) -> int:
    """Run every command, whatever the others said, and name at the end those that failed."""
    failed = []
    for command in commands:
        if command[: len(DOCS)] == DOCS:
            shutil.rmtree(ROOT / DOCS[-1], ignore_errors=True)
        say(" ".join(command))
        if run(command, threads=threads):
            failed.append(command)
    for command in failed:
        say(f"FAILED: {' '.join(command)}")
    return 1 if failed else 0


def test(arguments: Sequence[str]) -> int:
    """Run all checks, build the docs, run their code and then the tests; with arguments, pytest alone."""
    prepare(test=True)
    if arguments:
        return run(("pytest", *arguments))
    # One process a core with one thread each; a page's snippets share names, so files stay whole.
    # The tests come last, so that their closing line is the last but for the failed steps.
    tests = ("pytest", "-q", "-n", str(min(os.cpu_count() or 1, 8)), "--dist", "loadfile")
    return max(size(), steps((*CHECKS, (*DOCS, "-q"), (*tests, *SNIPPETS), tests), threads=1))


def say(words: str) -> None:
    """Tell the user what goes on, on the error stream: the output belongs to the programs."""
    print(f"dev.py: {words}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Carry out one command and return the exit code."""
    if sys.version_info < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise SetUpError(
            f"Python {oldest} or newer is needed, this is {sys.version.split()[0]} ({sys.executable})."
        )
    command, rest = (arguments[0], arguments[1:]) if arguments else ("help", ())
    if command in ("help", "-h", "--help"):
        print(__doc__)
        return 0
    if command == "measure":
        return measure(rest)
    if command == "test":
        return test(rest)
    if command not in ("check", "docs", "links", "run") or (command == "run") != bool(rest):
        raise SetUpError(
            f"cannot do {' '.join(arguments)!r}; it knows measure, test, check, docs, links and run PROGRAM."
        )
    prepare(test=True)
    if command == "run":
        return run(rest)
    code = steps({"check": CHECKS, "docs": (DOCS,), "links": (LINKS,)}[command])
    if command == "check":
        code = max(code, size())
    if command == "docs" and not code:
        say(f"the pages start at {ROOT / DOCS[-1] / 'index.html'}")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SetUpError as failure:
        print(f"dev.py: {failure}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
