"""Write the table and the figure of the digits in docs/evidence.md from what train.py left.

python examples/digits/page.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tables import markdown, write

HERE = Path(__file__).resolve().parent
FIGURE = HERE.parents[1] / "docs" / "_static" / "certified-digits.png"
FORMS = ("plain", "penalised", "lipschitz")
NAMES = {"plain": "plain", "penalised": "penalised", "lipschitz": "1-Lipschitz"}

Row = dict[str, Any]


def main() -> None:
    """Write and draw."""
    write(tables())
    draw(results(), FIGURE)


def results() -> list[Row]:
    """Return the rows of the file of results."""
    return list(json.loads((HERE / "results.json").read_text(encoding="utf-8")).values())


def tables() -> dict[str, str]:
    """Return every table of the page."""
    return {"digits": accuracies(results())}


def accuracies(rows: Sequence[Row]) -> str:
    """Return the table of accuracies: in percent, the mean over the seeds."""
    radii = rows[0]["radii"]
    lines = [["form", "", "clean", *(f"r = {radius:g}" for radius in radii)]]
    for form in FORMS:
        own = [row for row in rows if row["form"] == form]
        clean = mean([row["clean"] for row in own])
        for kind in ("certified", "attacked"):
            shares = [mean([row[kind][i] for row in own]) for i in range(len(radii))]
            first = kind == "certified"
            lines.append([NAMES[form] if first else "", kind, clean if first else "", *shares])
    return markdown(lines)


def mean(shares: Sequence[float]) -> str:
    """Write the mean of some shares in percent."""
    return f"{100 * sum(shares) / len(shares):.1f}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw accuracy over radius: certified as steps of proof, attacked as dots, one colour a form."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for form, colour in zip(FORMS, ("C1", "C2", "C0"), strict=True):
        for i, row in enumerate(r for r in rows if r["form"] == form):
            radii = [0, *row["radii"]]
            label = NAMES[form] if i == 0 else None
            ax.plot(radii, [row["clean"], *row["attacked"]], "o--", color=colour, lw=1, ms=3, label=label)
            if form == "lipschitz":
                certified = [row["clean"], *row["certified"]]
                label = f"{NAMES[form]}, certified" if i == 0 else None
                ax.plot(radii, certified, "-", color=colour, lw=2, label=label)
    ax.set(xlabel="l2 radius", ylabel="accuracy on 500 test images", ylim=(0, 1))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, title="attacked (dashed), certified (solid)")
    fig.savefig(path, dpi=150)
    plt.close(fig)


if __name__ == "__main__":
    main()
