"""Checks of the arguments that users give to ``local_lipschitz``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from howsmooth.accuracy_limits import check_accuracy
from howsmooth.attention import TokenMap
from howsmooth.attention.map import AbstractMeasure, check_measure, check_tokens
from howsmooth.attention.theorem_preconditions import remedy_for_other_map
from howsmooth.errors import ArgumentError, NonFiniteError, check_whole
from howsmooth.jacobian.closed_form import has_closed_form

__all__ = ["check_arguments", "check_call"]


def check_call(
    f: Any,
    x: object,
    rtol: float,
    confidence: float,
    max_iterations: int,
    method: object,
    batch_dims: int | None,
) -> None:
    """Raise an error unless ``local_lipschitz`` can measure the map ``f`` at ``x``: tokens, a list of
    sequences, or a measure. The error, an ArgumentError or a NonFiniteError, names the argument.
    """
    if batch_dims is not None:
        _check_batch_dims(batch_dims, f, x)
    _check_map(f, x)
    if isinstance(x, AbstractMeasure):
        members: Sequence[object] = [x.weighted_tokens()[0].double()]
    else:
        members = x if isinstance(x, list | tuple) else [x]
    if not members:
        raise ArgumentError("x", expected="at least one sequence", got="none")
    for i, tokens in enumerate(members):
        try:
            _check_tokens(tokens, rtol, confidence, max_iterations, batch_dims)
            if members is x:
                _check_sequence(tokens, members[0])
            if isinstance(x, AbstractMeasure):
                check_measure(x, f)
            elif isinstance(f, TokenMap) and isinstance(tokens, Tensor):
                check_tokens(tokens, f)
        except ArgumentError as error:
            if members is not x or error.argument not in ("x", "X"):
                raise
            words = {"expected": error.expected, "got": error.got, "remedy": error.remedy}
            raise type(error)(f"x[{i}]", **words) from None
    refused = method == "closed form" and not has_closed_form(f)
    if refused or method not in ("auto", "closed form", "autodiff"):
        raise ArgumentError(
            "method",
            expected="'auto', 'closed form' or 'autodiff'",
            got=repr(method),
            remedy=f"{type(f).__name__} has no closed-form Jacobian; use 'autodiff'." if refused else "",
        )


def check_arguments(f: object, x: object, rtol: float, confidence: float, max_iterations: int) -> None:
    """Raise an ArgumentError or a NonFiniteError unless the map ``f`` can be measured at tokens ``x`` with
    the given accuracy. The error names the argument that does not fit.
    """
    _check_map(f, x)
    _check_tokens(x, rtol, confidence, max_iterations, None)


def _check_batch_dims(batch_dims: object, f: object, x: object) -> None:
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


def _check_map(f: object, x: object) -> None:
    if isinstance(x, AbstractMeasure) and not isinstance(f, TokenMap):
        raise ArgumentError(
            "f",
            expected="a map of howsmooth, which acts on measures",
            got=type(f).__name__,
            remedy="The constants of other maps are measured at tokens.",
        )
    if not callable(f):
        raise ArgumentError(
            "f", expected="a map of one sequence of tokens", got=type(f).__name__, remedy=_remedy_for_site(f)
        )


def _check_tokens(
    x: object, rtol: float, confidence: float, max_iterations: int, batch_dims: int | None
) -> None:
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
    check_whole("max_iterations", max_iterations)


def _check_sequence(x: object, first: object) -> None:
    assert isinstance(x, Tensor)
    assert isinstance(first, Tensor)
    if x.ndim != 2:
        raise ArgumentError("x", expected="tokens (n, d), as all in a list", got=f"shape {tuple(x.shape)}")
    if (x.dtype, x.device) != (first.dtype, first.device):
        expected = f"{first.dtype} on {first.device} as x[0]"
        raise ArgumentError("x", expected=expected, got=f"{x.dtype} on {x.device}")


def _remedy_for_site(given: object) -> str:
    """Say how to measure a captured site, a list of sites or a Head; otherwise return an empty text."""
    first = given[0] if isinstance(given, list | tuple) and given else given
    if not (hasattr(first, "map") and hasattr(first, "x")):
        return remedy_for_other_map(given)
    each = "" if first is given else " for each site of the list"
    return f"Measure the map of a captured site at its tokens, local_lipschitz(site.map, site.x){each}."
