"""Bounds on the Lipschitz constant of attention, one function for each theorem.

- Upper bounds on a ball, one head: without a mask ``theorem_3_3``, ``theorem_3_5``, ``theorem_e_3``,
  ``theorem_a`` and ``n_free``; with a causal mask ``theorem_4_3``, ``theorem_4_4``, ``masked_theorem_a`` and
  ``masked_n_free``; with any mask ``any_mask_theorem_a``.
- Upper bounds on a ball, several heads: ``lemma_3_8`` and the ``multi_head`` functions.
- Upper bounds at given tokens: the certificates, ``theorem_c_3`` and the other functions of ``local``. For
  large tokens, upper and lower: ``theorem_3_7`` and ``theorem_4_5``.
- Lower bounds on a ball: ``proposition_3_4`` and the other functions of ``lower`` and ``mean_field_lower``.

``best`` returns the tightest bound, and ``table`` lists all bounds beside a measurement.
"""

from howsmooth.bounds.bound import Bound, Hypothesis, Quantity
from howsmooth.bounds.certificates import (
    Certificate,
    certificate_cheap,
    certificate_joint,
    certificate_n,
    certificate_r,
)
from howsmooth.bounds.comparison import table
from howsmooth.bounds.composition import pre_norm_composition
from howsmooth.bounds.large_radius import theorem_3_7, theorem_4_5
from howsmooth.bounds.local import theorem_c_3, theorem_c_3_sharp, three_terms, yudin
from howsmooth.bounds.lower import (
    heavy_token,
    masked_tie,
    masked_two_cluster,
    no_real_eigenvalue,
    proposition_3_4,
    quadratic_growth,
    repeated_token,
    tie,
    two_cluster_sharp,
)
from howsmooth.bounds.masked import (
    any_mask_theorem_a,
    masked_n_free,
    masked_theorem_a,
    theorem_4_3,
    theorem_4_4,
)
from howsmooth.bounds.mean_field_lower import (
    proposition_3_6,
    proposition_3_6_asymptotic,
    proposition_3_6_better_weight,
    two_dirac,
)
from howsmooth.bounds.multi_head import (
    best_head_bound,
    lemma_3_8,
    multi_head_folded,
    multi_head_gram,
    multi_head_output,
)
from howsmooth.bounds.norms import absorb_norm, ellipsoid, norm_radius
from howsmooth.bounds.other_attentions import (
    l2_attention,
    l2_attention_sharp,
    lipschitz_norm,
    lipschitz_norm_sharp,
    scaled_cosine,
    scaled_cosine_sharp,
    sinkhorn,
    softmax_temperature,
)
from howsmooth.bounds.parameters import Head, Parameters, parameters_of
from howsmooth.bounds.statements import best
from howsmooth.bounds.unmasked import h_star, n_free, theorem_3_3, theorem_3_5, theorem_a, theorem_e_3

__all__ = [
    "Bound",
    "Certificate",
    "Head",
    "Hypothesis",
    "Parameters",
    "Quantity",
    "absorb_norm",
    "any_mask_theorem_a",
    "best",
    "best_head_bound",
    "certificate_cheap",
    "certificate_joint",
    "certificate_n",
    "certificate_r",
    "ellipsoid",
    "h_star",
    "heavy_token",
    "l2_attention",
    "l2_attention_sharp",
    "lemma_3_8",
    "lipschitz_norm",
    "lipschitz_norm_sharp",
    "masked_n_free",
    "masked_theorem_a",
    "masked_tie",
    "masked_two_cluster",
    "multi_head_folded",
    "multi_head_gram",
    "multi_head_output",
    "n_free",
    "no_real_eigenvalue",
    "norm_radius",
    "parameters_of",
    "pre_norm_composition",
    "proposition_3_4",
    "proposition_3_6",
    "proposition_3_6_asymptotic",
    "proposition_3_6_better_weight",
    "quadratic_growth",
    "repeated_token",
    "scaled_cosine",
    "scaled_cosine_sharp",
    "sinkhorn",
    "softmax_temperature",
    "table",
    "theorem_3_3",
    "theorem_3_5",
    "theorem_3_7",
    "theorem_4_3",
    "theorem_4_4",
    "theorem_4_5",
    "theorem_a",
    "theorem_c_3",
    "theorem_c_3_sharp",
    "theorem_e_3",
    "three_terms",
    "tie",
    "two_cluster_sharp",
    "two_dirac",
    "yudin",
]
