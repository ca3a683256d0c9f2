"""hs.functional.attention on the device: values and derivatives of both modes, against the CPU in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jvp, vjp, vmap

import howsmooth as hs
from tests._cases import tokens

pytestmark = pytest.mark.gpu

RULES: dict[str, dict[str, object]] = {
    "all keys": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "mask": {"mask": torch.ones(9, 9, dtype=torch.bool).tril(2)},
    "bias, cap, sinks": {
        "score_bias": tokens(3, 4, 9, 9),
        "softcap": 2.0,
        "sinks": tokens(4, 4),
        "causal": True,
    },
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return tokens(0, 2, 4, 9, 6), tokens(1, 2, 2, 9, 6), tokens(2, 2, 2, 9, 5)


def on(device: torch.device, dtype: torch.dtype, rules: dict[str, object]) -> dict[str, object]:
    """The rules with their tensors on the device."""
    return {
        name: rule.to(device=device, dtype=dtype if rule.is_floating_point() else None)
        if isinstance(rule, Tensor)
        else rule
        for name, rule in rules.items()
    }


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)],
)
def test_values_and_both_modes(name: str, dtype: torch.dtype, tolerance: float, device: torch.device) -> None:
    q, k, v = inputs()
    tangents, u = tuple(tokens(5 + i, *t.shape) for i, t in enumerate((q, k, v))), tokens(9, 2, 4, 9, 5)

    def here(*qkv: Tensor) -> Tensor:
        return hs.functional.attention(*qkv, **RULES[name])

    there_rules = on(device, dtype, RULES[name])

    def there(*qkv: Tensor) -> Tensor:
        return hs.functional.attention(*qkv, **there_rules)

    moved, moved_tangents = (
        tuple(t.to(device=device, dtype=dtype) for t in ts) for ts in ((q, k, v), tangents)
    )
    wanted = [*jvp(here, (q, k, v), tangents), *vjp(here, q, k, v)[1](u)]
    found = [*jvp(there, moved, moved_tangents), *vjp(there, *moved)[1](u.to(device=device, dtype=dtype))]
    for got, want in zip(found, wanted, strict=True):
        assert got.device.type == device.type
        assert got.dtype == dtype
        assert float((got.cpu().double() - want).norm()) <= tolerance * float(want.norm())


def test_vmap_and_second_derivatives(device: torch.device) -> None:
    q, k, v = (t[0, :2] for t in inputs())

    def energy(t: Tensor, where: torch.device) -> Tensor:
        out = hs.functional.attention(t, k.to(where), v.to(where), causal=True)
        return out.square().sum()

    cpu = torch.device("cpu")
    wanted, found = hessian(energy)(q, cpu), hessian(energy)(q.to(device), device)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-10, atol=1e-10)
    stack = torch.stack((q, 2 * q, -q))
    one_by_one = torch.stack([hs.functional.attention(t, k, v) for t in stack])
    mapped = vmap(lambda t: hs.functional.attention(t, k.to(device), v.to(device)))(stack.to(device))
    torch.testing.assert_close(mapped.cpu(), one_by_one, rtol=1e-12, atol=1e-12)
