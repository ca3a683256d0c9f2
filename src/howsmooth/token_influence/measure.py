"""The function ``influence``: it checks its arguments, chooses how blocks are computed, builds the result."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.attention.map import check_tokens
from howsmooth.bounds.parameters import SiteLike
from howsmooth.errors import ArgumentError
from howsmooth.jacobian import has_closed_form, in_double
from howsmooth.jacobian.token_pair_blocks import token_blocks
from howsmooth.lipschitz.arguments import check_arguments
from howsmooth.lipschitz.block_norms import block_norms, sequence_jacobian
from howsmooth.lipschitz.solver import Solver, member_seeds
from howsmooth.lipschitz.token_wise import token_wise_lipschitz
from howsmooth.token_influence.result import Influence

__all__ = ["influence"]


def influence(
    f: Any,
    x: Tensor | None = None,
    *,
    outputs: int | slice | Iterable[int] | None = None,
    rtol: float = 1e-2,
    confidence: float = 0.999,
    max_iterations: int = 200,
    seed: int = 0,
) -> Influence:
    """Measure which token moves which: the matrix of the block norms ‖∂y_i/∂x_j‖₂, each with an interval.

    Entry (i, j) says how far the output y_i moves, to first order, if the input token x_j moves by one. For
    self-attention, with residuals, norm layers and layer scales around it, the blocks have a closed form and
    are never formed as matrices: n² numbers a head are in memory. For any other map all rows of one output
    token at a time are formed, d_out n d numbers, by one product with the adjoint of the Jacobian for each;
    ``outputs`` then limits the work.

    Parameters
    ----------
    f
        A captured site of one sequence; a map of this library; or any differentiable PyTorch map of tokens
        (n, d) to tokens (n_out, d_out), or to one vector (d_out,), such as the logits at the last token.
    x
        Tokens (n, d) or (1, n, d), float32 or float64; None for the tokens of a site.
    outputs
        Which output tokens i are measured, counted from 0 or, if negative, from the end; all by default.
    rtol
        Relative width of the interval at which an entry has converged.
    confidence
        Probability, over the random starts, with which the interval of each entry holds.
    max_iterations
        Largest number of Lanczos steps for an entry.
    seed
        Seed of the random starts, of which each entry has its own.

    Returns
    -------
    Influence
        Values and intervals (outputs, n) in float64, the token-wise constant, a table, and ``plot()``.

    Raises
    ------
    ArgumentError
        If an argument does not fit; the message names it.
    NonFiniteError
        If ``x``, f(x) or a product is not finite.
    DerivativeError
        If ``f`` cannot be differentiated, or its two derivatives disagree.

    References
    ----------
    Documentation page "Influence: the blocks of the Jacobian".

    """
    f, x = _map_and_tokens(f, x)
    check_arguments(f, x, rtol, confidence, max_iterations)
    x = _one_sequence(x).detach()
    if isinstance(f, TokenMap):
        check_tokens(x, f)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ArgumentError("seed", expected="an integer from 0 to 2**64 - 1", got=repr(seed))
    jacobian = sequence_jacobian(f, x)
    shape = jacobian.out_shape
    if len(shape) not in (1, 2):
        raise ArgumentError(
            "f", expected="outputs of shape (n_out, d_out) or (d_out,)", got=f"shape {tuple(shape)}"
        )
    rows = _checked_outputs(outputs, shape[0] if len(shape) == 2 else 1)
    blocks = token_blocks(in_double(f), x.double()) if isinstance(f, TokenMap) else None
    seeds = member_seeds(seed, len(rows) * len(x))
    solver = Solver(rtol, confidence, max_iterations, seeds, [1] * len(seeds))
    chosen = torch.tensor(rows, device=x.device)
    norms = block_norms(jacobian if blocks is None else blocks, chosen, x.dtype, solver)
    closed = isinstance(f, TokenMap) and has_closed_form(f)
    return Influence(
        value=norms.value,
        lower=norms.lower,
        upper=norms.upper,
        converged=norms.converged,
        iterations=norms.iterations,
        outputs=tuple(rows),
        token_wise=token_wise_lipschitz(f, x, jacobian, norms, rows, rtol=min(rtol, 1e-3), seed=seed),
        confidence=confidence,
        method="closed form" if closed else "autodiff",
        scope=f.describe() if isinstance(f, TokenMap) else getattr(f, "__name__", type(f).__name__),
        rtol=rtol,
        seed=seed,
        token_outputs=len(shape) == 2 and shape[0] == len(x),
    )


def _map_and_tokens(f: Any, x: Tensor | None) -> tuple[Any, Any]:
    """Return the map and the tokens; a captured site is split into its map and its tokens."""
    if not isinstance(f, TokenMap) and isinstance(f, SiteLike):
        return f.map, f.x if x is None else x
    if x is None:
        raise ArgumentError("x", expected="tokens (n, d), for a map that is no captured site", got="None")
    return f, x


def _one_sequence(x: Tensor) -> Float[Tensor, "n d"]:
    if x.ndim == 2:
        return x
    if x.ndim == 3 and len(x) == 1:
        return x[0]
    raise ArgumentError(
        "x",
        expected="the tokens (n, d) of one sequence",
        got=f"shape {tuple(x.shape)}",
        remedy="Take one sequence, as in influence(site.map, site.x[0]).",
    )


def _checked_outputs(outputs: object, count: int) -> list[int]:
    """Return the indices >= 0 of the chosen ones among ``count`` output tokens."""
    expected = f"indices of the {count} output tokens, each once, from {-count} to {count - 1}"
    if outputs is None:
        return list(range(count))
    if isinstance(outputs, slice):
        chosen = list(range(count))[outputs]
    else:
        try:
            given: Any = outputs if isinstance(outputs, Iterable) else [outputs]
            chosen = [operator.index(i) for i in given]
        except TypeError:
            raise ArgumentError("outputs", expected=expected, got=repr(outputs)) from None
        chosen = [i % count for i in chosen] if all(-count <= i < count for i in chosen) else []
    if not chosen or len(set(chosen)) < len(chosen):
        raise ArgumentError("outputs", expected=expected, got=repr(outputs))
    return chosen
