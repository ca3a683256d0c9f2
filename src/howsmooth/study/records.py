"""Define the rows of the store: one class for each table, whose fields are the columns of the table.

Each class names the key by which its rows differ. The store creates its tables from the annotations.
:class:`Contents` holds all tables of measurements as data frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

import pandas as pd

from howsmooth.scopes import CROSS_SCOPE

__all__ = [
    "CORRECTED", "FIGURE", "KEY_COLUMNS", "KINDS",
    "MEASURE", "PLACE", "PUBLISHED",
    "Bounding", "Contents", "Failure", "FigureRow",
    "InputRecord", "Measurement", "ModelRecord", "PublishedKey", "PublishedValue", "Row", "Run",
    "SequenceRecord", "SiteBound", "StudyRecord", "TextRecord",
    "plain_rows", "quantities",
]  # fmt: skip

KEY_COLUMNS = ("scope", "layer", "head", "n", "sample")
"""The columns that identify a measurement of one model on one text."""

PublishedKey = tuple[int, int, int, str, str]
"""The key (layer, n, sample, quantity, items) of a published value of one model on one text."""

MEASURE, FIGURE = "measure", "figure"
"""The values of :attr:`StudyRecord.kind`. Bounds and published values belong to ``measure``."""

PLACE = ("model", "text", *KEY_COLUMNS)
"""The columns that identify a measurement in a store."""


KINDS: list[type[Row]] = []
"""All classes of rows; the store has one table for each."""


class Row:
    """The base class of all rows of a store."""

    table: ClassVar[str]  #: The name of the table.
    key: ClassVar[tuple[str, ...]]  #: The columns that identify a row.
    #: What to do with a row whose key is already in the table: ``"refuse"`` it with an error, because that
    #: would be a bug; let the first row ``"stay"``; or ``"replace"`` the first row.
    again: ClassVar[str]

    def __init_subclass__(cls, *, table: str, key: tuple[str, ...], again: str = "refuse") -> None:
        """Set the class variables, and add the class to :data:`KINDS`."""
        super().__init_subclass__()
        cls.table, cls.key, cls.again = table, key, again
        KINDS.append(cls)

    @property
    def unsettled(self) -> bool:
        """True if a measured number in this row did not converge to the requested precision."""
        return not getattr(self, "converged", True)

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Return the names of the table's columns, which are the fields of the class."""
        return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]

    @classmethod
    @cache
    def types(cls) -> dict[str, tuple[type, bool]]:
        """Return the type of each column's values, and whether a value may be missing (None)."""
        hints = get_type_hints(cls)
        found = {}
        for name in cls.columns():
            parts = get_args(hints[name]) if NoneType in get_args(hints[name]) else (hints[name],)
            plain = next(part for part in parts if part is not NoneType)
            found[name] = (getattr(plain, "__origin__", plain), NoneType in parts)
        return found


@dataclass(frozen=True)
class StudyRecord(Row, table="studies", key=("kind",)):
    """The settings shared by all rows of one kind of work in a store, such as measurements.

    ``kind`` is ``measure`` or ``figure``; ``identity`` holds the settings as JSON.
    """

    kind: str
    created: str
    identity: str


@dataclass(frozen=True)
class Run(Row, table="runs", key=("id",), again="replace"):
    """One run: a process that computed rows of the store."""

    id: int
    started: str
    finished: str | None  #: None if the run did not reach its end.
    command: str
    device: str
    environment: str


@dataclass(frozen=True)
class ModelRecord(Row, table="models", key=("label",), again="stay"):
    """A model that was measured."""

    label: str
    name: str
    random_init: bool
    as_decoder: bool
    source: str
    layers: int
    heads: int
    max_length: int | None
    stored: str  #: The dtype of the weights in the model's file, beside that of a measurement.


@dataclass(frozen=True)
class TextRecord(Row, table="texts", key=("name",), again="stay"):
    """A text, or another input, on which models were measured."""

    name: str
    digest: str
    source: str
    characters: int  #: The number of characters of a text, or of tokens or images of other inputs.
    kind: str = "text"  #: One of :data:`howsmooth.study.plans.KINDS`.


@dataclass(frozen=True)
class InputRecord(Row, table="inputs", key=("model", "text"), again="stay"):
    """A model and an input on which it was measured."""

    model: str
    text: str
    #: SHA-256 of the configuration, the weights and the tokenizer of the model, so that an encoder has
    #: another one than the same as decoder.
    fingerprint: str
    tokenizer_source: str
    tokens: int  #: The number of tokens of the input.


@dataclass(frozen=True)
class Measurement(Row, table="measurements", key=PLACE):
    """A measured local Lipschitz constant of one layer or head, at one sequence.

    The fields up to ``seed`` are columns of ``measurements.csv``, which also has ``computed``, here
    ``dtype``, and ``stored``, the dtype of the model's weights. ``start`` is the index of the sequence's
    first token in the tokenised text. ``seconds`` is the share of the sequence in the time of its batch, by
    tokens.

    ``input_energy[i]`` is the share of token i in the leading singular vectors of the Jacobian: |v_i|², where
    v is the unit direction of the tokens that changes the output most; ``output_energy[i]`` is |u_i|², where
    u is the direction of that change. Each sums to one, but the output energies are all zero if the constant
    is zero. They are kept for sample 0 and up to 512 tokens, and ``None`` elsewhere.
    """

    model: str
    layer: int
    head: int | None
    scope: str
    causal: bool
    text: str
    sample: int
    n: int
    radius_mean: float
    radius_max: float
    lipschitz: float
    lower: float
    upper: float
    confidence: float
    converged: bool
    iterations: int
    seconds: float
    seed: int
    dtype: str
    method: str
    masking: str
    site: str
    start: int
    input_energy: tuple[float, ...] | None = None
    output_energy: tuple[float, ...] | None = None


