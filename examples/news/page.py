"""Write the table and the figure of headlines in docs/evidence.md from what radii.py left.

python examples/news/page.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.digits.page import mean
from examples.tables import markdown, write

HERE = Path(__file__).resolve().parent
FIGURE = HERE.parents[1] / "docs" / "_static" / "radius-on-news.svg"
RADII = (0.1, 0.2, 0.4, 0.8)
FORMS = ("plain", "penalised")

Rows = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Write and draw."""
    write(tables())
    draw(results(), FIGURE)


def results() -> Rows:
    """Return the rows of the headlines that are done for both forms."""
    done = json.loads((HERE / "radii.json").read_text(encoding="utf-8"))
    both = sorted(set.intersection(*(set(done[form]) for form in FORMS)), key=int)
    return {form: [done[form][index] for index in both] for form in FORMS}


def tables() -> dict[str, str]:
    """Return every table of the page."""
    return {"news": accuracies(results())}


def accuracies(rows: Rows) -> str:
    """Return the table of accuracies over the radius, in percent: proved, and under the attack."""
    lines = [["form", "", "clean", *(f"r = {radius:g}" for radius in RADII)]]
    for form, own in rows.items():
        for name, said in (("radius", "proved"), ("attack", "attacked")):
            shares = [mean([float(row[name] >= radius) for row in own]) for radius in RADII]
            clean = mean([row["right"] for row in own])
            proved = name == "radius"
            lines.append([form if proved else "", said, clean if proved else "", *shares])
    return markdown(lines)


def draw(rows: Rows, path: Path) -> None:
    """Draw the share of the headlines that keep their class over the radius, proved and attacked."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "howsmooth"
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 3.6), constrained_layout=True)
    for form, colour in zip(FORMS, ("C1", "C2"), strict=True):
        for name, style in (("radius", "-"), ("attack", "--")):
            radii, shares = steps([row[name] for row in rows[form]])
            ax.step(radii, shares, style, where="post", color=colour, label=f"{form}, {SAID[name]}")
    ax.set(xscale="log", xlim=(0.02, 20), ylim=(0, 1), xlabel="l2 radius of one token")
    ax.set_ylabel(f"accuracy on {len(rows['plain'])} headlines")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


SAID = {"radius": "proved", "attack": "attacked"}


def steps(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return where the share of values above a radius falls, and how far, from 0.02 on."""
    ordered = sorted(value for value in values if value > 0.02)
    count = len(ordered)
    shares = [(count - i) / len(values) for i in range(count + 1)]
    return [0.02, *ordered], shares


if __name__ == "__main__":
    main()
