"""Discrete probability measures: weighted atoms, with positions for masked attention."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree
from torch import Tensor

from howsmooth.attention import AbstractMeasure, TokenMap, Weighting
from howsmooth.attention.map import check_measure
from howsmooth.errors import ArgumentError
from howsmooth.measures.checks import check_numbers

__all__ = ["DiscreteMeasure"]

# Weights are asked to sum to one within this, then made to do so exactly.
_MASS = 1e-6


class DiscreteMeasure(AbstractMeasure):
    """Σ_j a_j δ_{x_j} on R^d, or Σ_j a_j δ_{(s_j, x_j)} on [0, 1] × R^d for masked attention.

    A map called on it moves the atoms and keeps weights and positions: the push-forward by mean-field
    attention (Definitions 2.4, 2.6 and C.4 of Castin et al., 2024). On equal weights it is the map on tokens.

    Parameters
    ----------
    points
        Atoms (n, d), float32 or float64, finite. They may coincide, and keep their gradient.
    weights
        (n,), float32 or float64, each > 0, their sum one within 1e-6; 1/n by default.
    log_weights
        Natural logarithms of the weights, in their place: for weights below 1e-308.
    positions
        (n,) in [0, 1]: the first coordinate of Definition 2.6, seen by causal maps only.

    Attributes
    ----------
    points
        Atoms (n, d).
    log_weights, weights
        (n,), float64, normalised; ``weights`` are their exponentials, which may underflow.
    positions
        (n,), float64, or None.

    Raises
    ------
    ArgumentError
        If an argument does not fit; the message names it.
    NonFiniteError
        If an entry is NaN or infinite.

    """

    def __init__(
        self,
        points: object,
        weights: object = None,
        *,
        log_weights: object = None,
        positions: object = None,
    ) -> None:
        self.points: Float[Tensor, "n d"] = _check_points(points)
        like = self.points
        if weights is not None and log_weights is not None:
            raise ArgumentError(
                "log_weights", expected="weights or log_weights", got="both", remedy="Give one of the two."
            )
        if weights is not None:
            logs = _check_weights(_check_vector("weights", weights, like))
            _check_mass("weights", logs)
        elif log_weights is not None:
            logs = _check_vector("log_weights", log_weights, like).double()
            _check_mass("log_weights", logs)
        else:
            logs = torch.zeros(like.shape[0], dtype=torch.float64, device=like.device)
        self.log_weights: Float[Tensor, " n"] = logs - torch.logsumexp(logs, dim=0)
        self.positions: Float[Tensor, " n"] | None = None
        if positions is not None:
            self.positions = _check_positions(_check_vector("positions", positions, like).double())

    @classmethod
    def sequence(cls, X: object) -> DiscreteMeasure:
        """Return the empirical measure of tokens X (n, d) at the positions 1/n, 2/n, …, 1.

        A causal map moves it as the same map moves the tokens X in their order.
        """
        points = _check_points(X, name="X")
        n = points.shape[0]
        positions = torch.arange(1, n + 1, dtype=torch.float64, device=points.device) / n
        return cls(points, positions=positions)

    # ---- what it is

    @property
    def n(self) -> int:
        """Number of atoms."""
        return self.points.shape[0]

    @property
    def d(self) -> int:
        """Dimension of an atom."""
        return self.points.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the atoms."""
        return self.points.dtype

    @property
    def device(self) -> torch.device:
        """Device of the atoms."""
        return self.points.device

    @property
    def weights(self) -> Float[Tensor, " n"]:
        """Weights, float64; those below about 1e-308 come out as less than they are, down to zero."""
        return self.log_weights.exp()

    @property
    def mean(self) -> Float[Tensor, " d"]:
        """Σ_j a_j x_j."""
        return self.weights.to(self.dtype) @ self.points

    @property
    def covariance(self) -> Float[Tensor, "d d"]:
        """Σ_j a_j (x_j − mean)(x_j − mean)ᵀ."""
        centred = self.points - self.mean
        return (self.weights.to(self.dtype)[:, None] * centred).mT @ centred

    def __repr__(self) -> str:
        positions = "" if self.positions is None else ", with positions"
        spread = float(self.log_weights.max() - self.log_weights.min())
        weights = "equal weights" if spread < 1e-12 else f"log-weights over a range of {spread:.3g}"
        return f"DiscreteMeasure(n={self.n}, d={self.d}, {weights}{positions})"

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> DiscreteMeasure:
        """Return the same measure with atoms of another dtype, or on another device; weights stay float64."""
        weighting = self._weighting().to(device=device)
        return self._rebuilt(self.points.to(dtype=dtype, device=device), weighting)

    # ---- what is done with it

    def weighted_tokens(self) -> tuple[Float[Tensor, "n d"], Weighting]:
        """Return the atoms with their weighting."""
        return self.points, self._weighting()

    def push_forward(self, f: TokenMap) -> DiscreteMeasure:
        """Return the image of the measure under ``f``; the same as ``f(measure)``.

        Raises
        ------
        ArgumentError
            If dimension, dtype or device differ, if ``f`` has a boolean mask or rotary positions, or if it is
            causal and the measure has no positions.

        """
        check_measure(self, f)
        weighting = self._weighting()
        return self._rebuilt(f._forward(self.points, weighting), weighting)

    def merged(self, tolerance: float = 0.0) -> DiscreteMeasure:
        """Return the measure with coinciding atoms of one position put together, their weights added.

        Atoms are joined when a chain of steps of at most ``tolerance`` leads from one to the other; they
        are put at their weighted mean. The order is that of the first atoms.

        Raises
        ------
        ArgumentError
            If the tolerance is not a finite number >= 0.

        """
        if not 0 <= tolerance < float("inf"):
            raise ArgumentError("tolerance", expected="a finite number >= 0", got=f"{tolerance}")
        group, count = self._groups(tolerance)
        if count == self.n:
            return self
        largest = torch.full((count,), -torch.inf, dtype=torch.float64, device=self.device)
        largest = largest.scatter_reduce(0, group, self.log_weights.detach(), "amax")
        shares = (self.log_weights - largest[group]).exp()
        totals = torch.zeros_like(largest).index_add(0, group, shares)
        # Around the first atom of each group, so that coinciding atoms stay where they are to the last bit.
        first = _first_members(group, count)
        shift = (shares / totals[group]).to(self.dtype)[:, None] * (self.points - self.points[first][group])
        points = self.points[first].index_add(0, group, shift)
        positions = None if self.positions is None else self.positions[first]
        return self._rebuilt(points, Weighting(largest + totals.log(), positions))

    def _groups(self, tolerance: float) -> tuple[Int[Tensor, " n"], int]:
        """Return the group of each atom, numbered in the order of first appearance, and their number."""
        points = self.points.detach().double().cpu()
        if self.positions is not None:
            # One more coordinate, in which different positions are further apart than the tolerance.
            _, level = torch.unique(self.positions.cpu(), return_inverse=True)
            points = torch.cat((level.double()[:, None] * (1.0 + 2.0 * tolerance), points), dim=1)
        if tolerance == 0.0:
            _, group = torch.unique(points, dim=0, return_inverse=True)
        else:
            i, j = cKDTree(points.numpy()).query_pairs(tolerance, output_type="ndarray").T
            graph = coo_array((np.ones(len(i)), (i, j)), shape=(self.n, self.n))
            group = torch.as_tensor(connected_components(graph, directed=False)[1], dtype=torch.int64)
        count = int(group.max()) + 1
        rank = torch.argsort(torch.argsort(_first_members(group, count)))
        return rank[group].to(self.device), count

    def _weighting(self) -> Weighting:
        return Weighting(self.log_weights, self.positions)

    def _rebuilt(self, points: Tensor, weighting: Weighting) -> DiscreteMeasure:
        built = DiscreteMeasure(points)
        # Neither checked nor normalised again: nothing has changed them.
        built.log_weights, built.positions = weighting.log_weights, weighting.positions
        return built


