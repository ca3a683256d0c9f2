"""Mathematics as MathML, which browsers show by themselves: no script, no font, no network.

docutils translates the TeX; what it does not know is a warning, and so an error of the build.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

_log = logging.getLogger(__name__)


def _write(self: Any, node: nodes.Element, *, block: bool) -> None:
    tex = node.astext()
    if re.search(r"frac\s*\d", tex):  # docutils would read \frac12 as 12 over what follows
        _log.warning("write the braces of \\frac{}{} in %r", tex, location=node)
    try:
        markup = latex2mathml.tex2mathml(tex, as_block=block)
    except (MathError, SyntaxError) as error:
        _log.warning("no MathML for %r: %s", tex, error, location=node)
        markup = self.encode(tex)
    self.body.append(
        f'<div class="native-math">{markup}</div>\n'
        if block
        else f'<span class="native-math">{markup}</span>'
    )
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer(
        "native",
        inline_renderers=(lambda self, node: _write(self, node, block=False), None),
        block_renderers=(lambda self, node: _write(self, node, block=True), None),
    )
    return {"parallel_read_safe": True}
