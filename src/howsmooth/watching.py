"""Observation of the module calls of a running model.

A module is watched however it is called: by ``module(x)``, by ``module.forward(x)``, or compiled, since the
functions behind these calls are replaced on the watched module: by :func:`watched` while a context lasts, by
:class:`Watch` in each forward pass of a training. Nothing else in the library registers a hook or a mode on a
model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from howsmooth.errors import ArgumentError

__all__ = ["Call", "StopForward", "Watch", "bound_arguments", "first_tokens", "notice_downcasts", "watched"]


class StopForward(BaseException):
    """The exception by which a watcher ends the run of a model early, with the value that it wanted.

    It is a BaseException, so that no model catches it with ``except Exception``.
    """

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value


@dataclass(eq=False)
class Call:
    """One call of a module in a run of a model. A watcher may set its arguments beforehand and its output
    afterwards. If it sets ``answered``, the module does not run, and the call returns ``output``.
    """

    name: str  # path of the module
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int = 0  # among the calls of this module while it is watched, from 0
    output: Any = None
    answered: bool = False
    result: Tensor | None = None  # a copy of the first tensor of the output, if the call was kept
    last_norm: Call | None = None  # the last norm that ended before this call began
    kept: bool = False  # whether keep() was called
    versions: dict[int, int] = field(default_factory=dict)  # PyTorch's version counters, by id of the tensor

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the call by parameter name, in the order of the signature."""
        return bound_arguments(self.module, self.args, self.kwargs)

    @property
    def inputs(self) -> Tensor | None:
        """The first floating-point tensor among the arguments, which is assumed to be the tokens."""
        return first_tokens(self.arguments())

    def keep(self) -> None:
        """Copy the floating-point arguments, because the model may change them in place later.

        Only the first one, and those with at most three axes, are copied. Version counters of all arguments
        are stored.
        """
        if self.kept:
            return
        self.kept = True
        x = self.inputs
        copies: dict[int, Tensor] = {}  # by id: a tensor that is passed twice is copied once

        def copied(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            if not floating or not (value is x or value.ndim <= 3):
                return value
            return copies.setdefault(id(value), value.clone())

        self.args = tuple(map(copied, self.args))
        self.kwargs = {name: copied(value) for name, value in self.kwargs.items()}
        self.versions = {id(v): v._version for v in self._tensors()}

    def unchanged(self) -> bool:
        """Return True if PyTorch's counters show that no argument was changed in place since :meth:`keep`."""
        return all(self.versions.get(id(v), v._version) == v._version for v in self._tensors())

    def _tensors(self) -> list[Tensor]:
        # Tensors of inference mode have no version counter; the forward pass itself creates none.
        given = (*self.args, *self.kwargs.values())
        return [v for v in given if isinstance(v, Tensor) and not v.is_inference()]


@contextmanager
def watched(
    modules: Mapping[str, nn.Module],
    starts: Callable[[Call], None] = lambda call: None,
    ends: Callable[[Call], None] = lambda call: None,
) -> Iterator[None]:
    """Return a context manager that calls ``starts`` before and ``ends`` after each call of some modules.

    Contexts may be nested; the inner one sees a call first and last.
    """
    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(_Watcher(name, module, starts, ends).installed())
        yield


class _Watcher:
    """Replacements for ``forward`` and ``_call_impl``, by which PyTorch calls a watched module."""

    def __init__(
        self, name: str, module: nn.Module, starts: Callable[[Call], None], ends: Callable[[Call], None]
    ) -> None:
        self.name, self.module, self.starts, self.ends = name, module, starts, ends
        self.number = 0
        self.by_call = False  # whether the forward that comes next belongs to a call that is seen already

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context manager in which calls of the module pass through this watcher."""
        module: Any = self.module
        own, forward = module._call_impl, module.forward

        def through(*args: Any, **kwargs: Any) -> Any:
            self.by_call = True
            try:
                return own(*args, **kwargs)
            finally:
                self.by_call = False

        def call_impl(*args: Any, **kwargs: Any) -> Any:
            return self._seen(through, args, kwargs)

        @wraps(forward)  # arguments are found by the names of its signature
        def watching(*args: Any, **kwargs: Any) -> Any:
            if self.by_call:
                self.by_call = False
                return forward(*args, **kwargs)
            return self._seen(forward, args, kwargs)

        # A module compiled in place has a function here that does not know of the other two.
        new = {"_call_impl": call_impl, "forward": watching, "_compiled_call_impl": None}
        with _replaced(self.module, new):
            yield

    def _seen(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(self.name, self.module, args, kwargs, self.number)
        self.number += 1
        self.starts(call)
        if not call.answered:
            call.output = function(*call.args, **call.kwargs)
        self.ends(call)
        return call.output


@contextmanager
def _replaced(module: nn.Module, new: dict[str, Any]) -> Iterator[None]:
    """Return a context manager in which a module has the values ``new`` in its own fields."""
    fields = vars(module)
    before = {key: fields[key] for key in new if key in fields}
    fields.update(new)
    try:
        yield
    finally:
        for key in new:
            del fields[key]
        fields.update(before)


class Watch:
    """The calls of some modules in the forward passes of a model, for as long as the watch is attached.

    It may stay over a training: what is computed, compiled and saved is the same. The model has two hooks,
    which are no part of its copies and files, and its modules have another ``forward`` while a pass runs. A
    pass without gradients is not watched, nor one that a checkpoint repeats in a backward pass.

    Parameters
    ----------
    model, modules
        The model, and the modules of it whose calls are seen, by name.
    starts, ends
        Called before and after each call of these modules; ``starts`` may replace arguments by their equals.
    begins, finishes
        Called before and after each pass of the model.

    Raises
    ------
    ArgumentError
        In a pass, if ``nn.DataParallel`` runs the model on several devices.

    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        *,
        starts: Callable[[Call], None] | None = None,
        ends: Callable[[Call], None] | None = None,
        begins: Callable[[], None] = lambda: None,
        finishes: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._modules = model, modules
        self._starts, self._ends, self._begins, self._finishes = starts, ends, begins, finishes
        self._forwards: list[_Forward] = []
        self._handles: list[Any] = []
        self._pass = ExitStack()  # what is undone at the end of the pass

    @property
    def attached(self) -> bool:
        """Whether the passes of the model are watched."""
        return bool(self._handles)

    def attach(self) -> None:
        """Start watching the passes of the model."""
        from torch._dynamo.decorators import skip  # an import of seconds

        if self._handles:
            return
        # The compiler leaves our functions out of its graphs, and compiles what they call.
        skip(_Forward.__call__)
        items = self._modules.items()
        self._forwards = [_Forward(name, module, self._starts, self._ends) for name, module in items]
        begin, finish = (_Uncopied(torch.compiler.disable(f)) for f in (self._begin, self._finish))
        self._handles = [
            self._model.register_forward_pre_hook(begin, with_kwargs=True),
            # It runs also if the pass raises an exception, and of several watches the last one ends first.
            self._model.register_forward_hook(finish, with_kwargs=True, always_call=True, prepend=True),
        ]

    def detach(self) -> None:
        """Stop watching the passes of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._pass.close()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _counts():
            return
        if module is not self._model:
            raise ArgumentError(
                "model",
                expected="a model that is run by its own parameters",
                got=f"a replica of {type(module).__name__}, as nn.DataParallel makes for each device",
                remedy="Train by DistributedDataParallel, or on one device.",
            )
        self._pass.close()  # of a pass that was interrupted
        self._begins()
        # PyTorch's fast path computes the attention of its encoder layers without a call.
        fast = torch.backends.mha.get_fastpath_enabled()
        self._pass.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        for one in self._forwards:
            if one.module is not self._model:
                one.forward = one.module.forward
                self._pass.enter_context(_replaced(one.module, {"forward": one}))
            elif one.starts is not None:  # PyTorch has looked up the model's own forward already
                one.starts(Call(one.name, module, args, kwargs))

    def _finish(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not _counts():
            return
        self._pass.close()
        for one in self._forwards:
            if one.module is self._model and one.ends is not None:
                one.ends(Call(one.name, module, args, kwargs, output=output))
        self._finishes()


def _counts() -> bool:
    # A task id other than −1 means that a backward pass is running, in which checkpoints call layers again.
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


class _Forward:
    """Made once for a module: the compiler would take another function for a change of the model."""

    forward: Callable[..., Any]

    def __init__(
        self,
        name: str,
        module: nn.Module,
        starts: Callable[[Call], None] | None,
        ends: Callable[[Call], None] | None,
    ) -> None:
        self.name, self.module, self.__wrapped__ = name, module, module.forward
        self.starts, self.ends = (None if f is None else torch.compiler.disable(f) for f in (starts, ends))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(self.name, self.module, args, kwargs)
        if self.starts is not None:
            self.starts(call)
        output = self.forward(*call.args, **call.kwargs)
        if self.ends is not None:
            call.output = output
            self.ends(call)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        # A model that is copied after a pass that was interrupted has the forward of its class.
        return getattr, (self.module, "forward")


class _Uncopied:
    """A hook of a module that does nothing in copies of the module, or in files saved from it."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> None:
        if self.function is not None:
            self.function(*arguments)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Uncopied, ()


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module call by parameter name, in the order of the signature."""
    try:
        signature = inspect.signature(module.forward)
        bound = dict(signature.bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # ValueError: a scripted module has no signature
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    last = next(reversed(bound), "")
    further = last and signature.parameters[last].kind is inspect.Parameter.VAR_KEYWORD
    return bound | bound.pop(last) if further else bound


def first_tokens(arguments: dict[str, Any]) -> Tensor | None:
    """Return the first floating-point tensor among the arguments of a module, or None."""
    floating = (v for v in arguments.values() if isinstance(v, Tensor) and v.is_floating_point())
    return next(floating, None)


class _Downcasts(TorchFunctionMode):
    """A PyTorch function mode that records whether any function converts float64 to float32 or back."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        other = {torch.float32: torch.float64, torch.float64: torch.float32}
        if isinstance(result, Tensor) and result.dtype in other:
            given = (value for value in args if isinstance(value, Tensor))
            self.seen = self.seen or any(value.dtype == other[result.dtype] for value in given)
        return result


@contextmanager
def notice_downcasts(dtype: torch.dtype) -> Iterator[_Downcasts]:
    """Return a context manager that records whether a computation in float64 converts numbers to float32.

    For other dtypes nothing is recorded.
    """
    downcasts = _Downcasts()
    mode: AbstractContextManager[Any] = downcasts if dtype == torch.float64 else nullcontext()
    with mode:
        yield downcasts
