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
    from howsmooth import adversarial as adversarial
    from howsmooth import attention as attention
    from howsmooth import bounds as bounds
    from howsmooth import dynamics as dynamics
    from howsmooth import errors as errors
    from howsmooth import functional as functional
    from howsmooth import jacobian as jacobian
    from howsmooth import measures as measures
    from howsmooth import models as models
    from howsmooth import nn as nn
    from howsmooth import spectral as spectral
    from howsmooth import study as study
    from howsmooth import texts as texts
    from howsmooth.attention import Compose as Compose
    from howsmooth.attention import L2Attention as L2Attention
    from howsmooth.attention import LayerNorm as LayerNorm
    from howsmooth.attention import LayerScale as LayerScale
    from howsmooth.attention import Residual as Residual
    from howsmooth.attention import RMSNorm as RMSNorm
    from howsmooth.attention import Rotary as Rotary
    from howsmooth.attention import SelfAttention as SelfAttention
    from howsmooth.attention import SinkhornAttention as SinkhornAttention
    from howsmooth.errors import HowsmoothError as HowsmoothError
    from howsmooth.lipschitz import LipschitzEstimate as LipschitzEstimate
    from howsmooth.lipschitz import LipschitzEstimates as LipschitzEstimates
    from howsmooth.lipschitz import local_lipschitz as local_lipschitz
    from howsmooth.models import Site as Site
    from howsmooth.models import capture as capture
    from howsmooth.models import load_model as load_model
    from howsmooth.profiling import CertifiedAccuracy as CertifiedAccuracy
    from howsmooth.profiling import DepthProfile as DepthProfile
    from howsmooth.profiling import Influence as Influence
    from howsmooth.profiling import LengthGrowth as LengthGrowth
    from howsmooth.profiling import Precision as Precision
    from howsmooth.profiling import PredictionStability as PredictionStability
    from howsmooth.profiling import Profile as Profile
    from howsmooth.profiling import ProfileComparison as ProfileComparison
    from howsmooth.profiling import ProfileOverTexts as ProfileOverTexts
    from howsmooth.profiling import WordRadii as WordRadii
    from howsmooth.profiling import certified_accuracy as certified_accuracy
    from howsmooth.profiling import depth_profile as depth_profile
    from howsmooth.profiling import growth as growth
    from howsmooth.profiling import influence as influence
    from howsmooth.profiling import precision as precision
    from howsmooth.profiling import prediction_stability as prediction_stability
    from howsmooth.profiling import profile as profile
    from howsmooth.profiling import word_radii as word_radii
    from howsmooth.study.exponents import fit_exponent as fit_exponent
    from howsmooth.study.stored_tables import read as read

__version__ = metadata.version("howsmooth")

# PyTorch takes two seconds to import and transformers as many again; `howsmooth --help` needs neither.
_PACKAGES = [
    "adversarial", "attention", "bounds", "dynamics", "errors", "functional", "jacobian", "measures",
    "models", "nn", "spectral", "study", "texts",
]  # fmt: skip
_NAMES = {
    "attention": "Compose L2Attention LayerNorm LayerScale RMSNorm Residual Rotary SelfAttention "
    "SinkhornAttention",
    "errors": "HowsmoothError",
    "lipschitz": "LipschitzEstimate LipschitzEstimates local_lipschitz",
    "models": "Site capture load_model",
    "profiling": "CertifiedAccuracy DepthProfile Influence LengthGrowth Precision PredictionStability "
    "Profile ProfileComparison ProfileOverTexts WordRadii certified_accuracy depth_profile growth influence "
    "precision prediction_stability profile word_radii",
    "study.exponents": "fit_exponent",
    "study.stored_tables": "read",
}

__all__ = sorted([*_PACKAGES, *" ".join(_NAMES.values()).split()])


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"howsmooth.{name}")
    for package, names in _NAMES.items():
        if name in names.split():
            return getattr(import_module(f"howsmooth.{package}"), name)
    raise AttributeError(f"module 'howsmooth' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
