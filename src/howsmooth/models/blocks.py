"""How a recorded layer arranges residual connection and norms around its attention.

With X the attention's input, A its output and H the input of the norm that gave X, the block's value is
looked for among what the layer shows later: α∘B + λ∘C with B = H or X, and C = A or N₂(A) for a norm N₂ that
is given A alone. What the recorded numbers confirm is a hypothesis only: whoever gives the map out holds it
against the layer again, on other tokens, at ``Block.value_at``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from howsmooth.attention import Compose, LayerNorm, LayerScale, Residual, RMSNorm, TokenMap
from howsmooth.models.recording import LayerRecord, ModuleCall, is_linear, is_norm
from howsmooth.models.tolerance import one_operation, precision, relative_error, tolerance

__all__ = ["Block", "Reading", "read_block", "token_norm"]


@dataclass(frozen=True, eq=False)
class Reading:
    """Where a layer shows a value: at the first call of a module after the attention's output projection.

    ``side`` is ``"input"`` for the module's first tensor argument, ``"output"`` for its result (the first
    tensor of it). If ``less`` is there, the output of its own first call is to be subtracted: a layer that
    adds two branches at once shows the sum with the first alone nowhere else.
    """

    module: nn.Module
    side: Literal["input", "output"]
    less: nn.Module | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """The layout of a layer up to the input of what follows its attention.

    ``map`` is None if no sum of residual and attention was found; ``obstacle`` then says why. Otherwise
    ``map``, at the input H that ``pre_norm`` was last given before the attention (None: at X), equals what
    ``value_at`` says.
    """

    #: ``post-norm``, ``pre-norm``, ``sandwich norms`` (H + N₂(A(N(H)))), ``norm of the branch`` (X + N₂(A)),
    #: ``parallel`` (pre-norm, with another branch added at once), ``no norm``; followed, after a comma, by
    #: ``layer scale``, ``scaled residual`` or ``residual after the norm`` (N(H) + A(N(H))). Empty if unknown.
    layout: str
    map: TokenMap | None
    obstacle: str
    pre_norm: nn.Module | None = None  # its input is the layer's input H; None: H is X itself
    next_norm: nn.Module | None = None  # the norm that is given the sum, or gives it out
    value_at: Reading | None = None


@dataclass(frozen=True, eq=False)
class _Sum:
    """base + branch with their factors; None is one."""

    base: Tensor | None = None
    branch: Tensor | None = None

    @property
    def words(self) -> str:
        """What to add to the name of a layout."""
        if self.base is None and self.branch is None:
            return ""
        one = self.base is None and self.branch is not None and self.branch.numel() > 1
        return ", layer scale" if one else ", scaled residual"

    def around(self, branch: TokenMap) -> TokenMap:
        """X ↦ base∘X + branch∘f(X) for f = ``branch``."""
        ones = torch.ones(branch.d, dtype=branch.dtype, device=branch.device)
        factor = None
        if self.base is not None or self.branch is not None:
            factor = ones * (1.0 if self.branch is None else self.branch)
            factor = factor if self.base is None else factor / self.base
        inner = Residual(branch if factor is None else Compose(LayerScale(factor), branch))
        return inner if self.base is None else Compose(LayerScale(ones * self.base), inner)


@dataclass(frozen=True, eq=False)
class _Target:
    """A value of the layer that may be the sum."""

    value: Tensor
    reading: Reading
    call: ModuleCall | None  # whose input it is; None: the layer's end
    less: Tensor | None = None  # what else the value holds


def read_block(record: LayerRecord, attention: TokenMap, output: ModuleCall) -> Block:
    """Tell the layout from the sums that the recorded numbers confirm.

    Parameters
    ----------
    record
        The layer.
    attention
        Its attention as a map, with output projection.
    output
        The call that gave the attention's output: of its output projection, a member of ``record.after``,
        or of a module around that.

    """
    x, branch = record.x, None if output.output is None else _like(output.output, record.x)
    if branch is None or attention.d_out != attention.d:
        return Block("", None, "its tokens change their dimension")
    later = _later(record, output)
    pre = next((c for c in reversed(record.before) if is_norm(c.module) and _equal(c.output, x)), None)
    hidden = None if pre is None or pre.inputs is None else _like(pre.inputs, x)
    bases = [x] if hidden is None else [hidden, x]
    branches: list[tuple[Tensor, ModuleCall | None]] = [(branch, None), *_norms_of(branch, later)]
    for target, base, (_, branch_norm), total in _sums(record, later, bases, branches):
        after = None if branch_norm is None else _norm_map(branch_norm)
        if branch_norm is not None and after is None:
            return Block("", None, _no_norm(branch_norm))
        f = attention if after is None else Compose(after, attention)
        return _arranged(record, f, _Found(target, total, base is hidden, after is not None, pre), later)
    return Block("", None, _obstacle(later, branch, hidden, x))


@dataclass(frozen=True, eq=False)
class _Found:
    """A sum that was found, and what it is made of."""

    target: _Target
    total: _Sum
    of_hidden: bool  # the residual is H, not X
    branch_norm: bool
    pre: ModuleCall | None


def _arranged(record: LayerRecord, branch: TokenMap, found: _Found, later: list[ModuleCall]) -> Block:
    """Build the block's map: which norm is before the attention, and which after the sum."""
    target, pre, total = found.target, found.pre, found.total
    call, reading = target.call, target.reading
    following = call if call is not None and is_norm(call.module) else None
    next_norm = None if following is None else following.module
    if found.of_hidden and pre is not None:
        norm = _norm_map(pre)
        if norm is None:
            return Block("", None, _no_norm(pre))
        layout = "sandwich norms" if found.branch_norm else "pre-norm"
        if target.less is not None and _in_parallel(record, found, later):
            layout = "parallel"
        layout += total.words
        return Block(layout, total.around(Compose(branch, norm)), "", pre.module, next_norm, reading)
    side = "output" if following is None else _carries_on(record, following, later)
    if following is not None and side == "output":
        norm = _norm_map(following)
        if norm is None:
            return Block("", None, _no_norm(following))
        block = Compose(norm, total.around(branch))
        at = Reading(following.module, "output")
        return Block("post-norm" + total.words, block, "", None, following.module, at)
    if following is not None and side is None:
        return Block("", None, f"what is added to the output of {following.name} was not recognised")
    if pre is not None:
        norm = _norm_map(pre)
        if norm is None:
            return Block("", None, _no_norm(pre))
        layout = ("sandwich norms" if found.branch_norm else "pre-norm") + total.words
        block = Compose(total.around(branch), norm)
        return Block(layout + ", residual after the norm", block, "", pre.module, next_norm, reading)
    layout = "norm of the branch" if found.branch_norm else "no norm" if following is None else "pre-norm"
    return Block(layout + total.words, total.around(branch), "", None, next_norm, reading)


