"""The look of the paper's figures: small, serif, black on white, fonts that journals take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from howsmooth.errors import StoreError
from howsmooth.study.figures.style import save

__all__ = ["COLUMN", "PAPER", "WIDTH", "save_picture"]

WIDTH, COLUMN = 6.75, 3.25
"""Inches that a page of two columns has across, and one column."""

PAPER: dict[Any, Any] = {
    "font.family": "serif",
    "font.serif": ["STIX Two Text", "STIXGeneral", "DejaVu Serif"],
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "figure.titlesize": 9,
    "lines.linewidth": 1.0,
    "pdf.fonttype": 42,  # TrueType: journals refuse Type 3
    "savefig.dpi": 220,
}
"""For ``matplotlib.rc_context``."""


def save_picture(figure: Figure, folder: Path, stem: str, title: str) -> tuple[Path, Path]:
    """Write a figure as PDF and PNG into ``folder``, which is made if it is not there; return both files.

    Raises
    ------
    StoreError
        If one cannot be written.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        png, pdf = save(figure, folder, stem, title)
    except OSError as error:
        raise StoreError(
            f"{error.filename or folder} cannot be written: {error.strerror}. What was measured is kept; "
            "make room or make it writable, and run the same command again."
        ) from error
    return pdf, png
