"""One pass through a model that writes down what happens around each attention call.

The pass runs on a single sequence, under an attention function of our own that computes plain softmax
attention and remembers its operands. What it records is read by ``identify``; the numbers that a
measurement uses come from a second pass under the model's own attention function (``replay``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError
from howsmooth.models.borrow import own_attention

__all__ = [
    "AttentionCall",
    "AttentionLayer",
    "LayerRecord",
    "ModuleCall",
    "attention_layers",
    "bound_arguments",
    "first_tokens",
    "is_linear",
    "is_norm",
    "record_layers",
    "run",
    "stopping",
]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The operands and the result of one call of the attention function, batch of one."""

    query: Tensor  # (1, heads, n, key_dim), after rotary positions and norms
    key: Tensor  # (1, kv_heads, n, key_dim)
    value: Tensor  # (1, kv_heads, n, value_dim)
    mask: Tensor | None  # additive or boolean, broadcastable to (1, heads, n, n)
    scaling: float
    keywords: dict[str, Any]  # whatever else the layer handed over
    output: Tensor  # (1, n, heads, value_dim)


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module. Tensors are kept (as copies) for linear maps and norms only."""

    name: str
    module: nn.Module
    inputs: Tensor | None = None
    output: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """Where a model calls attention: the module that calls it (owner), and the layer around that (root)."""

    index: int  # in the order of the calls
    name: str
    owner: nn.Module
    root_name: str
    root: nn.Module
    heads: int
    causal: bool  # in the pass that found it

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name}, {type(self.owner).__name__})"


@dataclass(eq=False)
class LayerRecord:
    """What happened in one layer during the pass, in order."""

    layer: AttentionLayer
    x: Tensor  # (1, n, d): first tensor argument of the owner
    arguments: dict[str, Any]  # of the owner, by name
    call: AttentionCall | None = None
    before: list[ModuleCall] = field(default_factory=list)  # from the layer's start to the owner's
    inside: list[ModuleCall] = field(default_factory=list)  # from the owner's start to the attention call
    after: list[ModuleCall] = field(default_factory=list)  # from the attention call to the layer's end
    last_norm: ModuleCall | None = None  # the norm that ran last before the owner, anywhere in the model
    output: Tensor | None = None  # of the layer


T = TypeVar("T")


class _Stop(BaseException):
    """Ends a pass once everything asked for was seen; not an Exception, so that no model catches it."""


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear map with a weight matrix, torch's or transformers' transposed one."""
    return isinstance(module, nn.Linear | Conv1D)


def is_norm(module: nn.Module) -> bool:
    """Whether the module looks like a norm over the last axis; what it computes is verified by value."""
    weight = getattr(module, "weight", None)
    named = isinstance(module, nn.LayerNorm | nn.RMSNorm) or "norm" in type(module).__name__.lower()
    return named and (weight is None or weight.ndim == 1)


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a module's call by parameter name, in the order of its signature."""
    try:
        bound = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except TypeError:
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    return {**bound, **bound.pop("kwargs", {})} if isinstance(bound.get("kwargs"), dict) else bound


def first_tokens(arguments: dict[str, Any]) -> Tensor | None:
    """Return the first floating-point tensor among a module's arguments: the tokens it works on."""
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None


