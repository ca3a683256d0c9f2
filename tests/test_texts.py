from __future__ import annotations

import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howsmooth.errors import ArgumentError, TextError
from howsmooth.texts import TEXTS, Text, load_text
from howsmooth.texts.python_docs import docstrings_of, library_files, prose_paragraphs, python_docs

from ._shared import shared_data

SENTENCE = "The value of the name is read when the function is called."


@pytest.fixture(scope="module")
def docs() -> Text:
    return load_text("python-docs")


# ---------------------------------------------------------------- what counts as prose


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
        (
            "The text\u2019s value is \u201cread\u201d when it is.",
            ['The text\'s value is "read" when it is.'],
        ),
        ("It is read when it is used. This can be seen in::", ["It is read when it is used."]),
        ("A multi-\nline string is read by the function.", ["A multi-line string is read by the function."]),
        (f"Heading\n*******\n\n{SENTENCE}\n\nOther heading\n=============", [SENTENCE]),
        (f"read(name, size) -> bytes\n\n{SENTENCE}", [SENTENCE]),
        (f"read(name, size) -> bytes\n{SENTENCE}", [SENTENCE]),
        ("It reads names, e.g. the first and the last.", ["It reads names, e.g. the first and the last."]),
        ("It reads names in the file. Use it with others, e.g. as in:", ["It reads names in the file."]),
        ("The name is read.\n-----\nIt is used in the call.", ["The name is read. It is used in the call."]),
        ("That is true [1] of all the names in it.", ["That is true of all the names in it."]),
    ],
)
def test_prose_is_kept_without_its_markup(raw: str, clean: list[str]) -> None:
    assert list(prose_paragraphs(raw)) == clean


@pytest.mark.parametrize(
    "raw",
    [
        ">>> the_value = read(name)\n>>> print(the_value)",
        "if x == 1:\n    return the value of the name",
        'assert_stmt ::= "assert" expression ["," expression]',
        "Name -- the name of the file that is read\nsize -- the size of the file that is read.",
        "name: The name of the file that is read.\nsize: The size of the file that is read.",
        "The name is   the first and the value is   the second of it.",
        "The name of the file\n  is what is read\n    when it is called by the others.",
        "It is in the file.",
        "Value name size file read write open close seek tell.",
        "See https://docs.python.org for the meaning of the names in it.",
        "Das ist für uns nicht a the of lesbar in this.",
        "without a capital at the beginning it is a fragment of the text.",
        "",
        "   \n\n \t \n",
    ],
)
def test_what_is_no_prose_is_left_out(raw: str) -> None:
    assert list(prose_paragraphs(raw)) == []


@given(st.text(alphabet="aA the.is,\n *`-:>()[]=|1\u2019é", max_size=300))
def test_prose_of_anything_is_clean_and_stays_as_it_is(raw: str) -> None:
    for paragraph in prose_paragraphs(raw):
        assert paragraph.isascii()
        assert "\n" not in paragraph
        assert "`" not in paragraph
        assert list(prose_paragraphs(paragraph)) == [paragraph]


def test_docstrings_come_in_the_order_of_the_source_and_nothing_runs() -> None:
    source = """
'one'
raise SystemExit
class A:
    'two'
    def f(self):
        'three'
        def g():
            'four'
async def h():
    'five'
x = 'not one'
"""
    assert list(docstrings_of(source)) == ["one", "two", "three", "four", "five"]


@pytest.mark.parametrize("source", ["def (", "\0", "print 'old'"])
def test_source_that_does_not_parse_has_no_docstrings(source: str) -> None:
    assert list(docstrings_of(source)) == []


# ---------------------------------------------------------------- python-docs


def _library(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, encoding="utf-8")
    return root