def _first_members(group: Int[Tensor, " n"], count: int) -> Int[Tensor, " groups"]:
    """Return the index of the first member of each group."""
    order = torch.arange(len(group), device=group.device)
    return torch.full((count,), len(group), device=group.device).scatter_reduce(0, group, order, "amin")


# ---- checks of arguments


def _check_points(points: object, name: str = "points") -> Tensor:
    if not isinstance(points, Tensor):
        raise ArgumentError(
            name,
            expected="a tensor of atoms (n, d)",
            got=type(points).__name__,
            remedy="Use torch.as_tensor.",
        )
    if points.ndim != 2 or points.numel() == 0:
        raise ArgumentError(
            name,
            expected="atoms (n, d) with n >= 1 and d >= 1",
            got=f"shape {tuple(points.shape)}",
            remedy="Put one atom in each row; for one atom write x[None, :].",
        )
    check_numbers(name, points)
    return points


def _check_vector(name: str, value: object, points: Tensor) -> Tensor:
    """Return ``value``, after checking that it holds one finite number for each atom."""
    n = points.shape[0]
    if not isinstance(value, Tensor):
        raise ArgumentError(
            name, expected=f"a tensor ({n},)", got=type(value).__name__, remedy="Use torch.as_tensor."
        )
    if value.shape != (n,):
        raise ArgumentError(
            name, expected=f"shape ({n},), one number for each atom", got=f"shape {tuple(value.shape)}"
        )
    if value.device != points.device:
        raise ArgumentError(name, expected=f"a tensor on {points.device}, as points", got=str(value.device))
    check_numbers(name, value)
    return value


def _check_weights(weights: Tensor) -> Tensor:
    """Return the logarithms of weights, float64."""
    smallest = float(weights.min())
    if smallest < torch.finfo(weights.dtype).tiny:
        if smallest > 0:
            remedy = f"Numbers so small have lost digits in {weights.dtype}: give log_weights."
        else:
            remedy = "Leave out atoms of weight zero." if smallest == 0 else ""
        raise ArgumentError("weights", expected="positive numbers", got=f"{smallest:g}", remedy=remedy)
    return weights.double().log()


def _check_mass(name: str, logs: Tensor) -> None:
    total = float(torch.logsumexp(logs.detach(), dim=0))
    if abs(total) > _MASS:
        got = f"a sum of {math.exp(total):.9g}" if abs(total) < 700 else f"a sum of exp({total:.9g})"
        raise ArgumentError(
            name,
            expected="weights that sum to one",
            got=got,
            remedy="Divide weights by their sum; from log_weights take their logsumexp.",
        )


def _check_positions(positions: Tensor) -> Tensor:
    if bool(((positions < 0) | (positions > 1)).any()):
        worst = positions[(positions - 0.5).abs().argmax()]
        raise ArgumentError(
            "positions",
            expected="numbers from 0 to 1",
            got=f"{float(worst):g}",
            remedy="For tokens in their order write DiscreteMeasure.sequence(X).",
        )
    return positions.detach()
