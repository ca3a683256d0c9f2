"""Gradient ascent over tokens and weights against the upper bounds of ``hs.bounds`` and ``hs.nn``.

    python scripts/attack_bounds.py --json ascents.json                 # about half an hour on one core
    python scripts/attack_bounds.py --cases 100 --kinds sigmoid rotary  # only kinds with these words
    python scripts/attack_bounds.py --cases 740 --steps 20 --exact 2    # a quick look at all kinds

The truth shares no code with the bounds. Each attention is written again below in a few lines, and the truth
is the largest singular value of its dense Jacobian. Each ascent moves the tokens, which stay in their ball,
and all weights, whose norms stay as they were drawn. Every bound that applies is evaluated where the ascent
ends, and for a quarter of the cases at a step on the way. The cases nearest to a bound are computed again
with 40 digits, and 40 digits decide wherever float64 exceeds a bound.
docs/evidence.md shows a run.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpmath import mp
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds.multi_head_bounds import folded_gram_upper_bound
from howsmooth.errors import ArgumentError

BATCH = 20  # cases of one setting (sizes, masks, switches), which are ascended together
# Spectral norms of these weights are held fixed, and the largest entries of all other weights.
MATRICES = ("query", "key", "value", "output")

ON_BALL = (
    *("theorem_3_3", "theorem_e_3", "ball_upper_bound", "theorem_4_3", "causal_ball_upper_bound"),
    *("masked_ball_upper_bound", "lemma_3_8", "output_norm_upper_bound"),
    *("gram_upper_bound", "folded_gram_upper_bound", "any_scores_ball_upper_bound"),
)
ANY_LENGTH = ("theorem_3_5", "mean_field_upper_bound", "theorem_4_4", "causal_mean_field_upper_bound")
AT_TOKENS = (
    *("theorem_c_3", "diameter_upper_bound", "yudin_theorem_3"),
    "certificate",
)
LARGE_RADIUS = ("theorem_3_7", "theorem_4_5")
PRIVATE = {"folded_gram_upper_bound": folded_gram_upper_bound}
LOCAL = {
    *(*AT_TOKENS, *LARGE_RADIUS, "token_wise_upper_bound"),
    "pre_norm_upper_bound at X",
}


Weights = dict[str, Tensor]
Found = tuple[dict[str, float], Any]  # bounds, and the output of the library's own map

# ---- each attention, written once for floats (torch) and for mpmath numbers (NumPy arrays of objects)


class Floats:
    """The operations of PyTorch."""

    exp, log, sqrt, tanh = torch.exp, torch.log, torch.sqrt, torch.tanh
    where, concatenate, maximum, stack = torch.where, torch.cat, torch.amax, torch.stack
    newton_steps = 2  # for first and second derivatives

    @staticmethod
    def array(t: Tensor) -> Tensor:
        """Return a constant of a setting."""
        return t

    @staticmethod
    def constant(t: Tensor) -> Tensor:
        """Return the numbers without their derivatives."""
        return t.detach()

    @staticmethod
    def solve(matrix: Tensor, right: Tensor) -> Tensor:
        """Solve a linear system."""
        # With a constant inverse the second step still carries second derivatives. The derivative of
        # torch.linalg.solve is wrong for all but the first member under vmap (PyTorch 2.13).
        return torch.linalg.inv(matrix.detach()) @ right


class Exact:
    """The same operations on arrays of mpmath numbers."""

    exp, log, sqrt, tanh = (np.frompyfunc(f, 1, 1) for f in (mp.exp, mp.log, mp.sqrt, mp.tanh))
    where, concatenate, maximum, stack = np.where, np.concatenate, np.max, np.stack
    newton_steps = 5

    @staticmethod
    def array(t: Tensor) -> np.ndarray:
        """Return a constant of a setting."""
        return t.numpy() if t.dtype == torch.bool else np.frompyfunc(mp.mpf, 1, 1)(t.numpy().astype(object))

    @staticmethod
    def constant(t: np.ndarray) -> Tensor:
        """Return the numbers in float64."""
        return torch.tensor(t.astype(float))

    @staticmethod
    def solve(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Solve a linear system."""
        solved = mp.lu_solve(mp.matrix(matrix.tolist()), mp.matrix(right.tolist()))
        return np.array(list(solved), dtype=object)


def softmax(ns: Any, scores: Any, seen: Any, sink: Any = None) -> Any:
    """Return the weights of each row over the keys that it sees, beside a sink."""
    top = ns.maximum(ns.where(seen, scores, -math.inf), 1)[:, None]
    weights = ns.where(seen, ns.exp(ns.where(seen, scores - top, 0.0)), 0.0)
    total = weights.sum(axis=1)[:, None]
    return weights / (total if sink is None else total + ns.exp(sink - top))


def sinkhorn(ns: Any, scores: Any, seen: Tensor) -> Any:
    """Return the doubly stochastic matrix diag(eᵃ) e^S diag(eᵇ); Newton steps carry its derivatives."""
    start, n = ns.constant(scores), len(scores)
    a, b = torch.zeros_like(start[:, 0]), torch.zeros_like(start[0])
    for _ in range(20):
        a = -torch.logsumexp((start + b).masked_fill(~seen, -math.inf), 1)
        b = -torch.logsumexp((start + a[:, None]).masked_fill(~seen, -math.inf), 0)
    for _ in range(20):
        moved = sinkhorn_step(Floats, start, seen, a, b)
        moved = moved / moved.abs().amax().clamp(min=1.0)
        a, b = a - moved[:n], b - moved[n:]
    a, b = ns.array(a), ns.array(b)
    for _ in range(ns.newton_steps):
        moved = sinkhorn_step(ns, scores, seen, a, b)
        a, b = a - moved[:n], b - moved[n:]
    seen = ns.array(seen)
    return ns.where(seen, ns.exp(ns.where(seen, scores + a[:, None] + b, 0.0)), 0.0)


