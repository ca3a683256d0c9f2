"""``howsmooth measure --as-published``: the published quantity beside the corrected one."""

from __future__ import annotations

import json
from concurrent.futures import Executor
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from howsmooth.cli.progress import Display
from howsmooth.cli.result import package_version, records
from howsmooth.cli.watch import Watch
from howsmooth.study.names import decimal, encodable, readable

if TYPE_CHECKING:
    from howsmooth.study.plan import Plan
    from howsmooth.study.progress import Outcome
    from howsmooth.study.published_tables import PublishedComparison

__all__ = ["measure_as_published"]


def measure_as_published(
    plan: Plan,
    items: str,
    folder: Path,
    display: Display,
    watch: Watch,
    *,
    command: str,
    as_json: bool,
    quiet: bool,
    executor: Executor | None = None,
    threads: int | None = None,
) -> None:
    """Measure, write and print; the words of ``items`` are those of the option.

    A folder with measurements too gets its report written anew, with both.
    """
    from howsmooth.published import parse_items
    from howsmooth.study.publish import publish
    from howsmooth.study.published_run import run_as_published
    from howsmooth.study.published_tables import publish_comparison
    from howsmooth.study.store import Store
    from howsmooth.study.tools import default_tools

    chosen = parse_items(items)
    with display:
        display.phase("Reading texts and models")
        outcome = watch.finished = run_as_published(
            plan,
            chosen,
            folder,
            default_tools(),
            command=command,
            on_progress=watch,
            executor=executor,
            threads=threads,
        )
        display.phase("Drawing figures")
        with Store.open(folder, write=False) as store:
            measured = not store.measurements().empty
        written = publish(folder).comparison if measured else None
        written = written or publish_comparison(folder)
    if as_json:
        print(_as_json(plan, outcome, written))
    elif not quiet:
        _show(outcome, written)


def _as_json(plan: Plan, outcome: Outcome, written: PublishedComparison) -> str:
    from howsmooth.published import ITEMS

    found = {
        "howsmooth": package_version(),
        "seconds": round(outcome.seconds, 3),
        "measured": outcome.measured,
        "kept": outcome.kept,
        "seed": plan.seed,
        "items": ITEMS,
        "exponents": records(written.exponents),
        "files": {
            "rows": str(written.rows_file),
            "exponents": str(written.exponents_file),
            "figures": [str(path) for picture in written.pictures for path in (picture.png, picture.pdf)],
        },
    }
    return json.dumps(found, indent=2, allow_nan=False)


def _show(outcome: Outcome, written: PublishedComparison) -> None:
    console = Console()
    for (model, text, layer), family in groupby(
        records(written.exponents), key=itemgetter("model", "text", "layer")
    ):
        console.print(Text(f"\n{readable(model)}, layer {layer}, text {readable(text)}", style="bold"))
        console.print(Padding(_table(list(family)), (0, 0, 0, 2), expand=False))
    words = f"\n{outcome.measured} values measured in {outcome.seconds:.1f} s"
    words += f", {outcome.kept} were there already" if outcome.kept else ""
    words += f"; {outcome.unconverged} did not converge" if outcome.unconverged else ""
    console.print(Text(f"{words}."))
    # Not through rich, which would break a long path in two.
    print(encodable(f"Exponents: {written.exponents_file}"))
    print(encodable(f"Also in {written.rows_file.parent}: published.csv, figures/"))


def _table(rows: list[dict[str, object]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("quantity", no_wrap=True)
    for name in ("exponent", "95 % interval", "p of 1/4", "points", "÷ corrected"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        slope, low, high, quarter, ratio = (
            row[name] for name in ("slope", "low", "high", "quarter", "ratio")
        )
        fitted = not row["note"]
        table.add_row(
            str(row["quantity"]),
            decimal(_float(slope), 3) if fitted else str(row["note"]),
            f"{decimal(_float(low), 3)} to {decimal(_float(high), 3)}" if fitted else "",
            f"{_float(quarter):.2g}" if fitted else "",
            str(row["n_points"]),
            "" if ratio is None else f"{_float(ratio):.3g}",
        )
    return table


def _float(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
