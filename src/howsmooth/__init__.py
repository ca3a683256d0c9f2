"""How smooth is attention? Measure the Lipschitz constant of self-attention in any Transformer.

The local Lipschitz constant of a map f at tokens X is the spectral norm of its Jacobian, ‖D_X f‖₂.
``local_lipschitz`` measures it with an interval; ``SelfAttention`` is the map of the paper *How Smooth
Is Attention?* (Castin, Ablin, Peyré, ICML 2024); ``capture`` takes such maps out of real models; ``bounds``
holds the theorems, ``adversarial`` the worst inputs; ``measures`` holds attention on probability measures,
``dynamics`` attention through depth; ``functional`` is attention as a function, with derivatives of every
order; ``nn`` holds layers that are Lipschitz, penalties and monitors.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from howsmooth import (
        adversarial,
        attention,
        bounds,
        dynamics,
        errors,
        functional,
        jacobian,
        measures,
        models,
        nn,
        spectral,
        study,
        texts,
    )
    from howsmooth.attention import (
        Compose,
        L2Attention,
        LayerNorm,
        LayerScale,
        Residual,
        RMSNorm,
        Rotary,
        SelfAttention,
        SinkhornAttention,
    )
    from howsmooth.errors import HowsmoothError
    from howsmooth.lipschitz import LipschitzEstimate, LipschitzEstimates, local_lipschitz
    from howsmooth.models import Site, capture, load_model
    from howsmooth.profiling import (
        CertifiedAccuracy,
        DepthProfile,
        Influence,
        LengthGrowth,
        Precision,
        PredictionStability,
        Profile,
        ProfileComparison,
        ProfileOverTexts,
        WordRadii,
        certified_accuracy,
        depth_profile,
        growth,
        influence,
        precision,
        prediction_stability,
        profile,
        word_radii,
    )
    from howsmooth.study.exponents import fit_exponent
    from howsmooth.study.stored_tables import read

__version__ = metadata.version("howsmooth")

__all__ = [
    "CertifiedAccuracy",
    "Compose",
    "DepthProfile",
    "HowsmoothError",
    "Influence",
    "L2Attention",
    "LayerNorm",
    "LayerScale",
    "LengthGrowth",
    "LipschitzEstimate",
    "LipschitzEstimates",
    "Precision",
    "PredictionStability",
    "Profile",
    "ProfileComparison",
    "ProfileOverTexts",
    "RMSNorm",
    "Residual",
    "Rotary",
    "SelfAttention",
    "SinkhornAttention",
    "Site",
    "WordRadii",
    "adversarial",
    "attention",
    "bounds",
    "capture",
    "certified_accuracy",
    "depth_profile",
    "dynamics",
    "errors",
    "fit_exponent",
    "functional",
    "growth",
    "influence",
    "jacobian",
    "load_model",
    "local_lipschitz",
    "measures",
    "models",
    "nn",
    "precision",
    "prediction_stability",
    "profile",
    "read",
    "spectral",
    "study",
    "texts",
    "word_radii",
]

# PyTorch takes two seconds to import and transformers as many again; `howsmooth --help` needs neither.
_ROOMS = {
    "attention": (
        "Compose",
        "L2Attention",
        "LayerNorm",
        "LayerScale",
        "RMSNorm",
        "Residual",
        "Rotary",
        "SelfAttention",
        "SinkhornAttention",
    ),
    "errors": ("HowsmoothError",),
    "lipschitz": (
        "LipschitzEstimate",
        "LipschitzEstimates",
        "local_lipschitz",
    ),
    "models": ("Site", "capture", "load_model"),
    "profiling": (
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
    ),
    "study.exponents": ("fit_exponent",),
    "study.stored_tables": ("read",),
}
_WHOLE_ROOMS = (
    "adversarial",
    "attention",
    "bounds",
    "dynamics",
    "errors",
    "functional",
    "jacobian",
    "measures",
    "models",
    "nn",
    "spectral",
    "study",
    "texts",
)


def __getattr__(name: str) -> Any:
    if name in _WHOLE_ROOMS:
        return import_module(f"howsmooth.{name}")
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f"howsmooth.{room}"), name)
    raise AttributeError(f"module 'howsmooth' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
