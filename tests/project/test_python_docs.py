"""The prose that the built-in models were trained on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests._shared import script

_MADE = script("scripts/python_docs.py")
docstrings_of, library_files = _MADE.docstrings_of, _MADE.library_files
prose_paragraphs, python_docs = _MADE.prose_paragraphs, _MADE.python_docs

SENTENCE = "The value of the name is read when the function is called."


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        (SENTENCE, [SENTENCE]),
        ("The value is\n   read when the\n   name is used.", ["The value is read when the name is used."]),
        (
            "* The first is one of the two.\n* The second is one of the two.",
            ["The first is one of the two.", "The second is one of the two."],
        ),
        (
            "The ``value`` of *any* name is **never** read by :func:`~os.read` here.",
            ["The value of any name is never read by os.read here."],
        ),
        ("The module :mod:`text <os.path>` is used by all.", ["The module text is used by all."]),
        ("It is read when it is used. This can be seen in::", ["It is read when it is used."]),
        (f"Heading\n*******\n\n{SENTENCE}\n\nOther heading\n=============", [SENTENCE]),
        (f"read(name, size) -> bytes\n\n{SENTENCE}", [SENTENCE]),
        ("It reads names, e.g. the first and the last.", ["It reads names, e.g. the first and the last."]),
        *(
            (no_prose, [])
            for no_prose in (
                ">>> the_value = read(name)\n>>> print(the_value)",
                "if x == 1:\n    return the value of the name",
                'assert_stmt ::= "assert" expression ["," expression]',
                "Name -- the name of the file that is read\nsize -- the size of the file that is read.",
                "The name is   the first and the value is   the second of it.",
                "Value name size file read write open close seek tell.",
                "See https://docs.python.org for the meaning of the names in it.",
                "Das ist für uns nicht a the of lesbar in this.",
            )
        ),
    ],
)
def test_prose_alone_is_kept_without_its_markup(raw: str, clean: list[str]) -> None:
    assert list(prose_paragraphs(raw)) == clean


@given(st.text(alphabet="aA the.is,\n *`-:>()[]=|1\u2019é", max_size=300))
def test_prose_of_anything_is_clean_and_stays_as_it_is(raw: str) -> None:
    for paragraph in prose_paragraphs(raw):
        assert paragraph.isascii()
        assert "\n" not in paragraph
        assert "`" not in paragraph
        assert list(prose_paragraphs(paragraph)) == [paragraph]


def test_python_docs_reads_topics_then_modules_once_each(tmp_path: Path) -> None:
    def long(word: str) -> str:
        most = "one of the names that are read when it is called and " * 700
        return f"The {word} is {most}then used."

    files = {
        "pydoc_data/topics.py": f"topics = {{'b': {long('second')!r}, 'a': {long('first')!r}}}",
        "a/z.py": f'"""{long("fourth")}"""',
        "a.py": f'"""{long("third")}\n\n{long("first")}"""',
    }
    never = ("test/test_a.py", "site-packages/b.py", "_sysconfigdata_x.py", "config-3.11-x/python-config.py")
    for name, content in {**files, **dict.fromkeys(never, f'"""{long("never")}"""')}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    text = python_docs(tmp_path)
    assert re.findall(r"The (\w+) is", text.content) == ["first", "second", "fourth", "third"]
    assert text.content.endswith("used.\n")
    assert "(4 paragraphs)" in text.source
