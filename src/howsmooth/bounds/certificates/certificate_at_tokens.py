"""The certificate: an upper bound on ‖D_X f‖ at given tokens, by the sharpest of the proofs that apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.attention.map import check_tokens
from howsmooth.attention.theorem_preconditions import require_formula, require_plain_scores
from howsmooth.bounds.attention_parameters import Head, Parameters, SiteLike
from howsmooth.bounds.bound import Bound, Quantity
from howsmooth.bounds.certificates.attention_with_error_bounds import HeadsAt, heads_at
from howsmooth.bounds.certificates.block_row_certificate import by_rows
from howsmooth.bounds.certificates.three_part_certificate import by_parts
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.rounding import Enclosed, U, limit_in_digits, spectral_norm_above

__all__ = ["ASSUMPTIONS", "Certificate", "certificate", "certify", "checked_input"]

_SOURCE = 'howsmooth documentation, "Certificates at given tokens", '

ASSUMPTIONS = (
    "the parameters and tokens as exact numbers, float64 arithmetic that rounds to nearest, sums of products "
    "in any order, and an exponential right to two units in the last place"
)
"""What the proof of a certificate assumes, in words."""

Proof = Callable[[HeadsAt, int], Enclosed]


@dataclass(frozen=True, eq=False)
class Certificate:
    """Upper bounds on ‖D_X f‖, one for each sequence of a batch, with a proof that covers rounding.

    Attributes
    ----------
    value
        The upper bounds on ‖D_X f‖ of the exact map at the given floating-point tokens; float64, shape (...).
    rounding
        The fraction of ``value`` that allows for rounding, shape (...): without allowances, the formula
        evaluates to value · (1 − rounding).
    theorems
        Which theorem of the documentation page "Certificates at given tokens" gives the bound, one for each
        sequence in the order of ``value.flatten()``.
    assumptions
        What the proof assumes, in words.

    """

    value: Float64[Tensor, "*batch"]
    rounding: Float64[Tensor, "*batch"]
    theorems: tuple[str, ...]
    assumptions: str = ASSUMPTIONS

    def bound(self, *index: int) -> Bound:
        """Return the upper bound on ‖D_X f‖ for one sequence of the batch, as a :class:`Bound`.

        Raises
        ------
        ArgumentError
            If the index does not select one sequence.

        """
        shape = tuple(self.value.shape)
        if len(index) != len(shape) or not all(
            -size <= i < size for i, size in zip(index, shape, strict=True)
        ):
            raise ArgumentError(
                "index", expected=f"the index of one sequence in a batch of shape {shape}", got=str(index)
            )
        theorem = self.theorems[int(torch.arange(self.value.numel()).reshape(shape)[index])]
        value = float(self.value[index])
        return Bound.upper("certificate", Quantity.LOCAL, _SOURCE + theorem, formula=value)

    def __repr__(self) -> str:
        if self.value.ndim == 0:
            limit = limit_in_digits(float(self.value), 6, upper=True)
            return (
                f"Certificate(‖D_X f‖ ≤ {limit}, of which {float(self.rounding):.1e} allows "
                f"for rounding; {self.theorems[0]})"
            )
        return f"Certificate(shape {tuple(self.value.shape)}; {', '.join(dict.fromkeys(self.theorems))})"


def certificate(attention: object, X: Tensor | None = None, *, iterations: int = 30) -> Certificate:
    """Bound ‖D_X f‖ at given tokens from above, by the sharpest proof. The bound covers all rounding errors.

    Theorem N adds bounds on three parts of the Jacobian: of the values, of the keys and of the queries. It is
    for any number of heads, and for all scores but with norms that act on all heads together. For one head
    with plain or rotary scores there is also Theorem R, on the norms of the block rows of the Jacobian.
    Both hold for any positive weights of the tokens, which a search chooses.

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.SelfAttention` with any number of heads, also with grouped queries, any
        mask and any scores (norms of queries and keys act on each head alone), a captured site whose map is
        one, or a :class:`~howsmooth.bounds.Head`.
    X
        Tokens (..., n, d), float32 or float64, taken as exact numbers; None for the tokens of the site.
    iterations
        Largest number of steps of each search, which may end earlier; with 0, all weights are one.

    Returns
    -------
    Certificate
        Certificate of shape (...), float64, with the theorem that gave it and what its proof assumes.

    Raises
    ------
    ArgumentError
        If an argument does not fit.
    NonFiniteError
        If an entry is not finite, or scores are too large for float64.

    """
    f, x = checked_input(attention, X)
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0:
        raise ArgumentError("iterations", expected="a whole number >= 0", got=repr(iterations))
    if f.heads > 1:
        return certify(f, x, {"Theorem N for several heads": by_parts}, iterations)
    if f.feature_names():
        return certify(f, x, {"Theorem N": by_parts}, iterations)
    return certify(f, x, {"Theorem R": by_rows, "Theorem N": by_parts}, iterations)


def checked_input(attention: object, X: object) -> tuple[SelfAttention, Tensor]:
    """Check an attention and its tokens, and return both converted to float64 on the CPU.

    For a captured site, X = None stands for the tokens of the site.

    Raises
    ------
    ArgumentError
        If ``attention`` is no SelfAttention, site of one, Head or Parameters, a norm acts on all heads
        together, or X does not fit.
    NonFiniteError
        If an entry of X is NaN or infinite.

    """
    f = attention
    if isinstance(f, SiteLike) and not isinstance(f, SelfAttention):
        X = f.x if X is None else X
        f = f.map
        if not isinstance(f, SelfAttention):
            require_plain_scores(f, "these certificates")
            require_formula(f, "these certificates")
            raise ArgumentError(
                "attention",
                expected="a site whose map is attention alone",
                got=f"scope {getattr(attention, 'scope', '?')!r}",
                remedy="Capture with scope 'attention', 'heads' or 'head'.",
            )
    elif isinstance(f, Head | Parameters):
        f = _self_attention(f)
    if not isinstance(f, SelfAttention):
        require_plain_scores(f, "these certificates")
        raise ArgumentError(
            "attention", expected="a SelfAttention, a captured site or a Head", got=type(attention).__name__
        )
    for layer in (f.query_norm, f.key_norm):
        if layer is not None and layer.d != f.key_dim:
            raise ArgumentError(
                "attention",
                expected="norms of the queries and keys of one head",
                got=f"a norm of {layer.d} entries, for heads of {f.key_dim}",
                remedy="local_lipschitz measures such attention at given tokens.",
            )
    if not isinstance(X, Tensor) or not X.is_floating_point() or X.numel() == 0:
        got = (
            f"{X.dtype} of shape {tuple(X.shape)}"
            if isinstance(X, Tensor)
            else ("None" if X is None else type(X).__name__)
        )
        raise ArgumentError("X", expected="a floating-point tensor of tokens (..., n, d)", got=got)
    f = f.to(dtype=torch.float64, device="cpu")
    x = X.detach().to(dtype=torch.float64, device="cpu")
    check_tokens(x, f)
    if not bool(torch.isfinite(x).all()):
        raise NonFiniteError("X", expected="finite numbers", got="NaN or infinity")
    return f, x


def _self_attention(heads: Head | Parameters) -> SelfAttention:
    """Convert heads in the paper's notation into a SelfAttention with the same scores and values.

    The scores are ⟨A x_i + b, x_j⟩. Query and key matrices are the factors of A. One more key row b with
    query bias 1 adds ⟨b, x_j⟩.
    """
    if isinstance(heads, Head):
        heads = Parameters((heads,), (torch.eye(heads.V.shape[0], dtype=torch.float64),), "none", None)
    ranks = [head.left.shape[1] + 1 for head in heads.heads]
    k, d, width = max(ranks), heads.heads[0].d, max(head.V.shape[0] for head in heads.heads)
    count = len(heads.heads)
    query, key, value = (torch.zeros(count, rows, d, dtype=torch.float64) for rows in (k, k, width))
    bias = torch.zeros(count, k, dtype=torch.float64)
    for h, head in enumerate(heads.heads):
        rank = ranks[h] - 1
        query[h, :rank], key[h, :rank], value[h, : head.V.shape[0]] = head.right, head.left.mT, head.V
        key[h, rank], bias[h, rank] = head.b, 1.0
    outputs = [torch.nn.functional.pad(w, (0, width - w.shape[1])) for w in heads.outputs]
    causal = heads.masking == "causal" or heads.causal
    return SelfAttention(
        query,
        key,
        value,
        torch.cat(outputs, dim=1),
        query_bias=bias,
        scale=1.0,
        causal=causal,
        window=heads.window,
        mask=heads.mask,
    )


def certify(f: SelfAttention, x: Tensor, proofs: Mapping[str, Proof], iterations: int) -> Certificate:
    """Compute the certificate of a batch by the sharpest of some proofs, each of which is a function that
    bounds ‖D_X f‖ of one sequence with a given number of steps of its search.

    A proof bounds the norm of a Jacobian J̃ formed from rounded weights, values and queries. ``distance``
    adds a bound on ‖J − J̃‖, and the scaling by a power of two is undone.
    """
    uppers, plains, theorems = [], [], []
    for member in x.reshape(-1, *x.shape[-2:]):
        at = heads_at(f, member)
        found = {theorem: proof(at, iterations) for theorem, proof in proofs.items()}
        theorem = min(found, key=lambda name: float(found[name].upper))
        upper = (found[theorem].upper + distance(at)) * (1 + 8 * U)
        # Multiplication by a power of two is exact unless it underflows; the added smallest number covers
        # this.
        power = torch.tensor(at.exponent)
        uppers.append(torch.ldexp(upper, power) + 5e-324)
        plains.append(torch.ldexp(found[theorem].plain, power))
        theorems.append(theorem)
    value = torch.stack(uppers).reshape(x.shape[:-2])
    plain = torch.stack(plains).reshape(x.shape[:-2])
    share = torch.where(torch.isfinite(value), 1 - plain / value, 0.0)
    return Certificate(value, share.clamp_min(0.0), tuple(theorems))


def distance(at: HeadsAt) -> Tensor:
    """Bound the norm of the difference between the exact Jacobian and the Jacobian of the heads stored in
    float64.

    The change is J − J̃, where J is the exact Jacobian and J̃ the Jacobian of the rounded heads ``at``.
    """
    total = torch.tensor(0.0, dtype=torch.float64)
    for head, w in zip(at.heads, at.W, strict=True):
        total = total + spectral_norm_above(w) * head.error
    return total * (1 + 1e-9)
