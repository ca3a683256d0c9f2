"""The penalty JaSMin (Yudin et al. 2025), for comparison with the penalty on the Jacobian.

It depends on attention probabilities alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from howsmooth.errors import ArgumentError, check_whole
from howsmooth.jacobian.autodiff import one_backend
from howsmooth.nn.checks import check
from howsmooth.nn.penalty.call_recorder import LayerCall, Penalty, drawing_nothing, replica

__all__ = ["JasminPenalty", "jasmin"]


def _jacobian_bound(probabilities: Float[Tensor, "*rows keys"], k: int = 1) -> Float[Tensor, "*rows"]:
    """Return g_k(p) = p₍ₖ₎ (1 − p₍ₖ₎ + p₍ₖ₊₁₎) for each row p. Here p₍ₖ₎ is the k-th largest entry, or 0.

    g_1 bounds the norm ‖diag(p) − p pᵀ‖ of the softmax's Jacobian: :func:`howsmooth.bounds.yudin_theorem_3`.
    """
    keys = probabilities.shape[-1]
    largest = nn.functional.pad(
        probabilities.topk(min(k + 1, keys), dim=-1).values, (0, max(0, k + 1 - keys))
    )
    first, second = largest[..., k - 1], largest[..., k]
    return first * (1 - first + second)


def jasmin(probabilities: Float[Tensor, "*lead queries keys"], k: int = 0) -> Float[Tensor, ""]:
    """Return the JaSMin penalty of attention probabilities, which limits the Jacobian of the softmax.

    For k = 0 it is the mean over sequences and heads of max_i log g_1(P_i). For k >= 2 it is the mean of
    max_i log(g_1(P_i) / g_k(P_i)), which also keeps rows from becoming uniform. It ignores values, keys and
    queries, so it is not a bound on a local Lipschitz constant.

    Each row of the ``probabilities`` sums to one; masked entries are zero. Rows that see a single key, or
    fewer than k keys, have g = 0 and are left out. The maximum over rows and the mean over heads follow a
    public implementation of equations (8) and (9). ArgumentError is raised for other numbers, and other k.

    See Yudin, Gaponov, Kudriashov, Rakhuba, *Pay Attention to Attention Distribution: A New Local Lipschitz
    Bound for Transformers*, 2025 (arXiv 2507.07814).
    """
    _check_k(k)
    p = probabilities
    if not isinstance(p, Tensor) or not p.is_floating_point() or p.ndim < 1 or p.numel() == 0:
        got = f"{p.dtype} of shape {tuple(p.shape)}" if isinstance(p, Tensor) else type(p).__name__
        raise ArgumentError("probabilities", expected="probabilities (..., queries, keys)", got=got)
    remedy, good = "Give the output of a softmax.", bool(((p >= 0) & (p <= 1 + 1e-3)).all())
    check(good, "probabilities", "numbers between 0 and 1", "other numbers", remedy)
    # Rows with smaller g are left out: the product in g has no accurate digits there.
    least = torch.finfo(probabilities.dtype).tiny ** 0.5
    g = _jacobian_bound(probabilities)
    counts = g > least
    log = g.clamp(min=least).log()
    if k:
        other = _jacobian_bound(probabilities, k)
        counts = counts & (other > least)
        log = log - other.clamp(min=least).log()
    rows = torch.where(counts, log, -torch.inf)
    largest = rows.amax(dim=-1)
    # Heads whose rows are all left out do not count in the mean.
    has = largest.isfinite()
    return torch.where(has, largest, 0.0).sum() / has.sum().clamp(min=1)


class JasminPenalty(Penalty):
    """The JaSMin penalty of every attention layer at the current batch, used like :class:`SpectralPenalty`.

    As there, each layer is run a second time in evaluation mode, without changing the model. Its softmax
    probabilities are intercepted while it runs; ArgumentError is raised if they cannot be read. ``k`` is as
    for :func:`jasmin`.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str] | None = None, *, k: int = 0) -> None:
        _check_k(k)
        super().__init__(model, layers, projected=False, settings=f"attention probabilities, k={k}")
        self._k = k

    def __call__(self) -> Tensor:
        """Return the mean of the penalties of all layers, a scalar to add to the loss."""
        return torch.stack(list(self.terms().values())).mean()

    def terms(self) -> dict[str, Tensor]:
        """Return the JaSMin penalty of each layer by name."""
        terms: dict[str, Tensor] = {}
        for name, call in self._named_calls().items():
            found = [jasmin(p, self._k) for p in _probabilities(name, call)]
            terms[name] = torch.stack(found).mean()
        first = next(iter(terms.values()))
        return {name: term.to(first) for name, term in terms.items()}


def _probabilities(name: str, call: LayerCall) -> list[Tensor]:
    # The imports take seconds, since they bring transformers.
    from howsmooth.models.tracing.softmax_call import SoftmaxCall, plain_attention
    from howsmooth.models.tracing.softmax_tracer import SoftmaxTracer

    call.check_unchanged()
    cores: list[SoftmaxCall] = []
    x = call.members
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False), one_backend():  # noqa: SIM117
        with drawing_nothing(name, x.device), SoftmaxTracer(lambda core: cores.append(core), check=False):
            call.run(replica(call.layer, call.name), x)
    got = f"{name}, which has no softmax attention"
    check(bool(cores), "layers", "layers with softmax attention", got)
    found: list[Tensor] = []
    for core in cores:
        if core.probabilities is not None:
            found.append(core.probabilities)
            continue
        reason = core.obstacle or "its attention sinks take a part of each row"
        read = core.query is not None and core.key is not None and core.sinks is None
        check(read, "layers", "layers whose probabilities can be read", f"{name}: {reason}")
        # The probabilities are the output for values that are unit vectors.
        _, key, _ = core.operands
        *lead, n, _ = key.shape
        units = torch.eye(n, dtype=key.dtype, device=key.device).expand(*lead, n, n)
        # A query that sees no key has NaN probabilities, which become zeros and do not count.
        found.append(plain_attention(replace(core, value=units)).nan_to_num(nan=0.0))
    return found


def _check_k(k: int) -> None:
    if check_whole("k", k, least=0) == 1:
        raise ArgumentError("k", expected="0, or an integer >= 2", got="1", remedy="g_1 / g_1 is always 1.")
