"""Wasserstein distances, attention on measures and Gaussians, flows and clusters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import howsmooth as hs
from tests.keep.cases_maps import attention
from tests.keep.numbers import Close, Interval, Number, case, digest_of, interval, numbers

# An integrator that chooses its steps repeats them up to rounding; a state is right to its own tolerance.
STEPS = 1e-8


def weights(seed: int, n: int) -> Tensor:
    w = numbers(seed, n).abs() + 0.1
    return w / w.sum()


def discrete(
    seed: int, n: int, d: int, shift: float = 0.0, **keywords: Tensor
) -> hs.measures.DiscreteMeasure:
    return hs.measures.DiscreteMeasure(numbers(seed, n, d) + shift, weights(seed + 1, n), **keywords)


def gaussian(seed: int, d: int = 3) -> hs.measures.Gaussian:
    root = numbers(seed, d, d) / 2
    return hs.measures.Gaussian(numbers(seed + 1, d), root @ root.mT + 0.1 * torch.eye(d))


def small(seed: int, **keywords: object) -> hs.SelfAttention:
    """A head on R³ whose tokens stay of moderate size as they flow."""
    return attention(seed, heads=1, key_dim=2, value_dim=3, d=3, **keywords)


def _distance(found: hs.measures.Transport) -> Interval:
    return Interval(found.lower, float(found.value), found.upper, asked=1e-9)


@case("measures/wasserstein")
def _wasserstein() -> Mapping[str, Number]:
    w, found = hs.measures.wasserstein, {}
    for p in (1, 2, 1.5):
        found[f"W_{p}"] = _distance(w(discrete(400, 12, 3), discrete(402, 7, 3, 0.3), p))
        found[f"W_{p}, on the line"] = _distance(w(discrete(404, 40, 1), discrete(406, 25, 1, 0.4), p))
    found["an assignment"] = _distance(
        w(*(hs.measures.DiscreteMeasure(numbers(k, 30, 4)) for k in (408, 409)))
    )
    entropic = w(discrete(410, 20, 2), discrete(412, 15, 2), method="entropic")
    found["entropic"] = Interval(entropic.lower, float(entropic.value), entropic.upper, 1e-3, 1e-2)
    mu, nu = gaussian(414), gaussian(416)
    found["Bures"] = float(w(mu, nu).value)
    found["Bures, of one itself"] = Close(float(w(mu, mu).value), atol=1e-7)
    found["Bures, on a plane"] = float(w(mu, hs.measures.Gaussian(torch.zeros(3), torch.eye(3) * 0.0)).value)
    points = numbers(418, 6, 2).requires_grad_()
    w(hs.measures.DiscreteMeasure(points), discrete(419, 5, 2), gradient=True).value.backward()
    assert points.grad is not None
    found["gradient"] = digest_of(points.grad)
    return found


@case("measures/conditional_wasserstein")
def _conditional() -> Mapping[str, Number]:
    c, found = hs.measures.conditional_wasserstein, {}
    alone = torch.arange(6, dtype=torch.float64) / 6
    shared = torch.tensor([0.0, 0.0, 0.0, 0.5, 0.5, 1.0], dtype=torch.float64)
    for words, positions in (("alone", alone), ("shared", shared)):
        one, other = (
            hs.measures.DiscreteMeasure(numbers(seed, 6, 3), weights(421, 6), positions=positions)
            for seed in (420, 422)
        )
        for p in (1, 2):
            found[f"d_{p}, {words}"] = _distance(c(one, other, p))
    return found


@case("measures/attention")
def _on_measures() -> Mapping[str, Number]:
    f, found = attention(430, heads=2, temperature=2.0), {}
    mu = discrete(431, 5, 6)
    placed = discrete(431, 5, 6, positions=torch.tensor([0.0, 0.2, 0.2, 0.5, 1.0], dtype=torch.float64))
    found["image"] = digest_of(mu.push_forward(f).points)
    found["constant at a measure"] = interval(hs.local_lipschitz(f, mu, rtol=1e-6))
    found["image, causal"] = digest_of(placed.push_forward(attention(432, heads=2, causal=True)).points)
    for words, g, at in (
        ("unmasked", f, mu),
        ("causal", attention(432, heads=2, causal=True, temperature=3.0), placed),
    ):
        lip = hs.measures.wasserstein_lipschitz(g, at, rtol=1e-6)
        found[f"wasserstein_lipschitz, {words}"] = Interval(lip.lower, lip.value, lip.upper)
        found[f"splitting, {words}"] = Interval(lip.splitting_lower, lip.splitting, lip.splitting_upper)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    apart = hs.measures.DiscreteMeasure(
        torch.tensor([[0.0], [2.0], [-2.0]], dtype=torch.float64), torch.tensor([0.6, 0.2, 0.2]).double()
    )
    lip = hs.measures.wasserstein_lipschitz(hs.SelfAttention(-one, one, one, scale=1.0), apart)
    found["splitting is worse"] = Interval(lip.lower, lip.value, lip.upper)
    return found


@case("measures/Gaussian")
def _gaussian() -> Mapping[str, Number]:
    found: dict[str, Number] = {}
    l2 = hs.L2Attention(*(numbers(440 + k, 1, 2, 3) / 2 for k in range(3)))
    for words, f in (
        ("softmax", small(443)),
        ("several heads", attention(444, d=3, value_dim=1)),
        ("L2", l2),
    ):
        mu = gaussian(445)
        matrix, shift = hs.measures.affine_action(f, mu)
        image = mu.push_forward(f)
        found[f"{words}, matrix"], found[f"{words}, shift"] = digest_of(matrix), digest_of(shift)
        found[f"{words}, mean"], found[f"{words}, covariance"] = (
            digest_of(image.mean),
            digest_of(image.covariance),
        )
    return found


@case("dynamics/flow")
def _flow() -> Mapping[str, Number]:
    flow, found = hs.dynamics.flow, {}
    x = numbers(450, 5, 3)
    for method in ("euler", "midpoint", "rk4"):
        found[method] = digest_of(flow(small(451), x, [0.0, 0.5, 1.0], method=method, step=0.125).states)
    for words, causal in (("unmasked", False), ("causal", True)):
        moved = flow(small(452, causal=causal), x, [0.0, 0.4, 1.0], rtol=1e-6, atol=1e-6)
        found[f"dopri5, {words}"] = digest_of(moved.states, rtol=STEPS)
    ball = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    found["on the sphere"] = digest_of(
        flow(hs.dynamics.Sphere(small(453)), ball, [0.0, 1.0], method="rk4", step=0.1).final
    )
    layers = hs.dynamics.Layers([small(454), small(455)], 1.0)
    found["through layers"] = digest_of(flow(layers, x, [0.0, 1.0], method="rk4", step=0.25).final)
    found["rescaled"] = digest_of(
        flow(hs.dynamics.Rescaled(small(456, biases=False)), x, [0.0, 1.0], method="rk4", step=0.25).final
    )
    mu = flow(small(457), discrete(458, 5, 3), [0.0, 0.5], method="rk4", step=0.125).final
    found["a measure"] = digest_of(mu.points)
    normal = flow(
        small(459, temperature=0.3, biases=False), gaussian(460), [0.0, 0.3], method="rk4", step=0.05
    )
    found["a Gaussian, mean"] = digest_of(normal.final.mean)
    found["a Gaussian, covariance"] = digest_of(normal.final.covariance)
    return found


@case("dynamics/clusters")
def _clusters() -> Mapping[str, Number]:
    d, found = hs.dynamics, {}
    x = numbers(470, 8, 3)
    moved = d.flow(small(471, biases=False), x, [0.0, 1.0, 2.0], method="rk4", step=0.25)
    table = d.cluster_metrics(moved, tolerance=0.4)
    for column in ("clusters", "spread", "effective_rank", "log_energy", "to_limit"):
        found[f"table, {column}"] = digest_of(torch.tensor(table[column].to_numpy(dtype=float)))
    found["clusters"] = d.number_of_clusters(x, 1.2)
    found["labels"] = float(d.cluster_labels(x, 1.2).double() @ torch.arange(1, 9).double())
    found["effective rank"] = d.effective_rank(x)
    found["energy"] = d.log_interaction_energy(x, numbers(472, 3, 3), beta=0.7)
    found["rescaled tokens"] = digest_of(d.rescaled(moved, numbers(473, 3, 3)).states)
    return found


@case("dynamics/growth")
def _growth() -> Mapping[str, Number]:
    found: dict[str, Number] = {}
    for method in ("euler", "rk4"):
        grown = hs.dynamics.growth(
            small(480), numbers(481, 4, 3), [0.0, 0.5, 1.0], method=method, step=0.5, rtol=1e-6
        )
        for k in (1, 2):
            ends = (float(getattr(grown, name)[k]) for name in ("lower", "value", "upper"))
            found[f"{method}, frame {k}"] = Interval(*ends)
        found[f"{method}, product"] = Close(float(grown.product[-1]), 1e-6)
    return found


@case("dynamics/bounds")
def _bounds() -> Mapping[str, Number]:
    f = small(490, biases=False)
    return {
        "clusters": hs.dynamics.clustering_bound(1.5, 0.3, 4.0),
        "stability": hs.dynamics.log_stability_bound(f, 1.2, 0.7),
        "finite context": hs.dynamics.finite_context_bound(f, 1.0, 0.2, 3, 1000),
    }
