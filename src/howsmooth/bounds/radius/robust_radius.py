"""The function ``robust_radius``, which bounds how far tokens may move before a pretrained classifier can
change its answer.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from howsmooth.bounds.radius.attack import attack_radius
from howsmooth.bounds.radius.classifier import Classifier, check_logits
from howsmooth.bounds.radius.error_propagation import PartialJacobians, partial_jacobians
from howsmooth.bounds.radius.margin_expansion import FirstDerivatives, Losses, SecondOrder, ThirdOrder
from howsmooth.bounds.radius.transformer_layers import Attention, FeedForward, GatedFeedForward, Norm
from howsmooth.bounds.radius.transformer_network import Network, with_rounding
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.plain_modules import unwrapped, wrapped_parts
from howsmooth.rounding import limit_in_digits
from howsmooth.rounding.rounded_tensor import FUZZ, exact
from howsmooth.threads import renew_threads, with_fastest_threads

__all__ = ["NetworkAtInput", "Prepared", "RobustRadius", "robust_radius"]

_MOST_VARIABLES = 256
_MOST_STEPS = 40
_CLOSE = 2e-3  # relative accuracy of the search
_FARTHEST = 1e6
_SMALLEST = 1e-12
# The third order reaches about so much further than the second one.
_FURTHER = 1.6


@dataclass(frozen=True)
class RobustRadius:
    """A radius around one input within which the answer of a classifier provably does not change.

    It is proved for the network in real arithmetic with the stored weights, around the embedded tokens as
    they were given or computed in float64: every remainder is bounded, and so are all rounding errors of the
    computation.
    """

    #: Largest ε at which the margin's lower bound is positive, on the axis of ``norm``.
    radius: float
    #: Order of the Taylor expansion: 2 or 3.
    order: int
    #: The tokens that move, jointly.
    tokens: tuple[int, ...]
    #: 2 for the Euclidean norm of all changes together; infinity for the largest change of an entry.
    norm: float
    #: The class that does not change, and the class that bounds the radius; None for a functional.
    label: int | None
    rival: int | None
    #: Whether a target was given: the answer does not become it. Otherwise it becomes no other class.
    targeted: bool
    #: Difference of their logits at the input, or the functional minus its threshold.
    margin: float
    #: Pairs (ε, lower bound of the margin on the ball of radius ε): the radii that the search tried, and half
    #: of the radius.
    curve: tuple[tuple[float, float], ...]
    #: Size of the smallest change of the answer that projected gradients found; infinite if none, None if not
    #: asked for.
    attack: float | None
    #: The smallest margin of all classes, each divided by the norm of its gradient: the radius of a linear
    #: network with these gradients, no bound.
    first_order: float
    #: What each stage takes from the margin at ``radius``, in the order of the network; last, as "rounding",
    #: what residuals of rounding take beside their part in the stages. Empty if the time ended before a
    #: radius was proved.
    losses: dict[str, float] = field(repr=False)
    #: What the polynomial part takes from the margin at ``radius``.
    polynomial_loss: float = field(repr=False)
    #: Wall time of all this.
    seconds: float
    #: Whether ``seconds`` ended the search. Longer searches may then prove a larger radius.
    timed_out: bool

    def __float__(self) -> float:
        return self.radius

    def __str__(self) -> str:
        moved = f"token {self.tokens[0]}" if len(self.tokens) == 1 else f"{len(self.tokens)} tokens jointly"
        attack = ""
        if self.attack is not None:
            attack = f", smallest attack found {limit_in_digits(self.attack, 4, upper=True)}"
        norm = "l2" if self.norm == 2 else "l∞"
        first = "none" if math.isinf(self.first_order) else f"{self.first_order:.4g}"
        kept = f"class {self.label} does not become {self.rival}"
        if not self.targeted:
            kept = f"the answer stays class {self.label} (of all others, {self.rival} bounds the radius)"
        if self.label is None:
            kept = "the functional stays above its threshold"
        radius = limit_in_digits(self.radius, 4, upper=False)
        if not self.radius:
            kept = f"{'the time ended before a' if self.timed_out else 'no'} radius was proved"
        ended = " The time ended; a longer search may prove more." if self.timed_out and self.radius else ""
        lost = ""
        if self.losses:
            worst = max(self.losses, key=lambda name: self.losses[name])
            lost = f" Largest loss: {worst}, {self.losses[worst]:.3g} of a margin of {self.margin:.3g}."
        proved = ", proved" if self.radius else ""
        return (
            f"radius {radius} ({norm}, {moved}, order {self.order}{proved}): "
            f"{kept}{attack}; first-order radius {first} (no bound).{lost}{ended} {self.seconds:.1f} s."
        )


@with_fastest_threads
def robust_radius(
    model: object,
    inputs: Tensor | Mapping[str, Tensor],
    *,
    tokens: int | Sequence[int] | None = None,
    norm: float = 2,
    target: int | Tensor | None = None,
    threshold: float = 0.0,
    order: int | None = None,
    seconds: float | None = None,
    attack: bool = True,
    seed: int = 0,
    on_step: Callable[[int, int], None] | None = None,
) -> RobustRadius:
    """Return a radius within which the answer of a classifier does not change, however the tokens move.

    The network is expanded around the input along its own partial Jacobians, to the second or the third
    order. The remainder of each stage is bounded token by token, head by head and neuron by neuron; no
    constants of layers are multiplied. All is computed in float64 and its rounding errors are enclosed, so
    that the radius holds for the network in real arithmetic with the stored weights, which float64 has
    exactly. What the rounding of float32 inference changes in the logits is outside of it.

    Parameters
    ----------
    model
        Any module that computes logits from tokens by softmax attention, feed-forward layers, norms, linear
        maps and weighted means, such as a transformers classifier, or a module of one's own; or a
        :class:`~howsmooth.bounds.radius.Network`. It is read from the operations that it performs, not from
        names. It is copied to float64 and evaluated without dropout. It returns the logits (1, classes),
        as a tensor, as the first of a tuple, or as the attribute ``logits``.
    inputs
        A dict of the model's inputs for one sequence or image (``input_ids``, ``pixel_values``), with which
        it is called: ``model(**inputs)``. The tokens are computed from the first tensor in it, or from the
        one that the model's ``main_input_name`` names. What moves are the embedded tokens: the last tensor
        (1, n, d) before tokens meet. Or these tokens themselves, (n, d) or (1, n, d): a model of
        transformers has them in this place, another module is called with them, as ``model(tokens)``.
        A token behind a mask, on which the logits do not depend, cannot be moved.
    tokens
        Which tokens move: an index, several indices (moved jointly), or None for all tokens jointly.
    norm
        2: the Euclidean norm of all changes together. ``math.inf``: the largest change of an entry; the ball
        is then enclosed by the Euclidean one, √(number of entries) times larger.
    target
        The class that the answer must not become; None for any other class. Or a linear functional
        (classes,) of the logits, which is above ``threshold`` at the input and must stay so.
    threshold
        The threshold of a functional ``target``.
    order
        2 is fast; 3 reaches further and needs memory O(n d k²) for k moving entries, at most 256. None: first
        2, then 3 if k is at most 256, and the larger radius counts.
    seconds
        The search ends after so many seconds with the largest radius that is proved by then, possibly 0. The
        derivatives at its beginning and the step at work at its end (a part of a stage) are finished, which
        may take longer. The attack comes after. The result says whether the time ended. None: no limit.
    attack
        Whether to also search the nearest change of the answer by projected gradients.
    seed
        Seed of the starts of this search.
    on_step
        Called during the search for the radius with the number of steps that are done, and about how many
        there are to be.

    Returns
    -------
    RobustRadius
        The radius, its curve, the attack beside it, and where the margin is lost.

    Raises
    ------
    ArgumentError
        If an argument does not fit, such as tokens of another width than the model's.
    NonFiniteError
        If the inputs or the logits are not finite.
    CertificateError
        If the model performs an operation, from its embedded tokens to its logits, that belongs to no layer
        of a network, reads values of the tokens, or branches on them. The message names operation and module.

    See Also
    --------
    howsmooth.word_radii : one radius for each token of a text.

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
    _positive(seconds)
    at = NetworkAtInput(model, inputs)
    # At the first step of the search, the time may be over.
    left = None if seconds is None else max(seconds - (time.perf_counter() - began), 1e-9)
    how: dict[str, Any] = {"norm": norm, "target": target, "threshold": threshold, "order": order}
    found = at.radius(tokens, seconds=left, attack=attack, seed=seed, on_step=on_step, **how)
    return replace(found, seconds=time.perf_counter() - began)


