"""Who works with scores ⟨q_i, k_j⟩ and their softmax only must refuse attention that does more to them."""

from __future__ import annotations

from howsmooth.attention.compositions import Compose, Residual
from howsmooth.attention.l2_attention import L2Attention
from howsmooth.attention.map import TokenMap
from howsmooth.attention.norms import LayerNorm, RMSNorm
from howsmooth.attention.scaling import LayerScale
from howsmooth.attention.self_attention import SelfAttention
from howsmooth.attention.sinkhorn_attention import SinkhornAttention
from howsmooth.attention.staged import StagedAttention
from howsmooth.errors import ArgumentError

__all__ = ["require_formula", "require_plain_scores"]


def require_plain_scores(f: object, what: str, *, argument: str = "attention") -> None:
    """Raise ArgumentError if an attention within ``f`` changes its scores beyond a mask, or is not a formula.

    Parameters
    ----------
    f
        Anything; attention is looked for in it, within residuals and compositions.
    what
        Who asks, the subject of the sentence: "these bounds".
    argument
        Name of the argument that ``f`` was.

    """
    match f:
        case StagedAttention():
            raise ArgumentError(
                argument,
                expected=f"attention given by its matrices: {what} know no other",
                got="attention in stages, whose layer is code",
                remedy="local_lipschitz measures such attention at given tokens.",
            )
        case SelfAttention() if f.feature_names():
            raise ArgumentError(
                argument,
                expected=f"attention whose scores are ⟨q_i, k_j⟩: {what} know no others",
                got=" and ".join(f.feature_names()),
                remedy="local_lipschitz measures such attention at given tokens.",
            )
        case Residual():
            require_plain_scores(f.inner, what, argument=argument)
        case Compose():
            require_plain_scores(f.outer, what, argument=argument)
            require_plain_scores(f.inner, what, argument=argument)


def require_formula(f: object, what: str, *, argument: str = "attention") -> None:
    """Raise ArgumentError if a map within ``f`` is code, such as a model's own module, and not a formula.

    Parameters are those of :func:`require_plain_scores`.
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
                expected=f"attention given by its matrices: {what} know no other",
                got=f.describe(),
                remedy="local_lipschitz measures such attention at given tokens.",
            )
