"""The page that a newcomer reads: self-contained, from the store alone.

``page`` puts it together; ``numbers`` writes what its script explores, ``tables`` its tables and headlines,
and ``caveats`` what a reader must know. ``wording`` says how numbers and names are shown.
"""

from __future__ import annotations

from howsmooth.study.report.page import render

__all__ = ["render"]
