"""Figures, drawn from what was measured; nothing here measures."""

from __future__ import annotations

from howsmooth.study.figures.measurements import Picture, draw_all

__all__ = ["Picture", "draw_all"]
