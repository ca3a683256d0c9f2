"""Every upper bound, and every layer with one, against ascents over tokens and weights.

``scripts/attack_bounds.py`` writes each attention again and takes the largest singular value of its dense
Jacobian. By default four cases of most kinds climb two steps; with ``-m slow`` a hundred of each climb far.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pytest

import howsmooth as hs
from tests._shared import script

attack = script("scripts/attack_bounds.py")

#: Largest shares of the truth in each bound that ascents of all kinds together must reach by default.
REACHED = {
    "ball_upper_bound": 0.3, "causal_ball_upper_bound": 0.3, "masked_ball_upper_bound": 0.3,
    "mean_field_upper_bound": 0.3, "any_scores_ball_upper_bound": 0.3, "folded_gram_upper_bound": 0.3,
    "certificate": 0.999, "theorem_3_7": 0.1, "token_wise_upper_bound": 0.3, "kv_error_upper_bound": 0.05,
    "pre_norm_upper_bound at X": 0.3, "norm_radius": 0.4, "softmax_upper_bound": 0.5,
    "l2_attention_upper_bound": 0.1, "scaled_cosine_upper_bound": 0.1, "sinkhorn": 0.1,
    "lipschitz_norm_upper_bound": 0.1,
}  # fmt: skip
#: What no ascent can exceed: lower bounds, and what is no bound or is attacked in tests/bounds/radius.
NOT_UPPER = {
    "table", "robust_radius", "proposition_3_4", "proposition_3_6", "proposition_3_6_rate",
    "quadratic_growth", "two_dirac",
}  # fmt: skip
#: Kinds whose switches other kinds have as well.
COVERED = {
    "one head, biases", "causal, biases", "grouped heads", "rotary", "norms, one head", "token-wise, heads",
    "added biases (ALiBi, T5), heads, causal", "mean field, biases", "causal mean field, biases",
}  # fmt: skip


def judged(kind: str, cases: int, steps: int, exact: int) -> Any:
    return attack.judged(kind, cases, argparse.Namespace(steps=steps, exact=exact, seed=0))


@pytest.fixture(scope="module")
def tallies() -> dict[str, Any]:
    """What was found for kinds of attention."""
    assert attack.KINDS.keys() >= COVERED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attack, "BATCH", 4)
        return {kind: judged(kind, 4, 2, 0) for kind in attack.KINDS if kind not in COVERED}


def test_no_bound_is_exceeded(tallies: dict[str, Any]) -> None:
    assert not [words for tally in tallies.values() for words in tally.exceeded]
    assert max(tally.apart for tally in tallies.values()) < 1e-9  # the library's maps are these


def test_the_ascents_come_near_and_leave_no_bound_out(tallies: dict[str, Any]) -> None:
    largest: dict[str, float] = {}
    for tally in tallies.values():
        for name, ratios in tally.ratios.items():
            largest[name] = max(largest.get(name, 0.0), *ratios)
    assert {name: largest[name] for name, least in REACHED.items() if largest[name] < least} == {}
    seen = {name.split(",")[0].removesuffix(" at X") for name in largest}
    public = {name for name in hs.bounds.__all__ if name[0].islower() and "lower" not in name}
    assert public - seen <= NOT_UPPER


def test_a_wrong_bound_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right: Any = hs.bounds.softmax_upper_bound
    monkeypatch.setattr(hs.bounds, "softmax_upper_bound", lambda scale: right(0.1 * scale))
    options = ["--cases", "20", "--steps", "5", "--exact", "2", "--kinds"]
    monkeypatch.setattr(sys, "argv", ["attack_bounds.py", *options, "softmax of a vector"])
    with pytest.raises(SystemExit) as ended:
        attack.main()
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "EXCEEDED, softmax of a vector: softmax_upper_bound is" in out
    assert "20 ascents, " in out


@pytest.mark.slow
@pytest.mark.parametrize("kind", attack.KINDS)
def test_long_ascents(kind: str) -> None:
    assert not judged(kind, 100, 50, 2).exceeded
