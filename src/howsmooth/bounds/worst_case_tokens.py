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
from howsmooth.errors import ArgumentError

__all__ = [
    "HeavyTokens",
    "OneHeavyToken",
    "TwoHeavyTokens",
    "real_eigenpairs",
    "searched_pairs",
    "searched_tokens",
    "spread_directions",
    "two_cluster_points",
]

# Steps of the searches for one heavy token and for two.
_GAP_STEPS = 200
_PAIR_STEPS = 150


@dataclass(frozen=True, eq=False)
class HeavyTokens:
    """A sequence of one or two heavy tokens, which get most of the attention, and many copies of one light
    token.

    Each heavy token occurs once, before the light tokens.
    """

    heavies: Float64[Tensor, "c d"]
    light: Float64[Tensor, " d"]

    def tokens(self, length: int) -> Float64[Tensor, "n d"]:
        """Return the whole sequence (length, d): first the heavy tokens, then the copies of the
        light token.
        """
        copies = length - len(self.heavies)
        if copies < 1:
            raise ArgumentError(
                "length",
                expected=f"at least {len(self.heavies) + 1} tokens: {len(self.heavies)} heavy, others light",
                got=str(length),
            )
        return torch.cat([self.heavies, self.light.expand(copies, -1)])


class OneHeavyToken(HeavyTokens):
    """A sequence of one heavy token, which gets most of the attention, and copies of one light token."""

    @classmethod
    def of(cls, heavy: Tensor, light: Tensor) -> OneHeavyToken:
        """Return the sequence of a given heavy token (d,) and copies of a given light token (d,)."""
        return cls(heavy[None], light)

    @property
    def heavy(self) -> Float64[Tensor, " d"]:
        """The heavy token, which gets most of the attention."""
        return self.heavies[0]


class TwoHeavyTokens(HeavyTokens):
    """A sequence of two heavy tokens, which get equal attention weights, and copies of one light token.

    The light token attends to both heavy tokens equally.
    """

    @classmethod
    def of(cls, heavy_1: Tensor, heavy_2: Tensor, light: Tensor) -> TwoHeavyTokens:
        """Return the sequence of two given heavy tokens (d,) and copies of a given light token (d,)."""
        return cls(torch.stack([heavy_1, heavy_2]), light)

    @property
    def heavy_1(self) -> Float64[Tensor, " d"]:
        """The first of the two heavy tokens, which get most of the attention."""
        return self.heavies[0]

    @property
    def heavy_2(self) -> Float64[Tensor, " d"]:
        """The second of the two heavy tokens, which get most of the attention."""
        return self.heavies[1]


def real_eigenpairs(head: Head) -> list[tuple[float, Tensor]]:
    """Return the real eigenvalues of the matrix A of the scores in ascending order, each with a unit
    eigenvector.

    For A = left @ right of rank k < d, the nonzero eigenvalues come from the k × k matrix right @ left, since
    right left w = λ w implies A left w = λ left w. Zero is an eigenvalue too, because A is singular.
    """
    k = head.left.shape[1]
    small = head.right @ head.left if k < head.d else head.A
    values, vectors = torch.linalg.eig(small)
    pairs = []
    for value, vector in zip(values.tolist(), vectors.T, strict=True):
        if value.imag != 0:
            continue
        u = head.left @ vector.real if k < head.d else vector.real
        length = float(torch.linalg.vector_norm(u))
        if length > 0:
            pairs.append((value.real, u / length))
    if k < head.d:
        # The last rows of the complete Q factor of rightᵀ span the null space of right.
        null = torch.linalg.qr(head.right.mT, mode="complete").Q[:, -1]
        pairs.append((0.0, null))
    return sorted(pairs, key=lambda pair: pair[0])


