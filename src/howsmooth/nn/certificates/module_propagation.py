"""Computation of the Lipschitz constant of a model from the constants of its modules.

Tokens are followed from module to module, because a module's constant may depend on their number and norms.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.nn.utils import parametrize

from howsmooth.errors import ArgumentError, CertificateError, NonFiniteError
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.softmax import SoftmaxAttention
from howsmooth.nn.certificates.torch_module_constants import ModuleRow, Reach, rule_of
from howsmooth.nn.checks import check_ball
from howsmooth.nn.lipschitz_module import LipschitzModule
from howsmooth.nn.parts.blocks import BranchModule, Residual, SelfAttentionBlock
from howsmooth.rounding import above, times

__all__ = [
    "ModuleRow", "attention_block", "branched", "encoder_layer", "has_rules", "kind_of", "refusal", "walk",
]  # fmt: skip


def walk(module: nn.Module, length: int, radius: float, path: str = "", level: int = 0) -> Reach:
    """Compute the Lipschitz constant of a module for ``length`` tokens of norm at most ``radius``."""
    kind = kind_of(module)
    if path and isinstance(module, LipschitzAttention):
        remedy = "Put it into hs.nn.SelfAttentionBlock, which returns the tokens alone."
        raise refusal(module, path, "returns a pair, tokens and attention weights", remedy)
    if "forward" in vars(module):
        raise refusal(module, path, "has a forward that was replaced after it was built")
    if isinstance(module, nn.Sequential) and kind.forward is nn.Sequential.forward:
        return _through(module._modules, length, radius, path, level)
    if kind is nn.TransformerEncoder:
        assert isinstance(module, nn.TransformerEncoder)
        layers = {f"layers.{i}": layer for i, layer in enumerate(module.layers)}
        last = {} if module.norm is None else {"norm": module.norm}
        return _through(layers | last, length, radius, path, level)
    if kind is nn.TransformerEncoderLayer:
        return _rewritten(module, length, radius, path, level)
    # A subclass may have a theorem of its own.
    if isinstance(module, BranchModule) and type(module).lipschitz_bound is BranchModule.lipschitz_bound:
        return branched(module, length, radius, path, level)
    if isinstance(module, LipschitzModule):
        reach = _of_layer(module, length, radius, path)
    else:
        rule = rule_of(kind)
        if rule is None:
            hint = next((words for one, words in _HINTS.items() if isinstance(module, one)), _HINT)
            raise refusal(module, path, "is of a kind without a rule", hint)
        found = rule(module, length, radius)
        if isinstance(found, str):
            raise refusal(module, path, found)
        reach = found
    if math.isnan(reach.constant) or math.isnan(reach.radius):
        raise refusal(module, path, "gave a constant or a radius that is not a number")
    return _with_row(reach, (), path, kind.__name__, level, length, radius)


def _with_row(
    reach: Reach, inside: tuple[ModuleRow, ...], path: str, kind: str, level: int, length: int, radius: float
) -> Reach:
    radii, lengths = (radius, reach.radius), (length, reach.length)
    return replace(
        reach, rows=(*inside, ModuleRow(path, kind, level, reach.constant, *radii, *lengths, reach.source))
    )


def has_rules(module: nn.Module) -> bool:
    """Return whether the constant of a module is known without following the operations of its forward."""
    kind = kind_of(module)
    if isinstance(module, nn.Sequential) and kind.forward is nn.Sequential.forward:
        return all(map(has_rules, module))
    torchs = kind in (nn.TransformerEncoder, nn.TransformerEncoderLayer)
    return torchs or isinstance(module, LipschitzModule) or rule_of(kind) is not None


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, or its original class if parametrizations have replaced it."""
    kind: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return kind


def refusal(module: nn.Module, path: str, reason: str, remedy: str = "") -> CertificateError:
    """Return the exception that says why no Lipschitz constant of a module is known."""
    return CertificateError(path, kind=kind_of(module).__name__, reason=reason, remedy=remedy)


def _through(
    modules: Mapping[str, nn.Module | None], length: int, radius: float, path: str, level: int
) -> Reach:
    rows: tuple[ModuleRow, ...] = ()
    constants = []
    for name, module in modules.items():
        own = f"{path}.{name}" if path else name
        if module is None:
            reason = "is no module, and cannot be called"
            remedy = "Delete it, or put torch.nn.Identity() in its place."
            raise CertificateError(own, kind="None", reason=reason, remedy=remedy)
        step = walk(module, length, radius, own, level)
        rows += step.rows
        constants.append(step.constant)
        # The outputs of one module are the inputs of the next.
        length, radius = step.length, check_ball(step.radius)
    # The product is zero if one constant is zero, even if another one is infinite.
    constant = 0.0 if 0.0 in constants else above(math.prod(constants, start=1.0), len(constants))
    return Reach(constant, radius, length, rows=rows)


def branched(module: BranchModule, length: int, radius: float, path: str, level: int) -> Reach:
    """Return bounds on the sum p x + q f(x). Its row in the table follows the rows of the branch f."""
    branch = walk(module.inner, length, radius, f"{path}.inner" if path else "inner", level + 1)
    if branch.length != length:
        raise refusal(module, path, f"adds {length} tokens to the {branch.length} that its branch returns")
    p, q = module._weights()
    # The norm of p x + q y is at most p |x| + q |y|.
    reach = above(times(p, radius) + times(q, branch.radius), 8)
    found = Reach(above(p + times(q, branch.constant), 8), reach, length, module._source)
    return _with_row(found, branch.rows, path, type(module).__name__, level, length, radius)


