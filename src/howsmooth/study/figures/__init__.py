"""Figures, drawn from what was measured; nothing here measures."""

from __future__ import annotations

from howsmooth.study.figures.attacks import AttackPicture, draw_attacks
from howsmooth.study.figures.measurements import Picture, draw_all
from howsmooth.study.figures.published import PublishedPicture, draw_published

__all__ = ["AttackPicture", "Picture", "PublishedPicture", "draw_all", "draw_attacks", "draw_published"]
