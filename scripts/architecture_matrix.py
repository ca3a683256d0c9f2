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
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from tests.architectures.build import model_types
from tests.architectures.isolation import rows, shard
from tests.architectures.measure import LIMITS, Row

from howsmooth.scopes import SCOPES

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
    for name in ("differences", "autodiff_error", "looseness", "lipschitz"):
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
    text += _bounds(measured)
    plain = [row for row in closed if row.captured == row.sites and not (row.reasons or _why(row))]
    text += _names("Captured whole", _WHOLE, plain)
    text += _table(
        "Captured with a restriction",
        "| type | captured | path | scopes | why |",
        [_measured_cells(row) for row in measured if row not in plain],
        words=_RESTRICTED,
    )
    for status in ("wrong", "refused"):
        cells = [
            (f"`{row.type}`", _text("; ".join(_reasons(row.wrong or row.reasons)))) for row in groups[status]
        ]
        text += _table(status.capitalize(), "| type | reason |", cells)
    text += _names("Without softmax attention", _WITHOUT, groups["no attention"])
    text += _names("Not built or not run here", _MISSING, groups["not built"] + groups["not run"])
    return text.rstrip() + "\n"


_WHOLE = "Every parameter of every self-attention is known, in all five scopes."
_RESTRICTED = """\
The path says how the Jacobian is computed ({doc}`guide/any-model`): in *closed form* with every parameter
known, with the *softmax* alone in closed form, or by *autodiff*. `howsmooth inspect` gives all reasons."""
_WITHOUT = (
    "Linear and state-space mixers, convolutions, Fourier transforms and pooling have no map to measure."
)
_MISSING = """\
Their code fails with two small layers, in float64, or without packages that were not installed. The errors
are in `tests/architectures/matrix.json`."""
_INNER = "the softmax in closed form, the rest differentiated by PyTorch"
_WHOLLY = "differentiated by PyTorch as it is"
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
are moved *in the whole model*, and the change of the scope's values is compared with the captured map's:

| judge | largest relative error | limit |
|---|---|---|
| central differences of the model | {differences} | {differences_limit} |
| the model's own reverse mode | {autodiff_error} | {autodiff_limit} |

Up to twelve sites and scopes of a type are checked, where a module of the model holds the scope's values.
The errors of each type are in `tests/architectures/matrix.json`, from which
`scripts/architecture_matrix.py` makes this page.
"""


_BOUNDS = """
## Bounds on a ball

For each layer {{func}}`howsmooth.bounds.best` was asked for an upper bound on the ball that holds the layer's
tokens, for the number of tokens in the run. It is finite in every layer of {finite} of {measured} measured
types ({percent:.0f} %). No bound was below the constant at these tokens, which lie inside the ball.

| bound of every layer | types | bound / constant at the tokens, median |
|---|---|---|
| of plain scores, any mask ({{doc}}`theory/bounds-on-a-ball`) | {plain} | {plain_ratio} |
| of rotary, normed, capped or biased scores or sinks, in some layer ({{doc}}`theory/any-scores`) | {scores} \
| {scores_ratio} |
| none, in some layer | {none} | |

No bound is known for a layer that is given by its code and not by its matrices. At given tokens the
certificates are far sharper ({{doc}}`theory/certificates`).
"""


def _kind_of_bound(row: Row) -> str:
    names = list(row.bounds)
    if not names or "none" in names:
        return "none"
    return "scores" if "any_scores_ball_upper_bound" in names else "plain"


def _bounds(measured: list[Row]) -> str:
    """Return the section about the bound on a ball that applies to the layers of each model type."""
    kinds: dict[str, list[Row]] = {kind: [] for kind in _KINDS}
    for row in measured:
        kinds[_kind_of_bound(row)].append(row)
    finite = len(kinds["plain"]) + len(kinds["scores"])
    ratios = {}
    for kind in ("plain", "scores"):
        known = [row.looseness for row in kinds[kind] if row.looseness is not None]
        ratios[f"{kind}_ratio"] = f"{median(known):.2g}" if known else ""
    text = _BOUNDS.format(
        finite=finite,
        measured=len(measured),
        percent=100 * finite / len(measured),
        **{kind: len(of) for kind, of in kinds.items()},
        **ratios,
    )
    for kind, words in _KINDS.items():
        text += f"\n**{words}**: {', '.join(f'`{row.type}`' for row in kinds[kind])}.\n"
    return "\n".join(line for part in text.split("\n") for line in _wrapped(part))


_KINDS = {
    "plain": "Plain scores",
    "scores": "Other scores",
    "none": "None, in some layer",
}


def _wrapped(line: str) -> list[str]:
    return (
        textwrap.wrap(line, 110, break_long_words=False, break_on_hyphens=False)
        if line.startswith("**")
        else [line]
    )


def _measured_cells(row: Row) -> tuple[str, ...]:
    scopes = "all" if len(row.scopes) == len(SCOPES) else ", ".join(row.scopes)
    captured = "all" if row.captured == row.sites else f"{row.captured} of {row.sites}"
    return f"`{row.type}`", captured, ", ".join(_paths(row)), scopes, _text("; ".join(_why(row)))


def _paths(row: Row) -> list[str]:
    """Return the readings of the type's layers, the best first."""
    names = {"every parameter": "closed form", _INNER: "softmax", _WHOLLY: "autodiff"}
    return [name for start, name in names.items() if any(why.startswith(start) for why in row.path_reasons)]


def _why(row: Row) -> list[str]:
    """Return why a type's layers are not all read with every parameter, or not captured, in short."""
    reasons = [why for why in row.path_reasons if why != "every parameter is known"]
    reasons += [why for why in row.reasons if why.partition(":")[0] not in SCOPES]
    return _reasons(reasons)


def _reasons(found: Iterable[str]) -> list[str]:
    """Return the first sentences of reasons, each once, without names of classes."""
    short = []
    for words in found:
        words = re.sub(r" \(\w+\)", "", words.removeprefix(f"{_INNER}: ").removeprefix(f"{_WHOLLY}: "))
        short.append(re.split(r"; |\. |\.$", words)[0])
    return list(dict.fromkeys(short))


def _names(title: str, words: str, of: list[Row]) -> str:
    if not of:
        return ""
    names = textwrap.fill(", ".join(f"`{row.type}`" for row in of), 110, break_on_hyphens=False)
    return f"\n## {title}\n\n{words}\n\n{names}.\n"


def _text(words: str) -> str:
    """Plain words in a cell of a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>|$#~])", r"\\\1", " ".join(words.split()))


def _table(title: str, head: str, cells: list[tuple[str, ...]], words: str = "") -> str:
    if not cells:
        return ""
    rule = "|" + " --- |" * (head.count("|") - 1)
    title += f"\n\n{words}" if words else ""
    return "\n".join([f"\n## {title}\n", head, rule, *(f"| {' | '.join(row)} |" for row in cells), ""])


if __name__ == "__main__":
    sys.exit(main())
