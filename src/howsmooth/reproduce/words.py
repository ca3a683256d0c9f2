"""Sentences about numbers, written from the numbers."""

from __future__ import annotations

import pandas as pd

from howsmooth.study.exponents import LEVEL, Exponent
from howsmooth.study.names import decimal, readable, sentence

__all__ = ["interval", "made_of", "power", "ratio"]


def power(fit: Exponent, digits: int = 2) -> str:
    """Say an exponent with its interval: "n to the power 0.31 (95 % interval 0.29 to 0.33)"."""
    if fit.note:
        return f"n to no power that could be fitted ({fit.note})"
    return (
        f"n to the power {decimal(fit.slope, digits)} ({LEVEL * 100:.0f} % interval {interval(fit, digits)})"
    )


def interval(fit: Exponent, digits: int = 2) -> str:
    """Say the interval of an exponent: "0.29 to 0.33"."""
    return f"{decimal(fit.low, digits)} to {decimal(fit.high, digits)}"


def ratio(value: float) -> str:
    """Say a ratio in three digits: "1.04", "0.0307", "1.2e+08"."""
    return f"{value:.3g}"


def made_of(models: pd.DataFrame, texts: pd.DataFrame, inputs: pd.DataFrame) -> list[tuple[str, str]]:
    """Describe the models and texts of a store, for the part of the page that says how it was made.

    Parameters
    ----------
    models, texts, inputs
        Those of :class:`howsmooth.study.store.Contents`.

    """
    found = [
        (
            f"Model {readable(str(model.label))}",
            f"{sentence(readable(str(model.source), longest=300))} {model.layers} attention layers, "
            f"{model.heads} heads.",
        )
        for model in models.itertuples()
    ]
    found += [
        (
            f"Text {readable(str(text.name))}",
            f"{sentence(readable(str(text.source), longest=300))} {text.characters} characters, SHA-256 "
            f"{text.digest}.",
        )
        for text in texts.itertuples()
    ]
    found += [
        (
            f"Tokens of {readable(str(one.text))} for {readable(str(one.model))}",
            f"{one.tokens}. Tokenizer: {sentence(str(one.tokenizer_source))} Fingerprint of model and "
            f"tokenizer: {one.fingerprint}.",
        )
        for one in inputs.itertuples()
    ]
    return found
