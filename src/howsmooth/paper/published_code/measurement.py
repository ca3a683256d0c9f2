"""Measure constants with the method of the published code. Some or all of the differences between this method
and a measurement of ‖D_X f‖, called items, can be included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor, nn

from howsmooth.errors import ArgumentError
from howsmooth.lipschitz import local_lipschitz
from howsmooth.models import LoadedModel
from howsmooth.paper.published_code.altered_attention import unmasked, with_dropout
from howsmooth.paper.published_code.differences import PublishedLayer, capture_layers, items_that_apply
from howsmooth.paper.published_code.power_iteration import power_iteration

__all__ = ["AsPublished", "measure_as_published", "measure_layer"]

# Items that need the published power iteration; with other items, `local_lipschitz` measures.
_OF_THE_ITERATION = frozenset({"output", "dropout", "stopping"})
# Added to the seed of a start to get the seed of dropout, so that the random numbers differ.
_APART = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class AsPublished:
    """Constants measured with the method of the published code, one for each sequence.

    ``lower`` and ``upper`` are the ends of an interval if :func:`howsmooth.local_lipschitz` measured. They
    are NaN if the power iteration of the published code measured, because it gives no interval. ``settled``
    says whether the stopping rule ended the iteration, rather than the largest number of steps. ``steps`` is
    the number of steps, each with one product with J and one with Jᵀ. ``items`` are the differences of the
    published code that were used, in the order of ``ITEMS``. ``map`` is a phrase that describes the measured
    map.
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
    """Measure one layer of a model at given token ids with the method of the published code.

    Parameters
    ----------
    model
        The argument of :func:`howsmooth.models.capture`.
    tokens
        Token ids of shape (batch, n).
    layer
        The index of the attention layer; negative numbers count from the end.
    items
        Which differences of the published code, out of ``ITEMS``, are used; None stands for all that apply.
        An empty list gives the correct quantity, ‖D_X f‖ of the layer's attention with its mask.
    untrained
        Whether the weights are random. A model built from its configuration is in training mode, so the item
        ``dropout`` applies.
    seed
        The seed of the random starts and of the dropout.

    Raises
    ------
    ArgumentError
        If an item is unknown or does not apply to the model.
    CaptureError
        If the layer cannot be captured.

    References
    ----------
    The code published with Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024; documentation page
    "As published".

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
    """Measure one captured layer with the method of the published code, including the given differences from
    ‖D_X f‖, which are called items.

    The argument ``layer`` comes from :func:`~howsmooth.paper.published_code.capture_layers`. All ``items``
    must apply to the layer. There is one seed for each sequence. The other arguments are those of
    :func:`howsmooth.local_lipschitz`.
    """
    chosen = items_that_apply(layer, items)
    site = layer.block if "block" in chosen and layer.block is not None else layer.attention
    f = unmasked(site.map) if "unmasked" in chosen else site.map
    if not _OF_THE_ITERATION & set(chosen):
        found = local_lipschitz(
            f, site.x, rtol=rtol, confidence=confidence, max_iterations=max_iterations, seed=seeds
        )
        return AsPublished(
            found.value, found.lower, found.upper, found.converged, found.iterations, chosen, f.describe()
        )
    x, maps = site.x, [f] * len(seeds)
    if "dropout" in chosen and layer.rates is not None and layer.training_x is not None:
        # The tokens of a post-norm block are the tokens of its attention, so this also holds for blocks.
        x = layer.training_x
        rates = layer.rates
        maps = [
            with_dropout(f, weights=rates.weights, outputs=rates.outputs, seed=(seed + _APART) % 2**63)
            for seed in seeds
        ]
    runs = [
        power_iteration(one, member, output="output" in chosen, absolute="stopping" in chosen, seed=seed)
        for one, member, seed in zip(maps, x, seeds, strict=True)
    ]
    nothing = torch.full((len(runs),), torch.nan, dtype=torch.float64)
    return AsPublished(
        value=torch.tensor([run.value for run in runs], dtype=torch.float64),
        lower=nothing,
        upper=nothing.clone(),
        settled=torch.tensor([run.settled for run in runs]),
        steps=torch.tensor([run.steps for run in runs]),
        items=chosen,
        map=maps[0].describe(),
    )
