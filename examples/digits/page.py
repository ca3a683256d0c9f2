"""Write the tables and the figure of docs/guide/certified-digits.md from what train.py left.

python examples/digits/page.py            # tables into the page, the figure into docs/_static
python examples/digits/page.py --check    # only say whether the tables are those of the results
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
PAGE = DOCS / "guide" / "certified-digits.md"
FIGURE = DOCS / "_static" / "certified-digits.png"
FORMS = ("plain", "penalised", "lipschitz")
SMALL = (0.01, 0.015, 0.02, 0.025, 0.1, 0.25)  # radii of the table of radii
NAMES = {"plain": "plain", "penalised": "penalised", "lipschitz": "1-Lipschitz"}

Row = dict[str, Any]


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


def results() -> list[Row]:
    """Return the rows of the file of results."""
    return list(json.loads((HERE / "results.json").read_text(encoding="utf-8")).values())


def with_tables(page: str) -> str:
    """Return the page with each table between its marks."""
    rows = results()
    made = {
        "accuracies": accuracies(rows),
        "constants": constants(rows),
        "radii": radii(json.loads((HERE / "radii.json").read_text(encoding="utf-8"))),
        "attentions": attentions(HERE / "attentions.json", (0.1, 0.5)),
        "retrieval": attentions(HERE.parent / "retrieval" / "results.json", (0.01, 0.03)),
    }
    return placed(page, made)


def placed(page: str, made: dict[str, str]) -> str:
    """Return a page with each table between its marks."""
    for name, table in made.items():
        mark = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(mark, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", page, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"The page has {count} places for the table {name}.")
    return page


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


def constants(rows: Sequence[Row]) -> str:
    """Return the table of constants, certified and measured: the least and the largest of the seeds."""
    lines = [["form", "certified", "model, median", "model, largest", "attention, largest"]]
    for form in FORMS:
        own = [row for row in rows if row["form"] == form]
        columns = [
            [row["constant"] for row in own],
            *([row["model_constants"][i] for row in own] for i in (0, 1)),
            [max(largest for _, largest in row["attention_constants"]) for row in own],
        ]
        lines.append([NAMES[form], *(" to ".join(map(number, (min(c), max(c)))) for c in columns)])
    return markdown(lines)


def radii(done: dict[str, dict[str, Any]]) -> str:
    """Return the table of shares of the images that keep their class: proved, attacked and certified."""
    second = {form: done[f"{form}-0, order 2"] for form in FORMS[:2]}
    images = sorted(set.intersection(*(set(rows) for rows in second.values())), key=int)
    head = f"form, {len(images)} images"
    lines = [[head, "", *(f"r = {radius:g}" for radius in SMALL), "median radius"]]
    for form, rows in second.items():
        own = {name: [rows[i][name] for i in images] for name in ("radius", "attack")}
        lines.append([NAMES[form], "expansion", *shares_above(own["radius"])])
        lines.append(["", "attacked", *shares_above(own["attack"])])
    for form in FORMS:
        certified = [done[f"{form}-0, certificate"][i] for i in images]
        lines.append([NAMES[form], "Lipschitz certificate", *shares_above(certified)])
    return markdown(lines)


def attentions(path: Path, radii: Sequence[float]) -> str:
    """Return the table of a file of results by kind of attention: means, and weights from least to most."""
    rows = list(json.loads(path.read_text(encoding="utf-8")).values())
    head = ["attention", "clean", *(f"certified, r = {radius:g}" for radius in radii)]
    lines = [[*head, "without it", "weight, block 1", "block 2"]]
    for kind in dict.fromkeys(row["attention"] for row in rows):
        own = [row for row in rows if row["attention"] == kind]
        shares = [[row["certified"][row["radii"].index(radius)] for row in own] for radius in radii]
        clean, without = [row["clean"] for row in own], [row["without"] for row in own]
        weights = ["", ""]
        if own[0]["weights"]:
            weights = [interval([row["weights"][block] for row in own]) for block in (0, 1)]
        lines.append([kind.replace("l2", "L2"), spread(clean), *map(spread, shares), mean(without), *weights])
    return markdown(lines)


def spread(shares: Sequence[float]) -> str:
    """Write the mean of some shares in percent, with the least and the most."""
    return f"{mean(shares)} ({100 * min(shares):.1f} to {100 * max(shares):.1f})"


def interval(values: Sequence[float]) -> str:
    """Write the least and the largest number in percent, or one if they agree."""
    texts = [f"{100 * value:.0f}" for value in (min(values), max(values))]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def shares_above(values: Sequence[float]) -> list[str]:
    """Write the share of values that reach each small radius, in percent, and their median."""
    reached = [mean([float(value >= radius) for value in values]) for radius in SMALL]
    return [*reached, number(statistics.median(values))]


def mean(shares: Sequence[float]) -> str:
    """Write the mean of some shares in percent."""
    return f"{100 * sum(shares) / len(shares):.1f}"


def number(value: float) -> str:
    """Write a number to three or four digits, or a large one as a power of ten."""
    if 0 < value < 1e-4 or value >= 1000:
        digits, exponent = f"{value:.0e}".split("e")
        return f"{digits} · 10^{int(exponent)}"
    return f"{value:.4f}" if 0.99 < value < 1.01 else f"{value:.3g}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table whose first line is its head."""
    rule = ["---"] * len(lines[0])
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


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
    sys.exit(main())
