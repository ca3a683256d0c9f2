"""Look at one input: which layers, heads and tokens of a model are sensitive on a text of the user's choice.

``model_input`` turns what the user gives into a model and one input. ``profile`` measures every layer and
head there, ``result`` holds what was found as tables and says it in words, ``heatmap`` draws it, ``page``
shows it as one HTML page, and ``output_folder`` writes page, figure and tables. ``depth`` measures how the
blocks of one model compose, and ``depth_figure`` draws that. ``precision`` predicts and simulates what
quantised keys and values do: ``quantisers`` rounds them, and ``precision_result``, ``precision_figure`` and
``precision_page`` show what was found. ``word_radii`` finds how far each token may move before a classifier
may change its answer, and ``word_radii_page`` shows that.
"""

from howsmooth.profiling.depth import DepthProfile, depth_profile
from howsmooth.profiling.precision import precision
from howsmooth.profiling.precision_result import Precision
from howsmooth.profiling.profile import profile
from howsmooth.profiling.result import Profile
from howsmooth.profiling.word_radii import WordRadii, word_radii

__all__ = [
    "DepthProfile",
    "Precision",
    "Profile",
    "WordRadii",
    "depth_profile",
    "precision",
    "profile",
    "word_radii",
]
