"""Proved radii of a token before a norm layer and an output layer, as after the last block of a model."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention import LayerNorm, RMSNorm
from howsmooth.bounds.certificates.rounded_attention import AfterNorm
from howsmooth.rounding import U, above, below, entries_of, gamma, known_to, plain, spectral_norm_above

__all__ = ["prediction_radii"]


def prediction_radii(
    norm: LayerNorm | RMSNorm,
    weight: Float[Tensor, "vocabulary d"],
    bias: Float[Tensor, " vocabulary"],
    x: Float[Tensor, " d"],
    epsilon: float,
) -> tuple[float, float]:
    """Return two proved radii of a token x before a norm layer and an output layer, all in float64.

    If x moves by no more than the first, the divergence KL(p ‖ p') of the softmax is at most ``epsilon``; if
    by no more than the second, the largest logit stays the largest. Proof: documentation page "Norm layers:
    radius, ellipsoid, absorption", section "A prediction that stays".
    """
    if torch.equal(weight, weight[:1].expand_as(weight)):  # all logits move alike
        return math.inf, math.inf
    after = AfterNorm.of(norm, x[None])
    token = known_to(after.t[0], after.errors[0])
    logits = known_to(weight) @ token + known_to(bias)
    p, answer = torch.softmax(logits, 0), int(plain(logits).argmax())

    def on_unit_vectors(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows of a matrix times the derivative of the norm layer, their errors and sizes."""
        rows, scaled = after.on_tokens(matrix), torch.linalg.vector_norm(matrix * after.gain, dim=1)
        # Entries of the rows have d + 6 roundings of |W g| and of its mean, and those of W one.
        errors = 2 * gamma(len(x) + 9) * scaled
        return rows, errors, above(torch.linalg.vector_norm(rows, dim=1), len(x) + 2) + 1.01 * errors

    others = torch.arange(len(weight)) != answer
    apart = known_to(weight[answer]) - known_to(weight[others])
    margin = apart @ token + (known_to(bias[answer]) - known_to(bias[others]))
    ratio = (plain(margin) - entries_of(margin)) / on_unit_vectors(plain(apart))[2].clamp_min(1e-300)
    rows, errors, size = on_unit_vectors(weight - plain(p) @ weight)

    def allowed(chord: float) -> float:
        """Return up to which chord KL <= ε, if it is no longer than ``chord``."""
        t = chord * size
        # From 0.01 on, the subtraction makes a relative error 200 times larger at most.
        large = (t.expm1() - t) / t.square().clamp_min(1e-9)
        growth = above(torch.where(t < 0.01, 0.5 + t / 6 + t.square() * t.exp() / 24, large), 4000)
        weights = above(((plain(p) + entries_of(p)) * growth).sqrt(), 8)
        lost = torch.linalg.vector_norm(weights * (errors + 2 * U * size))
        found = spectral_norm_above(weights[:, None] * rows) + 1.01 * float(lost)
        return below(math.sqrt(epsilon), 2) / above(found, len(p) + 8) if found < math.inf else 0.0

    # Logits move by at most the chord times their sizes: Hoeffding's lemma proves a first one.
    close = below(math.sqrt(2 * epsilon) / float(size.amax()), 8)
    chord = far = min(allowed(0.0), 2.0)
    for _ in range(6):
        shorter, longer = sorted((chord, allowed(chord)))
        close, far = max(close, shorter), min(far, longer)
        chord = math.sqrt(close * far)
    # The chord c of an angle up to a right one has the sine c √(1 − c²/4).
    chords = (min(max(chord, 0.0), math.sqrt(2)) for chord in (close, float(ratio.amin())))
    radius, of_answer = (below(c * math.sqrt(1 - c * c / 4) / float(after.columns), 16) for c in chords)
    return radius, of_answer
