"""``inspect_model``: what can be captured of a model, layer by layer, and why the rest cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from howsmooth.attention import SelfAttention
from howsmooth.bounds import norm_radius
from howsmooth.errors import ArgumentError, CaptureError, NonFiniteError
from howsmooth.models.borrow import borrowed
from howsmooth.models.capture import capture
from howsmooth.models.inputs import check_inputs, check_model, max_length, short_inputs, vocabulary_size
from howsmooth.models.load import LoadedModel
from howsmooth.models.passes import attention_layers
from howsmooth.models.recording import AttentionLayer
from howsmooth.models.site import SCOPES, Site

__all__ = ["InspectedSite", "Inspection", "Refusal", "inspect_model"]

_TOKENS = 16


@dataclass(frozen=True)
class InspectedSite:
    """What is known of one attention layer. All but its place is read off the captured, verified map.

    If the layer is refused, ``scopes`` is empty and the rest None.
    """

    #: Index of the layer, counting the model's attention calls from 0.
    layer: int
    #: Path of the attention module in the model.
    name: str
    #: Its class.
    module: str
    #: The scopes in which it is captured, from the narrowest to the widest.
    scopes: tuple[str, ...] = ()
    #: Number of heads.
    heads: int | None = None
    #: Number of key and value heads; less than ``heads`` if these are shared.
    kv_heads: int | None = None
    #: Dimension of the tokens.
    d: int | None = None
    #: Dimension of the queries and keys of a head.
    key_dim: int | None = None
    #: Dimension of the values of a head.
    value_dim: int | None = None
    #: The mask in words, at the number of tokens that was looked at.
    masking: str | None = None
    #: What the scores know of positions: ``rotary`` or ``none``.
    positions: str | None = None
    #: ``post-norm``, ``pre-norm``, or empty if not recognised.
    layout: str | None = None
    #: The norm whose outputs the tokens are, ``LayerNorm`` or ``RMSNorm``; None too if there is none.
    norm: str | None = None
    #: Radius of the smallest centred ball that holds all outputs of this norm, rounded up.
    norm_radius: float | None = None


@dataclass(frozen=True)
class Refusal:
    """One reason, and all that is refused for it."""

    #: The layers.
    layers: tuple[int, ...]
    #: The scopes.
    scopes: tuple[str, ...]
    #: A sentence or two; ``the layer`` stands for each of them.
    reason: str


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect_model` returns."""

    #: Class of the model.
    model: str
    #: Number of tokens that the first captured layer was given, None if all are refused. A window that is
    #: longer does not show in ``masking``.
    tokens: int | None
    #: One for each attention call, in order.
    sites: tuple[InspectedSite, ...]
    #: Empty if every layer is captured in every scope.
    refusals: tuple[Refusal, ...]


