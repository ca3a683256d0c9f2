"""Read a pretrained classifier as a network of stages, and verify that both compute the same logits.

A model is recognised by the names of its modules, and by nothing else. What decides is the comparison: the
stages must reproduce the model's logits at the given tokens and at changed ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.bounds.radius.network import Network, Stage
from howsmooth.bounds.radius.stages import ACTIVATIONS, Activation, Attention, FeedForward, Norm
from howsmooth.errors import ArgumentError, CertificateError, reason

__all__ = ["embedded", "model_logits", "read_classifier"]

_ALL = slice(None)
_AGREEMENT = 1e-9


def read_classifier(model: nn.Module, x: Tensor) -> Network:
    """Return the stages of a classifier of the BERT kind, for sequences as long as x (n, d).

    The input of the stages is the output of the embedding layer. Only the first token is computed after the
    last attention, since the pooler reads no other.

    Raises
    ------
    CertificateError
        If a module has no stage, or the stages do not reproduce the model's logits; the module is named.

    """
    base = _base(model)
    layers = getattr(getattr(base, "encoder", None), "layer", None)
    pooler, classifier = getattr(base, "pooler", None), getattr(model, "classifier", None)
    if not isinstance(layers, nn.ModuleList) or pooler is None or not isinstance(classifier, nn.Linear):
        raise CertificateError(
            "",
            kind=type(model).__name__,
            reason="is not of the BERT kind (encoder.layer, pooler, a linear classifier)",
            remedy="Other arrangements of modules have no reader yet.",
        )
    names = {module: name for name, module in model.named_modules()}
    first = torch.zeros(1, dtype=torch.int64)
    stages: list[Stage] = []
    for index, layer in enumerate(layers):
        rows = first if index == len(layers) - 1 else torch.arange(len(x))
        stages += _post_norm_layer(layer, names, rows)
    weight, bias = _linear(pooler.dense)
    identity = torch.eye(len(weight), dtype=torch.float64)
    tanh = _activation(pooler.activation, names)
    pooled = FeedForward(weight, bias, tanh, identity, torch.zeros_like(bias))
    stages.append(Stage("pooler", pooled, _ALL))
    readout, offset = _linear(classifier)
    network = Network(tuple(stages), readout[:, None], offset)
    _verify(model, network, x)
    return network


def _base(model: nn.Module) -> Any:
    """Return the model without its classifier."""
    return getattr(model, getattr(model, "base_model_prefix", ""), model)


def _post_norm_layer(layer: Any, names: dict[nn.Module, str], rows: Tensor) -> list[Stage]:
    """Return attention + residual, norm, feed-forward + residual, norm of a layer of BERT."""
    name = names[layer]
    try:
        own, mixed = layer.attention.self, layer.attention.output
        attention = _attention(
            own.query, own.key, own.value, mixed.dense, own.num_attention_heads, own.scaling, rows
        )
        up, up_bias = _linear(layer.intermediate.dense)
        activation = _activation(layer.intermediate.intermediate_act_fn, names)
        feed_forward = FeedForward(up, up_bias, activation, *_linear(layer.output.dense))
        norms = _layer_norm(mixed.LayerNorm, names), _layer_norm(layer.output.LayerNorm, names)
    except AttributeError as error:
        raise CertificateError(
            name, kind=type(layer).__name__, reason=f"is not a layer of BERT ({error})"
        ) from None
    return [
        Stage(f"{name}.attention", attention, _ALL, _ALL),
        Stage(f"{name}.attention norm", norms[0], _ALL),
        Stage(f"{name}.feed-forward", feed_forward, _ALL, _ALL),
        Stage(f"{name}.feed-forward norm", norms[1], _ALL),
    ]


def _linear(module: nn.Linear) -> tuple[Tensor, Tensor]:
    weight = module.weight.detach().double().cpu()
    bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach().double().cpu()
    return weight, bias


def _attention(
    query: nn.Linear,
    key: nn.Linear,
    value: nn.Linear,
    output: nn.Linear,
    heads: int,
    scale: float,
    rows: Tensor,
) -> Attention:
    split = {}
    for name, module in (("query", query), ("key", key), ("value", value)):
        weight, bias = _linear(module)
        split[name] = weight.unflatten(0, (heads, -1)), bias.unflatten(0, (heads, -1))
    mixed, mixed_bias = _linear(output)
    return Attention(
        split["query"][0] * scale,
        split["query"][1] * scale,
        *split["key"],
        *split["value"],
        mixed.unflatten(1, (heads, -1)).movedim(1, 0),
        mixed_bias,
        rows,
    )


def _layer_norm(module: nn.Module, names: dict[nn.Module, str]) -> Norm:
    if not isinstance(module, nn.LayerNorm) or module.weight is None:
        kind = type(module).__name__
        raise CertificateError(names[module], kind=kind, reason="is not a LayerNorm with a weight")
    gain = module.weight.detach().double().cpu()
    bias = torch.zeros_like(gain) if module.bias is None else module.bias.detach().double().cpu()
    return Norm(gain, bias, module.eps, centred=True)


def _activation(module: Any, names: dict[nn.Module, str]) -> Activation:
    """Return the activation that has the module's values on a grid."""
    grid = torch.linspace(-8, 8, 1601, dtype=torch.float64)
    with torch.no_grad():
        values = module(grid)
    for activation in ACTIVATIONS.values():
        if torch.allclose(values, activation.value(grid), rtol=1e-12, atol=1e-13):
            return activation
    kind = type(module).__name__
    known = ", ".join(ACTIVATIONS)
    raise CertificateError(
        names.get(module, ""), kind=kind, reason=f"has no remainder; activations that have one: {known}"
    )


