"""The attention layers of this package in a model: their maps, at the tokens that they were given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.attention import SelfAttention, TokenMap
from howsmooth.errors import CaptureError
from howsmooth.models.recording import bound_arguments
from howsmooth.models.tolerance import precision, relative_error
from howsmooth.nn.contract import LipschitzModule
from howsmooth.nn.statistics import Entropy

__all__ = ["OwnAttention", "OwnLayers"]

# A layer and its map do the same sums in another order, and the softmax magnifies what that makes of scores.
_SAME = 1e4


@dataclass(eq=False)
class OwnAttention:
    """A call of one of them."""

    name: str
    module: Any
    arguments: dict[str, Any]
    output: Tensor | None = None

    def read(self, scope: str) -> tuple[TokenMap, Tensor]:
        """Return the layer as a map, and its tokens (batch, n, d).

        Raises
        ------
        CaptureError
            If the scope is another than ``attention``, or the map is not what the layer computed.

        """
        if scope != "attention":
            raise CaptureError(f"{self} is known in scope 'attention' only.")
        f: TokenMap = self.module.map
        given = next(iter(self.arguments.values()))
        x = given.detach().to(f.dtype)
        if self.output is None:
            raise CaptureError(f"{self} gave no output.")
        allowed = _SAME * precision(given.dtype if given.dtype != torch.float64 else torch.float32)
        if f(x).shape != self.output.shape or not relative_error(f(x), self.output.to(f.dtype)) <= allowed:
            raise CaptureError(
                f"{self} does not compute its map at these tokens: it was called with a mask of the call, or "
                "with tokens beyond its radius."
            )
        return f, x

    def bound(self) -> float | None:
        """Return the proved constant at the layer's own length and radius, if it has them."""
        length, radius = getattr(self.module, "length", None), getattr(self.module, "radius", None)
        if not isinstance(length, int) or not isinstance(radius, int | float):
            return None
        return float(self.module.lipschitz_bound(length, float(radius)).value)

    def add_entropy(self, entropy: Entropy, f: TokenMap, x: Tensor) -> None:
        """Add the rows of its attention weights."""
        if isinstance(f, SelfAttention):
            entropy.add_map(f, x)
            return
        told = {**self.arguments, "need_weights": True, "average_attn_weights": False}
        _, weights = self.module(**told)
        visible = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device)
        entropy.add_probabilities(weights, visible.tril() if getattr(f, "causal", False) else None)

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({type(self.module).__name__})"


class OwnLayers:
    """Those of one model, and their calls in one pass."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {name: m for name, m in model.named_modules() if _is_attention(m)}
        self.calls: list[OwnAttention] = []

    def outside(self, name: str) -> bool:
        """Whether a module of this path is none of them, nor inside one."""
        return not any(name == own or not own or name.startswith(f"{own}.") for own in self._modules)

    @contextmanager
    def hooked(self, on_call: Callable[[str], None]) -> Iterator[None]:
        """Write down their calls within the context, telling ``on_call`` the path of each as it begins."""
        with ExitStack() as stack:
            for name, module in self._modules.items():
                began = self._began(name, on_call)
                stack.callback(module.register_forward_pre_hook(began, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._ended).remove)
            yield

    def _began(self, name: str, on_call: Callable[[str], None]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            on_call(name)
            given = bound_arguments(module, args, kwargs)
            copies = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in given.items()}
            self.calls.append(OwnAttention(name, module, copies))

        return hook

    def _ended(self, module: nn.Module, args: Any, output: Any) -> None:
        call = next(call for call in reversed(self.calls) if call.module is module)
        first = output[0] if isinstance(output, tuple) else output
        call.output = first.detach().clone()


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, LipschitzModule) and hasattr(type(module), "map")