def two_cluster_points(head: Head, radius: float, choice: str = "paper") -> OneHeavyToken | None:
    """Return the two tokens of Proposition 3.4, which are multiples of an eigenvector of the matrix A of the
    scores.

    The tokens are Ru and Ru/2 with the eigenvector u for γ_max, or Ru and −Ru with u for γ_min. The choice
    "paper" compares γ_max/8 with −γ_min and takes the larger; "max" and "min" prescribe the eigenvalue. With
    a query bias, u and −u differ, and the one that gives the heavy token more weight is used. The result is
    None if A has no real eigenvalue.
    """
    pairs = real_eigenpairs(head)
    if not pairs:
        return None
    (low, u_low), (high, u_high) = pairs[0], pairs[-1]
    use_max = high / 8 >= -low if choice == "paper" else choice == "max"
    u, ratio = (u_high, 0.5) if use_max else (u_low, -1.0)
    heavies = radius * torch.stack([u, -u])
    gains = ((_forms(head, ratio * heavies)) * (1 - ratio) * heavies).sum(1)
    heavy = heavies[int(gains[1] > gains[0])]
    return OneHeavyToken.of(heavy, ratio * heavy)


def searched_tokens(head: Head, radius: float) -> list[OneHeavyToken]:
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
        y = _forms(head, w)
        z = radius * _unit(y)
        gradient = ((z - w) @ head.left) @ head.right - y
        trial = _into_ball(w + step * gradient, radius)
        raised = _gap(head, trial, radius)
        better = (raised > value)[:, None]
        w = torch.where(better, trial, w)
        value = torch.where(better[:, 0], raised, value)
        step = torch.where(better, 1.5 * step, 0.3 * step)
    order = torch.argsort(value, descending=True, stable=True).tolist()
    return [OneHeavyToken.of(radius * _unit(_forms(head, w[i : i + 1]))[0], w[i]) for i in order]


