"""One model type from configuration to numbers: what is captured, how, and whether it is the model's own."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import howsmooth as hs
from howsmooth.errors import ArgumentError, HowsmoothError
from howsmooth.jacobian.closed_form import has_closed_form
from howsmooth.scopes import SCOPES
from tests._tiny_models import WithoutDowncast
from tests.architectures.build import SEED, build, class_name, inputs_of
from tests.architectures.inputs import BATCH
from tests.architectures.oracle import NotFoundError, Probe, agreement

#: Largest relative disagreement with finite differences, and with the model's own reverse mode.
LIMITS = {"differences": 1e-6, "autodiff": 1e-9}
_MOST_SITES = 64
#: Tokens of such a size absorb what is added to them: differences and autodiff of the model tell nothing.
_TOO_LARGE = 1e12


@dataclass
class Row:
    """What was found for one model type."""

    type: str
    model: str  # class
    status: str = ""  # measured, refused, no attention, not built, not run, or wrong
    inputs: str = ""
    sites: int = 0  # attention calls
    captured: int = 0
    closed_form: int = 0
    autodiff: int = 0
    path_reasons: list[str] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)
    differences: float | None = None
    autodiff_error: float | None = None
    lipschitz: float | None = None  # of the first site
    bounds: dict[str, int] = field(default_factory=dict)  # on a ball, with how many layers have them
    looseness: float | None = None  # the bound of the first site, divided by its constant at its tokens
    reasons: dict[str, int] = field(default_factory=dict)  # of refusals, with how often
    unseen: list[str] = field(default_factory=list)  # scopes whose values no module of the model holds
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Softmaxes(TorchFunctionMode):
    """Count what could be attention in a pass, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.count += name in ("softmax", "scaled_dot_product_attention", "multi_head_attention_forward")
        return func(*args, **(kwargs or {}))


def _capture(model: nn.Module, inputs: dict[str, Any], layers: list[int] | None, scope: str) -> list[hs.Site]:
    """Capture from the model in float64 throughout, as the oracle runs it."""
    torch.manual_seed(SEED)
    with WithoutDowncast():
        return hs.capture(model, inputs, layers, scope)


def _sites(model: nn.Module, inputs: dict[str, Any], scope: str) -> tuple[list[hs.Site], dict[int, str], int]:
    """Sites of a scope, refusals by layer, and the number of attention calls."""
    try:
        sites = _capture(model, inputs, None, scope)
    except HowsmoothError as whole:
        sites, refused = [], {}
        for layer in range(_MOST_SITES):
            try:
                sites += _capture(model, inputs, [layer], scope)
            except ArgumentError as error:
                if error.argument == "layers":
                    return sites, refused or {0: str(whole)}, layer
                return [], {0: str(error)}, 0
            except HowsmoothError as error:
                refused[layer] = str(error)
                if layer == 0 and str(error) == str(whole) and "layer 0" not in str(error):
                    return [], refused, 0  # of the model as a whole
        return sites, refused, _MOST_SITES
    return sites, {}, len({site.layer for site in sites})


def _short(reason: str) -> str:
    """A refusal without what differs between layers that are alike."""
    reason = re.sub(r"layer \d+ \(([\w.]*), (\w+)\)", r"the layer (\2)", reason)
    return re.sub(r"\.\d+\.", ".*.", reason)[:400]


def measure(model_type: str, *, scopes: tuple[str, ...] = SCOPES, most: int = 12) -> Row:
    """Build, capture and check one type: every site in scope attention, one of each kind in the others."""
    row = Row(model_type, class_name(model_type))
    start = time.perf_counter()
    try:
        model = build(model_type)
    except Exception as error:
        row.status, row.reasons = "not built", {_error(error): 1}
        return row
    try:
        inputs = inputs_of(model_type, model)
    except Exception as error:
        row.status, row.reasons = "not run", {_error(error): 1}
        return row
    row.inputs = _named(inputs)
    with torch.no_grad(), WithoutDowncast(), _Softmaxes() as softmaxes:
        model(**inputs)
    start = time.perf_counter()
    _measure_sites(row, model, inputs, scopes, most)
    alone = _alone(model, inputs) if row.captured < max(row.sites, 1) and softmaxes.count else None
    if alone:
        again = Row(row.type, row.model, inputs=_named(alone))
        _measure_sites(again, model, alone, scopes, most)
        row = again if again.captured > row.captured else row
    row.seconds = round(time.perf_counter() - start, 3)
    if row.wrong:
        row.status = "wrong"
    elif row.captured:
        row.status = "measured"
    else:
        row.status = "refused" if softmaxes.count else "no attention"
    return row


def _named(inputs: dict[str, Any]) -> str:
    return ", ".join(f"{k} {tuple(v.shape)}" if hasattr(v, "shape") else k for k, v in inputs.items())


