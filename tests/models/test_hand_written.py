"""Transformers as people write them, called as people call them: every captured map against the module's own
forward, by dense Jacobians.

A wrong number is the one thing that must not be. What is measured, and with which word the rest is refused,
is in the cases.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import howsmooth as hs
from tests._hand_written import CASES, Spot, spread
from tests._judge import HEAD, Verdict, judge, own_of, truths, verdict, ways_of

PAIRS = [(name, way) for name in CASES for way in ways_of(name)]
#: Attention alone, which takes a fraction of a second.
FAST = [(name, "plain") for name in CASES] + [
    (name, "forward") for name in ("nanogpt flash", "llama2.c", "timm vit", "post-norm", "latent")
]


def _faults(name: str, found: list[Verdict]) -> str:
    """What is wrong, or other than the case expects."""
    expected = {
        one: "the same" if one.scope == "afterwards" else CASES[name].expects(one.scope) for one in found
    }
    return "\n".join(f"{one} (expected: {want})" for one, want in expected.items() if not one.meets(want))


@pytest.mark.parametrize(("name", "way"), FAST)
def test_attention(name: str, way: str) -> None:
    assert not (faults := _faults(name, judge(name, way, ("attention",)))), faults


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_every_scope(name: str, way: str) -> None:
    assert not (faults := _faults(name, judge(name, way))), faults


# ---- the judge itself


def test_the_judge_sees_a_wrong_value_a_wrong_place_and_a_wrong_constant() -> None:
    name = "nanogpt flash"
    case, own = CASES[name], own_of(name)
    (site,) = hs.capture(spread(case.make()), case.inputs(), layers=[1])
    given = truths(own, case, "attention")
    assert verdict(site, given, 1e-9)[0] == "closed form"
    assert "off by" in verdict(site, truths(own, case, "residual"), 1e-9)[1]
    elsewhere = truths(own, dataclasses.replace(case, tokens=(Spot("transformer.h.1"),)), "attention")
    assert "are not those of" in verdict(site, elsewhere, 1e-9)[1]
    other = tuple(dataclasses.replace(truth, norm=1.01 * truth.norm) for truth in given)
    assert "the dense Jacobian has" in verdict(site, other, 1e-9)[1]


def test_the_models_own_numbers_are_those_of_its_modules_called_by_hand() -> None:
    name = "nanogpt flash"
    case, own = CASES[name], own_of(name)
    block = own.model.transformer.h[1]
    x = own.at(case.tokens[0])
    values = {
        scope: truths(own, case, scope)[0].values["its tokens"] for scope in ("head", "heads", "attention")
    }
    torch.testing.assert_close(values["attention"], block.attn(x))
    torch.testing.assert_close(block.attn.c_proj(values["heads"]), block.attn(x))
    torch.testing.assert_close(values["head"], values["heads"].chunk(2, -1)[HEAD])
    h = own.at(case.block[0].enter)
    whole = truths(own, case, "block")[0].values["its tokens"]
    torch.testing.assert_close(whole, h + block.attn(block.ln_1(h)))
