"""How often a budget of bits beats one number of bits for all, with the same average.

    python scripts/mixed_bits.py builtin-encoder builtin-decoder ../shared/data/stories260k

For each model, four texts, four quantisers and averages of 3, 4 and 5 bits, bits are given to heads by
``Precision.budget``. The divergence of the model's predictions is then compared with that of the average for
all: on the text itself, and on the next text. The texts are 96 tokens each of Alice in Wonderland; a model
without a tokenizer writes its own, of 48 tokens. Some minutes for each model.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import numpy as np
import torch

import howsmooth as hs
from howsmooth.errors import HowsmoothError
from howsmooth.texts import load_text

QUANTISERS = ("token", "channel", "kivi", "kivi-8-16")
BITS = (2, 3, 4, 5, 6, 8)
TEXTS, LONG, SHORT = 4, 96, 48


def main(names: list[str]) -> None:
    """Print one line for each model and quantiser."""
    print("model, quantiser: cases in which the budget is better, and ratio of divergences (geometric mean)")
    for name in names:
        model = hs.load_model(name, head=True, dtype=None)
        found = [hs.precision(model, bits=BITS, quantisers=QUANTISERS, **one) for one in inputs(model)]
        for quantiser in found[0].table["quantiser"].unique():
            ratios = np.array([case for average in (3, 4, 5) for case in compared(found, average, quantiser)])
            words = [
                f"{where} {(ratio < 1).sum()} of {len(ratio)}, {np.exp(np.log(ratio).mean()):.2f}"
                for where, ratio in zip(("the same text", "the next text"), ratios.T, strict=True)
            ]
            print(f"{model.label}, {quantiser}: {'; '.join(words)}", flush=True)


def inputs(model: Any) -> list[dict[str, Any]]:
    """Four texts, as arguments of ``hs.precision``."""
    text = load_text("alice")
    with suppress(HowsmoothError):  # the model may have no tokenizer
        model.tokenizer.encode("a")
        starts = range(2000, 2000 + 5000 * TEXTS, 5000)
        return [{"inputs": text, "span": (start, start + LONG)} for start in starts]
    torch.manual_seed(0)
    options = {"do_sample": True, "min_length": SHORT, "max_length": SHORT, "pad_token_id": 0}
    return [{"inputs": model.model.generate(torch.tensor([[first]]), **options)} for first in range(TEXTS)]


def compared(found: list[hs.Precision], average: int, quantiser: str) -> list[list[float]]:
    """Divergences with a budget over those with equal bits, on its own text and on the next."""
    cases = []
    for one, following in zip(found, found[1:] + found[:1], strict=True):
        budget = one.budget(average, quantiser)
        assert np.average(budget["bits"], weights=budget["entries"]) <= average
        cases.append(
            [p.simulate(budget, quantiser) / p.simulate(average, quantiser) for p in (one, following)]
        )
    return cases


if __name__ == "__main__":
    main(sys.argv[1:])
