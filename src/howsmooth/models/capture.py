"""``capture``: the attention layers of a model as maps, at the tokens that a given input produces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from howsmooth.attention import LayerNorm, Residual, RMSNorm, TokenMap
from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models.borrow import borrowed
from howsmooth.models.identify import Structure, identify
from howsmooth.models.inputs import check_inputs, check_model, first_sequence, short_inputs
from howsmooth.models.load import LoadedModel
from howsmooth.models.recording import attention_layers, record_layers
from howsmooth.models.replay import LayerRun, run_layers, verify
from howsmooth.models.site import SCOPES, Site
from howsmooth.models.tolerance import precision

__all__ = ["capture"]


def capture(
    model: PreTrainedModel | LoadedModel,
    inputs: Tensor | Mapping[str, Tensor],
    layers: Sequence[int] | None = None,
    scope: str = "attention",
    heads: Sequence[int] | None = None,
) -> list[Site]:
    """Run a model on inputs and return its attention layers as maps, each with the tokens it was applied to.

    The model runs in evaluation mode (no dropout), without gradients and without a cache, and is left
    as it was found. Structure is found by comparing the numbers that flow through it; each map is then
    held against the model's own output on these inputs and on changed ones, so that a map that is
    returned is the model's own to float precision, its mask included.

    Parameters
    ----------
    model
        A transformers model with parameters in float32 or float64, or what
        :func:`~howsmooth.models.load_model` returns.
    inputs
        Token ids (batch, n), or a dict of the model's inputs. All sequences of one length, no padding.
    layers
        Which layers, counted in the order of the model's attention calls, negative from the end; all by
        default.
    scope
        What to call attention: ``"head"``, ``"heads"``, ``"attention"``, ``"residual"`` or ``"block"``
        (see :class:`Site`).
    heads
        Which heads, in scope ``"head"`` only; all by default.

    Returns
    -------
    list of Site
        One for each layer, in the order asked for; in scope ``"head"`` one for each layer and head.

    Raises
    ------
    ArgumentError
        If an argument is not of the kind described above.
    CaptureError
        If a layer does something that is not recognised, or fails its verification; the message says
        what lies in the way. Nothing is ever returned that was not verified.

    """
    if isinstance(model, LoadedModel):
        model = model.model
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(
            "model",
            expected="a transformers PreTrainedModel, or what load_model returns",
            got=type(model).__name__,
            remedy="To load one by its name, use howsmooth.models.load_model.",
        )
    if scope not in SCOPES:
        raise ArgumentError("scope", expected=f"one of {', '.join(SCOPES)}", got=repr(scope))
    if heads is not None and scope != "head":
        raise ArgumentError(
            "heads", expected="None unless scope is 'head'", got=f"{heads!r} with scope {scope!r}"
        )
    check_model(model)
    named = check_inputs(model, inputs)
    with borrowed(model):
        found = attention_layers(model, short_inputs(named))
        chosen = _indices("layers", layers, len(found), "layer")
        structures = record_layers(model, first_sequence(named), found, set(chosen), identify)
        if scope == "block":
            _refuse_without_block(structures)
        runs = run_layers(model, named, found, structures)
        for index in chosen:
            verify(structures[index], runs[index], block=scope == "block")
    sites: list[Site] = []
    for index in chosen:
        sites += _sites(structures[index], runs[index], scope, heads)
    return sites


def _refuse_without_block(structures: dict[int, Structure]) -> None:
    for structure in structures.values():
        if structure.block.map is None:
            raise CaptureError(
                f"The block around {structure.layer} is not captured: {structure.block.obstacle}. "
                "The scopes up to 'attention' do not need it."
            )


def _sites(structure: Structure, own: LayerRun, scope: str, heads: Sequence[int] | None) -> list[Site]:
    attention, layer = structure.attention, structure.layer
    x, norm = own.x, structure.norm if _gives(structure.norm, own.x) else None
    maps: list[tuple[int | None, TokenMap]]
    if scope == "head":
        maps = [(h, attention.head(h)) for h in _indices("heads", heads, attention.heads, "head")]
    elif scope == "heads":
        maps = [(None, attention.without_output())]
    elif scope == "residual":
        if attention.d != attention.d_out:
            raise CaptureError(f"{layer} changes the dimension of its tokens, so it has no residual.")
        maps = [(None, Residual(attention))]
    elif scope == "block" and structure.block.map is not None:
        if own.hidden is not None:
            x, norm = own.hidden, None
        maps = [(None, structure.block.map)]
    else:
        maps = [(None, attention)]
    return [
        Site(
            name=layer.name,
            layer=layer.index,
            head=h,
            scope=scope,
            causal=attention.causal,
            masking=structure.masking,
            layout=structure.block.layout,
            x=x,
            map=f,
            norm=norm,
        )
        for h, f in maps
    ]


def _gives(norm: LayerNorm | RMSNorm | None, x: Tensor) -> bool:
    """Whether all tokens can be outputs of the norm: it was identified on one of the sequences only."""
    if norm is None:
        return False
    # transformers' norms compute in float32 whatever the dtype of the model; every entry may be off by that.
    slack = 64.0 * precision(torch.float32)
    shift = (x if norm.bias is None else x - norm.bias).double()
    gain = math.sqrt(norm.d) * norm.weight.double().abs()
    outside = (shift.abs() - slack * (x.double().abs() + gain)).clamp(min=0.0)
    u = outside / gain  # 0/0 where both are zero, infinite where a zero gain gives no zero
    return float(torch.linalg.vector_norm(u.nan_to_num(nan=0.0), dim=-1).max()) <= 1 + slack


def _indices(argument: str, given: Sequence[int] | None, count: int, what: str) -> list[int]:
    """Check indices into ``count`` things, and return them as non-negative, each once."""
    if given is None:
        return list(range(count))
    expected = f"a list of {what} indices from {-count} to {count - 1}"
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ArgumentError(argument, expected=expected, got=repr(given))
    if not given:
        raise ArgumentError(
            argument, expected=expected, got="an empty list", remedy=f"None means every {what}."
        )
    for index in given:
        if isinstance(index, bool) or not isinstance(index, int):
            raise ArgumentError(argument, expected=expected, got=repr(index))
        if not -count <= index < count:
            raise ArgumentError(
                argument,
                expected=expected,
                got=str(index),
                remedy=f"The model has {count} {what}s, counted from 0.",
            )
    return list(dict.fromkeys(index % count for index in given))