def sinkhorn_step(ns: Any, scores: Any, seen: Tensor, a: Any, b: Any) -> Any:
    """Return the step of Newton's method for rows and columns of sum 1."""
    n, known = len(scores), ns.array(seen)
    p = ns.where(known, ns.exp(ns.where(known, scores + a[:, None] + b, 0.0)), 0.0)
    rows, columns, eye = p.sum(axis=1), p.sum(axis=0), ns.array(torch.eye(n, dtype=torch.float64))
    upper, lower = ns.concatenate((eye * rows, p), 1), ns.concatenate((p.T, eye * columns), 1)
    shift = ns.array(torch.cat((torch.ones(n), -torch.ones(n))).double())  # it leaves P alone
    matrix = ns.concatenate((upper, lower)) + shift[:, None] * shift
    return ns.solve(matrix, ns.concatenate((rows, columns)) - 1)


def unit(ns: Any, u: Any, eps: float) -> Any:
    """Normalise each row, with eps under the root."""
    return u / ns.sqrt((u * u).sum(axis=1)[:, None] + eps)


def norm_layer(ns: Any, kind: str, eps: float, u: Any, gain: Any, shift: Any) -> Any:
    """Apply LayerNorm or RMSNorm to each row."""
    h = u - u.sum(axis=1)[:, None] / u.shape[1] if kind == "LayerNorm" else u
    y = h / ns.sqrt((h * h).sum(axis=1)[:, None] / u.shape[1] + eps) * gain
    return y if shift is None else y + shift


def attention(ns: Any, s: Any, p: dict[str, Any], x: Any, y: Any = None, errors: Any = None) -> Any:
    """Self-attention of x, or attention from x to y, of the form s.form, with all switches of s and p."""
    y, k = x if y is None else y, s.key
    q_k_v = []
    for name, t, count in (("query", x, s.heads), ("key", y, s.groups), ("value", y, s.groups)):
        if s.form == "L2" and name != "query":
            q_k_v.append(q_k_v[0])
            continue
        parts = [t @ p[name][h].T for h in range(count)]
        if name + "_bias" in p:
            parts = [part + p[name + "_bias"][h] for h, part in enumerate(parts)]
        if name + "_gain" in p:
            gain, shift = p[name + "_gain"], p.get(name + "_shift")
            apart = [ns.concatenate(parts, 1)] if s.whole else parts
            apart = [norm_layer(ns, s.norm, s.eps, u, gain, shift) for u in apart]
            parts = [apart[0][:, k * h : k * (h + 1)] for h in range(count)] if s.whole else apart
        if s.rotary is not None and name != "value":
            cos, sin, half = ns.array(s.rotary[0]), ns.array(s.rotary[1]), s.rotary[0].shape[1] // 2
            for h, u in enumerate(parts):
                a, b, rest = u[:, :half], u[:, half : 2 * half], u[:, 2 * half :]
                turned = (a * cos[:, :half] - b * sin[:, :half], b * cos[:, half:] + a * sin[:, half:], rest)
                parts[h] = ns.concatenate(turned, 1)
        if s.form == "cosine" or (s.form == "query-key norm" and name != "value"):
            parts = [unit(ns, u, s.eps) for u in parts]
        q_k_v.append(parts)
    q, keys, v = q_k_v
    if s.form == "L2":
        v = [q[h] @ (p["value"][h] @ p["query"][h].T).T / math.sqrt(k) for h in range(s.heads)]
        v = [v[h] + p["value_bias"][h] for h in range(s.heads)] if "value_bias" in p else v
    if errors is not None:
        g, n = s.groups, len(y)
        keys = [keys[h] + errors[h * n : (h + 1) * n, :k] for h in range(g)]
        v = [v[h] + errors[(g + h) * n : (g + h + 1) * n, : s.value] for h in range(g)]
    seen, out = ns.array(s.seen), []
    for h in range(s.heads):
        g = h // (s.heads // s.groups)
        scores = s.scale * (q[h] @ keys[g].T)
        if s.form == "L2":
            scores = -((q[h][:, None] - q[h][None]) ** 2).sum(axis=2) / math.sqrt(k)
        if s.form == "LipschitzNorm":
            scores = scores / lipschitz_norm_divisor(ns, q[h], keys[g], v[g])
        if s.softcap is not None:
            scores = s.softcap * ns.tanh(scores / s.softcap)
        if "score_bias" in p:
            scores = scores + p["score_bias"][h if len(p["score_bias"]) > 1 else 0]
        if "log_weights" in p:
            scores = scores + p["log_weights"]
        if s.form == "sigmoid":
            weights = ns.where(seen, 1 / (1 + ns.exp(-scores - s.shift)), 0.0)
        elif s.form == "Sinkhorn":
            weights = sinkhorn(ns, scores, s.seen)
        else:
            weights = softmax(ns, scores, seen, p["sinks"][h] if "sinks" in p else None)
        out.append(s.gain * (weights @ v[g]))
    joined = ns.concatenate(out, 1)
    return joined @ p["output"].T if "output" in p else joined


def lipschitz_norm_divisor(ns: Any, q: Any, k: Any, v: Any) -> Any:
    """Return the number by which LipschitzNorm divides the scores."""
    u = ns.sqrt((q * q).sum())
    by_key, by_value = (ns.sqrt(ns.maximum((t * t).sum(axis=1), 0)) for t in (k, v))
    return ns.maximum(ns.stack((u * by_key, u * by_value, by_key * by_value)), 0)


def after_norm(ns: Any, s: Any, p: dict[str, Any], x: Any) -> Any:
    """Apply attention after a norm layer."""
    return attention(ns, s, p, lone_norm(ns, s, p, x))


def change_by_errors(ns: Any, s: Any, p: dict[str, Any], z: Any) -> Any:
    """Return the change of the output by errors of keys (first rows) and values."""
    return attention(ns, s, p, p["tokens"], errors=z) - attention(ns, s, p, p["tokens"])


def lipschitz_norm(ns: Any, s: Any, p: dict[str, Any], z: Any) -> Any:
    """Apply LipschitzNorm attention to queries, keys and values, one above the other."""
    q, k, v = z[: s.n], z[s.n : s.n + s.memory_n], z[s.n + s.memory_n :]
    return softmax(ns, q @ k.T / lipschitz_norm_divisor(ns, q, k, v), ns.array(s.seen)) @ v


def lone_norm(ns: Any, s: Any, p: dict[str, Any], x: Any) -> Any:
    """Apply a norm layer alone."""
    return norm_layer(ns, s.norm, s.eps, x, p["gain"], p.get("shift"))


