"""A list of the attention layers of a model, which says how each is measured or why it cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from howsmooth.attention import SelfAttention, StagedAttention
from howsmooth.bounds import norm_radius
from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError
from howsmooth.models.as_called import as_called
from howsmooth.models.capture import module_of
from howsmooth.models.captured_layer import Site
from howsmooth.models.float32_weights import weights_in_memory
from howsmooth.models.identification.cross_attention_layer import read_cross_layer
from howsmooth.models.identification.layer_identification import VerifiedLayer, read_layer
from howsmooth.models.identification.non_softmax_layers import NO_SOFTMAX, NonSoftmaxTracer
from howsmooth.models.identification.self_attention_module import CrossAttention
from howsmooth.models.inputs.submodels_by_modality import named_parts
from howsmooth.models.loading.dummy_inputs import sample_inputs
from howsmooth.models.loading.load import LoadedModel
from howsmooth.models.model_call import ModelCall
from howsmooth.models.padded_sequences import one_by_one
from howsmooth.models.tracing.attention_recorder import AttentionLayer, TracedLayer, trace_forward_pass
from howsmooth.scopes import CROSS_SCOPE, SCOPES

__all__ = ["InspectedSite", "Inspection", "Refusal", "inspect_model"]

_SELF, _CROSS, _NONE = "self-attention", "cross-attention", "no softmax"


@dataclass(frozen=True)
class InspectedSite:
    """One layer of a model that mixes tokens: its place in the model, and what is known of its captured map.

    If the layer is refused, ``scopes`` is empty and the unknown fields are None.
    """

    #: Index of the layer in ``capture``, which counts those with a softmax from 0; None without a softmax.
    layer: int | None
    name: str  #: Path of the attention module in the model; path of the layer if it has no softmax.
    module: str  #: Name of the class of that module.
    #: ``self-attention``, ``cross-attention``, or ``no softmax``: a layer that mixes tokens otherwise.
    kind: str = _SELF
    scopes: tuple[str, ...] = ()  #: The scopes in which it is captured, from the narrowest to the widest.
    tokens: int | None = None  #: Number of tokens in its input.
    heads: int | None = None  #: Number of heads.
    #: Number of key and value heads; less than ``heads`` if several query heads share one.
    kv_heads: int | None = None
    d: int | None = None  #: Dimension of the tokens.
    key_dim: int | None = None  #: Dimension of the queries and keys of a head.
    value_dim: int | None = None  #: Dimension of the values of a head.
    masking: str | None = None  #: The mask in words, for ``tokens`` tokens.
    #: How positions enter the scores: ``rotary``, ``score bias`` (ALiBi, relative positions), both, or
    #: ``none``; ``inside the layer`` if not every parameter of the map is known.
    positions: str | None = None
    #: The arrangement of residual and norm: ``post-norm``, ``pre-norm``, ...; empty if not recognised.
    layout: str | None = None
    #: The norm whose outputs are the tokens, ``LayerNorm`` or ``RMSNorm``; None also if there is no norm.
    norm: str | None = None
    #: Radius of the smallest centred ball that contains all outputs of this norm, rounded up.
    norm_radius: float | None = None
    #: How the Jacobian is computed: ``closed form`` or ``autodiff``, as in :class:`Site`.
    path: str | None = None
    #: Why the Jacobian is computed in this way; ``the layer`` stands for the layer's name.
    path_reason: str | None = None


@dataclass(frozen=True)
class Refusal:
    """A reason why layers of a model cannot be captured, with the indices and paths of these layers."""

    #: Indices of the layers; empty for layers without a softmax, which have no index.
    layers: tuple[int, ...]
    names: tuple[str, ...]  #: Paths of the layers in the model.
    scopes: tuple[str, ...]  #: The scopes in which they are refused.
    reason: str  #: One or two sentences; ``the layer`` stands for each of the layers.


@dataclass(frozen=True)
class Inspection:
    """The layers of a model that can be captured, and the reasons why the other layers cannot."""

    model: str  #: Name of the model's class.
    #: Number of tokens of the first captured layer, None if all are refused. A sliding window that is longer
    #: is not visible in ``masking``.
    tokens: int | None
    #: One entry for each layer that mixes tokens, in the order of the forward pass.
    sites: tuple[InspectedSite, ...]
    refusals: tuple[Refusal, ...]  #: The refusals; empty if every layer is captured in every scope.
    #: Parts of the model in which no layer ran, with the kind of their inputs: ``vision_tower (image)``.
    unreached: tuple[str, ...] = ()


def inspect_model(
    model: nn.Module | LoadedModel,
    inputs: Tensor | Mapping[str, Any] | None = None,
    *,
    tokens: int | None = None,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> Inspection:
    """List the layers of a model that mix tokens, and say how each can be captured or why it cannot.

    The model runs once. Each layer of self-attention is then captured and verified once, as in
    :func:`capture`, for every scope. If one layer is refused, the others are still captured. Members of
    module lists in which no softmax runs are run by themselves, and listed if they mix tokens.

    Parameters
    ----------
    model
        As for :func:`capture`.
    inputs
        As for :func:`capture`. By default random token ids or embedded tokens, a built-in image, or noise as
        audio, whichever the model takes.
    tokens
        The number of random token ids or embedded tokens, at least 2; by default 16, or fewer if the model
        has fewer positions.
    on_layer
        Called with the number of layers that are done, and the number of all layers.

    Raises
    ------
    ArgumentError
        If an argument is not of the kind described, or the model does not run on the inputs.
    CaptureError
        If no layer of the model is seen to mix tokens; the message says why.

    """
    module = module_of(model)
    if inputs is None:
        preparation = model.preparation if isinstance(model, LoadedModel) else None
        inputs = sample_inputs(module, preparation, tokens)
    elif tokens is not None:
        raise ArgumentError("tokens", expected="None if inputs are given", got=repr(tokens))
    with as_called(module, inputs) as given:
        return _inspected(given, on_layer)


def _inspected(given: ModelCall, on_layer: Callable[[int, int], None]) -> Inspection:
    tracer = NonSoftmaxTracer()
    with tracer.watching(given.model):
        layers, kept = trace_forward_pass(given, None, tracer.on_layer)
    non_softmax = list(tracer.find(given.batch))
    if not layers and not non_softmax:
        raise CaptureError(
            f"No layer of {given.kind} was seen to mix tokens: it computes no softmax attention, "
            "or a fused kernel computes it (load the model with attn_implementation='sdpa' then)."
        )
    refused: list[Refusal] = []
    sites: list[InspectedSite] = []
    for layer in layers:
        on_layer(layer.index, len(layers))
        traced_layer = kept.pop(layer.index)
        with weights_in_memory(*traced_layer.owners):
            sites.append(_site(traced_layer, refused))
    on_layer(len(layers), len(layers))
    for one in reversed(non_softmax):  # in the order of the forward pass
        sites.insert(one.after, InspectedSite(None, one.name, one.module, kind=_NONE))
    refused += [Refusal((), (one.name,), SCOPES, f"The layer has {NO_SOFTMAX}.") for one in non_softmax]
    return Inspection(
        model=given.kind,
        tokens=next((site.tokens for site in sites if site.scopes), None),
        sites=tuple(sites),
        refusals=_together(refused),
        unreached=_unreached(given.model, [f"{site.name}." for site in sites]),
    )


def _site(traced_layer: TracedLayer, refused: list[Refusal]) -> InspectedSite:
    """Capture one layer in every scope, and return its description. Append the failures to ``refused``."""
    layer = traced_layer.layer
    plain = InspectedSite(layer.index, layer.name, type(layer.module).__name__, heads=layer.heads)
    try:
        read = read_layer(traced_layer)
    except CrossAttention:
        return _cross_site(traced_layer, plain, refused)
    except Exception as error:  # a module may raise any error, and the other layers are still captured
        refused.append(_refusal(layer, SCOPES, error))
        return plain
    layer = read.self_attention.layer
    sites: dict[str, Site] = {}
    for scope in SCOPES:
        try:
            # If one head can be captured, all of them can.
            sites[scope] = read.sites(scope, [0] if scope == "head" else None)[0]
        except Exception as error:  # as above
            refused.append(_refusal(layer, (scope,), error))
    plain = replace(plain, name=layer.name, module=type(layer.module).__name__)
    if not sites:
        return plain
    return _described(replace(plain, scopes=tuple(sites)), read, next(iter(sites.values())))


def _cross_site(traced_layer: TracedLayer, plain: InspectedSite, refused: list[Refusal]) -> InspectedSite:
    """Capture a cross-attention layer, and return its description. Append a failure to ``refused``."""
    plain, layer = replace(plain, kind=_CROSS), traced_layer.layer
    try:
        if traced_layer.model.batch > 1:  # it is read for one sequence
            first = one_by_one(traced_layer.model)[0]
            traced_layer = trace_forward_pass(first, [layer.index])[1][layer.index]
        read = read_cross_layer(traced_layer)
    except Exception as error:  # as in _site
        refused.append(_refusal(layer, (CROSS_SCOPE,), error))
        return plain
    layer, softmax = read.module.layer, read.module.softmaxes[0]
    site = read.site("queries", None)
    return replace(
        plain,
        name=layer.name,
        module=type(layer.module).__name__,
        scopes=(CROSS_SCOPE,),
        tokens=site.x.shape[1],
        heads=read.heads,
        d=site.x.shape[2],
        masking=read.masking,
        positions="score bias" if read.biased else "none",
        layout="",
        path=site.path,
        path_reason=site.path_reason,
        **_sizes(softmax),
    )


def _described(plain: InspectedSite, read: VerifiedLayer, site: Site) -> InspectedSite:
    attention, sizes = read.found.map, _sizes(read.self_attention.softmaxes[0])
    if isinstance(attention, SelfAttention):
        sizes = {name: getattr(attention, name) for name in sizes}
    return replace(
        plain,
        tokens=site.x.shape[1],
        heads=attention.heads,
        d=attention.d,
        masking=read.found.masking,
        positions=_positions(attention),
        layout=site.layout,
        norm=None if site.norm is None else type(site.norm).__name__,
        norm_radius=None if site.norm is None else norm_radius(site.norm),
        path=read.found.path,
        path_reason=_plain(read.found.reason, read.self_attention.layer),
        **sizes,
    )


def _sizes(softmax: Any) -> dict[str, Any]:
    key_dim = None if softmax.key is None else softmax.key.shape[-1]
    return {"kv_heads": softmax.value.shape[-3], "key_dim": key_dim, "value_dim": softmax.value.shape[-1]}


def _positions(attention: object) -> str:
    if isinstance(attention, SelfAttention):
        found = {"rotary": attention.rotary, "score bias": attention.score_bias}
        return " and ".join(name for name, of in found.items() if of is not None) or "none"
    biases = isinstance(attention, StagedAttention) and any(c.score_bias is not None for c in attention.cores)
    return "inside the layer" + " and score bias" * biases


def _unreached(model: nn.Module, paths: list[str]) -> tuple[str, ...]:
    """Return the submodels in which no layer that mixes tokens was seen, each with its kind of input.

    The result is empty if no such layer was seen in any submodel.
    """
    parts = named_parts(model)
    seen = {part for part in parts if any(path.startswith(f"{part}.") for path in paths)}
    return tuple(f"{part} ({takes})" for part, takes in parts.items() if part not in seen) if seen else ()


# ---- reasons


def _refusal(layer: AttentionLayer, scopes: tuple[str, ...], error: Exception) -> Refusal:
    said = str(error) if isinstance(error, HowsmoothError) else f"{type(error).__name__}: {error}"
    said = _plain(said.strip() or type(error).__name__, layer)
    said = said[:1].upper() + said[1:]
    narrow = re.search(r"scope: expected (.*?), got ", said)
    return Refusal((layer.index,), (layer.name,), scopes, f"Only {narrow[1]}." if narrow else said)


def _plain(message: str, layer: AttentionLayer) -> str:
    """Remove the index and path of a layer from a message, so that similar layers have equal messages."""
    message = re.sub(rf"layer {layer.index} \([^()]*\)", "the layer", message)
    return message.replace(f"{layer.root_name}.", "") if layer.root_name else message


def _together(refused: list[Refusal]) -> tuple[Refusal, ...]:
    """Group the refused layers by their reason, so that each reason is given once."""
    said: dict[str, str] = {}
    scopes: dict[tuple[tuple[int, ...], tuple[str, ...], str], tuple[str, ...]] = {}
    for one in refused:
        # Measured errors such as 1.2e-03 differ between equal layers; the message of the first layer is kept.
        key = re.sub(r"\d\.\de[-+]\d+", "", one.reason)
        said.setdefault(key, one.reason)
        place = one.layers, one.names, key
        scopes[place] = scopes.get(place, ()) + one.scopes
    joined: dict[tuple[str, tuple[str, ...]], Refusal] = {}
    for (layers, names, key), of in scopes.items():
        before = joined.get((key, of), Refusal((), (), of, said[key]))
        joined[key, of] = replace(before, layers=before.layers + layers, names=before.names + names)
    return tuple(joined.values())