def run(model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    """Run the model's forward pass; an exception of its own becomes an ArgumentError about the inputs."""
    # Asking for hidden states would make transformers leave hooks of its own on the modules for good.
    asked = [
        name for name in ("output_hidden_states", "output_attentions") if getattr(model.config, name, False)
    ]
    try:
        model(**inputs, **dict.fromkeys(asked, False))
    except _Stop:
        pass
    except HowsmoothError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise ArgumentError(
            "inputs",
            expected=f"inputs that {type(model).__name__} accepts",
            got=f"{shapes}, for which it raises {type(error).__name__}: {reason}",
            remedy="Run the model on them once by hand.",
        ) from error


def stopping() -> None:
    """End the pass that :func:`run` is in, from a hook."""
    raise _Stop


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Softmax attention (batch, n, heads, value_dim) in the operands' own precision, nothing else.

    Written out here, apart from the library's attention maps, because the two are held against each other.
    """
    shapes = [tuple(t.shape) for t in (query, key, value)]
    if (
        any(len(shape) != 4 for shape in shapes)
        or query.shape[1] % key.shape[1]
        or key.shape[1] != value.shape[1]
    ):
        raise CaptureError(
            f"{type(module).__name__} calls attention on queries, keys and values of shapes {shapes[0]}, "
            f"{shapes[1]}, {shapes[2]} where (batch, heads, n, head_dim) with grouped keys is expected."
        )
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is not None:
        boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(mask.logical_not(), float("-inf")) if boolean else scores + mask
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).contiguous()


def attention_layers(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[AttentionLayer]:
    """List the attention calls of one forward pass, in order.

    Raises
    ------
    CaptureError
        If the model makes none through transformers' attention interface.

    """
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=True)}
    found: list[AttentionLayer] = []

    # The parameters have the names of transformers' own attention functions: some layers pass them by name.
    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               scaling: float | None = None, **keywords: Any) -> tuple[Tensor, None]:  # fmt: skip
        if id(module) not in names:
            raise CaptureError(
                f"{type(model).__name__} calls attention from a {type(module).__name__} that is not one of "
                "its modules, so the layer cannot be found."
            )
        name = names[id(module)]
        root_name = _enclosing_layer(name)
        square = query.shape[-2] == key.shape[-2] > 1
        ahead = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu(1)
        causal = attention_mask is not None and (not square or bool(_blocked(attention_mask, ahead)))
        found.append(
            AttentionLayer(
                index=len(found),
                name=name,
                owner=module,
                root_name=root_name,
                root=model.get_submodule(root_name),
                heads=query.shape[1],
                causal=causal,
            )
        )
        return plain_attention(module, query, key, value, attention_mask, scaling), None

    with own_attention(model, attend):
        run(model, inputs)
    if not found:
        classes = sorted(
            {type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()}
        )
        named = ", ".join(classes) if classes else "no module with attention in its name"
        raise CaptureError(
            f"No attention call of {type(model).__name__} could be captured: its attention ({named}) does "
            "not go through the attention interface of transformers."
        )
    return found


def _blocked(mask: Tensor, pairs: Tensor) -> bool:
    """Whether a mask, additive or boolean, hides the key from the query for all of these pairs."""
    hidden = mask.logical_not() if mask.dtype == torch.bool else mask < 0
    return bool(hidden.broadcast_to(*hidden.shape[:-2], *pairs.shape)[..., pairs].all())


def _enclosing_layer(name: str) -> str:
    """Return the path of the nearest enclosing member of a list (``encoder.layer.3``), or nothing."""
    match = re.match(r"(.*\.)?\d+(?=\.)", name)
    return match.group(0) if match else ""


def record_layers(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    layers: list[AttentionLayer],
    wanted: set[int],
    read: Callable[[LayerRecord], T],
) -> dict[int, T]:
    """Record the wanted layers in one pass over a single sequence, and read each record as its layer ends.

    Parameters
    ----------
    model
        The model, borrowed.
    inputs
        Its inputs, with a batch of one.
    layers
        All attention calls of the model, from :func:`attention_layers`.
    wanted
        Their indices to record. The pass ends with the last of them.
    read
        What to make of a record. Only its result is kept, so that one layer's activations are held at a time.

    """
    norms = [(name, module) for name, module in model.named_modules() if is_norm(module)]
    recorder = _Recorder(layers, wanted, read, norms)
    with own_attention(model, recorder.attend), recorder.hooked():
        run(model, inputs)
    missing = wanted - recorder.done.keys()
    if missing:
        raise CaptureError(
            f"{layers[min(missing)]} was not reached: {type(model).__name__} calls its attention in another "
            "order on these inputs than on a short one."
        )
    return recorder.done


class _Recorder(Generic[T]):
    """The hooks of :func:`record_layers` and what they have seen so far."""

    def __init__(
        self,
        layers: list[AttentionLayer],
        wanted: set[int],
        read: Callable[[LayerRecord], T],
        norms: list[tuple[str, nn.Module]],
    ) -> None:
        self.layers = layers
        self.wanted = wanted
        self.read = read
        self.norms = norms
        self.calls = 0  # attention calls so far
        self.open: list[list[ModuleCall]] = []  # for each layer being run, the module calls so far
        self.records: list[list[LayerRecord]] = []  # for each layer being run, its wanted attention calls
        self.running: LayerRecord | None = None  # of the owner being run
        self.last_norm: ModuleCall | None = None
        self.done: dict[int, T] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Place the hooks, and remove them."""
        roots = {id(layer.root): layer for layer in self.layers if layer.index in self.wanted}
        inner = {
            id(module): (f"{layer.root_name}.{name}".strip("."), module)
            for layer in roots.values()
            for name, module in layer.root.named_modules()
            if name
        }
        with ExitStack() as stack:

            def place(handle: Any) -> None:
                stack.callback(handle.remove)

            # In a post-norm model the tokens come from a norm of the layer before.
            for name, module in self.norms:
                place(module.register_forward_hook(self._norm_hook(name), with_kwargs=True))
            for name, module in inner.values():
                place(module.register_forward_hook(self._module_hook(name), with_kwargs=True))
            for layer in roots.values():
                place(layer.root.register_forward_pre_hook(self._root_starts))
                place(layer.root.register_forward_hook(self._root_ends))
            for owner in {id(layer.owner): layer.owner for layer in self.layers}.values():
                place(owner.register_forward_pre_hook(self._owner_starts, with_kwargs=True))
                place(owner.register_forward_hook(self._owner_ends))
            yield

    def _root_starts(self, module: nn.Module, args: Any) -> None:
        self.open.append([])
        self.records.append([])

    def _root_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self.open.pop()
        first = output[0] if isinstance(output, tuple | list) and output else output
        for record in self.records.pop():
            record.output = first if isinstance(first, Tensor) else None
            self.done[record.layer.index] = self.read(record)
        if self.wanted <= self.done.keys():
            stopping()

    def _owner_starts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.calls not in self.wanted:
            return
        layer = self.layers[self.calls]
        if layer.owner is not module or not self.records:
            raise CaptureError(
                f"{layer} was expected next, but another {type(module).__name__} runs in its place."
            )
        arguments = bound_arguments(module, args, kwargs)
        x = first_tokens(arguments)
        if x is None or x.ndim != 3:
            got = "no tensor" if x is None else f"a tensor of shape {tuple(x.shape)}"
            raise CaptureError(f"{layer} takes {got} where tokens of shape (batch, n, d) are expected.")
        self.running = LayerRecord(
            layer, x.clone(), arguments, before=list(self.open[-1]), last_norm=self.last_norm
        )
        self.records[-1].append(self.running)

    def _owner_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        record, self.running = self.running, None
        if record is not None and self.calls != record.layer.index + 1:
            times = "did not call its attention" if record.call is None else "calls attention more than once"
            raise CaptureError(f"{record.layer} {times} in one pass, which is not captured.")

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
               attention_mask: Tensor | None, scaling: Any = None,
               **keywords: Any) -> tuple[Tensor, None]:  # fmt: skip
        """Stand in for the model's attention function."""
        index, self.calls = self.calls, self.calls + 1
        output = plain_attention(module, query, key, value, attention_mask, scaling)
        record = self.running
        if record is not None and record.layer.index == index:
            record.call = AttentionCall(
                query=query.clone(),
                key=key.clone(),
                value=value.clone(),
                mask=attention_mask,
                scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
                keywords=keywords,
                output=output.clone(),
            )
        elif index in self.wanted:
            twice = record is not None and record.layer.owner is module
            how = "more than once in one pass" if twice else "outside of its own forward pass"
            raise CaptureError(f"{self.layers[index]} calls attention {how}, which is not captured.")
        return output, None

    def _norm_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            tokens = first_tokens(bound_arguments(module, args, kwargs))
            if tokens is not None and isinstance(output, Tensor) and self.running is None:
                self.last_norm = ModuleCall(name, module, tokens.clone(), output.clone())

        return hook

    def _module_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not self.open:
                return
            inputs = kept = None
            if is_linear(module) or is_norm(module):
                tokens = first_tokens(bound_arguments(module, args, kwargs))
                inputs = None if tokens is None else tokens.clone()
                kept = output.clone() if isinstance(output, Tensor) else None
            call = ModuleCall(name, module, inputs, kept)
            if self.running is not None and self.running.call is None:
                self.running.inside.append(call)
                return
            self.open[-1].append(call)
            for record in self.records[-1]:
                if record.call is not None:
                    record.after.append(call)

        return hook
