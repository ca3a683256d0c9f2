"""Figures, drawn from what was measured; nothing here measures."""

from __future__ import annotations

from howsmooth.study.figures.attacks import AttackPicture, draw_attacks
from howsmooth.study.figures.measurements import Picture, draw_all

__all__ = ["AttackPicture", "Picture", "draw_all", "draw_attacks"]
