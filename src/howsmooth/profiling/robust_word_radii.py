"""The function ``word_radii``. It proves how far tokens may move without changing a classifier's answer."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import IO, Any, ClassVar

import pandas as pd
from torch import Tensor, nn

from howsmooth.bounds.radius import RobustRadius
from howsmooth.bounds.radius.robust_radius import NetworkAtInput
from howsmooth.errors import ArgumentError, reason
from howsmooth.printed_table import PrintedTable
from howsmooth.profiling import model_input
from howsmooth.profiling.model_input import InputResult, Inputs, Model
from howsmooth.results.curves import Curve, Panel, add_legend, draw
from howsmooth.results.drawing import Figure, styled, titled
from howsmooth.results.page import parts
from howsmooth.rounding import limit_in_digits
from howsmooth.study.plans import RADIUS_TOKENS
from howsmooth.study.ranges import Ranges
from howsmooth.study.records import plain_rows
from howsmooth.threads import with_fastest_threads
from howsmooth.words import readable, visible_token

__all__ = ["WordRadii", "keep_row", "kept_rows", "word_radii"]

_START = '{"key": "'

_SHOWN = 10
_LOST = "Most is lost at the part of the model whose approximation makes the radius smaller the most."
_LEVELS = 9  # shades of a highlighted token
_BLUE = "#3b528b"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class WordRadii(InputResult):
    """The proved radii within which tokens can move, each alone or several jointly, without changing a
    classifier's answer; :class:`howsmooth.bounds.RobustRadius` describes what is proved.
    """

    NAME: ClassVar[str] = "radius"
    TITLE: ClassVar[str] = "Radii"
    FORMATS: ClassVar[Mapping[str, Callable[[float], str]]] = {
        "radius": lambda radius: limit_in_digits(radius, 6, upper=False),
        "attack": lambda size: _attack(size, 6),
    }

    #: One row for each token; a single one, without position, if the tokens move jointly. Columns:
    #: ``position``, ``token`` where the input has words, ``radius``, ``attack`` (size of the smallest change
    #: of the answer that was found), ``first_order`` (no bound), ``order``, ``label``, ``rival``, ``margin``,
    #: ``lost_at`` (the stage that takes most of the margin) and ``seconds``.
    table: pd.DataFrame
    #: 2 for the Euclidean norm of the change; infinity for its largest entry.
    norm: float
    #: Whether the tokens move jointly.
    jointly: bool
    #: The positions of the tokens that move, such as "1:3"; "all" for all tokens.
    moving: str
    #: The class that the answer must not become, a functional of the logits, or None for any other class.
    target: int | Tensor | None
    #: The model's own name of the class that it answers; empty if it names none.
    answer: str = ""

    @property
    def ranking(self) -> pd.DataFrame:
        """The table, sorted by increasing radius."""
        return self.table.sort_values("radius", kind="stable", ignore_index=True)

    @property
    def statement(self) -> str:
        """One sentence that says what the radii prove about the answer of the classifier."""
        one = "one token" if self.moving == "all" else f"one of the {self._which}"
        moved, still = f"{self._which} move jointly", ""
        if not self.jointly:
            moved = f"{one if len(self.table) > 1 else f'token {self.moving}'} moves"
            still = ", and the others stand still"
        norm = "Euclidean norm" if self.norm == 2 else "largest entry"
        first = self.table.iloc[0]
        name = f" {readable(self.answer)!r}" if self.answer else ""
        answer, margin = f"class {first['label']}{name}", f"margin {first['margin']:.4g}"
        kept = f"keeps its answer ({answer}, {margin})"
        if isinstance(self.target, Tensor):
            kept = f"keeps a functional of its logits above the threshold ({margin})"
        elif self.target is not None:
            kept = f"does not answer class {self.target} in place of {answer} ({margin})"
        return (
            f"{self.model} {kept} while {moved} by less than the radius, in the {norm} of the embedded "
            f"tokens{still}. The radii are proved, rounding included."
        )

    def _lines(self) -> list[str]:
        lines = [f"Radii of {self.model}, {self.input}, {self.length}.", self.statement, _LOST]
        for row in plain_rows(self.ranking.head(_SHOWN)):
            found = f", smallest attack found {_attack(row['attack'])}" if row["attack"] is not None else ""
            beside = f"(order {row['order']}{found}; most is lost at {row['lost_at']})"
            radius = limit_in_digits(row["radius"], 4, upper=False)
            lines.append(f"  {self._place(row):<20} {radius:<8}  {beside}")
        more = len(self.table) - _SHOWN
        return [*lines, *([f"  and {more} larger radii"] if more > 0 else [])]

    @property
    def citation(self) -> str:
        """One line to cite, with the proved statement and the smallest radius."""
        smallest = plain_rows(self.ranking.head(1))[0]
        radius = limit_in_digits(smallest["radius"], 6, upper=False)
        return (
            f"At {self.input} (n = {self.n}): {self.statement} The smallest is {radius} "
            f"({self._place(smallest)}); {self._made_by}"
        )

    @styled
    def plot(self) -> Figure:
        """Draw the radius of each token, together with the size of the smallest attack that was found."""
        places = range(len(self.table))
        curves = [Curve(places, self.table["radius"], "proved", _BLUE, mark="o", size=36)]
        attack = self.table["attack"].astype(float)
        if bool(attack.notna().any()):
            label = "smallest attack found"
            curves.append(Curve(places, attack, label, "#e07b00", mark="v", size=36, filled=False))
        width = max(3.6, 1.6 + 0.24 * len(self.table))
        title = titled(self.model, width - 0.8)
        panel = Panel(curves, title, "", "radius", scales=("linear", "log"), names=self._names)
        figure, _ = draw([[panel]], (width, 3.0))
        add_legend(figure, 2)
        return figure

    @property
    def _names(self) -> list[str]:
        if self.jointly:
            return [self._which]
        return [visible_token(self.words[i]) if self.words else str(i) for i in self.table["position"]]

    @property
    def _which(self) -> str:
        return "all tokens" if self.moving == "all" else f"tokens {self.moving}"

    def _place(self, row: Mapping[str, Any]) -> str:
        if (at := row["position"]) is None:
            return self._which
        return f"{at} {readable(row['token'])!r}" if "token" in row else f"token {at}"

    def _parts(self, images: Mapping[str, str], most: int) -> list[str]:
        smallest = float(self.table["radius"].min())
        read = () if self.jointly else self.words
        spans: dict[Any, Any] = {i: (0, f"{visible_token(word)} ", "") for i, word in enumerate(read)}
        rows = []
        for row, word in zip(plain_rows(self.table), self._names, strict=True):
            shade = _LEVELS if row["radius"] == 0 else round(_LEVELS * smallest / row["radius"])
            spans[row["position"]] = (shade, f"{word} ", limit_in_digits(row["radius"], 3, upper=False))
            first = "none" if math.isinf(row["first_order"]) else f"{row['first_order']:.4g}"
            radius = limit_in_digits(row["radius"], 4, upper=False)
            rows.append([word, radius, _attack(row["attack"]), first, row["order"], row["lost_at"]])
        names = "token|radius|smallest attack found|first order, no bound|order|most is lost at"
        html = parts()
        return [
            html.words(f"Input: {self.input}, {self.length}. {self.statement}"),
            html.words(f"The darker a word, the smaller its radius. {_LOST}", "soft"),
            html.tokens(spans.values()),
            html.picture(images[self.NAME], "The radius of each token; the numbers are in the table."),
            html.table([(name, False) for name in names.split("|")], rows),
        ]

    def _told(self) -> dict[str, Any]:
        own = {"norm": f"{self.norm:g}", "jointly": self.jointly, "positions": self.moving}
        return own | {"statement": self.statement, "ranking": plain_rows(self.ranking)}


def _attack(size: float | None, digits: int = 4) -> str:
    """Format the size of an attack. It is rounded up, since a smaller change may not succeed."""
    if size is None or math.isnan(size):
        return "not searched"
    return "none" if math.isinf(size) else limit_in_digits(size, digits, upper=True)


@with_fastest_threads
def word_radii(
    model: Model,
    inputs: Inputs,
    *,
    positions: int | str | Sequence[int | str] | None = None,
    jointly: bool = False,
    norm: float = 2,
    target: int | Tensor | None = None,
    threshold: float = 0.0,
    order: int = 2,
    seconds: float | None = None,
    attack: bool = True,
    span: slice | tuple[int, int] | str | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    file: str | os.PathLike[str] | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> WordRadii:
    """Prove how far each token of a text may move without changing the answer of a classifier.

    One token moves while the others stand still, unless ``jointly`` is True. The radii are those of
    :func:`howsmooth.bounds.robust_radius`; the partial Jacobians are computed once for all tokens.

    Parameters
    ----------
    model
        A classifier as for :func:`howsmooth.bounds.robust_radius`, a model of
        :func:`~howsmooth.models.load_model`, or the name or folder of one.
    inputs
        A text, which gets the tokenizer's special tokens; token ids (n,) or (1, n), for a model that takes
        ``input_ids``; embedded tokens (n, d); or a dict of the model's inputs for one sequence.
    positions
        Which tokens move, counted from 0: an index, a range such as ``"1:3"`` (both ends included), or a list
        of these; -1 is the last. By default all.
    jointly
        Whether these tokens move jointly, which gives one radius.
    norm, target, threshold, attack, seed
        As for :func:`howsmooth.bounds.robust_radius`.
    order
        2 is fast; 3 reaches further.
    seconds
        With ``order=2``: after all tokens, so many seconds are spent on the third order, the smallest radius
        first. The larger radius of a token counts. What has begun is finished, and what ``file`` has of the
        third order counts as spent.
    span
        Which tokens of a text or of token ids the model reads, as for :func:`howsmooth.profile`. By default
        all, or the first 32 of a longer input.
    tokenizer
        A tokenizer of transformers, for a model that was not loaded by its name.
    file
        A file of JSON lines in which each finished radius is kept. A later call with the same model, input
        and options reads the finished radii from it; of a token that has one of each order the larger
        counts, whatever ``order`` and ``seconds`` are now. A model given as a module counts as another than
        its folder: give the folder to read what ``howsmooth radius`` has kept.
    on_token
        Called with the number of radii that are done, and the number of all; with ``jointly`` during the
        search for the one radius, with its steps and about how many there are. By default a progress bar is
        shown on a terminal and in a notebook.

    Raises
    ------
    ArgumentError, ModelError
        As for :func:`howsmooth.profile`.
    CertificateError
        If the model performs an operation that belongs to no layer of a network; the message names it.

    """
    if order not in (2, 3):
        raise ArgumentError("order", expected="2 or 3", got=repr(order))
    if seconds is not None and (order == 3 or jointly or not seconds > 0):
        expected = "a number > 0, with order=2 and single tokens"
        raise ArgumentError("seconds", expected=expected, got=repr(seconds))
    loaded = model_input.loaded_if_named(model, head=True)
    given = model_input.given_inputs(loaded, inputs, span, tokenizer, special=True, longest=RADIUS_TOKENS)
    found = given.inputs
    ids = isinstance(found, Tensor) and not found.is_floating_point()
    at = NetworkAtInput(given.module, {"input_ids": found} if ids else found)
    origin = given.origin() | {"computed": "float64"}
    chosen = Ranges.parse("all" if positions is None else positions, "positions")
    moved = at.reads if positions is None else chosen.resolve(len(at.x), origin["model"], "tokens")
    how: dict[str, Any] = {"norm": norm, "target": target, "threshold": threshold, "attack": attack}
    how["seed"] = seed
    options = how | {"target": target.tolist() if isinstance(target, Tensor) else target}
    # The proof is of the network as it was read; the rest is said beside the radii.
    read = [at.digest(), origin["fingerprint"]]
    content = [version("howsmooth"), read, options, moved if jointly else None]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    file = None if file is None else Path(file)
    kept = {(row["position"], row["order"]): row for row in kept_rows(file, key)}

    def radius(position: int | None, of_order: int, guess: float) -> float:
        row = kept.get((position, of_order))
        if row is None:
            tokens, on_step = (moved, told) if position is None else (position, None)
            row = _row(at.radius(tokens, order=of_order, guess=guess, on_step=on_step, **how), position)
            kept[position, row["order"]] = row
            keep_row(file, key, row)
        return float(row["radius"])

    every = [None] if jointly else moved
    scale = math.sqrt(at.x.shape[1] * (len(moved) if jointly else 1)) if norm == math.inf else 1.0
    guess = 0.05
    with model_input.shown_progress(on_token, len(every), "step" if jointly else "token") as told:
        for done, position in enumerate(every):
            told(done, len(every))
            guess = scale * radius(position, order, guess) or 0.05
        told(len(every), len(every))
        if seconds is not None:
            # What earlier calls spent counts too, so that a finished call gives the same result again.
            spent = 0.0
            for position in sorted(every, key=lambda position: kept[position, 2]["radius"]):
                if spent < seconds:
                    radius(position, 3, scale * 1.5 * float(kept[position, 2]["radius"]))
                    spent += kept[position, 3]["seconds"]
    rows = [_best([kept[p, o] for o in (2, 3) if (p, o) in kept]) for p in every]
    table = PrintedTable(rows).astype({"position": "Int64", "label": "Int64", "rival": "Int64"})
    words = given.words if given.words is not None and len(given.words) == len(at.x) else []
    if words and not jointly:
        table.insert(1, "token", [words[i] for i in moved])
    return WordRadii(
        **origin,
        table=table,
        words=tuple(words),
        n=len(at.x),
        norm=norm,
        jointly=jointly,
        moving=chosen.text,
        target=target,
        answer=_class_name(given.module, rows[0]["label"]),
    )


def _class_name(module: nn.Module, label: int | None) -> str:
    names = getattr(getattr(module, "config", None), "id2label", None) or {}
    name = "" if label is None else str(names.get(int(label), ""))
    return "" if name == f"LABEL_{label}" else name  # the name that transformers gives where there is none


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row with the largest radius, but with the smallest attack found in all rows."""
    found = [row["attack"] for row in rows if row["attack"] is not None]
    return max(rows, key=lambda row: float(row["radius"])) | {"attack": min(found, default=None)}


