"""Computation of the Lipschitz constant of a model from the constants of its modules.

Tokens are followed from module to module, because a module's constant may depend on their number and norms.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.utils import parametrize

from howsmooth.bounds import Bound
from howsmooth.errors import ArgumentError, CertificateError, NonFiniteError
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.certificates.torch_module_constants import Reach, rule_of
from howsmooth.nn.checks import check_ball, check_length
from howsmooth.nn.lipschitz_module import LipschitzModule
from howsmooth.nn.upward_rounding import rounded_up, upper_bound

__all__ = ["REWRITINGS", "Composite", "Row", "Walk", "has_rules", "walk"]


@dataclass(frozen=True)
class Row:
    """One row of the table of a certificate: the Lipschitz constant of one module.

    Attributes
    ----------
    path, kind
        The module's name in ``named_modules``, and the name of its class; of an operation, its name in the
        recorded graph and that of its function.
    level
        0 for the factors of the model's constant. Rows inside a branch have one level more than the row of
        the residual or sum that the branch ends in, which follows them.
    constant
        Upper bound on the module's Lipschitz constant, on the tokens that can reach it.
    radius_in, radius_out, length_in, length_out
        Upper bounds on the norms of its input and output tokens, and the numbers of these tokens.
    source
        The source of the constant.

    """

    path: str
    kind: str
    level: int
    constant: float
    radius_in: float
    radius_out: float
    length_in: int
    length_out: int
    source: str


@dataclass(frozen=True)
class Walk:
    """The Lipschitz constant of a module, together with a table row for each module inside it.

    Attributes
    ----------
    rows
        One row for each module, in the order in which tokens pass through them.
    constant
        Upper bound on the Lipschitz constant: the product of the constants of all rows at the walk's level.
    length, radius
        Number of output tokens, and an upper bound on their norms.
    """

    rows: tuple[Row, ...]
    constant: float
    length: int
    radius: float


Rewriting = Callable[[nn.Module, int], nn.Sequential | str]
"""A function of a module and the number of its tokens: the same map as a sequence, or why there is none."""

REWRITINGS: dict[type[nn.Module], Rewriting] = {}
"""Classes of PyTorch whose modules are followed through the sequences that these functions return."""


class Composite(LipschitzModule):
    """Base class of modules whose Lipschitz constant is computed from the Lipschitz constants of their
    children.
    """

    @abstractmethod
    def rows(self, length: int, radius: float, path: str, level: int) -> tuple[Row, ...]:
        """Return the rows of the certificate for this module: one row for each module inside it, then its own
        row.
        """

    def lipschitz_bound(self, length: int, radius: float) -> Bound:
        """Return the Lipschitz bound that follows from the bounds of the children of this module."""
        row = self._row(length, radius)
        return upper_bound(row.kind, row.source, row.constant, row.radius_in)

    def output_radius(self, length: int, radius: float) -> float:
        """Return an upper bound on the norms of output tokens for input tokens of norm at most ``radius``."""
        return self._row(length, radius).radius_out

    def _row(self, length: int, radius: float) -> Row:
        return self.rows(check_length(length), check_ball(radius), "", 0)[-1]


def walk(module: nn.Module, length: int, radius: float, path: str = "", level: int = 0) -> Walk:
    """Compute the Lipschitz constant of a module, with a table row for each module inside it.

    The module gets ``length`` tokens of norm at most ``radius``.

    Raises
    ------
    CertificateError
        If no constant is known for a module. The message names the module.
    NonFiniteError
        If a weight is NaN or infinite.

    """
    if path and isinstance(module, LipschitzAttention):
        remedy = "Put it into hs.nn.SelfAttentionBlock, which returns the tokens alone."
        raise refusal(module, path, "returns a pair, tokens and attention weights", remedy)
    if "forward" in vars(module):
        raise refusal(module, path, "has a forward that was replaced after it was built")
    if isinstance(module, nn.Sequential) and kind_of(module).forward is nn.Sequential.forward:
        return _through(module._modules, length, radius, path, level)
    if kind_of(module) is nn.TransformerEncoder:
        assert isinstance(module, nn.TransformerEncoder)
        layers = {f"layers.{i}": layer for i, layer in enumerate(module.layers)}
        last = {} if module.norm is None else {"norm": module.norm}
        return _through(layers | last, length, radius, path, level)
    if (rewrite := REWRITINGS.get(kind_of(module))) is not None:
        return _rewritten(rewrite(module, length), module, length, radius, path, level)
    if isinstance(module, Composite):
        rows = module.rows(length, radius, path, level)
    elif isinstance(module, LipschitzModule):
        rows = (_layer(module, length, radius, path, level),)
    else:
        rows = (_of_torch(module, length, radius, path, level),)
    return Walk(rows, rows[-1].constant, rows[-1].length_out, rows[-1].radius_out)


def has_rules(module: nn.Module) -> bool:
    """Return whether a module, or each module in a Sequential, has a rule for its Lipschitz constant.

    There is no rule for other modules, such as models with a ``forward`` of their own.
    """
    kind = kind_of(module)
    if isinstance(module, nn.Sequential) and kind.forward is nn.Sequential.forward:
        return all(map(has_rules, module))
    known = kind is nn.TransformerEncoder or kind in REWRITINGS or isinstance(module, LipschitzModule)
    return known or rule_of(kind) is not None


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before parametrizations were registered.

    PyTorch then replaces the class of the module by a subclass.
    """
    kind: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return kind


