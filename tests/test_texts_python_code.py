from __future__ import annotations

import ast
import hashlib
import sys
import tokenize
from io import StringIO
from pathlib import Path

import pytest

from howsmooth.errors import TextError
from howsmooth.texts import load_text
from howsmooth.texts.python_code import LEAST_CHARACTERS, code_of, python_code
from howsmooth.texts.python_docs import library_files

SOURCE = '''"""What the module is for,
in two lines."""
import os


class Name:
    """What it is."""

    size = "a string that is data"

    def read(self):
        """Read it."""
        # why so
        return os.name
'''

KEPT = """import os
class Name:
    size = "a string that is data"
    def read(self):
        # why so
        return os.name
"""


def test_docstrings_and_blank_lines_are_left_out_and_the_rest_stays_as_it_is() -> None:
    assert code_of(SOURCE) == KEPT


@pytest.mark.parametrize("newline", ["\r\n", "\r"])
def test_line_ends_do_not_matter(newline: str) -> None:
    assert code_of(SOURCE.replace("\n", newline)) == KEPT


def test_a_form_feed_is_no_line_end() -> None:
    assert code_of('x = 1\n\f\ndef f():\n    """No."""\n    return 2\n') == "x = 1\ndef f():\n    return 2\n"


def test_a_docstring_on_the_line_of_its_function_takes_no_code_with_it() -> None:
    assert code_of('def f(): "No."\nx = 1\n') == 'def f(): "No."\nx = 1\n'


@pytest.mark.parametrize("broken", ["def f(:\n", "x = '\0'\n", ""])
def test_what_does_not_parse_is_nothing(broken: str) -> None:
    assert code_of(broken) == ""


def test_the_text_is_the_same_each_time_and_holds_no_docstring_of_the_library() -> None:
    text = load_text("python-code")
    assert text.name == "python-code"
    assert f"Python {sys.version.split()[0]}" in text.source
    assert text.digest == load_text("python-code").digest == hashlib.sha256(text.content.encode()).hexdigest()
    assert LEAST_CHARACTERS <= len(text.content) < LEAST_CHARACTERS + 300_000
    first = next(path for path in library_files() if path.name == "abc.py")
    docstring = ast.get_docstring(ast.parse(first.read_text("utf-8")), clean=False)
    assert docstring is not None
    assert docstring.splitlines()[0] not in text.content
    # Judged by Python's tokenizer, not its parser: the code of a module is all there.
    names = {
        token.string
        for token in tokenize.generate_tokens(StringIO(first.read_text("utf-8")).readline)
        if token.type == tokenize.NAME
    }
    assert {"ABCMeta", "abstractmethod"} <= names
    assert all(name in text.content for name in names)


def test_a_python_without_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(TextError, match=r"holds only 7 characters of code.*Use a Python with its sources"):
        python_code(tmp_path)


def test_modules_come_in_the_order_of_their_paths_and_whole(tmp_path: Path) -> None:
    line = f"value = '{'x' * 990}'\n"
    (tmp_path / "b.py").write_text(line * 1000)
    (tmp_path / "a.py").write_text("first = 1\n")
    (tmp_path / "c.py").write_text("never = 1\n")
    content, source = python_code(tmp_path)
    assert content == "first = 1\n\n" + line * 1000
    assert "its first 2 modules by path" in source