# ---------------------------------------------------------------- finding the sum


def _sums(
    record: LayerRecord,
    later: list[ModuleCall],
    bases: list[Tensor],
    branches: list[tuple[Tensor, ModuleCall | None]],
) -> Iterator[tuple[_Target, Tensor, tuple[Tensor, ModuleCall | None], _Sum]]:
    """Yield the sums that the numbers confirm, the simplest first."""
    targets = list(_targets(record, later))
    pairs = [(base, branch) for branch in branches for base in bases]
    for target in targets:
        for base, branch in pairs:
            if _is_sum(target, base, branch[0], _Sum()):
                yield target, base, branch, _Sum()
    # Factors only where a layer is known to show its sum: at its norms, and at its end.
    targets = [t for t in targets if t.less is None and (t.call is None or is_norm(t.call.module))]
    for target in targets:
        for base, branch in pairs:
            total = _scaled(record, target, base, branch[0])
            if total is not None:
                yield target, base, branch, total


def _targets(record: LayerRecord, later: list[ModuleCall]) -> Iterator[_Target]:
    """Yield the inputs of later modules, the layer's output, and this less what a later module adds to it."""
    firsts = list({id(call.module): call for call in reversed(later)}.values())[::-1]
    for call in firsts:
        value = None if call.inputs is None else _like(call.inputs, record.x)
        if value is not None:
            yield _Target(value, Reading(call.module, "input"), call)
    end = None if record.output is None else _like(record.output, record.x)
    if end is None:
        return
    root = record.layer.root
    yield _Target(end, Reading(root, "output"), None)
    for call in firsts:
        other = None if call.output is None else _like(call.output, record.x)
        if other is not None:
            yield _Target(end, Reading(root, "output", call.module), None, other)


def _is_sum(target: _Target, base: Tensor, branch: Tensor, total: _Sum) -> bool:
    """Whether the value is this sum to rounding, and would not be without the branch."""
    terms = [base if total.base is None else total.base * base]
    if target.less is not None:
        terms.append(target.less)
    added = branch if total.branch is None else total.branch * branch
    if not _adds_up([*terms, added], target.value):
        return False
    return bool((added == 0).all()) or not _adds_up(terms, target.value)


