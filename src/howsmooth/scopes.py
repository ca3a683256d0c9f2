"""The scopes of a measurement, which say what part of a model is measured, from one head to the
whole model.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ATTENTION_SCOPES", "CROSS_SCOPE", "MODEL_SCOPES", "OUTPUTS", "SCOPES", "SCOPE_MEANINGS", "SIDES",
    "layers_of_scope",
]  # fmt: skip

SCOPE_MEANINGS = {
    "head": "one attention head with its value projection only, the paper's single-head map",
    "heads": "all heads side by side, before the output projection",
    "attention": "all heads and the output projection, the paper's multi-head map",
    "residual": "the input plus the attention of the input",
    "block": "attention with its residual connection and normalisation, as the architecture has them",
    "span": "several blocks in sequence, from the input of the first to the output of the last",
    "model": "the whole model, from its embeddings to an output",
    "cross-attention": "all heads and the output projection of attention to another sequence, the memory",
}
"""What each scope means, in words for a report."""

SCOPES = tuple(SCOPE_MEANINGS)[:5]
"""The scopes of a measurement of one layer."""

MODEL_SCOPES = tuple(SCOPE_MEANINGS)[5:7]
"""The scopes that reach over several layers."""

CROSS_SCOPE = tuple(SCOPE_MEANINGS)[7]
"""The scope of attention whose keys and values come from another sequence than its queries."""

SIDES = ("queries", "memory", "joint")
"""Which sequence moves where a map has two: the one of the queries, the memory, or both."""

ATTENTION_SCOPES = SCOPES[:3]
"""The scopes without residual and norm: the theorems are about these only."""

OUTPUTS = ("hidden", "logits", "margin")
"""The outputs of a whole model: its last hidden state, its logits, and the largest logit minus the second."""


def layers_of_scope(scope: str, layers: Sequence[int]) -> Sequence[int]:
    """Return the indices of the layers that are measured in a scope. For the whole model it is only index
    0.
    """
    return (0,) if scope == "model" else layers