def test_python_docs_reads_topics_then_modules_once_each(tmp_path: Path) -> None:
    def long(word: str) -> str:
        return (
            f"The {word} is " + "one of the names that are read when it is called and " * 700 + "then used."
        )

    root = _library(
        tmp_path,
        {
            "pydoc_data/topics.py": f"topics = {{'b': {long('second')!r}, 'a': {long('first')!r}}}",
            "a/z.py": f'"""{long("fourth")}"""',
            "a.py": f'"""{long("third")}\n\n{long("first")}"""',
            "test/test_a.py": f'"""{long("never")}"""',
            "site-packages/b.py": f'"""{long("never")}"""',
            "_sysconfigdata_x.py": f'"""{long("never")}"""',
            "config-3.11-x/python-config.py": f'"""{long("never")}"""',
        },
    )
    content, source = python_docs(root)
    assert re.findall(r"The (\w+) is", content) == ["first", "second", "fourth", "third"]
    assert content.endswith("used.\n")
    assert "(4 paragraphs)" in source


def test_python_docs_without_sources_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        TextError, match=r"source files seem to be missing\. Use a Python with its sources, or give"
    ):
        python_docs(_library(tmp_path, {"a.py": f'"""{SENTENCE}"""'}))


def test_python_docs_is_clean_long_english(docs: Text) -> None:
    content = docs.content
    assert len(content) > 700_000
    assert content.isascii()
    paragraphs = content.removesuffix("\n").split("\n\n")
    assert all(paragraph == paragraph.strip() and "\n" not in paragraph for paragraph in paragraphs)
    assert len(set(paragraphs)) == len(paragraphs)
    assert not re.search(r"[`*{}\\|^~$@]|>>>|::\s|\t| {2}|https?:|Parameters\n", content)
    letters = sum(character.isalpha() or character in " ,.'\n" for character in content)
    assert letters > 0.96 * len(content)
    words = re.findall(r"[a-z]+", content.lower())
    assert words.count("the") > 0.05 * len(words)
    # Known sentences of the language reference and of a docstring, as a reader would want them.
    assert "Code objects are used by the implementation to represent" in content
    assert "Base class for warnings about deprecated features" not in content  # C code: no source to read


def test_python_docs_is_the_same_each_time_and_imports_nothing(docs: Text) -> None:
    root = Path(sysconfig.get_path("stdlib"))
    before = set(sys.modules)
    content, _ = python_docs(root)
    assert set(sys.modules) == before
    assert hashlib.sha256(content.encode()).hexdigest() == docs.digest


def test_python_docs_says_which_python(docs: Text) -> None:
    assert ".".join(map(str, sys.version_info[:3])) in docs.source
    assert docs.name == "python-docs"


def test_library_files_are_sorted_and_hold_no_tests() -> None:
    files = library_files()
    root = Path(sysconfig.get_path("stdlib"))
    parts = [file.relative_to(root).parts for file in files]
    assert parts == sorted(parts)
    assert ("argparse.py",) in parts
    assert not {"test", "tests", "site-packages", "idlelib"} & {p for file in parts for p in file}


# ---------------------------------------------------------------- names and paths


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_bytes("\ufeffÉtude.\r\nTwo.\rThree.\n".encode())
    text = load_text(str(path))
    assert (text.name, text.content) == ("story", "Étude.\nTwo.\nThree.\n")
    assert text.digest == hashlib.sha256("Étude.\nTwo.\nThree.\n".encode()).hexdigest()
    assert "story.txt" in text.source
    assert load_text(path) == text
    assert "Three" not in repr(text)


def test_news_rows_join_title_and_description(tmp_path: Path) -> None:
    path = tmp_path / "test.csv"
    path.write_text('"3","A ""title""","First,\nand more."\n"1","B","Second."\n\n', encoding="utf-8")
    text = load_text(tmp_path)
    assert text.content == 'A "title" First,\nand more.\nB Second.\n'
    assert "2 news items" in text.source


def test_a_folder_prefers_alice(tmp_path: Path) -> None:
    (tmp_path / "carroll-alice.txt").write_text("Down the rabbit hole.")
    (tmp_path / "test.csv").write_text("1,a,b")
    assert load_text(tmp_path).name == "carroll-alice"


