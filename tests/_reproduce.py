"""Tiny models and a made-up text for the experiments, real in all but their size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from howsmooth.errors import ModelError
from howsmooth.lipschitz import local_lipschitz
from howsmooth.models import capture
from howsmooth.models.load import LoadedModel
from howsmooth.models.tokenizers import Tokenizer
from howsmooth.study.tools import Tools

from ._study import FakeText
from ._tiny_models import VOCABULARY, tiny

TEXT = " ".join(f"w{(index * 7919) % 1009}" for index in range(3000))


class Words(Tokenizer):
    """Words w17 as token ids."""

    def __init__(self) -> None:
        super().__init__(None)

    def encode(self, text: str) -> list[int]:
        return [3 + int(word[1:]) % (VOCABULARY - 3) for word in text.split()]


def tiny_tools(before_measure: Callable[[int], None] = lambda calls: None) -> Tools:
    """The library's own capture and measure on the models of ``_tiny_models``, named as there.

    ``before_measure`` is called with the number of calls of measure so far.
    """
    calls = 0

    def load_model(name: str, **options: Any) -> LoadedModel:
        try:
            model = tiny(name, dtype=options.get("dtype", torch.float32))
        except KeyError:
            raise ModelError(f"model: {name!r} is not known.") from None
        return LoadedModel(
            name=name,
            model=model,
            modality="text",
            tokenizer=Words(),
            tokenizer_source="Words.",
            source=f"A tiny {name}.",
            fingerprint=hashlib.sha256(name.encode()).hexdigest(),
            max_length=32,
            vocab_size=VOCABULARY,
            layers=3,
            heads=4,
        )

    def measure(f: Any, x: Tensor, **options: Any) -> Any:
        nonlocal calls
        before_measure(calls)
        calls += 1
        return local_lipschitz(f, x, **options)

    return Tools(load_model, lambda name: FakeText(name, TEXT), capture, measure)


def dense_norm(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """‖D_X f‖ of the whole Jacobian, in float64."""
    x = x.double()
    jacobian = torch.func.jacrev(f)(x)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))
