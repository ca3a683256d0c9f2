"""A call of a module that can be made again, with other tokens in the place of X."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import Cache

from howsmooth.errors import CaptureError, reason
from howsmooth.models.tolerance import relative_error
from howsmooth.models.tracing.forward_trace import Call
from howsmooth.models.tracing.layer_trace import bound_arguments

__all__ = ["Repeated", "first_tensor", "token_arguments"]


class _Tokens:
    """Stands where X stood among the arguments."""


_X = _Tokens()

# Two computations of the same differ by rounding, and those of different things by far more.
_SAME = 1e-3


class Repeated:
    """The call of a module, with X wherever it *was* X.

    Parameters
    ----------
    call
        The call as the model made it.
    x
        The tensor among its arguments that holds the tokens, of any shape (..., d).
    batch
        Number of sequences in the call.

    """

    def __init__(self, call: Call, x: Tensor, batch: int) -> None:
        self.name = call.name
        self.module = call.module
        self.x = x
        self.batch = batch
        self.batch_axis = _batch_axis(x, batch)
        self._output = call.output
        leaves, self._tree = tree_flatten((call.args, call.kwargs))
        self._leaves: list[Any] = [
            _X if leaf is x else None if isinstance(leaf, Cache) else leaf for leaf in leaves
        ]

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``x``, shaped as the tokens of the call, for X."""
        args, kwargs = tree_unflatten([x if leaf is _X else leaf for leaf in self._leaves], self._tree)
        return args, kwargs

    @property
    def x_name(self) -> str:
        """Name of the parameter that X is given for."""
        return next((name for name, value in self.named_arguments().items() if value is self.x), "")

    def named_arguments(self) -> dict[str, Any]:
        """Return the arguments at X by name."""
        return bound_arguments(self.module, *self.arguments(self.x))

    def __call__(self, x: Tensor) -> Any:
        """Call the module."""
        args, kwargs = self.arguments(x)
        return self.module(*args, **kwargs)

    def tokens(self) -> Tensor:
        """X as (batch, n, d)."""
        return as_tokens(self.x, self.batch, self.batch_axis)

    def shaped(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, n, d) in the shape of X."""
        if self.batch_axis == 1:
            return tokens.transpose(0, 1).reshape(self.x.shape)
        return tokens.reshape(self.x.shape)

    def rows(self, output: Tensor) -> Tensor:
        """Return a value of the module as (batch, n_out, d_out), which may have the sequences elsewhere."""
        axis = self.batch_axis
        if self.batch > 1 and output.ndim > 2 and output.shape[axis] != self.batch == output.shape[1 - axis]:
            axis = 1 - axis
        return as_tokens(output, self.batch, axis)

    def of_sequence(self) -> Repeated:
        """Return the call for the first sequence alone.

        Which arguments hold something for each sequence is not written anywhere: those are taken as such
        whose length is the number of sequences, then all of a multiple of it; the output decides.

        Raises
        ------
        CaptureError
            If neither gives what the call gave for the first sequence.

        """
        if self.batch == 1:
            return self
        wanted = None if self._output is None else first_tensor(self._output)
        why = "its output differs then"
        for multiples in (False, True):
            alone = self._sliced(multiples=multiples)
            try:
                output = first_tensor(alone(alone.x))
            except Exception as error:  # whatever a module raises for arguments that do not fit
                why = reason(error)
                continue
            if wanted is None:
                return alone
            rows, own = alone.rows(output), self.rows(wanted)[:1]
            if rows.shape == own.shape and relative_error(rows, own) < _SAME:
                return alone
        raise CaptureError(
            f"{self.name} ({type(self.module).__name__}) cannot be run on one sequence of the "
            f"{self.batch} alone ({why}); give one sequence at a time."
        )

    def _sliced(self, *, multiples: bool) -> Repeated:
        lengths = {self.batch, self.x.shape[self.batch_axis]}

        def one(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim <= self.batch_axis:
                return value
            size = value.shape[self.batch_axis]
            if size in lengths or (multiples and size > 0 and size % self.batch == 0):
                return value.narrow(self.batch_axis, 0, size // self.batch)
            return value

        alone = self._changed(one)
        alone.batch = 1
        return alone

    def on(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> Repeated:
        """Return the same call of a copy of the module, with its numbers in another dtype and place."""

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

        other = self._changed(moved)
        other.module = module
        return other

    def _changed(self, change: Callable[[Any], Any]) -> Repeated:
        """Return the same call with other arguments."""
        other = copy.copy(self)
        other.x, other._output = change(self.x), None
        other._leaves = [leaf if leaf is _X else change(leaf) for leaf in self._leaves]
        return other


def token_arguments(call: Call) -> Iterator[Tensor]:
    """Yield the arguments that may be the tokens: floating-point tensors with an axis before the last."""
    seen: set[int] = set()
    for value in call.arguments().values():
        leaves = value if isinstance(value, tuple | list) else [value]
        for leaf in leaves:
            if (
                isinstance(leaf, Tensor)
                and leaf.is_floating_point()
                and leaf.ndim >= 2
                and leaf.numel() > 0
                and id(leaf) not in seen
            ):
                seen.add(id(leaf))
                yield leaf


def as_tokens(x: Tensor, batch: int, batch_axis: int) -> Tensor:
    """Return a tensor (..., d) as (batch, n, d)."""
    if batch_axis == 1:
        x = x.transpose(0, 1)
    return x.reshape(batch, -1, x.shape[-1])


def _batch_axis(x: Tensor, batch: int) -> int:
    if batch == 1 or x.shape[0] == batch:
        return 0
    if x.ndim > 2 and x.shape[1] == batch:
        return 1
    if x.shape[0] % batch == 0:
        return 0
    raise CaptureError(
        f"Tokens of shape {tuple(x.shape)} cannot be told apart by sequence; give one sequence at a time."
    )


def first_tensor(output: Any) -> Tensor:
    """Return the output of a module, or the first tensor of it."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output
    found = next((v for v in values if isinstance(v, Tensor)), None) if isinstance(values, Iterable) else None
    if found is None:
        raise CaptureError(f"It gives {type(output).__name__} where a tensor is expected.")
    return found
