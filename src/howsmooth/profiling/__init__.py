"""Profiles of one input: which layers, heads and tokens of a model are sensitive on a given text.

``model_input`` reads a model and one input of it. Each function finds a ``result`` there, with a table, a
figure (``figures``), a page and files: ``profile`` the constant of every layer and head, ``depth_profile``
how the blocks of one model compose, ``precision`` what quantised keys and values do (``quantisers`` rounds
them), ``word_radii`` how far each token may move before a classifier may change its answer. ``influence``
finds which token moves which, for any map.
"""

from howsmooth.profiling.depth import DepthProfile, depth_profile
from howsmooth.profiling.influence import Influence, influence
from howsmooth.profiling.kv_cache_quantisation import precision
from howsmooth.profiling.kv_cache_quantisation_result import Precision
from howsmooth.profiling.profile import profile
from howsmooth.profiling.profile_result import Profile
from howsmooth.profiling.word_radii import WordRadii, word_radii

__all__ = [
    "DepthProfile",
    "Influence",
    "Precision",
    "Profile",
    "WordRadii",
    "depth_profile",
    "influence",
    "precision",
    "profile",
    "word_radii",
]