def inspect_model(
    model: PreTrainedModel | LoadedModel,
    inputs: Tensor | Mapping[str, Tensor] | None = None,
    *,
    tokens: int | None = None,
) -> Inspection:
    """List the attention layers of a model, the scopes in which each is captured, and why not in others.

    Each layer is captured in every scope, as :func:`capture` does it, so what is said is verified against
    the model's own numbers. A layer that is refused does not hide the others.

    Parameters
    ----------
    model
        As for :func:`capture`.
    inputs
        As for :func:`capture`; token ids at random by default.
    tokens
        How many of these, at least 2; 16 by default, or as many as the model has positions for.

    Raises
    ------
    ArgumentError
        If an argument is not of the kind described, or the model does not run on the inputs.
    CaptureError
        If no attention call of the model is seen at all; the message says why.

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
    check_model(model)
    if inputs is None:
        inputs = _random_ids(model, tokens)
    elif tokens is not None:
        raise ArgumentError("tokens", expected="None if inputs are given", got=repr(tokens))
    named = check_inputs(model, inputs)
    with borrowed(model):
        layers = attention_layers(model, short_inputs(named))
    captured, reasons = _captured(model, named, layers, "attention")
    sites = {index: _described(layers[index], site) for index, site in captured.items()}
    seen = next((site.x.shape[1] for site in captured.values()), None)
    refused = {(index, scope): reason for index, reason in reasons.items() for scope in SCOPES}
    usable = [layer for layer in layers if layer.index in captured]
    del captured  # one scope's maps at a time
    for scope in SCOPES if usable else ():
        if scope != "attention":
            _, reasons = _captured(model, named, usable, scope)
            refused |= {(index, scope): reason for index, reason in reasons.items()}
    return Inspection(
        model=type(model).__name__,
        tokens=seen,
        sites=tuple(
            replace(
                sites.get(layer.index, InspectedSite(layer.index, layer.name, type(layer.owner).__name__)),
                scopes=tuple(scope for scope in SCOPES if (layer.index, scope) not in refused),
            )
            for layer in layers
        ),
        refusals=_together(refused),
    )


def _random_ids(model: PreTrainedModel, tokens: object) -> Tensor:
    size, limit = vocabulary_size(model), max_length(model)
    if size is None:
        raise ArgumentError(
            "inputs",
            expected="the model's inputs, as it has no embedding of token ids",
            got="None",
            remedy=f"Give a dict with {model.main_input_name}.",
        )
    if tokens is None:
        tokens = _TOKENS if limit is None else min(_TOKENS, limit)
    elif isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise ArgumentError("tokens", expected="an integer of at least 2", got=repr(tokens))
    elif limit is not None and tokens > limit:
        raise ArgumentError("tokens", expected=f"at most {limit}, the model's positions", got=repr(tokens))
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(size, (1, tokens), generator=generator, device="cpu")
    padding = getattr(model.config, "pad_token_id", None)
    # Some models skip padding when they count positions.
    return torch.where(ids == padding, (ids + 1) % size, ids) if isinstance(padding, int) else ids


def _captured(
    model: PreTrainedModel, inputs: dict[str, Tensor], layers: list[AttentionLayer], scope: str
) -> tuple[dict[int, Site], dict[int, str]]:
    """Capture the layers in a scope: all at once or, if one of them is refused, each by itself."""
    try:
        found = capture(model, inputs, [layer.index for layer in layers], scope)
    except (CaptureError, NonFiniteError) as error:
        if len(layers) == 1:
            return {}, {layers[0].index: _reason(str(error), layers[0])}
        sites: dict[int, Site] = {}
        reasons: dict[int, str] = {}
        for layer in layers:
            one, why = _captured(model, inputs, [layer], scope)
            sites |= one
            reasons |= why
        return sites, reasons
    return {site.layer: site for site in found}, {}


def _reason(message: str, layer: AttentionLayer) -> str:
    """Take out of a message what differs between layers that are alike."""
    message = message.replace(str(layer), "the layer")
    if layer.root_name:
        message = message.replace(f"{layer.root_name}.", "")
    return message[:1].upper() + message[1:]


def _described(layer: AttentionLayer, site: Site) -> InspectedSite:
    attention = site.map
    if not isinstance(attention, SelfAttention):
        raise TypeError(f"{layer} was captured as {type(attention).__name__}")
    return InspectedSite(
        layer=layer.index,
        name=layer.name,
        module=type(layer.owner).__name__,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        d=attention.d,
        key_dim=attention.key_dim,
        value_dim=attention.value_dim,
        masking=site.masking,
        positions="none" if attention.rotary is None else "rotary",
        layout=site.layout,
        norm=None if site.norm is None else type(site.norm).__name__,
        norm_radius=None if site.norm is None else norm_radius(site.norm),
    )


def _together(refused: dict[tuple[int, str], str]) -> tuple[Refusal, ...]:
    """Say each reason once: first the scopes of a layer that share it, then the layers."""
    scopes: dict[tuple[int, str], list[str]] = {}
    for (layer, scope), reason in sorted(refused.items(), key=lambda item: SCOPES.index(item[0][1])):
        scopes.setdefault((layer, reason), []).append(scope)
    layers: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for (layer, reason), named in scopes.items():
        layers.setdefault((reason, tuple(named)), []).append(layer)
    found = [Refusal(tuple(sorted(of)), named, reason) for (reason, named), of in layers.items()]
    return tuple(sorted(found, key=lambda one: one.layers))
