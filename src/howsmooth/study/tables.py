"""The tables of the stores, version by version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ATTACKS", "FLOWS", "MEASUREMENTS", "SCHEMA_VERSION", "Schema"]

SCHEMA_VERSION = 4


@dataclass(frozen=True, eq=False)
class Schema:
    """The tables of one kind of store.

    ``file`` is its name in a folder, ``holds`` what is in it; ``application_id`` stands in the file and says
    whose it is. ``migrations`` leads from each earlier version to the next, ``earlier`` has the statements of
    those versions that are checked before. The rows of the tables ``sealed`` carry a digest of their values.
    """

    file: str
    holds: str
    application_id: int
    version: int
    statements: tuple[str, ...]
    migrations: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    earlier: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    sealed: tuple[str, ...] = ()


# What is NULL of a failure says how far it reaches: without a text, all of the model failed.
_FAILURES = """CREATE TABLE failures (
        id INTEGER PRIMARY KEY, model TEXT NOT NULL, text TEXT, scope TEXT, layer INTEGER, head INTEGER,
        n INTEGER, sample INTEGER, happened TEXT NOT NULL, kind TEXT NOT NULL, error TEXT NOT NULL,
        detail TEXT NOT NULL, resolved TEXT, run INTEGER NOT NULL REFERENCES runs (id), seal TEXT)"""

_SEALED_BEFORE_FAILURES = ("studies", "models", "texts", "inputs", "runs", "measurements")
_SEALED = (*_SEALED_BEFORE_FAILURES, "failures", "sequences", "sensitivities", "bounds", "published")

_FROM_1_TO_2 = (
    *(f"ALTER TABLE {table} ADD COLUMN seal TEXT" for table in _SEALED_BEFORE_FAILURES),
    "ALTER TABLE runs ADD COLUMN token TEXT",
    "ALTER TABLE runs ADD COLUMN worked REAL",
    # The same in every copy of the store, so that copies can be merged.
    "UPDATE runs SET token = (SELECT created FROM studies) || ' ' || started || ' ' || id",
    _FAILURES,
)

# Version 2: failures are kept, runs say how long they worked, and rows carry a seal.
_VERSION_2 = (
    """CREATE TABLE studies (
        id INTEGER PRIMARY KEY CHECK (id = 1), created TEXT NOT NULL, seed INTEGER NOT NULL,
        dtype TEXT NOT NULL, rtol REAL NOT NULL, confidence REAL NOT NULL,
        max_iterations INTEGER NOT NULL, method TEXT NOT NULL, windows TEXT NOT NULL,
        special_tokens TEXT NOT NULL, seal TEXT)""",
    """CREATE TABLE models (
        label TEXT PRIMARY KEY, name TEXT NOT NULL, random_init INTEGER NOT NULL, as_decoder INTEGER NOT NULL,
        source TEXT NOT NULL, layers INTEGER NOT NULL, heads INTEGER NOT NULL, max_length INTEGER,
        seal TEXT)""",
    """CREATE TABLE texts (
        name TEXT PRIMARY KEY, digest TEXT NOT NULL, source TEXT NOT NULL, characters INTEGER NOT NULL,
        seal TEXT)""",
    """CREATE TABLE inputs (
        model TEXT NOT NULL REFERENCES models (label), text TEXT NOT NULL REFERENCES texts (name),
        fingerprint TEXT NOT NULL, tokenizer_source TEXT NOT NULL, tokens INTEGER NOT NULL, seal TEXT,
        PRIMARY KEY (model, text))""",
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY, started TEXT NOT NULL, finished TEXT, command TEXT NOT NULL,
        device TEXT NOT NULL, environment TEXT NOT NULL, token TEXT, worked REAL, seal TEXT)""",
    """CREATE TABLE measurements (
        model TEXT NOT NULL, layer INTEGER NOT NULL, head INTEGER, scope TEXT NOT NULL,
        causal INTEGER NOT NULL, text TEXT NOT NULL, sample INTEGER NOT NULL, n INTEGER NOT NULL,
        radius_mean REAL NOT NULL, radius_max REAL NOT NULL, lipschitz REAL NOT NULL, lower REAL NOT NULL,
        upper REAL NOT NULL, confidence REAL NOT NULL, converged INTEGER NOT NULL,
        iterations INTEGER NOT NULL, seconds REAL NOT NULL, seed INTEGER NOT NULL, dtype TEXT NOT NULL,
        method TEXT NOT NULL, masking TEXT NOT NULL, site TEXT NOT NULL, start INTEGER NOT NULL,
        run INTEGER NOT NULL REFERENCES runs (id), seal TEXT,
        FOREIGN KEY (model, text) REFERENCES inputs (model, text))""",
    # A NULL head would make every row of a plain UNIQUE constraint different.
    """CREATE UNIQUE INDEX one_row_a_measurement ON measurements
        (model, text, scope, layer, ifnull(head, -1), n, sample)""",
    _FAILURES,
)