def searched_pairs(head: Head, length: int, radius: float, *, masked: bool) -> list[TwoHeavyTokens]:
    """Search for sequences in which two tokens get equal and large attention weights from all other tokens.

    They give a large lower bound on ‖D_X f‖. The sequences are sorted, best first. The lower bound of
    ``howsmooth.bounds.two_heavy_tokens_lower_bound`` is √(2 Σ_rows p²) sinθ |y| R |Vv| with y = A w + b for
    the light token w and heavy tokens R(cosθ ŷ ± sinθ v), v ⊥ ŷ. Adam maximises it over w, θ and v from
    deterministic starts. The list is empty if d = 1, if A and b are zero, or if V is zero.
    """
    if head.d < 2 or head.A_norm + head.b_norm == 0 or head.V_norm == 0:
        return []
    value_factor = torch.linalg.qr(head.V, mode="r").R if head.V.shape[0] > head.d else head.V
    values = torch.linalg.svd(value_factor, full_matrices=False).Vh
    w0 = radius * torch.cat([scale * _starts(head) for scale in (1.0, 0.5)])
    v0 = torch.cat([v.expand_as(w0) for v in values[:2]])
    w0 = w0.repeat(len(v0) // len(w0), 1)
    # v0 may be parallel to ŷ, which is projected out of it: a small fixed perturbation avoids v = 0.
    generator = torch.Generator().manual_seed(0)
    v0 = v0 + 0.05 * torch.randn(v0.shape, generator=generator, dtype=torch.float64) / math.sqrt(head.d)
    w = (w0 / radius).requires_grad_()
    v = v0.clone().requires_grad_()
    angle = torch.full((len(w0),), -0.5, dtype=torch.float64, requires_grad=True)
    copies = _copies(length, masked)

    half = math.log(2) * torch.ones((), dtype=torch.float64)
    optimiser = torch.optim.Adam([w, v, angle], lr=0.05, maximize=True)
    best = torch.full((len(w0),), -math.inf, dtype=torch.float64)
    kept = [torch.zeros_like(w0) for _ in range(3)]
    top, waited = -math.inf, 0
    for _ in range(_PAIR_STEPS + 1):
        with torch.enable_grad():
            light = radius * _into_ball(w, 1.0)
            y = _forms(head, light)
            size = torch.linalg.vector_norm(y, dim=1)
            direction = _unit(y)
            off = _unit(v - (v * direction).sum(1, keepdim=True) * direction)
            theta = 0.5 * math.pi * torch.sigmoid(angle)
            gap = radius * size * torch.cos(theta) - (y * light).sum(1)
            log_p = -torch.logaddexp(half, copies.log_copies[:, None] - gap)
            rows = torch.logsumexp(2 * log_p + copies.log_weights[:, None], dim=0)
            strength = torch.linalg.vector_norm(off @ value_factor.mT, dim=1)
            value = 0.5 * rows + torch.log(torch.sin(theta) * size * strength + 1e-300)
        along = radius * torch.cos(theta)[:, None] * direction
        across = radius * torch.sin(theta)[:, None] * off
        better = (value > best) & torch.isfinite(value)
        now = [t.detach() for t in (along + across, along - across, light)]
        kept = [torch.where(better[:, None], a, b) for a, b in zip(now, kept, strict=True)]
        best = torch.where(better, value.detach(), best)
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
    order = torch.argsort(best, descending=True, stable=True).tolist()
    return [
        TwoHeavyTokens.of(*(_into_ball(t[i : i + 1], radius)[0] for t in kept))  # rounding may have passed it
        for i in order
        if bool(torch.isfinite(best[i]))
    ]


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


@dataclass(frozen=True)
class _Copies:
    """The number of copies of the light token that each query sees under a mask. Queries with nearly equal
    numbers may share an entry.

    ``log_copies`` has the numbers of copies, ``log_weights`` the numbers of queries that share an entry. Both
    are stored as logarithms.
    """

    log_copies: Tensor
    log_weights: Tensor


def _copies(length: int, masked: bool) -> _Copies:
    m = length - 2
    if not masked:
        log_m = torch.tensor([math.log(m)], dtype=torch.float64)
        return _Copies(log_m, log_m)
    if m <= 512:
        counts = torch.arange(1, m + 1, dtype=torch.float64)
        return _Copies(counts.log(), torch.zeros(m, dtype=torch.float64))
    # Rows are grouped by their logarithm to make the search fast; the bound itself sums over every row.
    edges = torch.linspace(0.0, math.log(m), 129, dtype=torch.float64)
    middle = (edges[1:] + edges[:-1]) / 2
    return _Copies(middle, edges[1:] + torch.log(-torch.expm1(edges[:-1] - edges[1:])))


def _forms(head: Head, x: Tensor) -> Tensor:
    """Return for each token x_i the vector A x_i + b, whose inner products with the tokens are the scores of
    x_i.

    The result has the shape of x.
    """
    y: Tensor = (x @ head.right.mT) @ head.left.mT + head.b
    return y


def _gap(head: Head, w: Tensor, radius: float) -> Tensor:
    y = _forms(head, w)
    gap: Tensor = radius * torch.linalg.vector_norm(y, dim=1) - (y * w).sum(1)
    return gap


def _starts(head: Head, count: int = 3) -> Tensor:
    """Return the directions from which the search for the worst light token starts.

    They are unit vectors. Among them are directions where |Aw| is large or ⟨Aw, w⟩ is small, and eigenvectors
    of A.
    """
    # A = left @ right has low rank. Its right singular vectors and the eigenvectors of A + Aᵀ come from small
    # matrices, in orthonormal bases of the spans of the factors.
    q_right, r_right = torch.linalg.qr(head.right.mT)
    right = q_right @ torch.linalg.svd(head.left @ r_right.mT, full_matrices=False).Vh.mT
    both = torch.linalg.qr(torch.cat([head.left, head.right.mT], dim=1)).Q
    small = both.mT @ head.left @ (head.right @ both)
    symmetric = both @ torch.linalg.eigh(small + small.mT).eigenvectors
    found = [right[:, :count], symmetric[:, :count], symmetric[:, -1:]]
    pairs = real_eigenpairs(head)
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
