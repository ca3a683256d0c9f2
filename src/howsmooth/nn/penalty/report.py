"""What a penalty found, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["LayerReport", "PenaltyReport"]


@dataclass(frozen=True, eq=False)
class LayerReport:
    """The singular values of one layer at the batch of the moment.

    Attributes
    ----------
    name
        Path of the layer in the model; with ``[i]`` behind for the i-th call, if it is called more than once.
    value
        (members,): lower estimates of ‖J‖ at each sequence.
    residual
        (members,): |J v − σ u| / σ.
    converged
        (members,): residual <= rtol. The value is then within residual · value of a singular value of J: of
        the leading one as a rule, which is certified by :meth:`SpectralPenalty.measure` alone.
    upper
        (members,): an upper limit of ‖J‖ of confidence 0.999 where directions began at random in this step;
        infinite elsewhere.
    """

    name: str
    value: Float[Tensor, " members"]
    residual: Float[Tensor, " members"]
    converged: Bool[Tensor, " members"]
    upper: Float[Tensor, " members"]


@dataclass(frozen=True, eq=False)
class PenaltyReport:
    """What one step of a penalty found; values are lower estimates, see ``converged``."""

    layers: tuple[LayerReport, ...]
    rtol: float

    @property
    def converged(self) -> bool:
        """Whether every pair of every layer has converged."""
        return all(bool(layer.converged.all()) for layer in self.layers)

    def constants(self) -> dict[str, float]:
        """Return the largest value of each layer, NaN where one has not converged: it is no constant then."""
        return {
            layer.name: float(layer.value.max()) if bool(layer.converged.all()) else float("nan")
            for layer in self.layers
        }

    def table(self) -> pd.DataFrame:
        """Return one row a layer: layer, members, mean, largest, residual (largest), converged (how many)."""
        rows = [
            {
                "layer": layer.name,
                "members": len(layer.value),
                "mean": float(layer.value.mean()),
                "largest": float(layer.value.max()),
                "residual": float(layer.residual.max()),
                "converged": int(layer.converged.sum()),
            }
            for layer in self.layers
        ]
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        missed = sum(int((~layer.converged).sum()) for layer in self.layers)
        of = sum(len(layer.value) for layer in self.layers)
        status = "all pairs converged" if not missed else f"{missed} of {of} pairs NOT converged"
        largest = torch.stack([layer.value.max() for layer in self.layers]).max()
        return (
            f"Lower estimates of the local Lipschitz constants of {len(self.layers)} layers, the largest "
            f"{float(largest):.4g}; {status} (relative residual <= {self.rtol:g})"
        )

    __repr__ = __str__
