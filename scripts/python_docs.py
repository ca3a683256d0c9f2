"""English prose that every Python carries, on which the built-in models were trained.

It is made of the topics of pydoc and the docstrings of the library: no download, free to use, and long enough
to train a small language model on. It is read from source files with :mod:`ast`; no module that is read is
ever imported. What is kept is paragraphs of sentences: markup, code, examples, tables and signature lines are
left out.
"""

from __future__ import annotations

import ast
import inspect
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from howsmooth.errors import TextError
from howsmooth.texts import Text

__all__ = ["docstrings_of", "library_files", "prose_paragraphs", "python_docs"]

#: Folders of the standard library that hold tests, tables, foreign packages or build data, not prose.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
_BUILD_DATA = re.compile(r"_sysconfig(?:data|_vars)|config-\d")

#: Fewer characters than this mean that the Python carries no sources of its library (a frozen build).
_LEAST_CHARACTERS = 50_000

_ASCII = {
    0x2018: "'",
    0x2019: "'",
    0x201C: '"',
    0x201D: '"',
    0x2013: "-",
    0x2014: "-",
    0x2026: "...",
    0xA0: " ",
}

_MARKUP: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r":[a-z][\w:+-]*:`[~!]?([^`<]+?)\s*(?:<[^`>]*>)?`"), r"\1"),  # :ref:`text <target>`
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"`([^`]+)`_{0,2}"), r"\1"),
    (re.compile(r"`([^`']+)'"), r"'\1'"),
    (re.compile(r"(?<![\w*])\*\*([^\s*](?:[^*]*[^\s*])?)\*\*(?![\w*])"), r"\1"),
    (re.compile(r"(?<![\w*])\*([^\s*](?:[^*]*[^\s*])?)\*(?![\w*])"), r"\1"),
    (re.compile(r"(?<![\w_])_([A-Za-z]+)_(?![\w_])"), r"\1"),
    (re.compile(r"\s*\[\d+\](?!\w)"), ""),  # footnote marks
    (re.compile(r"::(?=\s|$)"), ":"),
    (re.compile(r"\s+"), " "),
)
_BULLET = re.compile(r"(?:[-*+•o]|\(?\d{1,2}[.)]|\(?[a-z]\)|\[\d+\])\s+(?=\S)")
_RULE = re.compile(r"[^\w\s]+$")
_SIGNATURE = re.compile(r"[\w.]+ ?\([^)]*\)?\)?(?:\s*-{1,2}>.*|:.*)?$|[\w.]+ ?\([^)]*\)\s*-{1,2}>.*$")
_TABLE_ROW = re.compile(r"[\w*.,'\"\[\]<>|/-]+(?:\([^)]*\))?(?:\s{2,}|\s+-{1,2}\s+|\s*:\s+|\s*:$)")
_COLUMNS = re.compile(r"\S {3,}\S")
_CODE = re.compile(
    r">>>|::=|==|!=|<=|>=|->|=>|\+=|&&|[{}\\|~^@$`*]|\w=|\s=\s"
    r"|https?:|www\.|</|#|\.\. |\w\[|\d\.\d+\.|\bRFC\b"
)
_BROKEN_WORD = re.compile(r"(?<=[a-z])-\n(?=[a-z])")  # a hyphenated word over a line end
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?=\s|$)")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|[A-Z])\.$")
_WORD = re.compile(r"[(\"']*[A-Za-z]+(?:['/-][A-Za-z]+)*[)\"']*[.,;:!?]?[)\"']*$")
#: Words so frequent that a paragraph without two different ones of them is hardly English prose.
_COMMON = set(
    """
    a an and are as at be but by can do does for from has have if in is it its may more must no not of on
    one only or should such that the their them then there these they this to used was when which will with
    would you
    """.split()  # noqa: SIM905 - a column of fifty words would be harder to read
)