def test_shared_texts() -> None:
    alice = load_text(shared_data("alice", "carroll-alice.txt"))
    assert len(alice.content) == 144396
    news = load_text(shared_data("ag_news"))
    assert news.content.count("\n") == 7600
    assert news.content.startswith("Fears for T N pension after talks Unions representing workers")


def _write(content: bytes, name: str = "a.txt") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_write(b""), "'a' is empty: there is nothing"),
        (_write(b" \n\t"), "'a' is empty: there is nothing"),
        (_write(b"a\0b"), "is not UTF-8 text"),
        (_write("Étude".encode("latin-1")), "is not UTF-8 text"),
        (_write(b"", "a.csv"), "'a' is empty: there is nothing"),
        (_write(b"1,a,b\n1,a\n", "a.csv"), r"line 2: expected three columns .*, got 2\. Give a plain"),
        (_write(b"1,a," + b"x" * 200_000, "a.csv"), r"line 1: not a readable csv"),
        (lambda folder: folder, r"is a folder without carroll-alice.txt or test.csv\. Give the path"),
        (
            lambda folder: folder / "none.txt",
            r"neither a known name nor a file\. Use one of python-docs, python-code, alice, ag_news",
        ),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(TextError, match=message):
        load_text(make(tmp_path))


@pytest.mark.parametrize("name", ["", "  "])
def test_no_name_is_an_argument_error(name: str) -> None:
    with pytest.raises(ArgumentError, match="text: expected a name or a path, got an empty string"):
        load_text(name)


# ---------------------------------------------------------------- the usual loaders, stood in for


def _install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def _raise(error: Exception) -> Callable[..., None]:
    def call(*args: object, **kwargs: object) -> None:
        raise error

    return call


@pytest.mark.parametrize(("name", "package"), [("alice", "nltk"), ("ag_news", "datasets")])
def test_without_the_package_the_remedy_is_said(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        TextError,
        match=rf"{package}, which is not installed\. Run `pip install {package}`.* or give the path",
    ):
        load_text(name)


def test_alice_comes_from_nltk(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    corpus = SimpleNamespace(raw=lambda file: asked.append(file) or "Alice was beginning")
    _install(monkeypatch, "nltk", __version__="3.9", __path__=[])
    _install(monkeypatch, "nltk.corpus", gutenberg=corpus)
    text = load_text("alice")
    assert (text.name, text.content, asked) == ("alice", "Alice was beginning", ["carroll-alice.txt"])
    assert "nltk 3.9" in text.source


def test_nltk_without_its_corpus_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "nltk", __path__=[])
    _install(monkeypatch, "nltk.corpus", gutenberg=SimpleNamespace(raw=_raise(LookupError("long advice"))))
    with pytest.raises(TextError, match=r"not its corpus 'gutenberg'\. Run .*nltk\.downloader gutenberg"):
        load_text("alice")


def test_ag_news_comes_from_datasets_and_equals_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, *, split: str) -> dict[str, list[str]]:
        asked.append((name, split))
        return {"text": ["A first", "B second"]}

    _install(monkeypatch, "datasets", load_dataset=load_dataset, __version__="4.0")
    (tmp_path / "test.csv").write_text("1,A,first\n2,B,second\n")
    assert load_text("ag_news").digest == load_text(tmp_path).digest
    assert asked == [("fancyzhx/ag_news", "test")]


def test_ag_news_without_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConnectionError("no route\nto host")
    _install(monkeypatch, "datasets", load_dataset=_raise(error), __version__="4.0")
    with pytest.raises(TextError, match=r"could not load it \(no route to host\)\. Run .* or give the path"):
        load_text("ag_news")


def test_the_names_are_the_documented_ones() -> None:
    assert TEXTS == ("python-docs", "python-code", "alice", "ag_news")
