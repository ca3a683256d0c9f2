"""Discrete probability measures: weighted atoms, with positions if masked attention acts on them."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import AbstractMeasure, check_measure
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["DiscreteMeasure", "check_numbers"]

# The sum of the given weights may differ from one by this much; the weights are then normalised.
_MASS = 1e-6


class DiscreteMeasure(AbstractMeasure):
    """A discrete probability measure: atoms in R^d with weights that sum to one, and optional positions in
    [0, 1].

    It is Σ_j a_j δ_{x_j} or, with positions s_j for masked attention, Σ_j a_j δ_{(s_j, x_j)}.

    A map that is called on the measure moves its atoms and keeps weights and positions. This is the
    push-forward by mean-field attention (Definitions 2.4, 2.6 and C.4 of Castin et al., 2024). With equal
    weights, it agrees with the map on tokens.

    Parameters
    ----------
    points
        Atoms (n, d), float32 or float64, finite. Atoms may coincide. Gradients flow through them.
    weights
        Positive weights (n,), float32 or float64, whose sum is one up to 1e-6; by default 1/n each.
    log_weights
        Natural logarithms of the weights, instead of ``weights``, for weights that may be below 1e-308.
    positions
        Positions (n,) in [0, 1], the first coordinate in Definition 2.6. Only causal maps use them.

    Attributes
    ----------
    points
        Atoms (n, d).
    log_weights, weights
        Normalised log-weights and weights (n,), float64. ``weights`` may underflow.
    positions
        Positions (n,), float64, or None.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type, shape or value; the message names the argument.
    NonFiniteError
        If an argument contains NaN or infinity.

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
        """Return the empirical measure of tokens X (n, d), with the positions 1/n, 2/n, …, 1.

        A causal map moves its atoms exactly as it moves the tokens X.
        """
        points = _check_points(X, name="X")
        n = points.shape[0]
        positions = torch.arange(1, n + 1, dtype=torch.float64, device=points.device) / n
        return cls(points, positions=positions)

    # ---- properties

    @property
    def n(self) -> int:
        """The number of atoms of the measure."""
        return self.points.shape[0]

    @property
    def d(self) -> int:
        """The number of coordinates of each atom of the measure."""
        return self.points.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the atoms of the measure."""
        return self.points.dtype

    @property
    def device(self) -> torch.device:
        """The device of the atoms of the measure."""
        return self.points.device

    @property
    def weights(self) -> Float[Tensor, " n"]:
        """The weights of the atoms in float64. Weights below about 1e-308 lose digits or become zero."""
        return self.log_weights.exp()

    @property
    def mean(self) -> Float[Tensor, " d"]:
        """The mean Σ_j a_j x_j of the measure, with weights a_j and atoms x_j."""
        return self.weights.to(self.dtype) @ self.points

    @property
    def covariance(self) -> Float[Tensor, "d d"]:
        """The covariance Σ_j a_j (x_j − mean)(x_j − mean)ᵀ of the measure, with weights a_j and atoms x_j."""
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
        """Return the measure with atoms in another dtype or on another device; weights stay in float64."""
        weighting = self._weighting().to(device=device)
        return self._rebuilt(self.points.to(dtype=dtype, device=device), weighting)

    # ---- operations

    def weighted_tokens(self) -> tuple[Float[Tensor, "n d"], Weighting]:
        """Return the atoms of the measure as tokens, and an object with their log-weights and positions."""
        return self.points, self._weighting()

    def push_forward(self, f: TokenMap) -> DiscreteMeasure:
        """Return the image of the measure under the map ``f``. The atoms are mapped like tokens, with
        attention weighted by the weights of the atoms, and keep their weights.

        Raises
        ------
        ArgumentError
            If dimension, dtype or device of map and measure differ, if ``f`` has a boolean mask or rotary
            positions, or if ``f`` is causal and the measure has no positions.

        """
        check_measure(self, f)
        weighting = self._weighting()
        return self._rebuilt(f._forward(self.points, weighting), weighting)

    def merged(self, tolerance: float = 0.0) -> DiscreteMeasure:
        """Return the measure after merging equal atoms into one atom whose weight is the sum of their
        weights.

        Atoms at equal positions are merged if they are linked by a chain of atoms whose successive distances
        are at most ``tolerance``. The merged atom is at their weighted mean. The merged atoms are in the
        order of the first atoms of their groups.

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
        # The weights of a group are added relative to its largest weight, so that they do not underflow.
        largest = torch.full((count,), -torch.inf, dtype=torch.float64, device=self.device)
        largest = largest.scatter_reduce(0, group, self.log_weights.detach(), "amax")
        shares = (self.log_weights - largest[group]).exp()
        totals = torch.zeros_like(largest).index_add(0, group, shares)
        # The mean is computed relative to the first atom of each group, so that the mean of coinciding atoms
        # equals them to the last bit.
        first = _first_members(group, count)
        shift = (shares / totals[group]).to(self.dtype)[:, None] * (self.points - self.points[first][group])
        points = self.points[first].index_add(0, group, shift)
        positions = None if self.positions is None else self.positions[first]
        return self._rebuilt(points, Weighting(largest + totals.log(), positions))

    def _groups(self, tolerance: float) -> tuple[Int[Tensor, " n"], int]:
        """Return each atom's group to be merged, numbered by first atoms, and the number of groups."""
        points = self.points.detach().double().cpu()
        if self.positions is not None:
            # The position becomes one more coordinate, scaled so that different positions are further apart
            # than the tolerance.
            _, level = torch.unique(self.positions.cpu(), return_inverse=True)
            points = torch.cat((level.double()[:, None] * (1.0 + 2.0 * tolerance), points), dim=1)
        if tolerance == 0.0:
            _, group = torch.unique(points, dim=0, return_inverse=True)
        else:
            i, j = cKDTree(points.numpy()).query_pairs(tolerance, output_type="ndarray").T
            graph = coo_array((np.ones(len(i)), (i, j)), shape=(self.n, self.n))
            group = torch.as_tensor(connected_components(graph, directed=False)[1], dtype=torch.int64)
        count = int(group.max()) + 1
        # Number the groups in the order of their first atoms.
        rank = torch.argsort(torch.argsort(_first_members(group, count)))
        return rank[group].to(self.device), count

    def _weighting(self) -> Weighting:
        return Weighting(self.log_weights, self.positions)

    def _rebuilt(self, points: Tensor, weighting: Weighting) -> DiscreteMeasure:
        built = DiscreteMeasure(points)
        # Weights and positions were checked and normalised before, so this is not repeated.
        built.log_weights, built.positions = weighting.log_weights, weighting.positions
        return built


def _first_members(group: Int[Tensor, " n"], count: int) -> Int[Tensor, " groups"]:
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
    """Check that the weights of a measure are positive, and return their logarithms in float64."""
    smallest = float(weights.min())
    if smallest < torch.finfo(weights.dtype).tiny:
        if smallest > 0:
            remedy = f"Such small numbers have lost digits in {weights.dtype}; give log_weights instead."
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
            remedy="Divide weights by their sum; subtract from log_weights their logsumexp.",
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


def check_numbers(name: str, value: Tensor) -> None:
    """Raise ArgumentError unless the tensor ``value`` is float32 or float64, and NonFiniteError unless its
    numbers are finite.
    """
    if value.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(
            name,
            expected="float32 or float64",
            got=str(value.dtype),
            remedy="Convert it, for instance with .double().",
        )
    if not bool(torch.isfinite(value).all()):
        remedy = "Leave out atoms of weight zero." if name == "log_weights" else ""
        raise NonFiniteError(name, expected="finite numbers", got="NaN or infinity", remedy=remedy)