class NetworkAtInput:
    """A classifier at one input, from which robust radii for changes of any chosen tokens can be computed.

    The partial Jacobians are computed once for all of these radii.

    Parameters
    ----------
    model, inputs
        As for :func:`robust_radius`.

    """

    def __init__(self, model: object, inputs: Tensor | Mapping[str, Tensor]) -> None:
        #: The embedded tokens (n, d).
        self.x: Tensor
        #: The tokens on which the logits depend: all but those behind a mask.
        self.reads: list[int]
        self.network, self.reads, self.x = _network(model, inputs)
        self.logits = self.network.logits(self.x[self.reads])

    @cached_property
    def jacobians(self) -> PartialJacobians:
        """The partial Jacobians of the network at the tokens that it reads."""
        return partial_jacobians(self.network, self.x[self.reads])

    def digest(self) -> str:
        """Return a SHA-256 hash of the network as it was read, and of the tokens."""
        tokens = hashlib.sha256(self.x.numpy().tobytes()).hexdigest()
        return hashlib.sha256(f"{self.network.digest()} {self.reads} {tokens}".encode()).hexdigest()

    def most_sensitive(self) -> int:
        """Return the token at which the gradient of the margin to the nearest other class is largest."""
        best, second = self.logits.topk(2).indices

        def margin(x: Tensor) -> Tensor:
            logits = self.network.logits(x)
            return logits[best] - logits[second]

        slopes = torch.func.grad(margin)(self.x[self.reads])
        return self.reads[int(slopes.norm(dim=1).argmax())]

    def radius(
        self,
        tokens: int | Sequence[int] | None = None,
        *,
        norm: float = 2,
        target: int | Tensor | None = None,
        threshold: float = 0.0,
        order: int | None = None,
        seconds: float | None = None,
        attack: bool = True,
        seed: int = 0,
        guess: float = 0.05,
        on_step: Callable[[int, int], None] | None = None,
    ) -> RobustRadius:
        """Return a proved radius for changes of the given tokens, with all other tokens fixed.

        ``guess`` is where the search for the radius begins, in the Euclidean norm. The other arguments are
        those of :func:`robust_radius`.
        """
        began = time.perf_counter()
        network, x = self.network, self.x[self.reads]
        moved = self._moved(tokens)
        k = len(moved) * x.shape[1]
        if norm not in (2, math.inf):
            raise ArgumentError("norm", expected="2 or math.inf", got=repr(norm))
        orders = (2, 3) if k <= _MOST_VARIABLES else (2,)
        if order is not None and order not in orders:
            raise ArgumentError(
                "order",
                expected=f"2, or 3 with at most {_MOST_VARIABLES} moving entries",
                got=f"{order!r} with {k} entries",
                remedy="Move fewer tokens, or take order=2.",
            )
        orders = orders if order is None else (order,)
        _positive(seconds)
        injection = torch.zeros(*x.shape, k, dtype=x.dtype)
        for place, token in enumerate(moved):
            entries = slice(place * x.shape[1], (place + 1) * x.shape[1])
            injection[self.reads.index(token), :, entries] = torch.eye(x.shape[1], dtype=x.dtype)
        label, directions = _directions(self.logits, target, threshold)
        # Each class is prepared and tried once, and some six radii are tried for the first one. The third
        # order has about two more steps for each token.
        of_third = 2 * len(x) * len(directions) if 3 in orders else 0
        steps = len(network.stages) * (len(orders) * (2 * len(directions) + 6) + of_third)
        clock = _Clock(began + (math.inf if seconds is None else seconds), steps, on_step)
        weakest = self._weakest(orders[0], directions, injection, guess, norm, clock)
        if len(orders) == 2 and weakest.radius > 0:
            further = self._weakest(3, directions, injection, _FURTHER * weakest.radius, norm, clock)
            weakest = max(weakest, further, key=lambda found: found.radius)
        over, clock.end = clock.over, math.inf
        radius, rival, order, first_order, margins = weakest
        losses, polynomial = dict[str, float](), 0.0
        if radius > 0 or not clock.ended:
            if radius == 0:  # what is lost near the input is said by the second order, too
                margins = _Margin(margins.first, 2, clock.check)
            at_radius = margins(max(radius, _SMALLEST))
            losses = {s.name: float(loss) for s, loss in zip(network.stages, at_radius.stages, strict=True)}
            losses["rounding"], polynomial = at_radius.rounding, at_radius.polynomial
        # The factor covers the roundings of root and quotient.
        scale = 1.0 if norm == 2 else math.sqrt(k) * (1 + FUZZ)
        nearest = None
        if attack:
            start = max(radius / scale, min(first_order, 1.0) / 4)
            functionals = torch.stack([functional for _, functional, _ in directions])
            offsets = torch.tensor([offset for *_, offset in directions], dtype=x.dtype)
            nearest = attack_radius(network, x, injection, functionals, offsets, start, norm=norm, seed=seed)
        if radius > 0 and not over:
            margins(radius / 2)  # the search may have looked near the radius alone
        return RobustRadius(
            radius=radius / scale,
            order=order,
            tokens=tuple(moved),
            norm=norm,
            label=label,
            rival=rival,
            targeted=target is not None,
            margin=margins.first.margin,
            curve=tuple((e / scale, lower) for e, lower in margins.curve()) if radius > 0 else (),
            attack=nearest,
            first_order=first_order,
            losses=losses,
            polynomial_loss=polynomial,
            seconds=time.perf_counter() - began,
            timed_out=clock.ended,
        )

    def _moved(self, tokens: int | Sequence[int] | None) -> list[int]:
        if tokens is None:
            return self.reads
        n, given = len(self.x), list(tokens) if isinstance(tokens, Sequence) else [tokens]
        if not given or any(isinstance(t, bool) or not isinstance(t, int) or not -n <= t < n for t in given):
            raise ArgumentError("tokens", expected=f"indices from {-n} to {n - 1}, or None", got=repr(tokens))
        found = sorted({t % n for t in given})
        if unread := sorted(set(found) - set(self.reads)):
            raise ArgumentError(
                "tokens",
                expected=f"tokens on which the logits depend: {self.reads}",
                got=f"{unread}, which are masked",
                remedy="They may move however far.",
            )
        return found

    def _weakest(
        self,
        order: int,
        directions: list[tuple[int | None, Tensor, float]],
        injection: Tensor,
        guess: float,
        norm: float,
        clock: _Clock,
    ) -> _Weakest:
        """Return the radius within which all given combinations of logits stay positive."""
        weakest: _Weakest | None = None
        first_order = math.inf
        for rival, direction, offset in directions:
            if weakest is not None and clock.over:  # a radius counts if it is proved for every class
                clock.ended = True
                return weakest._replace(radius=0.0)
            readout = with_rounding(self.network.readout, constant=False)
            constants = with_rounding(self.network.offset, constant=True)
            functional = torch.einsum("c,cnd->nd", exact(direction), readout)
            constant = (exact(direction) * constants).sum() + offset
            margin = _Margin(
                FirstDerivatives(self.jacobians, injection, functional, constant), order, clock.check
            )
            gradient = margin.first.gradient
            slope = float(gradient.norm() if norm == 2 else gradient.abs().sum())
            if slope > 0:
                first_order = min(first_order, margin.first.margin / slope)
            most = math.inf if weakest is None else weakest.radius
            found = _largest(margin, most, guess if weakest is None else most)
            if weakest is None or found < weakest.radius:
                weakest = _Weakest(found, rival, order, first_order, margin)
        assert weakest is not None
        return weakest._replace(first_order=first_order)


