"""The function ``prediction_stability``: how far the residual stream may move until a prediction changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from howsmooth.bounds.certificates.norm_and_output_layer import prediction_radii
from howsmooth.errors import ArgumentError, check_number
from howsmooth.lipschitz import local_lipschitz
from howsmooth.models.capture import model_parts
from howsmooth.models.loading.tokenizers import Tokenizer
from howsmooth.printed_table import PrintedTable
from howsmooth.profiling import model_input
from howsmooth.profiling.robust_word_radii import WordRadii
from howsmooth.results.drawing import Figure, add_colourbar, logarithmic, new_figure, styled
from howsmooth.results.heatmaps import Cells
from howsmooth.results.page import frame, parts
from howsmooth.results.result import in_interval
from howsmooth.rounding import COLUMNS_IN_DIGITS, limit_in_digits
from howsmooth.seeds import derive_seed
from howsmooth.study.plans import PROFILE_RTOL, Plan
from howsmooth.study.ranges import Ranges
from howsmooth.study.records import plain_rows
from howsmooth.threads import renew_threads, with_fastest_threads
from howsmooth.words import readable, visible_token

__all__ = ["PredictionStability", "prediction_stability"]

_NOT_PROVED = "more than a norm layer and a linear output layer follows the last block"
_TOO_SURE = "the constants are below the numbers of the precision, so sure is the prediction"
_SHOWN, _LEVELS = 10, 9  # rows that are printed, and shades of a highlighted token
# Other tokens that are compared; steps of an attack, the most by which one grows, its excess of size, and the
# size from which it starts at most, in norms of the token.
_RIVALS, _STEPS, _GROWTH, _EXCESS, _FAR = 3, 16, 1.2, 1 + 1e-4, 16.0


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PredictionStability(model_input.InputResult):
    """How far the residual stream of a language model may move until KL(p ‖ p') of its prediction p is ε."""

    NAME: ClassVar[str] = "stability"
    TITLE: ClassVar[str] = "Stability of the prediction"
    WHAT: ClassVar[str] = "How far the residual stream may move before the prediction changes,"
    ALT: ClassVar[str] = "The constant of each block and token; the numbers are in the table."
    LEFT_OUT: ClassVar[str] = "not proved"
    FORMATS: ClassVar[Mapping[str, Callable[[float], str]]] = {**COLUMNS_IN_DIGITS, **WordRadii.FORMATS}

    #: One row for each block and token. Columns: ``layer`` (the block whose output moves), ``position``,
    #: ``token`` if the texts are known; ``value``, ``lower``, ``upper`` and ``converged``, the constant of
    #: the map from the stream to p in the metric of KL; ``predicted``, the size √(2ε) / value of a change
    #: with KL = ε to second order; ``attack``, the size of the smallest change found with KL >= ε;
    #: ``agrees``, whether they differ at most by a factor of two: else second order does not hold there;
    #: ``first_order``, the smallest distance, to first order (no bound), at which one of the next three
    #: tokens is the most likely one, and ``rival``, its id. After the last block also two proved radii, NaN
    #: elsewhere: ``radius``, where KL <= ε, and ``answer_radius``, where the most likely token stays.
    table: pd.DataFrame
    #: What is predicted at which position, and what the sizes are, in words.
    statement: str
    #: Probability with which each interval holds.
    confidence: float

    @property
    def citation(self) -> str:
        """One line to cite, with the largest constant, its interval and the sizes that belong to it."""
        largest = _in_words(plain_rows(self.table.nlargest(1, "value"))[0])
        return f"{self.input}: {self.statement} Largest constant: {largest}; {self._made_by}"

    def _lines(self) -> list[str]:
        said = f"{self.statement} Intervals of {self.confidence:.4g} confidence. The largest constants:"
        lines = [f"{self.title}, {self.length}, {self.precision}.", f"Input: {self.input}.", *wrap(said, 90)]
        return lines + [f"  {_in_words(row)}" for row in plain_rows(self.table.nlargest(_SHOWN, "value"))]

    @styled
    def plot(self) -> Figure:
        """Draw the constants as a heatmap, with a row for each block and a column for each token."""
        cells = self.table.pivot(index="layer", columns="position", values=["value", "converged"])
        values, places = cells["value"].to_numpy(float), list(cells["value"].columns)
        figure = new_figure(max(4.2, 1.9 + 0.24 * len(places)), max(2.6, 1.6 + 0.24 * len(values)))
        axis, norm = figure.subplots(), logarithmic(values)
        names = [visible_token(self.words[i]) if self.words else str(i) for i in places]
        look: dict[str, Any] = {"missed": ~cells["converged"].to_numpy(bool), "words": bool(self.words)}
        Cells(values, [*map(str, cells.index)], names, "moved token", "block", **look).draw(axis, norm)
        add_colourbar(figure, axis, norm, "√(2 KL) / size")
        return figure

    def _body(self, images: Mapping[str, str], most: int) -> list[str]:
        body, least = [parts().words(self.statement, "lead")], float(self.table["predicted"].min())
        for layer, rows in self.table.groupby("layer") if self.words and least > 0 else ():
            sizes = zip(rows["token"], rows["predicted"], strict=True)
            spans = [(round(_LEVELS * least / size), visible_token(w), f"{size:.3g}") for w, size in sizes]
            said = f"After block {layer}: the darker a token, the smaller the size that is predicted."
            body += [parts().words(said, "soft"), parts().tokens(spans)]
        return [*body, frame(self.table.head(most))]


def _in_words(row: Mapping[str, Any]) -> str:
    place = f"token {row['position']}" + (f" {readable(row['token'])!r}" if "token" in row else "")
    said = f"block {row['layer']}, {place}: "
    if row["value"] is None:
        said += f"first order {row['first_order']:.4g}"
    else:
        value = in_interval(row["value"], row["lower"], row["upper"], converged=row["converged"])
        holds = "" if row["agrees"] else " (second order does not hold)"
        attack = limit_in_digits(row["attack"], 4, upper=True).replace("inf", "none")
        said += f"{value}; predicted {row['predicted']:.4g}{holds}, attack {attack}"
    radius = "" if row["radius"] is None else limit_in_digits(row["radius"], 4, upper=False)
    return f"{said}, proved {radius}" if radius else said


@with_fastest_threads
def prediction_stability(
    model: model_input.Model,
    inputs: model_input.Inputs,
    *,
    layers: int | str | Sequence[int | str] = "all",
    positions: int | str | Sequence[int | str] | None = None,
    at: int = -1,
    epsilon: float = 0.1,
    span: slice | tuple[int, int] | str | None = None,
    tokenizer: Any = None,
    rtol: float = PROFILE_RTOL,
    confidence: float = Plan.confidence,
    max_iterations: int = Plan.max_iterations,
    seed: int = Plan.seed,
    on_token: Callable[[int, int], None] | None = None,
) -> PredictionStability:
    """Measure how far the residual stream of a language model may move before its prediction changes.

    With J the Jacobian of the logits by one token of the stream and F = diag(p) − p pᵀ, a small change δ has
    KL(p ‖ p') ≈ δᵀ Jᵀ F J δ / 2. The constant is the root of the largest eigenvalue of Jᵀ F J, which is the
    norm of R J with R = diag(√p)(I − 1 pᵀ), measured by :func:`howsmooth.local_lipschitz`. Proved radii:
    documentation page "Norm layers: radius, ellipsoid, absorption", section "A prediction that stays".

    Parameters
    ----------
    model, inputs, span, tokenizer
        A language model with logits over a vocabulary, and one input, as for :func:`howsmooth.profile`.
    layers, positions
        The blocks whose outputs move, and the tokens, each alone: a number, a range such as ``"1:3"`` (both
        ends included), a list of these, or "all". By default all blocks, and the token of ``at``.
    at, epsilon
        The position whose logits predict, by default the last: the next token, or in a masked language model
        its own; and the divergence ε in nats.
    rtol, confidence, max_iterations, seed
        As for :func:`howsmooth.local_lipschitz`.
    on_token
        As ``on_layer`` of :func:`howsmooth.profile`, with the numbers of pairs of a block and a token.

    Raises
    ------
    ArgumentError, CaptureError, ModelError
        As for :func:`howsmooth.profile`; also if it has no logits over a vocabulary.

    """
    epsilon = check_number("epsilon", epsilon)
    given = model_input.given_inputs(model_input.loaded_if_named(model, head=True), inputs, span, tokenizer)
    how: dict[str, Any] = {"rtol": rtol, "confidence": confidence, "max_iterations": max_iterations}
    origin, rows = given.origin(), list[dict[str, Any]]()
    of, progress = origin["model"], model_input.shown_progress(on_token, 0, "token")
    with model_parts(given.module, given.inputs) as whole, progress as told:
        blocks = whole.last_layers
        for layer in (stages := Ranges.parse(layers, "layers").resolve(len(blocks), of, "blocks")):
            rest = _Rest(whole.beyond(blocks[layer], "logits").map, at)
            moved = Ranges.parse(rest.at if positions is None else positions, "positions")
            tokens = moved.resolve(len(rest.x), of, "tokens")
            radii = rest.proved(epsilon) if layer == len(blocks) - 1 else None
            for token in tokens:
                told(len(rows), len(stages) * len(tokens))
                start = derive_seed(purpose="stability", seed=seed, layer=layer, scope=f"token {token}")
                row = rest.measured(token, epsilon, seed=start, **how)
                # Behind the last block, the prediction depends on its own token alone.
                proved = radii if radii is None or token == rest.at else (math.inf, math.inf)
                row["radius"], row["answer_radius"] = proved or (math.nan, math.nan)
                rows.append({"layer": layer, "position": token, **row})
        told(len(rows), len(rows))
        causal = all(layer.causal for layer in whole.layers)
    if len(rest.x) == 1:  # no mask shows it
        causal = getattr(given.module, "can_generate", lambda: False)()
    refused = [_NOT_PROVED] if radii is None and stages[-1] == len(blocks) - 1 else []
    refused += [_TOO_SURE] if rest.sure else []
    own: Any = tokenizer or getattr(given.model, "tokenizer", None)
    answer = (own if isinstance(own, Tokenizer) else Tokenizer(own)).decoded([int(rest.p.argmax())])[0]
    table, words = PrintedTable(rows), tuple(given.words or ())
    if words:
        table.insert(2, "token", [words[i] for i in table["position"]])
    return PredictionStability(
        **origin,
        table=table,
        statement=f"{'After' if causal else 'At'} token {rest.at}, {of} predicts {readable(answer)!r}, "
        f"p = {rest.p.max():.3g}. Predicted: the size of a change with KL = {epsilon:g} to second order; "
        "attack: the smallest found.",
        n=len(rest.x),
        confidence=confidence,
        words=words,
        refused=tuple(refused),
    )


class _Rest:
    """The rest of a language model after a block, from the tokens there to the logits at a position."""

    def __init__(self, found: Any, at: int) -> None:
        split: Any = found.readout() or (found, None)
        self.x, (self.body, self.head) = found.own.x, split
        (self.at,) = Ranges.parse(at, "at").resolve(len(self.x), found.describe(), "tokens")
        output_layer = getattr(found.own.model, "get_output_embeddings", lambda: True)()
        rows, vocabulary = found(self.x).shape
        if output_layer is None or rows < len(self.x) or vocabulary < 2:
            raise ArgumentError("model", expected="one with logits over a vocabulary", got=found.describe())
        self.log_p = self.moved(0, self.x[:1]).double().log_softmax(0)
        self.p = self.log_p.exp()
        others, finfo = self.log_p.sort().values[:-1].logsumexp(0).item(), torch.finfo(self.x.dtype)
        # The squares of the constants, which are of the size of p, must not vanish in the rounding.
        self.sure = others < math.log(finfo.tiny / finfo.eps)

    def moved(self, token: int, y: Float[Tensor, "1 d"]) -> Float[Tensor, " vocabulary"]:
        """Return the logits if a token of the stream is replaced."""
        row: Tensor = self.body(torch.cat((self.x[:token], y, self.x[token + 1 :])))[self.at]
        return row if self.head is None else self.head(row)

    @torch.enable_grad()
    def measured(self, token: int, epsilon: float, **how: Any) -> dict[str, Any]:
        """Return the row of the table of one token, without what is proved."""
        x, row = self.x[token : token + 1], dict.fromkeys(("value", "lower", "upper"), math.nan)
        row |= {"converged": False, "predicted": math.nan, "attack": math.nan, "agrees": False}
        p, roots, best = self.p.to(x.dtype), (self.log_p / 2).exp().to(x.dtype), int(self.p.argmax())

        def fisher(y: Tensor) -> Tensor:
            z = self.moved(token, y)
            z = z - z[best]  # so that nothing is lost if the prediction is sure
            return roots * (z - p @ z)

        y = x.clone().requires_grad_()
        z = self.moved(token, y)
        generic = torch.randn(len(z), generator=torch.Generator().manual_seed(0)).to(z)
        if not torch.autograd.grad(z @ generic, y, retain_graph=True)[0].any():  # it reaches no logit
            row |= {"value": 0.0, "lower": 0.0, "upper": 0.0, "converged": True, "agrees": True}
            row |= {"predicted": math.inf, "attack": math.inf}
        elif not self.sure:
            found = local_lipschitz(fisher, x, batch_dims=0, **how)
            (row,) = plain_rows(found.table[["value", "lower", "upper", "converged"]])
            size = math.sqrt(2 * epsilon) / row["value"] if row["value"] else math.inf
            attack = min(self.attack(token, s * found.input_direction, size, epsilon) for s in (1, -1))
            row |= {"predicted": size, "attack": attack, "agrees": attack / 2 <= size <= 2 * attack}
        top, *others = z.topk(min(1 + _RIVALS, len(z))).indices.tolist()
        slopes = [torch.autograd.grad(z[top] - z[i], y, retain_graph=True)[0].norm() for i in others]
        distances = ((z[top] - z[others]) / torch.stack(slopes)).nan_to_num(math.inf, math.inf)
        nearest = int(distances.argmin())
        return row | {"first_order": distances[nearest].item(), "rival": others[nearest]}

    def attack(self, token: int, direction: Float[Tensor, "1 d"], size: float, epsilon: float) -> float:
        """Turn a change towards the gradient of KL and scale it; return the smallest size with KL >= ε."""
        best, steps = math.inf, _STEPS if math.isfinite(size) else 0
        size = min(size, _FAR * self.x[token].norm().item())
        for _ in range(steps):
            renew_threads()
            change = (size * direction).requires_grad_()
            log_q = self.moved(token, self.x[token : token + 1] + change).double().log_softmax(0)
            found = self.p @ (self.log_p - log_q)
            (slope,), reached = torch.autograd.grad(found, change), found.item()
            best = min(best, size) if reached >= epsilon else best
            direction = normalize(direction + normalize(slope))
            # KL grows about as the square of the size.
            size *= _EXCESS * min(_GROWTH, math.sqrt(epsilon / max(reached, 1e-300)))
        return best

    def proved(self, epsilon: float) -> tuple[float, float] | None:
        """Return the proved radii of the token, or None if more than a norm and the output layer follows."""
        exact: Any = {"device": "cpu", "dtype": torch.float64}
        norm = self.head and self.body.to(**exact).as_norm()
        if norm is None:
            return None
        weight, bias = self.head.weight.to(**exact), self.head.bias
        bias = weight.new_zeros(len(weight)) if bias is None else bias.to(weight)
        return prediction_radii(norm, weight, bias, self.x[self.at].to(weight), epsilon)
