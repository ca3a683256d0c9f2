"""``Influence``: the norms of the blocks of a Jacobian, as tensors, a table, a figure and files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
from jaxtyping import Bool, Float, Int
from torch import Tensor

from howsmooth.errors import ArgumentError
from howsmooth.lipschitz.token_wise import TokenWise
from howsmooth.lipschitz_estimate import Method
from howsmooth.study.file_writing import csv_of, text_or_file, write_parquet
from howsmooth.study.html_assets import data_url, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Influence"]


@dataclass(frozen=True, eq=False, repr=False)
class Influence:
    """The block norms ‖∂y_i/∂x_j‖₂ of a Jacobian: how far token j, moved by one, moves output i."""

    #: The largest value found of each norm, (outputs, n), float64.
    value: Float[Tensor, "outputs n"]
    #: Lower limits of the norms.
    lower: Float[Tensor, "outputs n"]
    #: Upper limits of the norms; both are zero where no token can be moved, as under a mask.
    upper: Float[Tensor, "outputs n"]
    #: Whether an interval has converged: upper − lower <= rtol · value.
    converged: Bool[Tensor, "outputs n"]
    #: Number of Lanczos steps; zero for blocks that are zero.
    iterations: Int[Tensor, "outputs n"]
    #: The output tokens, one for each row.
    outputs: tuple[int, ...]
    #: How far any of these outputs moves if every input token moves by at most one.
    token_wise: TokenWise
    #: Probability with which the interval of each entry holds.
    confidence: float
    #: How the Jacobian was applied: "closed form" or "autodiff".
    method: Method
    #: A description of the measured map with its masks, residuals and norms.
    scope: str
    #: Relative width of the intervals that was asked for.
    rtol: float
    #: Seed of the random starts.
    seed: int
    #: Whether there is one output for each input token; false for the margin or the logits of a whole text.
    token_outputs: bool = True

    @property
    def table(self) -> pd.DataFrame:
        """One row for each entry: ``output``, ``input``, ``value``, ``lower``, ``upper``, ``converged``."""
        rows, n = self.value.shape
        table = pd.DataFrame({"output": self.outputs}).loc[lambda t: t.index.repeat(n)]
        table["input"] = list(range(n)) * rows
        for name in ("value", "lower", "upper", "converged"):
            table[name] = getattr(self, name).flatten().numpy()
        return table.reset_index(drop=True)

    def __repr__(self) -> str:
        rows, n = self.value.shape
        k = int(self.value.argmax())
        i, j = divmod(k, n)
        missed = int((~self.converged).sum())
        status = "all converged" if not missed else f"{missed} of {rows * n} NOT converged"
        return (
            f"Influence({rows} outputs x {n} inputs, {status} to rtol = {self.rtol:g}; largest "
            f"{float(self.value[i, j]):.6g} in [{float(self.lower[i, j]):.6g}, "
            f"{float(self.upper[i, j]):.6g}], of input {j} on output {self.outputs[i]}; token-wise constant "
            f"between {self.token_wise.lower:.6g} and {self.token_wise.upper:.6g}; {self.scope}; "
            f"{self.method})"
        )

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: a line of summary above the heatmap."""
        import html

        return (
            f'<p>{html.escape(repr(self))}</p><img src="{data_url(png(self.plot()))}" alt="Influence matrix">'
        )

    def plot(self, words: Sequence[str] | None = None) -> Figure:
        """Draw the values as a heatmap, with a row for each output and a column for each input token.

        Parameters
        ----------
        words
            The text of each of the n input tokens, as labels; None for their numbers.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ArgumentError
            If there are not n words.

        """
        from howsmooth.token_influence.heatmap import draw

        if words is not None and len(words) != self.value.shape[1]:
            raise ArgumentError(
                "words", expected=f"{self.value.shape[1]} words, one a token", got=f"{len(words)}"
            )
        return draw(self, words)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write the table as CSV to a file; without a path, return the CSV as text."""
        return text_or_file(csv_of(self.table), path)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the table as parquet; pandas reads the line of ``repr`` from its metadata, as ``attrs``.

        Raises
        ------
        ArgumentError
            If pandas has no engine for parquet.

        """
        write_parquet(self.table, path, repr(self))
