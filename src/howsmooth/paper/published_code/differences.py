"""List the differences, called items, between the measurement of the published code and the
constant ‖D_X f‖.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from howsmooth.errors import ArgumentError
from howsmooth.models import LoadedModel, Site, capture
from howsmooth.paper.published_code.tokens_under_dropout import DropoutRates, dropout_rates, training_tokens
from howsmooth.study.plans import PUBLISHED_ITEMS as ITEMS

__all__ = ["ITEMS", "PublishedLayer", "capture_layers", "items_that_apply"]


def _in_order(items: Iterable[str]) -> tuple[str, ...]:
    """Sort items in the order of ``ITEMS``, and refuse unknown and repeated ones."""
    given = list(items)
    expected = f"all, or some of {', '.join(ITEMS)}"
    for item in given:
        if item not in ITEMS:
            raise ArgumentError("as-published", expected=expected, got=repr(item))
        if given.count(item) > 1:
            raise ArgumentError("as-published", expected="each item only once", got=f"{item!r} twice")
    return tuple(item for item in ITEMS if item in given)


@dataclass(frozen=True, eq=False)
class PublishedLayer:
    """One layer of a model, with all data that are needed to measure it with the method of the published
    code.

    ``attention`` is the layer captured with the scope ``attention``. ``block`` is the layer captured with the
    scope ``block`` if it is post-norm, and None otherwise. ``rates`` are the dropout rates of the model, or
    None if its configuration states none. ``training_x`` are the tokens that the layer receives in a forward
    pass in training mode, of shape (batch, n, d); None if the model has no dropout, or if this forward pass
    was not asked for.
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
    """Run a model, and return the data that are needed to measure its layers with the method of the published
    code.

    For each layer these data are its attention, its whole block if the layer is post-norm, and the tokens
    that the attention receives under dropout.

    Parameters
    ----------
    model, layers
        The arguments of :func:`howsmooth.models.capture`.
    inputs
        Token ids of shape (batch, n).
    training
        Whether to run the model once more in training mode, which the item ``dropout`` needs.
    seeds
        The seeds of the dropout in the forward pass in training mode, one for each sequence.

    Raises
    ------
    CaptureError
        If a layer cannot be captured, or if several layers share one module and there is dropout.

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


def items_that_apply(
    layer: PublishedLayer, asked: Iterable[str] | None = None, *, untrained: bool = False
) -> tuple[str, ...]:
    """Return the differences between the published measurement and ‖D_X f‖ that apply to a given layer, as
    keys of ``ITEMS``.

    Parameters
    ----------
    layer
        The result of :func:`~howsmooth.paper.published_code.capture_layers`.
    asked
        Some of ``ITEMS``; None stands for all items that apply.
    untrained
        Whether the model was built from its configuration, and is therefore in training mode by default. Then
        the item ``dropout`` applies if the model has dropout. If ``asked`` names ``dropout``, this item also
        applies to trained models.

    Raises
    ------
    ArgumentError
        If an item in ``asked`` does not apply; the message says why.

    """
    post_norm = layer.attention.layout == "post-norm"
    obstacles = {
        "block": "" if layer.block is not None else "its layers are not post-norm",
        "unmasked": (
            ""
            if layer.attention.causal and post_norm
            else "it is not an encoder run as a decoder, whose mask the model makes"
        ),
        "dropout": "" if layer.rates is not None else "its configuration states no dropout",
    }
    if asked is None:
        return tuple(item for item in ITEMS if not obstacles.get(item) and (item != "dropout" or untrained))
    items = _in_order(asked)
    for item in items:
        if obstacles.get(item):
            raise ArgumentError(
                "as-published",
                expected="items that apply to the model",
                got=f"{item!r}: {obstacles[item]}",
                remedy="Leave it out, or use all, which takes those that apply.",
            )
    return items
