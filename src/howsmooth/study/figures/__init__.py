"""Draw figures of measurements. Nothing is measured here."""

from __future__ import annotations

from howsmooth.study.figures.measurements import Picture, draw_all

__all__ = ["Picture", "draw_all"]
