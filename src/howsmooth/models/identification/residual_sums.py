"""Detection of the sum of a residual and a branch among the inputs and outputs of the module calls of a
layer.

A sum is confirmed if every entry agrees up to the rounding of a few additions. If the residual alone agrees
as well, because the branch is too small, the sum is not confirmed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from howsmooth.attention import Compose, LayerScale, Residual, TokenMap
from howsmooth.models.identification.layer_trace import LayerTrace, ModuleCall
from howsmooth.models.tolerance import one_operation, precision
from howsmooth.models.tracing.recorder import is_linear, is_norm

__all__ = [
    "Factors",
    "Target",
    "ValueLocation",
    "adds_up",
    "find_sums",
    "is_sum",
    "like",
    "plain_sums",
    "same",
    "scaled_sum",
]


@dataclass(frozen=True, eq=False)
class ValueLocation:
    """The place of a tensor in a layer: the input or the output of a module that runs after the attention.

    ``side`` is ``"input"`` for the module's first tensor argument and ``"output"`` for the first tensor of
    its output. If ``less`` is a module, the output of its first call is subtracted: a layer that adds two
    branches at once has no tensor that is the sum of the residual and the first branch.
    """

    module: nn.Module
    side: Literal["input", "output"]
    less: nn.Module | None = None


@dataclass(frozen=True, eq=False)
class Factors:
    """The factors by which a layer multiplies its residual and its branch before it adds them.

    Each has shape (d,) or (), and None stands for 1.
    """

    base: Tensor | None = None
    branch: Tensor | None = None

    @property
    def layout_suffix(self) -> str:
        """Return a phrase, such as ", layer scale", that says how a layer scales its residual and branch."""
        if self.base is None and self.branch is None:
            return ""
        one = self.base is None and self.branch is not None and self.branch.numel() > 1
        return ", layer scale" if one else ", scaled residual"

    def around(self, branch: TokenMap) -> TokenMap:
        """Return the map that sends X to α∘X + λ∘branch(X), where ∘ is the entrywise product, and α and λ are
        the factors of the residual and of the branch.
        """
        # α∘X + λ∘f(X) = α∘(X + (λ/α)∘f(X))
        ones = torch.ones(branch.d, dtype=branch.dtype, device=branch.device)
        factor = None
        if self.base is not None or self.branch is not None:
            factor = ones * (1.0 if self.branch is None else self.branch)
            factor = factor if self.base is None else factor / self.base
        inner = Residual(branch if factor is None else Compose(LayerScale(factor), branch))
        return inner if self.base is None else Compose(LayerScale(ones * self.base), inner)


@dataclass(frozen=True, eq=False)
class Target:
    """A tensor of a traced layer that may be the sum of a residual and a branch."""

    value: Tensor
    reading: ValueLocation
    call: ModuleCall | None  # the call whose input it is; None for the layer's output
    less: Tensor | None = None  # the output of another branch that the value contains


def find_sums(
    trace: LayerTrace,
    later: list[ModuleCall],
    bases: list[Tensor],
    branches: list[tuple[Tensor, ModuleCall | None]],
) -> Iterator[tuple[Target, Tensor, tuple[Tensor, ModuleCall | None], Factors]]:
    """Yield the tensors of a layer that equal residual + branch up to rounding.

    Weighted sums of the two come last.

    Parameters
    ----------
    trace
        The traced layer.
    later
        The module calls after the output of the attention.
    bases
        Tensors that may be the residual.
    branches
        Tensors that may be the branch, each with the norm that computed it or None.

    Yields
    ------
    tuple
        The tensor that is the sum, the residual, the branch and the factors.

    """
    yield from plain_sums(trace, later, bases, branches)
    targets = list(_targets(trace, later, branches[0][0]))
    pairs = [(base, branch) for branch in branches for base in bases]
    # Factors are fitted only to inputs of norms and to the layer's output, where a sum is expected.
    targets = [t for t in targets if t.less is None and (t.call is None or is_norm(t.call.module))]
    for target in targets:
        for base, branch in pairs:
            total = scaled_sum(trace, target, base, branch[0])
            if total is not None:
                yield target, base, branch, total


def plain_sums(
    trace: LayerTrace,
    later: list[ModuleCall],
    bases: list[Tensor],
    branches: list[tuple[Tensor, ModuleCall | None]],
) -> Iterator[tuple[Target, Tensor, tuple[Tensor, ModuleCall | None], Factors]]:
    """Yield the tensors of a layer that equal residual + branch up to rounding, as :func:`find_sums`."""
    for target in _targets(trace, later, branches[0][0]):
        for branch in branches:
            for base in bases:
                if is_sum(target, base, branch[0], Factors()):
                    yield target, base, branch, Factors()


def _targets(trace: LayerTrace, later: list[ModuleCall], branch: Tensor) -> Iterator[Target]:
    """Yield tensors that may equal residual + branch: the inputs of modules after the attention, and the
    output of the layer.
    """
    firsts = list({id(call.module): call for call in reversed(later)}.values())[::-1]
    for call in firsts:
        known = is_linear(call.module) or is_norm(call.module)
        value = None if call.inputs is None or not known else like(call.inputs, branch)
        if value is not None:
            yield Target(value, ValueLocation(call.module, "input"), call)
    end = None if trace.output is None else like(trace.output, branch)
    if end is None:
        return
    root = trace.layer.root
    yield Target(end, ValueLocation(root, "output"), None)
    for call in firsts:
        other = None if call.output is None else like(call.output, branch)
        if other is not None:
            yield Target(end, ValueLocation(root, "output", call.module), None, other)


def is_sum(target: Target, base: Tensor, branch: Tensor, total: Factors) -> bool:
    """Return True if a tensor equals residual + branch up to rounding and is not the residual alone."""
    terms = [base if total.base is None else total.base * base]
    if target.less is not None:
        terms.append(target.less)
    added = branch if total.branch is None else total.branch * branch
    if not adds_up([*terms, added], target.value):
        return False
    return bool((added == 0).all()) or not adds_up(terms, target.value)


def adds_up(terms: list[Tensor], value: Tensor) -> bool:
    """Return True if the sum of given tensors equals another tensor in every entry, up to rounding."""
    allowed = one_operation(precision(value.dtype)) * torch.stack(terms).abs().sum(dim=0)
    return bool(((sum(terms[1:], terms[0]) - value).abs() <= allowed).all())


def scaled_sum(trace: LayerTrace, target: Target, base: Tensor, branch: Tensor) -> Factors | None:
    """Find factors α, λ for which a tensor equals α·residual + λ·branch, or return None if there are none.

    One factor is a parameter of the layer and the other equals 1, or both are numbers.
    """
    root, d = trace.layer.root, base.shape[-1]
    for parameter in root.parameters():
        if parameter.numel() == d:
            factor = parameter.detach().reshape(d).to(base.dtype)
            if not bool(factor.any()):
                continue
            for total in (Factors(branch=factor), Factors(base=factor)):
                if is_sum(target, base, branch, total) and bool((factor != 0).all()):
                    return Factors(*(None if f is None else f.clone() for f in (total.base, total.branch)))
    return _two_numbers(root, target, base, branch)


def _two_numbers(root: nn.Module, target: Target, base: Tensor, branch: Tensor) -> Factors | None:
    """Find numbers α, λ for which a tensor equals α·residual + λ·branch. Return None if there are none, or if
    both are 1.
    """
    terms = torch.stack([base.double().flatten(), branch.double().flatten()], dim=1)
    wanted = target.value.double().flatten()
    if terms.shape[0] < 8:  # too few entries to confirm a fit of two numbers
        return None
    fitted = torch.zeros_like(terms[0])
    for _ in range(2):  # the second solve corrects the rounding of the first
        fitted += torch.linalg.lstsq(terms, (wanted - terms @ fitted)[:, None]).solution.flatten()
    # Both terms must contribute more than the rounding error, or the fit says nothing about their factors.
    allowed = one_operation(precision(base.dtype)) * max(float(wanted.abs().max()), 1e-300)

    def off(factors: Tensor) -> float:
        return float((terms @ factors - wanted).abs().max())

    parts = (fitted * terms.abs().amax(dim=0)).abs()
    if off(fitted) > allowed or float(parts.min()) <= allowed:
        return None
    # The fit carries the rounding of the sum. If 1 or a number among the layer's attributes fits as well,
    # that number is the exact factor.
    known = [1.0, *(float(v) for v in vars(root).values() if isinstance(v, int | float) and v)]
    for i in range(2):
        nearest = min(known, key=lambda v: abs(v - float(fitted[i])))
        snapped = fitted.clone()
        snapped[i] = nearest
        if off(snapped) <= allowed:
            fitted = snapped
    alpha, scale = (None if f == 1.0 else base.new_tensor(f) for f in fitted.tolist())
    return None if alpha is None and scale is None else Factors(alpha, scale)


def like(tokens: Tensor, x: Tensor) -> Tensor | None:
    """Reshape tokens to the shape of another tensor ``x``, or return None if the dimensions or the numbers of
    tokens differ.

    A model may flatten tokens.
    """
    if tokens.shape == x.shape:
        return tokens
    fits = tokens.ndim > 0 and tokens.shape[-1] == x.shape[-1] and tokens.numel() == x.numel()
    return tokens.reshape(x.shape) if fits else None


def same(a: Tensor | None, b: Tensor) -> bool:
    """Return True if two tensors contain bitwise equal tokens."""
    tokens = None if a is None else like(a, b)
    return tokens is not None and torch.equal(tokens, b)
