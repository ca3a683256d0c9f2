"""Profiles of one input: which layers, heads and tokens of a model are sensitive to changes of a given input.

The function ``profile`` measures the Lipschitz constant of every layer and head, at one input or over many
texts; two profiles are compared. ``depth_profile`` measures the
constants of the blocks and of their compositions, ``precision`` the effects of quantised keys and values, and
``influence`` how far each output token moves with each input token, and ``growth`` how the constant grows
with the length, of any map. ``word_radii`` proves how far each token may move before the answer of a
classifier can change, ``certified_accuracy`` on how many inputs of a data set it stays right. ``model_input``
reads a model and its input, and has the base class of these results; ``quantisers`` rounds keys and values.
"""

from howsmooth.profiling.certified_answers import CertifiedAccuracy, certified_accuracy
from howsmooth.profiling.expansion_by_depth import DepthProfile, depth_profile
from howsmooth.profiling.fitted_growth import LengthGrowth, growth
from howsmooth.profiling.kv_cache_quantisation import Precision, precision
from howsmooth.profiling.lipschitz_profile import Profile, profile
from howsmooth.profiling.robust_word_radii import WordRadii, word_radii
from howsmooth.profiling.several_profiles import ProfileComparison, ProfileOverTexts
from howsmooth.profiling.token_influence import Influence, influence

__all__ = [
    "CertifiedAccuracy",
    "DepthProfile",
    "Influence",
    "LengthGrowth",
    "Precision",
    "Profile",
    "ProfileComparison",
    "ProfileOverTexts",
    "WordRadii",
    "certified_accuracy",
    "depth_profile",
    "growth",
    "influence",
    "precision",
    "profile",
    "word_radii",
]
