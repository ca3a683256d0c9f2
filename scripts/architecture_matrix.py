"""What capture does with every model type of the installed transformers, and whether it is right.

    python scripts/architecture_matrix.py --json matrix.json                     # all: about 20 minutes
    python scripts/architecture_matrix.py --shard 3/12 --json shard3.json
    python scripts/architecture_matrix.py --types bert gpt2                      # a few, printed
    python scripts/architecture_matrix.py --merge shard*.json --json matrix.json # one file of many
    python scripts/architecture_matrix.py --json tests/architectures/matrix.json --page docs/architectures.md

Each type is built tiny (two layers, width 64) with random weights in float64 and run on a few tokens; every
attention call is captured, and the Jacobian of each map is held against finite differences of the model and
against its own reverse mode, taken around the captured module in the whole model. Rows of types that are not
asked for stay as they are in the JSON file. Exits with 1 if a number is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from tests.architectures.build import model_types
from tests.architectures.isolation import rows, shard
from tests.architectures.measure import LIMITS, Row

_STATUS = ("measured", "refused", "no attention", "not built", "not run", "wrong")


def main() -> int:
    """Run, merge or print, as asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shard", help="I/N: every N-th type from the I-th on")
    parser.add_argument("--types", nargs="*", help="only these types")
    parser.add_argument("--json", type=Path, help="file to write; rows of other types in it are kept")
    parser.add_argument("--merge", nargs="*", type=Path, help="files to put together instead of measuring")
    parser.add_argument("--page", type=Path, help="Markdown page to make of the JSON file; measures nothing")
    asked = parser.parse_args()
    known = {row.type: row for row in read(asked.json)} if asked.json and asked.json.exists() else {}
    if asked.page:
        asked.page.write_text(page(asked.json), encoding="utf-8")
        return 0
    if asked.merge:
        known |= {row.type: row for path in asked.merge for row in read(path)}
    else:
        types = asked.types or shard(model_types(), asked.shard or "1/1")
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        started = time.perf_counter()
        for row in rows(types):
            known[row.type] = row
            print(line(row), flush=True)
            if asked.json:
                write(asked.json, list(known.values()))
        print(f"{len(types)} types in {time.perf_counter() - started:.0f} s")
    if asked.json:
        write(asked.json, list(known.values()))
    print(", ".join(f"{count} {status}" for status, count in totals(list(known.values())).items()))
    return int(any(row.status == "wrong" for row in known.values()))


def totals(of: list[Row]) -> dict[str, int]:
    """How many types have each status."""
    count = Counter(row.status for row in of)
    return {status: count[status] for status in _STATUS if count[status]}


def line(row: Row) -> str:
    """One row for the terminal."""
    if row.status != "measured":
        return f"{row.type}: {row.status}: {'; '.join(row.wrong or row.reasons) or '-'}"
    how = f"{row.captured} of {row.sites} ({row.closed_form} closed form, {row.autodiff} autodiff)"
    errors = f"{_short(row.differences)} {_short(row.autodiff_error)}"
    return f"{row.type}: {how}, {' '.join(row.scopes)}, {errors}, {row.seconds:.1f} s"


def read(path: Path) -> list[Row]:
    """Rows of a JSON file."""
    names = {field.name for field in fields(Row)}
    stored: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [Row(**{key: value for key, value in row.items() if key in names}) for row in stored]


def write(path: Path, of: list[Row]) -> None:
    """Write rows, one a line, with what they were made with."""
    head = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "limits": LIMITS,
    }
    lines = ",\n".join(
        json.dumps(_rounded(row), ensure_ascii=False) for row in sorted(of, key=lambda r: r.type)
    )
    path.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n", encoding="utf-8")


def _rounded(row: Row) -> dict[str, Any]:
    values = row.as_dict()
    for name in ("differences", "autodiff_error", "lipschitz"):
        if values[name] is not None:
            values[name] = float(f"{values[name]:.2g}" if name != "lipschitz" else f"{values[name]:.4g}")
    values["seconds"] = round(row.seconds, 1)
    return values


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.0e}"


