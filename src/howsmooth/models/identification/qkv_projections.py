"""Search for the linear maps that compute queries, keys and values from the tokens X of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from howsmooth.attention import LayerNorm, RMSNorm, Rotary
from howsmooth.errors import CaptureError
from howsmooth.models.identification.layer_trace import LayerTrace, ModuleCall
from howsmooth.models.identification.norm_placement import norm_map
from howsmooth.models.identification.query_key_transforms import (
    ProjectionReading,
    fit_rotary,
    projection_readings,
    reordered,
)
from howsmooth.models.tolerance import lowest_epsilon, relative_error, tolerance
from howsmooth.models.tracing.attention_recorder import is_linear, is_norm
from howsmooth.models.tracing.softmax_call import SoftmaxCall

__all__ = ["Projections", "multihead_parameters", "read_projections", "weight_and_bias"]


class Projection(NamedTuple):
    """The weight (heads, dim, d) and bias (heads, dim) of the map from tokens to queries, keys or values."""

    weight: Float[Tensor, "heads dim d"]
    bias: Float[Tensor, "heads dim"] | None


class Projections(NamedTuple):
    """The maps by which queries, keys and values are computed from tokens X."""

    query: Projection
    key: Projection
    value: Projection
    rotary: Rotary | None
    query_norm: LayerNorm | RMSNorm | None = None
    key_norm: LayerNorm | RMSNorm | None = None
    factor: float = 1.0  # scale of queries times scale of keys, besides the scale of the softmax


class _Outputs(NamedTuple):
    """The outputs of all linear modules with input X, side by side, and the parameters of these modules."""

    values: Float[Tensor, "n columns"]
    weights: Float[Tensor, "columns d"]
    biases: Float[Tensor, " columns"]  # zero if the linear module has no bias
    biased: Tensor  # whether the linear module of the column has a bias
    starts: list[int]  # the first column of each linear module

    def projection(self, columns: Int64[Tensor, " wanted"], heads: Tensor) -> Projection:
        shape = (heads.shape[1], heads.shape[3], -1)
        bias = self.biases[columns].reshape(shape[:2]) if bool(self.biased[columns].any()) else None
        return Projection(self.weights[columns].reshape(shape), bias)


def read_projections(trace: LayerTrace, call: SoftmaxCall) -> Projections:
    """Find the linear maps, rotary positions and norm layers that compute queries, keys and values from X.

    Raises
    ------
    CaptureError
        If queries, keys or values are not such a map of X; the message names the modules in between.

    """
    query, key, value = call.query, call.key, call.value
    if query is None or key is None:
        raise CaptureError(f"The queries and keys of {trace.layer} cannot be read: {call.obstacle}.")
    outputs = _linear_outputs(trace)
    rotary = _rotary(trace, query)
    # At position 0 rotary tables change nothing, so that a single token fits both cases: rotary comes first.
    for positions in (rotary, None) if rotary is not None else (None,):
        columns = [_columns(heads, outputs.values, positions) for heads in (query, key)]
        if all(one is not None for one in columns):
            break
    columns.append(_columns(value, outputs.values, None))
    found = [
        outputs.projection(one, heads)
        for one, heads in zip(columns, (query, key, value), strict=True)
        if one is not None
    ]
    if len(found) == len(columns):
        return Projections(found[0], found[1], found[2], positions)
    changed = None if columns[2] is None else _changed(trace, query, key, found[-1], outputs)
    if changed is None:
        role = next(
            role for role, one in zip(("queries", "keys", "values"), columns, strict=True) if one is None
        )
        raise CaptureError(f"The {role} of {trace.layer} are not a linear map of its input{_between(trace)}.")
    return changed


def multihead_parameters(
    module: nn.MultiheadAttention, softmax: SoftmaxCall
) -> tuple[Projections, Float[Tensor, "d_out inner"], Float[Tensor, " d_out"] | None]:
    """Read the projections, output weight and output bias of an nn.MultiheadAttention.

    Its projections are no modules, so that the trace does not contain their outputs. The parameters are read
    as PyTorch documents them, and the verification compares the result with the module's numbers.
    """
    packed: Tensor | None = module.in_proj_weight
    apart = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    weights = list(packed.chunk(3)) if packed is not None else apart
    bias: Tensor | None = module.in_proj_bias
    biases: list[Tensor | None] = [None] * 3 if bias is None else list(bias.chunk(3))

    def by_head(t: Tensor) -> Tensor:
        return t.detach().reshape(module.num_heads, -1, *t.shape[1:]).clone()

    query, key, value = (
        Projection(by_head(w), None if b is None else by_head(b))
        for w, b in zip(weights, biases, strict=True)
        if w is not None
    )
    # If the module returns its attention weights, PyTorch scales the queries before their product with the
    # keys, so that the scale of the softmax is one.
    factor = (module.embed_dim // module.num_heads) ** -0.5 / softmax.scale
    return Projections(query, key, value, None, factor=factor), *weight_and_bias(module.out_proj)


def weight_and_bias(
    module: nn.Module,
) -> tuple[Float[Tensor, "d_out d"], Float[Tensor, " d_out"] | None]:
    """Return the weight (d_out, d) of a linear module, and its bias (d_out,) or None."""
    weight, bias = module.weight, module.bias  # with a parametrization these are computed, no parameters
    assert isinstance(weight, Tensor)
    if not isinstance(module, nn.Linear):
        weight = weight.mT  # transformers' Conv1D stores (d, d_out)
    return weight.detach(), bias.detach() if isinstance(bias, Tensor) else None


def _of_x(trace: LayerTrace, call: ModuleCall) -> bool:
    return is_linear(call.module) and call.inputs is not None and torch.equal(call.inputs, trace.x)


def _linear_outputs(trace: LayerTrace) -> _Outputs:
    x, layer = trace.x, trace.layer
    values, weights, biases, biased, starts = [], [], [], [], [0]
    for call in trace.inside:
        if not _of_x(trace, call) or call.output is None:
            continue
        weight, bias = weight_and_bias(call.module)
        if weight.dtype != x.dtype or weight.shape[1] != x.shape[-1]:
            raise CaptureError(
                f"{layer} holds weights of type {weight.dtype} for an input of type {x.dtype} (quantised?), "
                "which is not captured."
            )
        values.append(call.output.flatten(0, -2))
        starts.append(starts[-1] + weight.shape[0])
        weights.append(weight)
        biases.append(weight.new_zeros(weight.shape[0]) if bias is None else bias)
        biased.append(torch.full((weight.shape[0],), bias is not None, device=x.device))
    if not values:
        raise CaptureError(
            f"{layer} applies no linear map to its input before its attention{_between(trace)}."
        )
    return _Outputs(
        torch.cat(values, dim=-1), torch.cat(weights), torch.cat(biases), torch.cat(biased), starts[:-1]
    )


def _changed(
    trace: LayerTrace, query: Tensor, key: Tensor, value: Projection, outputs: _Outputs
) -> Projections | None:
    """Find linear projections that become the queries and keys through a norm, a rotation or a scale."""
    norms = [norm for call in trace.inside if is_norm(call.module) and (norm := norm_map(call)) is not None]
    widths = [t.shape[1] * t.shape[3] for t in (query, key)]
    # Candidates: slices at the start of each linear module, and after the queries or the queries and keys
    # of a fused projection.
    starts = dict.fromkeys(s + skip for s in outputs.starts for skip in (0, widths[0], sum(widths)))
    read: list[list[ProjectionReading]] = []
    for heads, width in zip((query, key), widths, strict=True):
        room = [s for s in starts if s + width <= outputs.values.shape[1]]
        slices = [torch.arange(s, s + width, device=query.device) for s in room]
        # The first position often has no rotation, so that its entries identify the columns in any order.
        first = matching_columns(_flat(heads)[:1], outputs.values[:1], 0.0)
        slices = slices if first is None else [first, *slices]
        read.append(list(projection_readings(heads[0], outputs.values, slices, norms)))
    for q, k in product(*read):
        found = fit_rotary(q, k)
        if found is None:
            continue
        parts = (outputs.projection(one.columns, heads) for one, heads in ((q, query), (k, key)))
        q_part, k_part = (
            Projection(weight[:, found.order], None if bias is None else bias[:, found.order])
            for weight, bias in parts
        )
        q_norm, k_norm = reordered(q.norm, found.order), reordered(k.norm, found.order)
        return Projections(q_part, k_part, value, found.rotary, q_norm, k_norm, found.factor)
    return None


def _between(trace: LayerTrace) -> str:
    """Return a phrase for an error message that names the modules between X and the softmax."""
    others = dict.fromkeys(str(call) for call in trace.inside if not _of_x(trace, call))
    if others:
        return f": {', '.join(others)} lies between"
    if trace.arguments.get("position_embeddings") is not None:
        return ", with or without half-split rotary positions: what lies between was not recognised"
    return ": what lies between is no module of its own"


def _columns(
    heads: Float[Tensor, "1 heads n dim"], outputs: Float[Tensor, "n columns"], rotary: Rotary | None
) -> Int64[Tensor, " wanted"] | None:
    """Find the columns of ``outputs`` that are the queries, keys or values before any rotary positions."""
    if rotary is None:
        return matching_columns(_flat(heads), outputs, 0.0)
    # The rotation is inverted to find the columns. They are confirmed by rotating them as the model does.
    unrotated = rotary.rotate_adjoint(heads).clone()
    unrotated[..., : rotary.rot_dim] /= rotary.cos**2 + rotary.sin**2
    tol = tolerance(lowest_epsilon(heads.dtype))
    columns = matching_columns(_flat(unrotated), outputs, tol)
    if columns is None:
        return None
    again = rotary.rotate(outputs[:, columns].reshape(-1, heads.shape[1], heads.shape[3]).transpose(0, 1))
    return columns if relative_error(again, heads[0]) <= tol else None


def _flat(heads: Float[Tensor, "1 heads n dim"]) -> Float[Tensor, "n columns"]:
    return heads[0].transpose(0, 1).flatten(1)


def matching_columns(
    wanted: Float[Tensor, "n wanted"], outputs: Float[Tensor, "n columns"], tol: float
) -> Int64[Tensor, " wanted"] | None:
    """Return the index of an equal column of ``outputs`` for each column of ``wanted``. Return None if one is
    missing.

    A contiguous slice is tried first. Fused projections may interleave queries, keys and values head by head:
    then each column is searched by itself. If several columns are equal to it, the column next to the
    previous match is taken.
    """
    n, width = wanted.shape
    atol = tol * float(wanted.abs().max())
    room = outputs.shape[1] - width + 1
    if room > 0:
        starts = ((outputs[:, :room] - wanted[:, :1]).abs() <= atol).all(dim=0).nonzero().flatten().tolist()
        for start in starts:
            if bool(((outputs[:, start : start + width] - wanted).abs() <= atol).all()):
                return torch.arange(start, start + width, device=wanted.device)
    # Compare all pairs of columns on at most eight tokens; the result is compared on all tokens at the end.
    tokens = torch.linspace(0, n - 1, min(n, 8), device=wanted.device).round().long()
    equal = torch.ones(outputs.shape[1], width, dtype=torch.bool, device=wanted.device)
    for output, target in zip(outputs[tokens], wanted[tokens], strict=True):
        equal &= (output[:, None] - target[None, :]).abs() <= atol
    if not bool(equal.any(dim=0).all()):
        return None
    chosen: list[int] = equal.int().argmax(dim=0).tolist()
    for c in range(1, width):
        neighbour = chosen[c - 1] + 1
        if neighbour < equal.shape[0] and bool(equal[neighbour, c]):
            chosen[c] = neighbour
    columns = torch.tensor(chosen, device=wanted.device)
    return columns if bool(((outputs[:, columns] - wanted).abs() <= atol).all()) else None


def _rotary(trace: LayerTrace, query: Tensor) -> Rotary | None:
    """Read the cosines and sines of half-split rotary positions from the layer's ``position_embeddings``."""
    tables = trace.arguments.get("position_embeddings")
    if not isinstance(tables, Sequence) or len(tables) != 2:
        return None
    n, dim = query.shape[2], query.shape[3]
    read = []
    for table in tables:
        if not isinstance(table, Tensor) or table.dtype != trace.x.dtype:
            return None
        angles = table.reshape(-1, table.shape[-1])
        first, second = angles.tensor_split(2, dim=1)
        if angles.shape[0] != n or angles.shape[1] > dim or not torch.equal(first, second):
            return None
        read.append(angles.clone())
    return Rotary(read[0], read[1])
