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
import csv
import io
import json
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
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
    parser.add_argument("--page", type=Path, help="page and table to make of the JSON file")
    asked = parser.parse_args()
    known = {row.type: row for row in read(asked.json)} if asked.json and asked.json.exists() else {}
    if asked.page:
        asked.page.write_text(page(asked.json), encoding="utf-8")
        (asked.page.parent / "_static" / "architectures.csv").write_text(table(asked.json), encoding="utf-8")
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
    for name in ("differences", "autodiff_error", "looseness", "lipschitz"):
        if values[name] is not None:
            values[name] = float(f"{values[name]:.2g}" if name != "lipschitz" else f"{values[name]:.4g}")
    values["seconds"] = round(row.seconds, 1)
    return values


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.0e}"


def page(source: Path) -> str:
    """Return the page of the documentation that sums up a JSON file."""
    head = json.loads(source.read_text(encoding="utf-8"))
    of = read(source)
    measured = [row for row in of if row.status == "measured"]
    count = Counter(row.status for row in of)
    worst = [max(getattr(row, name) or 0.0 for row in measured) for name in ("differences", "autodiff_error")]
    return _PAGE.format(
        transformers=head["transformers"],
        torch=head["torch"],
        types=len(of),
        measured=len(measured),
        closed=sum(not row.autodiff for row in measured),
        mixed=sum(bool(row.autodiff and row.closed_form) for row in measured),
        autodiff=sum(not row.closed_form for row in measured),
        whole=sum(row.captured == row.sites for row in measured),
        bounded=sum(_kind_of_bound(row) != "none" for row in measured),
        wrong=count["wrong"],
        refused=count["refused"],
        without=count["no attention"],
        missing=count["not built"] + count["not run"],
        differences=f"{worst[0]:.1g}",
        autodiff_error=f"{worst[1]:.1g}",
        differences_limit=f"{head['limits']['differences']:.0e}",
        autodiff_limit=f"{head['limits']['autodiff']:.0e}",
    )


_PAGE = """\
# Architectures

Can `howsmooth.capture` take the attention out of a model type, and is the result the model's own? Below is
the answer for each of the {types} model types of transformers {transformers} (torch {torch}) that have a
base model; all columns are in [architectures.csv](_static/architectures.csv). For a model of yours, ask
`howsmooth inspect` ({{doc}}`how-to/other-models`).

| types | |
|---|---|
| {measured} | measured: {closed} in closed form throughout, {mixed} partly, {autodiff} wholly by autodiff; \
in {whole} every self-attention is captured |
| {wrong} | wrong |
| {refused} | refused, with the reason |
| {without} | without a softmax: linear and state-space mixers, convolutions, Fourier transforms, pooling |
| {missing} | could not be built or run so small, in float64, or without packages that were not installed |

Each type is built with two layers (of each kind), width 64 and random weights in float64, and run on a few
tokens, a small image or a short piece of audio. The tokens of up to twelve captured sites and scopes are
moved *in the whole model*, and the change is compared with the captured map's: the largest relative error
is {differences} by central differences (limit {differences_limit}) and {autodiff_error} by the model's own
reverse mode ({autodiff_limit}).

`captured` of `sites` says how many layers of self-attention are captured, `closed_form` how many of these
have their Jacobian in closed form. `bound` is the kind of upper bound on the ball of every layer: {bounded}
types have one, never below the constant at these tokens.

```{{csv-table}}
:file: _static/architectures.csv
:header-rows: 1
:class: architectures
```

```{{raw}} html
<script src="_static/architectures.js"></script>
```
"""


_COLUMNS = (
    "type", "status", "sites", "captured", "closed_form", "autodiff", "scopes", "differences",
    "autodiff_error", "bound", "bound_over_constant", "reasons",
)  # fmt: skip


def table(source: Path) -> str:
    """Return the table beside that page as CSV, with a line for each type."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(_COLUMNS)
    for row in read(source):
        counts = (row.sites, row.captured, row.closed_form, row.autodiff, " ".join(row.scopes))
        judged = (row.differences, row.autodiff_error)
        bound = (_kind_of_bound(row), row.looseness) if row.status == "measured" else ("", None)
        reasons = _reasons([*row.wrong, *row.path_reasons, *row.reasons])
        lines.writerow((row.type, row.status, *counts, *judged, *bound, "; ".join(reasons)))
    return text.getvalue()


def _reasons(found: Iterable[str]) -> list[str]:
    """Return the first sentences of reasons, each once, without names of classes."""
    kept = (why for why in found if why != "every parameter is known")
    short = (re.split(r"\. |\.$", re.sub(r" \(\w+\)", "", words))[0] for words in kept)
    return list(dict.fromkeys(" ".join(words.split()) for words in short))


def _kind_of_bound(row: Row) -> str:
    names = list(row.bounds)
    if not names or "none" in names:
        return "none"
    return "scores" if "any_scores_ball_upper_bound" in names else "plain"


if __name__ == "__main__":
    sys.exit(main())
