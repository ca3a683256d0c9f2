"""Check that a model computes what a network of layers does, operation by operation, from its tokens to its
logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.bounds.radius.symbolic_tensor import SymbolicTensor, refused_module, run_on_symbols
from howsmooth.bounds.radius.symbolic_terms import Terms
from howsmooth.bounds.radius.transformer_layers import (
    ACTIVATIONS,
    Activation,
    Attention,
    FeedForward,
    GatedFeedForward,
    Map,
    Norm,
)
from howsmooth.bounds.radius.transformer_network import Network
from howsmooth.errors import CertificateError

__all__ = ["check_operations", "known_activation"]

_OTHERWISE = "is not reproduced by its stages: it does not perform the operations"

Symbolic = Callable[[Tensor], SymbolicTensor]


def known_activation(function: Callable[[Tensor], Tensor], names: dict[nn.Module, str]) -> Activation:
    """Return the known activation function whose operations a module or function performs.

    Raises
    ------
    CertificateError
        If it performs others.

    """
    terms = Terms()
    z = terms.linear(torch.arange(2)[None], torch.eye(2, dtype=torch.float64), None)
    why = "has no remainder"
    try:
        found = run_on_symbols(lambda symbolic: function(symbolic(z)), terms, names)
        for known, activation in ACTIVATIONS.items():
            if torch.equal(found, terms.applied(known, z)):
                return activation
    except CertificateError as error:
        why += f", since it {error.reason}"
    name = names.get(function, "") if isinstance(function, nn.Module) else ""
    kind = getattr(function, "__name__", type(function).__name__)
    raise CertificateError(
        name, kind=kind, reason=f"{why}; activations that have one: {', '.join(ACTIVATIONS)}"
    )


def check_operations(
    logits: Callable[[Symbolic], Any],
    network: Network,
    readout: tuple[Tensor, Tensor],
    token: int | None,
    x: Tensor,
    names: dict[nn.Module, str],
) -> None:
    """Check that a model computes its logits from tokens x (n, d) with the operations of a network.

    Parameters
    ----------
    logits
        Computes the logits (classes,) of the model, given a function that makes symbolic tensors of entries.
        The entries of its tokens are 0 to n d − 1.
    network
        The network.
    readout, token
        Weight and bias of the last linear map, and which token of the last state it is given: an index, or
        None for their mean.
    x
        Tokens, of which the shape counts alone.
    names
        The modules of the model with their names.

    Raises
    ------
    CertificateError
        If the model computes something else.

    """
    terms = Terms()
    found = run_on_symbols(logits, terms, names)
    known = len(terms)
    state = torch.arange(x.numel()).view(x.shape)
    for stage in network.stages:
        output = _output(terms, stage.map, state[:, stage.branch])
        rows = state[stage.rows]
        if stage.residual is not None:
            output = terms.add(output, rows[:, stage.residual])
        state = torch.cat([rows, output], 1) if stage.keep else output
        if terms.newest(output) >= known:
            raise refused_module(names, f"{_OTHERWISE} of the stage '{stage.name}'")
    pooled = state[0] if token is not None or len(state) == 1 else terms.mean(state, 0)
    if not torch.equal(found, terms.linear(pooled, *readout)):
        raise refused_module(names, f"{_OTHERWISE} of the readout")


def _output(terms: Terms, layer: Map, u: Tensor) -> Tensor:
    """Return the entries that a layer computes from the entries u (n, d)."""
    match layer:
        case Norm():
            return terms.norm(u, layer.centred, layer.eps, layer.gain, layer.bias)
        case FeedForward():
            z = _activated(terms, layer.activation, terms.linear(u, layer.up, layer.up_bias))
            alone = torch.equal(layer.down, torch.eye(len(layer.down), dtype=torch.float64))
            if alone and not bool(layer.down_bias.any()):
                return z
            return terms.linear(z, layer.down, layer.down_bias)
        case GatedFeedForward():
            gate = _activated(terms, layer.activation, terms.linear(u, layer.gate, layer.gate_bias))
            both = terms.multiply(gate, terms.linear(u, layer.up, layer.up_bias))
            return terms.linear(both, layer.down, layer.down_bias)
        case Attention():
            return _attention(terms, layer, u)


def _activated(terms: Terms, activation: Activation, z: Tensor) -> Tensor:
    (name,) = (name for name, known in ACTIVATIONS.items() if known is activation)
    return terms.applied(name, z)


def _attention(terms: Terms, layer: Attention, u: Tensor) -> Tensor:
    hidden = torch.zeros(len(layer.rows), len(u), dtype=torch.float64)
    if layer.visible is not None:
        hidden.masked_fill_(~layer.visible[layer.rows], -torch.inf)
    heads = []
    for i in range(len(layer.query)):
        q = terms.linear(u[layer.rows], layer.query[i], layer.query_bias[i])
        k = terms.linear(u, layer.key[i], layer.key_bias[i])
        if layer.turns is not None:
            q, k = _turned(terms, layer.turns[layer.rows], q), _turned(terms, layer.turns, k)
        v = terms.linear(u, layer.value_weight[i], layer.value_bias[i])
        heads.append(terms.weighted(terms.softmax(terms.plus(terms.scores(q, k), hidden)), v))
    return terms.linear(torch.cat(heads, 1), layer.output.movedim(0, 1).flatten(1), layer.output_bias)


def _turned(terms: Terms, turns: Tensor, u: Tensor) -> Tensor:
    """Apply rotations (n, e, e) of the pairs of entries i and i + e/2, as in Llama."""
    half = u.shape[1] // 2
    cos = turns.diagonal(dim1=1, dim2=2)
    sin = torch.cat([-turns.diagonal(half, 1, 2), turns.diagonal(-half, 1, 2)], 1)
    swapped = torch.cat([terms.applied("neg", u[:, half:]), u[:, :half]], 1)
    return terms.add(terms.times(u, cos), terms.times(swapped, sin))
