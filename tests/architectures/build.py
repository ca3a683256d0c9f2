"""Any model type as a tiny model with spread-out random weights in float64, and inputs on which it runs."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests._tiny_models import WithoutDowncast
from tests.architectures import overrides
from tests.architectures.inputs import tries
from tests.architectures.shrink import shrink

SEED = 0


def model_types() -> list[str]:
    """Every model type that has a configuration and a base model, in alphabetical order."""
    return sorted(name for name in MODEL_MAPPING_NAMES if name in CONFIG_MAPPING_NAMES)


def class_name(model_type: str) -> str:
    name = MODEL_MAPPING_NAMES[model_type]
    return name if isinstance(name, str) else name[0]


def _class(model_type: str) -> type[PreTrainedModel]:
    import transformers

    name = class_name(model_type)
    found = getattr(transformers, name, None)
    if found is None:
        package = type(CONFIG_MAPPING[model_type]()).__module__.rsplit(".", 1)[0]
        modules = [m for m in dir(importlib.import_module(package)) if m.startswith("modeling_")]
        found = next(
            getattr(importlib.import_module(f"{package}.{m}"), name)
            for m in modules
            if hasattr(importlib.import_module(f"{package}.{m}"), name)
        )
    return found


def spread(model: nn.Module) -> None:
    """Values in which a mistake would show: no gain is 1, no bias is 0, no attention is uniform."""
    with torch.no_grad():
        for module in model.modules():
            transposed = type(module).__name__ == "Conv1D"
            for p in module.parameters(recurse=False):
                if not p.is_floating_point() or not p.numel():
                    continue
                if p.ndim >= 2 and not (p.shape[0] == 1 and bool((p == p.flatten()[0]).all())):
                    inputs = p.shape[0] if transposed else p[0].numel() if p.ndim != 3 else p.shape[-1]
                    gain = 1.0 if isinstance(module, nn.Embedding) else 1.5 / inputs**0.5
                    p.copy_(torch.randn(p.shape, dtype=p.dtype) * gain)
                elif p.numel() and bool((p == p.flatten()[0]).all()) and abs(float(p.flatten()[0])) < 100:
                    p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
                elif not bool(p.isfinite().all()) or float(p.abs().max()) > 100:
                    p.copy_(0.3 * torch.randn(p.shape, dtype=p.dtype))


def build(model_type: str) -> PreTrainedModel:
    """The model: two layers, width 64, in float64 and evaluation mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = shrink(
            CONFIG_MAPPING[overrides.CONFIG_OF.get(model_type, model_type)](),
            overrides.CONFIGS.get(model_type, {}),
        )
        torch.manual_seed(SEED)
        model = _class(model_type)(config)
    torch.manual_seed(SEED)
    spread(model)
    model = model.to(torch.float64).eval()
    for part in model.modules():
        if isinstance(getattr(part, "config", None), PreTrainedConfig) and hasattr(part.config, "use_cache"):
            part.config.use_cache = False  # as in capture: some (fsmt) mask otherwise with a cache
        if isinstance(part, PreTrainedModel) and hasattr(part, "set_experts_implementation"):
            try:
                part.set_experts_implementation("eager")
            except (ValueError, NotImplementedError, AttributeError):
                continue
    return model


def cast(value: Any) -> Any:
    """Float tensors of the inputs in float64."""
    return value.to(torch.float64) if isinstance(value, Tensor) and value.is_floating_point() else value


def inputs_of(model_type: str, model: PreTrainedModel) -> dict[str, Any]:
    """The first inputs on which the model runs; raises the error of the first try if there are none."""
    torch.manual_seed(SEED + 1)
    first: Exception | None = None
    fixed: Mapping[str, Any] | None = (
        overrides.INPUTS[model_type](model.config) if model_type in overrides.INPUTS else None
    )
    for given in [fixed] if fixed is not None else tries(model):
        inputs = {name: cast(value) for name, value in given.items()}
        try:
            with torch.no_grad(), WithoutDowncast():
                model(**inputs)
        except Exception as error:
            first = first or error
        else:
            return inputs
    raise first or ValueError("no argument of its forward is known")
