"""How much memory may be used, and what a small budget changes: the way to the number, not the number."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import howsmooth as hs
from howsmooth import batching, memory
from howsmooth.attention import Compose, Residual, TokenMap
from howsmooth.errors import ArgumentError
from howsmooth.jacobian import tiling
from howsmooth.jacobian.memory_footprint import cached_bytes
from howsmooth.lipschitz import measurement, singular_value_solver
from tests._cases import D, random_attention, tokens

CPU = torch.device("cpu")


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let no probabilities fit, and tell which way was taken."""
    ways: list[str] = []
    monkeypatch.setattr(batching, "cached_bytes", lambda *arguments: 1 << 60)
    for name in ("lanczos_together", "lanczos"):
        solve = getattr(singular_value_solver, name)

        def noted(*arguments: object, name: str = name, solve: object = solve, **keywords: object) -> object:
            ways.append(name)
            return solve(*arguments, **keywords)

        monkeypatch.setattr(singular_value_solver, name, noted)
    return ways


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scope", ["attention", "pre-norm block"])
def test_a_small_budget_leads_to_the_same_number(no_room: list[str], scope: str, dtype: torch.dtype) -> None:
    f: TokenMap = random_attention(3, heads=4, kv_heads=2, causal=True, temperature=3.0)
    if scope != "attention":
        f = Residual(Compose(f, hs.RMSNorm(torch.ones(D, dtype=torch.float64))))
    f, x = f.to(dtype=dtype), tokens(1, 2, 20, D).to(dtype)
    rtol = 1e-4 if dtype == torch.float32 else 1e-6
    found = hs.local_lipschitz(f, x, rtol=rtol, memory=1 << 30)
    assert no_room == ["lanczos"] * 2
    for member, value in zip(x, found.value, strict=True):
        j = torch.func.jacrev(f.to(dtype=torch.float64))(member.double()).reshape(20 * D, 20 * D)
        exact = torch.linalg.matrix_norm(j, 2)
        assert abs(float(value) - exact) <= 1e-6 * rtol * exact + 1e-13 * exact
    assert bool(found.converged.all())
    assert found.input_direction.dtype == found.output_direction.dtype == dtype
    image = torch.func.jvp(f, (x,), (found.input_direction,))[1]
    torch.testing.assert_close(
        image, found.value.to(dtype)[:, None, None] * found.output_direction, rtol=1e-3, atol=1e-3
    )


def test_float32_that_lost_its_digits_is_measured_in_float64(no_room: list[str]) -> None:
    # Values that almost cancel: the Jacobian is what rounding leaves of it.
    f, x = random_attention(1, heads=1, value_dim=1, d_out=None, biases=False), tokens(0, 1, 6, D)
    value = f.value.clone()
    x = x + 1e5 * torch.linalg.svd(torch.cat((f.query[0], f.key[0], value[0])))[2][-1]
    single = hs.local_lipschitz(f.to(dtype=torch.float32), x.float(), memory=1 << 30)
    assert no_room[0] == "lanczos"
    j = torch.func.jacrev(f.to(dtype=torch.float32).to(dtype=torch.float64))(x[0].float().double())
    exact = float(torch.linalg.matrix_norm(j.reshape(6, 6 * D), 2))
    assert float(single.lower) <= exact <= float(single.upper)


def test_probabilities_that_fit_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("closed_form_jacobian", "closed_form_jacobians"):  # the latter keep their probabilities

        def noted(
            *arguments: object, name: str = name, made: object = getattr(measurement, name), **keywords
        ):
            asked.append("streamed" if keywords.get("streamed") else name)
            return made(*arguments, **keywords)

        monkeypatch.setattr(measurement, name, noted)
    monkeypatch.setitem(tiling._TILE, "cpu", 1000)
    monkeypatch.setattr(tiling, "_ROWS", 1)
    f, x = random_attention(0), tokens(0, 3, 200, D)
    one = cached_bytes(f, 200, torch.float64)
    hs.local_lipschitz(f, x, memory=one)
    assert asked == ["closed_form_jacobians"] * 3
    asked.clear()
    hs.local_lipschitz(f, x, memory=one - 1)
    assert asked == ["streamed"] * 3


def test_long_sequences_are_streamed_though_they_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    original = measurement.closed_form_jacobian

    def noted(*arguments: object, streamed: bool = False, **keywords: object) -> object:
        asked.append(streamed)
        return original(*arguments, streamed=streamed, **keywords)

    monkeypatch.setattr(measurement, "closed_form_jacobian", noted)
    monkeypatch.setattr(batching, "_STREAMED_FROM", 7)
    f = random_attention(2, causal=True)
    found = hs.local_lipschitz(f, [tokens(0, 7, D), tokens(1, 6, D), tokens(2, 8, D)])
    assert asked == [True, True]
    for x, value in zip((tokens(0, 7, D), tokens(1, 6, D), tokens(2, 8, D)), found.value, strict=True):
        j = torch.func.jacrev(f)(x).reshape(len(x) * D, -1)
        torch.testing.assert_close(value, torch.linalg.matrix_norm(j, 2), rtol=1e-9, atol=0)
    # No room for a basis beside the tiles: probabilities, which fit, are kept.
    asked.clear()
    hs.local_lipschitz(f, tokens(0, 7, D), memory=cached_bytes(f, 7, torch.float64))
    assert asked == []


def test_a_budget_too_small_for_the_length_is_refused() -> None:
    said = r"memory: expected at least \d+ bytes .* 500 tokens in float64, got 1000 bytes. Give a larger"
    with pytest.raises(ArgumentError, match=said):
        hs.local_lipschitz(random_attention(0), tokens(0, 500, D), memory=1000)


@pytest.mark.parametrize("given", [0, -1, True, 1e9, "8GiB"])
def test_what_is_no_number_of_bytes_is_refused(given: object) -> None:
    with pytest.raises(ArgumentError, match="memory: expected a number of bytes >= 1, or None"):
        memory.memory_budget(given, CPU)


def test_a_container_limits_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free_in_system", lambda: 1000)
    monkeypatch.setattr(memory, "_CONTROL_GROUP", tmp_path)
    assert memory.free_memory(CPU) == 1000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("650\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 50\n")
    assert memory.free_memory(CPU) == 1000
    (tmp_path / "memory.max").write_text("700\n")
    assert memory.free_memory(CPU) == 100
    assert memory.memory_budget(None, CPU) == 50
    (tmp_path / "memory.current").write_text("900\n")
    assert memory.free_memory(CPU) == 0


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="asks a POSIX system")
def test_the_system_says_what_is_free() -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    # What is free with nothing given back, and all there is.
    assert page * os.sysconf("SC_AVPHYS_PAGES") / 2 < memory._free_in_system()
    assert memory._free_in_system() <= page * os.sysconf("SC_PHYS_PAGES")