def softmax_alone(ns: Any, s: Any, p: dict[str, Any], x: Any) -> Any:
    """Apply the softmax to one row of numbers."""
    return softmax(ns, s.scale * x, ns.array(s.seen))


# ---- settings and weights, drawn at random


@dataclass
class Setting:
    """What the cases of one batch have in common."""

    n: int
    d: int
    key: int
    value: int
    heads: int = 1
    groups: int = 1
    form: str = "softmax"
    scale: float = 1.0
    gain: float = 1.0
    shift: float = 0.0
    causal: bool = False
    window: int | None = None
    mask: Tensor | None = None
    seen: Any = None
    masking: str = "none"  # which masks the constant of a layer covers
    rotary: tuple[Tensor, Tensor] | None = None
    softcap: float | None = None
    norm: str | None = None
    whole: bool = False  # whether the norm acts on all heads together
    eps: float = 0.01
    memory_n: int = 0
    side: str = "joint"
    free: bool = False  # whether tokens may leave the ball
    box: bool = False  # whether entries are limited instead of norms


def log_uniform(rng: random.Random, low: float, high: float, *shape: int) -> Tensor:
    """Draw a number for each case whose logarithm is uniform."""
    count = BATCH * math.prod(shape)
    values = [math.exp(rng.uniform(math.log(low), math.log(high))) for _ in range(count)]
    return torch.tensor(values, dtype=torch.float64).reshape(BATCH, *shape)


