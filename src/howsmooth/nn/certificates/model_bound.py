"""The function ``certify``, which bounds the Lipschitz constant of a model by those of its modules."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from howsmooth.errors import NonFiniteError
from howsmooth.nn.certificates.forward_propagation import walk_forward
from howsmooth.nn.certificates.module_propagation import ModuleRow, kind_of, refusal, walk
from howsmooth.nn.checks import check, check_ball, check_layer_input, check_length
from howsmooth.nn.lipschitz_module import LipschitzModule
from howsmooth.rounding import below, limit_in_digits

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ModelCertificate", "certify", "foreign_code"]


@dataclass(frozen=True)
class ModelCertificate:
    """An upper bound on the Lipschitz constant of a model, with the constants of its modules.

    The bound refers to Frobenius norms and to inputs of ``length`` tokens of norm at most ``radius``. It
    holds in exact arithmetic, for the weights at the time of certification.

    ``constant`` is the bound, the product of the constants of all ``rows`` of level 0. It is printed rounded
    up, the rows are printed rounded to the nearest. There is one row for each module, in the order in which
    tokens pass through them; in a model with a forward of its own also for each operation that changes the
    constant or the norms. ``output_length`` and ``output_radius`` are the number of output tokens and an
    upper bound on their norms.
    """

    constant: float
    length: int
    radius: float
    output_length: int
    output_radius: float
    rows: tuple[ModuleRow, ...]

    @cached_property
    def table(self) -> pd.DataFrame:
        """The rows as a table, with the fields of a row as columns."""
        import pandas as pd

        return pd.DataFrame(map(asdict, self.rows), columns=list(ModuleRow.__dataclass_fields__))

    def certified_radius(self, logits: Tensor, labels: Tensor | None = None) -> Float[Tensor, " inputs"]:
        """Return for each input the distance, in the Frobenius norm, within which its class cannot change.

        The distance, in float64, is the margin between the logit of the class and the largest other logit,
        divided by √2 times the constant. It is zero if another logit is as large (Tsuzuku, Sato, Sugiyama,
        *Lipschitz-margin training*, NeurIPS 2018). The perturbed input must be covered by the certificate, so
        its tokens must have norm at most ``radius``. ``logits`` are outputs of the model, (batch, classes),
        and ``labels`` the class of each input; None for the class with the largest logit. ArgumentError names
        what has a wrong type, shape or value.
        """
        check(isinstance(logits, Tensor), "logits", "a tensor (batch, classes)", type(logits).__name__)
        z = logits.detach().to(torch.float64)
        classes = z.ndim == 2 and z.shape[1] >= 2
        check(classes, "logits", "shape (batch, classes), classes >= 2", tuple(z.shape))
        if not bool(torch.isfinite(z).all()):
            raise NonFiniteError("logits", expected="finite numbers", got="NaN or infinity")
        if labels is None:
            labels = z.argmax(dim=1)
        got = str(labels.dtype) if isinstance(labels, Tensor) else type(labels).__name__
        whole = isinstance(labels, Tensor) and not labels.is_floating_point() and not labels.is_complex()
        check(whole, "labels", "a tensor of whole numbers", got)
        shape = f"shape {tuple(labels.shape)}"
        check(labels.shape == z.shape[:1], "labels", f"one label for each of {len(z)} inputs", shape)
        known = bool(((labels >= 0) & (labels < z.shape[1])).all())
        got = f"{labels.min()} to {labels.max()}" if len(labels) else "none"
        check(known, "labels", f"classes from 0 to {z.shape[1] - 1}", got)
        labels = labels.to(z.device, torch.int64)
        own = z.gather(1, labels[:, None])[:, 0]
        others = z.scatter(1, labels[:, None], -math.inf).amax(dim=1)
        margin = (own - others).clamp(min=0.0)
        # The radii are rounded down. If the constant is zero, every positive margin gives an infinite radius.
        radii = below(margin / (math.sqrt(2) * self.constant), 8) if self.constant else margin * math.inf
        return torch.where(margin > 0, radii, 0.0)

    def __str__(self) -> str:
        shown = self.table[["path", "kind", "constant", "radius_in", "radius_out"]].copy()
        paths = ["  " * row.level + (row.path or "the model") for row in self.rows]
        shown["path"] = [path.ljust(max(map(len, paths))) for path in paths]
        table = shown.to_string(index=False, justify="left", float_format=lambda v: f"{v:.6g}")
        exact = "The constant is that of the model in exact arithmetic, for its weights as they are."
        return "\n".join([self.headline, *([table] if self.rows else []), exact])

    @property
    def headline(self) -> str:
        """The constant, rounded up, with the inputs for which it holds, as one line of text."""
        where = "of any norm" if math.isinf(self.radius) else f"of norm at most {self.radius:g}"
        constant = limit_in_digits(self.constant, 6, upper=True)
        return f"Lipschitz constant at most {constant} on {self.length} tokens {where}"


def certify(
    model: nn.Module, length: int, radius: float, *, inputs: Tensor | None = None
) -> ModelCertificate:
    """Bound the Lipschitz constant of a model by the product of the constants of its modules.

    A model may consist of layers of ``hs.nn``, of the caller's classes that derive from ``LipschitzModule``,
    of ``torch.nn.Sequential``, and of the PyTorch modules with a known constant (documentation page "Build a
    model with a proved constant"). Each module's constant is computed on the ball that its inputs can reach.

    A model with a ``forward`` of its own is certified with ``inputs``: it runs on tensors
    without values, and each operation needs a rule, too. It is assumed to compute the same in every call;
    this is checked for two inputs, and parametrized weights are read twice. CertificateError names a module
    that has no constant, or is in a mode in which it is no fixed function, and NonFiniteError a weight.

    Parameters
    ----------
    model
        The model, with weights in float32 or float64.
    length, radius
        Number of input tokens, and their largest norm: of patches for a model that begins with ``Patches``;
        the length is 1 for a model on vectors. ``math.inf`` stands for all inputs, if the model has a
        constant on them, for instance because it begins with ``ClipTokens``.
    inputs
        An example input, for a model with a ``forward`` of its own: tokens (batch, n, d), vectors (batch, d),
        or images (batch, channels, height, width) for a model that begins with ``Patches`` or a ``Conv2d``
        whose patches do not overlap. The certificate holds for all inputs of this shape, and of another batch
        size if the operations do not depend on it. The model is run twice.
    """
    check(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
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
    if inputs is None:
        found = walk(model, length, reach)
    else:
        remedy = "Certify the part of the model behind its embedding, on embedded tokens."
        whole = isinstance(inputs, Tensor) and not inputs.is_floating_point()
        check(not whole, "inputs", "floating-point numbers", getattr(inputs, "dtype", ""), remedy)
        found = walk_forward(model, check_layer_input("inputs", inputs), length, reach)
    output = found.length, found.radius
    return ModelCertificate(found.constant, length, float(radius), *output, found.rows)


def _check(module: nn.Module, path: str) -> None:
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
    if _foreign_hooks(module):
        exported = isinstance(module, fx.GraphModule)
        remedy = "Certify the model that was exported." if exported else "Remove them."
        raise refusal(module, path, "has hooks, which may change what goes in or comes out", remedy)
    if module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        raise refusal(module, path, "drops numbers at random in training mode", "Call model.eval().")
    if module.training and isinstance(module, nn.utils.parametrizations._SpectralNorm):
        reason = "changes its estimate of the norm whenever the weight is read in training mode"
        raise refusal(module, path, reason, "Call model.eval().")


def foreign_code(module: nn.Module) -> str | None:
    """Return a phrase that says why the constant of a layer may not hold for its forward pass, such as hooks
    or a replaced ``forward``. Return None if there is no such reason.
    """
    if _foreign_hooks(module):
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


def _foreign_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks that were not registered by this library."""
    every = nn.modules.module
    hooks = [
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *every._global_forward_hooks.values(),
        *every._global_forward_pre_hooks.values(),
    ]
    return any(not getattr(hook, "__module__", "").startswith("howsmooth.") for hook in hooks)
