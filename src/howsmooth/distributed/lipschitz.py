"""Measurement of the local Lipschitz constant at one sequence whose tokens are divided among processes."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.attention.map import check_tokens
from howsmooth.distributed.communication import Collectives, Exchange, ProcessGroupCollectives
from howsmooth.distributed.memory_per_process import Room, check_budget, room
from howsmooth.distributed.random_start import own_start
from howsmooth.distributed.shared_jacobian import SharedMap, check_shareable, together
from howsmooth.distributed.token_partition import RowShares
from howsmooth.errors import ArgumentError
from howsmooth.jacobian import in_double
from howsmooth.lipschitz import LipschitzEstimate
from howsmooth.lipschitz.arguments import check_arguments
from howsmooth.lipschitz.mixed_precision import widen_by_rounding
from howsmooth.memory import memory_budget
from howsmooth.spectral import LeadingTriplet, LinearOperator
from howsmooth.spectral.accurate_sums import squared_lengths
from howsmooth.spectral.lanczos import lanczos

__all__ = ["local_lipschitz", "measure", "own_rows"]

# All processes apply their map to this many tokens, and the results must agree up to rounding.
_PROBE_TOKENS = 4
_PROBE_RTOL = 1e-9


def own_rows(n: int, group: object = None) -> Int[Tensor, " own"]:
    """Return the positions of the tokens that this process holds, for a sequence of ``n`` tokens that are
    divided among processes.

    The rows form two ranges, one from each half of the sequence, so that all processes have the same amount
    of work for a causal map.

    Parameters
    ----------
    n
        Number of tokens of the sequence, at least two for each process.
    group
        Process group of torch.distributed; all processes by default.

    Raises
    ------
    ArgumentError
        If torch.distributed has not been started, or ``n`` is too small.

    """
    collectives = ProcessGroupCollectives(group)
    return RowShares(n, collectives.world).rows(collectives.rank)


def local_lipschitz(
    f: TokenMap,
    x: Tensor,
    n: int,
    *,
    group: object = None,
    rtol: float = 1e-4,
    confidence: float = 0.999,
    max_iterations: int = 200,
    seed: int = 0,
    memory: int | None = None,
) -> LipschitzEstimate:
    """Measure the local Lipschitz constant ‖D_X f‖₂ at one sequence X of ``n`` tokens that are divided among
    processes.

    This function divides the work and the memory of :func:`howsmooth.local_lipschitz` among the processes. It
    takes the same start and the same steps, and its numbers differ from those of one process by rounding
    only. Every process of the group must call it with the same arguments, except for ``x`` and ``memory``.

    Parameters
    ----------
    f
        :class:`~howsmooth.attention.SelfAttention` without mask and score bias, a norm, a LayerScale, or a
        Residual or Compose of them.
    x
        The rows of the tokens that :func:`own_rows` returns for this process, (own, d), float32 or float64.
    n
        Number of tokens of the whole sequence.
    group
        Process group of torch.distributed; all processes by default.
    rtol, confidence, max_iterations, seed
        As for :func:`howsmooth.local_lipschitz`.
    memory
        Bytes that this process may use. The default is half of the free memory of its device, divided evenly
        among the group's processes on that device. The memory determines how many heads are gathered at a
        time and the dtype of the Krylov basis.

    Returns
    -------
    LipschitzEstimate
        The same in every process, except that the directions have the rows of the process.

    Raises
    ------
    ArgumentError
        In every process, if an argument of one process is wrong or differs from the arguments of the others.
    NonFiniteError
        In every process, if tokens or a product contain NaN or infinity.

    References
    ----------
    Documentation page "Many machines", which describes the communication and its cost.

    """
    collectives = ProcessGroupCollectives(group)
    return measure(
        f,
        x,
        n,
        collectives,
        rtol=rtol,
        confidence=confidence,
        max_iterations=max_iterations,
        seed=seed,
        memory=memory,
    )


def measure(
    f: TokenMap,
    x: Tensor,
    n: int,
    collectives: Collectives,
    *,
    rtol: float,
    confidence: float,
    max_iterations: int,
    seed: int,
    memory: int | None,
) -> LipschitzEstimate:
    """Measure the local Lipschitz constant ‖D_X f‖₂ at a sequence whose tokens are divided among processes
    that communicate through ``collectives``.
    """
    shares, double = _agreed(f, x, n, collectives, rtol, confidence, max_iterations, seed)
    budget = together(collectives, lambda: memory_budget(memory, x.device))
    if memory is None:
        # The free memory of a device is shared by all processes on it.
        budget //= _neighbours(collectives, x.device)
    exchange = Exchange(collectives, shares, x.device)
    dtypes = (x.dtype, torch.float64)
    check_budget(double, shares, dtypes, x.device, budget, collectives)
    rooms = {
        dtype: room(double, shares, dtype, x.device, budget, max_iterations, collectives) for dtype in dtypes
    }
    # The same random start as in one process; the conversion to the dtype comes later.
    start = own_start(n, f.d, exchange.ranges, seed)[None]
    tokens = x.detach().double()[None]

    def operator(dtype: torch.dtype) -> LinearOperator:
        return SharedMap(exchange, rooms[dtype].heads_together).jacobian(double, tokens, dtype)

    def solve(at: LinearOperator) -> LeadingTriplet:
        held: Room = rooms[at.dtype]
        return lanczos(
            at,
            start.to(device=at.device, dtype=at.dtype),
            rtol=rtol,
            confidence=confidence,
            max_iterations=max_iterations,
            basis_dtype=held.basis_dtype,
            basis_bytes=held.basis_bytes(exchange.own, f.d),
            reduce=exchange.total,
        )

    found = solve(operator(x.dtype)) if x.dtype == torch.float64 else _single(operator, solve, exchange, rtol)
    return LipschitzEstimate(
        value=found.sigma[0],
        lower=found.lower[0],
        upper=found.upper[0],
        confidence=confidence,
        converged=found.converged[0],
        iterations=found.steps[0],
        input_direction=found.right[0].to(x.dtype),
        output_direction=found.left[0].to(x.dtype),
        method="closed form",
        scope=f"{f.describe()}, {n} tokens shared among {collectives.world} processes",
        rtol=rtol,
        seed=seed,
    )


def _single(
    operator: Callable[[torch.dtype], LinearOperator],
    solve: Callable[[LinearOperator], LeadingTriplet],
    exchange: Exchange,
    rtol: float,
) -> LeadingTriplet:
    """Measure the norm of the Jacobian in float32 and check the result in float64. If the check fails,
    measure the norm in float64.
    """
    single = operator(torch.float32)
    found = solve(single)
    right = found.right.double()
    # The float32 vector is normalised in float64, over all processes.
    right /= _length(right, exchange)
    _, rounded = single.gram_product(right.to(torch.float32))
    del single  # frees its probabilities and keys before the float64 operator is built
    exact = operator(torch.float64)
    image, gram = exact.gram_product(right)
    sigma = _length(image, exchange).cpu()
    # A perturbation Δ of JᵀJ moves σ by vᵀΔv / 2σ to first order.
    defect = _length(rounded.double() - gram, exchange).cpu() / sigma.clamp_min(
        torch.finfo(torch.float64).tiny
    )
    judged = widen_by_rounding(found, sigma, defect, exact, rtol)
    del image, gram, rounded, right
    # The float64 check either confirms the interval, or the float32 run had not converged anyway. Only in the
    # remaining case is a second run worth its time.
    if bool(judged.converged) or not bool(found.converged | found.broke_down):
        return judged
    return solve(exact)


def _length(t: Tensor, exchange: Exchange) -> Tensor:
    """Return the Frobenius norm of a tensor (1, n, ·) whose rows are divided among processes."""
    return exchange.total(squared_lengths(t.flatten(1))).sqrt()


def _agreed(
    f: TokenMap,
    x: Tensor,
    n: int,
    collectives: Collectives,
    rtol: float,
    confidence: float,
    max_iterations: int,
    seed: int,
) -> tuple[RowShares, TokenMap]:
    """Check the arguments in this process, and check that all processes were called with the same
    arguments.
    """

    def checked() -> tuple[RowShares, TokenMap, dict[str, object], list[float]]:
        if isinstance(n, bool) or not isinstance(n, int):
            raise ArgumentError("n", expected="the number of tokens of the sequence", got=repr(n))
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ArgumentError("seed", expected="an integer", got=repr(seed))
        check_shareable(f)
        check_arguments(f, x, rtol, confidence, max_iterations)
        shares = RowShares(n, collectives.world)
        own = shares.count(collectives.rank)
        if x.ndim != 2 or x.shape[0] != own:
            raise ArgumentError(
                "x",
                expected=f"the {own} rows of process {collectives.rank}, shape ({own}, {f.d})",
                got=f"shape {tuple(x.shape)}",
                remedy="Take x[own_rows(n)] of the sequence.",
            )
        check_tokens(x, f)
        f.check_length(n)
        double = in_double(f)
        said = {
            "n": n,
            "rtol": rtol,
            "confidence": confidence,
            "max_iterations": max_iterations,
            "seed": seed,
            "dtype": str(x.dtype),
            "f": f.describe(),
        }
        return shares, double, said, _probe(double, n)

    # An error in one process must be raised in all of them, since the next lines communicate.
    shares, double, said, probe = together(collectives, checked)
    for rank, (theirs, numbers) in enumerate(collectives.all_gather_objects((said, probe))):
        for name, value in said.items():
            if theirs[name] != value:
                raise ArgumentError(
                    name,
                    expected="one value in all processes",
                    got=f"{value!r} here, {theirs[name]!r} in process {rank}",
                )
        if not all(map(_alike, probe, numbers)):
            raise ArgumentError(
                "f",
                expected="one map in all processes",
                got=f"other parameters in process {rank}",
                remedy="Load or draw them alike: the same file, the same seed.",
            )
    return shares, double


def _alike(a: float, b: float) -> bool:
    """Return True if ``a`` and ``b``, the norms of an output of the map in two processes, differ by rounding
    only.

    NaN counts as equal to NaN here, because the measurement itself reports numbers that are not finite.
    """
    return math.isclose(a, b, rel_tol=_PROBE_RTOL, abs_tol=1e-300) or (math.isnan(a) and math.isnan(b))


def _probe(double: TokenMap, n: int) -> list[float]:
    """Return the norms of the map's outputs at a few fixed tokens, for a check that all processes have the
    same map.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(min(n, _PROBE_TOKENS), double.d, generator=generator, dtype=torch.float64)
    lengths: list[float] = double._forward(tokens.to(double.device)).norm(dim=-1).tolist()
    return lengths


def _neighbours(collectives: Collectives, device: torch.device) -> int:
    """Return how many processes of the group run on the device of this process, including this process."""
    here = (socket.gethostname(), str(device))
    return collectives.all_gather_objects(here).count(here)