@dataclass(frozen=True)
class SequenceRecord(Row, table="sequences", key=("model", "text", "n", "sample"), again="stay"):
    """The tokens of a measured sequence, as pieces of its text. Joined, the pieces give the text.

    If the tokenizer does not report character positions, and for special tokens, a piece is the decoded form
    of its token.
    """

    model: str
    text: str
    n: int
    sample: int
    start: int  #: The index of the first token in the tokenised text.
    place: int | None  #: The index of its first character in the text, if it is known.
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class SiteBound:
    """One bound on an attention layer or head at one sequence of tokens, or the reason why it does not apply.

    ``quantity`` is the bounded quantity: ``‖D_X f‖`` is the constant at this sequence; other quantities are
    suprema over all inputs in a ball. An upper bound on the supremum also bounds the measurement; a lower
    bound does not. If ``holds`` is false, ``value`` and ``log_value`` are ``None``, and ``source`` gives the
    reason. A value that overflows is infinite, with a finite logarithm.
    """

    name: str
    side: str
    quantity: str
    value: float | None
    log_value: float | None
    holds: bool
    source: str


@dataclass(frozen=True)
class Bounding(Row, SiteBound, table="bounds", key=(*PLACE, "name", "side"), again="replace"):
    """A row of the store: one bound on an attention layer or head at one sequence of a study."""

    model: str
    text: str
    scope: str
    layer: int
    head: int | None
    n: int
    sample: int
    start: int
    radius: float  #: The radius of the ball of tokens on which global bounds hold.


@dataclass(frozen=True)
class PublishedValue(
    Row, table="published", key=("model", "text", "layer", "n", "sample", "quantity", "items")
):
    """A constant as the paper's published code computes it, or with some or all of its mistakes corrected.

    The paper's published code differs from the definition of the constant in some items; the correct constant
    is measured without them. ``quantity`` is ``corrected`` (no item), ``only`` followed by one item, or ``as
    published`` (all items); ``items`` lists the items that were used. ``lower`` and ``upper`` are ``None`` if
    the published power iteration computed the value, since it gives no interval.
    """

    model: str
    text: str
    layer: int
    n: int
    sample: int
    quantity: str
    items: str
    lipschitz: float
    lower: float | None
    upper: float | None
    settled: bool
    steps: int
    radius_mean: float
    start: int
    seed: int
    map: str

    @property
    def unsettled(self) -> bool:
        """True if this value's interval is wider than requested; False for a value without an interval."""
        return not self.settled and self.lower is not None


CORRECTED, PUBLISHED = "corrected", "as published"


def quantities(items: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the variants of a constant to measure. A variant includes some deviations of the published code
    from the definition: none (the corrected constant), a single one of ``items``, or all.
    """
    single = {f"only {item}": (item,) for item in items} if len(items) > 1 else {}
    return {CORRECTED: (), **single, PUBLISHED: tuple(items)}


@dataclass(frozen=True)
class Failure(Row, table="failures", key=("what", *PLACE), again="replace"):
    """A failed computation. It is deleted when a later run computes the missing rows.

    A field that is ``None`` stands for all values: without a text, the model could not be used at all.
    ``kind`` is the class of the error, ``error`` its message, ``detail`` its traceback, ``happened`` its
    time. ``what`` is the table whose rows are missing.
    """

    model: str
    text: str | None
    scope: str | None
    layer: int | None
    head: int | None
    n: int | None
    sample: int | None
    kind: str
    error: str
    detail: str
    what: str
    happened: str


@dataclass(frozen=True)
class FigureRow(Row, table="figure_rows", key=("unit", "number")):
    """One row of numbers in a figure of the paper.

    ``unit`` is a JSON object with all values on which the numbers depend, such as the fingerprint of a model.
    A unit is computed by one task, and has one or more rows, which are counted by ``number``. ``numbers`` is
    a JSON object with the computed values by name. ``model`` and ``text`` are empty if a unit has none.
    """

    model: str
    text: str
    unit: str
    number: int
    numbers: str


@dataclass(frozen=True)
class Contents:
    """The tables of a store of measurements, with a column for each field. Measurements, bounds, published
    values and failures also have the number of their run.
    """

    measurements: pd.DataFrame
    models: pd.DataFrame
    texts: pd.DataFrame
    inputs: pd.DataFrame
    runs: pd.DataFrame
    failures: pd.DataFrame
    study: dict[str, Any]  #: The settings of the study and when it was created; empty without measurements.
    sensitivities: pd.DataFrame  #: The measurements with energies, and the columns of their sequences.
    bounds: pd.DataFrame
    published: pd.DataFrame

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each input, such as text or images, by the input's name."""
        return dict(self.texts[["name", "kind"]].itertuples(index=False, name=None))

    def with_choices(self, table: pd.DataFrame) -> pd.DataFrame:
        """Add the columns ``output`` and ``side`` to a table of constants, unless the study has the default
        settings. They are empty in scopes that have no such setting.
        """
        of_scope = {"output": ("model",), "side": ("model", CROSS_SCOPE)}
        return table.assign(
            **{
                name: [self.study[name] if scope in scopes else "" for scope in table["scope"]]
                for name, scopes in of_scope.items()
                if name in self.study
            }
        )


def plain_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as dictionaries of plain Python values, with None for missing values."""
    return [
        {
            str(name): value if isinstance(value, list) or not pd.isna(value) else None
            for name, value in row.items()
        }
        for row in table.astype(object).to_dict("records")
    ]
