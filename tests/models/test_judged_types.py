"""Types of transformers against dense Jacobians of their own forward: called, wrapped, packed, padded."""

from __future__ import annotations

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


def _faults(found: list[Verdict], expected: str | None = None) -> str:
    assert found
    wanted = [expected or type_case(one.case).expects(one.scope) for one in found]
    pairs = zip(found, wanted, strict=True)
    return "\n".join(f"{one} (expected: {want})" for one, want in pairs if not one.meets(want))


@pytest.mark.parametrize("name", others_slow(list(TYPES), ["llama", "bert", "gpt_oss", "vit"]))
def test_a_type(name: str) -> None:
    faults = _faults(judge_type(name, scopes=("attention", "block")))
    assert not faults, faults


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_a_whole_model(name: str) -> None:
    faults = _faults(judge_type(name, scopes=("model",)))
    assert not faults, faults


@pytest.mark.slow
@pytest.mark.parametrize("way", CALLED_WAYS)
@pytest.mark.parametrize("name", CALLED)
def test_wrapped(name: str, way: str) -> None:
    faults = _faults(judge_type(name, way))
    assert not faults, faults


@pytest.mark.parametrize("how", CACHES)
@pytest.mark.parametrize("name", others_slow(PACKED_TYPES, ["llama"]))
def test_packed_documents_leak_where_the_model_leaks(name: str, how: str) -> None:
    faults = _faults(judge_packed(name, how), _LEAKS.get(how, "measured"))
    assert not faults, faults


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", others_slow(PADDED_TYPES, ["mistral"]))
def test_padded(name: str, side: str) -> None:
    faults = _faults(judge_padded(name, side), "closed form")
    assert not faults, faults
