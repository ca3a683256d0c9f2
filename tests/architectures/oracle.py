"""The derivative of a model at one of its attention layers, taken from the model alone.

The tokens are put in place of what the layer was given, in the whole model; what comes out is read where
the model has it, at a module whose input or output holds the map's values. Nothing of capture is used but
the site's name, tokens and values. Finite differences check J E, reverse mode checks J^T U.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import howsmooth as hs
from howsmooth.jacobian import AutodiffJacobian, closed_form_jacobian
from howsmooth.jacobian.closed_form import has_closed_form
from tests._tiny_models import WithoutDowncast
from tests.architectures.build import SEED

_CLOSE = 1e-6
_SMALL = 1e-7  # a disagreement at which no smaller step is tried
_STEPS = (1e-3, 1e-4, 1e-5)  # of the tokens' norm; the sharper the softmax, the smaller the step must be


class NotFoundError(Exception):
    """The tokens or the values of a site are not seen anywhere in the model."""


class _Reached(BaseException):
    pass


@dataclass(frozen=True)
class _Place:
    """A tensor in a run of the model: which of the hooks' calls, which of its tensors, how it is arranged."""

    event: int
    index: int
    read: Callable[[Tensor], Tensor]  # to (batch, n, d)
    module: str = ""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _replaced(value: Any, old: Tensor, new: Tensor) -> Any:
    if value is old:
        return new
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, old, new) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, old, new) for key, item in value.items()}
    return value


