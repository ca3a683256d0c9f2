"""Checks of the arguments that users give to ``local_lipschitz``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.attention import TokenMap
from howsmooth.attention.map import check_tokens
from howsmooth.attention.theorem_preconditions import remedy_for_other_map
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["check_arguments", "check_batch_dims", "checked_sequences"]


def check_arguments(
    f: object,
    x: object,
    rtol: float,
    confidence: float,
    max_iterations: int,
    batch_dims: int | None = None,
) -> None:
    """Raise an error unless ``local_lipschitz`` can measure the map ``f`` at ``x`` with the given accuracy.
    The error names the argument that does not fit.

    The error is an ArgumentError or a NonFiniteError.
    """
    if not callable(f):
        raise ArgumentError(
            "f", expected="a map of one sequence of tokens", got=type(f).__name__, remedy=_remedy_for_site(f)
        )
    if not isinstance(x, Tensor):
        raise ArgumentError(
            "x",
            expected="a tensor (..., n, d)",
            got=type(x).__name__,
            remedy=_remedy_for_site(x) or "Use torch.as_tensor.",
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


def check_batch_dims(batch_dims: object, f: object, x: object) -> None:
    """Raise ArgumentError unless the first ``batch_dims`` axes of the input ``x`` can be its batch axes."""
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


def _remedy_for_site(given: object) -> str:
    """Return advice for callers of ``local_lipschitz`` who passed a captured attention layer or a head
    of ``hs.bounds`` instead of a map and tokens.

    A captured site is one attention layer of a model with its input. For a list of sites it says what to do
    with each. For anything else it is empty.
    """
    first = given[0] if isinstance(given, list | tuple) and given else given
    if not (hasattr(first, "map") and hasattr(first, "x")):
        return remedy_for_other_map(given)
    each = "" if first is given else " for each site of the list"
    return f"Measure the map of a captured site at its tokens, local_lipschitz(site.map, site.x){each}."


def checked_sequences(
    f: Callable[[Tensor], Tensor], xs: Sequence[object], rtol: float, confidence: float, max_iterations: int
) -> list[Tensor]:
    """Check that ``local_lipschitz`` can measure a list of sequences (n_i, d), and return them detached from
    autograd.

    The sequences must have one dtype and device.
    """
    if not xs:
        raise ArgumentError("x", expected="at least one sequence", got="none")
    checked: list[Tensor] = []
    for i, x in enumerate(xs):
        try:
            check_arguments(f, x, rtol, confidence, max_iterations)
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
