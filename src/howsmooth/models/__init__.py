"""Transformers models of Hugging Face: loading them, and capturing their attention layers as maps.

``load`` (with ``places`` and ``tokenizers``) brings a model by its name. ``capture`` runs it (``borrow``
leaves it as it was found), ``recording`` writes down one pass, ``identify`` and ``masking`` read it, and
``replay`` proves the result against the model's own numbers. ``inspection`` asks for every layer in every
scope, and says what is refused.
"""

from howsmooth.models.capture import capture
from howsmooth.models.inspection import InspectedSite, Inspection, Refusal, inspect_model
from howsmooth.models.load import LoadedModel, builtin_names, load_model
from howsmooth.models.site import SCOPES, Site

__all__ = [
    "SCOPES",
    "InspectedSite",
    "Inspection",
    "LoadedModel",
    "Refusal",
    "Site",
    "builtin_names",
    "capture",
    "inspect_model",
    "load_model",
]
