"""A part of a model as a map from the tokens at one point of the forward pass to the tokens at a later point.

The model is copied, with the inputs that it was given for one sequence, and runs its own forward pass: masks,
positions and everything else between the two places are the model's. At the first place the tokens are
replaced by those that the map is given. Module calls before the first place return what they returned when
the model was captured, and the pass ends at the second place.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from howsmooth.attention import LayerNorm, RMSNorm
from howsmooth.errors import CaptureError
from howsmooth.force_float64 import WithoutDowncast
from howsmooth.jacobian.autodiff import one_backend
from howsmooth.models.identification.layer_trace import ModuleCall
from howsmooth.models.identification.module_map import ModuleMap
from howsmooth.models.identification.norm_placement import norm_map
from howsmooth.models.identification.self_attention_module import detached, moved_tokens
from howsmooth.models.measurement_mode import set_permanently
from howsmooth.models.tracing.attention_recorder import is_norm, own_copies
from howsmooth.models.tracing.module_replay import first_tensor
from howsmooth.plain_modules import eager
from howsmooth.watching import Call, StopForward, first_tokens, watched

__all__ = [
    "ModelMap", "ModelPart", "Output", "Passage", "Place", "copied", "frozen_copy", "observed",
    "replaced", "rows",
]  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A point of a forward pass: the tokens that a module call takes as an argument, or those that it
    returns.

    The call is the one with the number ``call`` among the calls of the module, counted from 0. The tokens
    that it takes are the argument with the name ``argument``, or its first floating-point argument.
    """

    module: str  # path of the module; "" is the model itself
    side: Literal["input", "output"]
    call: int = 0
    argument: str = ""

    def taken(self, arguments: dict[str, Any]) -> Any:
        """Return the tokens at this point of the forward pass, given the arguments of the module call."""
        return arguments.get(self.argument) if self.argument else first_tokens(arguments)

    def __str__(self) -> str:
        return self.module or "the model"


@dataclass(frozen=True)
class Output:
    """The kind of output of a map: ``hidden`` states, ``logits``, or the ``margin`` of a classifier.

    The kind ``tokens`` means the first tensor that a module returns. With ``last`` only the last token is
    kept. A margin is the largest logit minus the second largest, at the last token. ``unnamed`` says that the
    model need not name its logits, as those of transformers do: a tensor, or the first of a tuple, is taken
    for them.
    """

    kind: str
    last: bool = False
    unnamed: bool = False

    def of(self, returned: Any) -> Tensor:
        """Extract this kind of output (n_out, d_out) from what a module returned for one sequence. Raise
        CaptureError if there is none.
        """
        y = rows(first_tensor(returned) if self.kind == "tokens" else self._named(returned))
        if self.last or self.kind == "margin":
            y = y[-1:]
        if self.kind != "margin":
            return y
        if y.shape[-1] < 2:
            raise CaptureError("A margin is the difference of two logits, and the model has one logit.")
        top = y.topk(2, dim=-1).values
        return top[:, :1] - top[:, 1:]

    def _named(self, returned: Any) -> Tensor:
        name = "last_hidden_state" if self.kind == "hidden" else "logits"
        found = returned.get(name) if isinstance(returned, Mapping) else getattr(returned, name, None)
        if isinstance(found, Tensor):
            return found
        # A base model that is told to return a tuple has its hidden states first in it.
        if (self.unnamed or self.kind == "hidden") and isinstance(returned, Tensor | tuple | list):
            return first_tensor(returned)
        kind = type(returned).__name__
        if self.kind == "hidden":
            fields = ", ".join(map(str, returned)) if isinstance(returned, Mapping) else "none with a name"
            part = "capture a part of the model that returns one, such as an encoder"
            remedy = "choose the output 'logits'" if "logits" in fields.split(", ") else part
            raise CaptureError(f"{kind} has no last_hidden_state among its outputs ({fields}): {remedy}.")
        if self.unnamed:
            raise CaptureError(
                f"{kind} has no logits. Let the model return them as a tensor, as the first of a tuple or "
                "under the name logits; or choose the output 'hidden', which is the first tensor it returns."
            )
        raise CaptureError(
            f"{kind} has no logits: the model has no head. Load it with its head "
            "(hs.load_model(..., head=True)), or choose the output 'hidden'."
        )