def _row(found: RobustRadius, position: int | None) -> dict[str, Any]:
    names = ("radius", "attack", "first_order", "order", "label", "rival", "margin")
    row = {"position": position} | {name: getattr(found, name) for name in names}
    return row | {"lost_at": max(found.losses, key=found.losses.__getitem__), "seconds": found.seconds}


@contextmanager
def _opened(file: Path) -> Iterator[IO[str]]:
    """Open a file of rows to read and to add; an OSError becomes an ArgumentError that names the argument."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a+", encoding="utf-8", errors="replace") as lines:
            yield lines
    except OSError as error:
        expected, got = "a file of JSON lines that can be read and written", f"{file} ({reason(error)})"
        raise ArgumentError("file", expected=expected, got=got) from error


def kept_rows(file: Path | None, key: str) -> list[dict[str, Any]]:
    """Read the rows with the given key from a file. A file that has other content only is refused."""
    rows, ours, filled = [], False, False
    with _opened(file) if file is not None else nullcontext(StringIO()) as lines:
        lines.seek(0)
        for line in lines:
            # The last line may have been cut when the program was killed, even within its start.
            ours, filled = ours or _START.startswith(line[: len(_START)]), filled or bool(line.strip())
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and row.pop("key", None) == key:
                    rows.append(row)
    if filled and not ours:
        expected = "a file of rows kept by howsmooth, or a new one"
        raise ArgumentError("file", expected=expected, got=f"{file} with other content")
    return rows


def row_of(file: Path | None, content: list[Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the row that a file has for what ``content`` says, or compute it and keep it there."""
    key = hashlib.sha256(json.dumps([version("howsmooth"), *content]).encode()).hexdigest()
    for row in kept_rows(file, key):
        return row
    row = compute()
    keep_row(file, key, row)
    return row


def keep_row(file: Path | None, key: str, row: Mapping[str, Any]) -> None:
    """Add a finished row to a file under a key."""
    if file is not None:
        with _opened(file) as lines:
            lines.write(f"\n{json.dumps({'key': key, **row})}\n")
