"""Wasserstein distances between measures, with an interval proved by a transport plan and by dual
potentials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.measures.bures import between_gaussians
from howsmooth.measures.discrete import DiscreteMeasure
from howsmooth.measures.distance_arguments import Options, check_discrete, check_order, check_same_space
from howsmooth.measures.gaussian import Gaussian
from howsmooth.measures.presolve import Answer, Pair
from howsmooth.measures.transport_solvers import entropic, network_simplex, on_the_line
from howsmooth.rounding import interval_in_digits

__all__ = ["Transport", "solve", "transport_of", "wasserstein"]

Method = Literal["exact", "entropic", "1d", "bures", "matched", "conditional"]

# Largest number of pairs of atoms. While POT works, the costs and the plan take 41 bytes for each pair, which
# is 8 GB in all.
_LARGEST = 2 * 10**8


@dataclass(frozen=True, eq=False)
class Transport:
    """A computed Wasserstein distance between two measures, with its interval and its transport plan.

    Attributes
    ----------
    value
        The distance W_p, float64, shape (), computed as the p-th root of the plan's cost. It is
        differentiable if that was requested.
    lower, upper
        Proved limits of W_p for the weights as float64 numbers. The lower limit comes from feasible
        potentials, the upper limit from a feasible plan. They hold with certainty, even if the solver failed.
    plan
        Sparse tensor (n, m), float64, of the masses moved from atom i of μ to atom j of ν. None for Gaussians
        and for infinite distances.
    method
        The method that was used: "exact" (network simplex), "entropic" (Sinkhorn), "1d" (sorting), "bures"
        (formula for Gaussians), "conditional" (a problem for each position), or "matched". "matched" means
        that no solver was needed, because the weights are equal in order and every y_i is the atom nearest to
        x_i.
    converged
        Whether upper − lower <= rtol · upper, or ``upper`` is below the rounding error of the weights.
    p, rtol
        The order, and the requested relative width of the interval.

    """

    value: Float[Tensor, ""]
    lower: float
    upper: float
    plan: Tensor | None
    method: Method
    converged: bool
    p: float
    rtol: float

    @property
    def remedy(self) -> str:
        """Advice on what to do if the interval is too wide, or an empty string if it is narrow enough."""
        if self.converged:
            return ""
        advice = {
            "entropic": "raise max_iterations, lower the regularisation, or take method='exact'",
            "bures": "one of the covariances is close to singular; loosen rtol",
        }.get(self.method, "loosen rtol; the distance is close to the rounding of the weights")
        return f"The interval is wider than rtol = {self.rtol:g}: {advice}. The interval is valid anyway."

    def __repr__(self) -> str:
        status = "converged" if self.converged else "NOT converged"
        return (
            f"Transport(W_{self.p:g} = {float(self.value):.6g} in "
            f"{interval_in_digits(self.lower, self.upper)}, {status}, {self.method})"
        )


def wasserstein(
    mu: object,
    nu: object,
    p: object = 2,
    *,
    method: str = "auto",
    regularisation: float | None = None,
    rtol: float | None = None,
    max_iterations: int = 1000,
    gradient: bool = False,
) -> Transport:
    """Measure the Wasserstein distance W_p(μ, ν) of order p >= 1 between two measures, with an interval.

    Parameters
    ----------
    mu, nu
        Two discrete measures, or two Gaussians. Positions are ignored; see :func:`conditional_wasserstein`.
    p
        The order, a finite number p >= 1.
    method
        "exact" is POT's network simplex, which takes seconds for thousands of atoms. "1d" sorts atoms in one
        dimension. "entropic" is Sinkhorn in the log domain. "bures" is the formula for Gaussians with p = 2.
        "auto" takes "bures" for Gaussians, "1d" in one dimension, and otherwise "exact".
    regularisation
        Final strength of the entropic regularisation for "entropic", in units of |x − y|^p. By default the
        strength decreases until the interval is narrow enough.
    rtol
        Relative width of the interval that counts as converged; by default 1e-6, and 1e-2 for "entropic".
    max_iterations
        Largest number of Sinkhorn iterations for "entropic".
    gradient
        Whether ``value`` is differentiable with respect to the points, log-weights, means and covariances
        that require gradients. The derivative is computed from the plan and the potentials; for "entropic" it
        belongs to the regularised problem. At distance zero it is set to zero.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value, or there are too many pairs of atoms.

    References
    ----------
    Flamary et al., *POT: Python Optimal Transport*, JMLR 2021. For the intervals: documentation page
    "Maps on measures", section "Why the interval of a distance holds".

    """
    order = check_order(p)
    options = Options.of(method, regularisation, rtol, max_iterations, gradient)
    # Gaussians have a formula; discrete measures are a linear program.
    if isinstance(mu, Gaussian) and isinstance(nu, Gaussian):
        check_same_space(mu, nu)
        return _of_gaussians(mu, nu, order, options)
    one, other = check_discrete("mu", mu), check_discrete("nu", nu)
    check_same_space(one, other)
    pair = Pair.of(one, other, order)
    answer, used = solve(pair, options)
    return transport_of(pair, answer, used, options, (one, other))


def solve(pair: Pair, options: Options) -> tuple[Answer, Method]:
    """Compute the distance W_p between two scaled discrete measures with an interval, and return it with the
    name of the method.

    Before it calls the exact or the sorting solver, it checks whether matching equal indices is optimal.
    """
    n, m, d = len(pair.x), len(pair.y), pair.x.shape[1]
    # Choose the method, and refuse a method that does not fit the points.
    method = options.method if options.method != "auto" else "1d" if d == 1 else "exact"
    if method == "1d" and d != 1:
        raise ArgumentError(
            "method", expected="'auto', 'exact' or 'entropic' for these points", got=f"'1d' with d = {d}"
        )
    if method == "bures":
        raise ArgumentError("mu, nu", expected="two Gaussians for method 'bures'", got="discrete measures")
    if method != "1d" and n * m > _LARGEST:
        raise ArgumentError(
            "mu, nu",
            expected=f"at most {_LARGEST:.0e} pairs of atoms",
            got=f"{n} times {m}",
            remedy="Merge atoms with merged(tolerance), or take fewer atoms.",
        )
    # In a small perturbation of a measure, every atom stays nearest to itself, and no solver is needed. The
    # entropic solver computes another quantity, so its result is not replaced.
    if options.method in ("auto", "exact", "1d"):
        matched = pair.matched()
        if matched is not None:
            return matched, "matched"
    if method == "1d":
        return pair.answer(on_the_line(pair.problem)), "1d"
    if method == "exact":
        return pair.answer(network_simplex(pair.problem)), "exact"
    strength = options.regularisation
    if strength is not None:
        # The regularisation is given in the user's units; costs are in units of the scaled points.
        strength = float(np.clip(strength * np.exp2(-pair.p * pair.exponent), 1e-300, 1e300))
    return pair.answer(entropic(pair.problem, strength, options.rtol, options.max_iterations)), "entropic"


def transport_of(
    pair: Pair,
    answer: Answer,
    method: Method,
    options: Options,
    measures: tuple[DiscreteMeasure, DiscreteMeasure],
) -> Transport:
    """Convert the computed distance between two scaled measures to the result for the user, in the original
    units.

    If ``options.gradient`` is set, the distance is differentiable.
    """
    value = torch.tensor(pair.in_units(answer.value), dtype=torch.float64, device=measures[0].device)
    if options.gradient:
        value = _with_gradient(value, pair, answer, *measures)
    return Transport(
        value=value,
        lower=math.ldexp(answer.lower, pair.exponent),
        upper=pair.in_units(answer.upper),
        plan=_sparse(pair, answer, measures[0]),
        method=method,
        converged=options.narrow(answer.lower, answer.upper, pair.noise),
        p=pair.p,
        rtol=options.rtol,
    )


def _of_gaussians(mu: Gaussian, nu: Gaussian, p: float, options: Options) -> Transport:
    if options.method not in ("auto", "bures"):
        raise ArgumentError("method", expected="'auto' or 'bures' for Gaussians", got=repr(options.method))
    if p != 2:
        raise ArgumentError(
            "p",
            expected="2 for Gaussians",
            got=f"{p:g}",
            remedy="There is no formula for other orders; compare samples, gaussian.sample(n, seed).",
        )
    answer = between_gaussians(mu, nu)
    value = torch.tensor(answer.in_units(answer.value), dtype=torch.float64, device=mu.device)
    if options.gradient:
        if not answer.regular and (mu.covariance.requires_grad or nu.covariance.requires_grad):
            raise ArgumentError(
                "gradient",
                expected="covariances that are not singular if they require gradients",
                got="a singular covariance",
                remedy="W_2 has no derivative there; detach the covariances, or add a multiple of I.",
            )
        slopes = (*answer.by_means, *answer.by_covariances)
        arguments = (mu.mean, nu.mean, mu.covariance, nu.covariance)
        for argument, slope in zip(arguments, slopes, strict=True):
            value = _attach(value, argument, slope)
    return Transport(
        value=value,
        lower=math.ldexp(answer.lower, answer.exponent),
        upper=answer.in_units(answer.upper),
        plan=None,
        method="bures",
        converged=options.narrow(answer.lower, answer.upper, answer.noise),
        p=p,
        rtol=options.rtol,
    )


# ---- derivatives


def _with_gradient(
    value: Tensor, pair: Pair, answer: Answer, mu: DiscreteMeasure, nu: DiscreteMeasure
) -> Tensor:
    """Return the distance ``value`` as a differentiable function of the points and the log-weights of both
    measures.

    The plan gives the derivatives by points, and the potentials give the derivatives by weights.
    """
    for points, gradient in zip((mu.points, nu.points), _by_points(pair, answer), strict=True):
        value = _attach(value, points, gradient)
    for logs, potential in ((mu.log_weights, answer.left), (nu.log_weights, answer.right)):
        if not logs.requires_grad:
            continue
        if potential is None:
            raise ArgumentError(
                "gradient",
                expected="weights without gradients, for '1d' and for conditional distances",
                got="log-weights that require gradients",
                remedy="Detach them; wasserstein with method='exact' has a derivative by weights.",
            )
        value = _attach(value, logs, _by_log_weights(pair, answer, potential, logs.detach().cpu().numpy()))
    return value


def _by_points(pair: Pair, answer: Answer) -> tuple[Float[ndarray, "n d"], Float[ndarray, "m d"]]:
    """Return the derivatives of the distance W_p with respect to the points of both measures.

    Each entry e of the plan adds m_e (|z_e| / W_p)^{p−1} z_e/|z_e| at its row and subtracts it at its column,
    where m_e is its mass and z_e = x − y.
    """
    # The derivative of W_p = (Σ_e m_e |z_e|^p)^{1/p} for a fixed plan, by the envelope theorem.
    rows, columns = answer.plan.rows, answer.plan.columns
    moves = pair.x[rows] - pair.y[columns]
    lengths = np.linalg.norm(moves, axis=1)
    moved = lengths > 0
    pulls = np.zeros_like(moves)
    if answer.value > 0:
        # Powers and masses are multiplied as logarithms, so that tiny masses do not underflow.
        logs = answer.log_masses[moved] + (pair.p - 1) * np.log(lengths[moved] / answer.value)
        pulls[moved] = np.exp(logs)[:, None] * moves[moved] / lengths[moved, None]
    left, right = np.zeros_like(pair.x), np.zeros_like(pair.y)
    np.add.at(left, rows, pulls)
    np.subtract.at(right, columns, pulls)
    return left, right


def _by_log_weights(
    pair: Pair, answer: Answer, potential: Float[ndarray, " n"], logs: Float[ndarray, " n"]
) -> Float[ndarray, " n"]:
    """Return the derivatives of the distance W_p with respect to the log-weights of one measure.

    The derivative of W_p^p by a weight a_i is its potential φ_i, so that of W_p by log a_i is
    a_i φ_i / (p W_p^{p−1}). At distance zero it is set to zero.
    """
    if answer.value <= 0:
        return np.zeros_like(potential)
    # Factors are multiplied as logarithms, so that tiny weights do not underflow.
    with np.errstate(divide="ignore"):
        sizes = np.log(np.abs(potential)) + logs
    steep = np.sign(potential) * np.exp(sizes - (pair.p - 1) * math.log(answer.value)) / pair.p
    in_units: ndarray = np.ldexp(steep, pair.exponent)
    return in_units


def _attach(value: Tensor, argument: Tensor, gradient: ndarray) -> Tensor:
    if not argument.requires_grad:
        return value
    slope = torch.as_tensor(gradient, dtype=torch.float64, device=argument.device)
    change = (argument - argument.detach()).double()  # zero, with derivative 1
    return value + (slope * change).sum()


def _sparse(pair: Pair, answer: Answer, like: DiscreteMeasure) -> Tensor:
    """Return the transport plan as a sparse tensor (n, m) on the device of the first measure."""
    places = torch.as_tensor(np.stack((answer.plan.rows, answer.plan.columns)), dtype=torch.int64)
    masses = torch.as_tensor(answer.plan.masses, dtype=torch.float64)
    shape = (len(pair.x), len(pair.y))
    return torch.sparse_coo_tensor(places, masses, shape, check_invariants=True).coalesce().to(like.device)
