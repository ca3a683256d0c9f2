"""The function ``certified_accuracy``: on how many inputs of a data set a classifier is right, and provably
stays so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from torch import Tensor

from howsmooth.bounds.radius.robust_radius import NetworkAtInput, Prepared
from howsmooth.errors import ArgumentError
from howsmooth.models.capture import module_of
from howsmooth.printed_table import PrintedTable
from howsmooth.profiling import model_input
from howsmooth.profiling.model_input import Inputs, Model
from howsmooth.profiling.robust_word_radii import WordRadii, row_of
from howsmooth.results.curves import DASHED, SOLID, Curve, Panel, add_legend, draw
from howsmooth.results.drawing import Figure, styled, titled
from howsmooth.results.result import Result, made_by
from howsmooth.rounding import limit_in_digits
from howsmooth.study.plans import RADIUS_TOKENS
from howsmooth.threads import with_fastest_threads

__all__ = ["CertifiedAccuracy", "certified_accuracy"]

_LABELLED = ("proved", "no attack found")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CertifiedAccuracy(Result):
    """For each input of a data set, the radius within which the right answer of a classifier provably does
    not change; :class:`howsmooth.bounds.RobustRadius` describes what is proved.
    """

    NAME: ClassVar[str] = "accuracy"
    TITLE: ClassVar[str] = "Certified accuracy"
    FORMATS: ClassVar[Mapping[str, Callable[[float], str]]] = WordRadii.FORMATS

    #: One row for each input, with the columns ``input`` (its number), ``label``, ``answer``, ``token`` (the
    #: one that moves; none if all move), ``radius``, ``attack``, ``order``, ``margin`` and ``seconds``. Where
    #: the answer is wrong, radius and attack are 0.
    table: pd.DataFrame
    #: The name of the model.
    model: str
    #: SHA-256 of the model.
    fingerprint: str
    #: 2 for the Euclidean norm of the change; infinity for its largest entry.
    norm: float
    #: What moves: "the most sensitive token" or "all tokens".
    moving: str

    def at(self, radius: float) -> tuple[float, float]:
        """Return the share of inputs whose right answer provably survives all changes below ``radius``, and
        the share of inputs for which no attack of at most this size was found, NaN if none was searched.
        """
        proved = (self.table["radius"] >= radius) & (self.table["answer"] == self.table["label"])
        attacks = self.table["attack"].astype(float)
        upper = math.nan if attacks.isna().any() else float((attacks > radius).mean())
        return float(proved.mean()), upper

    def __repr__(self) -> str:
        norm = "l2" if self.norm == 2 else "l∞"
        moved = f"while {self._moving} ({norm} norm)"
        lines = [f"Certified accuracy of {self.model} on {len(self.table)} inputs, {moved}."]
        shown = {float(self.table["radius"].quantile(share)) for share in (0.25, 0.5, 0.75)}
        for radius in sorted({0.0, *shown}):
            proved, upper = self.at(radius)
            near = limit_in_digits(radius, 4, upper=False)
            beside = "" if math.isnan(upper) else f", {upper:6.1%} without an attack found"
            lines.append(f"  radius {near:<8} {proved:6.1%} proved{beside}")
        return "\n".join(lines)

    @property
    def _moving(self) -> str:
        return f"{self.moving} {'move' if self.moving == 'all tokens' else 'moves'}"

    @property
    def citation(self) -> str:
        """One line to cite, with the accuracy and the median radius."""
        right, median = self.at(0.0)[0], float(self.table["radius"].median())
        norm = "Euclidean norm" if self.norm == 2 else "largest entry"
        shared = limit_in_digits(median, 4, upper=False)
        return (
            f"{self.model} is right on {right:.1%} of {len(self.table)} inputs. While {self._moving}, "
            f"half of the answers provably stay right up to {shared} in the {norm} of the embedded tokens, "
            f"rounding included; {made_by('torch', 'transformers')}, digest {self.digest}."
        )

    @styled
    def plot(self) -> Figure:
        """Draw the share of right answers against the radius: proved, and not broken by an attack."""
        radii = sorted({0.0, *self.table["radius"], *self.table["attack"].dropna()} - {math.inf})
        shares = zip(*(self.at(radius) for radius in radii), strict=True)
        looks = zip(_LABELLED, ("#3b528b", "#e07b00"), (SOLID, DASHED), strict=True)
        curves = [
            Curve(radii, list(share), label, colour, dashes=dashes)
            for share, (label, colour, dashes) in zip(shares, looks, strict=True)
            if not math.isnan(share[0])
        ]
        panel = Panel(curves, titled(self.model, 3.8), "radius", "share of inputs", ("linear", "linear"))
        figure, _ = draw([[panel]], (4.6, 3.0))
        add_legend(figure, 2)
        return figure


@with_fastest_threads
def certified_accuracy(
    model: Model,
    inputs: Sequence[Inputs | Mapping[str, Tensor]],
    labels: Sequence[int],
    *,
    jointly: bool = False,
    norm: float = 2,
    order: int = 2,
    attack: bool = True,
    seed: int = 0,
    tokenizer: Any = None,
    file: str | os.PathLike[str] | None = None,
    on_input: Callable[[int, int], None] | None = None,
) -> CertifiedAccuracy:
    """Prove on how many inputs of a data set a classifier stays right, and how far their tokens may move.

    For each input that the classifier answers rightly, the token at which the gradient of the margin is
    largest moves, or all tokens if ``jointly`` is True. The model is prepared once for all inputs.

    Parameters
    ----------
    model
        As for :func:`howsmooth.word_radii`.
    inputs
        Texts, token ids (n,) or (1, n), embedded tokens (n, d), or dicts of the model's inputs for one
        sequence or image each.
    labels
        The right class of each input.
    jointly, norm, order, attack, seed, tokenizer
        As for :func:`howsmooth.word_radii`. Without ``attack``, no attack is searched.
    file
        A file to which each row is added as soon as it is computed. A later call with the same model, input
        and options reads what is there.
    on_input
        Called with the number of inputs that are done, and of all. By default a progress bar is shown.

    Raises
    ------
    ArgumentError, CertificateError
        As for :func:`howsmooth.word_radii`.

    """
    if not len(inputs) or len(inputs) != len(labels):
        got = f"{len(labels)} labels for {len(inputs)} inputs"
        raise ArgumentError("labels", expected="one class for each of at least one input", got=got)
    if norm not in (2, math.inf):  # wrong answers would hide it
        raise ArgumentError("norm", expected="2 or math.inf", got=repr(norm))
    if order not in (2, 3):
        raise ArgumentError("order", expected="2 or 3", got=repr(order))
    loaded = model_input.loaded_if_named(model, head=True)
    prepared = Prepared(module_of(loaded))
    path, rows = None if file is None else Path(file), list[dict[str, Any]]()
    with model_input.shown_progress(on_input, len(inputs), "input") as told:
        for number, (given, label) in enumerate(zip(inputs, labels, strict=True)):
            told(number, len(inputs))
            read: Any = given
            if not isinstance(given, Mapping):
                found = model_input.given_inputs(
                    loaded, given, None, tokenizer, special=True, longest=RADIUS_TOKENS
                )
                ids = isinstance(found.inputs, Tensor) and not found.inputs.is_floating_point()
                read = {"input_ids": found.inputs} if ids else found.inputs
            at = NetworkAtInput(prepared, read)
            options = [int(label), jointly, norm, order, attack, seed]
            named = {"norm": norm, "order": order, "attack": attack, "seed": seed}
            compute = partial(_row, at, int(label), jointly, **named)
            rows.append({"input": number} | row_of(path, [at.digest(), options], compute))
        told(len(inputs), len(inputs))
    origin = model_input.GivenInputs(loaded, None, None, "").origin()
    table = PrintedTable(rows).astype({"token": "Int64"})
    return CertifiedAccuracy(
        table=table,
        model=origin["model"],
        fingerprint=origin["fingerprint"],
        norm=norm,
        moving="all tokens" if jointly else "the most sensitive token",
    )


def _row(at: NetworkAtInput, label: int, jointly: bool, **options: Any) -> dict[str, Any]:
    if len(at.logits) < 2:
        raise ArgumentError("model", expected="a classifier of two or more classes", got="one logit")
    answer = int(at.logits.argmax())
    if not 0 <= label < len(at.logits):
        raise ArgumentError("labels", expected=f"classes from 0 to {len(at.logits) - 1}", got=repr(label))
    row: dict[str, Any] = {"label": label, "answer": answer, "token": None, "radius": 0.0, "attack": 0.0}
    row |= {"order": None, "margin": 0.0, "seconds": 0.0}
    if answer != label:
        return row
    token = None if jointly else at.most_sensitive()
    found = at.radius(token, **options)
    names = ("radius", "attack", "order", "margin", "seconds")
    return row | {"token": token} | {name: getattr(found, name) for name in names}
