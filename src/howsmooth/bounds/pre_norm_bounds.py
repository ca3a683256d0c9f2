"""An upper bound for a norm layer followed by attention, a composition that is Lipschitz on all of R^d."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention
from howsmooth.attention.theorem_preconditions import require_plain_scores
from howsmooth.bounds.applicable_bounds import best
from howsmooth.bounds.attention_parameters import as_matrix
from howsmooth.bounds.bound import Bound, Hypothesis, Quantity, check_length
from howsmooth.bounds.certificates.certificate_at_tokens import checked_input, sharpest_certificate
from howsmooth.bounds.certificates.rounded_attention import shortest_lengths
from howsmooth.bounds.log_numbers import Log
from howsmooth.bounds.norm_layer_outputs import checked_norm
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.rounding import LEAST_DIVISOR, known_to, product_and_error

__all__ = ["pre_norm_upper_bound"]


def pre_norm_upper_bound(attention: object, norm: object, length: int, X: object = None) -> Bound:
    """Bound the Lipschitz constant of a norm layer followed by attention, everywhere or at tokens X.

    With the normalised tokens u = h/s, attention(N(X)) is the absorbed attention (``absorb_norm``) of u,
    and the derivative (H − u uᵀ)/s of u has norm at most 1/s. So the constant everywhere is at most the
    tightest bound for the absorbed attention on the unit ball times 1/√(dε). At X, it is at most the
    certificate of the absorbed attention with the columns of token j multiplied by 1/s_j.

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.SelfAttention`.
    norm
        The LayerNorm or RMSNorm before the attention.
    length
        Sequence length n.
    X
        Input tokens (n, d) of the norm, a tensor, an array or nested lists; None for a bound that holds at
        all tokens.

    Returns
    -------
    Bound
        Upper bound on ‖D_X (f∘N)‖ at X, or on Lip(f∘N) over all of (R^d)^n. Hypothesis: eps > 0, or no
        centred token of X is zero. ArgumentError is raised if an argument does not fit.

    References
    ----------
    Documentation page "Norm layers: radius, ellipsoid, absorption", sections "A constant on all tokens" and
    "A bound at given tokens".

    """
    length = check_length(length)
    absorbed = absorb_norm(attention, norm)
    assert isinstance(norm, LayerNorm | RMSNorm)  # absorb_norm raises an error for other norms
    require_plain_scores(absorbed, "this bound")
    on_the_ball = best(absorbed, length=length, radius=1.0)
    theorem, quantity = on_the_ball.name, Quantity.EVERYWHERE
    shortest, certified = math.sqrt(norm.d * norm.eps), Log(math.inf)
    if X is not None:
        f, x = checked_input(attention, as_matrix("X", X, (length, norm.d), what="tokens"))
        norm = norm.to(dtype=torch.float64, device="cpu")
        quantity, shortest = Quantity.LOCAL, float(shortest_lengths(norm, known_to(x))[1].min())
        with contextlib.suppress(NonFiniteError):  # at tokens of extreme size the bound on the ball is left
            certified = Log.of(float(sharpest_certificate(f, x, norm=norm).value))
    found = Log(on_the_ball.log_value) / shortest
    if certified.log < found.log:
        theorem, found = "certificate", certified
    return Bound.upper(
        "pre_norm_upper_bound",
        quantity,
        f'howsmooth documentation, "Norm layers: radius, ellipsoid, absorption", with {theorem}',
        log_formula=float(found.log),
        hypotheses=(Hypothesis("eps > 0, or no token of zero length", shortest > LEAST_DIVISOR),),
    )


def absorb_norm(attention: object, norm: object) -> SelfAttention:
    """Return an attention with the gain and the shift of the preceding norm layer multiplied into its
    matrices, in float64 on the CPU.

    Its output at the normalised tokens u_i = h_i/s_i equals attention(N(X)). In the paper's notation its
    parameters are A' = d ΓAΓ, V' = √d VΓ, b' = √d Γ(Aβ + b) and b_v' = Vβ + b_v, for LayerNorm restricted to
    mean-zero vectors. Their entries are fewer than ``ROUNDINGS`` away from exact ones, also where terms
    cancel.
    """
    if not isinstance(attention, SelfAttention):
        raise ArgumentError(
            "attention",
            expected="a SelfAttention",
            got=type(attention).__name__,
            remedy="Of a captured site, pass site.map and site.norm.",
        )
    layer = checked_norm(norm).to(dtype=torch.float64, device="cpu")
    if layer.d != attention.d:
        expected = f"a norm of tokens of dimension {attention.d}"
        raise ArgumentError("norm", expected=expected, got=f"{layer.d}")
    f = attention.to(dtype=torch.float64, device="cpu")

    def scaled(weight: Tensor) -> Tensor:
        product, error = product_and_error(weight, layer.weight)
        # Mean-zero vectors do not see what is subtracted from a row; near numbers are subtracted exactly.
        if layer.centred:
            product = product - product.mean(dim=-1, keepdim=True)
        return math.sqrt(layer.d) * (product + error)

    def shifted(weight: Tensor, bias: Tensor | None) -> Tensor | None:
        if layer.bias is None:
            return bias
        bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias
        terms = torch.cat((*product_and_error(weight, layer.bias), bias[..., None]), dim=-1)
        sums = [math.fsum(row.tolist()) for row in terms.flatten(0, 1)]
        return weight.new_tensor(sums).view(weight.shape[:2])

    return f._rebuilt(
        query=scaled(f.query),
        key=scaled(f.key),
        value=scaled(f.value),
        query_bias=shifted(f.query, f.query_bias),
        key_bias=shifted(f.key, f.key_bias),
        value_bias=shifted(f.value, f.value_bias),
    )
