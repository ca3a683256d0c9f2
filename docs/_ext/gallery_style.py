"""One look for the pictures of the gallery."""

from __future__ import annotations

import logging
from typing import Any

import matplotlib as mpl


def reset(conf: dict[str, Any], name: str) -> None:
    """Set what every example begins with; sphinx-gallery calls this before each."""
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # Sphinx turns all on, and it tells of every PDF
    mpl.rcParams |= {
        "figure.figsize": (7, 4),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "font.size": 10,
        "figure.constrained_layout.use": True,
    }