class _Weakest(NamedTuple):
    """The radius within which no class overtakes the predicted one, and the class that comes nearest."""

    radius: float
    rival: int | None
    order: int
    first_order: float
    margin: _Margin


class _OutOfTimeError(Exception):
    """The time for a search is over."""


class _Clock:
    """The time at which a search ends, whether it was ended by it, and the number of its steps."""

    def __init__(self, end: float, steps: int, on_step: Callable[[int, int], None] | None) -> None:
        self.end, self.ended = end, False
        self._done, self._steps, self._on_step = 0, steps, on_step

    @property
    def over(self) -> bool:
        return time.perf_counter() > self.end

    def check(self) -> None:
        if self.over:
            self.ended = True
            raise _OutOfTimeError
        renew_threads()
        self._done += 1
        if self._on_step is not None:
            self._on_step(self._done, max(self._steps, self._done + 1))


class _Margin:
    """A lower bound on the margin for |δ| ≤ ε as a function of ε, which keeps its results."""

    def __init__(self, first: FirstDerivatives, order: int, check: Callable[[], None]) -> None:
        self.first, self._kind, self._check = first, SecondOrder if order == 2 else ThirdOrder, check
        self._found: dict[float, Losses] = {}

    @cached_property
    def _expansion(self) -> SecondOrder:
        return self._kind(self.first, self._check)

    def __call__(self, epsilon: float) -> Losses:
        if epsilon not in self._found:
            self._found[epsilon] = self._expansion(epsilon)
        return self._found[epsilon]

    def curve(self) -> list[tuple[float, float]]:
        return sorted((e, found.lower) for e, found in self._found.items() if math.isfinite(found.lower))


