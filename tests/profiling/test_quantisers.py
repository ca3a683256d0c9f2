"""Absmax quantisation against its definition, written out group by group."""

from __future__ import annotations

import pytest
import torch

from howsmooth.profiling.quantisers import QUANTISERS, absmax_steps, group_of, rounded


@pytest.mark.parametrize("quantiser", QUANTISERS)
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_steps_are_those_of_each_group(quantiser: str, bits: int) -> None:
    t = torch.randn(2, 5, 80, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t[1, 2, :32] = 0.0
    steps = absmax_steps(t, bits, quantiser)
    levels = {2: 1, 3: 3, 8: 127}[bits]
    for h in range(2):
        for i in range(5):
            for c in range(80):
                size = {"group-32": 32, "group-64": 64}.get(quantiser, 80)
                start = size * (c // size)
                group = t[h, :, c] if quantiser == "channel" else t[h, i, start : start + size]
                assert float(steps[h, i, c]) == pytest.approx(float(group.abs().max()) / levels)
    found = rounded(t, steps)
    assert bool(((found - t).abs() <= steps / 2 * (1 + 1e-12)).all())
    whole = (found / steps)[steps > 0]
    assert torch.allclose(whole, whole.round(), atol=1e-9)
    assert float(whole.abs().max()) == pytest.approx(levels)
    assert torch.equal(found[steps == 0], t[steps == 0])


def test_a_long_group_is_a_token() -> None:
    assert [group_of(name, 32) for name in QUANTISERS] == ["token", "channel", "token", "token"]
    assert group_of("group-32", 40) == "group-32"
    t = torch.randn(1, 3, 20)
    assert torch.equal(absmax_steps(t, 4, "group-32"), absmax_steps(t, 4, "token"))