@dataclass(frozen=True, eq=False)
class Passage:
    """A part of a forward pass, from its first to its last point, with the kind of output read at its end."""

    start: Place
    end: Place
    output: Output
    answers: Mapping[str, Sequence[Any]]  # what the first calls of some modules returned, by module path
    idle: Collection[str]  # paths of modules that do not run, whose weights are not copied
    words: str  # the passage in words


def copied(value: Any) -> Any:
    """Return a module's output with copies of all its tensors, because the model may later change them in
    place.
    """
    return tree_map_only(Tensor, Tensor.clone, value)


def rows(tokens: Tensor) -> Tensor:
    """Reshape the tokens (..., d) of one sequence to (n, d)."""
    return tokens.reshape(-1, tokens.shape[-1])


def observed(model: nn.Module, place: Place, see: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Return a context manager that calls ``see`` with the value at a given point of the forward pass."""

    def starts(call: Call) -> None:
        if place.side == "input" and call.number == place.call:
            see(place.taken(call.arguments()))

    def ends(call: Call) -> None:
        if place.side == "output" and call.number == place.call:
            see(call.output)

    return watched({place.module: model.get_submodule(place.module)}, starts, ends)


def replaced(
    model: nn.Module, place: Place, x: Tensor | Callable[[Tensor], Tensor]
) -> AbstractContextManager[None]:
    """Return a context manager that replaces the tokens at a point of a forward pass. The new tokens are
    ``x`` (n, d) or, if ``x`` is a function, its value at the old tokens.
    """

    def swapped(old: Any, where: Any) -> Any:
        if not isinstance(old, Tensor) or (isinstance(x, Tensor) and old.numel() != x.numel()):
            raise CaptureError(f"The tokens of {place} are not found in every forward pass.")
        new = x.reshape(old.shape).clone() if isinstance(x, Tensor) else x(old)  # the model may change it
        return tree_map(lambda leaf: new if leaf is old else leaf, where)

    def starts(call: Call) -> None:
        if place.side == "input" and call.number == place.call:
            call.args, call.kwargs = swapped(place.taken(call.arguments()), (call.args, call.kwargs))

    def ends(call: Call) -> None:
        if place.side == "output" and call.number == place.call:
            call.output = swapped(first_tensor(call.output), call.output)

    return watched({place.module: model.get_submodule(place.module)}, starts, ends)


def _answered(model: nn.Module, path: str, outputs: Sequence[Any]) -> AbstractContextManager[None]:
    """Return a context manager in which the first calls of a module return ``outputs`` instead of running."""

    def starts(call: Call) -> None:
        if call.number < len(outputs):
            call.output, call.answered = copied(outputs[call.number]), True

    return watched({path: model.get_submodule(path)}, starts)


def frozen_copy(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    *,
    idle: Collection[str] = (),
    attention: str | None = None,
) -> nn.Module:
    """Return a copy of a model in evaluation mode. Its weights have the given dtype and device, and require
    no gradients.

    The weights of the ``idle`` modules are neither copied nor converted. ``attention`` is the copy's
    attention implementation; None keeps that of the model.
    """
    resting = {
        name
        for name, _ in model.named_modules(remove_duplicate=False)
        if any(f"{name}.".startswith(f"{path}.") for path in idle)
    }
    used = {
        id(t)
        for name, module in model.named_modules(remove_duplicate=False)
        if name not in resting
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    memo: dict[int, Any] = dict(detached(model))
    for t in itertools.chain(model.parameters(), model.buffers()):
        new = t.detach()
        if id(t) in used:
            new = new.to(device, dtype if t.is_floating_point() else t.dtype, copy=True)
        memo[id(t)] = nn.Parameter(new, requires_grad=False) if isinstance(t, nn.Parameter) else new
    frozen = copy.deepcopy(model, memo)
    set_permanently(frozen, attention)
    return frozen


@dataclass(frozen=True, eq=False)
class ModelPart:
    """A part of a model as a function of tokens, with a copy of the model and its inputs for one sequence."""

    model: nn.Module  # from :func:`frozen_copy`
    inputs: Mapping[str, Any]  # by name
    passage: Passage
    x: Tensor  # tokens (n, d) of the captured forward pass

    def describe(self) -> str:
        """Return a phrase that names the model and the part."""
        return f"{type(self.model).__name__} {self.passage.words}"

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> ModelPart:
        """Return the same part of the model with weights in another dtype or on another device."""
        dtype, device = dtype or self.x.dtype, torch.device(device or self.x.device)

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype if value.is_floating_point() else value.dtype)

        model = frozen_copy(self.model, dtype, device, idle=self.passage.idle)
        passage = replace(self.passage, answers=tree_map(moved, dict(self.passage.answers)))
        return ModelPart(model, tree_map(moved, dict(self.inputs)), passage, moved(self.x))

    def run(self, x: Tensor) -> Tensor:
        """Run the part of the model on tokens (n, d), and return its output (n_out, d_out)."""
        passage = self.passage

        def reached(value: Any) -> None:
            raise StopForward(value)

        with ExitStack() as stack:
            stack.enter_context(one_backend())
            stack.enter_context(eager())
            if x.dtype == torch.float64:
                stack.enter_context(WithoutDowncast())
            for path, outputs in passage.answers.items():
                stack.enter_context(_answered(self.model, path, outputs))
            stack.enter_context(replaced(self.model, passage.start, x))
            stack.enter_context(observed(self.model, passage.end, reached))
            try:
                self.model(**own_copies(self.inputs))
            except StopForward as end:
                return passage.output.of(end.value)
        raise CaptureError(f"The forward pass did not reach {passage.end}.")


class ModelMap(ModuleMap):
    """The map of a part of a model, from one point of the forward pass to a later one."""

    def __init__(self, part: ModelPart) -> None:
        super().__init__(part)
        self.own = part

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> ModelMap:
        """Return the same map with weights in another dtype or on another device."""
        return ModelMap(self.own.to(dtype=dtype, device=device))

    def reading(self, output: Output) -> ModelMap:
        """Return the same map with another kind of output, such as logits instead of hidden states."""
        return ModelMap(replace(self.own, passage=replace(self.own.passage, output=output)))

    def readout(self) -> tuple[ModelMap, nn.Linear] | None:
        """Return the map up to the input of the model's output layer, and this linear layer.
        Return None if the map's outputs are not the logits that the output layer returns.

        The result is None for other outputs, and where something follows that layer, such as a soft cap.
        """
        model, passage = self.own.model, self.own.passage
        given = getattr(model, "get_output_embeddings", lambda: None)()
        if passage.output.kind != "logits" or type(given) is not nn.Linear:
            return None
        path = next(name for name, module in model.named_modules() if module is given)
        seen: list[Tensor] = []
        with torch.no_grad(), observed(model, Place(path, "output"), seen.append):
            logits = self.own.run(self.own.x)
        if len(seen) != 1 or not torch.equal(rows(seen[0])[-len(logits) :], logits):
            return None
        output = Output("tokens", passage.output.last)
        passage = replace(passage, end=Place(path, "input"), output=output)
        return ModelMap(replace(self.own, passage=passage)), given

    def as_norm(self) -> LayerNorm | RMSNorm | None:
        """Return the norm layer that this map is, compared at two inputs, or None if it is none."""
        both = [(x[None], self(x)[None]) for x in (self.own.x, moved_tokens(self.own.x))]
        for module in filter(is_norm, self.own.model.modules()):
            found = [norm_map(ModuleCall("", module, x, y)) for x, y in both]
            if None not in found:
                return found[0]
        return None
