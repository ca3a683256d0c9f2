"""The power iteration with which the published code estimates the norm of the Jacobian J.

One step computes Jᵀw and normalises it, which gives the next vector u. Here w is J u, or f(X) if the code
uses the output in place of the tangent J u. The estimate is √μ, where μ is the norm of the last Jᵀw. With w =
J u the estimate tends to ‖J‖ from below. With w = f(X) the estimate does not depend on u, and equals ‖Jᵀ
f(X)‖^½ from the first step on. It then depends on the size of the output, including the biases, which do not
affect any derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.seeds import torch_seed

__all__ = ["MOST_STEPS", "STOP_BELOW", "PowerIteration", "power_iteration"]

MOST_STEPS = 100
STOP_BELOW = 1e-4
_RELATIVE = 1e-6


@dataclass(frozen=True)
class PowerIteration:
    """The result of the published code's power iteration: the estimate of ‖J‖, and the number of steps.

    ``settled`` says whether the stopping rule ended the iteration, rather than the largest number of steps.
    """

    value: float
    steps: int
    settled: bool


def power_iteration(
    f: Callable[[Tensor], Tensor],
    x: Float[Tensor, "n d"],
    *,
    output: bool,
    absolute: bool,
    seed: int,
) -> PowerIteration:
    """Run at most 100 steps of the published code's power iteration on JᵀJ, from a Gaussian start.

    The map ``f`` from tokens of shape (n, d) to (n, d_out) is called for each product; a map with dropout
    therefore differs from product to product. With ``output``, f(X) is used in place of J u. With
    ``absolute`` the iteration stops when μ changes by less than 1e-4, and otherwise when μ changes by less
    than 1e-6 μ.
    """
    generator = torch.Generator().manual_seed(torch_seed(seed))
    u = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    u = u / torch.linalg.vector_norm(u)
    previous = -1.0
    for step in range(1, MOST_STEPS + 1):
        w = f(x) if output else torch.func.jvp(f, (x,), (u,))[1]
        image = torch.func.vjp(f, x)[1](w)[0]
        mu = float(torch.linalg.vector_norm(image))
        limit = STOP_BELOW if absolute else _RELATIVE * mu
        if mu == 0.0 or (previous >= 0 and abs(mu - previous) < limit):
            return PowerIteration(mu**0.5, step, settled=True)
        previous, u = mu, image / mu
    return PowerIteration(previous**0.5, MOST_STEPS, settled=False)
