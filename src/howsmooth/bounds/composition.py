"""Attention after a norm layer: a Lipschitz constant on all of R^d, where attention alone has none."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm
from howsmooth.bounds.bound import Bound, Hypothesis, Quantity, check_length
from howsmooth.bounds.norms import absorb_norm
from howsmooth.bounds.statements import best
from howsmooth.errors import ArgumentError

__all__ = ["pre_norm_composition"]


def pre_norm_composition(attention: object, norm: object, length: int, X: Tensor | None = None) -> Bound:
    """Bound the Lipschitz constant of X ↦ attention(N(X)), everywhere or at X.

    With u = h/s the normalised tokens, attention(N(X)) = absorbed(u), and D u = (H − u uᵀ)/s has norm at
    most 1/s: the constant is at most the tightest bound of the absorbed attention on the unit ball, times
    the largest 1/s_i, which is at most 1/√(dε).

    Parameters
    ----------
    attention
        A SelfAttention.
    norm
        The LayerNorm or RMSNorm before it.
    length
        Sequence length n.
    X
        Tokens (n, d) given to the norm; None for a bound that holds at all tokens.

    Returns
    -------
    Bound
        Upper, on ‖D_X (f∘N)‖ at X, or on Lip(f∘N) over all of (R^d)^n.

    """
    length = check_length(length)
    absorbed = absorb_norm(attention, norm)
    assert isinstance(norm, LayerNorm | RMSNorm)  # absorb_norm has refused all else
    inner = best(absorbed, length=length, radius=1.0)
    if X is None:
        quantity, shortest = Quantity.EVERYWHERE, math.sqrt(norm.d * norm.eps)
    else:
        if X.shape != (length, norm.d):
            raise ArgumentError(
                "X", expected=f"tokens of shape ({length}, {norm.d})", got=str(tuple(X.shape))
            )
        quantity = Quantity.LOCAL
        _, s = norm.to(dtype=torch.float64, device="cpu").direction_and_length(X.detach().cpu().double())
        shortest = float(s.min())
    smooth = Hypothesis("eps > 0, or no token of zero length", shortest > 0)
    return Bound.upper(
        "pre_norm_composition",
        quantity,
        f"absorption of the norm, docs/theory/norms-and-radius.md, with {inner.name}",
        log_formula=inner.log_value - math.log(shortest) if shortest > 0 else math.inf,
        hypotheses=(smooth,),
    )
