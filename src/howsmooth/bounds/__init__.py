"""Bounds on the Lipschitz constant of attention, one function for each theorem.

A bound takes the attention first, then the tokens ``X``, or the ``length`` and the ``radius`` of the ball, by
position or by name; all options are given by name. Matrices and tokens are tensors, arrays or nested lists.

``best`` returns the tightest bound, and ``table`` lists all bounds beside a measurement.

Both go over the bounds that follow, except those in other norms and those for other attentions than softmax
attention. ``kv_error_upper_bound`` bounds the change of the output by errors of keys and values, and
``robust_radius`` proves a radius within which a whole classifier's answer does not change.
"""

from howsmooth.bounds.applicable_bounds import best
from howsmooth.bounds.attention_parameters import Head
from howsmooth.bounds.ball_lower_bounds import (
    causal_two_cluster_lower_bound,
    causal_two_heavy_tokens_lower_bound,
    heavy_token_lower_bound,
    proposition_3_4,
    quadratic_growth,
    two_cluster_lower_bound,
    two_heavy_tokens_lower_bound,
)
from howsmooth.bounds.ball_upper_bounds import (
    ball_upper_bound,
    causal_ball_upper_bound,
    causal_mean_field_upper_bound,
    masked_ball_upper_bound,
    mean_field_upper_bound,
    theorem_3_3,
    theorem_3_5,
    theorem_4_3,
    theorem_4_4,
    theorem_e_3,
)
from howsmooth.bounds.bound import Bound, Hypothesis, Quantity
from howsmooth.bounds.catalogue import listing
from howsmooth.bounds.certificates import Certificate, certificate
from howsmooth.bounds.comparison_with_measurement import table
from howsmooth.bounds.key_value_error_bounds import OutputErrorBound, kv_error_upper_bound
from howsmooth.bounds.large_radius_bounds import theorem_3_7, theorem_4_5
from howsmooth.bounds.local_upper_bounds import diameter_upper_bound, theorem_c_3, yudin_theorem_3
from howsmooth.bounds.mean_field_bounds import (
    proposition_3_6,
    proposition_3_6_rate,
    two_dirac,
    weighted_two_atom_lower_bound,
)
from howsmooth.bounds.modified_score_bounds import any_scores_ball_upper_bound
from howsmooth.bounds.multi_head_bounds import gram_upper_bound, lemma_3_8, output_norm_upper_bound
from howsmooth.bounds.norm_layer_outputs import norm_radius
from howsmooth.bounds.pre_norm_bounds import pre_norm_upper_bound
from howsmooth.bounds.radius import RobustRadius, robust_radius
from howsmooth.bounds.tokenwise_bounds import token_wise_ball_upper_bound, token_wise_upper_bound
from howsmooth.bounds.variant_upper_bounds import (
    l2_attention,
    l2_attention_upper_bound,
    lipschitz_norm,
    lipschitz_norm_upper_bound,
    scaled_cosine,
    scaled_cosine_upper_bound,
    sinkhorn,
    softmax_upper_bound,
)

__all__ = [
    "Bound",
    "Certificate",
    "Head",
    "Hypothesis",
    "OutputErrorBound",
    "Quantity",
    "RobustRadius",
    "any_scores_ball_upper_bound",
    "ball_upper_bound",
    "best",
    "causal_ball_upper_bound",
    "causal_mean_field_upper_bound",
    "causal_two_cluster_lower_bound",
    "causal_two_heavy_tokens_lower_bound",
    "certificate",
    "diameter_upper_bound",
    "gram_upper_bound",
    "heavy_token_lower_bound",
    "kv_error_upper_bound",
    "l2_attention",
    "l2_attention_upper_bound",
    "lemma_3_8",
    "lipschitz_norm",
    "lipschitz_norm_upper_bound",
    "masked_ball_upper_bound",
    "mean_field_upper_bound",
    "norm_radius",
    "output_norm_upper_bound",
    "pre_norm_upper_bound",
    "proposition_3_4",
    "proposition_3_6",
    "proposition_3_6_rate",
    "quadratic_growth",
    "robust_radius",
    "scaled_cosine",
    "scaled_cosine_upper_bound",
    "sinkhorn",
    "softmax_upper_bound",
    "table",
    "theorem_3_3",
    "theorem_3_5",
    "theorem_3_7",
    "theorem_4_3",
    "theorem_4_4",
    "theorem_4_5",
    "theorem_c_3",
    "theorem_e_3",
    "token_wise_ball_upper_bound",
    "token_wise_upper_bound",
    "two_cluster_lower_bound",
    "two_dirac",
    "two_heavy_tokens_lower_bound",
    "weighted_two_atom_lower_bound",
    "yudin_theorem_3",
]

__doc__ = f"{__doc__}\n{listing(__all__)}\n"
