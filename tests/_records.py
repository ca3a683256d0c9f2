"""A layer run by hand, with a record of its calls: what ``read_block`` reads, made without capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.models.identification.layer_trace import LayerTrace, ModuleCall
from howsmooth.models.identification.norm_and_residual_placement import Block
from howsmooth.models.tracing.recorder import AttentionLayer, is_norm


class Own(TokenMap):
    """A model's own sublayer as a map."""

    def __init__(self, f: Callable[[Tensor], Tensor], d: int, dtype: torch.dtype = torch.float64) -> None:
        self.f = f
        self._d, self._dtype = d, dtype

    d = property(lambda self: self._d)
    d_out = property(lambda self: self._d)
    dtype = property(lambda self: self._dtype)
    device = property(lambda self: torch.device("cpu"))

    def describe(self) -> str:
        return "the layer's own attention"

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Own:
        return Own(self.f, self._d, dtype or self._dtype)

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        return self.f(x)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return next(
        (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()), None
    )


def record(
    root: nn.Module, owner: nn.Module, projection: nn.Module, run: Callable[[], Any]
) -> tuple[LayerTrace, ModuleCall]:
    """Call ``run``, which runs the layer once on one sequence, and write down what ``read_block`` needs."""
    calls: list[ModuleCall] = []
    seen: dict[str, Any] = {}

    def starts(module: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = _tokens(args, kwargs)
        assert tokens is not None
        seen.setdefault("x", tokens.clone())
        seen.setdefault("before", list(calls))

    def ends(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tokens = _tokens(args, kwargs)
            kept = tokens is not None and isinstance(output, Tensor) and module is not root
            call = ModuleCall(name, module, *((tokens.clone(), output.clone()) if kept else ()))
            calls.append(call)
            if module is projection and "output" not in seen:
                seen.update(output=call, since=len(calls) - 1)

        return hook

    def result(module: nn.Module, args: Any, output: Any) -> None:
        seen["result"] = output[0] if isinstance(output, tuple) else output

    handles = [m.register_forward_hook(ends(name), with_kwargs=True) for name, m in root.named_modules()]
    handles += [owner.register_forward_pre_hook(starts, with_kwargs=True), root.register_forward_hook(result)]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    layer = AttentionLayer(0, "owner", owner, "root", root, 1, causal=False)
    found = LayerTrace(layer, seen["x"], arguments={}, before=seen["before"], after=calls[seen["since"] :])
    found.last_norm = next((c for c in reversed(seen["before"]) if is_norm(c.module)), None)
    found.output = seen["result"]
    return found, seen["output"]


def shown(
    block: Block, owner: nn.Module, projection: nn.Module, run: Callable[[], Any]
) -> tuple[Tensor, Tensor]:
    """The block's input H and its value, read where ``block`` says that a layer shows them."""
    seen: dict[str, Tensor] = {}
    reached: list[bool] = []
    reading = block.value_at
    assert reading is not None

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = _tokens(args, kwargs)
        if not reached and tokens is not None and "x" not in seen:
            seen["h"] = tokens.clone()

    def owner_starts(module: nn.Module, args: Any, kwargs: Any) -> None:
        if block.pre_norm is None:
            before(module, args, kwargs)
        seen["x"] = seen["h"]

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if reached and module is reading.less:
            seen.setdefault("less", first.clone())
        if reached and module is reading.module:
            value = _tokens(args, kwargs) if reading.side == "input" else first
            seen.setdefault("value", value.clone())

    handles = [
        owner.register_forward_pre_hook(owner_starts, with_kwargs=True),
        projection.register_forward_hook(lambda m, a, o: reached.append(True)),
        reading.module.register_forward_hook(after, with_kwargs=True),
    ]
    if reading.less is not None:
        handles.append(reading.less.register_forward_hook(after, with_kwargs=True))
    if block.pre_norm is not None:
        handles.append(block.pre_norm.register_forward_pre_hook(before, with_kwargs=True))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    value = seen["value"].reshape(seen["h"].shape)
    return seen["h"], value - seen["less"].reshape(value.shape) if "less" in seen else value