def _adds_up(terms: list[Tensor], value: Tensor) -> bool:
    """Whether value = Σ terms, each entry to the rounding of its own sum."""
    allowed = one_operation(precision(value.dtype)) * torch.stack(terms).abs().sum(dim=0)
    return bool(((sum(terms[1:], terms[0]) - value).abs() <= allowed).all())


def _scaled(record: LayerRecord, target: _Target, base: Tensor, branch: Tensor) -> _Sum | None:
    """Find factors: a parameter of the layer, else two numbers by least squares."""
    root, d = record.layer.root, base.shape[-1]
    for parameter in root.parameters():
        if parameter.numel() == d:
            factor = parameter.detach().reshape(d).to(base.dtype)
            if not bool(factor.any()):
                continue
            for total in (_Sum(branch=factor), _Sum(base=factor)):
                if _is_sum(target, base, branch, total) and bool((factor != 0).all()):
                    return _Sum(*(None if f is None else f.clone() for f in (total.base, total.branch)))
    return _two_numbers(root, target, base, branch)


def _two_numbers(root: nn.Module, target: _Target, base: Tensor, branch: Tensor) -> _Sum | None:
    """Find α and λ with value = α·base + λ·branch."""
    terms = torch.stack([base.double().flatten(), branch.double().flatten()], dim=1)
    wanted = target.value.double().flatten()
    if terms.shape[0] < 8:  # too few numbers to confirm what is fitted to them
        return None
    fitted = torch.linalg.lstsq(terms, wanted[:, None]).solution.flatten()
    allowed = one_operation(precision(base.dtype)) * max(float(wanted.abs().max()), 1e-300)

    def off(factors: Tensor) -> float:
        return float((terms @ factors - wanted).abs().max())

    parts = (fitted * terms.abs().amax(dim=0)).abs()
    if off(fitted) > allowed or float(parts.min()) <= allowed:
        return None
    # A number that the layer keeps, or one, is the factor itself; the fit has the rounding of the sum.
    known = [1.0, *(float(v) for v in vars(root).values() if isinstance(v, int | float) and v)]
    for i in range(2):
        nearest = min(known, key=lambda v: abs(v - float(fitted[i])))
        snapped = fitted.clone()
        snapped[i] = nearest
        if off(snapped) <= allowed:
            fitted = snapped
    alpha, scale = (None if f == 1.0 else base.new_tensor(f) for f in fitted.tolist())
    return None if alpha is None and scale is None else _Sum(alpha, scale)


def _carries_on(
    record: LayerRecord, following: ModuleCall, later: list[ModuleCall]
) -> Literal["input", "output"] | None:
    """Tell what the layer adds its second branch to: the norm's output (post-norm), or the norm's input.

    A post-norm layer and a pre-norm layer without its first norm, as the first of ModernBERT, both give
    X + A to the next norm.
    """
    rest = later[_index(later, following) + 1 :]
    ends = [c.inputs for c in rest if is_norm(c.module)] + [record.output]
    sums = [s for end in ends if end is not None and (s := _like(end, record.x)) is not None]
    outputs = [c.output for c in rest if (is_linear(c.module) or is_norm(c.module)) and c.output is not None]
    branches = [b for output in outputs if (b := _like(output, record.x)) is not None]
    readings: list[tuple[Literal["input", "output"], Tensor | None]] = [
        ("output", following.output),
        ("input", following.inputs),
    ]
    if record.output is not None and _equal(following.output, record.output):
        return "output"
    for scaled in (False, True):
        for side, tokens in readings:
            value = None if tokens is None else _like(tokens, record.x)
            if value is None:
                continue
            for total in sums:
                at = _Target(total, Reading(following.module, side), None)
                for branch in branches:
                    plain = _is_sum(at, value, branch, _Sum())
                    if plain or (scaled and _scaled(record, at, value, branch) is not None):
                        return side
    return None


def _in_parallel(record: LayerRecord, found: _Found, later: list[ModuleCall]) -> bool:
    """Whether what follows is given what the attention was given, not what it gave."""
    pre = found.pre
    given = [t for t in (record.x, None if pre is None else pre.inputs) if t is not None]
    return any(
        (tokens := _like(call.inputs, record.x)) is not None and any(_equal(tokens, t) for t in given)
        for call in [*record.before, *later]
        if call.inputs is not None and (pre is None or call is not pre)
    )