def _directions(
    logits: Tensor, target: int | Tensor | None, threshold: float
) -> tuple[int | None, list[tuple[int | None, Tensor, float]]]:
    """Return the predicted class, and the combinations of logits that must stay positive: the rival class,
    factors of the logits, and a constant.
    """
    classes = len(logits)
    if isinstance(target, Tensor):
        if target.shape != logits.shape or not bool(torch.isfinite(target).all()):
            got = "NaN or infinity" if target.shape == logits.shape else f"the shape {tuple(target.shape)}"
            raise ArgumentError("target", expected=f"a class, or finite numbers ({classes},)", got=got)
        if not math.isfinite(threshold):
            raise ArgumentError("threshold", expected="a finite number", got=repr(threshold))
        functional = target.detach().to("cpu", torch.float64)
        if not threshold < (value := float(functional @ logits)) < math.inf:
            raise ArgumentError(
                "target",
                expected=f"a functional of the logits with a finite value above its threshold {threshold:g}",
                got=f"one of value {value:.4g} at the input",
                remedy="Give -target and -threshold for the radius within which it stays below."
                if value < threshold
                else "",
            )
        return None, [(None, functional, -float(threshold))]
    if threshold:
        got = f"{threshold!r} with the target {target!r}"
        raise ArgumentError("threshold", expected="0 unless the target is a functional", got=got)
    if classes == 1:
        raise ArgumentError(
            "target", expected="a functional, because the model has one logit", got=repr(target)
        )
    label = int(logits.argmax())
    others = sorted((c for c in range(classes) if c != label), key=lambda c: -float(logits[c]))
    if target is not None and (isinstance(target, bool) or target not in others):
        raise ArgumentError(
            "target",
            expected=f"one of the other classes {sorted(others)}, or None",
            got=repr(target),
            remedy="" if isinstance(target, int) else "A functional of the logits is a torch tensor.",
        )
    rivals = others if target is None else [target]
    unit = torch.eye(classes, dtype=logits.dtype)
    return label, [(rival, unit[label] - unit[rival], 0.0) for rival in rivals]


