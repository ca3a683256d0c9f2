"""The script that attacks all bounds: it finds nothing above a bound, and reports a bound that is wrong."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import howsmooth as hs
from tests._shared import script

attack = script("scripts/attack_bounds.py")


def attacked(monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], steps: int = 5, exact: int = 2) -> int:
    words = f"attack_bounds.py --cases 20 --steps {steps} --exact {exact}".split()
    words += ["--kinds", *kinds] if kinds else []
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        attack.main()
    return int(ended.value.code or 0)


def test_no_bound_is_exceeded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert attacked(monkeypatch, ("softmax of a vector",)) == 0
    out = capsys.readouterr().out
    assert "20 ascents, " in out
    assert " cases with 40 digits, 0 exceeded" in out


def test_a_wrong_bound_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right: Any = hs.bounds.softmax_upper_bound
    monkeypatch.setattr(hs.bounds, "softmax_upper_bound", lambda scale: right(0.1 * scale))
    assert attacked(monkeypatch, ("softmax of a vector",)) == 1
    assert "EXCEEDED, softmax of a vector: softmax_upper_bound is" in capsys.readouterr().out


@pytest.mark.slow
def test_every_kind_of_attention_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attacked(monkeypatch, (), steps=2, exact=0) == 0
    out = capsys.readouterr().out
    assert f"{20 * len(attack.KINDS)} ascents, " in out
