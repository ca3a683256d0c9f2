"""Write the report's sentences on what cannot be concluded from its measurements."""

from __future__ import annotations

import pandas as pd

from howsmooth.scopes import ATTENTION_SCOPES
from howsmooth.study.records import Contents
from howsmooth.study.text_formatting import readable
from howsmooth.study.text_windows import bounded_lengths

__all__ = ["limitations"]


def limitations(contents: Contents) -> list[str]:
    """Return sentences on what a store's measurements do not show, for example that a model is untrained."""
    rows, models = contents.measurements, contents.models
    words = [
        "The constant is local: it is measured at these sequences of this text. Other inputs can have a much "
        "larger one, and the largest over all inputs of a given size is a different, harder quantity.",
    ]
    kinds = set(contents.kinds.values())
    if "text" in kinds or not kinds:
        words.append(
            "The sequences are windows of running text without special tokens such as [CLS] or a start "
            "token, which a model may expect."
        )
    if "images" in kinds:
        words.append(
            "A number of tokens stands for the size of an image: every length has the same images, smaller "
            "or larger, so that points of different lengths are not independent, and a model sees sizes here "
            "that it may not have been trained on."
        )
    if bool(models["random_init"].astype(bool).any()):
        words.append(
            "Models marked “random init” have untrained weights: they show the architecture, not training."
        )
    trained_on_text = contents.inputs["tokenizer_source"].str.contains("trained on the text", case=False)
    if bool(trained_on_text.any()):
        words.append(
            "Where a tokenizer was trained on the text (see “How it was made”), tokens are not the model's."
        )
    if bool(models["as_decoder"].astype(bool).any()):
        words.append(
            "Models marked “as decoder” are encoders run with a causal mask that they were not trained with."
        )
    lost = contents.failures
    if len(lost):
        words.append(
            f"{len(lost)} measurements failed and are missing here, the last because of: "
            f"“{readable(str(lost['error'].iloc[-1]), longest=300)}” The next run tries them again."
        )
    without = _without_bounds(contents)
    if without:
        words.append(
            f"{without} attentions at the shortest, the middle or the longest length have no bounds, because "
            "bounds would take more than a fifth of the measuring time, or were not asked for. "
            "--bounds all computes them."
        )
    loose = int((~rows["converged"]).sum())
    if loose:
        words.append(
            f"{loose} measurements did not reach the tolerance. Their intervals hold, but are wide; they are "
            "drawn hollow and not fitted. A larger --max-iterations in a new --out narrows them."
        )
    zeros = int((rows["lipschitz"] <= 0).sum())
    if zeros:
        words.append(f"{zeros} constants are zero and cannot be shown or fitted on log axes.")
    return words


def _without_bounds(contents: Contents) -> int:
    """Return the number of measured attentions whose bounds are missing although they can be computed."""
    rows = contents.measurements
    rows = rows[(rows["sample"] == 0) & rows["scope"].isin(ATTENTION_SCOPES)]
    could = {
        key
        for _, group in rows.groupby(["model", "text"])
        for key in _keys(group[group["n"].isin(bounded_lengths(group["n"].unique().tolist()))])
    }
    return len(could - _keys(contents.bounds))


def _keys(rows: pd.DataFrame) -> set[tuple[str, ...]]:
    places = rows[["model", "text", "scope", "layer", "head", "n"]].astype(str).fillna("")
    return set(places.itertuples(index=False, name=None))
