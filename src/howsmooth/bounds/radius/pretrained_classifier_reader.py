"""Convert a pretrained classifier to a network of layers with known derivatives, and verify that both compute
the same logits.

A model of transformers is recognised by the names of its modules, any other by its layers, which are those of
``torch.nn.TransformerEncoderLayer``. What decides is the comparison: the model must perform the operations of
the stages, each with the same weights and settings, and reproduce their logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from howsmooth.bounds.radius.symbolic_network import Symbolic, check_operations, known_activation
from howsmooth.bounds.radius.symbolic_terms import OTHER
from howsmooth.bounds.radius.transformer_layers import (
    ACTIVATIONS,
    Activation,
    Attention,
    FeedForward,
    GatedFeedForward,
    Norm,
)
from howsmooth.bounds.radius.transformer_network import Network, Stage
from howsmooth.errors import ArgumentError, CertificateError, NonFiniteError, reason
from howsmooth.force_float64 import WithoutDowncast
from howsmooth.plain_modules import fast_path
from howsmooth.watching import Call, watched

__all__ = [
    "OF_ITS_OWN", "check_network", "embedded", "encoder_layers", "foreign_hooks", "model_logits",
    "read_classifier",
]  # fmt: skip

OF_ITS_OWN = (
    "Where something comes before the encoder layers, such as an embedding or patches with positions, put "
    "the layers and the readout into a module of their own, and give it the outputs of what comes before."
)
"""The remedy for a PyTorch model that begins with something else than its encoder layers."""

_ALL = slice(None)
_AGREEMENT = 1e-9


@dataclass(frozen=True)
class _Arrangement:
    """The names of the modules (layers, projections, norms) in one kind of classifier, such as BERT.

    ``readout`` is a module of the whole model; the others belong to its base model or to a layer.
    ``projections`` are query, key, value and output; the first three may be one module. ``pre_norm`` says
    that the norms stand before attention and feed-forward, ``causal`` that a token sees none after it, and
    ``token`` which one the readout takes.
    """

    kind: str
    readout: str
    layers: str
    attention: str
    projections: tuple[str, str, str, str]
    norms: tuple[str, str]
    up: str
    activation: str
    down: str
    gate: str | None = None
    last_norm: str | None = None
    pooler: str | None = None
    pre_norm: bool = True
    causal: bool = False
    token: int = 0


_ARRANGEMENTS = (
    _Arrangement(
        kind="BERT",
        readout="classifier",
        layers="encoder.layer",
        attention="attention.self",
        projections=(
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
        ),
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
        up="intermediate.dense",
        activation="intermediate.intermediate_act_fn",
        down="output.dense",
        pooler="pooler",
        pre_norm=False,
    ),
    _Arrangement(
        kind="GPT-2",
        readout="score",
        layers="h",
        attention="attn",
        projections=("attn.c_attn", "attn.c_attn", "attn.c_attn", "attn.c_proj"),
        norms=("ln_1", "ln_2"),
        up="mlp.c_fc",
        activation="mlp.act",
        down="mlp.c_proj",
        last_norm="ln_f",
        causal=True,
        token=-1,
    ),
    _Arrangement(
        kind="Llama",
        readout="score",
        layers="layers",
        attention="self_attn",
        projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        norms=("input_layernorm", "post_attention_layernorm"),
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        activation="mlp.act_fn",
        down="mlp.down_proj",
        last_norm="norm",
        causal=True,
        token=-1,
    ),
    _Arrangement(
        kind="ViT",
        readout="classifier",
        layers="layers",
        attention="attention",
        projections=("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
        norms=("layernorm_before", "layernorm_after"),
        up="mlp.fc1",
        activation="mlp.activation_fn",
        down="mlp.fc2",
        last_norm="layernorm",
    ),
)


def read_classifier(model: nn.Module, x: Tensor, inputs: Mapping[str, Tensor] | None = None) -> Network:
    """Convert a classifier of a known kind to a Network, for sequences as long as x (n, d).

    The input of the stages is the input of the first layer. Only the token that the readout takes is computed
    after the last attention.

    Parameters
    ----------
    model
        A float64 model in evaluation mode.
    x
        The tokens at which its logits are compared with those of the stages, in float64.
    inputs
        The inputs of the model that give x, if known: then the model is run on these.

    Raises
    ------
    ArgumentError
        If the tokens have another width than the model's, or the model does not take them.
    CertificateError
        If a module has no stage, or forward hooks, or the model performs other operations than the stages;
        the module is named.

    """
    _check_hooks(model)
    names = {module: name for name, module in model.named_modules()}
    if encoder := encoder_layers(model):
        return _read_encoder(model, encoder, names, x)
    base = _base(model)
    found = _arrangement(model)
    token = torch.tensor([found.token % len(x)])
    visible = torch.ones(len(x), len(x), dtype=torch.bool).tril() if found.causal else None
    turns = _turns(base.rotary_emb, x) if hasattr(base, "rotary_emb") else None
    stages: list[Stage] = []
    layers = list(attrgetter(found.layers)(base))
    for index, layer in enumerate(layers):
        rows = token if index == len(layers) - 1 else torch.arange(len(x))
        try:
            stages += _layer(found, layer, names, rows, visible, turns, base.config)
        except AttributeError as error:
            kind, why = type(layer).__name__, f"is not a layer of {found.kind} ({error})"
            raise CertificateError(names[layer], kind=kind, reason=why) from None
    if found.last_norm is not None:
        stages.append(Stage("last norm", _norm(attrgetter(found.last_norm)(base), names), _ALL))
    if found.pooler is not None:
        pooler = attrgetter(found.pooler)(base)
        weight, bias = _linear(pooler.dense)
        identity = torch.eye(len(weight), dtype=torch.float64)
        tanh = known_activation(pooler.activation, names)
        pooled = FeedForward(weight, bias, tanh, identity, torch.zeros_like(bias))
        stages.append(Stage("pooler", pooled, _ALL))
    readout, offset = _linear(attrgetter(found.readout)(model))
    network = Network(tuple(stages), readout[:, None], offset)
    check_network(network, x)
    if (difference := _difference(model, network, x, inputs)) > _AGREEMENT:
        raise _other(model, difference)
    check_operations(
        lambda symbolic: _symbolic_logits(model, x, inputs, symbolic), network, (readout, offset), 0, x, names
    )
    return network


def _read_encoder(
    model: nn.Module, layers: list[nn.TransformerEncoderLayer], names: dict[nn.Module, str], x: Tensor
) -> Network:
    """Convert a PyTorch module with encoder layers, at most one final norm and a linear readout to a Network.

    The readout is of the mean token, the first or the last: that which reproduces the model's logits.
    """
    inside = {module for layer in layers for module in layer.modules()}
    others = [module for module in names if module not in inside and not list(module.children())]
    readouts = [module for module in others if isinstance(module, nn.Linear)]
    norms = [module for module in others if isinstance(module, nn.LayerNorm | nn.RMSNorm)]
    if len(readouts) != 1 or len(norms) > 1:
        why = (
            f"has {len(readouts)} linear layers and {len(norms)} norms beside its encoder layers, where one "
            "linear layer, the readout, and at most one norm are read"
        )
        raise CertificateError("", kind=type(model).__name__, reason=why, remedy=OF_ITS_OWN)
    weight, offset = _linear(readouts[0])
    n, error = len(x), math.inf

    def logits(symbolic: Symbolic) -> Any:
        return model(symbolic(torch.arange(x.numel()).view(1, *x.shape)))[0]

    for token in (None, 0, n - 1):
        stages: list[Stage] = []
        for index, layer in enumerate(layers):
            one = token is not None and index == len(layers) - 1
            own = layer.self_attn
            if type(own) is not nn.MultiheadAttention:
                kind, why = type(own).__name__, "has no remainder; torch.nn.MultiheadAttention has one"
                raise CertificateError(names[own], kind=kind, reason=why)
            parts = list(zip(own.in_proj_weight.chunk(3), _biases(own), strict=True))
            attention = _heads(
                [(part.detach().double().cpu(), bias) for part, bias in parts],
                _linear(own.out_proj),
                own.num_heads,
                torch.tensor([token]) if one else torch.arange(n),
            )
            feed_forward = FeedForward(
                *_linear(layer.linear1), _own_activation(layer, names), *_linear(layer.linear2)
            )
            both = [_norm(norm, names) for norm in (layer.norm1, layer.norm2)]
            stages += _residuals(names[layer], attention, feed_forward, both, layer.norm_first)
        stages += [Stage("last norm", _norm(norm, names), _ALL) for norm in norms]
        readout = weight[:, None]
        if token is None:
            readout = (readout / n).expand(-1, n, -1).contiguous()
        network = Network(tuple(stages), readout, offset)
        check_network(network, x, OF_ITS_OWN)
        error = _difference(model, network, x, None)
        if error <= _AGREEMENT:
            check_operations(logits, network, (weight, offset), token, x, names)
            return network
    raise _other(model, error)


def _own_activation(layer: nn.TransformerEncoderLayer, names: dict[nn.Module, str]) -> Activation:
    """Return the activation of a layer of PyTorch, which has a faster way that knows ReLU and GELU alone."""
    found = known_activation(layer.activation, names)
    fast = {1: "relu", 2: "gelu"}.get(getattr(layer, "activation_relu_or_gelu", 0))
    if fast is not None and found is not ACTIVATIONS[fast]:
        raise CertificateError(
            names[layer],
            kind=type(layer).__name__,
            reason=f"computes {fast} in place of its activation where PyTorch takes its fast path",
            remedy="Set its activation_relu_or_gelu to 0.",
        )
    return found


def _biases(attention: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    size = len(attention.in_proj_weight)
    bias = attention.in_proj_bias
    found = torch.zeros(size, dtype=torch.float64) if bias is None else bias.detach().double().cpu()
    return found.chunk(3)


def encoder_layers(model: nn.Module) -> list[nn.TransformerEncoderLayer]:
    """Return the Transformer layers of PyTorch in a model, in order."""
    return [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]


def check_network(network: Network, x: Tensor, remedy: str = "") -> None:
    """Raise an error if tokens x (n, d) do not have the width of the first layer of a network, or if its
    logits are not finite there.
    """
    first = network.stages[0].map
    by_kind = {Norm: "gain", Attention: "query", FeedForward: "up", GatedFeedForward: "up"}
    weight: Tensor = getattr(first, by_kind[type(first)])
    if x.shape[1] != weight.shape[-1]:
        expected = f"embedded tokens (n, {weight.shape[-1]}) of the width of the model"
        raise ArgumentError("inputs", expected=expected, got=f"the shape {tuple(x.shape)}", remedy=remedy)
    if not bool(torch.isfinite(network.logits(x)).all()):
        remedy = "Look for NaN, infinity or huge numbers in its weights."
        raise NonFiniteError("model", expected="finite logits", got="NaN or infinity", remedy=remedy)


def _base(model: nn.Module) -> Any:
    """Return the base model of a transformers classifier, which is the model without its
    classification head.
    """
    return getattr(model, getattr(model, "base_model_prefix", ""), model)


def _arrangement(model: nn.Module) -> _Arrangement:
    """Determine which known kind of classifier a model is, by the names of its modules."""
    base = _base(model)
    for found in _ARRANGEMENTS:
        try:
            (first, *_), readout = attrgetter(found.layers)(base), attrgetter(found.readout)(model)
            ends = [attrgetter(name)(base) for name in (found.last_norm, found.pooler) if name]
            attrgetter(*found.projections, *found.norms)(first)
        except (AttributeError, TypeError, ValueError):
            continue
        if isinstance(readout, nn.Linear) and all(isinstance(end, nn.Module) for end in ends):
            return found
    known = ", ".join(found.kind for found in _ARRANGEMENTS)
    kind = type(model).__name__
    base, causal, _ = kind.partition("ForCausalLM")
    load = (
        f"Load a trained classifier of this type as {base}ForSequenceClassification; from a language model's "
        "folder its classes would be untrained. For the next token, load it with as many labels as there are "
        "tokens, and copy lm_head.weight into score.weight: a functional of the logits as target= takes as "
        "long as one class. "
        if causal
        else ""
    )
    raise CertificateError(
        "",
        kind=kind,
        reason=f"is not a classifier of a known kind ({known}, with a linear readout)",
        remedy=f"{load}Layers of torch.nn.TransformerEncoderLayer are read in any module; other arrangements "
        "can be given as a howsmooth.bounds.radius.Network.",
    )


def _layer(
    found: _Arrangement,
    layer: nn.Module,
    names: dict[nn.Module, str],
    rows: Tensor,
    visible: Tensor | None,
    turns: Tensor | None,
    config: Any,
) -> list[Stage]:
    """Convert one Transformer layer to two stages, attention and feed-forward, each with norm and residual
    connection.
    """
    name = names[layer]
    attention = _attention(found, layer, rows, visible, turns, config)
    norms = [_norm(attrgetter(norm)(layer), names) for norm in found.norms]
    activation = known_activation(attrgetter(found.activation)(layer), names)
    up, down = (_linear(attrgetter(part)(layer)) for part in (found.up, found.down))
    feed_forward: FeedForward | GatedFeedForward
    if found.gate is None:
        feed_forward = FeedForward(*up, activation, *down)
    else:
        feed_forward = GatedFeedForward(*_linear(attrgetter(found.gate)(layer)), *up, activation, *down)
    return _residuals(name, attention, feed_forward, norms, found.pre_norm)


def _residuals(
    name: str,
    attention: Attention,
    feed_forward: FeedForward | GatedFeedForward,
    norms: list[Norm],
    pre_norm: bool,
) -> list[Stage]:
    """Return attention and feed-forward as two stages with residual connections and a norm layer each.

    The norms stand before attention and feed-forward if ``pre_norm`` is true, and otherwise after them.
    """
    stages = []
    for part, own, norm in (("attention", attention, norms[0]), ("feed-forward", feed_forward, norms[1])):
        if pre_norm:
            d = len(norm.gain)
            # The state is [x, norm(x)] in between.
            stages.append(Stage(f"{name}.{part} norm", norm, _ALL, keep=True))
            stages.append(Stage(f"{name}.{part}", own, slice(d, 2 * d), slice(0, d)))
        else:
            stages.append(Stage(f"{name}.{part}", own, _ALL, _ALL))
            stages.append(Stage(f"{name}.{part} norm", norm, _ALL))
    return stages


def _linear(module: Any) -> tuple[Tensor, Tensor]:
    weight = module.weight.detach().double().cpu()
    if type(module).__name__ == "Conv1D":  # the linear layer of GPT-2, whose weight is transposed
        weight = weight.T
    bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach().double().cpu()
    return weight, bias


def _attention(
    found: _Arrangement,
    layer: nn.Module,
    rows: Tensor,
    visible: Tensor | None,
    turns: Tensor | None,
    config: Any,
) -> Attention:
    heads = int(config.num_attention_heads)
    *parts, (mixed, mixed_bias) = (_linear(attrgetter(name)(layer)) for name in found.projections)
    if found.projections[0] == found.projections[1]:
        weight, bias = parts[0]
        parts = list(zip(weight.chunk(3), bias.chunk(3), strict=True))
    scale = getattr(attrgetter(found.attention)(layer), "scaling", None)
    return _heads(parts, (mixed, mixed_bias), heads, rows, visible, turns, scale)


def _heads(
    parts: list[tuple[Tensor, Tensor]],
    output: tuple[Tensor, Tensor],
    heads: int,
    rows: Tensor,
    visible: Tensor | None = None,
    turns: Tensor | None = None,
    scale: float | None = None,
) -> Attention:
    """Build a multi-head attention from the weights and biases of its query, key, value and output
    projections.
    """
    size = len(parts[0][0]) // heads
    split = []
    for weight, bias in parts:
        # Keys and values may be shared by several heads.
        own, own_bias = weight.unflatten(0, (-1, size)), bias.unflatten(0, (-1, size))
        repeated = heads // len(own)
        split += [own.repeat_interleave(repeated, 0), own_bias.repeat_interleave(repeated, 0)]
    scale = 1 / math.sqrt(size) if scale is None else float(scale)
    query, query_bias, key, key_bias, value, value_bias = split
    mixed = output[0].unflatten(1, (heads, -1)).movedim(1, 0)
    return Attention(
        query * scale,
        query_bias * scale,
        key,
        key_bias,
        value,
        value_bias,
        mixed,
        output[1],
        rows,
        visible,
        turns,
    )


def _turns(rotary: nn.Module, x: Tensor) -> Tensor:
    """Return the matrices (n, e, e) of the rotary positions 0 to n − 1, where entries i and i + e/2 form a
    pair.
    """
    positions = torch.arange(len(x))[None]
    with torch.no_grad(), WithoutDowncast():
        cos, sin = (part[0].double() for part in rotary(x[None], positions))
    half = cos.shape[1] // 2
    one = torch.eye(half, dtype=x.dtype)
    paired = torch.zeros(2 * half, 2 * half, dtype=x.dtype)
    paired[:half, half:], paired[half:, :half] = -one, one
    found: Tensor = torch.diag_embed(cos) + sin[..., None] * paired
    return found


def _norm(module: Any, names: dict[nn.Module, str]) -> Norm:
    centred = isinstance(module, nn.LayerNorm)
    known = centred or "RMSNorm" in type(module).__name__
    if not known or getattr(module, "weight", None) is None:
        why = "is neither a LayerNorm nor an RMSNorm with a weight"
        raise CertificateError(names[module], kind=type(module).__name__, reason=why)
    gain = module.weight.detach().double().cpu()
    bias = getattr(module, "bias", None)
    bias = torch.zeros_like(gain) if bias is None else bias.detach().double().cpu()
    epsilon = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    epsilon = torch.finfo(module.weight.dtype).eps if epsilon is None else epsilon
    return Norm(gain, bias, float(epsilon), centred)


def _check_token_ids(model: nn.Module, ids: Tensor) -> None:
    table = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(table, nn.Embedding) or not ids.numel():
        return
    low, high, rows = int(ids.min()), int(ids.max()), table.num_embeddings
    if low < 0 or high >= rows:
        raise ArgumentError(
            "inputs",
            expected=f"token ids from 0 to {rows - 1}, the rows of the model's embedding table",
            got=f"id {low if low < 0 else high}",
            remedy="Use the tokenizer that belongs to the model.",
        )


def embedded(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the tokens (n, d) that enter the first layer of a model, for a dict of model inputs.

    Raises
    ------
    ArgumentError
        If the inputs are not of one sequence or image, or the attention mask hides some tokens.

    """
    found = _arrangement(model)
    name = getattr(model, "main_input_name", "input_ids")
    given = inputs.get(name)
    if given is None or len(given) != 1 or (name == "input_ids" and given.ndim != 2):
        got = "none" if given is None else f"the shape {tuple(given.shape)}"
        raise ArgumentError("inputs", expected=f"{name} of one sequence (1, ...)", got=got)
    mask = inputs.get("attention_mask")
    if mask is not None and not bool(mask.bool().all()):
        raise ArgumentError(
            "inputs", expected="a sequence without padding", got="an attention_mask with zeros"
        )
    if name == "input_ids":
        _check_token_ids(model, given)
    seen: list[Tensor] = []

    def keep(call: Call) -> None:
        seen.append(call.args[0] if call.args else call.kwargs["hidden_states"])

    layers = attrgetter(found.layers)(_base(model))
    try:
        with watched({"": layers[0]}, keep):
            _logits(model, inputs)
    except (IndexError, RuntimeError, ValueError) as error:
        got = f"{name} of shape {tuple(given.shape)}, up to {given.max()} ({reason(error)})"
        raise ArgumentError("inputs", expected="inputs that the model takes", got=got) from None
    return seen[0][0]


