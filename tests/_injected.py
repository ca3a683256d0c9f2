"""A model run whole, with other tokens at one of its modules: an oracle that knows nothing of capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests._tiny_models import WithoutDowncast


def _exchanged(values: Any, old: Tensor, new: Tensor) -> Any:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    kept = [(key, new if value is old else value) for key, value in items]
    return dict(kept) if isinstance(values, dict) else tuple(value for _, value in kept)


@contextmanager
def _hooks(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def injected(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    at: str,
    tap: str | None = None,
) -> Callable[[Tensor], Tensor]:
    """The output of the module ``tap`` as a function of the tokens X that ``at`` is given.

    X is the first floating-point argument of ``at``, wherever it stands.
    """
    owner, tapped = model.get_submodule(at), model.get_submodule(at if tap is None else tap)

    def run(x: Tensor) -> Tensor:
        taken: list[Tensor] = []

        def before(module: Any, args: Any, kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            old = next(v for v in given if isinstance(v, Tensor) and v.is_floating_point())
            new = x.reshape(old.shape)
            return _exchanged(args, old, new), _exchanged(kwargs, old, new)

        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            taken.append(output if isinstance(output, Tensor) else output[0])

        handles = (
            owner.register_forward_pre_hook(before, with_kwargs=True),
            tapped.register_forward_hook(after, with_kwargs=True),
        )
        with _hooks(*handles), WithoutDowncast():
            model(**inputs)
        return taken[0]

    return run


def central_difference(
    f: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor, h: float = 1e-5
) -> Tensor:
    """Derivative of ``f`` at ``x`` along ``direction``, by central differences."""
    with torch.no_grad():
        return (f(x + h * direction) - f(x - h * direction)) / (2 * h)
