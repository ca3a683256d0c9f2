"""The function ``certify``, which bounds the Lipschitz constant of a model by those of its modules."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from howsmooth.bounds.radius.pretrained_classifier_reader import foreign_hooks
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.nn.certificates.certificate import ModelCertificate
from howsmooth.nn.certificates.graph_propagation import walk_graph
from howsmooth.nn.certificates.module_propagation import kind_of, refusal, walk
from howsmooth.nn.checks import check_ball, check_length, check_tokens
from howsmooth.nn.lipschitz_module import LipschitzModule

__all__ = ["certify", "foreign_code"]

_EXACT = "The constant is that of the model in exact arithmetic, for its weights as they are."


def certify(
    model: nn.Module, length: int, radius: float, *, inputs: Tensor | None = None
) -> ModelCertificate:
    """Bound the Lipschitz constant of a model by the product of the constants of its modules.

    A model may consist of layers of ``hs.nn``, of the caller's classes that derive from ``LipschitzModule``,
    of ``torch.nn.Sequential``, and of the PyTorch modules with a known constant (documentation page "Layers
    with a Lipschitz constant"). Each module's constant is computed on the ball that its inputs can reach.

    A model with a ``forward`` of its own is certified with ``inputs``: :mod:`torch.fx` records its
    operations, and each operation needs a rule, too. It is assumed to compute the same in every call; this
    is checked for two recordings, and parametrized weights are read twice.

    Parameters
    ----------
    model
        The model, with weights in float32 or float64.
    length
        Number of input tokens n. For a model that begins with ``Patches`` it is the number of patches; for a
        model on vectors it is 1.
    radius
        Largest norm of an input token. ``math.inf`` stands for all inputs, if the model has a constant on
        them, for instance because it begins with ``ClipTokens``.
    inputs
        An example input, for a model with a ``forward`` of its own: tokens (batch, n, d), vectors (batch, d),
        or images (batch, channels, height, width) for a model that begins with ``Patches`` or a ``Conv2d``
        whose patches do not overlap; length and radius then refer to the patches. The certificate holds for
        all inputs of this shape, and of another batch size if the operations do not depend on it. The model
        is run once.

    Returns
    -------
    ModelCertificate
        The constant, and a table of the modules' constants.

    Raises
    ------
    CertificateError
        If a module has no constant, or is in a mode in which it is not a fixed function. The message names
        the module.
    NonFiniteError
        If a weight is NaN or infinite.
    ArgumentError
        If an argument has a wrong type or value.

    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", expected="a torch.nn.Module", got=type(model).__name__)
    length = check_length(length)
    reach = check_ball(radius)
    # Not walked are the parts of a layer whose constant is known for the layer as a whole.
    inside = {m for layer in model.modules() if isinstance(layer, LipschitzModule) for m in layer.modules()}
    for path, module in model.named_modules():
        _check(module, path)
        if module in inside and (reason := foreign_code(module)) is not None:
            raise refusal(module, path, reason, "Undo this, or give its class a lipschitz_bound.")
    for path, module in model.named_modules():
        for name in getattr(module, "parametrizations", ()):
            with torch.no_grad():
                once, again = getattr(module, name), getattr(module, name)
            if not torch.allclose(once, again, rtol=1e-6, equal_nan=True):
                reason = f"has a parametrized {name} that is another one whenever it is read"
                raise refusal(module, path, reason, "Remove the parametrization.")
    if isinstance(inputs, Tensor) and not inputs.is_floating_point():
        got = f"{inputs.dtype}, shape {tuple(inputs.shape)}"
        remedy = "Certify the part of the model behind its embedding, on embedded tokens."
        raise ArgumentError("inputs", expected="floating-point numbers", got=got, remedy=remedy)
    if inputs is None:
        found = walk(model, length, reach)
    else:
        found = walk_graph(model, check_tokens("inputs", inputs), length, reach)
    return ModelCertificate(
        found.constant, length, float(radius), found.length, found.radius, found.rows, (_EXACT,)
    )


def _check(module: nn.Module, path: str) -> None:
    """Raise an error if a module is in a state in which no Lipschitz constant can be certified."""
    # Only the module's own tensors are checked; its children have their turn.
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, value in own:
        if is_lazy(value):
            reason = f"has a {name} whose shape is not known yet"
            raise refusal(module, path, reason, "Run the model on an input once.")
        if value.is_meta:
            raise refusal(module, path, f"has no values for {name}, which is on the meta device")
        if value.is_complex() or (value.is_floating_point() and value.dtype.itemsize < 4):
            reason = f"has {name} in {value.dtype}, a dtype in which no constant is certified"
            raise refusal(module, path, reason, "Convert the model with .float() or .double().")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            named = f"{path}.{name}" if path else name
            raise NonFiniteError(named, expected="finite numbers", got="NaN or infinity")
    if hasattr(module, "_orig_mod"):
        raise refusal(module, path, "is compiled", "Certify the module from which torch.compile made it.")
    if not isinstance(module, fx.GraphModule):
        kind = kind_of(module)
        if kind.__call__ is not nn.Module.__call__ or kind._call_impl is not nn.Module._call_impl:
            raise refusal(module, path, "has a __call__ of its own", "Define forward instead.")
        home = next(one for one in kind.__mro__ if "forward" in vars(one)).__module__
        code = getattr(kind.forward, "__module__", home)
        if home.startswith(("torch.", "howsmooth.")) and not code.startswith(("torch.", "howsmooth.")):
            raise refusal(module, path, f"has a class whose forward was replaced (by code of {code})")
    if foreign_hooks(module):
        exported = isinstance(module, fx.GraphModule)
        remedy = "Certify the model that was exported." if exported else "Remove them."
        raise refusal(module, path, "has hooks, which may change what goes in or comes out", remedy)
    if module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        raise refusal(module, path, "drops numbers at random in training mode", "Call model.eval().")
    if module.training and isinstance(module, nn.utils.parametrizations._SpectralNorm):
        reason = "changes its estimate of the norm whenever the weight is read in training mode"
        raise refusal(module, path, reason, "Call model.eval().")


def foreign_code(module: nn.Module) -> str | None:
    """Return a phrase that says why the forward pass of a layer is not the one of its constant, or None."""
    if foreign_hooks(module):
        return "has hooks, which may change what goes in or comes out"
    if "forward" in vars(module):
        return "has a forward that was replaced after it was built"
    if not isinstance(module, LipschitzModule):
        return None
    family = kind_of(module).__mro__
    forward = next(kind for kind in family if "forward" in vars(kind))
    bound = next(kind for kind in family if "lipschitz_bound" in vars(kind))
    ours = next(kind for kind in family if kind.__module__.startswith("howsmooth."))
    if not issubclass(ours, forward) and issubclass(ours, bound):
        return f"has a forward of its own and the constant of {ours.__name__}"
    return None
