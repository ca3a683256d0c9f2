"""The power iteration on JᵀJ of the published code, with the product and the stopping rule that it has.

One step maps u to Jᵀw with w = J u, or with w = f(X) where the output is taken for the tangent, and
normalises. The value is √μ with μ the norm of the last Jᵀw. With w = J u it tends to ‖J‖ from below. With
w = f(X) it does not depend on u, and is ‖Jᵀ f(X)‖^½ from the first step on: it depends on the size of the
output, biases included, which no derivative sees.
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
    """The outcome of a power iteration.

    Attributes
    ----------
    value
        √μ of the last step.
    steps
        Number of steps.
    settled
        Whether the stopping rule ended it, and not the number of steps.

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
    """Iterate at most 100 times from a Gaussian start.

    Parameters
    ----------
    f
        Map of tokens (n, d) to (n, d_out), called anew for each product: a random one (dropout) differs
        from product to product.
    x
        Where its Jacobian is taken.
    output
        Take f(X) for J u.
    absolute
        Stop when μ moves by less than 1e-4; else when it moves by less than 1e-6 μ.
    seed
        Of the start.

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
