"""The rows of the store: one class a table, whose fields are its columns; and all of them as tables.

A class says under which key its rows are told apart. From its annotations the store makes the table, so that
a column is written once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, ClassVar

import pandas as pd

__all__ = [
    "ATTACK", "ATTACK_KINDS", "ATTACK_PLACE", "KEY_COLUMNS", "KINDS", "PLACE", "Attack", "Bounding",
    "Contents", "Ending", "Failure", "FrameRow", "GrowthRow", "HeadStrength", "InputRecord", "Key",
    "Measurement", "ModelRecord", "PublishedKey", "PublishedValue", "Row", "Run", "Sensitivity",
    "SequenceRecord", "SiteBound", "SiteBounds", "StudyRecord", "TextRecord", "keys_of", "plain_rows",
]  # fmt: skip

Key = tuple[str, int, int | None, int, int]
"""Scope, layer, head, n and sample: one measurement of one model on one text."""

KEY_COLUMNS = ("scope", "layer", "head", "n", "sample")
"""The columns of a :data:`Key`."""


def keys_of(
    scope: str, layers: Iterable[int], heads: Iterable[int | None], lengths: Iterable[int], samples: int
) -> frozenset[Key]:
    """Return the keys of all measurements of some layers and heads at some lengths."""
    return frozenset(
        (scope, layer, head, n, sample)
        for layer, head, n, sample in product(layers, heads, lengths, range(samples))
    )


PublishedKey = tuple[int, int, int, str, str]
"""Layer, n, sample, quantity and items: one published value of one model on one text."""

ATTACK = "attack"
"""The kind of work, as the store has it, of attacks."""

ATTACK_PLACE = ("layer", "head", "n")
"""The columns that tell an attention at one length from others, in attacks."""

ATTACK_KINDS = {
    "tokens": "the tokens of the text or of the file",
    "construction": "tokens written down from the parameters",
    "ascent": "gradient ascent",
    "upper": "the smallest upper bound that holds",
}
"""What a row of an attack can be, and what that means."""

PLACE = ("model", "text", *KEY_COLUMNS)
"""The columns that tell one measurement from all others."""


class Row:
    """The base of all rows of a store.

    Parameters
    ----------
    table
        The name of the table.
    key
        The columns that tell its rows apart.
    again
        What becomes of a row whose key is there already: ``"refuse"`` it, since it would be our mistake, let
        the first one ``"stay"``, or ``"replace"`` it.

    """

    table: ClassVar[str]
    key: ClassVar[tuple[str, ...]]
    again: ClassVar[str]

    def __init_subclass__(cls, *, table: str, key: tuple[str, ...], again: str = "refuse") -> None:
        """Name the table of a kind of row."""
        super().__init_subclass__()
        cls.table, cls.key, cls.again = table, key, again

    @property
    def unsettled(self) -> bool:
        """Whether a number was measured less precisely than asked for."""
        return not getattr(self, "converged", True)

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Return the names of the columns."""
        return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]


@dataclass(frozen=True)
class StudyRecord(Row, table="studies", key=("kind",)):
    """What all rows of one kind of work must have in common to be comparable.

    ``kind`` is ``measure``, ``attack`` or ``flow``; ``identity`` is written in JSON.
    """

    kind: str
    created: str
    identity: str


@dataclass(frozen=True)
class Run(Row, table="runs", key=("id",), again="replace"):
    """A process that worked for the study.

    ``token`` tells it apart from the runs of other stores; ``worked`` are seconds until its last row, by a
    clock that does not jump; ``finished`` is missing if it did not try all that it was asked for.
    """

    id: int
    token: str
    started: str
    finished: str | None
    command: str
    device: str
    environment: str
    worked: float


@dataclass(frozen=True)
class ModelRecord(Row, table="models", key=("label",), again="stay"):
    """What the store keeps of a model."""

    label: str
    name: str
    random_init: bool
    as_decoder: bool
    source: str
    layers: int
    heads: int
    max_length: int | None


@dataclass(frozen=True)
class TextRecord(Row, table="texts", key=("name",), again="stay"):
    """What the store keeps of a text, or of what else was measured on.

    ``kind`` is of :data:`howsmooth.study.plan.KINDS`; ``characters`` counts letters, tokens, images or
    samples of sound.
    """

    name: str
    digest: str
    source: str
    characters: int
    kind: str = "text"