def _largest(margin: _Margin, most: float, guess: float) -> float:
    """Search from ``guess`` for the largest ε up to ``most`` at which the bound on the margin is positive.

    The bound is positive at the ε that is returned, which is 0 if none was found before the time was over.
    """
    whole = margin.first.margin
    if whole <= 0 or most <= 0:
        return 0.0
    proved, failed = list[_Tried](), list[_Tried]()
    epsilon = min(guess, most)
    for step in range(_MOST_STEPS):
        try:
            lower = margin(epsilon).lower
        except _OutOfTimeError:
            break
        # Far beyond the radius the bound is infinite or no number.
        loss = max((whole - lower) / whole, 1e-300) if math.isfinite(lower) else math.inf
        (proved if lower > 0 else failed).append(_Tried(epsilon, 1 / math.sqrt(loss)))
        if lower > 0 and (epsilon >= most or epsilon > _FARTHEST):
            break
        # What failed last is closest, too, since each ε lies between what was proved and what failed.
        expected = _expected(proved, failed, bisect=step > _MOST_STEPS // 3)
        if proved:
            last = proved[-1].epsilon
            beyond = failed[-1].epsilon if failed else math.inf
            if min(beyond, expected) <= (1 + _CLOSE) * last:
                break
            expected = max(expected, (1 + _CLOSE / 2) * last)
        epsilon = min(expected * (1 - _CLOSE / 4), most)
    return proved[-1].epsilon if proved else 0.0


class _Tried(NamedTuple):
    """A radius ε that the search has tried, and there 1/√loss, of the loss divided by the margin.

    It falls about linearly near the robust radius, where it is 1, and is 0 where the loss is infinite.
    """

    epsilon: float
    height: float


def _expected(proved: list[_Tried], failed: list[_Tried], bisect: bool) -> float:
    """Estimate the radius, to which the last entries of ``proved`` and ``failed`` are closest."""
    line = None
    if len(proved) > 1:
        (before, higher), (last, height) = proved[-2:]
        if higher > height:
            line = last + (height - 1) * (last - before) / (higher - height)
    if proved and failed:
        (low, above), (high, below) = proved[-1], failed[-1]
        if bisect:
            return (low + high) / 2
        if below == 0 and line is not None and line < high:
            return line
        return low + (above - 1) / (above - below) * (high - low)
    if proved:
        last, height = proved[-1]
        # Where little is lost, the loss is a low power of ε; near the radius it grows much faster.
        one = last * math.pow(height, 1 / 2 if height > 2 else 1 / 6)
        return min(one if line is None else line, 3 * last)
    last, height = failed[-1]
    if len(failed) == 1:
        return last * max(0.8, math.pow(height, 1 / 10))
    return last / 2


def _network(model: object, inputs: Tensor | Mapping[str, Tensor]) -> tuple[Network, list[int], Tensor]:
    """Return a model as a Network, the tokens that it reads and all embedded tokens (n, d), in float64."""
    if isinstance(model, Network):
        x = _embedded_tokens(inputs)
        _check_network(model, x)
        return model, list(range(len(x))), x
    module: Any = model if isinstance(model, nn.Module) else getattr(model, "model", model)
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            "model",
            expected="a classifier as a torch module, or a Network",
            got=type(model).__name__,
            remedy="hs.load_model(name, head=True) loads one by name or folder; hs.word_radii takes a name.",
        )
    module = module if isinstance(model, Prepared) else Prepared(module).model
    if isinstance(inputs, Mapping):
        floats = {name for name, t in inputs.items() if isinstance(t, Tensor) and t.is_floating_point()}
        given: Any = {name: t.double() if name in floats else t for name, t in inputs.items()}
    else:
        given = _embedded_tokens(inputs)
    classifier = Classifier.at(module, given)
    return (*classifier.network(), _embedded_tokens(classifier.place.tokens))


