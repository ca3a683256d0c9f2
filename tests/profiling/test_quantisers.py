"""Quantisation by absmax and as by KIVI against their definitions, written out group by group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.profiling.quantisers import (
    QUANTISERS,
    checked_quantisers,
    group_of,
    quantised_tokens,
    rounded,
    steps_and_zeros,
)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("quantiser", ["token", "channel", "group-32", "group-64"])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_steps_are_those_of_each_group(quantiser: str, bits: int) -> None:
    t = normal(2, 5, 80)
    t[1, 2, :32] = 0.0
    steps, zeros = steps_and_zeros(t, bits, quantiser, "K")
    levels = {2: 1, 3: 3, 8: 127}[bits]
    for h in range(2):
        for i in range(5):
            for c in range(80):
                size = {"group-32": 32, "group-64": 64}.get(quantiser, 80)
                start = size * (c // size)
                group = t[h, :, c] if quantiser == "channel" else t[h, i, start : start + size]
                assert float(steps[h, i, c]) == pytest.approx(float(group.abs().max()) / levels)
    assert not zeros.any()
    found = rounded(t, steps, zeros)
    assert bool(((found - t).abs() <= steps / 2 * (1 + 1e-12)).all())
    whole = (found / steps)[steps > 0]
    assert torch.allclose(whole, whole.round(), atol=1e-9)
    assert float(whole.abs().max()) == pytest.approx(levels)
    assert torch.equal(found[steps == 0], t[steps == 0])


@pytest.mark.parametrize(
    ("quantiser", "operand", "tokens", "groups"),
    [
        ("kivi", "K", 11, [(slice(0, 11), slice(c, c + 1)) for c in range(8)]),
        ("kivi", "V", 11, [(slice(i, i + 1), slice(0, 8)) for i in range(11)]),
        ("kivi-4", "K", 8, [(slice(i, i + 4), slice(c, c + 1)) for i in (0, 4) for c in range(8)]),
        ("kivi-4", "V", 11, [(slice(i, i + 1), slice(c, c + 4)) for i in range(11) for c in (0, 4)]),
        ("kivi-2-5", "K", 6, [(slice(i, i + 2), slice(c, c + 1)) for i in (0, 2, 4) for c in range(8)]),
        ("kivi-2-5", "V", 6, [(slice(i, i + 1), slice(c, c + 2)) for i in range(6) for c in (0, 2, 4, 6)]),
    ],
)
@pytest.mark.parametrize("bits", [2, 3])
def test_kivi_rounds_from_the_least_entry_of_each_group(
    quantiser: str, operand: str, tokens: int, groups: list[tuple[slice, slice]], bits: int
) -> None:
    t = normal(2, 11, 8) + 5.0  # far from zero, which is no level
    t[1, :, 3] = 7.0
    truth = t.clone()
    for head in truth:
        for group in groups:
            low, high = float(head[group].min()), float(head[group].max())
            step = (high - low) / {2: 3, 3: 7}[bits]
            if step > 0:
                head[group].apply_(lambda x, low=low, step=step: low + step * round((x - low) / step))
    steps, zeros = steps_and_zeros(t, bits, quantiser, operand)
    found = rounded(t, steps, zeros)
    assert torch.allclose(found, truth, rtol=0, atol=1e-12)
    assert bool(((found - t).abs() <= steps / 2 + 1e-12).all())
    assert max(len(found[0][group].unique()) for group in groups) <= 2**bits
    assert quantised_tokens(11, quantiser, operand) == tokens
    assert torch.equal(found[:, tokens:], t[:, tokens:])


def test_a_group_or_window_that_does_not_fit_is_refused() -> None:
    for quantiser, operand in (("kivi-3", "V"), ("kivi-16", "K"), ("kivi-4-11", "V"), ("kivi-4-8", "K")):
        with pytest.raises(ArgumentError, match=f"quantisers.*11 tokens.*got '{quantiser}'"):
            steps_and_zeros(normal(2, 11, 8), 4, quantiser, operand)
    for name in ("kivi-0", "kivi-08", "kivi-4-", "kivi-4-4-4", "kivi4"):
        with pytest.raises(ArgumentError, match=f"quantisers.*{name}.*kivi-32-128"):
            checked_quantisers(("token", name))
    assert checked_quantisers(["kivi-4", "token", "kivi-4"]) == ("kivi-4", "token")


def test_a_long_group_is_a_token() -> None:
    assert [group_of(name, 32) for name in QUANTISERS] == ["token", "channel", "token", "token", "kivi"]
    assert group_of("group-32", 40) == "group-32"
    t = torch.randn(1, 3, 20)
    for one, other in zip(*(steps_and_zeros(t, 4, name, "V") for name in ("group-32", "token")), strict=True):
        assert torch.equal(one, other)