@dataclass(frozen=True)
class InputRecord(Row, table="inputs", key=("model", "text"), again="stay"):
    """A model that was given a text: its fingerprint, its tokenizer, and how many tokens that makes."""

    model: str
    text: str
    fingerprint: str
    tokenizer_source: str
    tokens: int


@dataclass(frozen=True)
class Measurement(Row, table="measurements", key=PLACE):
    """A measured constant: up to ``seed`` the columns of ``measurements.csv``, then how it was made.

    ``start`` is the position of the sequence's first token in the tokenised text; ``seconds`` is an
    equal share of the time that the batch took.
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


@dataclass(frozen=True)
class SequenceRecord(Row, table="sequences", key=("model", "text", "n", "sample"), again="stay"):
    """The words of a sequence: its tokens as pieces of the text, which together are the text.

    ``start`` is the first token's number in the tokenised text, ``place`` its first letter's in the text;
    ``None`` if the tokenizer cannot tell, and the pieces are what each token stands for by itself.
    """

    model: str
    text: str
    n: int
    sample: int
    start: int
    place: int | None
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Sensitivity(Row, table="sensitivities", key=PLACE):
    """Where the constant of a measurement comes from: each token's share of the leading directions.

    ``input_energy[i]`` is |v_i|² for the unit direction v of the tokens that moves the output most,
    ``output_energy[i]`` is |u_i|² for the direction u in which it moves. Each sums to one; the output's is
    zero where the constant is.
    """

    model: str
    text: str
    scope: str
    layer: int
    head: int | None
    n: int
    sample: int
    input_energy: tuple[float, ...]
    output_energy: tuple[float, ...]


@dataclass(frozen=True)
class SiteBound:
    """A bound on one attention at one sequence, or why there is none.

    ``quantity`` is what is bounded: with ``‖D_X f‖`` the constant at this sequence, else one over all inputs
    in a ball, with the radius beside it: an upper bound is one on the measurement too, a lower one is not.
    Where it does not ``hold``, ``value`` and ``log_value`` are ``None`` and ``source`` says why. A value that
    overflows is infinite, with a finite logarithm.
    """

    name: str
    side: str
    quantity: str
    value: float | None
    log_value: float | None
    holds: bool
    source: str


@dataclass(frozen=True)
class SiteBounds:
    """The bounds on one attention at one sequence, and the radius of the ball that global ones speak of."""

    radius: float
    bounds: tuple[SiteBound, ...]


@dataclass(frozen=True)
class Bounding(Row, SiteBound, table="bounds", key=(*PLACE, "name", "side")):
    """A bound with the attention and the sequence it is on, and the ``radius`` of the ball.

    ``seconds`` is the time of all bounds of this attention and sequence.
    """

    model: str
    text: str
    scope: str
    layer: int
    head: int | None
    n: int
    sample: int
    start: int
    radius: float
    seconds: float


@dataclass(frozen=True)
class PublishedValue(
    Row, table="published", key=("model", "text", "layer", "n", "sample", "quantity", "items")
):
    """What was measured of one quantity at one sequence: the columns of ``published.csv``.

    ``quantity`` is ``corrected``, ``only`` and an item, or ``as published``; ``items`` are those in effect.
    ``lower`` and ``upper`` are ``None`` where the published iteration measured, which has no interval.
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
        """Whether the interval of a corrected constant is wider than asked for."""
        return not self.settled and self.lower is not None


