"""The items by which the published measurement differs from ‖D_X f‖, and which of them apply where."""

from __future__ import annotations

from collections.abc import Iterable

from howsmooth.errors import ArgumentError
from howsmooth.published.layers import PublishedLayer

__all__ = ["ITEMS", "check_items", "items_that_apply", "parse_items"]

ITEMS = {
    "output": "the forward product gives the output f(X) in place of the tangent, so that the iteration "
    "returns the square root of the norm of Jᵀ f(X)",
    "block": "the map of a post-norm model is its attention with residual connection and norm",
    "unmasked": "the layer of an encoder run as a decoder is called alone, without the mask that the model "
    "makes for it",
    "dropout": "an untrained model stays in training mode: dropout acts on tokens and map, anew in each "
    "product",
    "stopping": "the power iteration stops when the square of the constant moves by less than 0.0001, or "
    "after 100 steps",
}
"""The items of a measurement, each with what it changes."""

_ELSEWHERE = {
    "slices": "It changes adversarial tokens: howsmooth reproduce adversarial --as-published shows it.",
    "c-3": "It changes a bound: howsmooth reproduce bounds --as-published shows it.",
}


def parse_items(text: str) -> tuple[str, ...] | None:
    """Read a comma list of items; None for ``all``, which means those that apply.

    Raises
    ------
    ArgumentError
        If a word is not one of ``ITEMS``, or stands there twice.

    """
    if text.strip() == "all":
        return None
    return check_items(word.strip() for word in text.split(","))


def check_items(items: Iterable[str]) -> tuple[str, ...]:
    """Return the items in the order of ``ITEMS``.

    Raises
    ------
    ArgumentError
        If one of them is none of ``ITEMS``, or stands there twice.

    """
    given = list(items)
    expected = f"all, or some of {', '.join(ITEMS)}"
    for item in given:
        if item not in ITEMS:
            raise ArgumentError(
                "as-published", expected=expected, got=repr(item), remedy=_ELSEWHERE.get(item, "")
            )
        if given.count(item) > 1:
            raise ArgumentError("as-published", expected="each item only once", got=f"{item!r} twice")
    return tuple(item for item in ITEMS if item in given)


def items_that_apply(
    layer: PublishedLayer, asked: Iterable[str] | None = None, *, untrained: bool = False
) -> tuple[str, ...]:
    """Return the items that make a difference at a layer; those asked for must be among them.

    Parameters
    ----------
    layer
        From :func:`~howsmooth.published.capture_layers`.
    asked
        Some of ``ITEMS``; None for all that apply.
    untrained
        Whether the model was built from its configuration: it is then in training mode until told
        otherwise. With it, ``dropout`` applies to models that have any; asked for by name, to trained
        ones too.

    Raises
    ------
    ArgumentError
        If an item asked for cannot apply; the message says why.

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
        kept = (item for item in ITEMS if not obstacles.get(item) and (item != "dropout" or untrained))
        return check_items(kept)
    items = check_items(asked)
    for item in items:
        if obstacles.get(item):
            raise ArgumentError(
                "as-published",
                expected="items that apply to the model",
                got=f"{item!r}: {obstacles[item]}",
                remedy="Leave it out, or use all, which takes those that apply.",
            )
    return items
