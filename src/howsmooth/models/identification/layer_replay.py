"""One layer run by itself, with everything written down that tells what it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from howsmooth.errors import CaptureError
from howsmooth.models.identification.self_attention_module import Owner
from howsmooth.models.tolerance import relative_error
from howsmooth.models.tracing.attention_hooks import intercepted
from howsmooth.models.tracing.forward_trace import Passed
from howsmooth.models.tracing.layer_trace import (
    LayerRecord,
    ModuleCall,
    bound_arguments,
    first_tokens,
    is_linear,
    is_norm,
)
from howsmooth.models.tracing.module_replay import Repeated
from howsmooth.models.tracing.softmax_tracer import CoreCall

__all__ = ["record_layer", "whole_layer"]

# Tokens of the pass, computed again: they differ by rounding, and by far more from those of another call.
_SAME = 1e-2


def whole_layer(passed: Passed, batch: int) -> Repeated:
    """Return the call of the layer around a core, the module itself if there is no layer.

    Raises
    ------
    CaptureError
        If it cannot be made again.

    """
    call = passed.calls[0]
    given = [v for v in call.arguments().values() if isinstance(v, Tensor)]
    floating = [v for v in given if v.is_floating_point()]
    if not given or not call.unchanged():
        why = "changes its arguments in place" if given else "takes no tensor"
        raise CaptureError(f"{passed.layer} lies in {type(call.module).__name__} {call.name}, which {why}.")
    return Repeated(call, (floating or given)[0], batch)


def record_layer(owner: Owner, passed: Passed, layer: Repeated) -> LayerRecord:
    """Run the layer around an owner once, on one sequence, and write down what happens.

    Raises
    ------
    CaptureError
        If the layer does not call its owner when it runs by itself.

    """
    record = LayerRecord(
        owner.layer,
        owner.alone.tokens().clone(),
        arguments=owner.alone.named_arguments(),
        last_norm=_norm_before(owner, passed),
    )
    recorder = _Recorder(owner, record)
    layer = layer.of_sequence()
    with (
        recorder.hooked(layer.module),
        intercepted(layer.module, recorder.on_core, implementation=owner.implementation),
    ):
        output = layer(layer.x)
    if not record.cores:
        raise CaptureError(f"{owner.layer} was not reached when its layer ran by itself.")
    first = output[0] if isinstance(output, tuple | list) and output else output
    record.output = _flat(first) if isinstance(first, Tensor) else None
    return record


def _norm_before(owner: Owner, passed: Passed) -> ModuleCall | None:
    """Return the norm that ran last before the owner, its tokens of the first sequence."""
    norm = next((c.last_norm for c in passed.calls if c.module is owner.repeated.module), None)
    if norm is None or norm.inputs is None or norm.output is None:
        return None
    inputs, output = (owner.repeated.rows(t)[:1] for t in (norm.inputs, norm.output))
    return ModuleCall(norm.name, norm.module, inputs, output)


class _Recorder:
    """The hooks of :func:`record_layer`."""

    def __init__(self, owner: Owner, record: LayerRecord) -> None:
        self.owner = owner
        self.record = record
        self.calls: list[ModuleCall] = []
        self.inside: int | None = None  # how many calls there were when the owner began
        self.ended = False

    @contextmanager
    def hooked(self, root: nn.Module) -> Iterator[None]:
        prefix = self.owner.layer.root_name
        with ExitStack() as stack:
            for name, module in root.named_modules():
                if module is self.owner.repeated.module:
                    starts = module.register_forward_pre_hook(self._owner_starts, with_kwargs=True)
                    stack.enter_context(starts)
                    stack.enter_context(module.register_forward_hook(self._owner_ends))
                ended = partial(self._ended, f"{prefix}.{name}".strip("."))
                stack.enter_context(module.register_forward_hook(ended, with_kwargs=True))
            yield

    def _owner_starts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A layer may run one module several times: the call at the tokens of the pass is meant.
        tokens = self.owner.alone.x
        given = (*args, *kwargs.values())
        same = [v for v in given if isinstance(v, Tensor) and v.shape == tokens.shape]
        again = next((v for v in same if relative_error(v, tokens) < _SAME), None)
        if self.inside is None and again is not None:
            self.record.x = _flat(again)  # what follows was computed from these, to the last bit
            self.inside = len(self.calls)
            self.record.before = list(self.calls)

    def _owner_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self.ended = self.ended or self.inside is not None

    def on_core(self, core: CoreCall) -> None:
        if self.inside is None or self.ended:
            return
        self.record.cores.append(core)
        if len(self.record.cores) == len(self.owner.cores):
            self.record.inside = self.calls[self.inside :]

    def _ended(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        tokens = first_tokens(bound_arguments(module, args, kwargs))
        first = output[0] if isinstance(output, tuple | list) and output else output
        inputs = kept = None
        after = self.inside is not None and len(self.record.cores) == len(self.owner.cores)
        given = sum(v is not None for v in (*args, *kwargs.values()))
        heads = self.record.cores[0].output if after else None
        alone = given == 1 and tokens is not None and heads is not None and tokens.numel() == heads.numel()
        owner = module is self.owner.repeated.module or isinstance(module, nn.MultiheadAttention)
        if is_linear(module) or is_norm(module):
            inputs = None if tokens is None else _flat(tokens)
            kept = _flat(output) if isinstance(output, Tensor) else None
        elif isinstance(first, Tensor) and (owner or alone or first.shape[-1:] == self.record.x.shape[-1:]):
            # Of the owner, what may be added to the tokens, as by experts, and what may hold the projection.
            kept = _flat(first)
            inputs = None if tokens is None or owner else _flat(tokens)
        call = ModuleCall(name, module, inputs, kept, alone)
        self.calls.append(call)
        if after:
            self.record.after.append(call)


def _flat(t: Tensor) -> Tensor:
    """Return a copy with the tokens of the one sequence as rows, (1, n, ·)."""
    return t.reshape(1, -1, t.shape[-1]).clone() if t.ndim > 0 else t.clone()
