"""Upper bounds on the Lipschitz constant of multi-head attention f(X) = Σ_h W_h f_h(X) on a ball.

Each combines upper bounds L_h on the heads f_h, which include their value matrices V_h
(``head_bound``). Proofs: documentation page "Bounds on a ball", section "Several heads".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from howsmooth.bounds.attention_parameters import log_size, norm, unit
from howsmooth.bounds.ball_upper_bounds import for_all_lengths, masked_or_not, theorem_a
from howsmooth.bounds.bound_problem import Problem
from howsmooth.bounds.catalogue import OURS, PAPER
from howsmooth.bounds.log_numbers import Log, minimum
from howsmooth.rounding import product_norms_above

__all__ = ["gram_upper_bound", "head_bound", "lemma_3_8", "output_norm_upper_bound", "quadratic_form"]

_PAGE = f'{OURS}"Bounds on a ball", Several heads'


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
    return quadratic_form(p.parameters.outputs, p.once(_heads))


@masked_or_not(heads="several", source=_PAGE)
def folded_gram_upper_bound(p: Problem) -> Log:
    """Bound the Lipschitz constant of multi-head attention by upper bounds on its heads and the norms
    ‖(W_h V_h)ᵀ W_g V_g‖, where W_h is the output map of head h and V_h its value matrix.

    The bound is (Σ_{h,g} ‖O_hᵀ O_g‖ c_h c_g)^{1/2} with O_h = W_h V_h. V_h is factorised into a triangular
    matrix, which moves to the output map, and a matrix of orthonormal rows. c_h is the upper bound on head h
    with this matrix in place of V_h. For bounds proportional to ‖V‖, as all of this library are, the result
    is at most :func:`gram_upper_bound`.
    """
    heads, maps, sizes = [], [], []
    for head, W in zip(p.parameters.heads, p.parameters.outputs, strict=True):
        rows, triangle = torch.linalg.qr(unit(head.V).mT)  # V = triangleᵀ rowsᵀ, up to its size
        heads.append(head.with_values(rows.mT))
        maps.append(unit(W) @ triangle.mT)
        sizes.append(Log(log_size(W)) * Log(log_size(head.V)))
    balanced = replace(p, attention=replace(p.parameters, heads=tuple(heads), outputs=tuple(maps)))
    return quadratic_form(maps, [L * size for L, size in zip(_heads(balanced), sizes, strict=True)])


def quadratic_form(maps: Sequence[Tensor], bounds: Sequence[Log]) -> Log:
    """Return (Σ_{h,g} ‖M_hᵀ M_g‖ c_h c_g)^{1/2}, which bounds Σ_h M_h f_h if c_h bounds f_h."""
    units = torch.stack([unit(M) for M in maps])
    sizes = [Log(log_size(M)) * c for M, c in zip(maps, bounds, strict=True)]
    terms = []
    for h, size in enumerate(sizes):
        products = Log.of(product_norms_above(units[h].mT.expand(h + 1, -1, -1), units[: h + 1])) * size
        terms += [(1 if g == h else 2) * Log(log) * sizes[g] for g, log in enumerate(products.log)]
    return Log.total(terms) ** 0.5


def _heads(p: Problem) -> list[Log]:
    """Return an upper bound L_h for each head without its output map."""
    found = []
    for head in p.parameters.heads:
        identity = torch.eye(head.V.shape[0], dtype=torch.float64)
        alone = replace(p.parameters, heads=(head,), outputs=(identity,))
        found.append(head_bound(replace(p, attention=alone)))
    return found