def _of_layer(module: LipschitzModule, length: int, radius: float, path: str) -> Reach:
    try:
        bound = module.lipschitz_bound(length, radius)
        reached, count = module.output_radius(length, radius), module.output_length(length)
    except NonFiniteError:
        raise
    except ArgumentError as error:
        reason = f"has no constant here: {error.argument}: expected {error.expected}, got {error.got}"
        raise refusal(module, path, reason, error.remedy) from error
    if bound.side != "upper" or not bound.holds:
        failed = "; ".join(h.statement for h in bound.hypotheses if not h.holds)
        reason = f"has no constant here: its bound needs {failed or 'to be an upper bound'}"
        raise refusal(module, path, reason)
    return Reach(bound.value, reached, count, bound.source)


_HINT = (
    "Constants are known for the layers of hs.nn, torch.nn.Sequential, and the PyTorch modules listed on the "
    "documentation page 'Layers with a Lipschitz constant'; a model with a forward of its own is certified "
    "with inputs=, and your own class may derive from hs.nn.LipschitzModule."
)
_HINTS = {
    nn.MultiheadAttention: "Use hs.nn.SoftmaxAttention.from_torch inside hs.nn.SelfAttentionBlock.",
    nn.Conv2d: "For a first convolution without overlap, give inputs=, an example input, or use "
    "hs.nn.Patches before a linear map.",
    nn.DataParallel: "Certify its .module.",
    nn.parallel.DistributedDataParallel: "Certify its .module.",
}


# ---- PyTorch's attention and encoder layers, rewritten as layers of hs.nn


def attention_block(module: nn.Module, length: int) -> SelfAttentionBlock | str:
    """Make a SelfAttentionBlock of an attention of hs.nn or PyTorch, or say why it has no constant."""
    if isinstance(module, LipschitzAttention):
        return SelfAttentionBlock(module)
    assert isinstance(module, nn.MultiheadAttention)
    if kind_of(module).forward is not nn.MultiheadAttention.forward:
        return "has a forward of its own"
    if not module.batch_first:
        return "expects the batch on the second axis: build it with batch_first=True"
    if module.training and module.dropout > 0:
        return "drops attention weights at random in training mode: call model.eval() first"
    weight = module.out_proj.weight
    # The copy draws initial weights, which are then overwritten; the caller's random state stays.
    with torch.random.fork_rng([weight.device] if weight.is_cuda else []):
        return SelfAttentionBlock(SoftmaxAttention.from_torch(module, length=length))


_ACTIVATIONS = {nn.functional.relu: nn.ReLU, nn.functional.gelu: nn.GELU}


def encoder_layer(layer: nn.TransformerEncoderLayer, length: int) -> nn.Sequential | str:
    """Convert an encoder layer to a Sequential of modules with known Lipschitz constants, or say why not.

    Masks and dropout are left out. The modules keep the names that they have in the layer.
    """
    own: nn.Module = layer.self_attn
    known = isinstance(own, LipschitzAttention) or type(own) is nn.MultiheadAttention
    if not known or "forward" in vars(own):
        return (
            "has an attention that is neither an unchanged torch.nn.MultiheadAttention nor a layer of hs.nn, "
            "such as hs.nn.SoftmaxAttention.from_torch makes of one"
        )
    block = attention_block(own, length)
    if isinstance(block, str):
        return block
    activation = layer.activation
    if not isinstance(activation, nn.Module):
        made = _ACTIVATIONS.get(activation)
        if made is None:
            return "has an activation that is neither relu, gelu nor a module"
        activation = made()
    attend = OrderedDict[str, nn.Module](self_attn=block)
    feed = OrderedDict[str, nn.Module](linear1=layer.linear1, activation=activation, linear2=layer.linear2)
    norms = ("norm1", layer.norm1), ("norm2", layer.norm2)
    parts = OrderedDict[str, nn.Module]()
    for name, branch, norm in zip(("attention", "feed_forward"), (attend, feed), norms, strict=True):
        # Pre-norm: each residual branch begins with its norm layer. Post-norm: norm layers follow the sums.
        inner = OrderedDict([norm, *branch.items()]) if layer.norm_first else branch
        parts[name] = Residual(nn.Sequential(inner))
        if not layer.norm_first:
            parts[norm[0]] = norm[1]
    return nn.Sequential(parts)


def _rewritten(layer: nn.Module, length: int, radius: float, path: str, level: int) -> Reach:
    assert isinstance(layer, nn.TransformerEncoderLayer)
    parts = encoder_layer(layer, length)
    if isinstance(parts, str):
        raise refusal(layer, path, parts)

    def own(inside: str) -> str:
        # The residuals exist only in the rewritten sequence, so their names are removed.
        name = inside.removeprefix("attention").removeprefix("feed_forward").removeprefix(".inner.")
        return f"{path}.{name}".strip(".")

    try:
        step = walk(parts, length, radius, "", level)
    except CertificateError as error:
        told = {"kind": error.kind, "reason": error.reason, "remedy": error.remedy}
        raise CertificateError(own(error.path), **told) from error
    return replace(step, rows=tuple(replace(row, path=own(row.path)) for row in step.rows))
