"""The certificate: an upper bound on ‖D_X f‖ at given tokens, by the sharpest of the proofs that apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm, SelfAttention
from howsmooth.attention.map import check_tokens
from howsmooth.attention.theorem_preconditions import require_formula, require_plain_scores
from howsmooth.bounds.attention_parameters import Head, Parameters, SiteLike, as_matrix
from howsmooth.bounds.bound import Bound, Quantity
from howsmooth.bounds.certificates.formed_jacobian import by_whole, is_small
from howsmooth.bounds.certificates.parts import by_parts
from howsmooth.bounds.certificates.rounded_attention import HeadsAt, heads_at
from howsmooth.bounds.certificates.rows import by_rows
from howsmooth.errors import ArgumentError, check_whole
from howsmooth.rounding import Enclosed, above, limit_in_digits, spectral_norm_above, up

__all__ = ["ASSUMPTIONS", "Certificate", "certificate", "checked_input", "forms", "sharpest_certificate"]

_SOURCE = 'howsmooth documentation, "Certificates at given tokens", '

ASSUMPTIONS = (
    "the parameters and tokens as exact numbers, float64 arithmetic that rounds to nearest, sums of products "
    "in any order, and an exponential right to two units in the last place"
)
"""What the proof of a certificate assumes, in words."""

Form = Callable[[HeadsAt, int], Enclosed]


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
        Which form of the documentation page "Certificates at given tokens" gives the bound, one for each
        sequence in the order of ``value.flatten()``.
    tried
        The bounds of all forms that were tried, by name, one mapping for each sequence in the same order.
    assumptions
        What the proof assumes, in words.

    """

    value: Float64[Tensor, "*batch"]
    rounding: Float64[Tensor, "*batch"]
    theorems: tuple[str, ...]
    tried: tuple[Mapping[str, float], ...]
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


def certificate(attention: object, X: object = None, *, iterations: int = 30) -> Certificate:
    """Bound ‖D_X f‖ at given tokens from above, by the sharpest proof. The bound covers all rounding errors.

    Where the Jacobian is small enough, its whole matrix is formed, and the bound is the norm itself but for
    rounding. This takes a second at most on two cores: for one head of dimension 64, up to 32 tokens. For
    larger ones, Theorem N adds bounds on three parts of the Jacobian: of the values, of the keys and of the
    queries. For one head there is also Theorem R, on the norms of the block rows. Both hold for any positive
    weights, which a search chooses; their time grows like n², or n³ for several heads (seconds at n = 128 and
    d = 768).

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.SelfAttention` with any number of heads, also with grouped queries, any
        mask and any scores (norms of queries and keys act on each head alone), a captured site whose map is
        one, or a :class:`~howsmooth.bounds.Head`.
    X
        Tokens (..., n, d), a tensor, an array or nested lists, taken as exact numbers; None for the tokens of
        the site.
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
    check_whole("iterations", iterations, least=0)
    return sharpest_certificate(f, x, iterations=iterations)


def forms(at: HeadsAt) -> Mapping[str, Form]:
    """Return the functions, by name, that may give the sharpest bound on the Jacobian of these heads."""
    if is_small(at):
        return {"the whole matrix": by_whole}
    if len(at.heads) > 1:
        return {"Theorem N for several heads": by_parts}
    return {"Theorem R": by_rows, "Theorem N": by_parts}


def checked_input(attention: object, X: object) -> tuple[SelfAttention, Tensor]:
    """Check an attention and its tokens, and return both converted to float64 on the CPU.

    For a captured site, X = None stands for the tokens of the site. ArgumentError is raised if ``attention``
    is no SelfAttention, site of one, Head or Parameters, a norm acts on all heads together, or X does not
    fit; NonFiniteError if an entry of X is NaN or infinite.
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
    more = ["batch"] * (getattr(X, "ndim", 2) - 2)
    x = as_matrix("X", X, (*more, "n", "d"), what="tokens")
    f = f.to(dtype=torch.float64, device="cpu")
    check_tokens(x, f)
    return f, x


def _self_attention(heads: Head | Parameters) -> SelfAttention:
    """Factors of A become queries and keys; one more key row b with query bias 1 adds ⟨b, x_j⟩."""
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


def sharpest_certificate(
    f: SelfAttention,
    x: Tensor,
    forms: Callable[[HeadsAt], Mapping[str, Form]] = forms,
    iterations: int = 30,
    norm: LayerNorm | RMSNorm | None = None,
) -> Certificate:
    """Compute for each sequence of a batch the smallest of several upper bounds on ‖D_X f‖. Each is computed
    by one of the functions in ``forms(heads)``, whose search takes ``iterations`` steps.

    A form bounds the norm of a Jacobian J̃ of rounded weights, values and queries. The distance to the exact
    Jacobian is added, and the scaling by a power of two is undone. With a ``norm`` the certificate is that of
    ``f`` after the norm.
    """
    uppers, plains, theorems, tried = [], [], [], []
    for member in x.reshape(-1, *x.shape[-2:]):
        at = heads_at(f, member, norm)
        distance = up(sum(spectral_norm_above(w) * h.error for h, w in zip(at.heads, at.W, strict=True)))
        found = {name: form(at, iterations) for name, form in forms(at).items()}
        # Multiplication by a power of two is exact unless it underflows; the added smallest number covers
        # this.
        size = torch.tensor(at.exponent)
        bounds = {n: torch.ldexp(above(b.upper + distance, 1), size) + 5e-324 for n, b in found.items()}
        theorem = min(bounds, key=lambda name: float(bounds[name]))
        uppers.append(bounds[theorem])
        plains.append(torch.ldexp(found[theorem].plain, size))
        theorems.append(theorem)
        tried.append({name: float(bound) for name, bound in bounds.items()})
    value, plain = (torch.stack(numbers).reshape(x.shape[:-2]) for numbers in (uppers, plains))
    share = torch.where(torch.isfinite(value), 1 - plain / value, 0.0)
    return Certificate(value, share.clamp_min(0.0), tuple(theorems), tuple(tried))