def page(source: Path) -> str:
    """Return the page of the documentation that shows a JSON file."""
    head = json.loads(source.read_text(encoding="utf-8"))
    of = read(source)
    groups = {status: [row for row in of if row.status == status] for status in _STATUS}
    measured = groups["measured"]
    closed = [row for row in measured if not row.autodiff]
    worst = [max(getattr(row, name) or 0.0 for row in measured) for name in ("differences", "autodiff_error")]
    whole = sum(row.captured == row.sites for row in measured)
    text = _HEAD.format(
        transformers=head["transformers"],
        torch=head["torch"],
        types=len(of),
        built=len(of) - len(groups["not built"]) - len(groups["not run"]),
        measured=len(measured),
        closed=len(closed),
        mixed=sum(bool(row.autodiff and row.closed_form) for row in measured),
        autodiff=sum(not row.closed_form for row in measured),
        whole=whole,
        wrong=len(groups["wrong"]),
        refused=len(groups["refused"]),
        without=len(groups["no attention"]),
        missing=len(groups["not built"]) + len(groups["not run"]),
        differences=f"{worst[0]:.1g}",
        autodiff_error=f"{worst[1]:.1g}",
        differences_limit=f"{head['limits']['differences']:.0e}",
        autodiff_limit=f"{head['limits']['autodiff']:.0e}",
    )
    columns = "type, class, captured, path, scopes, differences, autodiff, seconds, how and what is refused"
    text += _table(
        "Measured", f"| {columns.replace(', ', ' | ')} |", [_measured_cells(row) for row in measured]
    )
    for status, title in _TITLES.items():
        cells = [
            (f"`{row.type}`", f"`{row.model}`", _text("; ".join(row.wrong or row.reasons)))
            for row in groups[status]
        ]
        text += _table(title, "| type | class | reason |", cells)
    return text.rstrip() + "\n"


_TITLES = {
    "wrong": "Wrong",
    "refused": "Refused",
    "no attention": "Without softmax attention",
    "not built": "Not built here",
    "not run": "Not run here",
}
_HEAD = """\
# Architectures

Can `howsmooth.capture` take the attention out of a model type, in closed form, in which scopes, and is the
result the model's own? Here is the answer for each of the {types} model types of transformers {transformers}
(torch {torch}) that have a base model. `howsmooth inspect` answers it for a model of yours
({{doc}}`guide/any-model`).

| types | |
|---|---|
| {measured} | measured: {closed} in closed form throughout, {mixed} partly, {autodiff} wholly by autodiff; \
in {whole} every self-attention is captured |
| {wrong} | wrong |
| {refused} | refused, with the reason |
| {without} | without a softmax |
| {missing} | could not be built or run here |

Each type is built with two layers (of each kind), width 64 and random weights in float64, and run on a few
tokens, a small image or a short piece of audio. Cross-attention is left out. The tokens of each captured site
are moved *in the whole model*, and the change of what the scope names is compared with the captured map's:

| column | judge | largest relative error | limit |
|---|---|---|---|
| differences | central differences of the model | {differences} | {differences_limit} |
| autodiff | the model's own reverse mode | {autodiff_error} | {autodiff_limit} |

Up to twelve sites and scopes of a type are checked. Where no module of the model holds the values of a scope,
or tokens are larger than 1e12, the row says so. This page is made by `scripts/architecture_matrix.py`.
"""


def _measured_cells(row: Row) -> tuple[str, ...]:
    path = "closed form" if not row.autodiff else "autodiff" if not row.closed_form else "both"
    notes = [*(why for why in row.path_reasons if why != "every parameter is known"), *row.reasons]
    if row.unseen:
        notes.append(f"not seen in the model: {', '.join(row.unseen)}")
    return (
        f"`{row.type}`",
        f"`{row.model}`",
        f"{row.captured} of {row.sites}",
        path,
        ", ".join(row.scopes),
        _short(row.differences),
        _short(row.autodiff_error),
        f"{row.seconds:.1f}",
        _text("; ".join(notes)),
    )


def _text(words: str) -> str:
    """Plain words in a cell of a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>|$#~])", r"\\\1", " ".join(words.split()))


def _table(title: str, head: str, cells: list[tuple[str, ...]]) -> str:
    if not cells:
        return ""
    rule = "|" + " --- |" * (head.count("|") - 1)
    return "\n".join([f"\n## {title}\n", head, rule, *(f"| {' | '.join(row)} |" for row in cells), ""])


if __name__ == "__main__":
    sys.exit(main())