_PLACE = "model TEXT NOT NULL, text TEXT NOT NULL, scope TEXT NOT NULL, layer INTEGER NOT NULL, head INTEGER"
_WITH_INPUT = "FOREIGN KEY (model, text) REFERENCES inputs (model, text)"
_BY_RUN = "run INTEGER NOT NULL REFERENCES runs (id), seal TEXT"

# Version 3: which tokens are sensitive, what bounds say, and the published quantity beside the corrected one.
_FROM_2_TO_3 = (
    "ALTER TABLE failures ADD COLUMN what TEXT NOT NULL DEFAULT 'measurement'",
    f"""CREATE TABLE sequences (
        model TEXT NOT NULL, text TEXT NOT NULL, n INTEGER NOT NULL, sample INTEGER NOT NULL,
        start INTEGER NOT NULL, place INTEGER, tokens TEXT NOT NULL, seal TEXT,
        PRIMARY KEY (model, text, n, sample), {_WITH_INPUT})""",
    f"""CREATE TABLE sensitivities (
        {_PLACE}, n INTEGER NOT NULL, sample INTEGER NOT NULL, input_energy TEXT NOT NULL,
        output_energy TEXT NOT NULL, {_BY_RUN},
        FOREIGN KEY (model, text, n, sample) REFERENCES sequences (model, text, n, sample))""",
    """CREATE UNIQUE INDEX one_row_a_sensitivity ON sensitivities
        (model, text, scope, layer, ifnull(head, -1), n, sample)""",
    f"""CREATE TABLE bounds (
        {_PLACE}, n INTEGER NOT NULL, sample INTEGER NOT NULL, start INTEGER NOT NULL, radius REAL NOT NULL,
        name TEXT NOT NULL, side TEXT NOT NULL, quantity TEXT NOT NULL, value REAL, log_value REAL,
        holds INTEGER NOT NULL, source TEXT NOT NULL, {_BY_RUN}, {_WITH_INPUT})""",
    """CREATE UNIQUE INDEX one_row_a_bound ON bounds
        (model, text, scope, layer, ifnull(head, -1), n, sample, name, side)""",
    f"""CREATE TABLE published (
        model TEXT NOT NULL, text TEXT NOT NULL, layer INTEGER NOT NULL, n INTEGER NOT NULL,
        sample INTEGER NOT NULL, quantity TEXT NOT NULL, items TEXT NOT NULL, lipschitz REAL NOT NULL,
        lower REAL, upper REAL, settled INTEGER NOT NULL, steps INTEGER NOT NULL, radius_mean REAL NOT NULL,
        start INTEGER NOT NULL, seed INTEGER NOT NULL, map TEXT NOT NULL, {_BY_RUN}, {_WITH_INPUT})""",
    """CREATE UNIQUE INDEX one_row_a_published_value ON published
        (model, text, layer, n, sample, quantity, items)""",
)