def drawn(rng: random.Random, words: str, form: str) -> tuple[Setting, dict[str, tuple[int, ...]]]:
    """Draw a setting with the switches that ``words`` name, and the shapes of its weights."""
    has = set(words.split())
    if "some" in has:  # any combination of the switches of today's models
        switches = ("cap", "sinks", "added", "biases", "masked", "rotary", "norms")
        has |= {word for word in switches if rng.random() < 0.5}
        has |= {"heads"} | ({"whole"} if rng.random() < 0.3 else set())
    s = Setting(rng.randint(2, 8), rng.randint(2, 6), rng.randint(1, 4), rng.randint(1, 4), form=form)
    if has & {"rotary", "norms"}:
        s.key = rng.randint(2, 4)
    if "heads" in has:
        s.groups, s.heads = rng.choice(((1, 1), (1, 2), (1, 3), (2, 2), (2, 4)))
    if "layer" in has:
        s.heads = s.groups = 1 if "alone" in has else rng.choice((1, 1, 2, 3))
        s.key = s.value = rng.randint(1, 2) if s.heads > 1 else rng.randint(2, 5)
        s.d = s.heads * s.key
    s.memory_n = s.n
    s.scale = 1 / math.sqrt(s.key) if "layer" in has or rng.random() < 0.7 else 1.0
    s.seen = torch.ones(s.n, s.memory_n, dtype=torch.bool)
    distance = torch.arange(s.n)[:, None] - torch.arange(s.memory_n)
    can_be_causal = "masked" in has and form != "Sinkhorn"
    if "causal" in has or (can_be_causal and rng.random() < 0.4):
        s.causal, s.masking = True, "causal"
        s.seen &= distance >= 0
    if "masked" in has and ("layer" not in has or (not s.causal and rng.random() < 0.5)):
        if rng.random() < 0.5:
            s.window = rng.randint(2 if form == "Sinkhorn" else 1, s.n)
            s.seen &= distance.abs() < s.window
        elif form != "Sinkhorn":
            s.mask = torch.tensor([[rng.random() < 0.6 for _ in range(s.memory_n)] for _ in range(s.n)])
            if s.causal or "layer" in has:  # tokens of a layer that nobody sees count as absent
                s.mask |= torch.eye(s.n, dtype=torch.bool)
            s.mask[~s.mask.any(1), rng.randrange(s.memory_n)] = True
            s.seen &= s.mask
        s.masking = rng.choice(("fixed", "any", "additive")) if "layer" in has else "none"
    if "rotary" in has:
        rot = 4 if s.key == 4 and rng.random() < 0.7 else 2
        angles = torch.arange(s.n)[:, None] * 30.0 ** (-torch.arange(rot // 2) * 2 / rot)
        angles, factor = (rng.choice((1.0, 0.3)) * angles).double().repeat(1, 2), rng.choice((1.0, 1.0, 1.2))
        s.rotary = (factor * angles.cos(), factor * angles.sin())
    width, layer = s.heads * s.value, "layer" in has and "alone" not in has
    bias = "biases" in has or (layer and rng.random() < 0.5)
    shapes: dict[str, tuple[int, ...]] = {
        "query": (s.heads, s.key, s.d),
        "key": (s.groups, s.key, s.d),
        "value": (s.groups, s.value, s.d),
    }
    if "layer" in has or ("heads" in has and rng.random() < 0.7):
        shapes["output"] = (s.d if "layer" in has else rng.randint(1, 6), width)
    if bias:
        shapes |= {name + "_bias": shapes[name][:2] for name in MATRICES[:3]}
    if "sinks" in has:
        shapes["sinks"] = (s.heads,)
    if "added" in has:
        kind = rng.choice(("score_bias", "relative", "alibi"))
        shapes[kind] = (rng.choice((1, s.heads)), s.n, s.memory_n)
    elif s.masking == "additive":
        shapes["score_bias"] = (1, s.n, s.n)
    if "norms" in has:
        s.norm, s.eps = rng.choice(("RMSNorm", "LayerNorm")), rng.choice((1e-5, 0.01, 1.0))
        s.whole = "whole" in has
        for name, count in (("query", s.heads), ("key", s.groups)):
            shapes[name + "_gain"] = (s.key * (count if s.whole else 1),)
            if s.norm == "LayerNorm" and rng.random() < 0.5:
                shapes[name + "_shift"] = shapes[name + "_gain"]
    if "cap" in has:
        s.softcap = rng.choice((0.5, 2.0, 10.0))
    if "measure" in has:
        shapes["log_weights"] = (s.n,)
    if "norm-first" in has:
        s.norm, s.eps, s.free = rng.choice(("RMSNorm", "LayerNorm")), rng.choice((1e-5, 0.01, 1.0)), True
        shapes["gain"] = (s.d,)
        if s.norm == "LayerNorm":
            shapes["shift"] = (s.d,)
    if "errors" in has:
        s.box, s.side = rng.random() < 0.3, rng.choice(("keys", "values", "joint"))
        shapes["tokens"] = (s.n, s.d)
    if form in ("cosine", "query-key norm"):
        s.scale, s.eps = rng.choice((0.5, 1.0, 2.0)), rng.choice((0.1, 1.0))
        s.gain = rng.choice((1.0, 2.0)) if form == "cosine" else 1.0
    if form in ("cosine", "L2", "LipschitzNorm"):
        s.free = rng.random() < 0.5 and (
            form != "L2" or (bool(s.seen.diagonal().all()) and s.masking not in ("any", "additive"))
        )
    if form == "sigmoid":
        s.shift = rng.choice((-math.log(s.n), 0.0, 1.0))
    if form == "L2":
        shapes = {name: shapes[name] for name in shapes if name not in ("key", "query_bias", "key_bias")}
    if form == "LipschitzNorm":
        s.scale = 1.0
    if form == "softmax of a vector":
        s.scale, s.seen, shapes = rng.choice((0.3, 1.0, -2.0)), torch.ones(1, s.n, dtype=torch.bool), {}
    if form == "LipschitzNorm of Q, K, V":
        s.memory_n = rng.randint(1, 6)
        s.seen, shapes, s.free = torch.ones(s.n, s.memory_n, dtype=torch.bool), {}, True
    if form == "norm layer":
        shapes = {name: shapes[name] for name in ("gain", "shift") if name in shapes}
    return s, shapes


def begun(rng: random.Random, s: Setting, shapes: dict[str, tuple[int, ...]]) -> tuple[Any, ...]:
    """Return raw weights, the norms that they get, tokens in the unit ball, and the radius of each token."""
    torch.manual_seed(rng.getrandbits(60))
    R = log_uniform(rng, 0.1, 10)
    strength = torch.where(torch.rand(BATCH) < 0.5, log_uniform(rng, 0.2, 4) / R, log_uniform(rng, 0.3, 2))
    if s.form == "Sinkhorn":  # with larger scores the weights are nearly a permutation
        strength = log_uniform(rng, 0.2, 2) / R
    raw = {name: torch.randn(BATCH, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    if raw.keys() >= {"query", "key"}:  # scores of one sign at equal tokens
        signs = torch.tensor([-1.0, 1.0, math.nan, math.nan]).double().repeat(BATCH // 4)
        like = signs[:, None, None, None] * raw["query"][:, :: s.heads // s.groups] + 0.1 * raw["key"]
        raw["key"] = torch.where(like.isnan(), raw["key"], like)
    size = {name: log_uniform(rng, 0.2, 3) for name in raw}
    size |= dict.fromkeys(raw.keys() & {"query", "key"}, strength)
    size |= dict.fromkeys(raw.keys() & {"tokens"}, R)
    size |= {name: 5 * size[name] for name in raw.keys() & {"log_weights"}}
    size = {name: numbers.reshape(BATCH, *(1 for _ in shapes[name])) for name, numbers in size.items()}
    parts = [(s.n, s.d, R)]  # rows, their width and radius
    if s.form == "errors":
        sizes = [0.0 * R if s.side == other else log_uniform(rng, 0.003, 3) for other in ("values", "keys")]
        parts = [(s.groups * s.n, s.key, sizes[0]), (s.groups * s.n, s.value, sizes[1])]
    if s.form == "LipschitzNorm of Q, K, V":
        parts += [(2 * s.memory_n, s.d, R)]
    if s.form in ("softmax of a vector", "norm layer"):
        parts = [(1, s.n if s.form == "softmax of a vector" else s.d, R)]
    width = max(part[1] for part in parts)
    inside = torch.cat([(torch.arange(width) < d).expand(rows, width) for rows, d, _ in parts])
    radius = torch.cat([r[:, None].expand(BATCH, rows) for rows, _, r in parts], 1)
    e = torch.randn(BATCH, *inside.shape, dtype=torch.float64) * inside
    e = e / torch.linalg.vector_norm(e, dim=2, keepdim=True)
    signs = torch.where(torch.rand(BATCH, len(inside), 1) < 0.3, -1.0, 1.0)
    starts = (e, e * torch.rand(*e.shape[:2], 1), signs * e[:, :1] + 0.1 * e, 0.7 * e[:, :1] + 0.2 * e)
    z = torch.stack([starts[i % 4][i] for i in range(BATCH)]) * inside
    return raw, size, z / torch.linalg.vector_norm(z, dim=2).clamp(min=1)[..., None], radius


def weights_of(s: Setting, raw: Weights, size: Weights) -> Weights:
    """Return the weights of given norms: spectral norms of matrices, largest entries of all others."""
    found = {}
    away = torch.arange(s.n)[:, None] - torch.arange(s.n)
    for name, t in raw.items():
        key = name
        if name == "relative":  # one number for each distance, as in T5
            key, t = "score_bias", t.flatten(-2)[..., away + s.n - 1]
        elif name == "alibi":
            key, t = "score_bias", -t[..., :1, :1].abs() * away.abs()
        if name in MATRICES:
            norms = torch.linalg.matrix_norm(t, 2, keepdim=True)
        else:
            norms = t.abs().amax(tuple(range(1, t.ndim)), keepdim=True)
        found[key] = size[name] * t / norms
    return found


# ---- the bounds under judgement


def upper(name: str, *arguments: Any, **options: Any) -> dict[str, float]:
    """Evaluate a bound of hs.bounds, unless it is for other attention or a hypothesis fails."""
    try:
        found = getattr(hs.bounds, name, PRIVATE.get(name))(*arguments, **options)
    except ArgumentError:
        return {}
    value = float(found.value)
    return {name: value} if math.isfinite(value) else {}


def together(*found: dict[str, float]) -> dict[str, float]:
    """Join dictionaries of bounds."""
    return {name: value for one in found for name, value in one.items()}


def norm_of(s: Setting, p: Weights, prefix: str) -> Any:
    """Return a norm layer of the library."""
    if s.norm == "LayerNorm":
        return hs.LayerNorm(p[prefix + "gain"], p.get(prefix + "shift"), eps=s.eps)
    return hs.RMSNorm(p[prefix + "gain"], eps=s.eps)


def self_attention(s: Setting, p: Weights) -> hs.SelfAttention:
    """Return the self-attention of the library."""
    options: dict[str, Any] = {}
    for name in ("output", "query_bias", "key_bias", "value_bias", "score_bias", "sinks"):
        options[name] = p.get(name)
    for name in ("query", "key"):
        options[name + "_norm"] = norm_of(s, p, name + "_") if name + "_gain" in p else None
    for name in ("scale", "causal", "window", "mask", "softcap"):
        options[name] = getattr(s, name)
    rotary = None if s.rotary is None else hs.Rotary(*s.rotary)
    return hs.SelfAttention(p["query"], p["key"], p["value"], rotary=rotary, **options)


def of_self_attention(s: Setting, p: Weights, x: Tensor, radii: Tensor) -> Found:
    """Evaluate all bounds on self-attention."""
    f, R = self_attention(s, p), float(radii[0])
    on_ball = [upper(name, f, s.n, R) for name in ON_BALL] + [upper(name, f, R) for name in ANY_LENGTH]
    at_tokens = [upper(name, f, x) for name in AT_TOKENS]
    at_tokens += [upper(name, f, x / 2, 2.0) for name in LARGE_RADIUS]
    best = {"best": hs.bounds.best(f, length=s.n, radius=R).value}
    return together(*on_ball, *at_tokens, best), f(x)


def of_measure(s: Setting, p: Weights, x: Tensor, radii: Tensor) -> Found:
    """Evaluate the bounds on the mean-field map."""
    f = self_attention(s, p)
    return together(*(upper(name, f, float(radii[0])) for name in ANY_LENGTH)), None


def of_moving_tokens(s: Setting, p: Weights, x: Tensor, radii: Tensor) -> Found:
    """Evaluate the token-wise bounds."""
    f = self_attention(s, p)
    on_ball = upper("token_wise_ball_upper_bound", f, float(radii[0]))
    return together(on_ball, upper("token_wise_upper_bound", f, x)), f(x)


def of_norm_and_attention(s: Setting, p: Weights, x: Tensor, radii: Tensor) -> Found:
    """Evaluate the bounds on attention after a norm layer."""
    f, norm = self_attention(s, {k: v for k, v in p.items() if k not in ("gain", "shift")}), norm_of(s, p, "")
    at = {f"{name} at X": value for name, value in upper("pre_norm_upper_bound", f, norm, s.n, x).items()}
    return together(upper("pre_norm_upper_bound", f, norm, s.n), at), f(norm(x))


def of_errors(s: Setting, p: Weights, z: Tensor, radii: Tensor) -> Found:
    """Evaluate the bounds on the effect of errors of keys and values."""
    f = self_attention(s, {name: t for name, t in p.items() if name != "tokens"})
    sizes = [r.reshape(1, 1, 1) if s.box else float(r) for r in (radii[0], radii[-1])]
    keys, values = (size if float(size) > 0 else None for size in sizes)
    found = hs.bounds.kv_error_upper_bound(f, p["tokens"], keys=keys, values=values)
    change = change_by_errors(Floats, s, p, z)
    share = float((torch.linalg.vector_norm(change, dim=1) / found.tokens).nan_to_num(0.0).max())
    by_token = {"kv_error_upper_bound, each token": float(change.norm()) / share} if share > 0 else {}
    return {"kv_error_upper_bound": found.value, **by_token}, None


def of_three(s: Setting, p: Weights, z: Tensor, radii: Tensor) -> Found:
    """Evaluate the bounds on LipschitzNorm as a function of queries, keys and values."""
    names = ("lipschitz_norm", "lipschitz_norm_upper_bound")
    return together(*(upper(name, s.n, s.memory_n) for name in names)), None


def of_vector(s: Setting, p: Weights, x: Tensor, radii: Tensor) -> Found:
    """Evaluate the bound on the softmax."""
    return upper("softmax_upper_bound", s.scale), None


def of_norm_layer(s: Setting, p: Weights, x: Tensor, radii: Tensor) -> Found:
    """Evaluate the bound on the norms of the outputs of a norm layer."""
    norm = norm_of(s, p, "")
    return {"norm_radius": hs.bounds.norm_radius(norm)}, norm(x)


LAYERS = {
    "softmax": hs.nn.SoftmaxAttention,
    "query-key norm": hs.nn.QueryKeyNormAttention,
    "sigmoid": hs.nn.SigmoidAttention,
    "L2": hs.nn.L2Attention,
    "cosine": hs.nn.CosineAttention,
    "Sinkhorn": hs.nn.SinkhornAttention,
    "LipschitzNorm": hs.nn.LipschitzNormAttention,
}


def of_layer(s: Setting, p: Weights, x: Tensor, radii: Tensor) -> Found:
    """Evaluate the bounds on a layer of hs.nn, also of the layer with constant 1."""
    R = math.inf if s.free else float(radii[0])
    options: dict[str, Any] = {"length": s.n, "radius": None if s.free else R, "dtype": torch.float64}
    options["mask"] = ~s.seen if s.masking == "fixed" else s.masking
    options["bias"] = "value_bias" in p
    options |= {"temperature": s.scale, "eps": s.eps} if s.form in ("cosine", "query-key norm") else {}
    options |= {"gain": s.gain} if s.form == "cosine" else {}
    options |= {"shift": s.shift} if s.form == "sigmoid" else {}
    layer, divided = (LAYERS[s.form](s.d, s.heads, **options, **more) for more in ({}, {"constant": 1.0}))
    of_all = {"in_proj_weight": torch.cat([p[name].flatten(0, 1) for name in MATRICES[:3] if name in p])}
    if "output" in p:
        of_all["out_proj.weight"] = p["output"]
    if options["bias"] and s.form == "L2":
        of_all["value_bias"] = p["value_bias"].flatten()
    elif options["bias"]:
        of_all["in_proj_bias"] = torch.cat([p[name + "_bias"].flatten() for name in MATRICES[:3]])
    for one in (layer, divided):
        one.load_state_dict(one.state_dict() | of_all)
        one.requires_grad_(False)
    added = None
    if s.masking in ("any", "additive"):
        added = p["score_bias"][0] if "score_bias" in p else torch.zeros(s.n, s.n, dtype=torch.float64)
        added = added.masked_fill(~s.seen, -math.inf)
    out, scaled = (one(x, need_weights=False, attn_mask=added)[0] for one in (layer, divided))
    bound = layer.lipschitz_bound(s.n, R)
    found = {bound.name: bound.value}
    if float(out.norm()) > 0:
        found["constant = 1"] = float((out * out).sum() / (out * scaled).sum())
    if s.heads == 1 and s.masking == "none":
        if s.form == "L2":
            for name in ("l2_attention", "l2_attention_upper_bound"):
                found |= upper(name, p["query"], p["value"], p["output"], s.n)
        if s.form == "cosine" and not options["bias"]:
            parts, size = [p[name][0] for name in MATRICES[:3]], torch.linalg.matrix_norm(p["output"], 2)
            for name in ("scaled_cosine", "scaled_cosine_upper_bound"):
                one = upper(name, *parts, s.n, temperature=s.scale, gain=s.gain, eps=s.eps)
                found |= {name: float(size) * value * (1 + 1e-14) for name, value in one.items()}
        if s.form == "Sinkhorn":
            found |= upper("sinkhorn", self_attention(s, p), R)
    return found, out


# ---- kinds of attention


@dataclass(frozen=True)
class Kind:
    """A kind of attention: how its cases are drawn, its map, its bounds, and the norm of the truth."""

    words: str
    bounds: Callable[..., Found] = of_self_attention
    forward: Callable[..., Any] = attention
    form: str = "softmax"
    norm: str = "spectral"  # "token-wise", or "size" for the size of the output itself


KINDS = {
    "one head": Kind(""),
    "one head, biases": Kind("biases"),
    "causal": Kind("causal"),
    "causal, biases": Kind("causal biases"),
    "windows and masks": Kind("masked biases"),
    "grouped heads": Kind("heads biases"),
    "grouped heads, masks": Kind("heads biases masked"),
    "rotary": Kind("rotary biases"),
    "rotary, grouped heads, masks": Kind("rotary heads biases masked"),
    "norms, one head": Kind("norms biases masked"),
    "norms of each head": Kind("norms heads biases masked"),
    "norms of all heads": Kind("norms whole heads masked"),
    "soft cap": Kind("cap biases masked"),
    "sinks": Kind("sinks biases masked"),
    "added biases (ALiBi, T5), one head": Kind("added masked"),
    "added biases (ALiBi, T5), heads, causal": Kind("added heads causal"),
    "switches combined": Kind("some"),
    "after a norm layer": Kind("norm-first heads biases masked", of_norm_and_attention, after_norm),
    "mean field": Kind("measure", of_measure),
    "mean field, biases": Kind("measure biases", of_measure),
    "causal mean field": Kind("measure causal", of_measure),
    "causal mean field, biases": Kind("measure causal biases", of_measure),
    "token-wise, one head": Kind("biases masked", of_moving_tokens, norm="token-wise"),
    "token-wise, heads": Kind("heads biases masked", of_moving_tokens, norm="token-wise"),
    "errors of keys and values": Kind("errors some", of_errors, change_by_errors, "errors", "size"),
    "layer: softmax": Kind("layer masked", of_layer),
    "layer: query-key norm": Kind("layer masked", of_layer, form="query-key norm"),
    "layer: sigmoid": Kind("layer masked", of_layer, form="sigmoid"),
    "layer: L2": Kind("layer masked", of_layer, form="L2"),
    "layer: scaled cosine": Kind("layer masked", of_layer, form="cosine"),
    "layer: Sinkhorn": Kind("layer masked", of_layer, form="Sinkhorn"),
    "layer: LipschitzNorm": Kind("layer masked", of_layer, form="LipschitzNorm"),
    "L2, one head alone": Kind("layer alone", of_layer, form="L2"),
    "scaled cosine, one head alone": Kind("layer alone", of_layer, form="cosine"),
    "Sinkhorn, one head alone": Kind("layer alone", of_layer, form="Sinkhorn"),
    "LipschitzNorm of Q, K, V": Kind("", of_three, lipschitz_norm, "LipschitzNorm of Q, K, V"),
    "softmax of a vector": Kind("", of_vector, softmax_alone, "softmax of a vector"),
    "norm layer": Kind("norm-first", of_norm_layer, lone_norm, "norm layer", "size"),
}


# ---- the truth, and its ascent


def scales(ns: Any, p: dict[str, Any]) -> tuple[Any, Any] | None:
    """Factors of the rows and columns of the Jacobian of a map of measures, in W₂."""
    if "log_weights" in p:
        root = ns.exp(p["log_weights"] / 2)
        return root, 1 / root
    return None


def jacobian(kind: Kind, s: Setting, p: dict[str, Any], x: Tensor) -> Tensor:
    """Return the dense Jacobian (rows, width, rows, width) of one case."""
    J: Tensor = torch.func.jacfwd(lambda t: kind.forward(Floats, s, p, t))(x)
    found = scales(Floats, p)
    return J if found is None else J * found[0][:, None, None, None] * found[1][:, None]


def moved(kind: Kind, s: Setting, p: dict[str, Any], x: Any, u: Any, v: Any) -> Tensor:
    """⟨u, J v⟩, or ⟨u, f(x)⟩ for the size of the output."""
    if kind.norm == "size":
        return (u * kind.forward(Floats, s, p, x)).sum()
    found = scales(Floats, p)
    if found is not None:
        u, v = u * found[0][:, None], v * found[1][:, None]
    return (u * torch.func.jvp(lambda t: kind.forward(Floats, s, p, t), (x,), (v,))[1]).sum()


def truth(kind: Kind, s: Setting, p: dict[str, Any], x: Tensor) -> tuple[Tensor, ...]:
    """Return the constant at the tokens of each case, and directions u and v that attain it."""
    if kind.norm == "size":
        y = torch.func.vmap(lambda p, x: kind.forward(Floats, s, p, x))(p, x)
        size = torch.linalg.vector_norm(y, dim=(1, 2))
        return size, y / size.clamp(min=1e-300)[:, None, None], torch.zeros_like(x)
    J = torch.func.vmap(lambda p, x: jacobian(kind, s, p, x))(p, x)
    if kind.norm == "spectral":
        U, S, V = torch.linalg.svd(J.flatten(3).flatten(1, 2), full_matrices=False)
        return S[:, 0], U[:, :, 0].reshape(J.shape[:3]), V[:, 0].reshape(x.shape)
    # For a fixed u the best tangents are e_j = J_ijᵀu / |J_ijᵀu|; for fixed tangents, u is along Σ J_ij e_j.
    u = torch.linalg.svd(J.flatten(3), full_matrices=False)[0][..., 0]
    for _ in range(20):
        pulled = torch.einsum("biajc,bia->bijc", J, u)
        e = pulled / torch.linalg.vector_norm(pulled, dim=3, keepdim=True).clamp(min=1e-300)
        sums = torch.einsum("biajc,bijc->bia", J, e)
        size = torch.linalg.vector_norm(sums, dim=2)
        u = sums / size.clamp(min=1e-300)[..., None]
    best, members = size.argmax(1), torch.arange(len(x))
    of_row = torch.zeros_like(u)
    of_row[members, best] = u[members, best]
    return size[members, best], of_row, e[members, best]


Point = tuple[Weights, Tensor, Tensor, Tensor]  # weights, tokens, truth, u


def ascent(kind: Kind, s: Setting, begin: tuple[Any, ...], steps: int, look: int) -> tuple[Point, Point]:
    """Ascend log truth by Adam; return the best point of each case, and the points of the step ``look``."""
    raw, size, z, radius = begin
    leaves = [t.requires_grad_() for t in (*raw.values(), z)]
    adam = torch.optim.Adam(leaves, lr=0.1)
    best: Point | None = None
    for step in range(steps + 1):
        adam.param_groups[0]["lr"] = 0.1 * (1 - step / (steps + 1)) + 0.005
        p = weights_of(s, raw, size)
        x = z * radius[..., None]
        held = {name: t.detach() for name, t in p.items()}
        value, u, v = truth(kind, s, held, x.detach())
        point = (held, x.detach(), value, u)
        better = value > (-1 if best is None else best[2])
        best = point if best is None else select(better, point, best)
        if step == look:
            way = point
        adam.zero_grad()
        objective = torch.func.vmap(lambda p, x, u, v: moved(kind, s, p, x, u, v))(p, x, u, v)
        objective.abs().clamp(min=1e-300).log().sum().backward()
        for t in leaves:
            if t.grad is not None:
                t.grad.nan_to_num_(0.0, 0.0, 0.0)
        adam.step()
        with torch.no_grad():
            if s.box:
                z.clamp_(-1.0, 1.0)
            elif not s.free:
                z /= (torch.linalg.vector_norm(z, dim=2, keepdim=True) * (1 + 1e-15)).clamp(min=1)
    assert best is not None
    return best, way


def select(better: Tensor, one: Point, other: Point) -> Point:
    """Take each case from one point or the other."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(better.reshape(-1, *(1 for _ in a.shape[1:])), a, b)

    weights = {name: pick(one[0][name], other[0][name]) for name in one[0]}
    return weights, pick(one[1], other[1]), pick(one[2], other[2]), pick(one[3], other[3])


def exact_truth(kind: Kind, s: Setting, p: Weights, x: Tensor, u: Tensor) -> Any:
    """Return the constant of one case with 40 digits, from central differences with 80 digits."""
    with mp.workdps(80):
        weights, at, h = {name: Exact.array(t) for name, t in p.items()}, Exact.array(x), mp.mpf(10) ** -25
        if kind.norm == "size":
            return mp.sqrt((kind.forward(Exact, s, weights, at) ** 2).sum())
        found = scales(Exact, weights)
        columns = []
        for place in itertools.product(range(x.shape[0]), range(x.shape[1])):
            step = np.zeros_like(at)
            step[place] = h
            ends = [kind.forward(Exact, s, weights, t) for t in (at + step, at - step)]
            column = (ends[0] - ends[1]) / (2 * h)
            if found is not None:
                column = column * found[0][:, None] * found[1][place[0]]
            columns.append(column)
        J = np.stack(columns)  # (columns, rows, width)
        if kind.norm == "token-wise":
            pulled = (J * Exact.array(u)).sum(axis=(1, 2)).reshape(x.shape)
            lengths = [mp.sqrt(total) for total in (pulled**2).sum(axis=1)]
            return sum(lengths) / mp.sqrt((Exact.array(u) ** 2).sum())
        matrix = mp.matrix(J.reshape(len(columns), -1).tolist())
    with mp.workdps(40):
        return max(mp.svd_r(matrix, compute_uv=False))


# ---- the judgement


class Tally:
    """What was found for one kind of attention."""

    def __init__(self, name: str) -> None:
        self.name, self.kind = name, KINDS[name]
        self.ascents = self.points = 0
        self.ratios: dict[str, list[float]] = defaultdict(list)
        self.exceeded: list[str] = []
        self.apart = self.float_error = 0.0  # our output and the library's; truth in float64 and in 40 digits
        # Heaps of the cases nearest to a bound on a ball (False) and to a bound at the tokens (True).
        self.nearest: dict[bool, list[Any]] = {False: [], True: []}
        self.recomputed: set[int] = set()

    def judge(self, s: Setting, point: Point, radius: Tensor, every: int, keep: int) -> None:
        """Evaluate the bounds at the points of every so many cases, and keep the nearest."""
        for i in range(0, BATCH, every):
            p, x, value = {name: t[i] for name, t in point[0].items()}, point[1][i], float(point[2][i])
            bounds, output = self.kind.bounds(s, p, x, radius[i])
            assert bounds, f"{self.name}: no bound applies to {s}"
            assert math.isfinite(value), f"{self.name}: the truth is {value} at {s}"
            self.points += 1
            if output is not None:
                own = self.kind.forward(Floats, s, p, x)
                self.apart = max(self.apart, float((own - output).norm() / (own.norm() + 1e-9)))
            ratios = {name: value / bound if bound > 0 else math.inf for name, bound in bounds.items()}
            for name, ratio in ratios.items():
                self.ratios[name].append(ratio)
            entry = (self.points, (s, p, x, point[3][i]), value, bounds)
            # The truth in float64 has rounding errors, so that 40 digits decide. No bound gets an allowance.
            if max(ratios.values()) > 1:
                self.recompute(entry)
            for local, heap in self.nearest.items():
                some = [ratio for name, ratio in ratios.items() if (name in LOCAL) == local]
                if some:
                    (heapq.heappush if len(heap) < keep else heapq.heappushpop)(heap, (max(some), *entry))

    def recompute(self, entry: Any) -> None:
        """Compute the truth of one case with 40 digits, and compare it with each bound."""
        number, (s, p, x, u), value, bounds = entry
        if number in self.recomputed:
            return
        self.recomputed.add(number)
        exact = exact_truth(self.kind, s, p, x, u)
        self.float_error = max(self.float_error, abs(float((exact - value) / exact)) if exact else 0.0)
        for name, bound in bounds.items():
            if exact > bound:
                weights = {key: t.tolist() for key, t in p.items()}
                words = f"{name} is {bound!r}, the truth {mp.nstr(exact, 20)}: {s}, {weights}, {x.tolist()}"
                self.exceeded.append(words)
                print(f"EXCEEDED, {self.name}: {words}", flush=True)


def row(kind: str, bound: str, tallies: list[Tally]) -> dict[str, Any]:
    """Return the ratios of truth and one bound in numbers."""
    ratios = np.concatenate([tally.ratios.get(bound, []) for tally in tallies])
    over = sum(words.startswith(f"{bound} is") for tally in tallies for words in tally.exceeded)
    numbers = [float(q) for q in np.quantile(ratios, (0.5, 0.9, 1.0))]
    found = {"kind": kind, "bound": bound, "points": len(ratios), "exceeded": over}
    return found | dict(zip(("median", "p90", "largest"), numbers, strict=True))


def judged(name: str, cases: int, options: argparse.Namespace) -> Tally:
    """Ascend ``cases`` cases of one kind, and judge the bounds on them."""
    tally, rng = Tally(name), random.Random(f"{name} {options.seed}")
    for _ in range(math.ceil(cases / BATCH)):
        s, shapes = drawn(rng, tally.kind.words, tally.kind.form)
        begin = begun(rng, s, shapes)
        best, way = ascent(tally.kind, s, begin, options.steps, rng.randrange(options.steps))
        tally.ascents += BATCH
        tally.judge(s, way, begin[3], 4, options.exact // 2)
        tally.judge(s, best, begin[3], 1, options.exact // 2)
    for entry in itertools.chain(*tally.nearest.values()):
        tally.recompute(entry[1:])
    return tally


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return a table of ratios of truth and bound."""
    lines = [
        "| attention | bound | points | exceeded | median | 90th percentile | largest |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in rows:
        # Rounded down, so that 1 stands for a bound that is attained up to rounding.
        numbers = " | ".join(
            f"{math.floor(1000 * one[key]) / 1000:.3f}" for key in ("median", "p90", "largest")
        )
        lines.append(
            f"| {one['kind']} | `{one['bound']}` | {one['points']} | {one['exceeded']} | {numbers} |"
        )
    return "\n".join(lines) + "\n"


def sharpest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each kind the bound on the ball and the bound at the tokens nearest to the truth."""
    found: dict[tuple[str, bool], dict[str, Any]] = {}
    for one in rows:
        place = (one["kind"], one["bound"] in LOCAL)
        if one["bound"] != "best" and (place not in found or one["median"] > found[place]["median"]):
            found[place] = one
    return list(found.values())


def main() -> None:
    """Judge what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = ("ascents of all kinds together", "of each ascent", "cases of a kind with 40 digits")
    for name, number, help_words in zip(("cases", "steps", "exact"), (10660, 50, 20), words, strict=True):
        parser.add_argument(f"--{name}", type=int, default=number, help=f"{help_words} (default: {number})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=[], help="only kinds whose name has one of these words")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in KINDS if not options.kinds or any(word in name for word in options.kinds)]
    began, tallies = time.perf_counter(), []
    for name in names:
        tally = judged(name, math.ceil(options.cases / len(names)), options)
        tallies.append(tally)
        nearest = max((max(ratios), bound) for bound, ratios in tally.ratios.items())
        digits = f"{len(tally.recomputed)} cases with 40 digits, float64 off by {tally.float_error:.1e}"
        print(
            f"{name}: {tally.ascents} ascents, {tally.points} points, {len(tally.exceeded)} exceeded, "
            f"nearest {nearest[0]:.4f} ({nearest[1]}); {digits}, outputs apart {tally.apart:.1e}, "
            f"{time.perf_counter() - began:.0f} s",
            flush=True,
        )
    rows = [row(tally.name, bound, [tally]) for tally in tallies for bound in sorted(tally.ratios)]
    bounds = sorted({one["bound"] for one in rows})
    pooled = [row(f"kinds: {sum(b in tally.ratios for tally in tallies)}", b, tallies) for b in bounds]
    for title, some in {"Nearest bounds": sharpest(rows), "All kinds": pooled, "Everything": rows}.items():
        print(f"\n{title}\n\n{markdown(some)}")
    seen = {bound.split(",")[0].removesuffix(" at X") for bound in bounds}
    public = {name for name in hs.bounds.__all__ if name[0].islower()}
    print("Functions of hs.bounds that no kind has judged:", ", ".join(sorted(public - seen)))
    ascents, exact = sum(tally.ascents for tally in tallies), sum(len(tally.recomputed) for tally in tallies)
    exceeded = [words for tally in tallies for words in tally.exceeded]
    minutes = (time.perf_counter() - began) / 60
    print(
        f"{ascents} ascents, {exact} cases with 40 digits, {len(exceeded)} exceeded, {minutes:.0f} minutes."
    )
    if options.json:
        numbers = {
            "ascents": ascents,
            "exact": exact,
            "minutes": minutes,
            "rows": rows + pooled,
            "exceeded": exceeded,
        }
        options.json.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    raise SystemExit(bool(exceeded))


if __name__ == "__main__":
    main()
