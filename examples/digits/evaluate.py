"""What a trained model is worth: clean, certified and attacked accuracy, and local Lipschitz constants."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import howsmooth as hs

from .attack import attack
from .data import Digits
from .models import SIDE, PlainViT, certifiable

RADII = (0.1, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Evaluation:
    """Numbers of one model on test images; shares are between 0 and 1.

    Attributes
    ----------
    images
        How many.
    clean
        Share that is classified rightly.
    constant
        The certified Lipschitz constant from image to logits, everywhere.
    radii
        Radii in the l2 norm.
    certified
        Share that is right and stays so within each radius, proved.
    attacked
        Share that stays right under the attack within each radius.
    wrongly_certified
        Images certified at a radius at which the attack breaks them: none, or something is wrong.
    measured
        How many images the local constants are of.
    model_constants
        Median and largest local Lipschitz constant of the model, image to logits.
    attention_constants
        The same for each attention layer at its own inputs.

    """

    images: int
    clean: float
    constant: float
    radii: tuple[float, ...]
    certified: tuple[float, ...]
    attacked: tuple[float, ...]
    wrongly_certified: int
    measured: int
    model_constants: tuple[float, float]
    attention_constants: tuple[tuple[float, float], ...]

    def record(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def of_parts(model: nn.Module) -> tuple[nn.Sequential, int]:
    """Return the same function made of parts that hs.nn.certify knows, and its number of tokens."""
    patch = model.patches.patch_size if isinstance(model, PlainViT) else model[0].patch_size
    length = (SIDE // patch) ** 2
    return (certifiable(model, length).eval() if isinstance(model, PlainViT) else model), length


def constant_of(model: nn.Module) -> hs.nn.ModelCertificate:
    """Certify a model of any form, for all inputs."""
    return hs.nn.certify(*of_parts(model), math.inf)


def certified_radii(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the certified radius of each image, zero where it is misclassified; float64, (batch,)."""
    with torch.no_grad():
        return constant_of(model).certified_radius(model(images), labels)


def local_constants(model: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Measure the model at each image, and each attention layer at what reaches it; (batch,) each."""
    parts, _ = of_parts(model)
    # A patch of four black pixels lies on the sphere of ClipTokens exactly, where there is no derivative.
    images = (1 - 1e-6) * images
    inputs: dict[nn.Module, Tensor] = {}
    layers = [module for module in parts.modules() if isinstance(module, hs.nn.SelfAttentionBlock)]
    hooks = [
        layer.register_forward_pre_hook(lambda module, given: inputs.__setitem__(module, given[0].detach()))
        for layer in layers
    ]
    with torch.no_grad():
        parts(images)
    for hook in hooks:
        hook.remove()

    def whole(pixels: Tensor) -> Tensor:  # (..., 1, 64) -> (..., 1, 10)
        return parts(pixels.reshape(-1, 1, SIDE, SIDE)).reshape(*pixels.shape[:-1], -1)

    of_model = hs.local_lipschitz(whole, images.reshape(len(images), 1, -1), rtol=1e-3).value
    return of_model, [hs.local_lipschitz(layer, inputs[layer], rtol=1e-3).value for layer in layers]


def evaluate(
    model: nn.Module, test: Digits, *, measured: int = 100, steps: int = 50, starts: int = 2
) -> Evaluation:
    """Evaluate a model on test images in float64."""
    model = model.double().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    radii = certified_radii(model, test.images, test.labels)
    margins, _ = attack(model, test.images, test.labels, RADII, steps=steps, starts=starts)
    with torch.no_grad():
        right = model(test.images).argmax(dim=1) == test.labels
    certified = torch.stack([right & (radii >= radius) for radius in RADII])
    of_model, of_layers = local_constants(model, test.images[:measured])
    return Evaluation(
        images=len(test),
        clean=_share(right),
        constant=constant_of(model).constant,
        radii=RADII,
        certified=tuple(map(_share, certified)),
        attacked=tuple(map(_share, margins > 0)),
        wrongly_certified=int((certified & (margins <= 0)).sum()),
        measured=len(of_model),
        model_constants=_summary(of_model),
        attention_constants=tuple(map(_summary, of_layers)),
    )


def _share(which: Tensor) -> float:
    return float(which.double().mean())


def _summary(values: Tensor) -> tuple[float, float]:
    return float(values.median()), float(values.max())
