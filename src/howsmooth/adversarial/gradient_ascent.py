"""Gradient ascent on the local Lipschitz constant over a set of inputs, from many starts.

The gradient of a simple singular value σ = uᵀJv is uᵀ(∂J)v with u and v held fixed. The documentation page
"Worst inputs, and lower bounds" derives the method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.adversarial.constructions import Construction, constructions
from howsmooth.adversarial.qk_norm_inputs import zero_query_or_key_inputs
from howsmooth.adversarial.repeated_token_search import (
    AtomSearch,
    RepeatedTokens,
    can_search_atoms,
    search_atoms,
)
from howsmooth.adversarial.search_domains import Around, Ball, Domain, Ellipsoid
from howsmooth.attention import Residual, SelfAttention, TokenMap
from howsmooth.attention.custom_code_attention import StagedAttention
from howsmooth.attention.theorem_preconditions import remedy_for_other_map, require_formula
from howsmooth.bounds.attention_parameters import SiteLike
from howsmooth.bounds.bound import check_length, check_radius
from howsmooth.errors import ArgumentError, NonFiniteError, check_whole
from howsmooth.jacobian.closed_form import in_double
from howsmooth.jacobian.token_pair_blocks import token_blocks
from howsmooth.lipschitz import LipschitzEstimate, local_lipschitz
from howsmooth.lipschitz.block_norms import block_norms, sequence_jacobian
from howsmooth.lipschitz.maximum_token_norm import TokenWise, token_wise_ascent, token_wise_lipschitz
from howsmooth.lipschitz.singular_value_solver import Solver, member_seeds
from howsmooth.rounding import LEAST_DIVISOR
from howsmooth.seeds import torch_seed
from howsmooth.spectral.scaling import Scaled, times_power
from howsmooth.threads import renew_threads, with_fastest_threads

__all__ = ["Ascent", "ascend"]

_COLUMNS = ["start", "step", "value", "step_size", "accepted", "converged"]

# The ascent goes on from this many of the best starts. The number is halved after a quarter and after half
# of the steps.
_CLIMBERS = 8
# This many of the best inputs of the search among few atoms are added to the starts.
_FROM_ATOMS = 3
# The largest number of attention weights for which one gradient is computed; larger batches are split.
_GRADIENT_NUMBERS = 1 << 22

_MOMENTUM = 0.7

# Where the search among few atoms does not exist, causal sequences longer than this start from shorter ones.
_SHORT = 8

# A token-wise constant is sought at this many outputs, chosen by products with this many random tangents.
_OUTPUTS = 2
_PROBES = 4


@dataclass(frozen=True, eq=False)
class Ascent:
    """The result of a gradient ascent: the input with the largest local Lipschitz constant that was found,
    and the name of the start from which it was reached.

    Attributes
    ----------
    x
        Tokens (n, d), in the dtype and on the device of the map.
    estimate
        The local Lipschitz constant at ``x``, with an interval of relative width 1e-4, or wider where it has
        not converged; the token-wise constant between its limits, if that was searched for.
    start
        Name of the start from which ``x`` was reached.
    history
        Every evaluation, in order, with columns start, step, value, step_size, accepted, converged. Rows of
        the search among few atoms come first. Their values are lower limits and never count as accepted.
    seed
        The seed that was given.
    domain
        The set of inputs that was searched.

    """

    x: Float[Tensor, "n d"]
    estimate: LipschitzEstimate | TokenWise
    start: str
    history: pd.DataFrame
    seed: int
    domain: Domain

    @property
    def value(self) -> float:
        """The local Lipschitz constant at the tokens ``x`` that the ascent found.

        In the norm max_i |x_i| it is a lower bound on the constant.
        """
        return float(self.estimate.value)

    def __repr__(self) -> str:
        n, d = self.x.shape
        known = isinstance(self.estimate, TokenWise) or bool(self.estimate.converged)
        value = f"{self.value:.6g}" if known else f"{self.value:.6g}, not converged,"
        return (
            f"Ascent({value} at {n} tokens of dimension {d}, {self.domain.describe()}; from "
            f"{self.start}, {len(self.history)} evaluations)"
        )


@with_fastest_threads
def ascend(
    f: object,
    length: object = None,
    radius: object = None,
    *,
    domain: object = None,
    objective: str = "constant",
    starts: Sequence[Tensor | Construction] | None = None,
    random_starts: int = 2,
    steps: int = 100,
    seed: object = 0,
    rtol: float = 1e-3,
    atom_restarts: int = 48,
    atom_steps: int = 300,
    on_evaluation: Callable[[dict[str, object]], None] | None = None,
) -> Ascent:
    """Find an input with a large local Lipschitz constant ‖D_X f‖₂, by gradient ascent from many starts.

    The search has two stages. The first stage searches among inputs with few distinct tokens; it exists only
    for unmasked or causal attention without rotary positions. The second stage improves whole inputs by
    projected gradient ascent with momentum and backtracking. The constant that is found is a lower bound on
    the Lipschitz constant over the domain.

    For all other maps there is only the second stage. These are attention with rotary positions, norm layers
    of queries or keys, soft caps, biases or sinks, and layers around known softmaxes. The second stage then
    starts from random tokens; if the matrices are known, from the constructions for the same matrices with
    plain scores; if queries or keys have a norm layer, from tokens of which one has a query or key of
    zero, where the derivative of the norm layer is large; and under a causal mask from the input that the
    same search finds for half as many tokens, followed by copies of its last token.

    Parameters
    ----------
    f
        A map of this library: attention with any scores, heads and mask, possibly with residuals and norms
        around it, or a layer in stages. Or a captured site.
    length, radius
        Number of tokens n, and radius of the ball that contains each token. For a site, the default length
        is the length of its tokens. If the site has a norm layer, the default domain is the set of outputs
        of that layer.
    domain
        A Ball, Ellipsoid or Around to search in, instead of ``radius``. Around needs no length.
    objective
        "constant" for ‖D_X f‖₂; "token-wise" for how far an output token moves if every token moves by at
        most one, max_i sup |Σ_j J_ij e_j| over |e_j| ≤ 1. The search among few atoms is then left out.
    starts
        Inputs (n, d) to start from. The default is the constructions of every head (see
        :func:`~howsmooth.adversarial.constructions`) and the best inputs of the search among few atoms. If
        starts are given, that search is left out.
    random_starts
        Number of additional random starts.
    steps
        Number of steps of the ascent. Each step evaluates every remaining start once: at most eight starts,
        halved after a quarter and after half of the steps.
    seed
        Seed of all random numbers. The same seed gives the same history on the same machine with the same
        number of threads.
    rtol
        Relative width of the interval at which an evaluation counts as converged. A start that has not
        converged counts with its lower limit, and a step that has not is never accepted as an improvement.
    atom_restarts, atom_steps
        Number of random restarts and of steps in the search among few atoms; with 0 restarts the search is
        left out.
    on_evaluation
        Function that is called with each evaluation of the whole map, as a dictionary with the columns of
        ``history``.

    Returns
    -------
    Ascent
        The input, its constant measured again with an interval of relative width 1e-4, and all evaluations.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value; the message names the argument.

    References
    ----------
    Documentation page "Worst inputs, and lower bounds".

    """
    if isinstance(f, SiteLike) and not isinstance(f, TokenMap):
        if radius is None and domain is None and f.norm is not None:
            domain = Ellipsoid(f.norm)
        if length is None and not isinstance(domain, Around):
            length = f.x.shape[-2]
        f = f.map
    if not isinstance(f, TokenMap):
        raise ArgumentError(
            "f",
            expected="a map of this library, such as SelfAttention, or a site",
            got=type(f).__name__,
            remedy=remedy_for_other_map(f),
        )
    check_whole("random_starts", random_starts, least=0)
    check_whole("steps", steps, least=0)
    check_whole("atom_restarts", atom_restarts, least=0)
    check_whole("atom_steps", atom_steps, least=0)
    if not isinstance(f, StagedAttention):
        require_formula(f, "these searches", argument="f")
    if objective not in ("constant", "token-wise"):
        raise ArgumentError("objective", expected="'constant' or 'token-wise'", got=repr(objective))
    token_wise = objective == "token-wise"
    where, n = _domain_and_length(f, length, radius, domain)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError("seed", expected="an integer", got=repr(seed))
    generator = torch.Generator().manual_seed(torch_seed(seed))
    # If the projections see a subspace only, the search runs in coordinates of this subspace.
    basis = _basis(f, where)
    g = _compressed(f, basis)
    given = _given_starts(f, n, where, starts)
    if basis is not None:
        given = [(name, x @ basis) for name, x in given]
    rows: list[pd.DataFrame] = []
    if starts is None and atom_restarts and can_search_atoms(g, where) and n >= 2 and not token_wise:
        assert isinstance(g, SelfAttention)
        search = _search_atoms(g, n, where, given, atom_restarts, atom_steps, generator)
        rows.append(search.history.assign(accepted=False, converged=False))
        given += [(atoms.name, atoms.tokens().cpu()) for atoms in search.found[:_FROM_ATOMS]]
    elif starts is None and n > _SHORT and _extends_to_more_tokens(f) and not isinstance(where, Around):
        # No token sees a later one, so the constant of more tokens is at least that of the first ones.
        half = ascend(
            f,
            n // 2,
            radius,
            domain=domain,
            objective=objective,
            random_starts=random_starts,
            steps=steps,
            seed=seed,
            rtol=rtol,
            atom_restarts=0,
        )
        rows.append(half.history.assign(start=f"first {n // 2} tokens", accepted=False))
        longer = torch.cat([half.x, half.x[-1:].expand(n - n // 2, -1)]).double().cpu()
        given.append((f"first {n // 2} tokens", longer if basis is None else longer @ basis))
    for i in range(random_starts):
        given.append((f"random {i}", where.random(generator, n, g.d)))
    if not given:
        raise ArgumentError(
            "starts", expected="at least one start", got="none", remedy="Raise random_starts."
        )

    # The ascent is in float64, for maps of any dtype; the result is rounded and measured again below.
    measure = _token_wise if token_wise else _frobenius
    climb = _GradientAscent(
        g.to(dtype=torch.float64), where, given, rtol, seed, generator, on_evaluation, measure
    )
    best, name = climb.run(steps)
    x = best if basis is None else best @ basis.mT
    x = where.project(x).to(dtype=f.dtype, device=f.device)
    estimate: LipschitzEstimate | TokenWise
    if token_wise:
        estimate, converged = _whole_token_wise(f, x, seed), True
    else:
        try:
            estimate = local_lipschitz(f, x, rtol=1e-4, max_iterations=1000, seed=seed)
        except NonFiniteError as error:
            wider = "" if f.dtype == torch.float64 else ", or f.to(dtype=torch.float64)"
            raise NonFiniteError(
                "domain" if radius is None else "radius",
                expected=f"tokens at which {f.dtype} products keep a digit of the Jacobian",
                got=f"none {where.describe()}",
                remedy=f"Take a smaller radius{wider}.",
            ) from error
        converged = bool(estimate.converged)
    rows.append(pd.DataFrame(climb.rows, columns=_COLUMNS))
    final = pd.DataFrame([[name, steps + 1, float(estimate.value), 0.0, False, converged]], columns=_COLUMNS)
    history = pd.concat([part[_COLUMNS] for part in [*rows, final]], ignore_index=True)
    return Ascent(x, estimate, name, history, seed, where)


class _Measured(NamedTuple):
    """The constants at a batch of inputs: lower limits until they converge, zero where float64 fails."""

    value: Float[Tensor, " batch"]
    converged: Bool[Tensor, " batch"]
    input_direction: Float[Tensor, "batch n d"]
    output_direction: Float[Tensor, "batch n d_out"]


_Measure = Callable[[TokenMap, Tensor, float, Sequence[int]], _Measured]


def _frobenius(f: TokenMap, x: Tensor, rtol: float, seeds: Sequence[int]) -> _Measured:
    try:
        found = local_lipschitz(f, x, rtol=rtol, seed=seeds)
    except NonFiniteError:
        if len(x) == 1:
            none = torch.zeros(1, dtype=torch.float64)
            return _Measured(none, none > 0, torch.zeros_like(x), torch.zeros_like(f(x)))
        each = [_frobenius(f, one[None], rtol, [seed]) for one, seed in zip(x, seeds, strict=True)]
        return _Measured(*(torch.cat(part) for part in zip(*each, strict=True)))
    value = torch.where(found.converged, found.value, found.lower)
    return _Measured(value, found.converged, found.input_direction, found.output_direction)


def _token_wise(f: TokenMap, x: Tensor, rtol: float, seeds: Sequence[int]) -> _Measured:
    """Return an attained lower bound in the norm max_i |x_i| for each input, with its perturbation."""
    parts = []
    for member, seed in zip(x, seeds, strict=True):
        jacobian = sequence_jacobian(f, member)
        # The outputs that random tangents move most are the candidates.
        generator = torch.Generator().manual_seed(torch_seed(seed))
        moved = torch.zeros(jacobian.out_shape[0], dtype=torch.float64, device=x.device)
        for _ in range(_PROBES):
            e = torch.randn(member.shape, generator=generator, dtype=torch.float64).to(x)
            moved += jacobian.product(e[None])[0].square().sum(dim=-1)
        outputs = moved.topk(min(_OUTPUTS, len(moved))).indices.tolist()
        i, e, _ = token_wise_ascent(jacobian, outputs, rtol=rtol, seed=seed)
        image = jacobian.product(e[None])[0]
        value = image[i].norm()
        u = torch.zeros_like(image)
        u[i] = image[i] / value.clamp_min(LEAST_DIVISOR)
        if isinstance(jacobian, Scaled):
            value = times_power(value[None], -jacobian.powers.total)[0]
        parts.append((value, e, u))
    value, e, u = (torch.stack(part) for part in zip(*parts, strict=True))
    return _Measured(value.cpu(), torch.ones(len(x), dtype=torch.bool), e, u)


def _whole_token_wise(f: TokenMap, x: Float[Tensor, "n d"], seed: int) -> TokenWise:
    """Measure in the norm max_i |x_i| over all output tokens, of which the ascent looked at a few."""
    jacobian, n = sequence_jacobian(f, x), len(x)
    solver = Solver(1e-2, 0.999, 200, member_seeds(seed, n * n))
    blocks = token_blocks(in_double(f), x.double())
    outputs = torch.arange(n, device=x.device)
    norms = block_norms(jacobian if blocks is None else blocks, outputs, x.dtype, solver)
    return token_wise_lipschitz(f, x, jacobian, norms, range(n), rtol=1e-4, seed=seed)


class _GradientAscent:
    def __init__(
        self,
        f: TokenMap,
        domain: Domain,
        starts: list[tuple[str, Tensor]],
        rtol: float,
        seed: int,
        generator: torch.Generator,
        on_evaluation: Callable[[dict[str, object]], None] | None,
        measure: _Measure,
    ) -> None:
        self.measure = measure
        self.f, self.domain, self.rtol, self.seed = f, domain, rtol, seed
        self.generator, self.on_evaluation = generator, on_evaluation
        self.names = [name for name, _ in starts]
        x = torch.stack([x.to(dtype=torch.float64, device=f.device) for _, x in starts])
        self.u = domain.project_coordinates(domain.coordinates(x))
        self.rows: list[list[object]] = []

    def run(self, steps: int) -> tuple[Tensor, str]:
        domain = self.domain
        # Step 0 evaluates all starts; the best of them go on.
        first = self._evaluate(self.u, list(range(len(self.names))), 0)
        value = first.value
        self._record(range(len(self.names)), 0, first, [0.0] * len(value), first.converged.tolist())
        alive = torch.argsort(value, descending=True, stable=True)[:_CLIMBERS].tolist()
        gradient = self._gradient(self.u[alive], first, alive)
        kept = {i: (self.u[i], float(value[i])) for i in alive}
        size = dict.fromkeys(alive, 0.1)
        velocity = {i: torch.zeros_like(self.u[i]) for i in alive}
        slope = dict(zip(alive, gradient, strict=True))
        # A nonzero entry means that noise is added to the member's next step. The first step has noise
        # because the constructions are symmetric, and gradient steps alone would keep the symmetry.
        restless = dict.fromkeys(alive, 1)
        for step in range(1, steps + 1):
            renew_threads()
            # Concentrate on the most promising starts.
            if step in (steps // 4, steps // 2) and len(alive) > 2:
                alive = sorted(alive, key=lambda i: -kept[i][1])[: max(2, len(alive) // 2)]
            # A member whose step size has become tiny has converged.
            alive = [i for i in alive if size[i] > 1e-7]
            if not alive:
                break
            u = torch.stack([kept[i][0] for i in alive])
            direction = self._direction(u, torch.stack([slope[i] for i in alive]))
            noise = (
                self._probe(direction)
                * torch.tensor([0.1 * (restless[i] > 0) for i in alive]).to(u)[:, None, None]
            )
            # Step: momentum plus gradient direction plus noise, in units of the domain's radius.
            push = _MOMENTUM * torch.stack([velocity[i] for i in alive]) + direction + noise
            sizes = torch.tensor([size[i] for i in alive], dtype=torch.float64, device=u.device)[
                :, None, None
            ]
            trial = domain.project_coordinates(u + sizes * domain.radius * push)
            found = self._evaluate(trial, alive, step)
            risen = [
                bool(found.converged[m]) and float(found.value[m]) > kept[i][1] for m, i in enumerate(alive)
            ]
            self._record(alive, step, found, [size[i] for i in alive], risen)
            up = [m for m in range(len(alive)) if risen[m]]
            slopes = self._gradient(trial[up], found, up) if up else torch.zeros(0)
            for m, i in enumerate(alive):
                if risen[m]:
                    # The step was accepted: the actual displacement after projection becomes the momentum.
                    moved = (trial[m] - u[m]) / (size[i] * domain.radius)
                    kept[i], velocity[i] = (trial[m], float(found.value[m])), moved
                    slope[i] = slopes[up.index(m)]
                    size[i], restless[i] = min(1.0, 1.3 * size[i]), 0
                else:
                    # The step was rejected: try a shorter one from the same point, without momentum.
                    size[i] *= 0.4
                    velocity[i] = torch.zeros_like(velocity[i])
                    restless[i] = (restless[i] + 1) % 3  # after failures, every third attempt has no noise
        best = max(kept, key=lambda i: kept[i][1])
        return domain.tokens(kept[best][0]).cpu(), self.names[best]

    def _evaluate(self, u: Tensor, members: list[int], step: int) -> _Measured:
        # Every evaluation has a random start of its own that depends on seed, start and step only.
        seeds = [((self.seed * 1_000_003 + i) * 1_000_003 + step) % 2**62 for i in members]
        return self.measure(self.f, self.domain.tokens(u), self.rtol, seeds)

    def _gradient(self, u: Tensor, found: _Measured, rows: list[int]) -> Tensor:
        """Return the gradient of log ‖D f‖; the constant at ``u[i]`` is entry ``rows[i]`` of ``found``."""
        f = self.f
        x = self.domain.tokens(u)
        heads = f.heads if isinstance(f, SelfAttention) else 16
        # The gradient of a Jacobian product keeps several n × n matrices for each head.
        chunk = max(1, _GRADIENT_NUMBERS // (heads * x.shape[-2] ** 2))
        parts = []
        for i in range(0, len(x), chunk):
            member = rows[i : i + chunk]
            left = found.output_direction[member].to(x)
            right = found.input_direction[member].to(x)
            parts.append(_gradient_of_pairing(f, x[i : i + chunk], left, right))
        sigma = found.value[rows].to(x).clamp_min(LEAST_DIVISOR)[:, None, None]
        return self.domain.pull_back(torch.cat(parts) / sigma)

    def _direction(self, u: Tensor, gradient: Tensor) -> Tensor:
        """Return the direction of the next ascent step, projected so that the step stays in the set of
        inputs.

        The gradients at tokens that carry much attention are hundreds of times longer than the others. Each
        row is divided by the square root of its length, so that all tokens move.
        """
        # A tiny step is projected, which removes the part of the gradient that points out of the domain.
        reach = self.domain.project_coordinates(u + 1e-6 * self.domain.radius * _unit(gradient)) - u
        length = torch.linalg.vector_norm(reach, dim=-1, keepdim=True)
        top = length.amax(dim=-2, keepdim=True)
        scaled: Tensor = reach / (length * top).sqrt().clamp_min(LEAST_DIVISOR)
        return scaled

    def _probe(self, like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=self.generator, dtype=torch.float64).to(like)
        return drawn / math.sqrt(like.shape[-1])

    def _record(
        self,
        members: Sequence[int],
        step: int,
        found: _Measured,
        sizes: list[float],
        accepted: list[bool],
    ) -> None:
        for m, i in enumerate(members):
            row = [
                self.names[i],
                step,
                float(found.value[m]),
                sizes[m],
                accepted[m],
                bool(found.converged[m]),
            ]
            self.rows.append(row)
            if self.on_evaluation is not None:
                self.on_evaluation(dict(zip(_COLUMNS, row, strict=True)))


def _gradient_of_pairing(f: TokenMap, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ∂⟨left, J right⟩/∂x with ``left`` and ``right`` held fixed. Sequences are independent."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        tangent = torch.func.jvp(f, (point,), (right,))[1]
        (gradient,) = torch.autograd.grad((left * tangent).sum(), point)  # reverse over forward mode
    result: Tensor = gradient
    return result


def _unit(x: Tensor) -> Tensor:
    """Divide each sequence of a batch by the norm of its longest token; zero sequences stay zero."""
    top = torch.linalg.vector_norm(x, dim=-1).amax(dim=-1)[:, None, None]
    return x / torch.where(top > 0, top, 1.0)


# ---- arguments and starts of the ascent


def _domain_and_length(f: TokenMap, length: object, radius: object, domain: object) -> tuple[Domain, int]:
    if (radius is None) == (domain is None):
        raise ArgumentError(
            "radius",
            expected="a radius or a domain, one of the two",
            got="neither" if radius is None else "both",
        )
    if domain is None:
        if isinstance(radius, Domain):
            raise ArgumentError("radius", expected="a number", got=repr(radius), remedy="Give it as domain=.")
        domain = Ball(check_radius(radius))
    if not isinstance(domain, Domain):
        raise ArgumentError("domain", expected="a Ball, an Ellipsoid or an Around", got=type(domain).__name__)
    d = f.d
    if isinstance(domain, Ellipsoid):
        d = domain.norm.d
    elif isinstance(domain, Around):
        d = domain.X0.shape[1]
        if length is not None and length != len(domain.X0):
            raise ArgumentError("length", expected=f"{len(domain.X0)}, as X0 has", got=repr(length))
        length = len(domain.X0)
    if d != f.d:
        raise ArgumentError("domain", expected=f"tokens of dimension {f.d}", got=f"dimension {d}")
    n = check_length(length)
    f.check_length(n)
    return domain, n


def _given_starts(
    f: TokenMap, n: int, domain: Domain, starts: Sequence[Tensor | Construction] | None
) -> list[tuple[str, Tensor]]:
    if starts is None:
        return [(name, domain.project(x)) for name, x in _default_starts(f, n, domain)]
    given = []
    for i, start in enumerate(starts):
        name, x = (start.name, start.x) if isinstance(start, Construction) else (f"given {i}", start)
        if not isinstance(x, Tensor) or x.shape != (n, f.d) or not bool(torch.isfinite(x).all()):
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(
                "starts", expected=f"finite tokens of shape ({n}, {f.d}) each", got=f"start {i}: {got}"
            )
        given.append((name, domain.project(x.detach().double().cpu())))
    return given


def _default_starts(f: TokenMap, n: int, domain: Domain) -> list[tuple[str, Tensor]]:
    if isinstance(domain, Around):
        return [("centre", domain.X0)]
    inner = f.inner if isinstance(f, Residual) else f
    if not isinstance(inner, SelfAttention):
        return []
    # Of attention with other scores these are the worst inputs of its matrices alone: good places to start.
    plain = inner._rebuilt(
        rotary=None, query_norm=None, key_norm=None, softcap=None, score_bias=None, sinks=None
    )
    radius = domain.radius
    if isinstance(domain, Ellipsoid):  # the constructions need a ball around zero that contains it
        shift, gain = domain.tokens(torch.zeros(inner.d, dtype=torch.float64)), domain.norm.weight.double()
        radius = float(shift.norm() + math.sqrt(inner.d) * gain.abs().max())
    if radius == 0:
        return []
    built = constructions(plain.to(dtype=torch.float64, device="cpu"), n, radius)
    named: dict[str, Tensor] = {}
    for c in built:  # two_cluster may occur twice, for γ_max and for γ_min
        name = f"{c.name}, head {c.head}"
        named[name if name not in named else f"{name} (other eigenvalue)"] = c.x
    return [*named.items(), *(zero_query_or_key_inputs(inner, n, radius) if n >= 2 else [])]


def _extends_to_more_tokens(f: TokenMap) -> bool:
    """Return whether ``f`` is causal for every n, so that more tokens leave the first outputs unchanged."""
    return isinstance(f, SelfAttention) and f.causal and f.mask is None and f.score_bias is None


def _search_atoms(
    f: SelfAttention,
    n: int,
    domain: Domain,
    given: list[tuple[str, Tensor]],
    restarts: int,
    steps: int,
    generator: torch.Generator,
) -> AtomSearch:
    near = [atoms for name, x in given if (atoms := RepeatedTokens.of(f"atoms near {name}", x)) is not None]
    if f.causal:  # in the causal search only the last atom may be repeated
        near = [atoms for atoms in near if set(atoms.counts[:-1]) <= {1}]
    return search_atoms(f, n, domain, near, restarts=restarts, steps=steps, generator=generator)


def _basis(f: TokenMap, domain: Domain) -> Tensor | None:
    """Return an orthonormal basis of the span of the rows of the query, key and value matrices.

    The basis B (d, r) spans the rows of the query, key and value matrices. f depends on X B only, and X B Bᵀ
    is no longer than X, so a search over X B in a ball about zero loses no inputs. None means that the
    matrices have at least d rows, that f is not attention, or that the domain is not a ball.
    """
    if not (isinstance(f, SelfAttention) and isinstance(domain, Ball)):
        return None
    seen = torch.cat([w.double().flatten(0, 1) for w in (f.query, f.key, f.value)]).cpu()
    if len(seen) >= f.d:
        return None
    basis: Tensor = torch.linalg.qr(seen.mT).Q
    return basis


def _compressed(f: TokenMap, basis: Tensor | None) -> TokenMap:
    """Return X ↦ f(X Bᵀ), whose Jacobian has the same norm, or f itself without a basis B."""
    if basis is None:
        return f
    assert isinstance(f, SelfAttention)
    g = f.to(dtype=torch.float64)
    b = basis.to(f.device)
    return g._rebuilt(query=g.query @ b, key=g.key @ b, value=g.value @ b)
