"""Profiles of one input: which layers, heads and tokens of a model are sensitive to changes of a given input.

The function ``profile`` measures the Lipschitz constant of every layer and head, at one input or over many
texts; two profiles are compared. ``depth_profile`` measures those of blocks and of their compositions,
``precision`` the effects of quantised keys, values or weights, ``influence`` how far each output token moves
with each input token, ``growth`` how the constant grows with the length, ``prediction_stability`` how far the
residual stream may move until a prediction changes. ``word_radii`` proves how far a token may move before a
classifier's answer can change, ``certified_accuracy`` on how many inputs it stays right. ``model_input``
reads a model and its input, and has the base class of results; ``quantisers`` rounds keys and values.
"""

from howsmooth.profiling.certified_answers import CertifiedAccuracy, certified_accuracy
from howsmooth.profiling.expansion_by_depth import DepthProfile, depth_profile
from howsmooth.profiling.fitted_growth import LengthGrowth, growth
from howsmooth.profiling.lipschitz_profile import Profile, profile
from howsmooth.profiling.quantisation_effects import Precision, precision
from howsmooth.profiling.residual_stream_stability import PredictionStability, prediction_stability
from howsmooth.profiling.robust_word_radii import WordRadii, word_radii
from howsmooth.profiling.several_profiles import ProfileComparison, ProfileOverTexts
from howsmooth.profiling.token_influence import Influence, influence

__all__ = [
    "CertifiedAccuracy",
    "DepthProfile",
    "Influence",
    "LengthGrowth",
    "Precision",
    "PredictionStability",
    "Profile",
    "ProfileComparison",
    "ProfileOverTexts",
    "WordRadii",
    "certified_accuracy",
    "depth_profile",
    "growth",
    "influence",
    "precision",
    "prediction_stability",
    "profile",
    "word_radii",
]