class Prepared:
    """A copy of a model in float64 and in evaluation mode, without wrappers and gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.model = copy.deepcopy(unwrapped(module))
        for parent, name, part in wrapped_parts(self.model):
            setattr(parent, name, part)
        for norm in self.model.modules():
            if isinstance(norm, nn.RMSNorm) and norm.eps is None:
                # PyTorch takes that of the dtype it computes with, which is float32 for half precision.
                dtype = torch.float32 if norm.weight is None else norm.weight.dtype
                norm.eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        self.model = self.model.to("cpu", torch.float64).eval().requires_grad_(False)


def _check_network(network: Network, x: Tensor) -> None:
    first = network.stages[0].map
    by_kind = {Norm: "gain", Attention: "query", FeedForward: "up", GatedFeedForward: "up"}
    weight: Tensor = getattr(first, by_kind[type(first)])
    if x.shape[1] != weight.shape[-1]:
        expected = f"embedded tokens (n, {weight.shape[-1]}) of the width of the model"
        raise ArgumentError("inputs", expected=expected, got=f"the shape {tuple(x.shape)}")
    check_logits(network.logits(x))


def _embedded_tokens(inputs: object) -> Tensor:
    expected = "embedded tokens (n, d) or (1, n, d) of a floating-point dtype"
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        got = f"{inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
        remedy = "Token ids go into a dict: {'input_ids': ids}."
        raise ArgumentError("inputs", expected=expected, got=got, remedy=remedy)
    x = inputs[0] if inputs.ndim == 3 and len(inputs) == 1 else inputs
    if x.ndim != 2 or not x.numel():
        remedy = "An image goes into a dict: {'pixel_values': image}." if inputs.ndim == 4 else ""
        got = f"the shape {tuple(inputs.shape)}"
        raise ArgumentError("inputs", expected=expected, got=got, remedy=remedy)
    if not bool(torch.isfinite(x).all()):
        raise NonFiniteError("inputs", expected="finite embedded tokens", got="NaN or infinity")
    return x.detach().to("cpu", torch.float64)


def _positive(seconds: float | None) -> None:
    if seconds is not None and not seconds > 0:
        raise ArgumentError("seconds", expected="a number > 0, or None", got=repr(seconds))
