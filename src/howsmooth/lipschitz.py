"""The local Lipschitz constant ‖D_X f‖₂ of a map at given tokens or at a measure, with an interval."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from howsmooth.accuracy import check_accuracy
from howsmooth.attention import AbstractMeasure, TokenMap, Weighting
from howsmooth.attention.map import check_measure, check_tokens
from howsmooth.batching import batches, beside_the_basis, fewest_vectors, is_streamed, room_for_basis
from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.estimate import LipschitzEstimate, LipschitzEstimates, Method
from howsmooth.jacobian import (
    AutodiffJacobian,
    allowance_for_rounding,
    closed_form_jacobian,
    closed_form_jacobians,
    energy_products_together,
    filled,
    has_closed_form,
    in_double,
    joined,
    moved_by_rounding,
    weighted_autodiff_jacobian,
)
from howsmooth.memory import memory_budget
from howsmooth.seeds import torch_seed
from howsmooth.spectral import LeadingTriplet, LinearOperator, Scaled, golub_kahan, lanczos, lanczos_together
from howsmooth.spectral.operator import length_rounding

__all__ = ["LipschitzEstimate", "LipschitzEstimates", "local_lipschitz"]

# Of the relative width asked for, what rounding of each side may take where that is cheaper.
_ROUNDING_SHARE = 1 / 4
# Entries of a random start from which members are drawn by several threads.
_WORTH_A_THREAD = 1 << 14


@overload
def local_lipschitz(
    f: Callable[[Tensor], Tensor],
    x: Tensor | AbstractMeasure,
    *,
    rtol: float = ...,
    confidence: float = ...,
    max_iterations: int = ...,
    seed: int | Sequence[int] = ...,
    method: str = ...,
    memory: int | None = ...,
    batch_dims: int | None = ...,
) -> LipschitzEstimate: ...


@overload
def local_lipschitz(
    f: Callable[[Tensor], Tensor],
    x: list[Tensor] | tuple[Tensor, ...],
    *,
    rtol: float = ...,
    confidence: float = ...,
    max_iterations: int = ...,
    seed: int | Sequence[int] = ...,
    method: str = ...,
    memory: int | None = ...,
    batch_dims: int | None = ...,
) -> LipschitzEstimates: ...


def local_lipschitz(
    f: Any,
    x: object,
    *,
    rtol: float = 1e-4,
    confidence: float = 0.999,
    max_iterations: int = 200,
    seed: int | Sequence[int] = 0,
    method: str = "auto",
    memory: int | None = None,
    batch_dims: int | None = None,
) -> LipschitzEstimate | LipschitzEstimates:
    """Measure the local Lipschitz constant ‖D_X f‖₂ of ``f`` at each member of ``x``.

    Lanczos' process on JᵀJ, J the Jacobian, from a random start (Golub–Kahan bidiagonalisation of J where it
    comes from autodiff or stands at a measure); members run together, and each stops when its own interval is
    narrower than ``rtol``.

    At a discrete measure Σ_i a_i δ_{x_i} it is the weighted norm sup |J E|_a / |E|_a of the mean-field map,
    |E|_a² = Σ_i a_i |e_i|² (Lemma C.5): how far the image moves in W₂ where the atoms move whole. Where they
    may split, see :func:`howsmooth.measures.wasserstein_lipschitz`.

    Parameters
    ----------
    f
        A map of this library (closed form), or any differentiable PyTorch map of tokens (..., n, d) to a
        tensor with the same leading axes (autodiff). Members of the batch must be independent.
    x
        Tokens (..., n, d), float32 or float64, batched over the leading axes (see ``batch_dims`` for vectors
        and images); or a list or tuple of tokens
        (n_i, d), n_i of their own, which share matrix products and, where they are short, operations; or a
        measure with atoms, at which a map of this library is measured, in float64.
    rtol
        Relative width of the interval at which a member has converged.
    confidence
        Probability, over the random start, with which each interval holds.
    max_iterations
        Golub–Kahan steps at most.
    seed
        Seed of the random start, of which 64 bits count: one for all members, or one a member. A member's
        result depends on its own input and seed, not on the batch it stands in; with one seed, member i
        uses its own stream i.
    method
        "closed form", "autodiff", or "auto": closed form where there is one, else autodiff.
    memory
        Bytes that may be used; by default half of what is free. Where attention probabilities, n² a head, do
        not fit, they are formed anew in each product, in memory O(n d). The numbers are the same to rounding.
        It limits the closed form alone.
    batch_dims
        Number of leading axes of ``x`` that count members; by default all but the last two, which are
        tokens (n, d). With 1, images (batch, channels, height, width) or vectors (batch, d) are measured one
        by one by any ``f`` that takes such batches; with 0, ``x`` is one member. Of an ``f`` that is no map
        of this library and acts on each row of a matrix ``x`` by itself it cannot be told whether the rows
        are vectors or the tokens of one sequence, whose constant is the largest of theirs: it must be said.

    Returns
    -------
    LipschitzEstimate or LipschitzEstimates
        With value, interval, status and directions; the latter for a list or tuple, of shape (len(x),).

    Raises
    ------
    ArgumentError
        If an argument does not fit; the message names it.
    NonFiniteError
        If ``x``, f(x) or a product is not finite, or the constant itself is beyond float64's range.
    DerivativeError
        If ``f`` cannot be differentiated, or its two derivatives disagree.

    References
    ----------
    Definition of the local constant: Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024,
    Section 3; at a measure: Definition C.4 and Lemma C.5. Interval: docs/theory/spectral-norm.md and
    docs/theory/rounding.md.

    """
    if batch_dims is not None:
        _check_batch_dims(batch_dims, f, x)
    if isinstance(x, AbstractMeasure):
        return _at_measure(f, x, rtol, confidence, max_iterations, seed, method)
    if isinstance(x, list | tuple):
        return _at_sequences(f, x, rtol, confidence, max_iterations, seed, method, memory)
    _check_arguments(f, x, rtol, confidence, max_iterations, batch_dims)
    assert isinstance(x, Tensor)
    chosen = _chosen_method(f, method)
    if isinstance(f, TokenMap):
        check_tokens(x, f)
    leading = x.ndim - 2 if batch_dims is None else batch_dims
    lead, x = x.shape[:leading], x.detach()
    flat = x.reshape(-1, *x.shape[leading:])
    seeds = _member_seeds(seed, len(flat))
    run = _Run(rtol, confidence, max_iterations, seeds, [flat.shape[1]] * len(flat))
    if chosen == "autodiff":
        operator = AutodiffJacobian(f, x, leading)
        if batch_dims is None and x.ndim == 2 and not isinstance(f, TokenMap) and operator.keeps_rows_apart():
            raise ArgumentError(
                "batch_dims",
                expected="0 or 1, as f acts on each row of x by itself",
                got="None",
                remedy=f"Say batch_dims=1 for {len(x)} vectors, each with a constant of its own, or "
                f"batch_dims=0 for one sequence of {len(x)} tokens.",
            )
        parts = [run.golub_kahan(operator, range(len(flat)))]
    else:
        assert isinstance(f, TokenMap)
        budget = memory_budget(memory, x.device)
        # Of one length, in the order given.
        parts = [found for _, found in _closed_forms(in_double(f), flat, run, budget)]
    joined = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in LeadingTriplet.__annotations__
    }
    shaped = {name: tensor.reshape((*lead, *tensor.shape[1:])) for name, tensor in joined.items()}
    return LipschitzEstimate(
        value=shaped["sigma"],
        lower=shaped["lower"],
        upper=shaped["upper"],
        confidence=confidence,
        converged=shaped["converged"],
        iterations=shaped["steps"],
        input_direction=shaped["right"],
        output_direction=shaped["left"],
        method=chosen,
        scope=_scope(f),
        rtol=rtol,
        seed=seed if isinstance(seed, int) else tuple(seed),
    )


def _at_sequences(
    f: Callable[[Tensor], Tensor],
    xs: Sequence[object],
    rtol: float,
    confidence: float,
    max_iterations: int,
    seed: int | Sequence[int],
    method: str,
    memory: int | None,
) -> LipschitzEstimates:
    """Measure at several sequences (n_i, d)."""
    members = _checked_sequences(f, xs, rtol, confidence, max_iterations)
    chosen = _chosen_method(f, method)
    lengths = [x.shape[0] for x in members]
    run = _Run(rtol, confidence, max_iterations, _member_seeds(seed, len(members)), lengths)
    if chosen == "autodiff":
        parts: list[_Part] = [
            ([i], run.golub_kahan(AutodiffJacobian(f, x), [i])) for i, x in enumerate(members)
        ]
    else:
        assert isinstance(f, TokenMap)
        parts = _closed_forms(in_double(f), members, run, memory_budget(memory, members[0].device))
    rows = {i: (found, row) for numbers, found in parts for row, i in enumerate(numbers)}

    def of_each(name: str) -> list[Tensor]:
        return [getattr(found, name)[row] for found, row in (rows[i] for i in range(len(members)))]

    def directions(name: str) -> tuple[Tensor, ...]:
        return tuple(t[:n] for t, n in zip(of_each(name), lengths, strict=True))

    return LipschitzEstimates(
        value=torch.stack(of_each("sigma")),
        lower=torch.stack(of_each("lower")),
        upper=torch.stack(of_each("upper")),
        confidence=confidence,
        converged=torch.stack(of_each("converged")),
        iterations=torch.stack(of_each("steps")),
        input_direction=directions("right"),
        output_direction=directions("left"),
        method=chosen,
        scope=_scope(f),
        rtol=rtol,
        seed=seed if isinstance(seed, int) else tuple(seed),
    )


def _at_measure(
    f: Callable[[Tensor], Tensor],
    measure: AbstractMeasure,
    rtol: float,
    confidence: float,
    max_iterations: int,
    seed: int | Sequence[int],
    method: str,
) -> LipschitzEstimate:
    """Measure the weighted norm at a discrete measure, in float64 whatever the dtype of its atoms."""
    if not isinstance(f, TokenMap):
        raise ArgumentError(
            "f",
            expected="a map of howsmooth, which acts on measures",
            got=type(f).__name__,
            remedy="Of other maps the constant is measured at tokens.",
        )
    check_measure(measure, f)
    points, weighting = measure.weighted_tokens()
    x, weighting = points.detach().double(), Weighting(weighting.log_weights.detach(), weighting.positions)
    _check_arguments(f, x, rtol, confidence, max_iterations)
    chosen = _chosen_method(f, method)
    operator: LinearOperator
    if chosen == "closed form":
        operator = closed_form_jacobian(f, x[None], weighting=weighting)
    else:
        operator = weighted_autodiff_jacobian(f.to(dtype=torch.float64), x, weighting)
    start = _starts(operator, _member_seeds(seed, 1), [x.shape[0]])
    # The constant may be e^350, whose square overflows: near one, it does not.
    image = operator.product(start)
    size = float(image.abs().max())
    factor = 2.0 ** -max(-1000, round(math.log2(size))) if 0 < size < math.inf else 1.0
    if chosen == "closed form":
        # Nothing is proved of rounding at measures; where terms cancel, atoms moved by rounding show it.
        moved = (closed_form_jacobian(f, y[None], weighting=weighting) for y in moved_by_rounding(x))
        seen = allowance_for_rounding((factor * at.product(start) for at in moved), factor * image)
        operator.rounding = torch.maximum(operator.rounding, seen)
    found = golub_kahan(
        Scaled(operator, factor), start, rtol=rtol, confidence=confidence, max_iterations=max_iterations
    )
    if not math.isfinite(float(found.sigma) / factor):
        log = math.log(float(found.sigma)) - math.log(factor)
        raise NonFiniteError("f", expected="a constant in the range of float64", got=f"exp({log:.6g})")
    return LipschitzEstimate(
        value=(found.sigma / factor)[0],
        lower=(found.lower / factor)[0],
        upper=(found.upper / factor)[0],
        confidence=confidence,
        converged=found.converged[0],
        iterations=found.steps[0],
        input_direction=found.right[0],
        output_direction=found.left[0],
        method=chosen,
        scope=f"{f.describe()}, at a measure of {x.shape[0]} atoms",
        rtol=rtol,
        seed=seed if isinstance(seed, int) else tuple(seed),
    )


@dataclass(frozen=True)
class _Run:
    """What is asked of the solvers, and of each member the seed of its start and its length."""

    rtol: float
    confidence: float
    max_iterations: int
    seeds: Sequence[int]
    lengths: Sequence[int]

    def golub_kahan(self, operator: LinearOperator, members: Sequence[int]) -> LeadingTriplet:
        """Solve for an operator of these members, with both Krylov bases."""
        return golub_kahan(
            operator,
            self._starts(operator, members),
            rtol=self.rtol,
            confidence=self.confidence,
            max_iterations=self.max_iterations,
        )

    def lanczos(self, operator: LinearOperator, members: Sequence[int], basis_bytes: int) -> LeadingTriplet:
        """Solve with one basis, in the memory that is left for it."""
        return lanczos(
            operator,
            self._starts(operator, members),
            rtol=self.rtol,
            confidence=self.confidence,
            max_iterations=self.max_iterations,
            basis_bytes=basis_bytes,
        )

    def together(
        self, operators: Sequence[LinearOperator], members: Sequence[Sequence[int]]
    ) -> list[LeadingTriplet]:
        """Solve for Jacobians of one map at several lengths, which share products.

        Members that are shorter than their operator fill up the rest with zeros.
        """
        return lanczos_together(
            operators,
            [self._starts(*parts) for parts in zip(operators, members, strict=True)],
            rtol=self.rtol,
            confidence=self.confidence,
            max_iterations=self.max_iterations,
            products=energy_products_together,
            sizes=[
                [self.lengths[i] * operator.in_shape[-1] for i in numbers]
                for operator, numbers in zip(operators, members, strict=True)
            ],
        )

    def _starts(self, operator: LinearOperator, members: Sequence[int]) -> Tensor:
        return _starts(operator, [self.seeds[i] for i in members], [self.lengths[i] for i in members])


_Part = tuple[Sequence[int], LeadingTriplet]
"""Numbers of members, and what was found at them."""


def _closed_forms(
    double: TokenMap, members: Sequence[Tensor] | Tensor, run: _Run, budget: int
) -> list[_Part]:
    """Measure at members (n_i, d): together where they fit in memory, each by itself that does not."""
    parts: list[_Part] = []
    for lots in batches(double, members, budget):
        first = lots[0][0]
        if is_streamed(double, members[first][None], budget):
            parts.append(([first], _streamed(double, members[first][None], [first], run, budget)))
        else:
            parts += zip(lots, _cached(double, members, lots, run), strict=True)
    return parts


def _cached(
    double: TokenMap, members: Sequence[Tensor] | Tensor, lots: Sequence[Sequence[int]], run: _Run
) -> list[LeadingTriplet]:
    """Solve with products in the dtype of the members (n_i, d); for float32, with a verdict in float64.

    Float64 products along the float32 directions give the value, and show what rounding did: where the
    factors of the Jacobian cancel, float32 loses digits that no constant times epsilon foresees. Members
    that this leaves too wide, or that broke down at float32's rounding level (few distinct singular
    values), are measured again with float64 products.
    """
    dtype, exact = members[0].dtype, torch.float64
    jacobians = _jacobians(double, members, lots, (dtype, exact) if dtype != exact else (exact,))
    found = run.together([at[dtype] for at in jacobians], lots)
    if dtype == exact:
        return found
    return [
        _verdict(at[dtype], at[exact], of_lot, numbers, run)
        for at, of_lot, numbers in zip(jacobians, found, lots, strict=True)
    ]


def _jacobians(
    double: TokenMap,
    members: Sequence[Tensor] | Tensor,
    lots: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
) -> list[dict[torch.dtype, LinearOperator]]:
    """Linearise each length at once, and join those of a lot: its members go from short to long."""
    groups = [
        [list(group) for _, group in itertools.groupby(lot, key=lambda i: members[i].shape[0])]
        for lot in lots
    ]
    xs = [torch.stack([members[i] for i in group]).double() for lot in groups for group in lot]
    found = iter(closed_form_jacobians(double, xs, dtypes))
    of_lots = [list(itertools.islice(found, len(lot))) for lot in groups]
    return [{dtype: joined([at[dtype] for at in lot]) for dtype in dtypes} for lot in of_lots]


def _verdict(
    operator: LinearOperator,
    exact: LinearOperator,
    found: LeadingTriplet,
    members: Sequence[int],
    run: _Run,
) -> LeadingTriplet:
    """Return what float64 says about the triplet that ``operator``, in float32, has given."""
    right = _unit(found.right.double())
    image, gram = exact.gram_product(right)
    sigma = _norms(image)

    # Float32 has found σ̂² v for JᵀJ v, up to the residual of the Ritz vector, mostly far below the interval.
    found_gram = found.sigma.to(right).square().view(-1, 1, 1) * right
    defect = _defect(found_gram, gram, sigma)
    judged = _judged(found, sigma, defect, exact, run.rtol)
    if not bool(judged.converged.all()):
        _, rounded = operator.energy_product(right.to(operator.dtype))
        defect = torch.where(judged.converged, defect, _defect(rounded, gram, sigma))
        judged = _judged(found, sigma, defect, exact, run.rtol)
    stuck = torch.nonzero(~judged.converged & (found.converged | found.broke_down)).flatten()
    if not len(stuck):
        return judged
    (again,) = run.together([exact.select(stuck.to(exact.device))], [[members[i] for i in stuck.tolist()]])
    for name in LeadingTriplet.__annotations__:
        kept = getattr(judged, name)
        kept[stuck.to(kept.device)] = getattr(again, name).to(kept.dtype)
    return judged


def _streamed(double: TokenMap, x: Tensor, members: Sequence[int], run: _Run, budget: int) -> LeadingTriplet:
    """Do the same for one member without its probabilities: no n × n matrix, JᵀJ in one pass.

    Of the operators in float32 and in float64 one is alive at a time.
    """

    def operator(dtype: torch.dtype, allowance: float | None = None) -> LinearOperator:
        return closed_form_jacobian(double, x.double(), dtype=dtype, streamed=True, allowance=allowance)

    basis_bytes = room_for_basis(double, x, budget)
    if x.dtype == torch.float64:
        return run.lanczos(operator(x.dtype), members, basis_bytes)
    single = operator(x.dtype, _ROUNDING_SHARE * run.rtol)
    found = run.lanczos(single, members, basis_bytes)
    right = _unit(found.right.double())
    _, rounded = single.gram_product(right.to(x.dtype))
    del single
    exact = operator(torch.float64)
    image, gram = exact.gram_product(right)
    sigma = _norms(image)
    judged = _judged(found, sigma, _defect(rounded, gram, sigma), exact, run.rtol)
    del image, gram, rounded, right
    stuck = ~judged.converged & (found.converged | found.broke_down)
    room = budget - beside_the_basis(double, x.double())
    if not bool(stuck.any()) or room < fewest_vectors(x):
        return judged
    again = run.lanczos(exact, members, room)
    return replace(again, right=again.right.to(x.dtype), left=again.left.to(x.dtype))


def _judged(
    found: LeadingTriplet, sigma: Tensor, defect: Tensor, exact: LinearOperator, rtol: float
) -> LeadingTriplet:
    """Return float32's triplet with the value σ = |J v| of float64, and what rounding may have done.

    The lower limit is proved where the float64 products are. The upper one is an estimate to first order:
    rounding of the float32 run moves σ by at most the defect, twice which is allowed for, beside the width of
    the float32 interval, what the float64 value moved, and what rounding does to the defect itself.
    """
    error = exact.rounding * sigma if exact.proved is None else exact.proved.total
    upper = sigma + (found.upper - found.sigma) + (sigma - found.sigma).abs() + 2 * defect + 6 * error
    lower = (sigma - error).clamp_min(0.0) * (1 - length_rounding(exact))
    return replace(found, sigma=sigma, lower=lower, upper=upper, converged=upper - lower <= rtol * sigma)


def _defect(rounded: Tensor, exact: Tensor, sigma: Tensor) -> Tensor:
    """Return ‖Δv‖ / σ from both JᵀJ v: a perturbation Δ of JᵀJ moves σ by vᵀΔv / 2σ to first order."""
    return _norms(rounded.double() - exact) / sigma.clamp_min(torch.finfo(torch.float64).tiny)


def _norms(t: Tensor) -> Tensor:
    """Frobenius norm of each member, on the CPU."""
    norms: Tensor = torch.linalg.vector_norm(t.flatten(1), dim=1).cpu()
    return norms


def _unit(t: Tensor) -> Tensor:
    """Return each member divided by its norm; zero stays zero."""
    length = t.flatten(1).norm(dim=1).view(-1, 1, 1)
    return torch.where(length > 0, t / length, t)


def _check_arguments(
    f: object,
    x: object,
    rtol: float,
    confidence: float,
    max_iterations: int,
    batch_dims: int | None = None,
) -> None:
    if not callable(f):
        raise ArgumentError(
            "f", expected="a map of tokens, callable", got=type(f).__name__, remedy=_of_site(f)
        )
    if not isinstance(x, Tensor):
        raise ArgumentError(
            "x",
            expected="a tensor (..., n, d)",
            got=type(x).__name__,
            remedy=_of_site(x) or "Use torch.as_tensor.",
        )
    if x.dtype not in (torch.float32, torch.float64):
        remedy = "Convert map and tokens, for instance with .float(): half precision carries no interval."
        if not x.is_floating_point():
            remedy = (
                "Token ids have no derivative: capture the model with hs.capture(model, ids) and measure "
                "site.map at site.x, or measure a function of its embeddings. Other numbers are converted "
                "with .float()."
            )
        raise ArgumentError("x", expected="float32 or float64", got=str(x.dtype), remedy=remedy)
    if x.ndim < (2 if batch_dims is None else batch_dims + 1) or x.numel() == 0:
        raise ArgumentError(
            "x",
            expected="tokens (..., n, d), none of the sizes zero",
            got=f"shape {tuple(x.shape)}",
            remedy="For one token write x[None, :]; for one vector say batch_dims=0."
            if batch_dims is None
            else f"With batch_dims={batch_dims} at least one more axis is that of a member.",
        )
    if not bool(torch.isfinite(x).all()):
        raise NonFiniteError("x", expected="finite numbers", got="NaN or infinity")
    check_accuracy(rtol, confidence, str(x.dtype).removeprefix("torch."))
    if isinstance(max_iterations, bool) or not isinstance(max_iterations, int) or max_iterations < 1:
        raise ArgumentError("max_iterations", expected="an integer >= 1", got=repr(max_iterations))


def _check_batch_dims(batch_dims: object, f: object, x: object) -> None:
    if isinstance(batch_dims, bool) or not isinstance(batch_dims, int) or batch_dims < 0:
        raise ArgumentError("batch_dims", expected="a whole number >= 0, or None", got=repr(batch_dims))
    if not isinstance(x, Tensor):
        raise ArgumentError(
            "batch_dims",
            expected="None where x is a list or a measure, which says itself what its members are",
            got=str(batch_dims),
        )
    if isinstance(f, TokenMap) and x.ndim >= 2 and batch_dims != x.ndim - 2:
        raise ArgumentError(
            "batch_dims",
            expected=f"None or {x.ndim - 2}: a map of howsmooth takes tokens (n, d), the last two axes",
            got=str(batch_dims),
        )


def _of_site(given: object) -> str:
    """Say what to do with what ``howsmooth.capture`` returns."""
    first = given[0] if isinstance(given, list | tuple) and given else given
    if not (hasattr(first, "map") and hasattr(first, "x")):
        return ""
    each = "" if first is given else " for each site of the list"
    return f"Measure the map of a captured site at its tokens, local_lipschitz(site.map, site.x){each}."


def _checked_sequences(
    f: Callable[[Tensor], Tensor], xs: Sequence[object], rtol: float, confidence: float, max_iterations: int
) -> list[Tensor]:
    """Return the sequences without their graphs, of one dtype and device, each (n_i, d)."""
    if not xs:
        raise ArgumentError("x", expected="at least one sequence", got="none")
    checked: list[Tensor] = []
    for i, x in enumerate(xs):
        try:
            _check_arguments(f, x, rtol, confidence, max_iterations)
            assert isinstance(x, Tensor)
            _check_sequence(f, x, checked)
        except ArgumentError as error:
            if error.argument not in ("x", "X"):
                raise
            words = {"expected": error.expected, "got": error.got, "remedy": error.remedy}
            raise type(error)(f"x[{i}]", **words) from None
        checked.append(x.detach())
    return checked


def _check_sequence(f: Callable[[Tensor], Tensor], x: Tensor, before: Sequence[Tensor]) -> None:
    if x.ndim != 2:
        raise ArgumentError("x", expected="tokens (n, d), as all in a list", got=f"shape {tuple(x.shape)}")
    if before and (x.dtype, x.device) != (before[0].dtype, before[0].device):
        raise ArgumentError(
            "x",
            expected=f"{before[0].dtype} on {before[0].device} as x[0]",
            got=f"{x.dtype} on {x.device}",
        )
    if isinstance(f, TokenMap):
        check_tokens(x, f)
        f.check_length(x.shape[0])


def _scope(f: Callable[[Tensor], Tensor]) -> str:
    return f.describe() if isinstance(f, TokenMap) else getattr(f, "__name__", type(f).__name__)


def _chosen_method(f: Callable[[Tensor], Tensor], method: str) -> Method:
    match method, has_closed_form(f):
        case ("auto" | "closed form", True):
            return "closed form"
        case ("auto", False) | ("autodiff", _):
            return "autodiff"
        case ("closed form", False):
            remedy = f"{type(f).__name__} has no closed-form Jacobian; use 'autodiff'."
        case _:
            remedy = ""
    raise ArgumentError(
        "method", expected="'auto', 'closed form' or 'autodiff'", got=repr(method), remedy=remedy
    )


def _member_seeds(seed: int | Sequence[int], members: int) -> list[int]:
    """Return one generator seed a member, in 64 bits."""
    if isinstance(seed, int):
        # Multiples of the golden ratio of 2^64 keep the streams of neighbouring seeds apart.
        return [(seed + member * 0x9E3779B97F4A7C15) % 2**64 for member in range(members)]
    if len(seed) != members:
        raise ArgumentError("seed", expected=f"an integer, or {members} of them", got=f"{len(seed)} integers")
    return [int(s) % 2**64 for s in seed]


def _starts(operator: LinearOperator, seeds: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Gaussian starts of so many tokens, then zeros, drawn on the CPU so that every device has the same."""
    longest, *rest = operator.in_shape

    def drawn(seed: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(torch_seed(seed))
        start = torch.randn((length, *rest), generator=generator, dtype=torch.float64)
        start = start.to(operator.dtype)
        return start if length == longest else filled(start, longest)

    if len(seeds) == 1 or operator.in_size < _WORTH_A_THREAD:
        members = list(map(drawn, seeds, lengths))
    else:
        with ThreadPoolExecutor() as pool:  # by itself PyTorch draws one after the other
            members = list(pool.map(drawn, seeds, lengths))
    return torch.stack(members).to(operator.device)
