"""Checks that an attention has plain scores ⟨q_i, k_j⟩ and known matrices, as many theorems require."""

from __future__ import annotations

from howsmooth.attention.compositions import layers
from howsmooth.attention.custom_code_attention import StagedAttention
from howsmooth.attention.l2_attention import L2Attention
from howsmooth.attention.map import TokenMap
from howsmooth.attention.norm_layers import LayerNorm, LayerScale, RMSNorm
from howsmooth.attention.self_attention import SelfAttention
from howsmooth.attention.sinkhorn_attention import SinkhornAttention
from howsmooth.errors import ArgumentError

__all__ = ["remedy_for_other_map", "require_formula", "require_plain_scores"]

_MATRICES = "attention given by its matrices: {} cannot use any other"


def require_plain_scores(f: object, what: str, *, argument: str = "attention") -> None:
    """Raise ArgumentError if the map ``f`` contains an attention whose scores are not ⟨q_i, k_j⟩. A mask is
    allowed.

    Scores with a bias, a soft cap, sinks or norms of queries and keys are refused, and so is attention whose
    layer is code (:class:`~howsmooth.attention.StagedAttention`). The message is about the caller's
    ``argument``, and has the caller as its subject: ``what``, for instance "these bounds".
    """
    for layer in layers(f):
        match layer:
            case StagedAttention():
                raise _refusal(argument, _MATRICES, what, "attention in stages, whose layer is code")
            case SelfAttention() if layer.feature_names():
                expected = "attention whose scores are ⟨q_i, k_j⟩: {} cannot use any others"
                raise _refusal(argument, expected, what, " and ".join(layer.feature_names()))


def remedy_for_other_map(given: object) -> str:
    """Return advice for callers who passed a head of ``hs.bounds`` where a map of tokens is expected. Return
    "" for anything else.
    """
    if hasattr(given, "A") and hasattr(given, "V"):
        return (
            "The map of a head with matrices A and V is hs.SelfAttention(torch.eye(len(A)).to(A)[None], "
            "A.T[None], V[None], scale=1.0)."
        )
    return ""


def require_formula(f: object, what: str, *, argument: str = "attention") -> None:
    """Raise ArgumentError if the map ``f`` contains a layer that is given by PyTorch code instead of a known
    formula. The parameters are those of :func:`require_plain_scores`.
    """
    known = SelfAttention | L2Attention | SinkhornAttention | LayerNorm | RMSNorm | LayerScale
    for layer in layers(f):
        if isinstance(layer, TokenMap) and not isinstance(layer, known):
            raise _refusal(argument, _MATRICES, what, layer.describe())


def _refusal(argument: str, expected: str, what: str, got: str) -> ArgumentError:
    remedy = "local_lipschitz measures such attention at given tokens."
    return ArgumentError(argument, expected=expected.format(what), got=got, remedy=remedy)
