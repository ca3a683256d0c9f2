"""Types of transformers against dense Jacobians of their own forward: called, wrapped, packed, padded."""

from __future__ import annotations

import itertools

import pytest

from tests._judge import Verdict
from tests._judged_types import (
    CACHES,
    CALLED,
    CALLED_WAYS,
    PACKED_TYPES,
    PADDED_TYPES,
    TYPES,
    judge_packed,
    judge_padded,
    judge_type,
    type_case,
)
from tests._selection import others_slow

_LEAKS = {
    "as it is called": "measured, or refused: differ",
    "use_cache=True": "measured, or refused: differ",
}


def _agree(found: list[Verdict], expected: str | None = None) -> None:
    assert found
    wanted = [expected or type_case(one.case).expects(one.scope) for one in found]
    pairs = zip(found, wanted, strict=True)
    faults = [f"{one} (expected: {want})" for one, want in pairs if not one.meets(want)]
    assert not faults, "\n".join(faults)


CHOSEN = (
    "llama", "bert", "bert, decoder", "gpt2, by layer", "gpt_oss", "mistral", "qwen2", "qwen3", "olmo2",
    "diffllama", "vit",
)  # fmt: skip


@pytest.mark.parametrize("name", others_slow(TYPES, CHOSEN))
def test_a_type(name: str) -> None:
    _agree(judge_type(name, scopes=("attention", "block")))


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_a_whole_model(name: str) -> None:
    _agree(judge_type(name, scopes=("model",)))


@pytest.mark.slow
@pytest.mark.parametrize("way", CALLED_WAYS)
@pytest.mark.parametrize("name", CALLED)
def test_wrapped(name: str, way: str) -> None:
    _agree(judge_type(name, way))


# Both ways that are not here by default are those of tests/models/test_as_called.py.
@pytest.mark.parametrize("how", others_slow(CACHES, ["as it is called", "use_cache=False"]))
@pytest.mark.parametrize("name", others_slow(PACKED_TYPES, ["llama"]))
def test_packed_documents_leak_where_the_model_leaks(name: str, how: str) -> None:
    _agree(judge_packed(name, how), _LEAKS.get(how, "measured"))


@pytest.mark.parametrize(
    ("name", "side"),
    others_slow(itertools.product(PADDED_TYPES, ["right", "left"]), [("gpt2", "left"), ("mistral", "right")]),
)
def test_padded(name: str, side: str) -> None:
    _agree(judge_padded(name, side), "closed form")
