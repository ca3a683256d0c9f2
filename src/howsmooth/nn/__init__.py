"""Lipschitz attention layers, parts of 1-Lipschitz models, certificates, penalties and training monitors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from howsmooth.nn import penalty
    from howsmooth.nn.attention.base import LipschitzAttention
    from howsmooth.nn.attention.cosine import CosineAttention
    from howsmooth.nn.attention.l2 import L2Attention
    from howsmooth.nn.attention.lipschitz_norm import LipschitzNormAttention
    from howsmooth.nn.attention.sigmoid import SigmoidAttention
    from howsmooth.nn.attention.sinkhorn import SinkhornAttention
    from howsmooth.nn.attention.softmax import QueryKeyNormAttention, SoftmaxAttention
    from howsmooth.nn.certificates.certificate import ModelCertificate
    from howsmooth.nn.certificates.evaluation import Evaluation, evaluate
    from howsmooth.nn.certificates.model_bound import certify
    from howsmooth.nn.deployable_copy import deploy
    from howsmooth.nn.lipschitz_module import LipschitzModule
    from howsmooth.nn.monitoring.lightning import lightning_callback
    from howsmooth.nn.monitoring.monitor import LipschitzMonitor
    from howsmooth.nn.monitoring.record import MonitorRecord
    from howsmooth.nn.monitoring.trainer_callback import MonitorCallback
    from howsmooth.nn.parts.activations import GroupSort, MaxMin
    from howsmooth.nn.parts.embedding_and_pooling import (
        AddPositions,
        ClipTokens,
        MeanPool,
        Patches,
        PrependToken,
        TakeToken,
    )
    from howsmooth.nn.parts.linear import OrthogonalLinear, SpectralLinear
    from howsmooth.nn.parts.norms import CenterNorm, LipschitzLayerNorm, LipschitzRMSNorm
    from howsmooth.nn.parts.residual import AverageResidual, Residual
    from howsmooth.nn.parts.self_attention_layer import SelfAttentionBlock

__all__ = [
    "AddPositions",
    "AverageResidual",
    "CenterNorm",
    "ClipTokens",
    "CosineAttention",
    "Evaluation",
    "GroupSort",
    "L2Attention",
    "LipschitzAttention",
    "LipschitzLayerNorm",
    "LipschitzModule",
    "LipschitzMonitor",
    "LipschitzNormAttention",
    "LipschitzRMSNorm",
    "MaxMin",
    "MeanPool",
    "ModelCertificate",
    "MonitorCallback",
    "MonitorRecord",
    "OrthogonalLinear",
    "Patches",
    "PrependToken",
    "QueryKeyNormAttention",
    "Residual",
    "SelfAttentionBlock",
    "SigmoidAttention",
    "SinkhornAttention",
    "SoftmaxAttention",
    "SpectralLinear",
    "TakeToken",
    "certify",
    "deploy",
    "evaluate",
    "lightning_callback",
    "penalty",
]

# Modules are imported when one of their names is first used, so that `import howsmooth.nn` is fast.
_MODULES = {
    "parts.activations": ("GroupSort", "MaxMin"),
    "attention.base": ("LipschitzAttention",),
    "attention.cosine": ("CosineAttention",),
    "attention.l2": ("L2Attention",),
    "attention.lipschitz_norm": ("LipschitzNormAttention",),
    "attention.sigmoid": ("SigmoidAttention",),
    "attention.sinkhorn": ("SinkhornAttention",),
    "attention.softmax": ("QueryKeyNormAttention", "SoftmaxAttention"),
    "parts.self_attention_layer": ("SelfAttentionBlock",),
    "certificates.certificate": ("ModelCertificate",),
    "certificates.model_bound": ("certify",),
    "deployable_copy": ("deploy",),
    "lipschitz_module": ("LipschitzModule",),
    "certificates.evaluation": ("Evaluation", "evaluate"),
    "parts.linear": ("OrthogonalLinear", "SpectralLinear"),
    "monitoring.lightning": ("lightning_callback",),
    "monitoring.monitor": ("LipschitzMonitor",),
    "parts.norms": ("CenterNorm", "LipschitzLayerNorm", "LipschitzRMSNorm"),
    "monitoring.record": ("MonitorRecord",),
    "parts.residual": ("AverageResidual", "Residual"),
    "parts.embedding_and_pooling": (
        "AddPositions",
        "ClipTokens",
        "MeanPool",
        "Patches",
        "PrependToken",
        "TakeToken",
    ),
    "monitoring.trainer_callback": ("MonitorCallback",),
}


def __getattr__(name: str) -> Any:
    if name == "penalty":
        return import_module("howsmooth.nn.penalty")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"howsmooth.nn.{module}"), name)
    raise AttributeError(f"module 'howsmooth.nn' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
