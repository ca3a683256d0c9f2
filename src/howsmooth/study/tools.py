"""The ingredients that a study is carried out with: what it needs of models, texts and estimates.

They arrive as arguments, so that the runner can be tested without a model, and so that another
measurement (the published one, say) can be run over the same plan and store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from howsmooth.study.records import SiteBounds

__all__ = ["Estimate", "Model", "SiteLike", "TextLike", "TokenizerLike", "Tools", "default_tools"]


@runtime_checkable
class TokenizerLike(Protocol):
    """What the study needs of a tokenizer, see :class:`howsmooth.models.tokenizers.Tokenizer`."""

    def __call__(self, text: str) -> list[int]: ...  # noqa: D102
    def located(self, text: str) -> tuple[list[int], list[int]]: ...  # noqa: D102
    def decoded(self, ids: list[int]) -> list[str]: ...  # noqa: D102


@runtime_checkable
class Model(Protocol):
    """What the study needs of a loaded model, see :class:`howsmooth.models.LoadedModel`."""

    @property
    def source(self) -> str: ...  # noqa: D102
    @property
    def tokenizer_source(self) -> str: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102
    @property
    def max_length(self) -> int | None: ...  # noqa: D102
    @property
    def layers(self) -> int | None: ...  # noqa: D102
    @property
    def heads(self) -> int | None: ...  # noqa: D102
    @property
    def obstacle(self) -> str: ...  # noqa: D102
    @property
    def tokenizer(self) -> TokenizerLike: ...  # noqa: D102


@runtime_checkable
class TextLike(Protocol):
    """What the study needs of a text, see :class:`howsmooth.texts.Text`."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def content(self) -> str: ...  # noqa: D102
    @property
    def digest(self) -> str: ...  # noqa: D102
    @property
    def source(self) -> str: ...  # noqa: D102


@runtime_checkable
class SiteLike(Protocol):
    """What the study needs of a captured attention layer, see :class:`howsmooth.models.Site`."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def layer(self) -> int: ...  # noqa: D102
    @property
    def head(self) -> int | None: ...  # noqa: D102
    @property
    def causal(self) -> bool: ...  # noqa: D102
    @property
    def masking(self) -> str: ...  # noqa: D102
    @property
    def x(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def map(self) -> Callable[[torch.Tensor], torch.Tensor]: ...  # noqa: D102
    @property
    def radius_mean(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def radius_max(self) -> torch.Tensor: ...  # noqa: D102


@runtime_checkable
class Estimate(Protocol):
    """What the study needs of an estimate, see :func:`howsmooth.local_lipschitz`."""

    @property
    def value(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def lower(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def upper(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def confidence(self) -> float: ...  # noqa: D102
    @property
    def converged(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def iterations(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def method(self) -> str: ...  # noqa: D102
    @property
    def input_direction(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def output_direction(self) -> torch.Tensor: ...  # noqa: D102


@dataclass(frozen=True)
class Tools:
    """The functions that a study calls; their signatures are those of the library's own.

    Attributes
    ----------
    load_model
        As :func:`howsmooth.models.load_model`.
    load_text
        As :func:`howsmooth.texts.load_text`.
    capture
        As :func:`howsmooth.models.capture`.
    measure
        As :func:`howsmooth.local_lipschitz`.
    bound
        As :func:`howsmooth.study.site_bounds.bound_site`; ``None`` for no bounds.
    open_input, feed
        As :func:`howsmooth.models.feeding.open_input` and :func:`howsmooth.models.feeding.feed_of`; ``None``
        if there is nothing but texts.

    """

    load_model: Callable[..., Model]
    load_text: Callable[[str], TextLike]
    capture: Callable[..., Sequence[Any]]
    measure: Callable[..., Estimate]
    bound: Callable[..., SiteBounds] | None = None
    open_input: Callable[..., Any] | None = None
    feed: Callable[..., Any] | None = None


def default_tools() -> Tools:
    """Return the library's own functions."""
    from howsmooth.lipschitz import local_lipschitz
    from howsmooth.models import capture, load_model
    from howsmooth.models.feeding import feed_of, open_input
    from howsmooth.study.site_bounds import bound_site
    from howsmooth.texts import load_text

    return Tools(
        load_model=load_model,
        load_text=load_text,
        capture=capture,
        measure=local_lipschitz,
        bound=bound_site,
        open_input=open_input,
        feed=feed_of,
    )
