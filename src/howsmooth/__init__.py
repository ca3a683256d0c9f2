"""How smooth is attention? Measure the Lipschitz constant of self-attention in any Transformer.

The local Lipschitz constant of a map f at tokens X is the spectral norm of its Jacobian, ‖D_X f‖₂.
``local_lipschitz`` measures it with an interval; ``SelfAttention`` is the map of the paper *How Smooth
Is Attention?* (Castin, Ablin, Peyré, ICML 2024); ``capture`` takes such maps out of real models.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from howsmooth.attention import Compose, LayerNorm, Residual, RMSNorm, Rotary, SelfAttention
from howsmooth.errors import HowsmoothError
from howsmooth.lipschitz import LipschitzEstimate, local_lipschitz

if TYPE_CHECKING:
    from howsmooth.models import Site, capture, load_model

__version__ = metadata.version("howsmooth")

__all__ = [
    "Compose",
    "HowsmoothError",
    "LayerNorm",
    "LipschitzEstimate",
    "RMSNorm",
    "Residual",
    "Rotary",
    "SelfAttention",
    "Site",
    "capture",
    "load_model",
    "local_lipschitz",
]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import, and the maths does not need it.
    if name in ("Site", "capture", "load_model"):
        from howsmooth import models

        return getattr(models, name)
    raise AttributeError(f"module 'howsmooth' has no attribute '{name}'")
