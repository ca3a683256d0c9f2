"""An attention module of a model as a map of tokens. Its softmaxes can be replaced by other functions.

The module is copied with the arguments that the model gave it for one sequence, so that later training does
not change the copy, and a conversion of the copy does not change the model.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from howsmooth.attention import TokenMap
from howsmooth.attention.custom_code_attention import Core
from howsmooth.errors import CaptureError
from howsmooth.force_float64 import WithoutDowncast
from howsmooth.models.identification.module_map import ModuleMap
from howsmooth.models.identification.self_attention_module import detached
from howsmooth.models.tracing.attention_hooks import intercept_softmaxes
from howsmooth.models.tracing.module_replay import ModuleReplay, first_tensor
from howsmooth.models.tracing.softmax_call import SoftmaxCall
from howsmooth.plain_modules import eager
from howsmooth.watching import Call, StopForward, watched

__all__ = ["CopiedModule", "ReplayedAttention", "Tail"]


@dataclass(frozen=True, eq=False)
class Tail:
    """Says which tensor in a run of an attention module is the attention output.

    It is what the attention module returns, or the output (or input) of a module inside it, or the output of
    a projection outside it whose input is what the attention module returns.
    """

    projection: nn.Module | None = None  # a copy of the projection outside the attention module
    module: str | None = None  # path of the module inside the attention module
    of_input: bool = False  # whether the input of that module is meant, not its output
    width: int | None = None  # heads * value_dim, if the module returns the heads on a separate axis

    def to(self, dtype: torch.dtype, device: torch.device) -> Tail:
        """Return a copy of this description with the projection in another dtype or on another device."""
        projection = copy.deepcopy(self.projection)
        return replace(self, projection=None if projection is None else projection.to(device, dtype))

    def applied(self, returned: Tensor) -> Tensor:
        """Merge the heads of ``returned`` and apply the outer projection, each only if needed."""
        heads = returned if self.width is None else returned.reshape(-1, self.width)
        if self.projection is None:
            return heads
        out = first_tensor(self.projection(heads[None]))
        return out.reshape(-1, out.shape[-1])


class CopiedModule:
    """A copy of an attention module with the arguments of one call, as a function of the tokens (n, d).

    ``implementation`` is the user's attention implementation, None if the module does not use transformers'
    interface.
    """

    def __init__(self, call: ModuleReplay, tail: Tail, implementation: str | None) -> None:
        self.call = call
        self.tail = tail
        self.implementation = implementation

    @property
    def x(self) -> Tensor:
        """The tokens (n, d) of the call."""
        return self.call.tokens()[0]

    def describe(self) -> str:
        """Return a phrase that describes the module, for messages and reports."""
        return f"the model's own {type(self.call.module).__name__}"

    @classmethod
    def of(cls, call: ModuleReplay, tail: Tail, implementation: str | None) -> CopiedModule:
        """Copy the module of a recorded call. The parameters of the copy require no gradients."""
        module = copy.deepcopy(call.module, dict(detached(call.module))).requires_grad_(requires_grad=False)
        return cls(call.on(module, call.x.dtype, call.x.device), tail, implementation)

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> CopiedModule:
        """Return another copy of the attention module in another dtype or on another device."""
        dtype = dtype or self.call.x.dtype
        device = torch.device(device or self.call.x.device)
        own = self.call.module
        module = copy.deepcopy(own, dict(detached(own))).to(dtype=dtype, device=device)
        call, tail = self.call.on(module, dtype, device), self.tail.to(dtype, device)
        return CopiedModule(call, tail, self.implementation)

    def run(self, x: Tensor, core: Core | None = None) -> Tensor:
        """Run the copied module on tokens (n, d), and return the attention output (n_out, d_out).

        ``core`` computes the softmax attentions, as in
        :class:`~howsmooth.attention.custom_code_attention.Layer`; with None the module computes them itself.
        """
        count = 0

        def on_softmax(seen: SoftmaxCall) -> Tensor | None:
            nonlocal count
            if core is None or seen.query is None or seen.key is None:
                return None
            index, count = count, count + 1
            return core(index, seen.query, seen.key, seen.value)

        with ExitStack() as stack:
            stack.enter_context(eager())
            if x.dtype == torch.float64:
                stack.enter_context(WithoutDowncast())
            module, path, user = self.call.module, self.tail.module, self.implementation
            if core is not None:
                stack.enter_context(
                    intercept_softmaxes(module, on_softmax, implementation=user, compute=False)
                )
            if path is not None:
                part = {path: module.get_submodule(path)}
                stack.enter_context(watched(part, self._stop_at_input, self._stop_at_output))
            try:
                output = self.call(self.call.shaped(x[None]))
            except StopForward as reached:
                return self.call.rows(reached.value)[0]
            return self.tail.applied(self.call.rows(first_tensor(output))[0])

    def _stop_at_input(self, call: Call) -> None:
        if self.tail.of_input:
            raise StopForward(call.inputs)

    def _stop_at_output(self, call: Call) -> None:
        raise StopForward(first_tensor(call.output))


class ReplayedAttention(ModuleMap):
    """The map of an attention module for which no closed form is known.

    ``inner`` is the map up to the concatenated heads, before the output projection, or None if it is unknown.
    """

    def __init__(
        self,
        part: CopiedModule,
        *,
        d_out: int,
        heads: int,
        causal: bool,
        inner: ReplayedAttention | None = None,
    ) -> None:
        super().__init__(part)
        self.d_out = d_out
        self.heads = heads
        self.causal = causal
        self.inner = inner

    def describe(self) -> str:
        """Return a phrase with the class of the module and whether attention is causal."""
        return f"{super().describe()}, {'causal' if self.causal else 'not causal'}"

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Self:
        """Return the same map with the module in another dtype or on another device."""
        other = super().to(dtype=dtype, device=device)
        other.inner = None if self.inner is None else self.inner.to(dtype=dtype, device=device)
        return other

    def without_output(self) -> ReplayedAttention:
        """Return the map to the concatenated heads. Raise CaptureError if the heads were not found."""
        if self.inner is None:
            raise CaptureError("Its heads before the output projection were not found in the module.")
        return self.inner

    def head(self, h: int) -> TokenMap:
        """Raise CaptureError, because the heads of a copied module are not known one by one."""
        raise CaptureError("Its single heads are unknown; choose the scope 'heads' or a wider one.")
