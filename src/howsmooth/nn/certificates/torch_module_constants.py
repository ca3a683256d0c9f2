"""Lipschitz constants of PyTorch modules, by one rule for each class of modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from howsmooth.attention import LayerNorm, RMSNorm
from howsmooth.bounds import norm_radius, softmax_upper_bound
from howsmooth.nn.checks import norm_above
from howsmooth.rounding import above, times

__all__ = ["ModuleRow", "Reach", "Rule", "linear_reach", "rule_of"]


@dataclass(frozen=True)
class ModuleRow:
    """One row of the table of a certificate: the Lipschitz constant of one module.

    ``path`` and ``kind`` are the module's name in ``named_modules`` and that of its class; of an operation,
    its name with a number, and its name. ``constant`` is an upper bound on the Lipschitz constant on the
    tokens that can reach it, from ``source``. ``radius_in`` and ``radius_out`` bound the norms of input and
    output tokens, whose numbers are ``length_in`` and ``length_out``. Rows of ``level`` 0 are the factors of
    the model's constant. Rows inside a branch have one level more than the row of the
    residual or sum that the branch ends in, which follows them.
    """

    path: str
    kind: str
    level: int
    constant: float
    radius_in: float
    radius_out: float
    length_in: int
    length_out: int
    source: str


@dataclass(frozen=True)
class Reach:
    """Bounds on the Lipschitz constant of a module and on the norms of its output tokens, with the number of
    these tokens.

    ``rows`` are those of the module and of the modules inside it, in the order in which tokens pass through.
    """

    constant: float
    radius: float
    length: int
    source: str = 'modules of PyTorch, howsmooth documentation, "Enforce"'
    rows: tuple[ModuleRow, ...] = ()


# A rule takes a module and the length and radius of its input. If the module has no constant, the rule
# returns the reason as the rest of a sentence whose subject is the module.
Rule = Callable[[Any, int, float], Reach | str]


def rule_of(kind: type[nn.Module]) -> Rule | None:
    """Return the rule that bounds modules of a class. Return None if the class is unknown, or if it overrides
    the ``forward`` of a known class.
    """
    for base in kind.__mro__:
        rule = _RULES.get(base) or _RULES_BY_NAME.get(f"{base.__module__}.{base.__name__}")
        if rule is not None:
            return rule if kind.forward is base.forward else None  # type: ignore[attr-defined]
    return None


def linear_reach(module: nn.Linear | nn.Conv2d, length: int, radius: float) -> Reach:
    """Bound a linear layer, or a convolution with disjoint patches, which is linear in each patch."""
    norm = norm_above("weight", module.weight.flatten(1))
    shift = 0.0 if module.bias is None else norm_above("bias", module.bias[None])
    return Reach(norm, above(times(norm, radius) + shift, 8), length)


def _dropout(module: nn.Dropout, length: int, radius: float) -> Reach | str:
    if module.training and module.p > 0:
        return "drops numbers at random in training mode: call model.eval() first"
    return Reach(1.0, radius, length)


def _flatten(module: nn.Flatten, length: int, radius: float) -> Reach | str:
    if (module.start_dim, module.end_dim) != (1, -1):
        return "flattens other axes than start_dim=1 to end_dim=-1, those of tokens and their numbers"
    return Reach(1.0, above(math.sqrt(length) * radius, 8), 1)


def _sorting_of_torchlip(module: Any, length: int, radius: float) -> Reach:
    # The layer sorts along axis 1 and multiplies by its coefficient. On tokens axis 1 is the axis of the
    # tokens, so one token may get the largest numbers of all.
    constant = above(abs(float(module._coefficient_lip)), 8)
    return Reach(constant, above(times(constant, math.sqrt(length) * radius), 8), length)


def _softmax(module: nn.Softmax, length: int, radius: float) -> Reach | str:
    if module.dim != -1:
        return f"works along axis {module.dim}, not along dim=-1, the numbers of each token"
    half = softmax_upper_bound(1.0)
    return Reach(half.value, 1.0, length, half.source)


def _norm(module: nn.LayerNorm | nn.RMSNorm, length: int, radius: float) -> Reach | str:
    if len(module.normalized_shape) != 1:
        return f"normalises {len(module.normalized_shape)} axes together, not each token"
    (d,) = module.normalized_shape
    # For eps=None PyTorch takes the epsilon of the tokens' dtype. That of float64 is the smallest, so it
    # gives the largest constant.
    eps = torch.finfo(torch.float64).eps if module.eps is None else module.eps
    if not eps > 0:
        return f"has eps = {eps:g}, so it has no constant near tokens of length zero"
    given = module.weight, getattr(module, "bias", None)
    weight, bias = (None if t is None else t.detach().to("cpu", torch.float64) for t in given)
    gain = torch.ones(d, dtype=torch.float64) if weight is None else weight
    # The normalised token u has |u| = |h|/√(|h|² + dε) with |h| ≤ radius, so the ellipsoid of outputs is
    # smaller by the largest value of this factor.
    reach = 1.0 if math.isinf(radius) else radius / math.hypot(radius, math.sqrt(d * eps))
    scaled = gain * min(1.0, above(reach, 8))
    outputs: LayerNorm | RMSNorm
    # The derivative at zero is Γ/√ε, and ΓH/√ε with the centring matrix H; it has the largest norm.
    if isinstance(module, nn.LayerNorm):
        norm = norm_above("weight", gain[:, None] * (torch.eye(d, dtype=torch.float64) - 1 / d))
        outputs = LayerNorm(scaled, torch.zeros_like(gain) if bias is None else bias)
    else:
        norm, outputs = float(gain.abs().amax()), RMSNorm(scaled)
    return Reach(above(norm / math.sqrt(eps), 4 * d + 8), norm_radius(outputs), length)


# Rule for entrywise functions φ: ``slope`` is the largest |φ'|, and |φ(t)| ≤ ``growth`` |t|, by default with
# the slope. If φ(0) ≠ 0, the norm of output tokens depends on their dimension, which is not known here.
def _numbers_alone(slope: float | Callable[[Any], float], growth: float | None = None) -> Rule:
    def rule(module: Any, length: int, radius: float) -> Reach | str:
        if getattr(module, "inplace", False):
            return "overwrites its input, which other modules may still need (build it with inplace=False)"
        steepest = slope(module) if callable(slope) else slope
        if math.isnan(steepest):
            return "has settings for which no constant is known"
        longest = steepest if growth is None else growth
        reach = radius if longest == 1.0 else above(longest * radius, 8)
        return Reach(steepest, reach, length)

    return rule


# GELU: sup (t Φ(t))' = Φ(√2) + √2 φ(√2), attained at t = √2. For the approximation with tanh the supremum is
# 1.12900, rounded up here.
_GELU = {"none": 0.5 * (1 + math.erf(1)) + math.exp(-1) / math.sqrt(math.pi), "tanh": 1.1291}
# SiLU: sup (t σ(t))' = ½ + t/4 at the t with t tanh(t/2) = 2, which is t = 2.3993572805154677.
_SILU = 0.5 + 2.39935728051547 / 4
# Mish: sup (t tanh log(1 + eᵗ))' = 1.08850, attained at t = 1.4907, rounded up here.
_MISH = 1.0886
# PyTorch rounds 1/α in CELU and 1/6 in Hardsigmoid to float32 for tokens of any dtype.
_SINGLE = 1 + 2**-22

_RULES: dict[type, Rule] = {
    nn.Linear: linear_reach,
    nn.Dropout: _dropout,
    nn.Flatten: _flatten,
    nn.Softmax: _softmax,
    nn.LayerNorm: _norm,
    nn.RMSNorm: _norm,
    nn.LeakyReLU: _numbers_alone(lambda m: max(1.0, abs(m.negative_slope))),
    nn.PReLU: _numbers_alone(lambda m: max(1.0, float(m.weight.detach().abs().amax()))),
    nn.ELU: _numbers_alone(lambda m: max(1.0, abs(m.alpha))),
    nn.CELU: _numbers_alone(lambda m: _SINGLE if m.alpha > 0 else math.nan),
    nn.SELU: _numbers_alone(1.0507009873554805 * 1.6732632423543773),
    nn.Hardtanh: _numbers_alone(lambda m: 1.0 if m.min_val <= 0 <= m.max_val else math.nan),
    nn.Hardswish: _numbers_alone(1.5, 1.0),
    nn.GELU: _numbers_alone(lambda m: above(_GELU.get(m.approximate, math.nan), 8), 1.0),
    nn.SiLU: _numbers_alone(above(_SILU, 8), 1.0),
    nn.Mish: _numbers_alone(_MISH, 1.0),
    nn.Sigmoid: _numbers_alone(0.25, math.inf),
    nn.Hardsigmoid: _numbers_alone(_SINGLE / 6, math.inf),
    nn.LogSigmoid: _numbers_alone(1.0, math.inf),
}
for _kind in (nn.Identity, nn.ReLU, nn.ReLU6, nn.Tanh, nn.Softsign, nn.Tanhshrink):
    _RULES[_kind] = _numbers_alone(1.0)

# Layers of a package that is not imported here. Its linear maps are subclasses of nn.Linear.
_RULES_BY_NAME: dict[str, Rule] = {"deel.torchlip.modules.activation.GroupSort": _sorting_of_torchlip}
