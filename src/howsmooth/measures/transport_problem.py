"""An optimal transport problem between weighted points, with a proved lower and upper limit of its optimal
cost.

The upper limit is the cost of a feasible plan, and the lower limit is the value of feasible potentials. Both
hold even if the solver failed. Derivations: documentation page "Maps on measures", section "Why the interval
of a distance holds".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.sparse import coo_array, csr_array
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist

from howsmooth.rounding import U

__all__ = ["TransportPlan", "TransportProblem"]

# Distance of neighbouring numbers between 1 and 2.
EPSILON = 2 * U
TINY = float(np.finfo(np.float64).tiny)

# Potentials are computed for blocks of rows with at most this many pairs of atoms.
_BLOCK_PAIRS = 1 << 22


@dataclass(frozen=True)
class TransportPlan:
    """A transport plan between two discrete measures: the mass that moves from each atom of the first measure
    to each atom of the second measure.

    The masses move from atoms ``rows`` to atoms ``columns``. ``unplaced`` is the mass that stays unmatched
    because the two sums of weights differ by rounding.
    """

    rows: Int[ndarray, " e"]
    columns: Int[ndarray, " e"]
    masses: Float[ndarray, " e"]
    unplaced: float = 0.0

    @classmethod
    def of_matrix(cls, matrix: Float[ndarray, "n m"]) -> TransportPlan:
        """Return the transport plan whose masses are the nonzero entries of ``matrix``."""
        rows, columns = np.nonzero(matrix)
        return cls(rows, columns, matrix[rows, columns])

    def matrix(self, shape: tuple[int, int]) -> csr_array:
        """Return the transport plan as a sparse matrix of masses."""
        return coo_array((self.masses, (self.rows, self.columns)), shape=shape).tocsr()


@dataclass(frozen=True)
class TransportProblem:
    """An optimal transport problem: move masses ``a`` at points ``x`` to masses ``b`` at points ``y`` at the
    lowest cost.

    Moving a unit of mass from x_i to y_j costs |x_i − y_j|^p.

    The masses ``a`` and ``b`` each sum to one up to rounding. The points are scaled so that no cost exceeds
    one.
    """

    x: Float[ndarray, "n d"]
    y: Float[ndarray, "m d"]
    a: Float[ndarray, " n"]
    b: Float[ndarray, " m"]
    p: float

    @cached_property
    def costs(self) -> Float[ndarray, "n m"]:
        """The transport costs |x_i − y_j|^p of all pairs of points.

        They are computed from differences of coordinates, so that close points lose no digits.
        """
        return self._power(cdist(self.x, self.y, "sqeuclidean" if self.p == 2 else "euclidean"))

    @property
    def rounding(self) -> float:
        """Upper bound on the relative rounding error of a transport cost |x − y|^p.

        The cost takes d squares, their sum, a root and a power.
        """
        return float((self.x.shape[1] + 8) * (self.p / 2 + 1) * EPSILON)

    def costs_of(self, plan: TransportPlan) -> Float[ndarray, " e"]:
        """Return the transport costs |x_i − y_j|^p for the pairs of points between which a plan moves mass.

        The cost of a positive distance never underflows to zero.
        """
        difference = self.x[plan.rows] - self.y[plan.columns]
        squares = np.einsum("ed,ed->e", difference, difference)
        costs = self._power(squares if self.p == 2 else np.sqrt(squares))
        return np.where(np.any(difference != 0, axis=1), np.maximum(costs, TINY), 0.0)

    def _power(self, distances: ndarray) -> ndarray:
        # For p = 2, ``distances`` are squared distances already.
        return distances if self.p in (1, 2) else distances**self.p

    # ---- the upper limit

    def repaired(self, plan: TransportPlan) -> TransportPlan:
        """Return a transport plan close to the given plan that moves exactly the masses ``a`` to the masses
        ``b``, up to rounding.

        Rows and columns with too much mass are scaled down. The missing mass is then added by the north-west
        corner rule (Altschuler, Weed and Rigollet 2017).
        """
        n, m = len(self.a), len(self.b)
        # First scale down heavy rows, then heavy columns; then no marginal is exceeded.
        masses = plan.masses * _shares(self.a, np.bincount(plan.rows, plan.masses, n))[plan.rows]
        masses = masses * _shares(self.b, np.bincount(plan.columns, masses, m))[plan.columns]
        left = np.maximum(self.a - np.bincount(plan.rows, masses, n), 0.0)
        right = np.maximum(self.b - np.bincount(plan.columns, masses, m), 0.0)
        rest = _corner(left, right)
        return TransportPlan(
            np.concatenate((plan.rows, rest.rows)),
            np.concatenate((plan.columns, rest.columns)),
            np.concatenate((masses, rest.masses)),
            unplaced=abs(math.fsum(left) - math.fsum(right)),
        )

    def cost_above(self, plan: TransportPlan) -> float:
        """Return the cost of a transport plan, rounded up, which is an upper limit of the optimal cost.

        Mass that the plan leaves unplaced is counted at the largest distance.
        """
        box = np.maximum(self.x.max(0), self.y.max(0)) - np.minimum(self.x.min(0), self.y.min(0))
        farthest = float(np.linalg.norm(box) ** self.p)
        moved = math.fsum(plan.masses * self.costs_of(plan))
        return (moved + plan.unplaced * farthest) * (1 + self.rounding)

    # ---- the lower limit

    def cost_below(
        self, right: Float[ndarray, " m"]
    ) -> tuple[float, Float[ndarray, " n"], Float[ndarray, " m"]]:
        """Return a lower limit of the optimal cost, with the dual potentials f and g that prove it.

        The potentials are f_i = min_j (c_ij − right_j) and g_j = min_i (c_ij − f_i). Since f_i + g_j <= c_ij,
        the value Σ a_i f_i + Σ b_j g_j is at most the cost of any plan. It is rounded down.
        """
        # Costs are lowered by their rounding, so that the potentials are feasible for the exact costs.
        f = np.empty(len(self.a))
        g = np.full(len(self.b), np.inf)
        for rows in self._blocks():
            block = self.costs[rows] * (1 - self.rounding)
            f[rows] = (block - right).min(axis=1)
            np.minimum(g, (block - f[rows, None]).min(axis=0), out=g)
        terms = np.concatenate((self.a * f, self.b * g))
        # The error of the sum is at most that of the potentials and of their products.
        return math.fsum(terms) - 4 * EPSILON * math.fsum(np.abs(terms)), f, g

    def nearest_below(self) -> float:
        """Return the cost of moving every mass to the nearest point of the other measure, a lower limit of
        the optimal cost.

        It is the value of the potentials f_i = min_j c_ij and g = 0, rounded down.
        """
        distances, _ = cKDTree(self.y).query(self.x)
        return math.fsum(self.a * distances**self.p) * (1 - self.rounding)

    def _blocks(self) -> Iterator[slice]:
        height = max(1, _BLOCK_PAIRS // len(self.b))
        return (slice(i, i + height) for i in range(0, len(self.a), height))


def _shares(wanted: ndarray, carried: ndarray) -> ndarray:
    """Return factors <= 1 that scale down rows (or columns) which move more mass than ``wanted``."""
    shares: ndarray = np.minimum(1.0, wanted / np.maximum(carried, TINY))
    return shares


def _corner(left: ndarray, right: ndarray) -> TransportPlan:
    """Return a transport plan between the given masses, constructed by the north-west corner rule."""
    # Both marginals are laid out as intervals on one line. Each overlap of a left and a right interval
    # becomes one entry.
    rows, columns = np.flatnonzero(left), np.flatnonzero(right)
    ends_left, ends_right = np.cumsum(left[rows]), np.cumsum(right[columns])
    if not (len(rows) and len(columns)):
        return TransportPlan(rows[:0], columns[:0], left[:0])
    ends = np.unique(np.concatenate((ends_left, ends_right)))
    ends = ends[ends <= min(ends_left[-1], ends_right[-1])]
    masses = np.diff(ends, prepend=0.0)
    return TransportPlan(
        rows[np.searchsorted(ends_left, ends)], columns[np.searchsorted(ends_right, ends)], masses
    )