def _arrangements(
    tensor: Tensor, like: Tensor, columns: slice | None
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Ways to see a tensor as ``like`` (batch, n, d)."""
    batch, n, _ = like.shape

    if columns is None and tensor.numel() == like.numel():
        yield lambda t: t.reshape(like.shape)
        if tensor.ndim == 3 and batch > 1:
            yield lambda t: t.transpose(0, 1).reshape(like.shape)
    if columns is not None:
        width, rest = divmod(tensor.numel(), batch * n)
        if not rest and width >= columns.stop:
            yield lambda t: t.reshape(batch, n, -1)[..., columns]
    if batch == 1 and columns is None and tensor.ndim >= 2 and tensor.numel() > like.numel():
        size = tensor.numel() // max(tensor.shape[0], 1)
        if size == like.numel():
            for b in range(tensor.shape[0]):
                yield lambda t, b=b: t[b : b + 1].reshape(like.shape)


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _CLOSE * b.abs().max())


class Probe:
    """A model and its inputs, run again with other tokens somewhere inside."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        for p in model.parameters():
            p.requires_grad_(False)

    @contextmanager
    def _hooked(self, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                stack.callback(
                    module.register_forward_pre_hook(_named(before, name), with_kwargs=True).remove
                )
                stack.callback(module.register_forward_hook(_named(after, name), with_kwargs=True).remove)
            yield

    def run(self, at: _Place | None, x: Tensor | None, seen: Callable[[int, str, str, Any], None]) -> None:
        """Run the model with the tokens ``x`` put in place, showing every module's inputs and outputs."""
        count = itertools.count()

        def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
            event = next(count)
            if at is not None and event == at.event and x is not None:
                old = next(itertools.islice(_tensors((args, kwargs)), at.index, None))
                positions = at.read(torch.arange(old.numel()).reshape(old.shape)).flatten()
                new = old.detach().flatten().index_copy(0, positions, x.flatten()).reshape(old.shape)
                args, kwargs = _replaced(args, old, new), _replaced(kwargs, old, new)
            seen(event, name, "in", (args, kwargs))
            return args, kwargs

        def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen(next(count), name, "out", output)

        torch.manual_seed(SEED)  # some models choose patches at random
        with WithoutDowncast(), self._hooked(before, after), suppress(_Reached):
            self.model(**self.inputs)

    def injection(self, name: str, x: Tensor, *, whole_layer: bool) -> _Place:
        """Where the site's tokens enter: its own module, or one around it."""
        parts = name.split(".")
        around = [".".join(parts[:k]) for k in range(len(parts), 0, -1)]
        layer = next((i for i, path in enumerate(around) if path.rsplit(".", 1)[-1].isdigit()), 0)
        found: dict[str, _Place] = {}

        def seen(event: int, path: str, side: str, value: Any) -> None:
            if side == "in" and path in around and path not in found:
                for index, tensor in enumerate(_tensors(value)):
                    for read in _arrangements(tensor, x, None):
                        if _close(read(tensor), x):
                            found[path] = _Place(event, index, read, path)
                            return

        with torch.no_grad():
            self.run(None, None, seen)
        order = around[layer:] if whole_layer else around
        for path in order:
            if path in found:
                return found[path]
        raise NotFoundError(f"the tokens of {name} are the input of no module around it")

    def tap(self, at: _Place, x: Tensor, y: Tensor, columns: slice | None = None) -> list[_Place]:
        """Where the model has the values ``y`` of the map at ``x``."""
        found: list[_Place] = []

        def seen(event: int, path: str, side: str, value: Any) -> None:
            if event <= at.event:
                return
            for index, tensor in enumerate(_tensors(value)):
                for read in _arrangements(tensor, y, columns):
                    if read(tensor).shape == y.shape and _close(read(tensor), y):
                        found.append(_Place(event, index, read, path))
                        break

        with torch.no_grad():
            self.run(at, x, seen)
        if not found:
            raise NotFoundError("the values of the map are the input or output of no module")
        return found

    def value(self, at: _Place, x: Tensor, tap: _Place) -> Tensor:
        """What is at ``tap`` if the tokens are ``x``."""
        taken: list[Tensor] = []

        def seen(event: int, path: str, side: str, value: Any) -> None:
            if event == tap.event:
                taken.append(tap.read(next(itertools.islice(_tensors(value), tap.index, None))))
                raise _Reached

        self.run(at, x, seen)
        if not taken:
            raise NotFoundError("with other tokens the model takes another way")
        return taken[0]


def _named(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda *args: hook(name, *args)


@dataclass(frozen=True)
class Agreement:
    """Largest relative disagreement of a site's Jacobian with the model's."""

    differences: float
    autodiff: float


def operator(site: hs.Site) -> Any:
    linearised = closed_form_jacobian if has_closed_form(site.map) else AutodiffJacobian
    return linearised(site.map, site.x)


def _relative(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp(min=1e-300))


def agreement(probe: Probe, site: hs.Site) -> Agreement:
    """Compare J E with central differences of the model, and J^T U with the model's reverse mode."""
    x = site.x
    with torch.no_grad():
        y = site.map(x)
    moved = site.scope == "residual"  # the model need not have this sum: the attention's own output is read
    whole = site.scope == "block"
    at = probe.injection(site.name, x, whole_layer=whole)
    columns = None if site.head is None else slice(site.head * y.shape[-1], (site.head + 1) * y.shape[-1])
    generator = torch.Generator().manual_seed(1)
    e = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    taps = probe.tap(at, x, y - x if moved else y, columns)
    if len({tap.module for tap in taps}) > 1:  # equal tokens are what attention makes of them
        other = x + 0.1 * x.abs().mean() * e
        with torch.no_grad():
            there = site.map(other) - (other if moved else 0.0)
            taps = [tap for tap in taps if _close(probe.value(at, other, tap), there)] or taps
    tap = taps[0]
    u = torch.randn(y.shape, generator=generator, dtype=x.dtype)
    jacobian = operator(site)
    je, jtu = jacobian.product(e), jacobian.adjoint_product(u)

    def values(t: Tensor) -> Tensor:
        out = probe.value(at, t, tap)
        return t + out if moved else out

    def slope(step: float) -> Tensor:
        h = step * float(torch.linalg.vector_norm(x) / torch.linalg.vector_norm(e))
        with torch.no_grad():
            wide = (values(x + h * e) - values(x - h * e)) / (2 * h)
            narrow = (values(x + h / 2 * e) - values(x - h / 2 * e)) / h
        return (4 * narrow - wide) / 3

    differences = math.inf
    for step in _STEPS:
        differences = min(differences, _relative(slope(step), je))
        if differences <= _SMALL:
            break
    leaf = x.detach().clone().requires_grad_(True)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        out = probe.value(at, leaf, tap)
    if not out.requires_grad:  # some models run their layers without gradients: forward mode goes through
        with sdpa_kernel(SDPBackend.MATH):
            return Agreement(differences, _relative(torch.func.jvp(values, (x,), (e,))[1], je))
    (gradient,) = torch.autograd.grad((out * u).sum(), leaf)
    gradient = gradient + u if moved else gradient
    return Agreement(differences, _relative(gradient, jtu))