def _logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute the logits (classes,) of a model in float64, even where the code of the model would round to
    float32.
    """
    with torch.no_grad(), WithoutDowncast():
        logits: Tensor = model(**inputs).logits[0]
    return logits


def model_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits (classes,) that the original model computes for tokens x (n, d) at its
    first layer.
    """
    if layers := encoder_layers(model):
        # The fast path needs biases, which an RMSNorm in place of a LayerNorm does not have.
        fast = all(hasattr(norm, "bias") for layer in layers for norm in (layer.norm1, layer.norm2))
        try:
            with torch.no_grad(), nullcontext() if fast else fast_path(False):
                logits: Tensor = model(x[None])[0]
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            got = f"tokens {tuple(x.shape)} that it does not take ({reason(error)})"
            raise ArgumentError(
                "inputs", expected="embedded tokens that the model takes", got=got, remedy=OF_ITS_OWN
            ) from None
        return logits

    return _logits_from(model, x[None], _stand_in(model, x))


def _stand_in(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return inputs of a model for as many tokens as x (n, d) has."""
    if getattr(model, "main_input_name", "") != "pixel_values":
        return {"inputs_embeds": x[None]}
    config: Any = model.config
    sides = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
    return {"pixel_values": x.new_zeros(1, config.num_channels, *sides)}


def _logits_from(model: nn.Module, tokens: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """Return the logits of a model, with other tokens (1, n, d) in place of those that enter its first layer
    for the first time.
    """

    def replaced(call: Call) -> None:
        if call.number == 0 and call.args:
            call.args = tokens, *call.args[1:]
        elif call.number == 0:
            call.kwargs = call.kwargs | {"hidden_states": tokens}

    layers = attrgetter(_arrangement(model).layers)(_base(model))
    with watched({"": layers[0]}, replaced):
        return _logits(model, given)


def _symbolic_logits(
    model: nn.Module, x: Tensor, inputs: Mapping[str, Tensor] | None, symbolic: Symbolic
) -> Tensor:
    """Return the logits of a model for symbolic tokens at its first layer.

    What it computes before has the entries ``OTHER``, so that nothing of it comes to the logits elsewhere.
    """

    def other(found: Tensor) -> Tensor:
        return symbolic(torch.full(found.shape, OTHER))

    given = dict(_stand_in(model, x) if inputs is None else inputs)
    main = {"inputs_embeds", "pixel_values"} & given.keys()
    given |= {name: other(given[name]) for name in main}
    tokens = symbolic(torch.arange(x.numel()).view(1, *x.shape))
    if main:
        return _logits_from(model, tokens, given)

    def embedded(call: Call) -> None:
        call.output = other(call.output)

    with watched({"": cast("Any", model).get_input_embeddings()}, ends=embedded):
        return _logits_from(model, tokens, given)


def _difference(model: nn.Module, network: Network, x: Tensor, inputs: Mapping[str, Tensor] | None) -> float:
    """Return the largest relative difference between the logits of the model and of the converted network.

    They are compared at x, at changed tokens and, if known, at the model's inputs.
    """
    noise = torch.Generator().manual_seed(0)
    change = torch.randn(x.shape, generator=noise, dtype=x.dtype) * x.std()
    pairs = [(model_logits(model, tokens), tokens) for tokens in (x, x + 0.1 * change, x + change)]
    if inputs is not None:
        pairs.append((_logits(model, inputs), x))
    errors = []
    for expected, tokens in pairs:
        found = network.logits(tokens)
        if found.shape != expected.shape:
            return math.inf
        errors.append(float((expected - found).abs().max() / (1 + expected.abs().max())))
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def _other(model: nn.Module, error: float) -> CertificateError:
    why = f"is not reproduced by its stages (relative difference {error:.1e} of the logits)"
    return CertificateError("", kind=type(model).__name__, reason=why)


def _check_hooks(model: nn.Module) -> None:
    """Raise CertificateError if a module has forward hooks that were not registered by this library. A hook
    may do nothing at the points at which the logits are compared, and something elsewhere.
    """
    for name, module in model.named_modules():
        if foreign_hooks(module):
            reason = "has forward hooks, which may change what it computes"
            raise CertificateError(name, kind=type(module).__name__, reason=reason, remedy="Remove them.")


def foreign_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks that were not registered by this library."""
    every = nn.modules.module
    hooks = [
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *every._global_forward_hooks.values(),
        *every._global_forward_pre_hooks.values(),
    ]
    return any(not getattr(hook, "__module__", "").startswith("howsmooth.") for hook in hooks)
