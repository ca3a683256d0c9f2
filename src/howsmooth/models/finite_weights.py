"""Naming of a weight that is not finite, where it explains an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["naming_weights"]


@contextmanager
def naming_weights(module: nn.Module, path: str = "") -> Iterator[None]:
    """Turn an error of the ``with`` block into a NonFiniteError if a weight of the module is not finite.

    Errors of arguments stay. ``path`` is the name of the module in its model.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ArgumentError) and not isinstance(error, NonFiniteError):
            raise
        named = ((name, p) for name, p in module.named_parameters() if not p.is_meta)
        broken = next((name for name, p in named if not bool(p.isfinite().all())), None)
        if broken is None or (isinstance(error, NonFiniteError) and error.argument == "model"):
            raise
        raise NonFiniteError(
            "model",
            expected="finite weights",
            got=f"NaN or infinity in {path}{'.' * bool(path)}{broken}",
            remedy="Load weights that are finite, or measure the layers before alone.",
        ) from error
