"""The function ``influence``, which measures how far each output of a map moves if an input token moves, and
results that contain such a measurement.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from howsmooth.attention import TokenMap
from howsmooth.attention.map import check_tokens
from howsmooth.bounds.attention_parameters import SiteLike
from howsmooth.errors import ArgumentError
from howsmooth.jacobian.closed_form import has_closed_form, in_double
from howsmooth.jacobian.token_pair_blocks import token_blocks
from howsmooth.lipschitz.arguments import check_arguments
from howsmooth.lipschitz.block_norms import block_norms, sequence_jacobian
from howsmooth.lipschitz.maximum_token_norm import TokenWise, token_wise_lipschitz
from howsmooth.lipschitz.singular_value_solver import Solver, member_seeds
from howsmooth.lipschitz_estimate import Method
from howsmooth.models.capture import model_parts, module_of
from howsmooth.models.identification.model_part_map import ModelMap
from howsmooth.printed_table import PrintedTable
from howsmooth.profiling.leaked_tokens import Leaks, forbidden
from howsmooth.profiling.model_input import InputResult, given_inputs, loaded_if_named, shown_progress
from howsmooth.results.drawing import Figure, add_colourbar, logarithmic, new_figure, styled
from howsmooth.results.heatmaps import Cells
from howsmooth.results.page import parts
from howsmooth.results.result import Result
from howsmooth.rounding import interval_in_digits
from howsmooth.study.plans import INFLUENCE_RTOL, Plan
from howsmooth.study.records import plain_rows
from howsmooth.texts import Text
from howsmooth.threads import with_fastest_threads
from howsmooth.words import counted, function_name, readable

__all__ = ["Influence", "ResultWithInfluence", "as_last_step", "influence", "influence_at"]

_PRINTED = 10  # norms that a command prints; the table has all
_MOST_WORDS = 64
# Influences below this share of the largest have one colour.
_RANGE = 1e-4


@dataclass(frozen=True, eq=False, repr=False)
class Influence(Result):
    """The norms ‖∂y_i/∂x_j‖₂ of the blocks of a Jacobian, which say how far the output token y_i moves if the
    input token x_j moves.
    """

    NAME: ClassVar[str] = "influence"
    TITLE: ClassVar[str] = "Influence"

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
    #: The texts of the input tokens; empty if they are not known.
    words: tuple[str, ...] = ()
    #: The measured part of a model in words, and the name of an output that is no token; empty for a map.
    place: str = ""
    output: str = ""

    @property
    def table(self) -> pd.DataFrame:
        """One row for each pair of an output and an input token: ``output``, ``input``, ``value``, ``lower``,
        ``upper``, ``converged`` and, if the texts are known, ``output_token`` and ``input_token``.
        """
        rows, n = self.value.shape
        table = pd.DataFrame({"output": self.outputs}).loc[lambda t: t.index.repeat(n)]
        table["input"] = list(range(n)) * rows
        for name in ("value", "lower", "upper", "converged"):
            table[name] = getattr(self, name).flatten().numpy()
        for side in ("output", "input") if self.token_outputs else ("input",):
            if self.words:
                table[f"{side}_token"] = [self.words[i] for i in table[side]]
        return table.reset_index(drop=True)

    def leaks(self, documents: Tensor | Sequence[int | None] | None = None, *, causal: bool = True) -> Leaks:
        """Say whether other documents of a packed sequence, padding or the future reach a token, where and
        how far.

        ``documents`` are n numbers, one a token, with None or −1 for padding, whose own outputs do not count;
        None for one document. With ``causal``, a token must not influence an earlier one. ArgumentError: they
        do not fit, no influence must be zero, or the map has no output for each token.
        """
        if not self.token_outputs:
            raise ArgumentError("f", expected="an output for each token", got=self.output or self.scope)
        kinds = forbidden(documents, self.outputs, self.value.shape[1], causal=causal)
        table = self.table.assign(**{"from": kinds.flatten()})
        leaked = table[(table["from"] != "") & (table["upper"] > 0)].sort_values("value", ascending=False)
        return Leaks(PrintedTable(leaked.reset_index(drop=True)), int(np.count_nonzero(kinds)), self.scope)

    def __repr__(self) -> str:
        rows, n = self.value.shape
        i, j = divmod(int(self.value.argmax()), n)
        missed = int((~self.converged).sum())
        status = "all converged" if not missed else f"{missed} of {rows * n} NOT converged"
        ends = interval_in_digits(float(self.lower[i, j]), float(self.upper[i, j]))
        return (
            f"Influence({rows} outputs x {n} inputs, {status} to rtol = {self.rtol:g}; largest "
            f"{float(self.value[i, j]):.6g} in {ends}, of input {j} on output {self.outputs[i]}; token-wise "
            f"constant in {interval_in_digits(self.token_wise.lower, self.token_wise.upper)}; {self.scope}; "
            f"{self.method})"
        )

    def _parts(self, images: Mapping[str, str], most: int) -> list[str]:
        alt = "Heatmap of the influence of each input token on each output; the numbers are in influence.csv."
        return [parts().words(repr(self)), parts().picture(images[self.NAME], alt)]

    @styled
    def plot(self, words: Sequence[str] | None = None) -> Figure:
        """Draw the block norms as a heatmap, with a row for each output and a column for each input token.

        ``words`` are the texts of the n input tokens; by default those that are known, or numbers. An
        ArgumentError says that there are not n.
        """
        words = words if words is not None else self.words or None
        if words is not None and len(words) != self.value.shape[1]:
            expected = f"{self.value.shape[1]} words, one a token"
            raise ArgumentError("words", expected=expected, got=f"{len(words)}")
        value = self.value.numpy()
        rows, n = value.shape
        # Colours span four orders of magnitude; a norm of zero is white.
        shown = np.maximum(np.where(value > 0, value, np.nan), _RANGE * value.max())
        norm = logarithmic(shown)
        cell = 0.2 if words is not None and n <= _MOST_WORDS else max(0.02, min(0.2, 5.0 / n))
        figure = new_figure(max(4.2, 1.9 + cell * n), max(2.6, 1.4 + cell * rows))
        axis = figure.subplots()
        names = [str(j) for j in range(n)] if words is None else [readable(word) for word in words]
        # A single output that is no token, such as a margin, has no number of its own.
        alone = [""] if rows == 1 else [str(i) for i in self.outputs]
        Cells(
            shown,
            [names[i] for i in self.outputs] if self.token_outputs else alone,
            names,
            "input token, which is moved",
            "output token" if self.token_outputs else "output",
            missed=~self.converged.numpy(),
            words=words is not None,
            most=_MOST_WORDS if words is not None and max(rows, n) <= _MOST_WORDS else 24,
        ).draw(axis, norm)
        add_colourbar(figure, axis, norm, "‖∂y/∂x‖₂")
        return figure

    def described(self) -> dict[str, Any]:
        """Return the largest norms and the token-wise constant, as a dict for JSON."""
        return {
            "place": self.place,
            "rtol": self.rtol,
            "unconverged": int((~self.converged).sum()),
            "token_wise": {"lower": self.token_wise.lower, "upper": self.token_wise.upper},
            "largest": plain_rows(self.table.nlargest(_PRINTED, "value")),
        }

    def lines_of_largest(self) -> list[str]:
        """Return the largest norms as the lines of a table, with sentences above and below."""

        def token(row: dict[str, Any], side: str) -> str:
            if side == "output" and not self.token_outputs:
                return self.output or str(row[side])
            word = row.get(f"{side}_token", "")
            return f"{row[side]} {readable(word)!r}" if word else str(row[side])

        rows = [("moved token", "output", "moves by", "interval")]
        for row in self.described()["largest"]:
            ends = interval_in_digits(row["lower"], row["upper"], 4)
            status = "" if row["converged"] else " not converged"
            rows.append((token(row, "input"), token(row, "output"), f"{row['value']:.4g}", ends + status))
        missed = int((~self.converged).sum())
        status = f", of which {missed} did not reach rtol = {self.rtol:g}" if missed else ""
        left, middle, right = (max(len(row[i]) for row in rows) for i in range(3))
        return [
            "",
            f"Which token moves which, {self.place}: how far an output",
            "moves, to first order, if one token moves by 1. Each interval holds with",
            f"probability {self.confidence:.4g}. The largest {len(rows) - 1} of "
            f"{counted(self.value.numel(), 'norm')}{status}:",
            *(f"  {one:<{left}}  {two:<{middle}}  {three:>{right}}  {end}" for one, two, three, end in rows),
            "If all tokens move at once, each by at most 1, the largest move of an output",
            f"lies in {interval_in_digits(self.token_wise.lower, self.token_wise.upper, 4)}.",
        ]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ResultWithInfluence(InputResult):
    """Base class of results at one input that may also say how far each token moves each output."""

    #: Which token moves which; None where that was not measured.
    influence: Influence | None = None

    def _lines_of_influence(self) -> list[str]:
        return [] if self.influence is None else self.influence.lines_of_largest()

    def _tables(self) -> dict[str, pd.DataFrame]:
        return super()._tables() | ({} if self.influence is None else self.influence._tables())

    def _figures(self) -> dict[str, Figure]:
        return super()._figures() | ({} if self.influence is None else self.influence._figures())

    def _parts_of_influence(self, images: Mapping[str, str]) -> list[str]:
        found = self.influence
        if found is None:
            return []
        ends = interval_in_digits(found.token_wise.lower, found.token_wise.upper, digits=4)
        said = (
            "How far each output (row) moves, to first order, if an input token (column) moves by one. If "
            f"every token moves by at most one, the output that moves most moves by a distance in {ends}."
        )
        (_, picture) = found._parts(images, 0)
        return [parts().heading(f"Which token moves which, {found.place}"), parts().words(said), picture]


def as_last_step(
    on_step: Callable[[float, int], None] | None, steps: int
) -> Callable[[float, int], None] | None:
    """Return a progress callback that counts an influence as one further step after ``steps`` others."""
    if on_step is None:
        return None
    return lambda done, total: on_step(steps + done / total, steps + 1)


@with_fastest_threads
def influence(
    f: Any,
    x: Tensor | Mapping[str, Any] | str | Text | None = None,
    *,
    outputs: int | slice | Iterable[int] | None = None,
    rtol: float = INFLUENCE_RTOL,
    confidence: float = Plan.confidence,
    max_iterations: int = Plan.max_iterations,
    seed: int = Plan.seed,
    on_output: Callable[[float, int], None] | None = None,
) -> Influence:
    """Measure how far each output y_i of a map moves if an input token x_j moves: the norm ‖∂y_i/∂x_j‖₂ of a
    block of the Jacobian, for every i and j.

    For self-attention, with residual connections, norm layers and layer scales around it, the blocks have a
    closed form and are never stored as matrices; the memory is n² numbers for each head. For any other map
    they are stored, and computed by one product with the transposed Jacobian for each of the d_out
    coordinates of each output token (of the tokens before the output layer, for the logits of a model that
    ends with a linear one) or, if these are more than 2 n d, by n d products with the Jacobian.

    Parameters
    ----------
    f
        A captured site of one sequence; a map of this library; any differentiable PyTorch map of tokens
        (n, d) to tokens (n_out, d_out), or to one vector (d_out,), such as the logits at the last token; or
        a model or its name, which is taken from its embeddings to its last hidden state.
    x
        Tokens (n, d) or (1, n, d), float32 or float64; None for the tokens of a site; for a model a
        text, one sequence of token ids (1, n), or a dict of inputs, whose padding stays.
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
    on_output
        Called with the number of output tokens that are done, with a fraction for the current one, and the
        number of all. By default a progress bar is shown on a terminal and in a notebook.

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
    words: Sequence[str] | None = None
    if isinstance(f, str | os.PathLike) or isinstance(x, str | Text):
        of_model = given_inputs(loaded_if_named(f), x, None, None, longest=sys.maxsize)
        f, x, words = of_model.model, of_model.inputs, of_model.words
    f, given = _map_and_tokens(f, x)
    check_arguments(f, given, rtol, confidence, max_iterations)
    x = _one_sequence(given).detach()
    if isinstance(f, TokenMap):
        check_tokens(x, f)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ArgumentError("seed", expected="an integer from 0 to 2**64 - 1", got=repr(seed))
    double = in_double(f) if isinstance(f, TokenMap) else f
    jacobian = sequence_jacobian(double, x)
    shape = jacobian.out_shape
    if len(shape) not in (1, 2):
        expected = "outputs of shape (n_out, d_out) or (d_out,)"
        raise ArgumentError("f", expected=expected, got=f"shape {tuple(shape)}")
    rows = _checked_outputs(outputs, shape[0] if len(shape) == 2 else 1)
    blocks = token_blocks(double, x.double()) if isinstance(f, TokenMap) else None
    split = double.readout() if isinstance(double, ModelMap) else None
    inner, weight = (jacobian, None) if split is None else (sequence_jacobian(split[0], x), split[1].weight)
    solver = Solver(rtol, confidence, max_iterations, member_seeds(seed, len(rows) * len(x)))
    chosen = torch.tensor(rows, device=x.device)
    with shown_progress(on_output, len(rows), "output") as told:
        norms = block_norms(inner if blocks is None else blocks, chosen, x.dtype, solver, told, weight)
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
        scope=f.describe() if isinstance(f, TokenMap) else function_name(f),
        rtol=rtol,
        seed=seed,
        token_outputs=len(shape) == 2 and shape[0] == len(x),
        words=tuple(words or ()),
    )


