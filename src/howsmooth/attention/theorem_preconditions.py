"""Checks that an attention has plain scores ⟨q_i, k_j⟩ and known matrices, as many theorems require."""

from __future__ import annotations

from howsmooth.attention.compositions import Compose, Residual
from howsmooth.attention.custom_code_attention import StagedAttention
from howsmooth.attention.l2_attention import L2Attention
from howsmooth.attention.map import TokenMap
from howsmooth.attention.norm_layers import LayerNorm, LayerScale, RMSNorm
from howsmooth.attention.self_attention import SelfAttention
from howsmooth.attention.sinkhorn_attention import SinkhornAttention
from howsmooth.errors import ArgumentError

__all__ = ["remedy_for_other_map", "require_formula", "require_plain_scores"]


def require_plain_scores(f: object, what: str, *, argument: str = "attention") -> None:
    """Raise ArgumentError if ``f`` is or contains an attention whose scores are not ⟨q_i, k_j⟩. A mask is
    allowed.

    Scores with a bias, a soft cap, sinks or norms of queries and keys are refused, and so is attention whose
    layer is code (:class:`~howsmooth.attention.StagedAttention`).

    Parameters
    ----------
    f
        Any object. If it is a residual or a composition, its parts are checked.
    what
        The caller, as the subject of the message, for instance "these bounds".
    argument
        Name of the caller's argument, for the message.

    """
    match f:
        case StagedAttention():
            raise ArgumentError(
                argument,
                expected=f"attention given by its matrices: {what} cannot use any other",
                got="attention in stages, whose layer is code",
                remedy="local_lipschitz measures such attention at given tokens.",
            )
        case SelfAttention() if f.feature_names():
            raise ArgumentError(
                argument,
                expected=f"attention whose scores are ⟨q_i, k_j⟩: {what} cannot use any others",
                got=" and ".join(f.feature_names()),
                remedy="local_lipschitz measures such attention at given tokens.",
            )
        case Residual():
            require_plain_scores(f.inner, what, argument=argument)
        case Compose():
            require_plain_scores(f.outer, what, argument=argument)
            require_plain_scores(f.inner, what, argument=argument)


def remedy_for_other_map(given: object) -> str:
    """Return advice for callers who passed a head of ``hs.bounds`` where a map of tokens is expected. For
    anything else it is empty.
    """
    if hasattr(given, "A") and hasattr(given, "V"):
        return (
            "The map of a head with matrices A and V is hs.SelfAttention(torch.eye(len(A)).to(A)[None], "
            "A.T[None], V[None], scale=1.0)."
        )
    return ""


def require_formula(f: object, what: str, *, argument: str = "attention") -> None:
    """Raise ArgumentError if ``f``, or a part of the composition ``f``, is not one of the maps with a known
    formula, such as SelfAttention or LayerNorm.

    A module of a model, for example, is given by code instead.

    The parameters are the same as in :func:`require_plain_scores`.
    """
    match f:
        case Residual():
            require_formula(f.inner, what, argument=argument)
        case Compose():
            require_formula(f.outer, what, argument=argument)
            require_formula(f.inner, what, argument=argument)
        case SelfAttention() | L2Attention() | SinkhornAttention() | LayerNorm() | RMSNorm() | LayerScale():
            pass
        case TokenMap():
            raise ArgumentError(
                argument,
                expected=f"attention given by its matrices: {what} cannot use any other",
                got=f.describe(),
                remedy="local_lipschitz measures such attention at given tokens.",
            )
