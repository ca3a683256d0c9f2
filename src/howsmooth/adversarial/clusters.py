"""Search among inputs of few distinct tokens, whose constant costs the same however long the sequence is.

With atoms x_1..x_c of multiplicities m, ‖D_X f‖ is at least the norm of a c × c block matrix (docs/theory/
worst-inputs.md, "Few atoms"); with a causal mask and the heavy atoms first, at least that of the heavy
tokens' columns. That norm is max ⟨u, J v⟩ over unit u, v, so tokens and directions are raised together:
each step is one gradient for tokens, u and v, hundreds of restarts at once. Any u and v give a lower
limit, so no value here is too large; the winners are measured in full by ``ascend``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from howsmooth.adversarial.domains import Around, Domain
from howsmooth.attention import SelfAttention

__all__ = ["AtomSearch", "Atoms", "can_search_atoms", "search_atoms"]

# Light rows of a causal sequence are taken in this many groups, of equal width in the logarithm.
_GROUPS = 48


@dataclass(frozen=True, eq=False)
class Atoms:
    """Distinct tokens with their multiplicities; in a causal sequence the last one is the light token."""

    name: str
    points: Float[Tensor, "c d"]
    counts: tuple[int, ...]

    def tokens(self) -> Float[Tensor, "n d"]:
        """Return the sequence, atoms in order."""
        return self.points.repeat_interleave(torch.tensor(self.counts), dim=0)

    @classmethod
    def of(cls, name: str, x: Tensor) -> Atoms | None:
        """Return the atoms of a sequence, or None if they are more than eight."""
        points: list[Tensor] = []
        counts: list[int] = []
        for token in x:
            if points and bool((token == points[-1]).all()):
                counts[-1] += 1
                continue
            points.append(token)
            counts.append(1)
            if len(points) > 8:
                return None
        return cls(name, torch.stack(points), tuple(counts))


@dataclass(frozen=True, eq=False)
class AtomSearch:
    """What a search found.

    Attributes
    ----------
    found
        The best atoms of each restart, best restart first.
    values
        Their lower limits of ‖D_X f‖, from ⟨u, J v⟩.
    history
        One row a restart and step: start, step, value, step_size.

    """

    found: list[Atoms]
    values: Float64[Tensor, " restarts"]
    history: pd.DataFrame


def can_search_atoms(f: object, domain: Domain) -> bool:
    """Tell whether sequences of few atoms are exact for ``f`` and lie in ``domain``."""
    return (
        isinstance(f, SelfAttention)
        and f.rotary is None
        and f.mask is None
        and f.window is None
        and not f.feature_names()
        and not isinstance(domain, Around)
    )


def search_atoms(
    f: SelfAttention,
    length: int,
    domain: Domain,
    starts: Sequence[Atoms],
    *,
    restarts: int,
    steps: int,
    generator: torch.Generator,
) -> AtomSearch:
    """Raise the constant over atoms, with long steps from random ones, then with short steps.

    The short steps start at the best quarter of what the long ones found, and at ``starts``: long steps would
    leave a good start. Restarts of the same multiplicities are batched.
    """
    f = f.to(dtype=torch.float64)
    drawn = _random_atoms(f, length, domain, restarts, generator)
    far = _search(f, domain, drawn, steps, 0.2, generator)
    near = _search(f, domain, [*starts, *far.found[: (len(drawn) + 3) // 4]], steps // 2, 0.03, generator)
    return AtomSearch(near.found, near.values, pd.concat([far.history, near.history], ignore_index=True))


def _search(
    f: SelfAttention,
    domain: Domain,
    everything: list[Atoms],
    steps: int,
    rate: float,
    generator: torch.Generator,
) -> AtomSearch:
    groups: dict[int, list[int]] = {}
    for i, atoms in enumerate(everything):
        groups.setdefault(len(atoms.counts), []).append(i)
    history = torch.zeros(len(everything), steps, dtype=torch.float64)
    best = list(everything)
    values = torch.zeros(len(everything), dtype=torch.float64)
    for members in groups.values():
        points = torch.stack([everything[i].points for i in members]).to(dtype=torch.float64)
        raised = _raise(
            f, domain, _Problem.of(f, [everything[i].counts for i in members]), points, steps, rate, generator
        )
        history[members] = raised.history.cpu()
        values[members] = raised.values.cpu()
        for i, found in zip(members, raised.points, strict=True):
            best[i] = Atoms(everything[i].name, found, everything[i].counts)
    order = torch.argsort(values, descending=True, stable=True)
    table = pd.DataFrame(
        {
            "start": [atoms.name for atoms in everything for _ in range(steps)],
            "step": list(range(steps)) * len(everything),
            "value": history.flatten().tolist(),
            "step_size": rate,
        }
    )
    return AtomSearch([best[i] for i in order.tolist()], values[order], table)


@dataclass(frozen=True, eq=False)
class _Problem:
    """Which atom each row is, what it sees how often, and the weights of rows and columns.

    All but the first have a leading axis for the members.
    """

    row_atom: Int[Tensor, " rows"]
    log_counts: Float64[Tensor, "batch rows c"]
    row_weight: Float64[Tensor, "batch rows"]
    column_weight: Float64[Tensor, "batch c"]

    @classmethod
    def of(cls, f: SelfAttention, counts: Sequence[tuple[int, ...]]) -> _Problem:
        """Make the problem of members that have equally many atoms, and if causal equal multiplicities."""
        m = torch.tensor(counts, dtype=torch.float64, device=f.device)
        batch, c = m.shape
        if not f.causal:
            rows = torch.arange(c, device=f.device)
            return cls(rows, m.log()[:, None, :].expand(batch, c, c), m.sqrt(), m.rsqrt())
        heavy = c - 1  # atoms before the light one, once each
        seen = torch.full((heavy, c), -math.inf, dtype=torch.float64)
        for i in range(heavy):
            seen[i, : i + 1] = 0.0
        light = int(counts[0][-1])
        edges = torch.logspace(0, math.log10(light + 1), _GROUPS + 1, dtype=torch.float64).floor()
        edges = torch.cat([edges[edges <= light], torch.tensor([light + 1.0], dtype=torch.float64)]).unique()
        sizes = edges[1:] - edges[:-1]
        middle = edges[:-1] + (sizes - 1) / 2
        sees = torch.zeros(len(sizes), c, dtype=torch.float64)
        sees[:, -1] = middle.log()
        once = torch.ones(heavy, dtype=torch.float64)
        tables = (
            torch.cat([seen, sees]),
            torch.cat([once, sizes.sqrt()]),
            torch.cat([once, torch.zeros(1, dtype=torch.float64)]),
        )
        rows = torch.cat([torch.arange(heavy), torch.full((len(sizes),), heavy)])
        return cls(rows.to(f.device), *(t.to(f.device).expand(batch, *t.shape) for t in tables))


def _pairing(f: SelfAttention, problem: _Problem, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """⟨u, J v⟩ for each member, J the weighted Jacobian: x, v (batch, c, d), u (batch, rows, d_out)."""
    e = v * problem.column_weight[..., None]
    group = f.heads // f.kv_heads
    q, k, w = f.projections(x)
    linear = SelfAttention(f.query, f.key, f.value, scale=f.scale)
    dq, dk, dw = linear.projections(e)
    k, w, dk, dw = (t.repeat_interleave(group, dim=-3) for t in (k, w, dk, dw))
    q, dq = (f.scale * t[..., problem.row_atom, :] for t in (q, dq))
    p = torch.softmax(q @ k.mT + problem.log_counts[:, None], dim=-1)
    ds = dq @ k.mT + q @ dk.mT
    dp = p * (ds - (p * ds).sum(-1, keepdim=True))
    out = (dp @ w + p @ dw).movedim(-3, -2).flatten(-2)
    if f.output is not None:
        out = out @ f.output.mT
    return (u * problem.row_weight[..., None] * out).sum((-2, -1))


@dataclass(frozen=True, eq=False)
class _Raised:
    points: Tensor
    values: Tensor
    history: Tensor


def _raise(
    f: SelfAttention,
    domain: Domain,
    problem: _Problem,
    points: Tensor,
    steps: int,
    rate: float,
    generator: torch.Generator,
) -> _Raised:
    """Adam over coordinates of the atoms, one power step for u and v a step."""
    batch, c, d = points.shape

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(f.device)

    coordinates = domain.coordinates(points.to(f.device))
    coordinates = coordinates + 1e-3 * domain.radius / math.sqrt(d) * noise(batch, c, d)
    coordinates = domain.project_coordinates(coordinates)
    u = _unit(noise(batch, len(problem.row_atom), f.d_out))
    v = _unit(noise(batch, c, d))
    first, second = torch.zeros_like(coordinates), torch.zeros_like(coordinates)
    best = torch.full((batch,), -math.inf, dtype=torch.float64, device=f.device)
    kept = coordinates
    history = torch.zeros(batch, steps, dtype=torch.float64)
    warm = 10  # power steps before the atoms move
    for step in range(-warm, steps):
        leaves = [t.detach().requires_grad_() for t in (coordinates, u, v)]
        value = _pairing(f, problem, domain.tokens(leaves[0]), leaves[1], leaves[2])
        g, gu, gv = torch.autograd.grad(value.sum(), leaves)
        value = value.detach()
        # The shift by ‖J‖ keeps the pair (u, v) from the eigenvalue −‖J‖ of [[0, J], [Jᵀ, 0]].
        shift = torch.maximum(_norm(gu), _norm(gv))
        u, v = _unit(gu + 0.3 * shift * u), _unit(gv + 0.3 * shift * v)
        if step < 0:
            continue
        history[:, step] = value
        better = value > best
        best = torch.where(better, value, best)
        kept = torch.where(better[:, None, None], coordinates, kept)
        g = torch.nan_to_num(g / value.clamp_min(1e-300)[:, None, None])
        # One second moment an atom: steps are of equal length for all, and keep the gradient's direction.
        first = 0.9 * first + 0.1 * g
        second = 0.99 * second + 0.01 * (g * g).sum(-1, keepdim=True)
        corrected = (second / (1 - 0.99 ** (step + 1))).sqrt().clamp_min(1e-300)
        size = rate * domain.radius * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        move = size * (first / (1 - 0.9 ** (step + 1))) / corrected
        coordinates = domain.project_coordinates(coordinates + move)
    return _Raised(domain.tokens(kept), best, history)


def _norm(t: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(t.flatten(1), dim=1)[:, None, None]
    return norm


def _unit(t: Tensor) -> Tensor:
    return t / _norm(t).clamp_min(1e-300)


def _random_atoms(
    f: SelfAttention, length: int, domain: Domain, restarts: int, generator: torch.Generator
) -> list[Atoms]:
    """Random atoms: a few heavy ones, once or twice each, and one to three light ones."""
    found = []
    for i in range(restarts):
        patterns = [p for p in _patterns(length, causal=f.causal) if all(count >= 1 for count in p)]
        if not patterns:
            break
        counts = patterns[i % len(patterns)]
        found.append(Atoms(f"atoms {i}", domain.random(generator, len(counts), f.d), counts))
    return found


def _patterns(n: int, *, causal: bool) -> list[tuple[int, ...]]:
    """Multiplicities that are tried: heavy atoms first, the light ones last."""
    single = [(1, n - 1), (1, 1, n - 2), (1, 1, 1, n - 3), (1, 1, 1, 1, n - 4)]
    if causal:
        return single
    half = (n - 2) // 2
    return [
        *single,
        (2, n - 2),
        (1, 2, n - 3),
        (2, 2, n - 4),
        (1, 1, half, n - 2 - half),
        (n // 2, n - n // 2),
    ]
