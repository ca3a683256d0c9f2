"""Profile one input: which layers, heads and tokens of a model are sensitive on a text of the user's choice.

``profile`` measures every layer and every head at one input, ``result`` holds what was found as tables and
says it in words, ``heatmap`` draws it, and ``page`` writes it as one HTML page. ``depth`` measures how the
blocks of one model compose, and ``depth_figure`` draws that.
"""

from howsmooth.profiling.depth import DepthProfile, depth_profile
from howsmooth.profiling.profile import profile
from howsmooth.profiling.result import Profile

__all__ = ["DepthProfile", "Profile", "depth_profile", "profile"]
