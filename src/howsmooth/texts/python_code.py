"""Source code that every Python carries: the modules of its library, without their docstrings.

A second text that needs no download, and of another kind than :mod:`howsmooth.texts.python_docs`. The
docstrings are left out because that text is made of them, and the built-in models learnt it. Files are
read with :mod:`ast`; no module is ever imported.
"""

from __future__ import annotations

import ast
import platform
import sysconfig
from pathlib import Path

from howsmooth.errors import TextError
from howsmooth.texts.python_docs import library_files

__all__ = ["LEAST_CHARACTERS", "code_of", "python_code"]

#: Enough for hundreds of thousands of tokens; the whole library would take minutes to tokenise.
LEAST_CHARACTERS = 1_000_000


def code_of(source: str) -> str:
    """Return a module's source without its docstrings and without blank lines; "" if it does not parse.

    Parameters
    ----------
    source
        Python source code, parsed and never executed.

    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
                and first.lineno > getattr(node, "lineno", 0)  # beside a "def", the line is code too
            ):
                left_out.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    # As the parser counts lines: str.splitlines would also split at form feeds.
    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    kept = [line.rstrip() for number, line in enumerate(lines, 1) if number not in left_out and line.strip()]
    return "".join(f"{line}\n" for line in kept)


def python_code(root: Path | None = None) -> tuple[str, str]:
    """Return source code of a Python's own library, and a sentence that says its origin.

    Parameters
    ----------
    root
        The folder of a standard library; that of the running Python when None.

    Returns
    -------
    content : str
        Whole modules, in the order of their paths, until there are :data:`LEAST_CHARACTERS`. The same Python
        gives the same text on every machine; another version of Python another one.
    source : str
        Where the text came from, with the version of Python.

    Raises
    ------
    TextError
        If this Python carries no sources of its library (some frozen builds).

    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: list[str] = []
    length = 0
    for path in library_files(root):
        code = code_of(path.read_text("utf-8", errors="replace"))
        if code:
            parts.append(code)
            length += len(code) + 1
        if length >= LEAST_CHARACTERS:
            break
    if length < LEAST_CHARACTERS:
        raise TextError(
            f"text 'python-code': this Python's library ({root}) holds only {length} characters of code; its "
            "source files seem to be missing. Use a Python with its sources, or give the path of a text file."
        )
    source = (
        f"Source code of the standard library of Python {platform.python_version()}, its first {len(parts)} "
        "modules by path, without docstrings."
    )
    return "\n".join(parts), source
