"""Appendix C.7: tokens at which the constant of attention grows like the square of their radius."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.attention import SelfAttention
from howsmooth.bounds import masked_n_free, masked_theorem_a, n_free, theorem_3_3, theorem_4_3, theorem_a
from howsmooth.bounds.parameters import Head, Parameters, parameters_of
from howsmooth.errors import ArgumentError
from howsmooth.reproduce.columns import Column, columns_of
from howsmooth.reproduce.drawing.quadratic_growth import IDENTITY, draw
from howsmooth.reproduce.experiment import Experiment, OnStep, Request, Step
from howsmooth.reproduce.finding import write_note
from howsmooth.reproduce.kept import Kept, Key
from howsmooth.reproduce.loading import remembering
from howsmooth.reproduce.subjects import Setting, bilinear, setting, usual_length
from howsmooth.study.plan import derive_seed
from howsmooth.study.ranges import Ranges
from howsmooth.study.tools import Tools

__all__ = ["QUADRATIC_GROWTH", "Balanced", "balanced"]

_LENGTHS = (3, 11, 101)
_MOST_LENGTHS = 4
_SAMPLES = 8
# ‖A‖R² at the radii: the constant is quadratic in R from about 10 on, with a causal mask from about 100.
_STRENGTHS = tuple(10 ** (-0.8 + 0.32 * step) for step in range(16))
_DIMENSION = 4
_RTOL = 1e-6


@dataclass(frozen=True, eq=False)
class Balanced:
    """The tokens of Appendix C.7 for one head: one or two zeros, the last token among them, and ±Ru in pairs.

    The last row of the attention sees all tokens alike, with or without a causal mask, and whatever the
    query bias, to which u is orthogonal.
    """

    head: Head
    u: Float64[Tensor, " d"]

    def tokens(self, n: int, radius: float) -> Float64[Tensor, "n d"]:
        """Return X, (n, d)."""
        pairs = (n - 1) // 2
        signs = torch.zeros(n, dtype=torch.float64)
        signs[: 2 * pairs : 2], signs[1 : 2 * pairs : 2] = 1.0, -1.0
        return radius * signs[:, None] * self.u

    def formula(self, n: int, radius: float) -> float:
        """Return ‖V(I/n + (m/n)R² u(Aᵀu)ᵀ)‖, m the number of tokens ±Ru: the last block of the Jacobian.

        A lower bound of ‖D_X f‖; for A = γI, V = I and odd n it is 1/n + γR²(n−1)/n.
        """
        head, m = self.head, 2 * ((n - 1) // 2)
        form = (self.u @ head.left) @ head.right
        block = head.V / n + (m / n * radius**2) * torch.outer(head.V @ self.u, form)
        return float(torch.linalg.matrix_norm(block, 2))

    def mean_field(self, n: int, radius: float, local: float) -> float:
        """Return max(‖D_X f‖, max_i ‖V C_i A‖), unmasked: the growth where atoms of a measure may split.

        The local constant of the mean-field map in W₂ at the measure of these tokens, so a lower bound of the
        constant on the ball (docs/theory/mean-field.md). C_i is the covariance that token i sees, here a
        multiple of uuᵀ.

        Parameters
        ----------
        n, radius
            Of the tokens.
        local
            ‖D_X f‖ at them.

        """
        head, x = self.head, self.tokens(n, radius)
        scores = (x @ head.right.mT @ head.left.mT + head.b) @ x.mT
        weights, places = torch.softmax(scores, dim=-1), x @ self.u
        spread = weights @ places**2 - (weights @ places) ** 2
        form = (self.u @ head.left) @ head.right
        size = float(torch.linalg.vector_norm(head.V @ self.u) * torch.linalg.vector_norm(form))
        return max(local, float(spread.max()) * size)


def balanced(head: Head) -> Balanced:
    """Choose u for a head: the best of singular vectors of A and V, made orthogonal to the query bias.

    Raises
    ------
    ArgumentError
        If scores or values are zero along all of them.

    """
    left, right = torch.linalg.qr(head.left), torch.linalg.qr(head.right.mT)
    inner = torch.linalg.svd(left.R @ right.R.mT)
    candidates = torch.cat([(left.Q @ inner.U)[:, :2], torch.linalg.svd(head.V).Vh[:2].mT], dim=1).mT
    if bool(head.b.any()):
        unit = head.b / torch.linalg.vector_norm(head.b)
        candidates = candidates - torch.outer(candidates @ unit, unit)
    sizes = torch.linalg.vector_norm(candidates, dim=1)
    candidates = candidates[sizes > 1e-6] / sizes[sizes > 1e-6, None]
    gains = torch.linalg.vector_norm(candidates @ head.V.mT, dim=1) * torch.linalg.vector_norm(
        candidates @ head.left @ head.right, dim=1
    )
    if not len(gains) or not float(gains.max()) > 0:
        raise ArgumentError("model", expected="heads whose scores and values are not zero", got=repr(head))
    return Balanced(head, candidates[int(gains.argmax())])


def _measure(request: Request, folder: Path, tools: Tools, on_step: OnStep) -> None:
    tools, kept = remembering(tools), Kept(folder / "units")
    lengths = _lengths(request)
    columns = columns_of(request, tools)
    # Time goes like the number of heads and the dimension; only shares matter.
    total = 1.0 + sum(column.width / 64 for column in columns)
    units: list[Key] = []
    for n in lengths:
        key: Key = {"model": IDENTITY, "layer": 0, "head": 0, "n": n, "seed": request.seed}
        units.append(key)
        if not kept.has(key):
            eye = torch.eye(_DIMENSION, dtype=torch.float64)
            identity = SelfAttention(eye[None], eye[None], eye[None], scale=1.0)
            kept.add(key, _rows(identity, key, None, tools))
    done = 1.0
    made: dict[str, str] = {}
    for column in columns:
        here = _setting(request, column, tools)
        made |= here.made()
        f, fingerprint, radius = _layer(here, column)
        for h in range(f.heads):
            on_step(Step(done + column.width / 64 * h / f.heads, total, f"{column.spec.label}, head {h}"))
            key = {
                "model": column.spec.label,
                "fingerprint": fingerprint,
                "texts": "; ".join(one.text.digest for one in here.subjects),
                "layer": column.layer,
                "head": h,
                "n": max(lengths),
                "samples": here.plan.samples,
                "seed": request.seed,
                "dtype": request.dtype,
            }
            units.append(key)
            if not kept.has(key):
                kept.add(key, _rows(f.head(h), key, radius, tools))
        done += column.width / 64
    on_step(Step(total, total, ""))
    write_note(folder, {"units": [dict(key) for key in units], "made": list(made.items())})


def _lengths(request: Request) -> list[int]:
    """Choose lengths that have room for a zero and a pair ±Ru; a few of many, as they hardly differ."""
    asked = sorted(request.lengths or _LENGTHS)
    there = [n for n in asked if n >= 3]
    if not there:
        raise ArgumentError(
            "lengths", expected="some of at least 3: a zero and a pair ±Ru", got=str(asked[-1])
        )
    places = torch.linspace(0, len(there) - 1, min(_MOST_LENGTHS, len(there))).round().int().tolist()
    return [there[place] for place in places]


def _setting(request: Request, column: Column, tools: Tools) -> Setting:
    layers = Ranges.parse(str(column.layer), "layers")
    length = usual_length(request, column.spec, tools)
    samples = request.samples or _SAMPLES
    return setting(request, column.spec, tools, lengths=(length,), samples=samples, layers=layers)


def _layer(here: Setting, column: Column) -> tuple[SelfAttention, str, float]:
    """Return the layer's attention, the fingerprint of its model, and the norm of real tokens there."""
    found, squares = None, []
    for subject in here.subjects:
        for _, tokens in here.sequences(subject):
            (site,) = here.sites(subject, tokens)
            squares.append(float((site.radius_mean**2).mean()))
            found = found or bilinear(site, column.spec.label)
    assert found is not None
    return found, here.subjects[0].fingerprint, math.sqrt(sum(squares) / len(squares))


