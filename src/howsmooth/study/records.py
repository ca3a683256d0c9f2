"""The rows of the store, and all of them as tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

__all__ = [
    "BOUND_COLUMNS", "COLUMNS", "PUBLISHED_COLUMNS", "SENSITIVITY_COLUMNS", "Bounding", "Contents", "Failure",
    "Key", "Measurement", "ModelRecord", "PublishedKey", "PublishedValue", "Sensitivity", "SequenceRecord",
    "SiteBound", "SiteBounds", "TextRecord",
]  # fmt: skip

Key = tuple[str, int, int | None, int, int]
"""Scope, layer, head, n and sample: one measurement of one model on one text."""

COLUMNS = (
    "model", "layer", "head", "scope", "causal", "text", "sample", "n", "radius_mean", "radius_max",
    "lipschitz", "lower", "upper", "confidence", "converged", "iterations", "seconds", "seed",
)  # fmt: skip
"""The columns of ``measurements.csv``, in their order."""


SENSITIVITY_COLUMNS = (
    "model", "text", "scope", "layer", "head", "n", "sample", "start", "place", "tokens", "input_energy",
    "output_energy", "converged", "run",
)  # fmt: skip
"""The columns of ``Contents.sensitivities``."""

BOUND_COLUMNS = (
    "model", "text", "scope", "layer", "head", "n", "sample", "start", "radius", "name", "side", "quantity",
    "value", "log_value", "holds", "source", "run",
)  # fmt: skip
"""The columns of ``Contents.bounds``."""

PUBLISHED_COLUMNS = (
    "model", "text", "layer", "n", "sample", "quantity", "items", "lipschitz", "lower", "upper", "settled",
    "steps", "radius_mean", "start", "seed", "map",
)  # fmt: skip
"""The columns of ``Contents.published`` and of ``published.csv``.

``quantity`` is ``corrected``, ``only`` and an item, or ``as published``; ``items`` are the items in effect.
``lower`` and ``upper`` are empty where the published iteration measured.
"""

PublishedKey = tuple[int, int, int, str, str]
"""Layer, n, sample, quantity and items: one published value of one model on one text."""


@dataclass(frozen=True)
class Measurement:
    """One row: the columns of the design, then what else identifies how it was made.

    ``start`` is the position of the sequence's first token in the tokenised text; ``seconds`` is an
    equal share of the time that the batch took; ``run`` is filled in by the store.
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
class ModelRecord:
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
class TextRecord:
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
class Failure:
    """What could not be measured, and why.

    What is ``None`` says how far it reaches: without a text, the model could not be used at all. ``kind`` is
    the class of the error, ``error`` its sentence, ``detail`` where in the program it was raised. ``what`` is
    ``measurement``, ``bounds`` or ``published``.
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
    what: str = "measurement"


@dataclass(frozen=True)
class SequenceRecord:
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
class Sensitivity:
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
class Bounding(SiteBound):
    """A bound with the attention and the sequence it is on, and the ``radius`` of the ball."""

    model: str
    text: str
    scope: str
    layer: int
    head: int | None
    n: int
    sample: int
    start: int
    radius: float


@dataclass(frozen=True)
class SiteBounds:
    """The bounds on one attention at one sequence, and the radius of the ball that global ones speak of."""

    radius: float
    bounds: tuple[SiteBound, ...]


@dataclass(frozen=True)
class PublishedValue:
    """What was measured of one quantity at one sequence; see ``PUBLISHED_COLUMNS``.

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


@dataclass(frozen=True)
class Contents:
    """All that a store holds, as tables.

    Attributes
    ----------
    measurements
        With all columns of :class:`Measurement` and the number of its run.
    models, texts, inputs, runs, failures
        As the methods of the same names of :class:`~howsmooth.study.store.Store`.
    study
        The identity and the time of creation; empty if nothing was ever measured.
    sensitivities
        One row a sequence, scope, layer and head, for sample 0 up to 512 tokens, with
        ``SENSITIVITY_COLUMNS``: ``tokens`` a list of words, ``input_energy`` and ``output_energy`` lists
        of numbers of the same length; ``place`` is missing if the tokenizer cannot tell.
    bounds
        One row a bound, see ``study.records.SiteBound``, with ``BOUND_COLUMNS``; what is missing is NaN.
    published
        One row a quantity and sequence, with ``PUBLISHED_COLUMNS`` and the number of its run.

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
