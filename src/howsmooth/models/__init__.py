"""Models of any kind: loading them, and capturing their attention layers as maps.

``load`` (with ``places``, ``parts`` and ``tokenizers``) brings a model by its name. ``capture`` runs it
once: ``borrow`` leaves it as it was found, ``watching`` (with ``following``, ``scores``, ``contractions``
and ``axes``) sees every softmax attention, ``passes`` keeps the calls around it. Then each layer is run by
itself (``repeated``): ``owners`` finds the module and the tokens, ``records`` writes down what happens,
``identify`` (with ``projections``, ``turns``, ``masking``, ``blocks`` and ``sums``) reads it as a map,
``verify`` proves it against the model's own numbers, and ``verified`` gives its scopes. ``inspection`` asks
for every layer in every scope, and says what is refused. ``images``, ``audio`` and ``token_files`` read
what models are given besides text, ``preparation`` makes it their inputs, and ``feeding`` cuts it to
sequences.
"""

from howsmooth.models.audio import load_audio
from howsmooth.models.capture import capture
from howsmooth.models.feeding import audio_inputs, image_inputs
from howsmooth.models.images import load_images
from howsmooth.models.inspection import InspectedSite, Inspection, Refusal, inspect_model
from howsmooth.models.load import LoadedModel, builtin_names, load_model
from howsmooth.models.site import Site
from howsmooth.models.token_files import load_embeddings, load_token_ids
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
