"""The result of ``certify``: an upper bound on the Lipschitz constant of a model, computed module
by module.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import ArgumentError, NonFiniteError
from howsmooth.nn.certificates.module_propagation import Row
from howsmooth.roundoff import limit_in_digits

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ModelCertificate"]


@dataclass(frozen=True)
class ModelCertificate:
    """An upper bound on the Lipschitz constant of a model, with the constants of its modules.

    The bound refers to Frobenius norms and to inputs of ``length`` tokens of norm at most ``radius``. It
    holds in exact arithmetic, for the weights at the time of certification.

    Attributes
    ----------
    constant
        The bound: the product of the constants of all rows of level 0. It is printed rounded up, the rows are
        printed rounded to the nearest.
    length, radius
        Number of input tokens, and their largest norm.
    output_length, output_radius
        Number of output tokens, and an upper bound on their norms.
    rows
        One row for each module, in the order in which tokens pass through them; in a model with a forward of
        its own also for each operation that changes the constant or the norms.
    notes
        Sentences on what the bound does not cover.

    """

    constant: float
    length: int
    radius: float
    output_length: int
    output_radius: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def table(self) -> pd.DataFrame:
        """A table of the Lipschitz constants of the modules, from which the constant of the model is
        computed.

        The table has the columns path, kind, level, constant, radius_in, radius_out, length_in, length_out,
        source. Rows of level 0 are the factors. Rows of a deeper level belong to the branch of a residual or
        of a sum, whose own row follows them.
        """
        import pandas as pd

        columns = list(Row.__dataclass_fields__)
        return pd.DataFrame([asdict(row) for row in self.rows], columns=columns)

    def certified_radius(self, logits: Tensor, labels: Tensor | None = None) -> Float[Tensor, " inputs"]:
        """Return for each input the distance, in the Frobenius norm, within which its predicted class cannot
        change.

        The distance is the margin between the logit of the class and the largest other logit, divided by √2
        times the constant. It is zero if another logit is as large (Tsuzuku, Sato, Sugiyama,
        *Lipschitz-margin training*, NeurIPS 2018). The perturbed input must be covered by the certificate, so
        its tokens must have norm at most ``radius``.

        Parameters
        ----------
        logits
            Outputs of the model, (batch, classes).
        labels
            The class of each input, (batch,); None for the class with the largest logit.

        Returns
        -------
        Tensor
            Certified radii, float64, (batch,).

        Raises
        ------
        ArgumentError
            If logits or labels have a wrong type, shape or value.
        NonFiniteError
            If a logit is NaN or infinite.

        """
        if not isinstance(logits, Tensor):
            raise ArgumentError("logits", expected="a tensor (batch, classes)", got=type(logits).__name__)
        z = logits.detach().to(torch.float64)
        if z.ndim != 2 or z.shape[1] < 2:
            raise ArgumentError(
                "logits", expected="shape (batch, classes), classes >= 2", got=str(tuple(z.shape))
            )
        if not bool(torch.isfinite(z).all()):
            raise NonFiniteError("logits", expected="finite numbers", got="NaN or infinity")
        if labels is None:
            labels = z.argmax(dim=1)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
            got = str(labels.dtype) if isinstance(labels, Tensor) else type(labels).__name__
            raise ArgumentError("labels", expected="a tensor of whole numbers", got=got)
        if labels.shape != z.shape[:1]:
            raise ArgumentError(
                "labels",
                expected=f"one label for each of {len(z)} inputs",
                got=f"shape {tuple(labels.shape)}",
            )
        if len(z) and not bool(((labels >= 0) & (labels < z.shape[1])).all()):
            raise ArgumentError(
                "labels",
                expected=f"classes from 0 to {z.shape[1] - 1}",
                got=f"{labels.min()} to {labels.max()}",
            )
        labels = labels.to(z.device, torch.int64)
        own = z.gather(1, labels[:, None])[:, 0]
        others = z.scatter(1, labels[:, None], -math.inf).amax(dim=1)
        margin = (own - others).clamp(min=0.0)
        # The radii are rounded down. If the constant is zero, every positive margin gives an infinite radius.
        radii = margin / (math.sqrt(2) * self.constant) * (1 - 1e-12) if self.constant else margin * math.inf
        return torch.where(margin > 0, radii, 0.0)

    def __str__(self) -> str:
        everywhere = "" if math.isinf(self.radius) else f" of norm at most {self.radius:g}"
        shown = self.table[["path", "kind", "constant", "radius_in", "radius_out"]].copy()
        paths = ["  " * row.level + (row.path or "the model") for row in self.rows]
        shown["path"] = [path.ljust(max(map(len, paths))) for path in paths]
        table = shown.to_string(index=False, justify="left", float_format=lambda v: f"{v:.6g}")
        constant = limit_in_digits(self.constant, 6, upper=True)
        lines = [
            f"Lipschitz constant at most {constant} on {self.length} tokens{everywhere}",
            table if self.rows else "",
            *self.notes,
        ]
        return "\n".join(line for line in lines if line)