def _alone(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The first of the sequences, if the model runs on it: some layers cannot be run by sequence."""
    first = {
        k: v[:1] if isinstance(v, Tensor) and v.ndim and len(v) == BATCH else v for k, v in inputs.items()
    }
    if all(first[k] is v for k, v in inputs.items()):
        return None
    try:
        with torch.no_grad(), WithoutDowncast():
            model(**first)
    except Exception:
        return None
    return first


def _error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]


def _measure_sites(
    row: Row, model: nn.Module, inputs: dict[str, Any], scopes: tuple[str, ...], most: int
) -> None:
    found, refused, row.sites = _sites(model, inputs, "attention")
    for reason in refused.values():
        row.reasons[_short(reason)] = row.reasons.get(_short(reason), 0) + 1
    layers = {site.layer: site for site in found}
    row.captured = len(layers)
    if not found:
        return
    for site in layers.values():
        path = getattr(site, "path", "closed form" if has_closed_form(site.map) else "autodiff")
        row.closed_form += path == "closed form"
        row.autodiff += path != "closed form"
        reason = _short(getattr(site, "path_reason", ""))
        if reason and reason not in row.path_reasons:
            row.path_reasons.append(reason)
    probe = Probe(model, inputs)
    checked = [*found]
    modules = dict(model.named_modules())
    kinds: dict[str, hs.Site] = {}
    for site in layers.values():
        kinds.setdefault(f"{type(modules.get(site.name)).__name__} {type(site.map).__name__}", site)
    for scope in scopes:
        if scope == "attention":
            row.scopes.append(scope)
            continue
        for site in kinds.values():
            try:
                got = _capture(model, inputs, [site.layer], scope)
            except HowsmoothError as error:
                reason = f"{scope}: {_short(str(error))}"
                row.reasons[reason] = row.reasons.get(reason, 0) + 1
            else:
                row.scopes += [scope] if scope not in row.scopes else []
                checked += got[-1:] if scope == "head" else got
    for site in checked[:most] if len(checked) > most else checked:
        _check(row, probe, site)
    if not row.captured:
        row.scopes = []
    for site in layers.values():
        bound = _bound_on_a_ball(site)
        proved = bound.name if bound is not None and bound.value < float("inf") else "none"
        row.bounds[proved] = row.bounds.get(proved, 0) + 1
    first = next(iter(layers.values()))
    try:
        estimate = hs.local_lipschitz(first.map, first.x, rtol=1e-2)
    except HowsmoothError as error:
        if row.captured:
            row.wrong.append(f"local_lipschitz at {first.name}: {error}")
    else:
        row.lipschitz = float(estimate.value.max())
        _compare_bound(row, first, estimate)


def _compare_bound(row: Row, site: hs.Site, estimate: hs.LipschitzEstimate) -> None:
    """Compare the bound on the ball with the constant that was measured inside it."""
    if (bound := _bound_on_a_ball(site)) is None:
        return
    if bound.value < float(estimate.lower.max()):
        row.wrong.append(f"{bound.name} at {site.name}: {bound.value} < {float(estimate.lower.max())}")
    if row.lipschitz:
        row.looseness = bound.value / row.lipschitz


def _bound_on_a_ball(site: hs.Site) -> Any:
    """The tightest bound on the ball of the longest token; None if none is known."""
    try:
        return hs.bounds.best(site, length=site.x.shape[-2], radius=float(site.x.norm(dim=-1).max()))
    except HowsmoothError:
        return None


def _check(row: Row, probe: Probe, site: hs.Site) -> None:
    where = f"{site.name}, scope {site.scope}"
    if site.scope != "attention" and float(site.x.abs().max()) > _TOO_LARGE:
        row.unseen += [site.scope] if site.scope not in row.unseen else []
        return
    try:
        found = agreement(probe, site)
    except NotFoundError as error:
        if site.scope == "attention":
            row.wrong.append(f"{where}: {error}")
        elif site.scope not in row.unseen:
            row.unseen.append(site.scope)
        return
    except HowsmoothError as error:  # a site of which the Jacobian is refused is no measured site
        reason = f"{site.scope}: its Jacobian is refused: {_short(str(error))}"
        row.reasons[reason] = row.reasons.get(reason, 0) + 1
        if site.scope == "attention":
            row.captured -= 1
            row.closed_form -= getattr(site, "path", "") == "closed form"
            row.autodiff -= getattr(site, "path", "") == "autodiff"
        return
    except Exception as error:
        row.wrong.append(f"{where}: {_error(error)}")
        return
    row.differences = max(row.differences or 0.0, found.differences)
    row.autodiff_error = max(row.autodiff_error or 0.0, found.autodiff)
    if not found.differences <= LIMITS["differences"]:
        row.wrong.append(f"{where}: {found.differences:.1e} from finite differences")
    if not found.autodiff <= LIMITS["autodiff"]:
        row.wrong.append(f"{where}: {found.autodiff:.1e} from autodiff")
