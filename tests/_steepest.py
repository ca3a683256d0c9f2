"""Search for the steepest point of a map of tokens in a ball: projected gradient ascent of ‖D_X f‖.

What is found is a lower limit of the map's Lipschitz constant on the ball; a claim below it is false. The
Jacobian is dense, of torch.autograd, in float64: no code is shared with what is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["dense_norm", "steepest"]


def _as_function(f: Callable[..., object], **keywords: object) -> Callable[[Tensor], Tensor]:
    """Return f on tokens (n, d); of a layer that also returns its weights, the output."""

    def function(x: Tensor) -> Tensor:
        result = f(x[None], **keywords)
        output = result[0] if isinstance(result, tuple) else result
        assert isinstance(output, Tensor)
        return output[0]

    return function


def dense_norm(f: Callable[..., object], x: Tensor, **keywords: object) -> float:
    """Return ‖D_X f‖₂ at tokens (n, d) from the dense Jacobian."""
    jacobian = torch.autograd.functional.jacobian(_as_function(f, **keywords), x, vectorize=True)
    assert isinstance(jacobian, Tensor)
    rows = jacobian.flatten(end_dim=jacobian.ndim - x.ndim - 1)
    return float(torch.linalg.matrix_norm(rows.flatten(1), 2))


def steepest(
    f: Callable[..., object],
    length: int,
    radius: float,
    d: int,
    *,
    starts: int = 4,
    steps: int = 40,
    rate: float = 0.1,
    seed: int = 0,
    given: Sequence[Tensor] = (),
    **keywords: object,
) -> float:
    """Return the largest ‖D_X f‖₂ found over sequences of ``length`` tokens of norm at most ``radius``.

    Parameters
    ----------
    f
        A module or function of tokens (batch, n, d), each sequence by itself, twice differentiable; of a
        module a copy in float64 is made. Of a tuple the first is taken.
    length, radius, d
        Of the tokens.
    starts, steps, rate
        Random starts (on the sphere, in the ball, two clusters, a heavy token among copies, in turn), and the
        ascent from each: Adam in units of the radius, each token projected on the ball after each step.
    seed
        Of the starts.
    given
        Further starts, (n, d).
    keywords
        Given to f beside the tokens.

    """
    if isinstance(f, nn.Module):
        import copy

        f = copy.deepcopy(f).double()
        for parameter in f.parameters():
            parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    points = [_projected(x.detach().double() / radius) for x in given]
    points += [_start(i, length, d, generator) for i in range(starts)]
    batch = torch.stack(points)
    for name, mask in keywords.items():  # masks of one sequence, for each start
        if isinstance(mask, Tensor) and (name == "key_padding_mask" or mask.ndim == 3):
            keywords[name] = mask.repeat(len(points), *[1] * (mask.ndim - 1))

    def function(x: Tensor) -> Tensor:
        result = f(x, **keywords)
        output = result[0] if isinstance(result, tuple) else result
        assert isinstance(output, Tensor)
        return output.flatten(1)

    return _climb(function, batch, radius, steps, rate)


def _start(i: int, n: int, d: int, generator: torch.Generator) -> Tensor:
    """Return tokens in the unit ball."""
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    x = x / torch.linalg.vector_norm(x, dim=1, keepdim=True)
    match i % 4:
        case 1:
            x = x * torch.rand(n, 1, generator=generator, dtype=torch.float64)
        case 2:
            signs = torch.randint(0, 2, (n, 1), generator=generator) * 2 - 1
            x = x[:1] * signs + 0.1 * x
        case 3:
            light = x[1 % n] + 0.1 * x
            light[0] = x[0]
            x = light
    return _projected(x)


def _projected(x: Tensor) -> Tensor:
    # A little inside: a layer may refuse what rounding puts beyond its radius.
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inside: Tensor = x * ((1 - 1e-14) / norms.clamp(min=1.0))
    return inside


def _climb(f: Callable[[Tensor], Tensor], start: Tensor, radius: float, steps: int, rate: float) -> float:
    """Adam on σ = uᵀ J v of each member, with u, v the leading singular vectors held fixed."""
    x = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=rate, maximize=True)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1), eta_min=rate / 50)
    best = 0.0
    for step in range(steps + 1):
        tokens = radius * x
        y = f(tokens)
        # Members do not see each other: one derivative of a sum gives a row of each Jacobian, and one
        # batched pass all rows.
        each = torch.eye(y.shape[1], dtype=y.dtype)[:, None].expand(-1, len(y), -1)
        (rows,) = torch.autograd.grad(
            y, tokens, each, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        rows = tokens.new_zeros(y.shape[1], *tokens.shape) if rows is None else rows
        jacobian = rows.transpose(0, 1).flatten(2)
        u, s, vh = torch.linalg.svd(jacobian, full_matrices=False)
        assert bool(torch.isfinite(s).all()), "the Jacobian is not finite"
        best = max(best, float(s[:, 0].max()))
        if step == steps:
            break
        (pulled,) = torch.autograd.grad(y, tokens, u[:, :, 0], create_graph=True)
        sigma = (pulled.flatten(1) * vh[:, 0]).sum()
        optimiser.zero_grad()
        if not sigma.requires_grad:  # a linear map: the same everywhere
            break
        sigma.backward()
        optimiser.step()
        decay.step()
        with torch.no_grad():
            x.copy_(_projected(x))
    return best
