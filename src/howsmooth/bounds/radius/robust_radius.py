"""``robust_radius``: how far tokens may move before a pretrained classifier can change its answer."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from howsmooth.bounds.radius.attack import attack_radius
from howsmooth.bounds.radius.network import Network
from howsmooth.bounds.radius.reading import embedded, read_classifier
from howsmooth.bounds.radius.result import RobustRadius
from howsmooth.bounds.radius.rounding import FUZZ, MissingRuleError
from howsmooth.bounds.radius.second_order import SecondOrder
from howsmooth.bounds.radius.third_order import ThirdOrder
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["robust_radius"]

_MOST_VARIABLES = 256
_BISECTIONS = 9
_SMALLEST = 1e-12
_CURVE = (0.0, 0.5, 0.75, 1.0, 1.25)


def robust_radius(
    model: object,
    inputs: Tensor | Mapping[str, Tensor],
    *,
    tokens: int | Sequence[int] | None = None,
    norm: float = 2,
    target: int | None = None,
    order: int | None = None,
    attack: bool = True,
) -> RobustRadius:
    """Return a radius within which a classifier's answer does not change, however the tokens move.

    The network is expanded around the input along its own partial Jacobians, to the second or the third
    order. The remainder of each stage is bounded token by token, head by head and neuron by neuron; no
    constants of layers are multiplied. All is computed in float64 and its rounding errors are enclosed, so
    that the radius holds for the network in real arithmetic with the stored weights, which float64 has
    exactly. What the rounding of float32 inference changes in the logits is outside of it.

    Parameters
    ----------
    model
        A transformers classifier of the BERT kind (post-norm layers with standard LayerNorm, GELU or tanh
        activation, a tanh pooler on the first token, a linear classifier), or a
        :class:`~howsmooth.bounds.radius.Network`. It is copied to float64 and evaluated without dropout.
    inputs
        The outputs of the embedding layer, (n, d) or (1, n, d); or a dict of the model's inputs with
        ``input_ids`` (1, n) without padding, which is embedded first. What moves are these embedded tokens.
    tokens
        Which tokens move: an index, several indices (moved jointly), or None for all tokens jointly.
    norm
        2: the Euclidean norm of all changes together. ``math.inf``: the largest change of an entry; the ball
        is then enclosed by the Euclidean one, √(number of entries) times larger.
    target
        The class that the answer must not become. None: any other class.
    order
        2 is fast; 3 reaches further and needs memory O(n d k²) for k moving entries, at most 256. None: 3 if
        k is at most 256 and 2 otherwise.
    attack
        Whether to also search the nearest change of the class by projected gradients.

    Returns
    -------
    RobustRadius
        The radius, its curve, the attack beside it, and where the margin is lost.

    Raises
    ------
    ArgumentError
        If an argument does not fit.
    NonFiniteError
        If the inputs are not finite.
    CertificateError
        If a module of the model has no remainder, or the stages do not reproduce its logits.

    References
    ----------
    Documentation page "A proved radius for a whole network".

    Examples
    --------
    >>> found = hs.bounds.robust_radius(classifier, embedded, tokens=3)  # doctest: +SKIP
    >>> found.radius, found.attack  # doctest: +SKIP
    (0.2259, 1.13)

    """
    began = time.perf_counter()
    network, x = _network(model, inputs)
    moved = _tokens(tokens, len(x))
    k = len(moved) * x.shape[1]
    if norm not in (2, math.inf):
        raise ArgumentError("norm", expected="2 or math.inf", got=repr(norm))
    if order is None:
        order = 3 if k <= _MOST_VARIABLES else 2
    if order not in (2, 3) or (order == 3 and k > _MOST_VARIABLES):
        raise ArgumentError(
            "order",
            expected=f"2, or 3 with at most {_MOST_VARIABLES} moving entries",
            got=f"{order!r} with {k} entries",
            remedy="Move fewer tokens, or take order=2.",
        )
    injection = torch.zeros(*x.shape, k, dtype=x.dtype)
    for place, token in enumerate(moved):
        entries = slice(place * x.shape[1], (place + 1) * x.shape[1])
        injection[token, :, entries] = torch.eye(x.shape[1], dtype=x.dtype)
    logits = network.logits(x)
    label = int(logits.argmax())
    rivals = sorted(_rivals(target, label, len(logits)), key=lambda c: -float(logits[c]))
    enclosed = network.rounding_enclosed
    try:
        radius, rival, model_of_margin = _weakest(network, x, injection, label, rivals, order, enclosed)
    except MissingRuleError:
        enclosed = False
        radius, rival, model_of_margin = _weakest(network, x, injection, label, rivals, order, enclosed)
    # The factor covers the roundings of root and quotient.
    scale = 1.0 if norm == 2 else math.sqrt(k) * (1 + FUZZ)
    at_radius = model_of_margin(max(radius, _SMALLEST))
    slope = float(model_of_margin.first.gradient.norm())
    margin = model_of_margin.first.margin
    first_order = margin / slope if slope > 0 else math.inf
    nearest = None
    if attack:
        direction = torch.zeros(len(logits), dtype=x.dtype)
        direction[label], direction[rival] = 1.0, -1.0
        start = max(radius, min(first_order, 1.0) / 4)
        nearest = attack_radius(network, x, injection, direction, start)
    points = [f * radius for f in _CURVE] if radius > 0 else []
    return RobustRadius(
        radius=radius / scale,
        order=order,
        tokens=tuple(moved),
        norm=norm,
        label=label,
        rival=rival,
        margin=margin,
        curve=tuple((e / scale, model_of_margin(max(e, _SMALLEST)).lower) for e in points),
        attack=nearest if norm == 2 else None,
        first_order=first_order if norm == 2 else margin / float(model_of_margin.first.gradient.abs().sum()),
        losses={
            **{s.name: float(loss) for s, loss in zip(network.stages, at_radius.stages, strict=True)},
            "rounding": at_radius.rounding,
        },
        rounding_enclosed=enclosed,
        polynomial_loss=at_radius.polynomial,
        seconds=time.perf_counter() - began,
    )


def _weakest(
    network: Network, x: Tensor, injection: Tensor, label: int, rivals: list[int], order: int, enclosed: bool
) -> tuple[float, int, SecondOrder | ThirdOrder]:
    """Return the smallest radius over all rivals, its rival, and the expansion of the margin against it."""
    expansion: type[SecondOrder] | type[ThirdOrder] = SecondOrder if order == 2 else ThirdOrder
    weakest: tuple[float, int, SecondOrder | ThirdOrder] | None = None
    for rival in rivals:
        functional = network.readout[label] - network.readout[rival]
        offset = float(network.offset[label] - network.offset[rival])
        margin = expansion(network, x, injection, functional, offset, enclosed)
        found = _largest(margin, math.inf if weakest is None else weakest[0])
        if weakest is None or found < weakest[0]:
            weakest = found, rival, margin
    assert weakest is not None
    return weakest


def _largest(margin: SecondOrder | ThirdOrder, most: float) -> float:
    """Return the largest ε, up to ``most`` and to 0.2 %, at which the margin's lower bound is positive."""
    if margin.first.margin <= 0:
        return 0.0
    low, high = 0.0, 0.05
    while high < most and margin(high).lower > 0:
        low, high = high, 2 * high
        if high > 1e6:
            return low
    if high >= most and margin(most).lower > 0:
        return most
    high = min(high, most)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if margin(middle).lower > 0:
            low = middle
        else:
            high = middle
    return low


