"""Tokens at which ‖D_X f‖ is provably large: one or two tokens that get most of the attention, and many
copies of another token.

The lower bounds in ``howsmooth.bounds.ball_lower_bounds`` evaluate a lemma at these tokens, and
``howsmooth.adversarial`` uses them as inputs. Derivations: documentation page "Worst inputs, and lower
bounds".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from howsmooth.bounds.attention_parameters import Head
from howsmooth.bounds.log_numbers import Log

__all__ = [
    "HeavyTokens", "light_rows", "log_tie", "score_vectors", "searched_pairs", "searched_tokens",
    "spread_directions", "two_cluster_line", "two_cluster_points",
]  # fmt: skip

# Steps of the searches for one heavy token and for two.
_GAP_STEPS = 200
_PAIR_STEPS = 150


@dataclass(frozen=True, eq=False)
class HeavyTokens:
    """A sequence of some heavy tokens, which get most of the attention, and many copies of a light token."""

    heavies: Float64[Tensor, "c d"]
    light: Float64[Tensor, " d"]

    def tokens(self, length: int) -> Float64[Tensor, "n d"]:
        """Return the whole sequence (length, d)."""
        return torch.cat([self.heavies, self.light.expand(length - len(self.heavies), -1)])


def score_vectors(head: Head, x: Float64[Tensor, "*n d"]) -> Float64[Tensor, "*n d"]:
    """Return the vector A x_i + b of each token x_i. Its inner products with the tokens are the scores."""
    y: Tensor = (x @ head.right.mT) @ head.left.mT + head.b
    return y


def light_rows(n: int, heavies: int, *, causal: bool, grouped: bool = False) -> tuple[Tensor, Tensor]:
    """Return the logs of two numbers for each kind of light token, which gets little attention: how many
    light tokens it sees, and how many light tokens are of this kind.

    Without a mask all see all of them, with a causal one 1, 2, … of them. Many rows of nearly equal numbers
    may be ``grouped``.
    """
    m = n - heavies
    if not causal:
        log_m = Log.of(m).log[None]
        return log_m, log_m
    if m <= 512 or not grouped:
        log_m = torch.arange(1, m + 1, dtype=torch.float64).log()
        return log_m, torch.zeros_like(log_m)
    edges = torch.linspace(0.0, math.log(m), 129, dtype=torch.float64)
    return (edges[1:] + edges[:-1]) / 2, edges[1:] + torch.log(-torch.expm1(edges[:-1] - edges[1:]))


def two_cluster_line(head: Head, choice: str = "paper") -> tuple[float, Tensor, float] | None:
    """Return a real eigenvalue of the score matrix A, its unit eigenvector u, and a number s: the light token
    of Proposition 3.4 is su if the heavy token is u.

    The number s is 1/2 for γ_max, the choice "max", and −1 for γ_min, the choice "min". The choice "paper"
    compares γ_max/8 with −γ_min and takes the larger. The result is None if A has no real eigenvalue.
    """
    pairs = head.real_eigenpairs
    if not pairs:
        return None
    (low, _), (high, _) = pairs[0], pairs[-1]
    if choice == "max" or (choice == "paper" and high / 8 >= -low):
        return *pairs[-1], 0.5
    return *pairs[0], -1.0


def two_cluster_points(head: Head, radius: float, choice: str = "paper") -> HeavyTokens | None:
    """Return the two tokens of Proposition 3.4: Ru and Ru/2, or Ru and −Ru, for a unit eigenvector u of A.

    With a query bias, u and −u differ, and the one that gives the heavy token more weight is used.
    """
    line = two_cluster_line(head, choice)
    if line is None:
        return None
    _, u, ratio = line
    heavies = radius * torch.stack([u, -u])
    gains = ((score_vectors(head, ratio * heavies)) * (1 - ratio) * heavies).sum(1)
    heavy = heavies[int(gains[1] > gains[0])]
    return HeavyTokens(heavy[None], ratio * heavy)


def searched_tokens(head: Head, radius: float) -> list[HeavyTokens]:
    """Search the ball for pairs of a light token w and a heavy token z, such that w gives most of its
    attention to z.

    The gap ⟨A w + b, z − w⟩ is maximised locally. For a given w the best z is radius · y/|y|, where y = A w +
    b. The search finds w by projected gradient ascent from singular vectors of A, eigenvectors of its
    symmetric part, and its real eigenvectors. Pairs are sorted, best first.
    """
    w = radius * _starts(head)
    size = 0.25 * radius / max(head.A_norm + head.b_norm / radius, 1e-300) / radius
    step = torch.full((len(w), 1), size, dtype=torch.float64)
    value = _gap(head, w, radius)
    for _ in range(_GAP_STEPS):
        y = score_vectors(head, w)
        z = radius * _unit(y)
        gradient = ((z - w) @ head.left) @ head.right - y
        trial = _into_ball(w + step * gradient, radius)
        raised = _gap(head, trial, radius)
        better = (raised > value)[:, None]
        w = torch.where(better, trial, w)
        value = torch.where(better[:, 0], raised, value)
        step = torch.where(better, 1.5 * step, 0.3 * step)
    order = torch.argsort(value, descending=True, stable=True).tolist()
    return [HeavyTokens(radius * _unit(score_vectors(head, w[i : i + 1])), w[i]) for i in order]


def log_tie(
    head: Head,
    heavies: Float64[Tensor, "2 *batch d"],
    light: Float64[Tensor, "*batch d"],
    log_m: Float64[Tensor, "rows *ones"],
    log_rows: Float64[Tensor, "rows *ones"],
) -> tuple[Float64[Tensor, "*batch"], Float64[Tensor, "rows *batch"]]:
    """Return the log of a lower bound on ‖D_X f‖ at two heavy tokens of equal scores, and the logs of the
    attention weights p of light tokens on each heavy token.

    With y = A w + b for the light token w and half the difference h of the heavy tokens, orthogonal to y, it
    is √(2 Σ_rows p²) |y| |V h|. ``log_m`` and ``log_rows`` are those of :func:`light_rows`.
    """
    y, norm = score_vectors(head, light), torch.linalg.vector_norm
    gap = (y * (heavies.mean(dim=0) - light)).sum(-1)
    log_p = -torch.logaddexp(torch.tensor(math.log(2), dtype=torch.float64), log_m - gap)
    rows = torch.logsumexp(2 * log_p + log_rows, dim=0)
    sizes = norm(y, dim=-1).log() + norm((heavies[0] - heavies[1]) @ head.V.mT / 2, dim=-1).log()
    return 0.5 * (math.log(2) + rows) + sizes, log_p


def searched_pairs(head: Head, length: int, radius: float, *, masked: bool) -> list[HeavyTokens]:
    """Search for sequences in which two tokens get equal and large attention weights from all other tokens.

    They give a large lower bound on ‖D_X f‖. The sequences are sorted, best first. With y = A w + b for the
    light token w, the heavy tokens are R(cosθ ŷ ± sinθ v), v ⊥ ŷ. Adam maximises :func:`log_tie` over w, θ
    and v from deterministic starts. The list is empty if d = 1, if A and b are zero, or if V is zero.
    """
    if head.d < 2 or head.A_norm + head.b_norm == 0 or head.V_norm == 0:
        return []
    triangle = torch.linalg.qr(head.V, mode="r").R if head.V.shape[0] > head.d else head.V
    values = torch.linalg.svd(triangle, full_matrices=False).Vh
    w = torch.cat([scale * _starts(head) for scale in (1.0, 0.5)])
    v = torch.cat([v.expand_as(w) for v in values[:2]])
    w = w.repeat(len(v) // len(w), 1).requires_grad_()
    # v may be parallel to ŷ, which is projected out of it: a small fixed perturbation avoids v = 0.
    generator = torch.Generator().manual_seed(0)
    v = v + 0.05 * torch.randn(v.shape, generator=generator, dtype=torch.float64) / math.sqrt(head.d)
    v.requires_grad_()
    angle = torch.full((len(w), 1), -0.5, dtype=torch.float64, requires_grad=True)
    # Rows are grouped to make the search fast; the bound itself sums over every row.
    log_m, log_rows = light_rows(length, 2, causal=masked, grouped=True)
    optimiser = torch.optim.Adam([w, v, angle], lr=0.05, maximize=True)
    best = torch.full((len(w),), -math.inf, dtype=torch.float64)
    kept = torch.zeros(3, *w.shape, dtype=torch.float64)
    top, waited = -math.inf, 0
    for _ in range(_PAIR_STEPS + 1):
        with torch.enable_grad():
            light = radius * _into_ball(w, 1.0)
            direction = _unit(score_vectors(head, light))
            off = _unit(v - (v * direction).sum(1, keepdim=True) * direction)
            theta = 0.5 * math.pi * torch.sigmoid(angle)
            along, across = radius * torch.cos(theta) * direction, radius * torch.sin(theta) * off
            heavies = torch.stack([along + across, along - across])
            value, _ = log_tie(head, heavies, light, log_m[:, None], log_rows[:, None])
            value = value.clamp_min(-1e9)  # the bound may be zero at all tokens
        better = (value > best) & torch.isfinite(value)
        now = torch.cat([heavies, light[None]]).detach()
        kept, best = torch.where(better[:, None], now, kept), torch.where(better, value.detach(), best)
        waited = 0 if float(best.max()) > top + 1e-6 else waited + 1
        top = max(top, float(best.max()))
        if waited > 25:
            break
        optimiser.zero_grad()
        value.sum().backward()
        for tensor in (w, v, angle):
            assert tensor.grad is not None
            tensor.grad.nan_to_num_(0.0)
        optimiser.step()
    order = [i for i in torch.argsort(best, descending=True, stable=True).tolist() if best[i] > -math.inf]
    # Rounding may have passed the ball.
    found = (_into_ball(kept[:, i], radius) for i in order)
    return [HeavyTokens(few[:2], few[2]) for few in found]


def spread_directions(head: Head) -> Float64[Tensor, "count d"]:
    """Return unit vectors u ⊥ b for which |Vu| and |Aᵀu| are large.

    Tokens spread along u move a row that sees them all alike by |Vu| |Aᵀu| times their variance. The vectors
    are singular vectors of A and V, and the vector for which the two relative lengths are largest together.
    """
    # |Aᵀu| is the length of factorᵀ u, whose factor may have few columns.
    factor = head.left @ torch.linalg.qr(head.right.mT).R.mT
    both = torch.cat([factor.mT / max(head.A_norm, 1e-300), head.V / max(head.V_norm, 1e-300)])
    found = torch.cat(
        [
            torch.linalg.svd(matrix, full_matrices=False).Vh[:count]
            for matrix, count in ((factor.mT, 2), (head.V, 2), (both, 1))
        ]
    )
    if bool(head.b.any()):
        bias = _unit(head.b[None])[0]
        found = found - (found @ bias)[:, None] * bias
    length = torch.linalg.vector_norm(found, dim=1)
    unit: Tensor = found[length > 1e-8] / length[length > 1e-8, None]
    return unit


def _gap(head: Head, w: Tensor, radius: float) -> Tensor:
    y = score_vectors(head, w)
    gap: Tensor = radius * torch.linalg.vector_norm(y, dim=1) - (y * w).sum(1)
    return gap


def _starts(head: Head, count: int = 3) -> Tensor:
    """Return unit directions: where |Aw| is large or ⟨Aw, w⟩ small, and eigenvectors of A."""
    # A = left @ right has low rank. Its right singular vectors and the eigenvectors of A + Aᵀ come from small
    # matrices, in orthonormal bases of the spans of the factors.
    q_right, r_right = torch.linalg.qr(head.right.mT)
    right = q_right @ torch.linalg.svd(head.left @ r_right.mT, full_matrices=False).Vh.mT
    both = torch.linalg.qr(torch.cat([head.left, head.right.mT], dim=1)).Q
    small = both.mT @ head.left @ (head.right @ both)
    symmetric = both @ torch.linalg.eigh(small + small.mT).eigenvectors
    found = [right[:, :count], symmetric[:, :count], symmetric[:, -1:]]
    pairs = head.real_eigenpairs
    if pairs:
        found.append(torch.stack([pairs[0][1], pairs[-1][1]], dim=1))
    starts = torch.cat(found, dim=1).mT
    starts = torch.cat([starts, -starts])
    if bool(head.b.any()):
        starts = torch.cat([starts, torch.stack([_unit(head.b[None])[0], -_unit(head.b[None])[0]])])
    return starts


def _unit(x: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, torch.ones_like(length))


def _into_ball(x: Tensor, radius: float) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inside: Tensor = x * torch.where(length > radius, radius / length.clamp_min(1e-300), 1.0)
    return inside
