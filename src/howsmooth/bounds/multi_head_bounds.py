"""Upper bounds on the Lipschitz constant of multi-head attention f(X) = Σ_h W_h f_h(X) on a ball.

Each combines upper bounds L_h on the heads f_h, which include their value matrices V_h
(``head_bound``). Proofs: documentation page "Bounds on a ball", section "Several heads".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.bounds.attention_parameters import ROUNDINGS, log_size, norm, normalised
from howsmooth.bounds.ball_upper_bounds import for_all_lengths, masked_or_not, theorem_a
from howsmooth.bounds.bound_problem import Problem
from howsmooth.bounds.catalogue import OURS, PAPER
from howsmooth.bounds.log_numbers import Log, minimum
from howsmooth.rounding import Triangles, gamma, up, with_gradient

__all__ = [
    "gram_norms",
    "gram_upper_bound",
    "head_bound",
    "lemma_3_8",
    "output_norm_upper_bound",
    "quadratic_form",
]

_PAGE = f'{OURS}"Bounds on a ball", Several heads'
# Number of entries of the matrices whose products are formed at once.
_ENTRIES = 1 << 24


def head_bound(p: Problem) -> Log:
    """Return an upper bound on Lip(f on B_R^n) of one head with its mask: Theorem A, or the bound that does
    not depend on n, whichever is smaller.
    """
    masking = p.parameters.masking
    found = theorem_a(p, masking)
    return found if masking == "other" else minimum(found, for_all_lengths(p, masking))


@masked_or_not(heads="several", source=f"{PAPER}, Lemma 3.8")
def lemma_3_8(p: Problem) -> Log:
    """Bound the Lipschitz constant of multi-head attention by Lemma 3.8 of the paper.

    The bound is Σ_h ‖W_h‖ L_h, where W_h is the output map of head h and L_h an upper bound on the head.
    """
    return Log.total(norm(W) * L for W, L in zip(p.parameters.outputs, p.once(_heads), strict=True))


@masked_or_not(heads="several", source=_PAGE)
def output_norm_upper_bound(p: Problem) -> Log:
    """Bound the Lipschitz constant of multi-head attention by the norm of its output projection W_O.

    The bound is ‖W_O‖ (Σ_h L_h²)^{1/2}, where L_h is an upper bound on head h.
    """
    return norm(p.parameters.W) * Log.total(L**2 for L in p.once(_heads)) ** 0.5


@masked_or_not(heads="several", source=_PAGE)
def gram_upper_bound(p: Problem) -> Log:
    """Bound the Lipschitz constant of multi-head attention by upper bounds on its heads and the norms
    ‖W_hᵀ W_g‖, where W_h is the output map of head h.

    The bound is (Σ_{h,g} ‖W_hᵀ W_g‖ L_h L_g)^{1/2}, where L_h is an upper bound on head h. It is at most the
    bound of Lemma 3.8, and sharper the more orthogonal the output maps of different heads are.
    """
    return quadratic_form(p.once(_heads), p.parameters.outputs)


@masked_or_not(heads="several", source=_PAGE)
def folded_gram_upper_bound(p: Problem) -> Log:
    """Bound the Lipschitz constant of multi-head attention by upper bounds on its heads and the norms
    ‖(W_h V_h)ᵀ W_g V_g‖, where W_h is the output map of head h and V_h its value matrix.

    The bound is (Σ_{h,g} ‖O_hᵀ O_g‖ c_h c_g)^{1/2} with O_h = W_h V_h, where c_h is the upper bound on head h
    with the identity in place of V_h. For bounds proportional to ‖V‖, as all of this library are, the result
    is at most :func:`gram_upper_bound`.
    """
    given = p.parameters
    # A head's bound depends on its value matrix by the norm alone, which one row of the identity has, too.
    heads = tuple(head.with_values(torch.eye(1, head.d, dtype=torch.float64)) for head in given.heads)
    bounds = _heads(replace(p, attention=replace(given, heads=heads)))
    return quadratic_form(bounds, given.outputs, [head.V for head in given.heads])


def quadratic_form(
    bounds: Sequence[Log], maps: Sequence[Tensor], values: Sequence[Tensor] | None = None
) -> Log:
    """Return (Σ_{h,g} ‖O_hᵀ O_g‖ c_h c_g)^{1/2} with O_h = W_h V_h. It bounds Σ_h O_h f_h if each c_h bounds
    f_h. Without ``values`` each V_h is the identity.
    """
    if values is None:
        values = [torch.eye(W.shape[1], dtype=torch.float64) for W in maps]
    W, V = (torch.stack([normalised(part) for part in parts]) for parts in (maps, values))
    sizes = zip(bounds, map(log_size, maps), map(log_size, values), strict=True)
    size = torch.stack([(c * Log(of_map) * Log(of_value)).log for c, of_map, of_value in sizes])
    own = torch.stack([norm(*parts).log for parts in zip(W, V, strict=True)])
    products = minimum(Log.of(gram_norms(W, V)), Log(own[:, None]) * Log(own))
    return (products * Log(size[:, None]) * Log(size)).sum() ** 0.5


def gram_norms(
    maps: Float[Tensor, "heads d_out value_dim"], values: Float[Tensor, "heads value_dim d"]
) -> Float[Tensor, "heads heads"]:
    """Return the norms ‖O_hᵀ O_g‖ with O_h = W_h V_h, rounded up. The gradient holds the singular vectors
    fixed.
    """
    pairs, found = torch.triu_indices(len(maps), len(maps)), []
    with torch.no_grad():
        sizes = torch.linalg.matrix_norm(maps) * torch.linalg.matrix_norm(values)
        triangles, between = Triangles.of(values.mT), torch.einsum("hij,gik->hgjk", maps, maps)
    for h, g in pairs.split(max(1, _ENTRIES // (maps[0].numel() + values[0].numel())), dim=1):
        with torch.no_grad():
            # What the rounding of the values and of W_hᵀ W_g adds to the norms.
            rounding = up(gamma(maps.shape[1] + 2 * ROUNDINGS) * sizes[h] * sizes[g])
            proved, u, v = triangles.at(h).product_norms(triangles.at(g), between[h, g])
        found.append(proved + rounding)
        if torch.is_grad_enabled() and (maps.requires_grad or values.requires_grad):
            left, right = maps[h] @ (values[h] @ u[..., None]), maps[g] @ (values[g] @ v[..., None])
            found[-1] = with_gradient(found[-1], (left * right).sum(dim=(-2, -1)))
    upper = maps.new_zeros(len(maps), len(maps)).index_put(tuple(pairs), torch.cat(found))
    return upper + upper.mT - torch.diag(upper.diagonal())


def _heads(p: Problem) -> list[Log]:
    found = []
    for head in p.parameters.heads:
        identity = torch.eye(head.V.shape[0], dtype=torch.float64)
        alone = replace(p.parameters, heads=(head,), outputs=(identity,))
        found.append(head_bound(replace(p, attention=alone)))
    return found
