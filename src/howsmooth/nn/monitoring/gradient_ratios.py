"""Lower limits of the constants of layers from the gradients of a training's own backward passes."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from howsmooth.watching import Call, Watch

__all__ = ["watch_gradients"]


def watch_gradients(model: nn.Module, names: Collection[str], largest: dict[str, Tensor]) -> None:
    """Keep the largest ‖Jᵀg‖ / ‖g‖ of each named module in ``largest``: g is the gradient of its output, Jᵀg
    what the module adds to the gradient of its first floating-point argument.
    """
    modules = {name: module for name, module in model.named_modules() if name and name in names}
    Watch(model, modules, starts=_enter, ends=partial(_leave, largest)).attach()


def _enter(call: Call) -> None:
    if (x := call.inputs) is not None and x.requires_grad:
        # A tensor that only this module reads: the gradient of x itself has those of residuals in it.
        own = x.view_as(x)
        call.args, call.kwargs = tree_map(lambda leaf: own if leaf is x else leaf, (call.args, call.kwargs))


def _leave(largest: dict[str, Tensor], call: Call) -> None:
    x, norms = call.inputs, dict[int, Tensor]()
    if x is None or not x.requires_grad:
        return

    def arrived(i: int, g: Tensor) -> None:
        # If the pass is to be differentiated itself, more than Jᵀg may come by here later.
        place = -2 if torch.is_grad_enabled() else i
        norms[place] = torch.linalg.vector_norm(g.detach(), dtype=torch.promote_types(g.dtype, torch.float32))
        if i == -1 and norms.keys() == {-1, 0}:  # no gradient came to a further output
            a, b = norms.pop(-1), norms.pop(0)
            ratio = (a / b).nan_to_num(0.0, 0.0, 0.0).where((a + b).isfinite(), torch.nan)
            largest[call.name] = torch.fmax(largest.get(call.name, ratio), ratio)  # NaN if all are

    outputs = [t for t in tree_leaves(call.output) if isinstance(t, Tensor) and t.requires_grad]
    for i, y in enumerate(outputs):
        y.register_hook(partial(arrived, i))
    x.register_hook(partial(arrived, -1))
