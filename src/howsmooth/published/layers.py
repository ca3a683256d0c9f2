"""Capturing what the items need of a layer: both maps, and its tokens in evaluation and training mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from howsmooth.models import LoadedModel, Site, capture
from howsmooth.models.training import DropoutRates, dropout_rates, training_tokens

__all__ = ["PublishedLayer", "capture_layers"]


@dataclass(frozen=True, eq=False)
class PublishedLayer:
    """One layer at some sequences.

    Attributes
    ----------
    attention
        Captured with scope ``attention``.
    block
        Captured with scope ``block``, for post-norm layers; None for others.
    rates
        Of the model's dropout; None if its configuration states none.
    training_x
        The tokens in a pass in training mode, (batch, n, d); None if there is no dropout, or if the pass was
        not asked for.

    """

    attention: Site
    block: Site | None
    rates: DropoutRates | None
    training_x: Tensor | None


def capture_layers(
    model: nn.Module | LoadedModel,
    inputs: Tensor,
    layers: Sequence[int] | None = None,
    *,
    training: bool = True,
    seeds: Sequence[int],
) -> list[PublishedLayer]:
    """Capture layers of a model at token ids.

    Parameters
    ----------
    model, layers
        As for :func:`howsmooth.models.capture`.
    inputs
        Token ids (batch, n).
    training
        Whether to run the model once in training mode too, which ``dropout`` needs.
    seeds
        One a sequence, of the dropout in that pass.

    Raises
    ------
    CaptureError
        If a layer cannot be captured, or one module is used for several layers and there is dropout.

    """
    sites = capture(model, inputs, layers=layers)
    post_norm = [site.layer for site in sites if site.layout == "post-norm"]
    blocks = {
        site.layer: site
        for site in (capture(model, inputs, layers=post_norm, scope="block") if post_norm else ())
    }
    own = model.model if isinstance(model, LoadedModel) else model
    rates = dropout_rates(own)
    dropped: Sequence[Tensor | None] = [None] * len(sites)
    if training and rates is not None:
        dropped = training_tokens(own, inputs, sites, seeds)
    return [
        PublishedLayer(site, blocks.get(site.layer), rates, x) for site, x in zip(sites, dropped, strict=True)
    ]
