"""Reports of a penalty: the leading singular values of the Jacobian of each layer."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from jaxtyping import Bool, Float
from torch import Tensor

from howsmooth.printed_table import PrintedTable

__all__ = ["LayerReport", "PenaltyReport"]


@dataclass(frozen=True, eq=False)
class LayerReport:
    """Estimates of the leading singular value of the Jacobian J of one layer at each sequence of the batch.

    ``name`` is the path of the layer in the model, followed by ``[i]`` for its further calls. ``scope`` is
    the part of the model: ``attention``, all heads with the output projection, or ``module``, the module of
    this name as it is. Each tensor has the shape (members,): ``value`` are lower estimates of ‖J‖,
    ``residual`` the relative residuals |J v − σ u| / σ, and ``converged`` says whether they are at most rtol.
    If so, the value differs from some singular value of J by at most residual · value. This is usually the
    leading one, but only :meth:`SpectralPenalty.measure` certifies it. ``upper`` are upper limits of ‖J‖ with
    probability 0.999 for directions that started at random in this step; infinite for the others.
    """

    name: str
    value: Float[Tensor, " members"]
    residual: Float[Tensor, " members"]
    converged: Bool[Tensor, " members"]
    upper: Float[Tensor, " members"]
    scope: str


@dataclass(frozen=True, eq=False)
class PenaltyReport:
    """The estimated leading singular values of all layers in one call of a penalty."""

    layers: tuple[LayerReport, ...]
    rtol: float

    @property
    def converged(self) -> bool:
        """True if the singular values and vectors of the Jacobians of all layers have converged."""
        return all(bool(layer.converged.all()) for layer in self.layers)

    def constants(self) -> dict[str, float]:
        """Return the largest singular value of each layer by name, or NaN if the layer has not converged."""
        return {
            layer.name: float(layer.value.max()) if bool(layer.converged.all()) else float("nan")
            for layer in self.layers
        }

    def table(self) -> pd.DataFrame:
        """Return a table with one row for each layer: singular values, residual and converged pairs."""
        rows = [
            {
                "layer": layer.name,
                "scope": layer.scope,
                "members": len(layer.value),
                "mean": float(layer.value.mean()),
                "largest": float(layer.value.max()),
                "residual": float(layer.residual.max()),
                "converged": int(layer.converged.sum()),
            }
            for layer in self.layers
        ]
        return PrintedTable(rows)

    def __str__(self) -> str:
        rows = self.table()
        missed, of = rows["members"].sum() - rows["converged"].sum(), rows["members"].sum()
        status = f"{missed} of {of} pairs have not converged, as is usual at new batches"
        return (
            f"Lower estimates of the local Lipschitz constants of {len(rows)} layers "
            f"(scope {', '.join(sorted(set(rows['scope'])))}), the largest {rows['largest'].max():.4g}; "
            f"{status if missed else 'all pairs converged'} (relative residual <= {self.rtol:g})\n{rows}"
        )

    __repr__ = __str__
