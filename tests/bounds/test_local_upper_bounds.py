"""Local bounds in closed form: valid, equal where that is known; and the published form that is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds import attention_parameters
from howsmooth.bounds.attention_parameters import Head
from howsmooth.bounds.bound import Bound, Quantity
from howsmooth.bounds.local_upper_bounds import (
    diameter_upper_bound,
    theorem_c_3,
    yudin_theorem_3,
)
from howsmooth.errors import NonFiniteError
from tests._cases import D, dense_jacobian, random_attention, tokens, true_norm

F64 = torch.float64
LOCAL: dict[str, Callable[..., Bound]] = {
    "C.3": theorem_c_3,
    "C.3 sharp": diameter_upper_bound,
    "Yudin": yudin_theorem_3,
}

Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def parts(point: dict[str, Tensor], mask: Tensor) -> Parts:
    """A, V, b, X, P and the Jacobian, block by block as in the paper; differentiable."""
    A, V, b, X = (point[name] for name in ("A", "V", "b", "X"))
    n, d = X.shape
    y = X @ A.T + b
    P = torch.softmax((y @ X.T).masked_fill(~mask, -torch.inf), dim=1)
    z = X[None] - (P @ X)[:, None]
    C = torch.einsum("ij,ija,ijb->iab", P, z, z)
    T = P[:, :, None, None] * (torch.eye(d, dtype=F64) + z[..., None] * y[:, None, None, :])
    blocks = T + torch.eye(n, dtype=F64)[:, :, None, None] * (C @ A)[:, None]
    J = torch.einsum("ab,ijbc->iajc", V, blocks).reshape(n * d, n * d)
    return A, V, b, X, P, J


def as_published(point: dict[str, Tensor], mask: Tensor, wrong: bool = False) -> dict[str, Tensor]:
    """The formulas, written again and differentiable; ``wrong``: C.3 as the paper's code has it."""
    A, V, b, X, P, _ = parts(point, mask)
    n = len(X)
    y, transposed = X @ A.T + b, X @ A
    diameter = torch.cdist(X, X).amax()
    largest = y.norm(dim=1).amax()
    if not wrong:
        largest = torch.maximum(largest, transposed.norm(dim=1).amax())
    value = torch.linalg.matrix_norm(V, 2)
    rows = torch.tensor(0.0, dtype=F64)
    for i, count in enumerate(mask.sum(1).tolist()):
        t = y[i].norm() * diameter
        heaviest = 1 / (1 + (count - 1) * torch.exp(-t))
        rows = rows + (torch.minimum(1 + t**2 / 8, (1 + t**2 / 4) * heaviest) if count > 1 else 1.0)
    two = P.topk(2, dim=1).values
    g = (two[:, 0] * (1 - two[:, 0] + two[:, 1])).amax()
    size = torch.linalg.matrix_norm(X, 2)
    moved = size * (2 * size * torch.linalg.matrix_norm(A, 2) + math.sqrt(n) * b.norm())
    return {
        "C.3": value * (largest**2 * diameter**2 * (n + 1) + n).sqrt(),
        "C.3 sharp": value * (rows.sqrt() + diameter * torch.cdist(transposed, transposed).amax() / 4),
        "Yudin": value * (torch.linalg.matrix_norm(P, 2) + moved * g),
    }


def masks(n: int) -> dict[str, Tensor]:
    full = torch.ones(n, n, dtype=torch.bool)
    i = torch.arange(n)
    return {"none": full, "causal": full.tril(), "window": (i[:, None] - i).abs() <= 1}


def draw_points(n: int, d: int) -> Callable[[torch.Generator], dict[str, Tensor]]:
    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        heat = 4.0 ** float(torch.rand((), generator=generator) * 3 - 2)
        normal = {name: torch.randn(d, d, generator=generator, dtype=F64) for name in ("A", "V")}
        X = torch.randn(n, d, generator=generator, dtype=F64)
        b = torch.randn(d, generator=generator, dtype=F64)
        return {"A": heat * normal["A"], "V": normal["V"], "b": heat * b, "X": X}

    return draw


@pytest.mark.parametrize("masking", ["none", "causal", "window"])
def test_functions_give_the_formulas(masking: str) -> None:
    point = draw_points(5, 3)(torch.Generator().manual_seed(7))
    mask = masks(5)[masking]
    head = hs.SelfAttention(
        point["A"][None],
        torch.eye(3, dtype=F64)[None],
        point["V"][None],
        query_bias=point["b"][None],
        scale=1.0,
        causal=masking == "causal",
        mask=mask if masking == "window" else None,
    )
    true = float(torch.linalg.matrix_norm(dense_jacobian(head, point["X"]), 2))
    formulas = as_published(point, mask)
    for name, statement in LOCAL.items():
        bound = statement(head, point["X"])
        assert bound.value == pytest.approx(float(formulas[name]), rel=1e-9)
        assert bound.value >= true
        assert bound.side == "upper"
        assert bound.holds
        assert bound.quantity is Quantity.LOCAL


def test_c_3_as_coded_with_the_paper_is_not_a_bound() -> None:
    # C_i A depends on Aᵀ x_j, which max |A x_i| does not see
    A = torch.zeros(2, 2, dtype=F64)
    A[1, 0] = 10.0
    X = torch.tensor([[0.0, 1.0], [0.0, -1.0]], dtype=F64)
    eye = torch.eye(2, dtype=F64)
    point = {"A": A, "V": eye, "b": torch.zeros(2, dtype=F64), "X": X}
    mask = masks(2)["none"]
    true = float(torch.linalg.matrix_norm(parts(point, mask)[-1], 2))
    assert float(as_published(point, mask, wrong=True)["C.3"]) == pytest.approx(math.sqrt(2))
    assert true == pytest.approx(5 + math.sqrt(26), rel=1e-12)  # 10.1
    for statement in LOCAL.values():
        assert statement(Head(A, eye), X).value >= true


def test_one_token_is_an_equality() -> None:
    f = random_attention(60, heads=1)
    x = tokens(60, 1, D)
    true = float(true_norm(f, x[None])[0])
    for statement in LOCAL.values():
        assert statement(f, x).value == pytest.approx(true, rel=1e-9)


def test_sharp_form_never_above_the_corrected_one() -> None:
    # Shown in the docs for any tokens: √(n_1 + …) ≤ …; here over sizes and lengths
    for seed in range(30):
        point = draw_points(2 + seed % 5, 3)(torch.Generator().manual_seed(seed))
        head = Head(point["A"], point["V"], point["b"])
        assert diameter_upper_bound(head, point["X"]).value <= theorem_c_3(head, point["X"]).value


def test_overflow_gives_a_finite_logarithm() -> None:
    head = Head(1e150 * torch.eye(2, dtype=F64), 1e100 * torch.eye(2, dtype=F64))
    X = torch.tensor([[1e80, 0.0], [0.0, 1e80]], dtype=F64)
    for statement in (theorem_c_3, diameter_upper_bound):
        bound = statement(head, X)
        assert bound.value == math.inf
        assert 900 < bound.log_value < 1100
    with pytest.raises(NonFiniteError, match="scores"):  # this one needs the weights
        yudin_theorem_3(head, X)


@pytest.mark.parametrize("pairs", [1, 14, 1000])
def test_the_largest_distance_is_looked_for_in_blocks(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_parameters, "_PAIRS", pairs)
    for seed in range(6):
        x = tokens(seed, 7, 3)
        wanted = max(float((a - b).norm()) for a in x for b in x)
        assert wanted <= attention_parameters.largest_distance(x) <= wanted * (1 + 1e-11)