def library_files(root: Path | None = None) -> list[Path]:
    """Return the standard library's source files whose docstrings are read, in a fixed order.

    Parameters
    ----------
    root
        The folder of the library; that of the running Python when None.

    Returns
    -------
    list of Path
        Sorted by path below `root`; tests, foreign packages, tables and build data left out.

    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS and not _BUILD_DATA.match(name)]
        found += [
            Path(folder, name) for name in names if name.endswith(".py") and not _BUILD_DATA.match(name)
        ]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def docstrings_of(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, in the order of the source.

    Parameters
    ----------
    source
        Python source code, parsed and never executed. Source that does not parse yields nothing.

    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    waiting: list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = [tree]
    while waiting:
        node = waiting.pop()
        docstring = ast.get_docstring(node, clean=False)  # cleaned once, by prose_paragraphs
        if docstring:
            yield docstring
        inner = [c for c in node.body if isinstance(c, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        waiting += reversed(inner)


def _topics(root: Path) -> list[str]:
    """Return the texts of `pydoc_data.topics`, sorted by name; empty when this Python lacks the file."""
    path = root / "pydoc_data" / "topics.py"
    if not path.is_file():
        return []
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            return [topics[name] for name in sorted(topics)]
    return []


def _is_prose(text: str) -> bool:
    """Tell whether one joined paragraph is sentences of English words."""
    if not text.isascii() or _CODE.search(text) or not re.match(r"[\"'(]?[A-Z]", text):
        return False
    tokens = text.split()
    words = [token for token in tokens if _WORD.match(token)]
    if len(tokens) < 6 or len(words) < 0.8 * len(tokens):
        return False
    common = {word.lower().strip(".,;:!?()\"'") for word in words} & _COMMON
    capitals = sum(word.isupper() and len(word) > 1 for word in words)
    return len(common) >= 2 and capitals <= 0.2 * len(words)


def _whole_sentences(text: str) -> str:
    """Cut what follows the last full stop (`... for example:` before a code block that is left out)."""
    ends = [end.end() for end in _SENTENCE_END.finditer(text)]
    while ends and _ABBREVIATION.search(text, max(0, ends[-1] - 5), ends[-1]):
        ends.pop()
    return text[: ends[-1]] if ends else ""


def prose_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of `text` that are English prose, each on one line, without markup.

    Parameters
    ----------
    text
        A docstring or a page of documentation; paragraphs are separated by blank lines, a bullet
        begins a new one.

    """
    for chunk in re.split(r"\n[ \t]*\n", inspect.cleandoc(text.translate(_ASCII))):
        lines = [line for line in chunk.splitlines() if not _RULE.match(line.strip())]
        while lines and _SIGNATURE.match(lines[0].strip()):
            lines.pop(0)
        items: list[list[str]] = []
        for line in lines:
            bullet = _BULLET.match(line.lstrip())
            if bullet or not items:
                items.append([line.lstrip()[bullet.end() :] if bullet else line])
            else:
                items[-1].append(line)
        for item in items:
            # A first line may hang or be indented; among the others a deeper one is a table or code.
            depths = {len(line) - len(line.lstrip()) for line in item[1:]}
            rows = sum(bool(_TABLE_ROW.match(line.strip())) for line in item)
            if len(depths) > 1 or rows > 1 or any(_COLUMNS.search(line.strip()) for line in item):
                continue
            joined = _BROKEN_WORD.sub("-", "\n".join(line.strip() for line in item))
            for pattern, replacement in _MARKUP:
                joined = pattern.sub(replacement, joined)
            joined = _whole_sentences(joined.strip())
            if _is_prose(joined):
                yield joined


def python_docs(root: Path | None = None) -> Text:
    """Return the English prose of a Python's own documentation, under the name ``"python-docs"``.

    Parameters
    ----------
    root
        The folder of a standard library; that of the running Python when None.

    Returns
    -------
    Text
        One paragraph a line, blank lines between; no paragraph occurs twice. The same Python gives the
        same text on every machine; another version of Python a slightly different one.

    Raises
    ------
    TextError
        If this Python carries no sources of its library (some frozen builds).

    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    paragraphs: dict[str, None] = {}  # keeps the order, drops repetitions
    for topic in _topics(root):
        paragraphs.update(dict.fromkeys(prose_paragraphs(topic)))
    for path in library_files(root):
        for docstring in docstrings_of(path.read_text("utf-8", errors="replace")):
            paragraphs.update(dict.fromkeys(prose_paragraphs(docstring)))
    content = "\n\n".join(paragraphs) + "\n"
    if len(content) < _LEAST_CHARACTERS:
        raise TextError(
            f"text 'python-docs': this Python's library ({root}) holds only {len(content)} characters "
            "of prose; its source files seem to be missing. Use a Python with its sources."
        )
    source = (
        f"English prose of Python {platform.python_version()}'s own documentation: the language topics of "
        "pydoc and the docstrings of the standard library, without code and markup "
        f"({len(paragraphs)} paragraphs)."
    )
    return Text("python-docs", content, source)
