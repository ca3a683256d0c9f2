"""The public names that stay, where users see them.

Of two places, divided by " | ", the first is where a name stands now and the second where it is to stand.
"""

from __future__ import annotations

__all__ = ["NAMES", "PLACES"]

_BY_PLACE = {
    # What is measured, and maps.
    "hs": "local_lipschitz load_model capture profile depth_profile influence precision word_radii read "
    "LipschitzEstimate LipschitzEstimates Profile DepthProfile Influence Precision WordRadii Site "
    "SelfAttention L2Attention SinkhornAttention LayerNorm RMSNorm LayerScale Residual Compose Rotary "
    "HowsmoothError "
    # Beside the radii of one input: those of a data set, which each of its users had to collect.
    "certified_accuracy CertifiedAccuracy "
    # How the constant of a map of one's own grows with the length, in one call.
    "growth LengthGrowth "
    # What many texts and two models give: results of profile and of its method compare.
    "ProfileOverTexts ProfileComparison "
    # For models of language: from the residual stream to the prediction.
    "prediction_stability PredictionStability",
    "hs.errors": "ArgumentError CaptureError CertificateError DerivativeError ModelError NonFiniteError "
    "StoreError TextError WorkerError",
    "hs.attention": "TokenMap StagedAttention",
    "hs.jacobian": "AutodiffJacobian closed_form_jacobian",
    "hs.spectral": "LinearOperator LeadingTriplet lanczos",
    "hs.models": "inspect_model Inspection InspectedSite Refusal CrossSite LoadedModel "
    "builtin_names image_inputs",
    "hs.texts": "load_text Text TEXTS",
    # Statements of the paper; of this library's documentation; of other papers.
    "hs.bounds": "theorem_3_3 theorem_3_5 theorem_3_7 theorem_4_3 theorem_4_4 theorem_4_5 theorem_c_3 "
    "theorem_e_3 lemma_3_8 proposition_3_4 proposition_3_6 proposition_3_6_rate "
    "ball_upper_bound mean_field_upper_bound masked_ball_upper_bound causal_ball_upper_bound "
    "causal_mean_field_upper_bound any_scores_ball_upper_bound pre_norm_upper_bound "
    "output_norm_upper_bound gram_upper_bound diameter_upper_bound "
    "heavy_token_lower_bound two_heavy_tokens_lower_bound causal_two_heavy_tokens_lower_bound "
    "two_cluster_lower_bound causal_two_cluster_lower_bound weighted_two_atom_lower_bound two_dirac "
    "token_wise_ball_upper_bound token_wise_upper_bound kv_error_upper_bound "
    "quadratic_growth yudin_theorem_3 softmax_upper_bound sinkhorn "
    "l2_attention l2_attention_upper_bound scaled_cosine scaled_cosine_upper_bound "
    "lipschitz_norm lipschitz_norm_upper_bound "
    "best table norm_radius Bound Quantity Hypothesis Head Certificate OutputErrorBound RobustRadius",
    "hs.bounds.radius": "Network Stage Attention FeedForward GatedFeedForward Norm Activation ACTIVATIONS",
    "hs.adversarial": "ascend Ascent Ball Around Ellipsoid constructions Construction balanced heavy_token "
    "two_cluster two_heavy_tokens",
    "hs.measures": "DiscreteMeasure Gaussian wasserstein conditional_wasserstein Transport "
    "wasserstein_lipschitz WassersteinLipschitz affine_action",
    "hs.dynamics": "flow Trajectory growth Growth Layers Sphere Rescaled rescaled cluster_metrics "
    "cluster_labels number_of_clusters effective_rank log_interaction_energy clustering_bound "
    "log_stability_bound finite_context_bound",
    "hs.functional": "attention register",
    "hs.nn": "LipschitzModule LipschitzAttention SoftmaxAttention QueryKeyNormAttention L2Attention "
    "CosineAttention SinkhornAttention LipschitzNormAttention SigmoidAttention SelfAttentionBlock "
    "OrthogonalLinear SpectralLinear CenterNorm LipschitzLayerNorm LipschitzRMSNorm Residual "
    "AverageResidual GroupSort MaxMin AddPositions PrependToken TakeToken MeanPool Patches ClipTokens "
    "certify ModelCertificate evaluate Evaluation deploy LipschitzMonitor MonitorCallback "
    "MonitorRecord lightning_callback",
    "hs.nn.penalty": "SpectralPenalty JasminPenalty jasmin PenaltyReport LayerReport",
}

PLACES = tuple(place for place in _BY_PLACE if place != "hs.errors")

NAMES = (
    *(f"{place}.{name}" for place, names in _BY_PLACE.items() for name in names.split()),
    "hs.bounds.robust_radius | hs.robust_radius",
    "hs.fit_exponent",
    "hs.bounds.certificate",
)