def _rows(f: SelfAttention, key: Key, real: float | None, tools: Tools) -> list[dict[str, object]]:
    """Measure one head at its radii, and at the norm of real tokens if there is one."""
    parameters = parameters_of(f)
    head = parameters.one_head("quadratic growth")
    tokens = balanced(head)
    n = int(key["n"] or 0)
    rows: list[dict[str, object]] = []
    for radius, is_real in _radii(head, real):
        start = derive_seed(purpose="quadratic growth", radius=repr(radius), **key)
        found = tools.measure(f, tokens.tokens(n, radius), rtol=_RTOL, seed=start)
        value = float(found.value)
        rows.append(
            {
                "radius": radius,
                "real": is_real,
                "strength": head.A_norm * radius**2,
                "value": value,
                "lower": float(found.lower),
                "upper": float(found.upper),
                "converged": bool(found.converged),
                "formula": tokens.formula(n, radius),
                "mean_field": None if f.causal else tokens.mean_field(n, radius, value),
                "causal": f.causal,
                **dict(_uppers(parameters, n, radius)),
            }
        )
    return rows


def _radii(head: Head, real: float | None) -> list[tuple[float, bool]]:
    radii = [(math.sqrt(strength / head.A_norm), False) for strength in _STRENGTHS]
    return radii if real is None else [*radii, (real, True)]


def _uppers(parameters: Parameters, n: int, radius: float) -> Iterator[tuple[str, float]]:
    """Give logarithms of upper bounds on the ball: the paper's, the sharpest, and one for every n."""
    sharp, paper, free = (
        (masked_theorem_a, theorem_4_3, masked_n_free)
        if parameters.masking == "causal"
        else (theorem_a, theorem_3_3, n_free)
    )
    yield "log_sharp", sharp(parameters, n, radius).log_value
    yield "log_paper", paper(parameters, n, radius).log_value
    yield "log_free", free(parameters, radius).log_value


QUADRATIC_GROWTH = Experiment(
    name="quadratic-growth",
    title="Tokens at which the constant grows like R²",
    paper="Appendix C.7",
    about=(
        "One token (or two) at zero, all others balanced at ±Ru: the zero sees all tokens alike, however "
        "large R is, and its own block of the Jacobian is V(I/n + (m/n)R² uuᵀA), m the number of tokens "
        "±Ru. For A = γI, V = I and odd n this is 1/n + γR²(n−1)/n: attention is not Lipschitz on all "
        "sequences, not even on three tokens. Left, A = V = I; then every head of a layer of each model, "
        "with u the best of singular vectors of A and V, orthogonal to the query bias."
    ),
    measure=_measure,
    draw=draw,
)
