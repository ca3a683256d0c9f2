"""certify: walk a model, multiply the constants of its modules, or say which one has none."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.nn.certificates.certificate import ModelCertificate
from howsmooth.nn.certificates.walk import refusal, walk
from howsmooth.nn.numbers import check_ball, check_length

__all__ = ["certify", "foreign_hooks"]

_EXACT = "The constant is that of the model in exact arithmetic, for its weights as they are."


def certify(model: nn.Module, length: int, radius: float) -> ModelCertificate:
    """Bound the Lipschitz constant of a model by the product of those of its modules.

    Certified are the layers of ``hs.nn``, classes of your own that derive from ``LipschitzModule``,
    ``torch.nn.Sequential``, and of PyTorch's modules those with a rule (docs/guide/lipschitz-layers.md). Each
    module is asked for its constant on the ball that its inputs can reach.

    Parameters
    ----------
    model
        The model, its weights in float32 or float64.
    length
        Number of input tokens n. After ``Patches`` first, of patches; for a model of vectors, 1.
    radius
        Largest norm of an input token; ``math.inf`` for all inputs, where the model has a constant there, for
        instance because it begins with ``ClipTokens``.

    Returns
    -------
    ModelCertificate
        The constant and a table of where it is spent.

    Raises
    ------
    CertificateError
        If a module has no constant, or is in a mode in which its function is not fixed; it names the module.
    NonFiniteError
        If a weight is not finite.
    ArgumentError
        If an argument does not fit.

    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", expected="a torch.nn.Module", got=type(model).__name__)
    length = check_length(length)
    reach = check_ball(radius)
    for path, module in model.named_modules():
        _check(module, path)
    found = walk(model, length, reach)
    return ModelCertificate(
        found.constant, length, float(radius), found.length, found.radius, found.rows, (_EXACT,)
    )


def _check(module: nn.Module, path: str) -> None:
    """Refuse what stands in the way in any class: half precision, NaN, functions that are not fixed."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, value in own:
        if is_lazy(value):
            reason = f"has a {name} whose shape is not known yet"
            raise refusal(module, path, reason, "Give the model an input once.")
        if value.is_meta:
            raise refusal(module, path, f"has no values for {name}, which is on the meta device")
        if value.is_complex() or (value.is_floating_point() and value.dtype.itemsize < 4):
            reason = f"has {name} in {value.dtype}, in which no constant is certified"
            raise refusal(module, path, reason, "Convert the model with .float() or .double().")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise NonFiniteError(
                f"{path}.{name}" if path else name, expected="finite numbers", got="NaN or infinity"
            )
    if foreign_hooks(module):
        raise refusal(module, path, "has hooks, which may change what goes in or comes out", "Remove them.")
    if module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        raise refusal(module, path, "drops numbers at random in training mode", "Call model.eval().")
    if module.training and isinstance(module, nn.utils.parametrizations._SpectralNorm):
        reason = "changes its estimate of the norm whenever the weight is read in training mode"
        raise refusal(module, path, reason, "Call model.eval().")


def foreign_hooks(module: nn.Module) -> bool:
    """Return whether hooks of others than this library are on a module's forward pass."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not getattr(hook, "__module__", "").startswith("howsmooth.") for hook in hooks)
