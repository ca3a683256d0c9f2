"""``capture``: the attention layers of a model as maps, at the tokens that a given input produces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models.borrow import borrowed, implementation
from howsmooth.models.given import ModelInputs, model_inputs
from howsmooth.models.load import LoadedModel
from howsmooth.models.mixers import NO_SOFTMAX, LayersWithoutSoftmax
from howsmooth.models.owners import CrossAttention
from howsmooth.models.passes import Wanted, forward_pass
from howsmooth.models.site import SCOPES, Site
from howsmooth.models.verified import indices_of, read_layer

__all__ = ["capture"]


def capture(
    model: nn.Module | LoadedModel,
    inputs: Tensor | Mapping[str, Tensor],
    layers: Sequence[int] | None = None,
    scope: str = "attention",
    heads: Sequence[int] | None = None,
) -> list[Site]:
    """Run a model on inputs and return its attention layers as maps, each with the tokens it was applied to.

    The model runs once, in evaluation mode (no dropout), without gradients and without a cache, and is left
    as it was found. Then each layer is run by itself: its structure is found by comparing the numbers that
    flow through it, and each map is held against the model's own output at these tokens and at changed ones,
    so that a map that is returned is the model's own to float precision, its mask included.

    Parameters
    ----------
    model
        Any PyTorch module in float32 or float64 that computes softmax attention: a transformers model, what
        :func:`~howsmooth.models.load_model` returns, ``torch.nn.TransformerEncoder``, or one of your own.
    inputs
        Token ids (batch, n), or a dict of the model's inputs; for a module that is not of transformers
        its first argument, or a dict of its arguments by name. An encoder-decoder that is given no
        ``decoder_input_ids`` gets the same tokens. Sequences that an ``attention_mask`` shows to be padded
        are measured one by one, without the padding.
    layers
        Which layers, counted in the order of the model's softmaxes, negative from the end; by default all of
        self-attention (cross-attention is left out; asked for by its index, it is refused).
    scope
        What to call attention: ``"head"``, ``"heads"``, ``"attention"``, ``"residual"`` or ``"block"``
        (see :class:`Site`).
    heads
        Which heads, in scope ``"head"`` only; all by default.

    Returns
    -------
    list of Site
        One for each layer, in the order asked for; in scope ``"head"`` one for each layer and head; of padded
        sequences one for each sequence besides.

    Raises
    ------
    ArgumentError
        If an argument is not of the kind described above.
    CaptureError
        If a layer does something that is not recognised, or fails its verification; the message says
        what lies in the way. Nothing is ever returned that was not verified.

    """
    if isinstance(model, LoadedModel):
        model = model.model
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            "model",
            expected="a transformers PreTrainedModel, what load_model returns, or another torch.nn.Module",
            got=type(model).__name__,
            remedy="To load one by its name, use howsmooth.models.load_model.",
        )
    if scope not in SCOPES:
        raise ArgumentError("scope", expected=f"one of {', '.join(SCOPES)}", got=repr(scope))
    if heads is not None and scope != "head":
        raise ArgumentError(
            "heads", expected="None unless scope is 'head'", got=f"{heads!r} with scope {scope!r}"
        )
    wanted = Wanted(None if layers is None else _checked("layers", layers))
    heads = None if heads is None else _checked("heads", heads)
    given = model_inputs(model, inputs)
    with borrowed(model):
        return _captured(model, given, wanted, scope, heads)


def _captured(
    model: nn.Module, given: ModelInputs, wanted: Wanted, scope: str, heads: Sequence[int] | None
) -> list[Site]:
    """Capture sequences of one length without padding."""
    seen, kept = forward_pass(model, (), given.named, wanted)
    if not seen:
        raise CaptureError(_nothing_seen(model, given))
    indices = (
        list(range(len(seen))) if wanted.indices is None else indices_of(wanted.indices, len(seen), "layer")
    )
    sites: list[Site] = []
    for index in indices:
        try:
            sites += read_layer(kept[index], given.batch, implementation(model)).sites(scope, heads)
        except CrossAttention:
            if wanted.indices is not None:
                raise
        # Whatever the layer was given is not needed any more.
        kept.pop(index, None)
    if not sites:
        raise CaptureError(f"{type(model).__name__} has cross-attention only, which is not captured.")
    return sites


def _nothing_seen(model: nn.Module, given: ModelInputs) -> str:
    none = f"No softmax attention of {type(model).__name__} was seen"
    members = LayersWithoutSoftmax(most=4)
    with members.hooked(model):
        forward_pass(model, (), given.named, Wanted(()))
    mixer = next(members.mixers(given.batch), None)
    if mixer is not None:
        return f"{none}. Its layer {mixer.name} ({mixer.module}) mixes tokens with {NO_SOFTMAX}."
    classes = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
    named = ", ".join(classes) if classes else "no module with attention in its name"
    return (
        f"{none} ({named}): it has none, or a fused kernel computes it (load the model with "
        "attn_implementation='sdpa' then)."
    )


def _checked(argument: str, given: object) -> tuple[int, ...]:
    """Check a list of indices as far as that can be done before their number is known."""
    expected = f"a list of {argument[:-1]} indices"
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ArgumentError(argument, expected=expected, got=repr(given))
    if not given:
        raise ArgumentError(
            argument, expected=expected, got="an empty list", remedy=f"None means every {argument[:-1]}."
        )
    for index in given:
        if isinstance(index, bool) or not isinstance(index, int):
            raise ArgumentError(argument, expected=expected, got=repr(index))
    return tuple(given)
