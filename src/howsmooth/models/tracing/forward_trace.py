"""One forward pass of a model as its user has it, noting where it computes softmax attention.

Nothing is replaced: the pass runs the user's own attention implementation, and everything that the capture
needs later is kept of the layers that were asked for, and of no others.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from howsmooth.errors import ArgumentError, HowsmoothError, reason
from howsmooth.models.tracing.layer_trace import (
    AttentionLayer,
    ModuleCall,
    bound_arguments,
    first_tokens,
    is_norm,
    output_of,
)
from howsmooth.models.tracing.mask_and_bias import hides_later_keys
from howsmooth.models.tracing.softmax_tracer import CoreCall, Watch

__all__ = ["Call", "Passed", "attention_layers", "forward_pass", "run"]


@dataclass(eq=False)
class Call:
    """A call of a module, with its arguments as they were at the time."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    last_norm: ModuleCall | None = None  # that ended before the call began
    versions: dict[int, int] = field(default_factory=dict)
    kept: bool = False
    output: Any = None

    def keep(self) -> None:
        """Copy the tokens among the arguments: a model may add to them in place later."""
        if self.kept:
            return
        self.kept = True
        x = first_tokens(self.arguments())
        copies: dict[int, Tensor] = {}  # one tensor that is given twice stays one

        def copied(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            if not floating or not (value is x or value.ndim <= 3):
                return value
            if id(value) not in copies:
                copies[id(value)] = value.clone()
            return copies[id(value)]

        self.args = tuple(map(copied, self.args))
        self.kwargs = {name: copied(value) for name, value in self.kwargs.items()}
        self.versions = {id(v): v._version for v in self._tensors()}

    def unchanged(self) -> bool:
        """Whether no argument was written to since."""
        return all(self.versions.get(id(v), v._version) == v._version for v in self._tensors())

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return bound_arguments(self.module, self.args, self.kwargs)

    def _tensors(self) -> list[Tensor]:
        # Tensors made under inference mode count no versions; the pass makes none.
        given = (*self.args, *self.kwargs.values())
        return [v for v in given if isinstance(v, Tensor) and not v.is_inference()]


@dataclass(eq=False)
class Passed:
    """One attention layer in the pass: the calls around its cores, from the layer's to the innermost."""

    layer: AttentionLayer
    calls: list[Call]
    cores: int = 1


class _Stop(BaseException):
    """Ends a pass once everything asked for was seen; not an Exception, so that no model catches it."""


def run(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Run the model's forward pass; an exception of its own becomes an ArgumentError about the inputs."""
    # Asking for hidden states would make transformers leave hooks of its own on the modules for good.
    config = getattr(model, "config", None)
    asked = [name for name in ("output_hidden_states", "output_attentions") if getattr(config, name, False)]
    try:
        model(**inputs, **dict.fromkeys(asked, False))
    except _Stop:
        return
    except HowsmoothError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{k} {tuple(v.shape)}" for k, v in inputs.items() if isinstance(v, Tensor))
        raise ArgumentError(
            "inputs",
            expected=f"inputs that {type(model).__name__} accepts",
            got=f"{shapes}, for which it raises {type(error).__name__}: {reason(error)}",
            remedy="Run the model on them once by hand.",
        ) from error


def attention_layers(model: nn.Module, inputs: Mapping[str, Any]) -> list[AttentionLayer]:
    """List the attention layers of one forward pass, in order, cross-attention among them."""
    return forward_pass(model, inputs, ())[0]


def forward_pass(
    model: nn.Module,
    inputs: Mapping[str, Any],
    wanted: Sequence[int] | None,
    on_layer: Callable[[AttentionLayer], None] = lambda layer: None,
) -> tuple[list[AttentionLayer], dict[int, Passed]]:
    """Run a borrowed model once; return all layers that were seen, in order, and those wanted, by index.

    Layers are counted in the order of their calls, negative from the end; None: all are wanted. The pass ends
    with the last layer that is wanted, if that can be told. ``on_layer`` is called with each layer when it is
    found.
    """
    watcher = _Watcher(model, wanted, on_layer)
    with watcher.hooked(), Watch(watcher.on_core):
        run(model, inputs)
    return watcher.layers, watcher.kept


class _Watcher:
    """The hooks of :func:`forward_pass`, and what they have seen."""

    def __init__(
        self, model: nn.Module, wanted: Sequence[int] | None, on_layer: Callable[[AttentionLayer], None]
    ) -> None:
        self.model = model
        self.wanted = wanted
        self.on_layer = on_layer
        self.from_end = max((-i for i in wanted or () if i < 0), default=0)
        # Index after which the pass need not go on; None if only its end tells.
        self.last = None if wanted is None or self.from_end else max(wanted, default=-1)
        self.stack: list[Call] = []
        self.layers: list[AttentionLayer] = []
        self.kept: dict[int, Passed] = {}
        self.newest_kept: deque[int] = deque()  # only because they may be wanted from the end
        self.last_norm: ModuleCall | None = None
        self.newest: tuple[Call, Passed] | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Place the hooks, and remove them."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                starts = partial(self._starts, name)
                stack.enter_context(module.register_forward_pre_hook(starts, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(self._ends, with_kwargs=True))
            yield

    def _starts(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stack.append(Call(name, module, args, kwargs, self.last_norm))

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # A call that ended with an exception that the model caught is still on the stack.
        while self.stack and self.stack[-1].module is not module:
            self.stack.pop()
        if not self.stack:
            return
        call = self.stack.pop()
        if is_norm(module) and isinstance(output, Tensor):
            tokens = first_tokens(call.arguments())
            if tokens is not None:
                self.last_norm = ModuleCall(call.name, module, tokens, output)
        if call.kept:
            call.output = output
            ended = None if self.last is None else self.kept.get(self.last)
            if ended is not None and ended.calls[0] is call:
                raise _Stop

    def on_core(self, core: CoreCall) -> None:
        """Note a core: a further one of the call that had the last, or a new layer."""
        if not self.stack:
            return
        innermost = self.stack[-1]
        if self.newest is not None and self.newest[0] is innermost:
            self.newest[1].cores += 1
            return
        root = enclosing_layer(innermost.name)
        start = next((i for i, call in enumerate(self.stack) if call.name == root), 0)
        calls = self.stack[start:]
        layer = AttentionLayer(
            index=len(self.layers),
            name=innermost.name,
            owner=innermost.module,
            root_name=calls[0].name,
            root=calls[0].module,
            heads=output_of(core).shape[-3],
            causal=_causal(core),
        )
        self.layers.append(layer)
        self.on_layer(layer)
        passed = Passed(layer, calls)
        self.newest = (innermost, passed)
        if self._is_wanted(layer.index):
            for call in calls:
                call.keep()
            self.kept[layer.index] = passed

    def _is_wanted(self, index: int) -> bool:
        if self.wanted is None or index in self.wanted:
            return True
        if not self.from_end:
            return False
        self.newest_kept.append(index)
        if len(self.newest_kept) > self.from_end:
            self.kept.pop(self.newest_kept.popleft(), None)
        return True


def enclosing_layer(name: str) -> str:
    """Return the path of the nearest enclosing member of a list (``encoder.layer.3``), or nothing."""
    match = re.match(r"(.*\.)?\d+(?=\.|$)", name)
    return match.group(0) if match else ""


def _causal(core: CoreCall) -> bool:
    """Whether no query sees a later key."""
    p = core.probabilities
    m, n = output_of(core).shape[-2], core.value.shape[-2]
    if p is not None:
        m, n = p.shape[-2:]
    if m != n:
        return False
    if core.causal:
        return True
    if core.mask is None:
        return p is not None and n > 1 and not bool(p.triu(1).any())
    return core.mask.shape[-2] == n and hides_later_keys(core.mask)
