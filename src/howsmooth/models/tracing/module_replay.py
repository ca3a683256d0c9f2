"""A module call of the forward pass that can be repeated with other tokens in place of its tokens X."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers.cache_utils import Cache

from howsmooth.errors import CaptureError, reason
from howsmooth.models.tolerance import relative_error
from howsmooth.watching import Call, bound_arguments

__all__ = ["ModuleReplay", "first_tensor", "token_arguments"]


# Largest relative difference between two computations of the same output: rounding is far below it, and
# outputs of a call with wrongly sliced arguments are far above.
_SAME = 1e-3


class ModuleReplay:
    """A module call of the forward pass that can be repeated with other tokens.

    Parameters
    ----------
    call
        The call as the model made it.
    x
        The argument that holds the tokens, of any shape (..., d). Wherever the same tensor object was passed,
        the new tokens take its place.
    batch
        Number of sequences in the call.
    memory
        In cross-attention the argument that holds the memory, which :meth:`with_memory` replaces, else None.

    """

    def __init__(self, call: Call, x: Tensor, batch: int, memory: Tensor | None = None) -> None:
        self.name = call.name
        self.module = call.module
        self.x = x
        self.memory = memory
        self.batch = batch
        self.batch_axis = _batch_axis(x, batch)
        self.output = call.result
        self._given = tree_map(
            lambda leaf: None if isinstance(leaf, Cache) else leaf, (call.args, call.kwargs)
        )

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the call, with ``x`` in place of the tokens X."""
        args, kwargs = tree_map(lambda leaf: x if leaf is self.x else leaf, self._given)
        return args, kwargs

    def with_memory(self, memory: Tensor) -> ModuleReplay:
        """Return the same call, for one sequence, with other tokens (n, d_memory) for the keys and values."""
        other, own = copy.copy(self), self.memory
        other.memory = memory if own is None else memory.reshape(own.shape)
        if own is not None:
            other._given = tree_map(lambda leaf: other.memory if leaf is own else leaf, self._given)
        return other

    @property
    def x_name(self) -> str:
        """The name of the argument that holds X, or "" if X lies inside another argument, such as a list."""
        return next((name for name, value in self.named_arguments().items() if value is self.x), "")

    def named_arguments(self) -> dict[str, Any]:
        """Return the original arguments of the call by the names of the module's parameters."""
        return bound_arguments(self.module, *self.arguments(self.x))

    def __call__(self, x: Tensor) -> Any:
        """Call the module with other tokens ``x`` of the same shape as in the original call."""
        args, kwargs = self.arguments(x)
        return self.module(*args, **kwargs)

    def tokens(self) -> Tensor:
        """Return the tokens X of the call in the shape (batch, n, d)."""
        return _as_tokens(self.x, self.batch, self.batch_axis)

    def shaped(self, tokens: Tensor) -> Tensor:
        """Return tokens (batch, n, d) in the shape in which the module expects them."""
        return (tokens.transpose(0, 1) if self.batch_axis == 1 else tokens).reshape(self.x.shape)

    def rows(self, output: Tensor) -> Tensor:
        """Return an output of the module in the shape (batch, n_out, d_out).

        Modules with the sequence axis first may return the batch axis first; it is found by its length.
        """
        axis = self.batch_axis
        if self.batch > 1 and output.ndim > 2 and output.shape[axis] != self.batch == output.shape[1 - axis]:
            axis = 1 - axis
        return _as_tokens(output, self.batch, axis)

    def of_first_sequence(self) -> ModuleReplay:
        """Return this module call for the first sequence of the batch alone.

        No model says which arguments have a batch axis. First, only arguments are cut whose length along the
        batch axis is the number of sequences, or is that of the tokens. If the output is then wrong, all
        arguments are cut whose length is a multiple of the number of sequences. CaptureError is raised if the
        output of the whole batch for the first sequence is another one in both cases.
        """
        if self.batch == 1:
            return self
        wanted = self.output
        why = "its output differs then"
        for multiples in (False, True):
            alone = self._sliced(multiples=multiples)
            try:
                output = first_tensor(alone(alone.x))
            except Exception as error:  # a module may raise any error for arguments that do not fit
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

    def _sliced(self, *, multiples: bool) -> ModuleReplay:
        lengths = {self.batch, self.x.shape[self.batch_axis]}

        def one(value: Tensor) -> Tensor:
            size = value.shape[self.batch_axis] if value.ndim > self.batch_axis else 0
            if size in lengths or (multiples and size > 0 and size % self.batch == 0):
                return value.narrow(self.batch_axis, 0, size // self.batch)
            return value

        alone = self._changed(one)
        alone.batch = 1
        return alone

    def on(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> ModuleReplay:
        """Return the same call of another copy of the module, with its arguments in this dtype and device."""
        other = self._changed(lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None))
        other.module = module
        return other

    def _changed(self, change: Callable[[Tensor], Tensor]) -> ModuleReplay:
        """Return a copy of this call with ``change`` applied once to each of its distinct tensors."""
        other = copy.copy(self)
        leaves, tree = tree_flatten((self._given, self.x, self.memory))
        changed = {id(leaf): change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves}
        other._given, other.x, other.memory = tree_unflatten([changed[id(leaf)] for leaf in leaves], tree)
        other.output = None
        return other


def token_arguments(call: Call) -> Iterator[Tensor]:
    """Yield the arguments of a call that may hold tokens: floating-point tensors with two or more axes."""
    found: dict[int, Tensor] = {}
    for value in call.arguments().values():
        for leaf in value if isinstance(value, tuple | list) else [value]:
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim >= 2 and leaf.numel() > 0:
                found[id(leaf)] = leaf
    yield from found.values()


def _as_tokens(x: Tensor, batch: int, batch_axis: int) -> Tensor:
    return (x.transpose(0, 1) if batch_axis == 1 else x).reshape(batch, -1, x.shape[-1])


def _batch_axis(x: Tensor, batch: int) -> int:
    if batch == 1 or x.shape[0] == batch:
        return 0
    if x.ndim > 2 and x.shape[1] == batch:
        return 1
    if x.shape[0] % batch == 0:
        return 0
    raise CaptureError(
        f"Tokens of shape {tuple(x.shape)} cannot be split into sequences; give one sequence at a time."
    )


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor in the output of a module. Raise CaptureError if there is none."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output
    found = next((v for v in values if isinstance(v, Tensor)), None) if isinstance(values, Iterable) else None
    if found is None:
        raise CaptureError(f"It gives {type(output).__name__} where a tensor is expected.")
    return found