def embedded(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the output of the model's embedding layer (n, d) for a dict of inputs of one sequence.

    Raises
    ------
    ArgumentError
        If there are no ``input_ids`` (1, n), or the attention mask hides some of them.

    """
    ids = inputs.get("input_ids")
    if ids is None or ids.ndim != 2 or len(ids) != 1:
        got = "none" if ids is None else f"the shape {tuple(ids.shape)}"
        raise ArgumentError("inputs", expected="input_ids of one sequence (1, n)", got=got)
    mask = inputs.get("attention_mask")
    if mask is not None and not bool(mask.bool().all()):
        raise ArgumentError(
            "inputs", expected="a sequence without padding", got="an attention_mask with zeros"
        )
    base = _base(model)
    if not isinstance(getattr(base, "embeddings", None), nn.Module):
        raise CertificateError("", kind=type(model).__name__, reason="has no module named embeddings")
    try:
        with torch.no_grad():
            found: Tensor = base.embeddings(input_ids=ids, token_type_ids=inputs.get("token_type_ids"))
    except (IndexError, RuntimeError) as error:
        got = f"{ids.shape[1]} ids up to {int(ids.max())} ({reason(error)})"
        raise ArgumentError("inputs", expected="input_ids that the model can embed", got=got) from None
    return found[0]


def model_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return the model's own logits (classes,) for the embedded tokens x (n, d).

    The tokens replace the output of the model's embedding layer for this call.
    """
    base = _base(model)
    embeddings = base.embeddings
    embeddings.forward = lambda *args, **kwargs: x[None]
    try:
        with torch.no_grad():
            logits: Tensor = model(inputs_embeds=x[None]).logits[0]
            return logits
    finally:
        del embeddings.forward


def _verify(model: nn.Module, network: Network, x: Tensor) -> None:
    """Compare logits at x and at changed tokens; raise CertificateError where they differ."""
    noise = torch.Generator().manual_seed(0)
    change = torch.randn(x.shape, generator=noise, dtype=x.dtype) * x.std()
    for tokens in (x, x + 0.1 * change, x + change):
        expected, found = model_logits(model, tokens), network.logits(tokens)
        error = float((expected - found).abs().max() / (1 + expected.abs().max()))
        if not error < _AGREEMENT:
            raise CertificateError(
                "",
                kind=type(model).__name__,
                reason=f"is not reproduced by its stages (relative difference {error:.1e} of the logits)",
            )
