"""Measure constants with the method of the published code. Some or all of the differences between this method
and a measurement of ‖D_X f‖, called items, can be included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn

from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.lipschitz import local_lipschitz
from howsmooth.models import LoadedModel, Site, capture
from howsmooth.models.measurement_mode import measurement_mode
from howsmooth.models.model_call import ModelCall
from howsmooth.models.tracing.attention_recorder import run_once
from howsmooth.paper.published_code.altered_attention import unmasked, with_dropout
from howsmooth.seeds import torch_seed
from howsmooth.study.plans import PUBLISHED_ITEMS as ITEMS
from howsmooth.watching import Call, watched

__all__ = [
    "ITEMS", "AsPublished", "PowerIteration", "PublishedLayer",
    "capture_layers", "items_that_apply", "measure_as_published", "measure_layer", "power_iteration",
]  # fmt: skip

_MOST_STEPS = 100
_STOP_BELOW, _STOP_BELOW_RELATIVE = 1e-4, 1e-6
# Items that need the published power iteration; with other items, `local_lipschitz` measures.
_OF_THE_ITERATION = frozenset({"output", "dropout", "stopping"})
# Added to the seed of a start to get the seed of dropout, so that the random numbers differ.
_APART = 0x9E3779B97F4A7C15
# The names of the dropout rates of attention weights and outputs in the configurations of transformers.
_RATES = (
    ("attn_pdrop", "attention_probs_dropout_prob", "attention_dropout"),
    ("resid_pdrop", "hidden_dropout_prob", "resid_dropout"),
)


class PowerIteration(NamedTuple):
    """An estimate of ‖J‖ by power iteration, the number of steps, and whether the stopping rule ended it."""

    value: float
    steps: int
    settled: bool


def power_iteration(
    f: Callable[[Tensor], Tensor],
    x: Float[Tensor, "n d"],
    *,
    output: bool,
    absolute: bool,
    seed: int,
) -> PowerIteration:
    """Run at most 100 steps of the published code's power iteration on JᵀJ, from a Gaussian start.

    One step computes Jᵀw with w = J u and normalises it, which gives the next u; the estimate is √μ, where μ
    is the norm of the last Jᵀw. With ``output``, f(X) takes the place of J u: the estimate is then
    ‖Jᵀ f(X)‖^½ from the first step on. With ``absolute`` the iteration stops when μ changes by less than
    1e-4, and otherwise by less than 1e-6 μ. ``f`` is called for each product, so that dropout differs.
    """
    generator = torch.Generator().manual_seed(torch_seed(seed))
    u = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    u = u / torch.linalg.vector_norm(u)
    previous = -1.0
    for step in range(1, _MOST_STEPS + 1):
        w = f(x) if output else torch.func.jvp(f, (x,), (u,))[1]
        image = torch.func.vjp(f, x)[1](w)[0]
        mu = float(torch.linalg.vector_norm(image))
        limit = _STOP_BELOW if absolute else _STOP_BELOW_RELATIVE * mu
        if mu == 0.0 or (previous >= 0 and abs(mu - previous) < limit):
            return PowerIteration(mu**0.5, step, settled=True)
        previous, u = mu, image / mu
    return PowerIteration(previous**0.5, _MOST_STEPS, settled=False)


@dataclass(frozen=True, eq=False)
class PublishedLayer:
    """One layer of a model, with what is needed to measure it as the published code does.

    ``block`` is the whole block of a post-norm layer, ``rates`` are the dropout rates of attention weights
    and outputs, and ``training_x`` are the tokens (batch, n, d) that the layer receives in training mode.
    Each is None if there is none.
    """

    attention: Site
    block: Site | None
    rates: tuple[float, float] | None
    training_x: Tensor | None


def capture_layers(
    model: nn.Module | LoadedModel,
    inputs: Tensor,
    layers: Sequence[int] | None = None,
    *,
    training: bool = True,
    seeds: Sequence[int],
) -> list[PublishedLayer]:
    """Run a model on token ids (batch, n), as :func:`howsmooth.models.capture` does, and return its layers as
    the published code measures them.

    With ``training``, a model with dropout runs once more in training mode, which the item ``dropout`` needs;
    ``seeds`` has a seed for each sequence.

    Raises
    ------
    CaptureError
        If a layer cannot be captured, or if several layers share one module and there is dropout.

    """
    sites = capture(model, inputs, layers=layers)
    post_norm = [site.layer for site in sites if site.layout == "post-norm"]
    found = capture(model, inputs, layers=post_norm, scope="block") if post_norm else []
    blocks = {site.layer: site for site in found}
    own = model.model if isinstance(model, LoadedModel) else model
    weights, outputs = (
        next((float(rate) for name in names if (rate := getattr(own.config, name, None)) is not None), 0.0)
        for names in _RATES
    )
    rates = (weights, outputs) if weights or outputs else None
    dropped: Sequence[Tensor | None] = [None] * len(sites)
    if training and rates is not None:
        dropped = _training_tokens(own, inputs, sites, seeds)
    return [
        PublishedLayer(site, blocks.get(site.layer), rates, x) for site, x in zip(sites, dropped, strict=True)
    ]


def _training_tokens(
    model: nn.Module, inputs: Tensor, sites: Sequence[Site], seeds: Sequence[int]
) -> list[Tensor]:
    """Run a model with dropout, with a seed for each sequence; return the tokens that enter each layer."""
    seen: dict[str, list[Tensor]] = {site.name: [] for site in sites}

    def keep(call: Call) -> None:
        if call.inputs is not None:
            seen[call.name].append(call.inputs.detach().clone())

    with watched({name: model.get_submodule(name) for name in seen}, keep), measurement_mode(model):
        for module in model.modules():
            module.training = True
        for sequence, seed in zip(inputs, seeds, strict=True):
            torch.manual_seed(torch_seed(seed))
            run_once(ModelCall(model, {"input_ids": sequence[None].to(model.device)}, 1))
    if len(seen) != len(sites) or any(len(tokens) != len(inputs) for tokens in seen.values()):
        raise CaptureError(
            f"{type(model).__name__} uses one attention module for several layers, so that the tokens of one "
            "layer in training mode cannot be distinguished from another's. Leave dropout out."
        )
    return [torch.cat(seen[site.name]) for site in sites]


def items_that_apply(
    layer: PublishedLayer, asked: Iterable[str] | None = None, *, untrained: bool = False
) -> tuple[str, ...]:
    """Return the differences between the published code and the definition (items) that apply to a layer:
    all, or those in ``asked``. Their order is that of ``ITEMS``.

    A model that was built from its configuration, ``untrained``, is in training mode by default, so that the
    item ``dropout`` applies if the model has dropout; to trained models it applies if ``asked`` names it.

    Raises
    ------
    ArgumentError
        If an item in ``asked`` is unknown, is named twice or does not apply; the message says why.

    """
    post_norm = layer.attention.layout == "post-norm"
    masked = layer.attention.causal and post_norm
    obstacles = {
        "block": "" if layer.block is not None else "its layers are not post-norm",
        "unmasked": "" if masked else "it is not an encoder run as a decoder, whose mask the model makes",
        "dropout": "" if layer.rates is not None else "its configuration states no dropout",
    }
    if asked is None:
        return tuple(item for item in ITEMS if not obstacles.get(item) and (item != "dropout" or untrained))
    items = list(asked)
    if not set(items) <= set(ITEMS) or len(set(items)) < len(items):
        expected = f"all, or some of {', '.join(ITEMS)}, each only once"
        raise ArgumentError("as-published", expected=expected, got=", ".join(map(repr, items)))
    chosen = tuple(item for item in ITEMS if item in items)
    for item in chosen:
        if obstacles.get(item):
            raise ArgumentError(
                "as-published",
                expected="items that apply to the model",
                got=f"{item!r}: {obstacles[item]}",
                remedy="Leave it out, or use all, which takes those that apply.",
            )
    return chosen


@dataclass(frozen=True, eq=False)
class AsPublished:
    """Constants measured with the method of the published code, one for each sequence.

    ``lower`` and ``upper`` are NaN if the published power iteration measured, because it gives no interval.
    ``settled`` says whether the stopping rule ended the iteration. Each of the ``steps`` takes one product
    with J and one with Jᵀ. ``items`` are the differences that were used, in the order of ``ITEMS``; ``map``
    describes the measured map.
    """

    value: Float64[Tensor, " batch"]
    lower: Float64[Tensor, " batch"]
    upper: Float64[Tensor, " batch"]
    settled: Bool[Tensor, " batch"]
    steps: Int[Tensor, " batch"]
    items: tuple[str, ...]
    map: str


def measure_as_published(
    model: nn.Module | LoadedModel,
    tokens: Tensor,
    layer: int,
    items: Iterable[str] | None = None,
    *,
    untrained: bool = False,
    seed: int = 0,
) -> AsPublished:
    """Measure one layer of a model at token ids (batch, n) with the method of the published code.

    ``items`` are the differences that are used, out of ``ITEMS``; None stands for all that apply, and an
    empty list gives the correct quantity, ‖D_X f‖ of the layer's attention with its mask. ``untrained`` is as
    for :func:`items_that_apply`; ``seed`` is that of the random starts and of the dropout. The errors are
    those of :func:`capture_layers` and :func:`items_that_apply`.
    """
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        got = f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ArgumentError("tokens", expected="token ids of shape (batch, n)", got=got)
    seeds = [seed + member for member in range(len(tokens))]
    training = untrained if items is None else "dropout" in (items := list(items))
    (captured,) = capture_layers(model, tokens, [layer], training=training, seeds=seeds)
    chosen = items_that_apply(captured, items, untrained=untrained)
    return measure_layer(captured, chosen, seeds=seeds)


def measure_layer(
    layer: PublishedLayer,
    items: Sequence[str],
    *,
    seeds: Sequence[int],
    rtol: float = 1e-4,
    confidence: float = 0.999,
    max_iterations: int = 200,
) -> AsPublished:
    """Measure one captured layer with the given items, and with a seed for each sequence. The other arguments
    are those of :func:`howsmooth.local_lipschitz`.
    """
    chosen = items_that_apply(layer, items)
    site = layer.block if "block" in chosen and layer.block is not None else layer.attention
    f = unmasked(site.map) if "unmasked" in chosen else site.map
    if not _OF_THE_ITERATION & set(chosen):
        how: dict[str, Any] = {"rtol": rtol, "confidence": confidence, "max_iterations": max_iterations}
        found = local_lipschitz(f, site.x, seed=seeds, **how)
        values = found.value, found.lower, found.upper, found.converged, found.iterations
        return AsPublished(*values, chosen, f.describe())
    x, maps = site.x, [f] * len(seeds)
    if "dropout" in chosen and layer.rates is not None and layer.training_x is not None:
        # The tokens of a post-norm block are the tokens of its attention, so this also holds for blocks.
        x, (weights, outputs) = layer.training_x, layer.rates
        apart = [(seed + _APART) % 2**63 for seed in seeds]
        maps = [with_dropout(f, weights=weights, outputs=outputs, seed=seed) for seed in apart]
    runs = [
        power_iteration(one, member, output="output" in chosen, absolute="stopping" in chosen, seed=seed)
        for one, member, seed in zip(maps, x, seeds, strict=True)
    ]
    values, steps, settled = zip(*runs, strict=True)
    value = torch.tensor(values, dtype=torch.float64)
    nothing = torch.full((len(runs),), torch.nan, dtype=torch.float64)
    ended = torch.tensor(settled), torch.tensor(steps)
    return AsPublished(value, nothing, nothing.clone(), *ended, chosen, maps[0].describe())
