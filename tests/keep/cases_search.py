"""Worst inputs: constructions, whose constants are exact, and ascents, which may find more and not less."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

import howsmooth as hs
from tests.keep.cases_bounds import Problem
from tests.keep.cases_maps import attention, layer_norm
from tests.keep.numbers import AtLeast, Number, case, digest_of, numbers


def _worst(f: Any, x: torch.Tensor) -> float:
    return float(hs.local_lipschitz(f, x, rtol=1e-6).value)


def _constructions(k: int) -> Mapping[str, Number]:
    p, found = Problem(k), {}
    most = hs.bounds.best(p.f, length=p.n, radius=p.radius).value
    for made in hs.adversarial.constructions(p.f, p.n, p.radius):
        found[f"{made.name}, head {made.head}"] = AtLeast(_worst(p.f, made.x), most, 0.05)
    return found


for _k in (5, 6, 20, 21):
    case(f"worst inputs/constructions for head {_k:02}")(partial(_constructions, _k))


@case("worst inputs/constructions by name")
def _named() -> Mapping[str, Number]:
    a, head = hs.adversarial, hs.bounds.Head(numbers(500, 3, 3), torch.eye(3))
    f, found = attention(501, heads=1, d=3, biases=False), {}
    most = hs.bounds.best(f, length=6, radius=1.5).value
    for name in ("balanced", "two_cluster", "heavy_token", "two_heavy_tokens"):
        found[name] = AtLeast(_worst(f, getattr(a, name)(f, 6, 1.5).x), most)
    for choice in ("paper", "max", "min"):
        x = a.two_cluster(head, 6, 1.5, choice=choice).x
        found[f"two_cluster, {choice}, norms"] = float(torch.linalg.matrix_norm(x))
    return found


@case("worst inputs/ascend")
def _ascend() -> Mapping[str, Number]:
    a, found = hs.adversarial, {}
    f, x = attention(502, heads=2, temperature=2.0), numbers(503, 4, 6)
    few = {"starts": [x / 3], "random_starts": 0, "steps": 10, "atom_restarts": 2, "atom_steps": 20}
    found["the start"] = _worst(f, x)
    around = a.ascend(f, domain=a.Around(x, 0.5), **{**few, "starts": [x]})
    # So few steps may end elsewhere.
    found["around tokens"] = AtLeast(around.value, math.inf, 0.02)
    norm = a.Ellipsoid(layer_norm(504))
    found["behind a norm, within"] = digest_of(norm.project(x))
    found["on the ball"] = AtLeast(
        a.ascend(f, 4, 1.0, **few).value, hs.bounds.best(f, length=4, radius=1.0).value, 0.02
    )
    most = hs.bounds.token_wise_ball_upper_bound(f, 1.0).value
    found["token-wise"] = AtLeast(a.ascend(f, 4, 1.0, objective="token-wise", **few).value, most, 0.02)
    return found
