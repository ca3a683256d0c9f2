"""Every statement, at forty heads, masks and balls; and certificates, attention of other kinds, errors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import howsmooth as hs
from tests.keep.cases_maps import MAPS, N, attention, band, layer_norm, rms
from tests.keep.numbers import RTOL, AtLeast, AtMost, Interval, Number, case, numbers

MASKINGS = ("none", "causal", "band", "several heads", "window")


def tokens(seed: int, n: int, d: int, radius: float) -> Tensor:
    """Tokens within the ball, one of them on its border."""
    x = numbers(seed, n, d)
    return x * (radius / float(torch.linalg.vector_norm(x, dim=-1).max()))


def certificate(f: Any, x: Tensor) -> Number:
    """The certificate, which may become sharper: it has since become the verified norm of the matrix itself
    where that is small. It stays above the measured norm.
    """
    return at_tokens(float(hs.bounds.certificate(f, x).value), f, x)


def at_tokens(value: float, f: Any, x: Tensor) -> AtMost:
    return AtMost(value, float(hs.local_lipschitz(f, x).lower), RTOL)


class Problem:
    """One attention, its tokens and its ball: the k-th of forty."""

    def __init__(self, k: int) -> None:
        self.masking = MASKINGS[k % 5]
        self.n, d = 2 + k % 7, 2 + k % 4
        self.radius = (0.3, 0.7, 1.0, 1.6, 2.5, 4.0)[k % 6]
        masks: dict[str, dict[str, Any]] = {
            "none": {},
            "causal": {"causal": True},
            "band": {"mask": band(self.n)},
            "several heads": {"causal": k % 2 == 0},
            "window": {"causal": True, "window": 2},
        }
        self.f = attention(
            200 + k,
            heads=3 if self.masking == "several heads" else 1,
            key_dim=min(3, d),
            value_dim=3,
            d=d,
            biases=k % 3 == 0,
            **masks[self.masking],
        )
        self.x = tokens(300 + k, self.n, d, self.radius)


def _bests(k: int) -> Mapping[str, Number]:
    p, bounds = Problem(k), hs.bounds
    on_the_ball = bounds.best(p.f, length=p.n, radius=p.radius).value
    proved = certificate(p.f, p.x)
    found: dict[str, Number] = {
        "best on the ball": on_the_ball,
        "certificate": proved,
        "token-wise on the ball": bounds.token_wise_ball_upper_bound(p.f, p.radius).value,
        "any scores": bounds.any_scores_ball_upper_bound(p.f, p.n, p.radius).value,
    }
    # Searches for lower bounds take most of the time.
    if p.masking in ("none", "causal", "several heads") and k < (15 if p.f.heads == 1 else 5):
        below = bounds.best(p.f, length=p.n, radius=p.radius, side="lower").value
        found["best from below"] = AtLeast(below, on_the_ball)
    if p.masking in ("none", "causal"):
        # The certificate is among them.
        found["best at the tokens"] = at_tokens(bounds.best(p.f, p.x).value, p.f, p.x)
        found["token-wise at the tokens"] = bounds.token_wise_upper_bound(p.f, p.x).value
    return found


for _k in range(40):
    case(f"bounds/head {_k:02}, {MASKINGS[_k % 5]}")(partial(_bests, _k))


# statement -> what it takes: n and R ("ball"), R ("free"), X ("tokens"), X and a factor ("far"); and of whom
_STATEMENTS = {
    "theorem_3_3": ("ball", "none"),
    "theorem_e_3": ("ball", "none"),
    "ball_upper_bound": ("ball", "none"),
    "theorem_3_5": ("free", "none"),
    "mean_field_upper_bound": ("free", "none"),
    "theorem_4_3": ("ball", "causal"),
    "causal_ball_upper_bound": ("ball", "causal"),
    "theorem_4_4": ("free", "causal"),
    "causal_mean_field_upper_bound": ("free", "causal"),
    "masked_ball_upper_bound": ("ball", "band"),
    "any_scores_ball_upper_bound": ("ball", "window"),
    "lemma_3_8": ("ball", "several heads"),
    "output_norm_upper_bound": ("ball", "several heads"),
    "gram_upper_bound": ("ball", "several heads"),
    "theorem_c_3": ("tokens", "none"),
    "diameter_upper_bound": ("tokens", "causal"),
    "yudin_theorem_3": ("tokens", "none"),
    "theorem_3_7": ("far", "none"),
    "theorem_4_5": ("far", "causal"),
    "heavy_token_lower_bound": ("ball", "none"),
    "two_heavy_tokens_lower_bound": ("ball", "none"),
    "causal_two_heavy_tokens_lower_bound": ("ball", "causal"),
    "two_cluster_lower_bound": ("ball", "none"),
    "causal_two_cluster_lower_bound": ("ball", "causal"),
}

# Statements for V = I.
_IDENTITY = {
    "proposition_3_4": "ball",
    "quadratic_growth": "ball",
    "proposition_3_6": "free",
    "proposition_3_6_rate": "free",
    "two_dirac": "free",
    "weighted_two_atom_lower_bound": "free",
}


# Their tokens are found by a search.
_SEARCHED = ("heavy_token_lower_bound", "two_heavy_tokens_lower_bound", "causal_two_heavy_tokens_lower_bound")


def _searched(name: str, value: float, p: Problem) -> Number:
    if name not in _SEARCHED:
        return value
    return AtLeast(value, hs.bounds.best(p.f, length=p.n, radius=p.radius).value)


def _statement(name: str) -> Mapping[str, Number]:
    kind, masking = _STATEMENTS[name]
    function, found = getattr(hs.bounds, name), {}
    for k in [k for k in range(40) if MASKINGS[k % 5] == masking][: 2 if name in _SEARCHED else 4]:
        p = Problem(k)
        given: dict[str, tuple[Any, ...]] = {
            "ball": (p.n, p.radius),
            "free": (p.radius,),
            "tokens": (p.x,),
            "far": (p.x, 20.0),
        }
        bound = function(p.f, *given[kind])
        found[f"head {k:02}"] = _searched(name, bound.value, p)
        if kind == "far":
            found[f"head {k:02}, lower"] = function(p.f, *given[kind], side="lower").value
        if not bound.holds:
            found[f"head {k:02}, the formula"] = bound.formula
    return found


def _of_identity(name: str) -> Mapping[str, Number]:
    function, found = getattr(hs.bounds, name), {}
    for k, radius in enumerate((0.5, 1.5, 3.0)):
        head = hs.bounds.Head(numbers(250 + k, 3, 3), torch.eye(3))
        given = (4 + k, radius) if _IDENTITY[name] == "ball" else (radius,)
        bound = function(head, *given)
        found[f"head {k}"] = bound.value
        if not bound.holds:
            found[f"head {k}, the formula"] = bound.formula
    return found


for _name in _STATEMENTS:
    case(f"statements/{_name}")(partial(_statement, _name))
for _name in _IDENTITY:
    case(f"statements/{_name}")(partial(_of_identity, _name))


@case("statements/two_dirac, placed")
def _two_dirac() -> Mapping[str, Number]:
    head = hs.bounds.Head(numbers(255, 3, 3), torch.eye(3))
    placed = {"half": 0.3, "opposite": 0.01}
    return {c: hs.bounds.two_dirac(head, 1.5, weight=w, cluster=c).value for c, w in placed.items()}


@case("statements/pre_norm_upper_bound")
def _pre_norm() -> Mapping[str, Number]:
    f, found = attention(256, heads=2), {}
    for name, norm in (("LayerNorm", layer_norm(257)), ("RMSNorm", rms(259, 6))):
        found[f"{name}, everywhere"] = hs.bounds.pre_norm_upper_bound(f, norm, 5).value
        # It has become the certificate with the length of each token, in place of the shortest length alone.
        x = numbers(260, 5, 6)
        value = hs.bounds.pre_norm_upper_bound(f, norm, 5, x).value
        found[f"{name}, at tokens"] = at_tokens(value, hs.Compose(f, norm), x)
        found[f"{name}, radius"] = hs.bounds.norm_radius(norm)
    return found


@case("statements/other attentions")
def _others() -> Mapping[str, Number]:
    b, found = hs.bounds, {}
    q, k, v = (numbers(261 + i, 2, 3, 4) for i in range(3))
    o = numbers(264, 4, 6)
    cosine = {"temperature": 1.7, "gain": 0.8, "eps": 0.3}
    for n in (1, 2, 9, 300):
        found[f"l2_attention, {n}"] = b.l2_attention(q, v, o, n).value
        found[f"l2_attention_upper_bound, {n}"] = b.l2_attention_upper_bound(q, v, o, n).value
        found[f"scaled_cosine, {n}"] = b.scaled_cosine(q[0], k[0], v[0], n, **cosine).value
        found[f"scaled_cosine_upper_bound, {n}"] = b.scaled_cosine_upper_bound(
            q[0], k[0], v[0], n, **cosine
        ).value
        found[f"lipschitz_norm, {n}"] = b.lipschitz_norm(n, 7).value
        found[f"lipschitz_norm_upper_bound, {n}"] = b.lipschitz_norm_upper_bound(n, 7).value
    found["sinkhorn"] = b.sinkhorn(attention(265, heads=1), 1.3).value
    found["softmax"] = b.softmax_upper_bound(2.5).value
    return found


@case("statements/any scores")
def _any_scores() -> Mapping[str, Number]:
    """Rotary positions, caps, biases, sinks and norms."""
    names = (
        "rotary", "soft cap", "soft cap, causal, rotary", "score bias", "norms of queries and keys",
        "norms of all queries", "causal window", "sinks", "sinks, soft cap, bias, causal",
    )  # fmt: skip
    return {name: hs.bounds.any_scores_ball_upper_bound(MAPS[name](), N, 1.2).value for name in names}


@case("statements/certificates")
def _certificates() -> Mapping[str, Number]:
    """At longer sequences and hotter heads, and of scores with features."""
    names = ("grouped", "rotary", "soft cap", "causal window", "norms of queries and keys", "score bias")
    found: dict[str, Number] = {name: certificate(MAPS[name](), numbers(50, N, 6)) for name in names}
    for temperature in (0.5, 4.0):
        f = attention(266, heads=1, temperature=temperature)
        found[f"temperature {temperature}"] = certificate(f, numbers(267, 24, 6))
    return found


@case("statements/kv_error_upper_bound")
def _errors() -> Mapping[str, Number]:
    found: dict[str, Number] = {}
    for name in ("one head", "grouped", "rotary in part, causal", "sinks"):
        f, x = MAPS[name](), numbers(50, N, 6)
        for words, sizes in {
            "keys": {"keys": 0.1},
            "values": {"values": 0.1},
            "both": {"keys": numbers(268, f.kv_heads, N, f.key_dim).abs() / 10, "values": 0.05},
        }.items():
            bound = hs.bounds.kv_error_upper_bound(f, x, **sizes)
            found[f"{name}, {words}"] = bound.value
        found[f"{name}, last token"] = float(bound.tokens[-1])
    return found


# Rows whose names are not public for long, though `best` may use them.
_SHOWN = {*_STATEMENTS, *_IDENTITY}


def _table(k: int) -> Mapping[str, Number]:
    p, found = Problem(k), {}
    table = hs.bounds.table(p.f, p.x)
    for row in table.itertuples():
        if row.name in _SHOWN:
            found[f"{row.name}, {row.side}"] = _searched(row.name, float(row.value), p)
    ends = table.loc[table["name"] == "measured"].set_index("side")["value"]
    found["measured"] = Interval(float(ends["lower"]), float(ends["lower"]), float(ends["upper"]))
    return found


for _k in (0, 6, 3):
    case(f"table/head {_k:02}, {MASKINGS[_k % 5]}")(partial(_table, _k))
