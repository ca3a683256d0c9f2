"""Our docstrings as Sphinx needs them: plain words and mathematics, not reStructuredText.

They are written to be read with ``help()``. So norms |x| are no substitutions, a shape (batch, *shape)
opens no emphasis, and a colon in the comment of a field does not end a type.
"""

from __future__ import annotations

import importlib
import re
from functools import reduce
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import NumpyDocstring

_LITERAL = re.compile(r"(``.*?``|`.*?`)")


def _escape(words: str) -> str:
    words = re.sub(r"(?<!\\)\|", r"\\|", words)
    return re.sub(r"(?<=[\s(,\[])\*(?=\w+[),\]])", r"\\*", words)


def _plain(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    text = "\n".join(lines)
    parts = _LITERAL.split(text)
    parts[::2] = [_escape(part) for part in parts[::2]]
    lines[:] = "".join(parts).split("\n")


def _home(app: Sphinx, module: str, name: str) -> str | None:
    """Return the module in which a name is defined, or None where Sphinx finds it out by itself.

    An alias such as ``tuple[int, int]`` is not defined in the module of ``tuple``, and an attribute whose
    value is a class, or a function of a module, is not defined in the module of that class or function.
    """
    try:
        value = reduce(getattr, name.split("."), importlib.import_module(module))
    except AttributeError:  # an annotation alone
        return None
    if "." in name:
        elsewhere = isinstance(value, type) or "." not in getattr(value, "__qualname__", name)
        return module if elsewhere else None
    defined = getattr(value, "__module__", None)
    return module if isinstance(defined, str) and not defined.startswith("howsmooth") else None


def _names(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Return the names alone for a dataclass of options, whose attributes have the types and the help."""
    if what != "class" or not hasattr(obj, "__pydantic_fields__"):
        return None
    return f"({', '.join(obj.__pydantic_fields__)})", returns


def setup(app: Sphinx) -> dict[str, bool]:
    """Run before napoleon, which reads at priority 500."""
    app.connect("viewcode-follow-imported", _home)
    NumpyDocstring._parse_attribute_docstring = lambda self: [str(line) for line in self._lines]
    app.connect("autodoc-process-docstring", _plain, priority=400)
    app.connect("autodoc-process-signature", _names)
    return {"parallel_read_safe": True}
