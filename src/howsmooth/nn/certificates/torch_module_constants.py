"""Lipschitz constants of PyTorch modules, by one rule for each class of modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.attention import LayerNorm, RMSNorm
from howsmooth.bounds import norm_radius, softmax_upper_bound
from howsmooth.nn.upward_rounding import norm_above, rounded_up, times

__all__ = ["Reach", "Rule", "rule_of"]

_SOURCE = 'modules of PyTorch, howsmooth documentation, "Enforce"'


@dataclass(frozen=True)
class Reach:
    """The Lipschitz constant of a module, with the number and the largest norm of its output tokens.

    ``constant`` bounds its Lipschitz constant and ``radius`` the norms of its output tokens; ``length`` is
    the number of output tokens.
    """

    constant: float
    length: int
    radius: float
    source: str


# A rule takes a module and the length and radius of its input. If the module has no constant, the rule
# returns the reason as the rest of a sentence whose subject is the module.
Rule = Callable[[Any, int, float], Reach | str]


def rule_of(kind: type[nn.Module]) -> Rule | None:
    """Return the rule that computes the Lipschitz constant of modules of a given class.

    The result is None if no rule covers the class, or if the class replaces a ``forward`` that a rule covers.
    """
    for base in kind.__mro__:
        rule = _RULES.get(base) or _RULES_BY_NAME.get(f"{base.__module__}.{base.__name__}")
        if rule is not None:
            return rule if kind.forward is base.forward else None  # type: ignore[attr-defined]
    return None


def _linear(module: nn.Linear, length: int, radius: float) -> Reach:
    norm = norm_above("weight", module.weight)
    shift = 0.0 if module.bias is None else norm_above("bias", module.bias[None])
    return Reach(norm, length, rounded_up(times(norm, radius) + shift), _SOURCE)


def _identity(module: nn.Module, length: int, radius: float) -> Reach:
    return Reach(1.0, length, radius, _SOURCE)


def _dropout(module: nn.Dropout, length: int, radius: float) -> Reach | str:
    if module.training and module.p > 0:
        return "drops numbers at random in training mode: call model.eval() first"
    return Reach(1.0, length, radius, _SOURCE)


def _flatten(module: nn.Flatten, length: int, radius: float) -> Reach | str:
    if (module.start_dim, module.end_dim) != (1, -1):
        return "flattens other axes than start_dim=1 to end_dim=-1, those of tokens and their numbers"
    return Reach(1.0, 1, rounded_up(math.sqrt(length) * radius), _SOURCE)


def _sorting_of_torchlip(module: Any, length: int, radius: float) -> Reach:
    # The layer sorts along axis 1 and multiplies by its coefficient. On tokens axis 1 is the axis of the
    # tokens, so one token may get the largest numbers of all.
    constant = rounded_up(abs(float(module._coefficient_lip)))
    return Reach(constant, length, rounded_up(times(constant, math.sqrt(length) * radius)), _SOURCE)


def _softmax(module: nn.Softmax, length: int, radius: float) -> Reach | str:
    if module.dim != -1:
        return f"works along axis {module.dim}, not along dim=-1, the numbers of each token"
    half = softmax_upper_bound(1.0)
    return Reach(half.value, length, 1.0, half.source)


def _layer_norm(module: nn.LayerNorm, length: int, radius: float) -> Reach | str:
    if len(module.normalized_shape) != 1:
        return f"normalises {len(module.normalized_shape)} axes together, not each token"
    (d,) = module.normalized_shape
    gain = _numbers(module.weight, d, 1.0)
    shift = _numbers(module.bias, d, 0.0)
    # The derivative of LayerNorm at zero is ΓH/√ε with the centring matrix H; it has the largest norm.
    centred = gain[:, None] * (torch.eye(d, dtype=torch.float64) - 1 / d)
    return _norm(LayerNorm, norm_above("weight", centred), gain, shift, module.eps, length, radius)


def _rms_norm(module: nn.RMSNorm, length: int, radius: float) -> Reach | str:
    if len(module.normalized_shape) != 1:
        return f"normalises {len(module.normalized_shape)} axes together, not each token"
    gain = _numbers(module.weight, module.normalized_shape[0], 1.0)
    # For eps=None PyTorch takes the epsilon of the tokens' dtype. That of float64 is the smallest, so it
    # gives the largest constant.
    eps = torch.finfo(torch.float64).eps if module.eps is None else module.eps
    return _norm(RMSNorm, float(gain.abs().amax()), gain, None, eps, length, radius)


def _norm(
    kind: type[LayerNorm | RMSNorm],
    norm: float,
    gain: Tensor,
    shift: Tensor | None,
    eps: float,
    length: int,
    radius: float,
) -> Reach | str:
    if not eps > 0:
        return f"has eps = {eps:g}, so it has no constant near tokens of length zero"
    # The normalised token u has |u| = |h|/√(|h|² + dε) with |h| ≤ radius, so the ellipsoid of outputs is
    # smaller by the largest value of this factor.
    reach = 1.0 if math.isinf(radius) else radius / math.hypot(radius, math.sqrt(len(gain) * eps))
    scaled = gain * min(1.0, rounded_up(reach))
    outputs = LayerNorm(scaled, shift) if kind is LayerNorm else RMSNorm(scaled)
    return Reach(rounded_up(norm / math.sqrt(eps)), length, norm_radius(outputs), _SOURCE)


def _numbers(parameter: Tensor | None, d: int, default: float) -> Tensor:
    if parameter is None:
        return torch.full((d,), default, dtype=torch.float64)
    return parameter.detach().to("cpu", torch.float64)


# Rule for entrywise functions φ with φ(0) = 0: ``slope`` is the largest |φ'|, and |φ(t)| ≤ ``growth`` |t|.
def _numbers_alone(slope: Callable[[Any], float], growth: Callable[[Any], float] | None = None) -> Rule:
    def rule(module: Any, length: int, radius: float) -> Reach | str:
        if getattr(module, "inplace", False):
            return "overwrites its input, which other modules may still need (build it with inplace=False)"
        steepest = slope(module)
        if math.isnan(steepest):
            return "has settings for which no constant is known"
        longest = steepest if growth is None else growth(module)
        return Reach(
            steepest, length, radius if longest == 1.0 else rounded_up(times(longest, radius)), _SOURCE
        )

    return rule


# Rule for entrywise functions with φ(0) ≠ 0. The norm of their output tokens depends on the dimension, which
# is not known here, so the output radius is infinite.
def _not_through_zero(slope: float) -> Rule:
    return lambda module, length, radius: Reach(slope, length, math.inf, _SOURCE)


def _one(module: Any) -> float:
    return 1.0


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
    nn.Linear: _linear,
    nn.Identity: _identity,
    nn.Dropout: _dropout,
    nn.Flatten: _flatten,
    nn.Softmax: _softmax,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.ReLU: _numbers_alone(_one),
    nn.ReLU6: _numbers_alone(_one),
    nn.Tanh: _numbers_alone(_one),
    nn.Softsign: _numbers_alone(_one),
    nn.LeakyReLU: _numbers_alone(lambda m: max(1.0, abs(m.negative_slope))),
    nn.PReLU: _numbers_alone(lambda m: max(1.0, float(m.weight.detach().abs().amax()))),
    nn.ELU: _numbers_alone(lambda m: max(1.0, abs(m.alpha))),
    nn.CELU: _numbers_alone(lambda m: _SINGLE if m.alpha > 0 else math.nan),
    nn.SELU: _numbers_alone(lambda m: 1.0507009873554805 * 1.6732632423543773),
    nn.Hardtanh: _numbers_alone(lambda m: 1.0 if m.min_val <= 0 <= m.max_val else math.nan),
    nn.Hardswish: _numbers_alone(lambda m: 1.5, _one),
    nn.GELU: _numbers_alone(lambda m: rounded_up(_GELU.get(m.approximate, math.nan)), _one),
    nn.SiLU: _numbers_alone(lambda m: rounded_up(_SILU), _one),
    nn.Mish: _numbers_alone(lambda m: _MISH, _one),
    nn.Tanhshrink: _numbers_alone(_one),
    nn.Sigmoid: _not_through_zero(0.25),
    nn.Hardsigmoid: _not_through_zero(_SINGLE / 6),
    nn.LogSigmoid: _not_through_zero(1.0),
}

# Layers of a package that is not imported here. Its linear maps are subclasses of nn.Linear.
_RULES_BY_NAME: dict[str, Rule] = {"deel.torchlip.modules.activation.GroupSort": _sorting_of_torchlip}
