"""The function ``deploy``, which returns a copy of a model for inference with plain weights."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn.utils import parametrize

from howsmooth.errors import ArgumentError, HowsmoothError
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.certificates.model_bound import foreign_code
from howsmooth.nn.checks import check
from howsmooth.nn.lipschitz_module import LipschitzModule
from howsmooth.nn.parts.blocks import SelfAttentionBlock
from howsmooth.nn.parts.embedding_and_pooling import ClipTokens
from howsmooth.nn.parts.feed_forward import OrthogonalLinear, SpectralLinear
from howsmooth.nn.parts.norms import LipschitzLayerNorm, LipschitzRMSNorm

__all__ = ["deploy"]

Radii = dict[LipschitzAttention, float]  # of the layers that clip tokens

_REPLACED = (OrthogonalLinear, SpectralLinear, LipschitzLayerNorm, LipschitzRMSNorm)


@torch.no_grad()
def deploy(model: nn.Module) -> nn.Module:
    """Return a copy of a model for inference that computes the same function with plain weights.

    The divisor of each attention layer is folded into its output projection. Constrained linear maps and
    norms of hs.nn become those of PyTorch, whose parametrizations are removed. What ``beyond="clip"`` clips
    is clipped by :class:`~howsmooth.nn.ClipTokens`. All else is copied, and the model is not changed.
    :func:`~howsmooth.nn.certify` certifies the copy, with the constant of the model up to rounding; if its
    weights change, its constant changes, too. torch.compile, torch.export and torch.onnx.export record the
    copy, in evaluation mode, without assertions.

    **Nothing in the copy checks the radius.** A layer with ``beyond="refuse"`` refused tokens beyond its
    radius, for which the certificate says nothing; the copy computes an output for them. Put
    :class:`~howsmooth.nn.ClipTokens` with the certified radius in front of the copy (behind ``Patches``,
    which with a ``Linear`` takes the place of a ``Conv2d``), and the certificate holds for all inputs; or
    give inputs that are not trusted to :func:`~howsmooth.nn.evaluate`, which refuses tokens beyond the
    radius. Masks that are arguments of a call are checked as before.

    ArgumentError is raised if ``model`` is no module, its weights are in half precision, in which folding
    would change them, or not finite, an attention layer that clips is not in a
    :class:`~howsmooth.nn.SelfAttentionBlock`, it shares weights with another module, or a layer has hooks or
    a forward of its own.
    """
    check(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    for name, weight in model.named_parameters():
        full = not weight.is_floating_point() or weight.dtype.itemsize >= 4
        remedy = "Convert it with .float() first, and the copy with .to(dtype) afterwards."
        check(full, "model", "weights in float32 or float64", f"{name} in {weight.dtype}", remedy)
    for path, module in model.named_modules():
        reason = foreign_code(module) if isinstance(module, LipschitzModule) else None
        if isinstance(module, _REPLACED) and not type(module).forward.__module__.startswith("howsmooth."):
            reason = "has a forward of its own"
        got = f"{path or 'the model'} ({type(module).__name__}), which {reason}"
        remedy = "Deploy the model without it: the copy would leave it out."
        check(reason is None, "model", "layers of hs.nn as they were built", got, remedy)
    found = copy.deepcopy(model).eval()
    attention = [one for one in found.modules() if isinstance(one, LipschitzAttention)]
    _check_shared_weights(found, attention)
    radii = {one: one.radius for one in attention if one.beyond == "clip" and one.radius is not None}
    return _plain(found, "", {}, radii)


def _check_shared_weights(model: nn.Module, attention: list[LipschitzAttention]) -> None:
    """Raise ArgumentError if folding the divisor of a layer into its weights would change another module."""
    folded = [layer for layer in attention if layer.constant is not None]
    inside = {module for layer in folded for module in layer.modules()}
    owners: list[tuple[nn.Module, bool]] = [(layer, True) for layer in folded]
    owners += [(module, False) for module in model.modules() if module not in inside]
    seen: dict[nn.Parameter, nn.Module] = {}
    for owner, recurse in owners:
        for weight in owner.parameters(recurse=recurse):
            other = seen.setdefault(weight, owner)
            got = f"{type(other).__name__} that shares weights with {type(owner).__name__}"
            remedy = "Use the same layer in both places, or copy the weights."
            own = other is owner or other not in inside
            check(own, "model", "attention layers with weights of their own", got, remedy)


def _plain(module: nn.Module, path: str, seen: dict[nn.Module, nn.Module], radii: Radii) -> nn.Module:
    """Return what replaces ``module``, the same one for all its occurrences in the model."""
    if module in seen:
        return seen[module]
    plain: nn.Module
    match module:
        case OrthogonalLinear() | SpectralLinear():
            plain = _unparametrized(module.linear)
        case LipschitzLayerNorm() | LipschitzRMSNorm():
            plain = _norm(module)
        case SelfAttentionBlock(attention=layer) if layer in radii:
            block = SelfAttentionBlock(_undivided(layer))
            plain = nn.Sequential(ClipTokens(radii[layer]), block).eval()
        case LipschitzAttention() if module in radii:
            expected = "attention layers with beyond='clip' in an hs.nn.SelfAttentionBlock"
            got = f"{path or 'the model'} ({type(module).__name__}) outside of one"
            remedy = "Put it into hs.nn.SelfAttentionBlock, or build it with beyond='refuse'."
            raise ArgumentError("model", expected=expected, got=got, remedy=remedy)
        case LipschitzAttention():
            plain = _undivided(module)
        case _:
            # named_children would leave out a module that occurs twice.
            for name, child in [(name, one) for name, one in module._modules.items() if one is not None]:
                setattr(module, name, _plain(child, f"{path}.{name}".strip("."), seen, radii))
            plain = _unparametrized(module)
    seen[module] = plain
    return plain


def _undivided(layer: LipschitzAttention) -> LipschitzAttention:
    """Fold the divisor of an attention layer into its output projection."""
    for module in layer.modules():
        _unparametrized(module)
    if layer.constant is not None:
        weights = layer._weights()
        inverse = math.exp(-layer._log_divisor(weights))
        if layer._log_divisor_of.far and layer.out_proj.weight.dtype != torch.float64:
            raise HowsmoothError(
                f"the output of the layer is multiplied by {inverse:.3g}, for which float32 is too narrow: "
                "convert the model with .double() first"
            )
        for weight in layer.out_proj.parameters():
            weight.mul_(inverse)
    layer.constant = layer.radius = None
    layer.beyond = "refuse"
    return layer


def _norm(norm: LipschitzLayerNorm | LipschitzRMSNorm) -> nn.Module:
    """Convert a norm layer to PyTorch's, with ε = r²/d and gain γ r/√d, where r is its ``floor``."""
    d, r, gain = norm.dim, norm.floor, norm._gain()
    kind = nn.RMSNorm if norm.shift is None else nn.LayerNorm
    plain = kind(d, eps=r**2 / d, device=gain.device, dtype=gain.dtype)
    weights = {"weight": gain * (r / math.sqrt(d))}
    plain.load_state_dict(weights if norm.shift is None else weights | {"bias": norm.shift})
    return plain.eval()


def _unparametrized(module: nn.Module) -> nn.Module:
    if parametrize.is_parametrized(module):
        values = {name: getattr(module, name).clone() for name in module.parametrizations}  # type: ignore[union-attr]
        # PyTorch's remove_parametrizations would change the class, which the copy shares with the model.
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module.parametrizations
        for name, value in values.items():
            module.register_parameter(name, nn.Parameter(value))
    return module
