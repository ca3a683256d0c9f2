"""Search for inputs with a large Lipschitz constant among sequences of few distinct tokens ("atoms") that are
repeated.

The cost of evaluating such an input does not depend on its length. If atoms x_1..x_c occur with
multiplicities m, then ‖D_X f‖ is at least the norm of a c × c block matrix (documentation page "Worst
inputs, and lower bounds", section "Few atoms"). With a causal mask and the heavy atoms first, it is at
least the norm of the heavy tokens' columns. That norm is the maximum of ⟨u, J v⟩ over unit u and v, so each
step is one gradient in tokens, u and v, for hundreds of restarts in one batch. Every u and v give a lower
limit of the norm, so no value of the search is too large. ``ascend`` then measures the best inputs in full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from howsmooth.adversarial.search_domains import Around, Domain
from howsmooth.attention import SelfAttention
from howsmooth.rounding import LEAST_DIVISOR

__all__ = ["AtomSearch", "RepeatedTokens", "can_search_atoms", "search_atoms"]

# In a causal sequence, the rows of the light token are put into this many groups of equal logarithmic
# width.
_GROUPS = 48


@dataclass(frozen=True, eq=False)
class RepeatedTokens:
    """A long sequence that consists of few distinct tokens (atoms), stored as the atoms and their numbers of
    copies.

    A heavy token occurs once or a few times and attracts much attention; a light token is repeated many
    times.
    """

    name: str
    points: Float[Tensor, "c d"]
    counts: tuple[int, ...]

    def tokens(self) -> Float[Tensor, "n d"]:
        """Return the sequence (n, d) in which every atom is repeated by its number of copies."""
        return self.points.repeat_interleave(torch.tensor(self.counts), dim=0)

    @classmethod
    def of(cls, name: str, x: Tensor) -> RepeatedTokens | None:
        """Convert a sequence of tokens to atoms, with one atom for each run of equal tokens.

        The result is None for more than eight runs.
        """
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
    """The result of :func:`search_atoms`: ``found``, the best atoms of each restart; ``values``, the lower
    limit ⟨u, J v⟩ of ‖D_X f‖ at each of them, from high to low; and ``history``, a table with one row for
    each restart and step, and columns start, step, value, step_size.
    """

    found: list[RepeatedTokens]
    values: Float64[Tensor, " restarts"]
    history: pd.DataFrame


def can_search_atoms(f: object, domain: Domain) -> bool:
    """Return whether :func:`search_atoms` supports ``f`` (plain or causal softmax attention) and a domain."""
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
    starts: Sequence[RepeatedTokens],
    *,
    restarts: int,
    steps: int,
    generator: torch.Generator,
) -> AtomSearch:
    """Search for sequences of few repeated tokens at which ‖D_X f‖ is large, from random and given starts.

    The search takes long steps from random atoms, then short steps. The short steps start from the best
    quarter of the atoms that the long steps found, and from ``starts``, because long steps would move away
    from a good start. Restarts with the same number of atoms form a batch.
    """
    f = f.to(dtype=torch.float64)
    drawn = _random_atoms(f, length, domain, restarts, generator)
    # The rates are the largest step of an atom, in units of the domain's radius.
    far = _search(f, domain, drawn, steps, 0.2, generator)
    near = _search(f, domain, [*starts, *far.found[: (len(drawn) + 3) // 4]], steps // 2, 0.03, generator)
    return AtomSearch(near.found, near.values, pd.concat([far.history, near.history], ignore_index=True))


def _search(
    f: SelfAttention,
    domain: Domain,
    everything: list[RepeatedTokens],
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
        raised = _increase_norm(
            f, domain, _Problem.of(f, [everything[i].counts for i in members]), points, steps, rate, generator
        )
        history[members] = raised.history.cpu()
        values[members] = raised.values.cpu()
        for i, found in zip(members, raised.points, strict=True):
            best[i] = RepeatedTokens(everything[i].name, found, everything[i].counts)
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
    """The numbers of copies of each distinct token (atom), with the factors of the Jacobian that depend on
    them.

    They stay fixed while a search moves the atoms. ``row_atom`` says which atom each row belongs to.
    ``log_counts`` has the logarithm of how often each row sees each atom. ``row_weight`` and
    ``column_weight`` scale the rows and columns of the Jacobian. All but ``row_atom`` have a leading axis for
    a batch of multiplicities.
    """

    row_atom: Int[Tensor, " rows"]
    log_counts: Float64[Tensor, "batch rows c"]
    row_weight: Float64[Tensor, "batch rows"]
    column_weight: Float64[Tensor, "batch c"]

    @classmethod
    def of(cls, f: SelfAttention, counts: Sequence[tuple[int, ...]]) -> _Problem:
        """Compute the factors of the softmax and of its Jacobian that depend on the number of copies of each
        atom.

        An atom is a distinct token of the sequence.

        ``counts`` has one tuple of such numbers for each search of a batch. If f is causal, all entries of
        ``counts`` must be equal, and all atoms but the last occur once.
        """
        m = torch.tensor(counts, dtype=torch.float64, device=f.device)
        batch, c = m.shape
        if not f.causal:
            rows = torch.arange(c, device=f.device)
            return cls(rows, m.log()[:, None, :].expand(batch, c, c), m.sqrt(), m.rsqrt())
        # The heavy atoms come first, once each: row i sees atoms 0 to i.
        heavy = c - 1
        seen = torch.full((heavy, c), -math.inf, dtype=torch.float64)
        for i in range(heavy):
            seen[i, : i + 1] = 0.0
        # A later row sees all heavy atoms and some number of copies of the light atom. These rows are
        # grouped by that number, and each group is represented by its middle.
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
    """Return ⟨u, J v⟩ for given u and v, where J is the Jacobian of attention at a sequence of few distinct
    tokens (atoms).

    The search makes it large by moving the atoms. Each set of atoms in a batch has one value. J is the
    Jacobian of ``f`` at atoms x, with rows and columns scaled by the weights of ``problem``. Shapes are x and
    v (batch, c, d), u (batch, rows, d_out).
    """
    e = v * problem.column_weight[..., None]
    group = f.heads // f.kv_heads
    # J v by the product rule: tangents dq, dk, dw of queries, keys and values give the tangent of the output.
    # Biases have no tangent, so `linear` has none.
    q, k, w = f.projections(x)
    linear = SelfAttention(f.query, f.key, f.value, scale=f.scale)
    dq, dk, dw = linear.projections(e)
    k, w, dk, dw = (t.repeat_interleave(group, dim=-3) for t in (k, w, dk, dw))
    q, dq = (f.scale * t[..., problem.row_atom, :] for t in (q, dq))
    # The logarithm of the multiplicities makes one column stand for all copies of an atom.
    p = torch.softmax(q @ k.mT + problem.log_counts[:, None], dim=-1)
    ds = dq @ k.mT + q @ dk.mT
    # The derivative of the softmax.
    dp = p * (ds - (p * ds).sum(-1, keepdim=True))
    out = (dp @ w + p @ dw).movedim(-3, -2).flatten(-2)
    if f.output is not None:
        out = out @ f.output.mT
    return (u * problem.row_weight[..., None] * out).sum((-2, -1))


@dataclass(frozen=True, eq=False)
class _Increased:
    points: Tensor
    values: Tensor
    history: Tensor


def _increase_norm(
    f: SelfAttention,
    domain: Domain,
    problem: _Problem,
    points: Tensor,
    steps: int,
    rate: float,
    generator: torch.Generator,
) -> _Increased:
    """Take steps of Adam on the atoms, each with one power step for the singular vectors u and v."""
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
    # The directions u and v first approach the leading singular pair at fixed atoms.
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
        g = torch.nan_to_num(g / value.clamp_min(LEAST_DIVISOR)[:, None, None])
        # Adam with one second moment for each atom instead of each entry: all atoms take steps of similar
        # length, in the direction of their gradients.
        first = 0.9 * first + 0.1 * g
        second = 0.99 * second + 0.01 * (g * g).sum(-1, keepdim=True)
        corrected = (second / (1 - 0.99 ** (step + 1))).sqrt().clamp_min(LEAST_DIVISOR)
        # Cosine schedule: steps shrink to 2 % of the first ones.
        size = rate * domain.radius * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        move = size * (first / (1 - 0.9 ** (step + 1))) / corrected
        coordinates = domain.project_coordinates(coordinates + move)
    return _Increased(domain.tokens(kept), best, history)


def _norm(t: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(t.flatten(1), dim=1)[:, None, None]
    return norm


def _unit(t: Tensor) -> Tensor:
    return t / _norm(t).clamp_min(LEAST_DIVISOR)


def _random_atoms(
    f: SelfAttention, length: int, domain: Domain, restarts: int, generator: torch.Generator
) -> list[RepeatedTokens]:
    """Return ``restarts`` sets of random atoms and copies, none if ``length`` is too small for a pattern."""
    found = []
    for i in range(restarts):
        patterns = [p for p in _patterns(length, causal=f.causal) if all(count >= 1 for count in p)]
        if not patterns:
            break
        counts = patterns[i % len(patterns)]
        found.append(RepeatedTokens(f"atoms {i}", domain.random(generator, len(counts), f.d), counts))
    return found


def _patterns(n: int, *, causal: bool) -> list[tuple[int, ...]]:
    """List numbers of copies with sum n that the atoms may have, atoms with few copies first."""
    # One to four heavy atoms, once each, and copies of one light atom.
    single = [(1, n - 1), (1, 1, n - 2), (1, 1, 1, n - 3), (1, 1, 1, 1, n - 4)]
    if causal:
        return single
    # Heavy atoms may also be repeated, and there may be two light atoms or two halves.
    half = (n - 2) // 2
    return [
        *single,
        (2, n - 2),
        (1, 2, n - 3),
        (2, 2, n - 4),
        (1, 1, half, n - 2 - half),
        (n // 2, n - n // 2),
    ]
