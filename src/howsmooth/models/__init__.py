"""Load text, vision and audio models, and capture their attention layers as maps of the tokens.

``loading`` loads a model by its name, and ``inputs`` makes its inputs from images, token ids or
embeddings. ``capture`` runs the model once, in ``measurement_mode``, which restores the model afterwards;
``as_called`` compares this run with the model as its user calls it.
``tracing`` finds every softmax attention of that forward pass and keeps the module calls around it.
``identification`` then runs each layer by itself, finds the map that it computes, and verifies the map
against the model's own numbers. The result is a ``site``: the map of one layer, and its tokens. ``inspect``
captures every layer in every scope and says what is refused, and ``padded_sequences`` captures batches
with padding.
"""

from howsmooth.models.capture import capture
from howsmooth.models.captured_layer import CrossSite, Site
from howsmooth.models.inspect import InspectedSite, Inspection, Refusal, inspect_model
from howsmooth.models.loading.load import LoadedModel, builtin_names, image_inputs, load_model

__all__ = [
    "CrossSite",
    "InspectedSite",
    "Inspection",
    "LoadedModel",
    "Refusal",
    "Site",
    "builtin_names",
    "capture",
    "image_inputs",
    "inspect_model",
    "load_model",
]
