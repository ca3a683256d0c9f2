"""Locations of the weights of attention layers in a model, for fast repeated reading of the layers.

The first time, a layer is captured: its map is found and verified by running the layer several times. If
every parameter of the map is a block of a weight of the model, the positions of the blocks are remembered.
Later, the blocks are read again, and tokens and output are taken from the forward pass. If the map does not
reproduce the output, the layer is captured anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.attention import Residual, SelfAttention, TokenMap
from howsmooth.models.identification.layer_identification import VerifiedLayer
from howsmooth.models.tolerance import precision, relative_error, tolerance
from howsmooth.models.tracing.layer_trace import bound_arguments
from howsmooth.models.tracing.module_replay import as_tokens, first_tensor

__all__ = ["SCOPES", "Reading", "reading_of"]

#: The scopes whose maps follow from the attention alone.
SCOPES = ("attention", "heads", "residual")

_BIASES = {"query": "query_bias", "key": "key_bias", "value": "value_bias", "output": "output_bias"}


@dataclass(frozen=True, eq=False)
class _Block:
    """The position of consecutive rows in a weight of the model, or of consecutive entries in a bias.

    ``transposed`` tells whether they are rows of the transposed weight.
    """

    module: nn.Module
    name: str
    rows: slice
    transposed: bool
    shape: tuple[int, ...]

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the current values of this block of a weight or bias, in the dtype of the measurement."""
        whole: Tensor = getattr(self.module, self.name).detach()
        return (whole.mT if self.transposed else whole)[self.rows].reshape(self.shape).to(dtype, copy=True)


@dataclass(eq=False)
class Reading:
    """The locations of the weights of one attention layer in a model, for repeated reading of the layer.

    The module ``owner`` gets the layer's tokens, and the module ``projection`` returns its output.
    """

    name: str
    owner: nn.Module
    x_name: str
    batch: int
    batch_axis: int
    projection: nn.Module
    blocks: Mapping[str, _Block]
    others: Mapping[str, Any]
    given: list[Tensor] = field(default_factory=list)
    output: list[Tensor] = field(default_factory=list)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Return a context manager that records the input tokens and the output of the layer when the model
        runs.
        """
        self.given.clear()
        self.output.clear()
        with ExitStack() as stack:
            stack.callback(self.owner.register_forward_pre_hook(self._begins, with_kwargs=True).remove)
            stack.callback(self.projection.register_forward_hook(self._ends).remove)
            yield

    def _begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = bound_arguments(module, args, kwargs).get(self.x_name)
        if isinstance(x, Tensor):
            self.given.append(x.detach().clone())

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.given:
            self.output.append(first_tensor(output).detach().clone())

    def read(self, scope: str) -> tuple[SelfAttention, TokenMap, Tensor] | None:
        """Return the layer with its current weights, and its tokens in the last forward pass.

        The results are the attention, the map that ``scope`` selects, and the tokens. The result is None if
        the attention does not reproduce the layer's output in the forward pass.
        """
        if len(self.given) != 1 or len(self.output) != 1:
            return None
        x = as_tokens(self.given.pop(), self.batch, self.batch_axis)
        own = as_tokens(self.output.pop(), self.batch, self.batch_axis)
        parameters: dict[str, Any] = {name: block.read(x.dtype) for name, block in self.blocks.items()}
        f = SelfAttention(**parameters, **self.others)
        found = f(x)
        q, k = f.queries_and_keys(x)
        # The rounding of a score grows with the norms of queries and keys, and so does the tolerance.
        condition = abs(f.scale) * float(q.norm(dim=-1).max()) * float(k.norm(dim=-1).max())
        allowed = tolerance(precision(x.dtype), condition)
        if own.shape != found.shape or not all(
            relative_error(a, b) <= allowed for a, b in zip(found, own, strict=True)
        ):
            return None
        match scope:
            case "heads":
                return f, f.without_output(), x
            case "residual":
                return f, Residual(f), x
            case _:
                return f, f, x


def reading_of(read: VerifiedLayer) -> Reading | None:
    """Find the locations of the weights of an attention layer in a model.

    The result is None unless each weight of the layer consists of rows of exactly one weight of the model.
    """
    f, call = read.found.map, read.self_attention.replay
    if not isinstance(f, SelfAttention) or f.feature_names():
        return None
    weights = _matrices(read.self_attention.layer.root)
    blocks: dict[str, _Block] = {}
    for name, bias_name in _BIASES.items():
        matrix, bias = getattr(f, name), getattr(f, bias_name)
        if matrix is None:
            return None
        found = _found(matrix, bias, weights)
        if found is None:
            return None
        blocks[name] = found[0]
        if found[1] is not None:
            blocks[bias_name] = found[1]
    others = {"scale": f.scale, "causal": f.causal, "window": f.window, "mask": f.mask, "rotary": f.rotary}
    return Reading(
        name=read.self_attention.layer.name,
        owner=call.module,
        x_name=call.x_name,
        batch=call.batch,
        batch_axis=call.batch_axis,
        projection=read.output.call.module,
        blocks=blocks,
        others=others,
    )


def _matrices(root: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (module, name, p.detach())
        for module in root.modules()
        for name, p in module.named_parameters(recurse=False)
        if p.ndim == 2
    ]


def _found(
    matrix: Tensor, bias: Tensor | None, weights: list[tuple[nn.Module, str, Tensor]]
) -> tuple[_Block, _Block | None] | None:
    """Find where a given matrix and bias are stored in the weights of the model, by comparing their entries.

    ``matrix`` is (..., d). The result is None unless there is exactly one match.
    """
    flat = matrix.flatten(0, -2)
    found: list[tuple[_Block, _Block | None]] = []
    for module, name, weight in weights:
        for transposed in (False, True):
            whole = weight.mT if transposed else weight
            if whole.shape[1] != flat.shape[1]:
                continue
            # Queries, keys and values may be consecutive blocks of one weight.
            for start in range(0, whole.shape[0] - len(flat) + 1, len(flat)):
                rows = slice(start, start + len(flat))
                if not torch.equal(whole[rows], flat):
                    continue
                block = _Block(module, name, rows, transposed, tuple(matrix.shape))
                if bias is None:
                    found.append((block, None))
                    continue
                own = getattr(module, name.replace("weight", "bias"), None)
                if isinstance(own, Tensor) and torch.equal(own[rows], bias.flatten()):
                    shape = tuple(bias.shape)
                    found.append((block, _Block(module, name.replace("weight", "bias"), rows, False, shape)))
    return found[0] if len(found) == 1 else None
