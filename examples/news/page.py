"""Write the tables and the figure of docs/guide/radius-on-news.md from what radii.py left.

python examples/news/page.py            # tables into the page, the figure into docs/_static
python examples/news/page.py --check    # only say whether the tables are those of the results
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.digits.page import markdown, mean, placed

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
PAGE = DOCS / "guide" / "radius-on-news.md"
FIGURE = DOCS / "_static" / "radius-on-news.svg"
RADII = (0.1, 0.2, 0.4, 0.8)
FORMS = ("plain", "penalised")

Rows = dict[str, list[dict[str, Any]]]


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is old")
    asked = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    after = with_tables(before)
    if asked.check:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    draw(results(), FIGURE)
    return 0


def results() -> Rows:
    """Return the rows of the headlines that are done for both forms."""
    done = json.loads((HERE / "radii.json").read_text(encoding="utf-8"))
    both = sorted(set.intersection(*(set(done[form]) for form in FORMS)), key=int)
    return {form: [done[form][index] for index in both] for form in FORMS}


def with_tables(page: str) -> str:
    """Return the page with each table between its marks."""
    rows = results()
    return placed(page, {"accuracies": accuracies(rows), "headlines": headlines(rows)})


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


def headlines(rows: Rows) -> str:
    """Return the table of medians over the headlines that are classified rightly."""
    names = ("headlines", "right", "radius", "attack", "first order", "layers", "seconds")
    lines = [["form", *names]]
    for form, every in rows.items():
        own = [row for row in every if row["right"]]
        columns = [[row[name] for row in own] for name in ("radius", "attack", "first_order")]
        medians = [f"{statistics.median(column):.2f}" for column in columns]
        layers = zip(*(row["constants"] for row in own), strict=True)
        constants = ", ".join(f"{statistics.median(layer):.2f}" for layer in layers)
        seconds = f"{statistics.median(row['seconds'] for row in own):.0f}"
        lines.append([form, str(len(every)), str(len(own)), *medians, constants, seconds])
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
    sys.exit(main())