def _norms_of(branch: Tensor, later: list[ModuleCall]) -> Iterator[tuple[Tensor, ModuleCall]]:
    """Yield what norms make of the attention's output alone, and these."""
    for call in later:
        if is_norm(call.module) and call.inputs is not None and call.output is not None:
            tokens, value = _like(call.inputs, branch), _like(call.output, branch)
            if tokens is not None and value is not None and torch.equal(tokens, branch):
                yield value, call


def _obstacle(later: list[ModuleCall], branch: Tensor, hidden: Tensor | None, x: Tensor) -> str:
    """Say why no sum was found."""
    following = next((c for c in later if is_norm(c.module) and c.inputs is not None), None)
    if following is None or following.inputs is None:
        return "no norm follows its attention, and its output is not the sum of residual and attention"
    target = _like(following.inputs, x)
    what = "is not X + attention(X)" if hidden is None else "is not H + attention(norm(H))"
    if target is not None and _adds_up([branch], target):
        what = "is the attention's output alone, and the sum with the residual was not found"
    elif target is not None and hidden is not None and _adds_up([hidden], target):
        what = "is the layer's own input: the attention is parallel to what follows, or too small beside it"
    return f"the input of its next norm ({following.name}) {what}"


# ---------------------------------------------------------------- calls and tensors


def _later(record: LayerRecord, output: ModuleCall) -> list[ModuleCall]:
    """Return the calls that ended after the attention's output was there."""
    index = next((i for i, c in enumerate(record.after) if c is output or c.module is output.module), -1)
    return record.after[index + 1 :]


def _index(calls: list[ModuleCall], call: ModuleCall) -> int:
    return next(i for i, other in enumerate(calls) if other is call)


def _like(tokens: Tensor, x: Tensor) -> Tensor | None:
    """Return tokens in the shape of X, which a model may have flattened; None if they are no such tokens."""
    if tokens.shape == x.shape:
        return tokens
    same = tokens.ndim > 0 and tokens.shape[-1] == x.shape[-1] and tokens.numel() == x.numel()
    return tokens.reshape(x.shape) if same else None


def _equal(a: Tensor | None, b: Tensor) -> bool:
    tokens = None if a is None else _like(a, b)
    return tokens is not None and torch.equal(tokens, b)


# ---------------------------------------------------------------- norms


def _no_norm(call: ModuleCall) -> str:
    return f"{call.name} ({type(call.module).__name__}) computes neither LayerNorm nor RMSNorm"


def token_norm(record: LayerRecord) -> LayerNorm | RMSNorm | None:
    """Return the norm whose outputs the attention's tokens are, or None if no norm gave them."""
    call = record.last_norm
    return _norm_map(call) if call is not None and _equal(call.output, record.x) else None


def _norm_map(call: ModuleCall) -> LayerNorm | RMSNorm | None:
    """Return the norm as a map, with the gain that it really applies; None if it is none that is known."""
    module, x, y = call.module, call.inputs, call.output
    if x is None or y is None or y.shape != x.shape:
        return None
    own = [p.detach().clone() for p in module.parameters()]
    if len(own) > 2 or any(p.shape != x.shape[-1:] or p.dtype != x.dtype for p in own):
        return None
    one = x.new_ones(x.shape[-1])
    hypotheses: list[LayerNorm | RMSNorm] = []
    for eps in _eps_of(module, x):
        gains = (own[0], 1 + own[0]) if own else (one,)  # Gemma and Nemotron store the gain minus one
        for gain in gains:
            hypotheses.append(LayerNorm(gain, own[1] if len(own) == 2 else None, eps))
            if len(own) < 2:
                hypotheses.append(RMSNorm(gain, eps))
    errors = [relative_error(norm(x), y) for norm in hypotheses]
    best = min(range(len(hypotheses)), key=errors.__getitem__)
    # transformers' RMSNorm classes compute in float32 whatever the dtype of the model.
    eps_used = precision(x.dtype, downcast=not isinstance(module, nn.LayerNorm))
    return hypotheses[best] if errors[best] <= tolerance(eps_used) else None


def _eps_of(module: nn.Module, x: Tensor) -> tuple[float, ...]:
    names = ("eps", "variance_epsilon", "epsilon")
    eps = next((value for name in names if (value := getattr(module, name, None)) is not None), None)
    if eps is not None:
        return (float(eps),)
    if isinstance(module, nn.RMSNorm):  # torch's own default
        return (torch.finfo(x.dtype).eps,)
    return (1e-5, 1e-6, 1e-8, 1e-12)  # OLMo's is written in its code