@dataclass(frozen=True)
class Failure(Row, table="failures", key=("what", *PLACE), again="replace"):
    """What could not be measured, and why; it is there until a row shows that it is over.

    What is ``None`` says how far it reaches: without a text, the model could not be used at all. ``kind`` is
    the class of the error, ``error`` its sentence, ``detail`` where in the program it was raised,
    ``happened`` when. ``what`` is the table whose rows are missing.
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
class Attack(Row, table="attacks", key=(*ATTACK_PLACE, "kind", "name")):
    """A constant that was reached at some tokens, or a bound that none can exceed.

    ``kind`` is of :data:`ATTACK_KINDS`. ``value`` is the measured constant, with its interval ``lower`` to
    ``upper``; for the kind ``upper`` the bound, missing where it overflows, with its logarithm. ``radius`` is
    that of the ball, ``radius_max`` the norm of the longest token. ``file`` is where the tokens are, relative
    to the folder.
    """

    layer: int
    head: int | None
    scope: str
    masking: str
    n: int
    radius: float
    radius_from: str
    kind: str
    name: str
    value: float | None
    log_value: float
    lower: float | None
    upper: float | None
    converged: bool
    radius_max: float | None
    seconds: float
    evaluations: int
    seed: int
    file: str | None


@dataclass(frozen=True)
class HeadStrength(Row, table="heads", key=("layer", "head"), again="stay"):
    """What the parameters of one head say by themselves; gammas are real eigenvalues of A, if it has some."""

    layer: int
    head: int | None
    radius: float
    gamma_min: float | None
    gamma_max: float | None
    gamma: float | None
    a_norm: float | None
    v_norm: float | None


@dataclass(frozen=True)
class FrameRow(Row, table="frames", key=("place",)):
    """The state of a flow at one time; its numbers are the bytes of float64, least significant first.

    ``x`` are the tokens (n, d), ``mean`` (d) and ``covariance`` (d, d) those of the Gaussian measure beside
    them, if it is followed; ``evaluations`` of the field since the frame before, and the ``seconds`` that
    they took.
    """

    place: int
    time: float
    n: int
    d: int
    x: bytes
    mean: bytes | None
    covariance: bytes | None
    evaluations: int
    seconds: float


@dataclass(frozen=True)
class Ending(Row, table="endings", key=("status",)):
    """Why a flow has no more frames.

    ``status`` is ``blew up`` if there is no finite state beyond ``lower`` to ``upper``, and ``stopped`` if
    the integrator gave up between these times; ``what`` did so, the tokens or the Gaussian measure.
    """

    status: str
    what: str
    reason: str
    lower: float
    upper: float


@dataclass(frozen=True)
class GrowthRow(Row, table="growths", key=("time",)):
    """How perturbations of the start of a flow have grown, as :class:`howsmooth.dynamics.Growth` has it."""

    time: float
    value: float
    lower: float
    upper: float
    confidence: float
    converged: bool
    product: float
    exponential: float
    discretisation_error: float | None
    method: str
    step: float


KINDS: tuple[type[Row], ...] = (
    StudyRecord, Run, ModelRecord, TextRecord, InputRecord, Measurement, SequenceRecord, Sensitivity,
    Bounding, PublishedValue, Failure, Attack, HeadStrength, FrameRow, Ending, GrowthRow,
)  # fmt: skip
"""The kinds of rows that a store keeps, each in a table of its own."""


@dataclass(frozen=True)
class Contents:
    """All that a store holds of measurements, as tables.

    Attributes
    ----------
    measurements
        With all columns of :class:`Measurement` and the number of its run.
    models, texts, inputs, runs, failures
        With the columns of :class:`ModelRecord`, :class:`TextRecord`, :class:`InputRecord`, :class:`Run` and
        :class:`Failure`.
    study
        The identity and the time of creation; empty if nothing was ever measured.
    sensitivities
        One row a sequence, scope, layer and head, for sample 0 up to 512 tokens, with the columns of
        :class:`Sensitivity` and :class:`SequenceRecord` and whether the measurement ``converged``.
    bounds, published
        With the columns of :class:`Bounding` but its ``seconds``, and of :class:`PublishedValue`, and the
        number of the run; what is missing is NaN.

    """

    measurements: pd.DataFrame
    models: pd.DataFrame
    texts: pd.DataFrame
    inputs: pd.DataFrame
    runs: pd.DataFrame
    failures: pd.DataFrame
    study: dict[str, Any]
    sensitivities: pd.DataFrame
    bounds: pd.DataFrame
    published: pd.DataFrame

    @property
    def kinds(self) -> dict[str, str]:
        """Of which of :data:`howsmooth.study.plan.KINDS` each text, or what else was measured on, is."""
        return dict(self.texts[["name", "kind"]].itertuples(index=False, name=None))


def plain_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """List the rows of a table as dictionaries of plain Python values, missing ones None."""
    return [
        {
            str(name): value if isinstance(value, list) or not pd.isna(value) else None
            for name, value in row.items()
        }
        for row in table.astype(object).to_dict("records")
    ]
