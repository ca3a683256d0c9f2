"""Draw figures of measurements, attacks, flows and the published code's values. Nothing here measures."""

from __future__ import annotations

from howsmooth.study.figures.attacks import draw_attacks
from howsmooth.study.figures.measurements import Picture, draw_all
from howsmooth.study.figures.published_values import draw_published

__all__ = ["Picture", "draw_all", "draw_attacks", "draw_published"]
