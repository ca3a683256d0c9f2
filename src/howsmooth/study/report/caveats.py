"""What a reader must know before drawing conclusions."""

from __future__ import annotations

from howsmooth.study.names import readable
from howsmooth.study.sequences import overlapping
from howsmooth.study.store import Contents

__all__ = ["caveats"]


def caveats(contents: Contents) -> list[str]:
    """List the sentences that the contents of a store call for."""
    rows, models = contents.measurements, contents.models
    words = [
        "The constant is local: it is measured at these sequences of this text. Other inputs can have a much "
        "larger one, and the largest over all inputs of a given size is a different, harder quantity.",
    ]
    kinds = dict(contents.texts[["name", "kind"]].itertuples(index=False, name=None))
    if "text" in kinds.values() or not kinds:
        words.append(
            "The sequences are windows of running text without special tokens such as [CLS] or a start "
            "token, which a model may expect."
        )
    if "images" in kinds.values():
        words.append(
            "A number of tokens stands for the size of an image: every length has the same images, smaller "
            "or larger, so that points of different lengths are not independent, and a model sees sizes here "
            "that it may not have been trained on."
        )
    sequences = rows[["model", "text", "n", "sample", "start"]].drop_duplicates()
    shared = sum(
        overlapping(zip(group["start"], group["n"], strict=True))
        for (_, text), group in sequences.groupby(["model", "text"])
        if kinds.get(str(text)) != "images"
    )
    if shared:
        words.append(
            f"{shared} of the {len(sequences)} sequences overlap others of the same text, so that points are "
            "not wholly independent, and the exponents' intervals are a little optimistic."
        )
    if bool(models["random_init"].astype(bool).any()):
        words.append(
            "Models marked “random init” have untrained weights: they show the architecture, not training."
        )
    if any(
        str(model).startswith("builtin-") and not untrained and text == "python-docs"
        for model, untrained, text in contents.inputs.merge(models, left_on="model", right_on="label")[
            ["name", "random_init", "text"]
        ].itertuples(index=False)
    ):
        words.append(
            "The built-in models were trained on the text python-docs itself, so they have seen it before."
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
    lost = contents.failures[contents.failures["resolved"].isna()]
    if len(lost):
        distinct = lost.drop_duplicates(["model", "text", "scope", "layer", "head", "n", "sample"])
        words.append(
            f"{len(distinct)} measurements failed and are missing here, the last because of: "
            f"“{readable(str(lost['error'].iloc[-1]), longest=300)}” The next run tries them again."
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