def influence_at(
    site: Any, words: Sequence[str] | None, place: str, output: str = "", **options: Any
) -> Influence:
    """Measure how far tokens move outputs in a part of a model. Add the tokens' texts if all are known."""
    found = influence(site, **options)
    known = tuple(words or ()) if len(words or ()) == found.value.shape[1] else ()
    return replace(found, words=known, place=place, output=output)


def _map_and_tokens(f: Any, x: Any) -> tuple[Any, Any]:
    if not isinstance(f, TokenMap) and isinstance(f, SiteLike):
        return f.map, f.x if x is None else x
    if isinstance(x, Mapping) or (isinstance(x, Tensor) and not x.is_floating_point()):
        with model_parts(module_of(f), x, padded=True) as parts:
            return (site := parts.whole("hidden")).map, site.x
    if x is None:
        raise ArgumentError("x", expected="tokens (n, d), for a map that is no captured site", got="None")
    return f, x


def _one_sequence(x: Tensor) -> Float[Tensor, "n d"]:
    if x.ndim == 2:
        return x
    if x.ndim == 3 and len(x) == 1:
        return x[0]
    got, remedy = f"shape {tuple(x.shape)}", "Take one sequence, as in influence(site.map, site.x[0])."
    raise ArgumentError("x", expected="the tokens (n, d) of one sequence", got=got, remedy=remedy)


def _checked_outputs(outputs: object, count: int) -> list[int]:
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
