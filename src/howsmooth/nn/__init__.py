"""Lipschitz attention layers, parts of 1-Lipschitz models, certificates, penalties and training monitors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from howsmooth.nn import penalty as penalty
    from howsmooth.nn.attention.base import LipschitzAttention as LipschitzAttention
    from howsmooth.nn.attention.sinkhorn import SinkhornAttention as SinkhornAttention
    from howsmooth.nn.attention.softmax import QueryKeyNormAttention as QueryKeyNormAttention
    from howsmooth.nn.attention.softmax import SoftmaxAttention as SoftmaxAttention
    from howsmooth.nn.attention.variants import CosineAttention as CosineAttention
    from howsmooth.nn.attention.variants import L2Attention as L2Attention
    from howsmooth.nn.attention.variants import LipschitzNormAttention as LipschitzNormAttention
    from howsmooth.nn.attention.variants import SigmoidAttention as SigmoidAttention
    from howsmooth.nn.certificates.evaluation import Evaluation as Evaluation
    from howsmooth.nn.certificates.evaluation import evaluate as evaluate
    from howsmooth.nn.certificates.model_bound import ModelCertificate as ModelCertificate
    from howsmooth.nn.certificates.model_bound import certify as certify
    from howsmooth.nn.deployable_copy import deploy as deploy
    from howsmooth.nn.lipschitz_module import LipschitzModule as LipschitzModule
    from howsmooth.nn.monitoring.callbacks import MonitorCallback as MonitorCallback
    from howsmooth.nn.monitoring.callbacks import lightning_callback as lightning_callback
    from howsmooth.nn.monitoring.monitor import LipschitzMonitor as LipschitzMonitor
    from howsmooth.nn.monitoring.record import MonitorRecord as MonitorRecord
    from howsmooth.nn.parts.blocks import AverageResidual as AverageResidual
    from howsmooth.nn.parts.blocks import Residual as Residual
    from howsmooth.nn.parts.blocks import SelfAttentionBlock as SelfAttentionBlock
    from howsmooth.nn.parts.embedding_and_pooling import AddPositions as AddPositions
    from howsmooth.nn.parts.embedding_and_pooling import ClipTokens as ClipTokens
    from howsmooth.nn.parts.embedding_and_pooling import MeanPool as MeanPool
    from howsmooth.nn.parts.embedding_and_pooling import Patches as Patches
    from howsmooth.nn.parts.embedding_and_pooling import PrependToken as PrependToken
    from howsmooth.nn.parts.embedding_and_pooling import TakeToken as TakeToken
    from howsmooth.nn.parts.feed_forward import GroupSort as GroupSort
    from howsmooth.nn.parts.feed_forward import MaxMin as MaxMin
    from howsmooth.nn.parts.feed_forward import OrthogonalLinear as OrthogonalLinear
    from howsmooth.nn.parts.feed_forward import SpectralLinear as SpectralLinear
    from howsmooth.nn.parts.norms import CenterNorm as CenterNorm
    from howsmooth.nn.parts.norms import LipschitzLayerNorm as LipschitzLayerNorm
    from howsmooth.nn.parts.norms import LipschitzRMSNorm as LipschitzRMSNorm

# Modules are imported when one of their names is first used, so that `import howsmooth.nn` is fast.
_MODULES = {
    "attention.base": "LipschitzAttention",
    "attention.variants": "CosineAttention L2Attention LipschitzNormAttention SigmoidAttention",
    "attention.sinkhorn": "SinkhornAttention",
    "attention.softmax": "QueryKeyNormAttention SoftmaxAttention",
    "certificates.model_bound": "ModelCertificate certify",
    "deployable_copy": "deploy",
    "lipschitz_module": "LipschitzModule",
    "certificates.evaluation": "Evaluation evaluate",
    "parts.feed_forward": "GroupSort MaxMin OrthogonalLinear SpectralLinear",
    "monitoring.callbacks": "MonitorCallback lightning_callback",
    "monitoring.monitor": "LipschitzMonitor",
    "parts.norms": "CenterNorm LipschitzLayerNorm LipschitzRMSNorm",
    "monitoring.record": "MonitorRecord",
    "parts.blocks": "AverageResidual Residual SelfAttentionBlock",
    "parts.embedding_and_pooling": "AddPositions ClipTokens MeanPool Patches PrependToken TakeToken",
}

__all__ = sorted(["penalty", *" ".join(_MODULES.values()).split()])


def __getattr__(name: str) -> Any:
    if name == "penalty":
        return import_module("howsmooth.nn.penalty")
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(import_module(f"howsmooth.nn.{module}"), name)
    raise AttributeError(f"module 'howsmooth.nn' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
