"""Every architecture: capture finds its attention, the Jacobians are the model's own, and stay so.

The oracle is in ``architectures.oracle``; ``architectures/matrix.json`` is what was found, and the page
docs/architectures.md and its table are made of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import howsmooth as hs
from tests._shared import script
from tests.architectures import oracle
from tests.architectures.build import build, inputs_of, model_types
from tests.architectures.isolation import isolated, shard
from tests.architectures.measure import SCOPES, Row, measure
from tests.architectures.oracle import NotFoundError, Probe, agreement

SHARDS = 12
STORED: dict[str, dict[str, Any]] = {}
ROOT = Path(__file__).parents[2]
_STORE = json.loads((ROOT / "tests" / "architectures" / "matrix.json").read_text(encoding="utf-8"))
STORED |= {row["type"]: row for row in _STORE["rows"]}

#: Chosen for variety: norms, positions, masks, heads, modalities, and how attention is called.
#: Of bert, gemma2, gpt2, gpt_oss, llama and vit, other tests have capture and Jacobians.
SAMPLE = ("deberta-v2", "mamba", "modernbert", "swin", "t5", "whisper")


def _compared(row: Row, scopes: tuple[str, ...] = SCOPES) -> None:
    """No number is wrong, and what was captured before still is."""
    assert not row.wrong, "\n".join(row.wrong)
    if transformers.__version__ != _STORE["transformers"]:
        return  # another version may build other models of the same names
    before = STORED[row.type]
    assert row.status == before["status"], f"was {before['status']}: {row.reasons}"
    assert row.captured >= before["captured"], row.reasons
    assert row.closed_form >= before["closed_form"], row.path_reasons
    assert set(row.scopes) >= set(before["scopes"]) & set(scopes), row.reasons


def test_the_matrix_has_every_type() -> None:
    if transformers.__version__ == _STORE["transformers"]:
        assert set(STORED) == set(model_types())


@pytest.mark.parametrize("model_type", SAMPLE)
def test_the_sample(model_type: str) -> None:
    scopes = ("heads", "attention", "block")
    _compared(measure(model_type, scopes=scopes, most=4), scopes)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, SHARDS + 1))
def test_every_type(part: int) -> None:
    failed = []
    for model_type in shard(model_types(), f"{part}/{SHARDS}"):
        try:
            _compared(isolated(model_type))
        except AssertionError as error:
            failed.append(f"{model_type}: {error}")
    assert not failed, "\n".join(failed)


def test_the_committed_matrix_has_no_wrong_number_and_enough_architectures() -> None:
    measured = [row for row in STORED.values() if row["status"] == "measured"]
    assert not [row["type"] for row in STORED.values() if row["wrong"] or row["status"] == "wrong"]
    assert len(measured) >= 240
    assert sum(not row["autodiff"] for row in measured) >= 190
    limits = _STORE["limits"]
    assert max(row["differences"] for row in measured) <= limits["differences"] <= 1e-6
    assert max(row["autodiff_error"] for row in measured) <= limits["autodiff"] <= 1e-9
    assert all(row["reasons"] for row in STORED.values() if row["status"] not in ("measured", "no attention"))


def test_the_page_and_its_table_are_those_of_the_matrix() -> None:
    made, source = script("scripts/architecture_matrix.py"), ROOT / "tests" / "architectures" / "matrix.json"
    again = "run scripts/architecture_matrix.py with --json tests/architectures/matrix.json --page"
    assert (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8") == made.page(source), again
    table = (ROOT / "docs" / "_static" / "architectures.csv").read_text(encoding="utf-8")
    assert table == made.table(source), again


def _llama() -> tuple[Probe, hs.Site]:
    model = build("llama")
    inputs = inputs_of("llama", model)
    return Probe(model, inputs), hs.capture(model, inputs, [0])[0]


def test_the_oracle_sees_a_wrong_output_projection_and_a_wrong_place() -> None:
    probe, site = _llama()
    with torch.no_grad():
        probe.model.layers[0].self_attn.o_proj.weight[0, 0] += 0.1
    with pytest.raises(NotFoundError, match="values of the map"):
        agreement(probe, site)
    with pytest.raises(NotFoundError, match="tokens"):
        probe.injection("layers.1.self_attn", site.x, whole_layer=False)


def test_the_oracle_sees_a_wrong_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, site = _llama()
    right = agreement(probe, site)
    assert right.differences < 1e-6
    operator = oracle.operator
    monkeypatch.setattr(oracle, "operator", lambda site: _Off(operator(site)))
    off = agreement(probe, site)
    assert off.differences == pytest.approx(1e-3, rel=0.01)
    assert off.autodiff == pytest.approx(1e-3, rel=0.01)


class _Off:
    """An operator a thousandth too large."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def product(self, e: torch.Tensor) -> torch.Tensor:
        return self.inner.product(e) / 1.001

    def adjoint_product(self, u: torch.Tensor) -> torch.Tensor:
        return self.inner.adjoint_product(u) / 1.001


def test_shards_take_every_type_once() -> None:
    types = model_types()
    parts = [shard(types, f"{i}/{SHARDS}") for i in range(1, SHARDS + 1)]
    assert sorted(name for part in parts for name in part) == types
    with pytest.raises(ValueError, match="13/12"):
        shard(types, "13/12")
