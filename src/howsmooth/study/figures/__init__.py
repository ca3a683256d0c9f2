"""Draw figures of measurements and attacks. Nothing is measured here."""

from __future__ import annotations

from howsmooth.study.figures.attacks import draw_attacks
from howsmooth.study.figures.measurements import Picture, draw_all

__all__ = ["Picture", "draw_all", "draw_attacks"]
