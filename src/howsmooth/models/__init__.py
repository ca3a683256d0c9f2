"""Models of any kind: loading them, and capturing their attention layers as maps.

``loading`` brings a model by its name, and ``inputs`` makes what it takes from text, images, audio, token ids
or embeddings. ``capture`` runs the model once, in ``measurement_mode``, which leaves it as it was found.
``tracing`` sees every softmax attention of that pass and keeps the calls around it; ``identification`` then
runs each layer by itself, reads it as a map, and verifies the map against the model's own numbers. A ``site``
is the result: one layer's map and its tokens. ``inspect`` asks for every layer in every scope and says what
is refused, ``padded_sequences`` captures batches with padding, and ``datasets`` cuts texts, images and audio
to sequences of the length that is asked for.
"""

from howsmooth.models.capture import capture
from howsmooth.models.datasets import audio_inputs, image_inputs
from howsmooth.models.inputs.audio import load_audio
from howsmooth.models.inputs.images import load_images
from howsmooth.models.inputs.token_files import load_embeddings, load_token_ids
from howsmooth.models.inspect import InspectedSite, Inspection, Refusal, inspect_model
from howsmooth.models.loading.load import LoadedModel, builtin_names, load_model
from howsmooth.models.site import Site
from howsmooth.scopes import SCOPES

__all__ = [
    "SCOPES",
    "InspectedSite",
    "Inspection",
    "LoadedModel",
    "Refusal",
    "Site",
    "audio_inputs",
    "builtin_names",
    "capture",
    "image_inputs",
    "inspect_model",
    "load_audio",
    "load_embeddings",
    "load_images",
    "load_model",
    "load_token_ids",
]