def refusal(module: nn.Module, path: str, reason: str, remedy: str = "") -> CertificateError:
    """Return the exception that says why no Lipschitz constant of a module is known."""
    return CertificateError(path, kind=kind_of(module).__name__, reason=reason, remedy=remedy)


def _through(
    modules: Mapping[str, nn.Module | None], length: int, radius: float, path: str, level: int
) -> Walk:
    rows: tuple[Row, ...] = ()
    constants = []
    for name, module in modules.items():
        own = f"{path}.{name}" if path else name
        if module is None:
            remedy = "Delete it, or put torch.nn.Identity() in its place."
            raise CertificateError(
                own, kind="None", reason="is no module, and cannot be called", remedy=remedy
            )
        step = walk(module, length, radius, own, level)
        rows += step.rows
        constants.append(step.constant)
        # The outputs of one module are the inputs of the next.
        length, radius = step.length, check_ball(step.radius)
    # The product is zero if one constant is zero, even if another one is infinite.
    constant = 0.0 if 0.0 in constants else rounded_up(math.prod(constants, start=1.0))
    return Walk(rows, constant, length, radius)


def _rewritten(
    parts: nn.Sequential | str, module: nn.Module, length: int, radius: float, path: str, level: int
) -> Walk:
    if isinstance(parts, str):
        raise refusal(module, path, parts)

    def own(inside: str) -> str:
        # Modules keep their names in the layer. The residuals exist only in the rewritten sequence, so their
        # names are removed.
        name = inside.removeprefix("attention").removeprefix("feed_forward").removeprefix(".inner.")
        return f"{path}.{name}".strip(".")

    try:
        step = walk(parts, length, radius, "", level)
    except CertificateError as error:
        raise CertificateError(
            own(error.path), kind=error.kind, reason=error.reason, remedy=error.remedy
        ) from error
    rows = tuple(replace(row, path=own(row.path)) for row in step.rows)
    return replace(step, rows=rows)


def _layer(module: LipschitzModule, length: int, radius: float, path: str, level: int) -> Row:
    try:
        bound = module.lipschitz_bound(length, radius)
        reach = Reach(
            bound.value, module.output_length(length), module.output_radius(length, radius), bound.source
        )
    except NonFiniteError:
        raise
    except ArgumentError as error:
        reason = f"has no constant here: {error.argument}: expected {error.expected}, got {error.got}"
        raise refusal(module, path, reason, error.remedy) from error
    if bound.side != "upper" or not bound.holds:
        failed = "; ".join(h.statement for h in bound.hypotheses if not h.holds)
        raise refusal(
            module, path, f"has no constant here: its bound needs {failed or 'to be an upper bound'}"
        )
    return _row(module, reach, length, radius, path, level)


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


def _of_torch(module: nn.Module, length: int, radius: float, path: str, level: int) -> Row:
    rule = rule_of(kind_of(module))
    if rule is None:
        hint = next((words for kind, words in _HINTS.items() if isinstance(module, kind)), _HINT)
        raise refusal(module, path, "is of a kind without a rule", hint)
    reach = rule(module, length, radius)
    if isinstance(reach, str):
        raise refusal(module, path, reach)
    return _row(module, reach, length, radius, path, level)


def _row(module: nn.Module, reach: Reach, length: int, radius: float, path: str, level: int) -> Row:
    if math.isnan(reach.constant) or math.isnan(reach.radius):
        raise refusal(module, path, "gave a constant or a radius that is not a number")
    kind = kind_of(module).__name__
    return Row(path, kind, level, reach.constant, radius, reach.radius, length, reach.length, reach.source)
