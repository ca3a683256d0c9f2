"""The page that a newcomer reads: self-contained, from the store alone.

``page`` puts it together; ``families``, ``caveats``, ``tables``, ``bounding`` and ``tokens`` say what it
shows; ``data`` writes the numbers that its script reads, and ``wording`` how numbers and names are shown.
"""

from __future__ import annotations

from howsmooth.study.report.page import render

__all__ = ["render"]
