"""Write the golden numbers: ``python -m tests.keep.write [--replace NAME ...]``.

It adds the numbers of new cases and never changes one that stands: a number that stays does not change by a
digit. Where a change is right after all, ``--replace`` names the case or the number (``case`` or
``case:number``), and the commit says why.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.keep.cases import CASES
from tests.keep.numbers import as_number

GOLDEN = Path(__file__).with_name("golden.json")

Golden = dict[str, dict[str, Any]]


def read() -> Golden:
    golden: Golden = json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.exists() else {}
    return golden


def merged(old: Golden, new: Golden, replace: set[str]) -> Golden:
    """Add the new numbers to the old ones, which stay unless they are named."""
    kept = {name: dict(found) for name, found in old.items()}
    for name, found in new.items():
        mine = kept.setdefault(name, {})
        for key, value in found.items():
            if key not in mine or name in replace or f"{name}:{key}" in replace:
                mine[key] = value
        if name in replace:
            kept[name] = dict(found)
    return kept


def text(golden: Golden) -> str:
    """One number a line, sorted, with all digits."""
    lines = []
    for name in sorted(golden):
        rows = [f"  {json.dumps(key)}: {json.dumps(golden[name][key])}" for key in sorted(golden[name])]
        lines.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.keep.write")
    parser.add_argument("--replace", nargs="*", default=[], metavar="NAME", help="cases, or case:number")
    replace = set(parser.parse_args(arguments).replace)
    old = read()
    asked = {name for name in CASES if name not in old or any(r.split(":")[0] == name for r in replace)}
    unknown = {r for r in replace if r.split(":")[0] not in CASES}
    if unknown:
        parser.error(f"--replace: no case is named {', '.join(sorted(unknown))}")
    new = {name: {k: as_number(v).stored() for k, v in CASES[name]().items()} for name in sorted(asked)}
    GOLDEN.write_text(text(merged(old, new, replace)), "utf-8")
    print(f"{sum(map(len, new.values()))} numbers of {len(new)} cases; file: {GOLDEN.name}")


if __name__ == "__main__":
    main()