# Version 4: what is measured on need not be a text.
_FROM_3_TO_4 = ("ALTER TABLE texts ADD COLUMN kind TEXT NOT NULL DEFAULT 'text'",)


_ATTACK_TABLES = (
    """CREATE TABLE studies (
        id INTEGER PRIMARY KEY CHECK (id = 1), created TEXT NOT NULL, identity TEXT NOT NULL)""",
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY, started TEXT NOT NULL, finished TEXT, command TEXT NOT NULL,
        environment TEXT NOT NULL)""",
    """CREATE TABLE heads (
        layer INTEGER NOT NULL, head INTEGER, radius REAL NOT NULL, gamma_min REAL, gamma_max REAL,
        gamma REAL, a_norm REAL, v_norm REAL)""",
    "CREATE UNIQUE INDEX one_row_a_head ON heads (layer, ifnull(head, -1))",
    """CREATE TABLE attacks (
        layer INTEGER NOT NULL, head INTEGER, scope TEXT NOT NULL, masking TEXT NOT NULL, n INTEGER NOT NULL,
        radius REAL NOT NULL, radius_from TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, value REAL,
        log_value REAL NOT NULL, lower REAL, upper REAL, converged INTEGER NOT NULL, radius_max REAL,
        seconds REAL NOT NULL, evaluations INTEGER NOT NULL, seed INTEGER NOT NULL, file TEXT,
        run INTEGER NOT NULL REFERENCES runs (id))""",
    "CREATE UNIQUE INDEX one_row_an_attack ON attacks (layer, ifnull(head, -1), n, kind, name)",
)

# Numbers of a state are the bytes of float64, least significant first.
_FLOW_TABLES = (
    """CREATE TABLE studies (
        id INTEGER PRIMARY KEY CHECK (id = 1), created TEXT NOT NULL, identity TEXT NOT NULL, seal TEXT)""",
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY, started TEXT NOT NULL, command TEXT NOT NULL, environment TEXT NOT NULL,
        seal TEXT)""",
    """CREATE TABLE frames (
        place INTEGER PRIMARY KEY, time REAL NOT NULL, n INTEGER NOT NULL, d INTEGER NOT NULL,
        x BLOB NOT NULL, mean BLOB, covariance BLOB, evaluations INTEGER NOT NULL, seconds REAL NOT NULL,
        run INTEGER REFERENCES runs (id), seal TEXT)""",
    """CREATE TABLE endings (
        id INTEGER PRIMARY KEY CHECK (id = 1), status TEXT NOT NULL, what TEXT NOT NULL,
        reason TEXT NOT NULL, lower REAL NOT NULL, upper REAL NOT NULL, seal TEXT)""",
    """CREATE TABLE growths (
        time REAL PRIMARY KEY, value REAL NOT NULL, lower REAL NOT NULL, upper REAL NOT NULL,
        confidence REAL NOT NULL, converged INTEGER NOT NULL, product REAL NOT NULL,
        exponential REAL NOT NULL, discretisation_error REAL, method TEXT NOT NULL, step REAL NOT NULL,
        run INTEGER REFERENCES runs (id), seal TEXT)""",
)

# The numbers are "hsm1", "hsa1" and "hsf1".
MEASUREMENTS = Schema(
    "measurements.sqlite",
    "measurements",
    0x68736D31,
    SCHEMA_VERSION,
    (*_VERSION_2, *_FROM_2_TO_3, *_FROM_3_TO_4),
    migrations={1: _FROM_1_TO_2, 2: _FROM_2_TO_3, 3: _FROM_3_TO_4},
    earlier={2: _VERSION_2, 3: (*_VERSION_2, *_FROM_2_TO_3)},
    sealed=_SEALED,
)
ATTACKS = Schema("attacks.sqlite", "attacks", 0x68736131, 1, _ATTACK_TABLES)
FLOWS = Schema(
    "flow.sqlite",
    "flows",
    0x68736631,
    1,
    _FLOW_TABLES,
    sealed=("studies", "runs", "frames", "endings", "growths"),
)