def _network(model: object, inputs: Tensor | Mapping[str, Tensor]) -> tuple[Network, Tensor]:
    """Return the stages and the embedded tokens (n, d) in float64."""
    if isinstance(model, Network):
        return model, _embedded_tokens(inputs)
    module = getattr(model, "model", model) if not isinstance(model, nn.Module) else model
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            "model", expected="a transformers classifier or a Network", got=type(model).__name__
        )
    module = copy.deepcopy(module).to("cpu", torch.float64).eval().requires_grad_(False)
    x = embedded(module, inputs) if isinstance(inputs, Mapping) else inputs
    x = _embedded_tokens(x)
    return read_classifier(module, x), x


def _embedded_tokens(inputs: object) -> Tensor:
    expected = "embedded tokens (n, d) or (1, n, d) of a floating-point dtype"
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        got = f"{inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
        remedy = "Token ids go into a dict: {'input_ids': ids}."
        raise ArgumentError("inputs", expected=expected, got=got, remedy=remedy)
    x = inputs[0] if inputs.ndim == 3 and len(inputs) == 1 else inputs
    if x.ndim != 2 or not x.numel():
        raise ArgumentError("inputs", expected=expected, got=f"the shape {tuple(inputs.shape)}")
    if not bool(torch.isfinite(x).all()):
        raise NonFiniteError("inputs", expected="finite numbers", got="NaN or infinity")
    return x.detach().to("cpu", torch.float64)


def _tokens(tokens: int | Sequence[int] | None, n: int) -> list[int]:
    if tokens is None:
        return list(range(n))
    given = [tokens] if isinstance(tokens, int) else list(tokens)
    if not given or any(isinstance(t, bool) or not isinstance(t, int) or not -n <= t < n for t in given):
        raise ArgumentError("tokens", expected=f"indices from {-n} to {n - 1}, or None", got=repr(tokens))
    return sorted({t % n for t in given})


def _rivals(target: int | None, label: int, classes: int) -> list[int]:
    others = [c for c in range(classes) if c != label]
    if target is None:
        return others
    if isinstance(target, bool) or target not in others:
        raise ArgumentError(
            "target", expected=f"one of the other classes {others}, or None", got=repr(target)
        )
    return [target]
