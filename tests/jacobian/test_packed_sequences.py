"""Sequences of unequal lengths measured together, and the products that the measurement is made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import ArgumentError
from howsmooth.jacobian import closed_form_jacobian
from tests._cases import CASES, D, dense_jacobian, random_attention, tokens


@pytest.mark.parametrize("name", CASES)
def test_energy_and_gram_equal_those_of_the_dense_jacobian(name: str) -> None:
    f, x, e = CASES[name](3), tokens(4, 2, 3, D), tokens(5, 2, 3, D)
    dense = torch.stack([dense_jacobian(f, member) for member in x])
    image = dense @ e.flatten(1)[..., None]
    norm = torch.linalg.matrix_norm(dense, 2)
    scale = norm * e.flatten(1).norm(dim=1)
    for dtype, loss in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        energy, gram = closed_form_jacobian(f, x, dtype=dtype).energy_product(e.to(dtype))
        assert energy.dtype == torch.float64
        assert ((energy - image.flatten(1).square().sum(1)).abs() <= loss * scale**2).all()
        error = (gram.flatten(1) - (dense.mT @ image).flatten(1)).norm(dim=1)
        assert (error <= loss * scale * norm).all()


def test_float32_goes_through_the_gram_matrix_of_the_output_where_that_is_less_work() -> None:
    x, e = tokens(1, 2, 4, D), tokens(2, 2, 4, D)
    f = random_attention(1, value_dim=2)
    op = closed_form_jacobian(f, x, dtype=torch.float32)
    assert op.projection.output_gram is not None
    assert closed_form_jacobian(f, x).projection.output_gram is None  # float64: no verdict follows
    assert (
        closed_form_jacobian(random_attention(1, value_dim=5), x, dtype=torch.float32).projection.output_gram
        is None
    )
    tiny = f._rebuilt(output=1e-12 * f.output)  # squared twice, it leaves float32's range
    assert closed_form_jacobian(tiny, x, dtype=torch.float32).projection.output_gram is None
    for map_, scale in ((f, 1.0), (tiny, 1e-12)):
        op = closed_form_jacobian(map_, x, dtype=torch.float32).select(torch.tensor([1]))
        energy, gram = op.energy_product(e[1:].float())
        image = dense_jacobian(map_, x[1]) @ e[1].flatten()
        back = dense_jacobian(map_, x[1]).mT @ image
        torch.testing.assert_close(energy[0], image.square().sum(), rtol=1e-5, atol=0)
        torch.testing.assert_close(gram[0].flatten().double(), back, rtol=1e-4, atol=1e-5 * scale**2)


# ---- sequences of lengths of their own

LENGTHS = (3, 7, 1, 7, 5, 2)


def unequal(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [tokens(seed + i, n, D, dtype=dtype) for i, n in enumerate(LENGTHS)]


def test_one_seed_gives_every_sequence_its_own_start_and_autodiff_agrees() -> None:
    f, xs = random_attention(4), [tokens(0, 4, D), tokens(1, 4, D), tokens(2, 2, D)]
    packed = hs.local_lipschitz(f, tuple(xs), rtol=1e-7)
    batch = hs.local_lipschitz(f, torch.stack(xs[:2]), rtol=1e-7)
    torch.testing.assert_close(packed.upper[:2], batch.upper, rtol=1e-9, atol=0)
    auto = hs.local_lipschitz(f, xs, rtol=1e-9, method="autodiff")
    assert (packed.method, auto.method) == ("closed form", "autodiff")
    torch.testing.assert_close(auto.value, packed.value, rtol=1e-10, atol=0)
    assert [e.shape for e in auto.output_direction] == [x.shape for x in xs]
    assert "3 of 3 converged" in repr(packed)


def test_sequences_in_a_list_that_do_not_fit_in_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from howsmooth import batching
    from howsmooth.lipschitz import measurement

    f, xs = random_attention(5), unequal(3)
    whole = hs.local_lipschitz(f, xs, rtol=1e-9)
    cut: list[list[list[int]]] = []

    def noted(*arguments: object) -> object:
        cut.extend(batching.batches(*arguments))
        return iter(cut)

    monkeypatch.setattr(measurement, "batches", noted)
    monkeypatch.setattr(batching, "_BASIS_BYTES", 9 * 2 * D * 8 * batching._EXPECTED_STEPS)
    parts = hs.local_lipschitz(f, xs, rtol=1e-9)
    # From short to long, nine tokens at most, those that fill up the shorter ones among them.
    assert cut == [[[2, 5, 0]], [[4]], [[1]], [[3]]]
    torch.testing.assert_close(parts.upper, whole.upper, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("change", "argument", "words"),
    [
        ({"x": []}, "x", "at least one sequence"),
        (
            {"x": [torch.ones(3, D).double(), torch.ones(2, 3, D).double()]},
            "x[1]",
            "(n, d), as all in a list",
        ),
        ({"x": [torch.ones(3, D).double(), torch.ones(3, D + 1).double()]}, "x[1]", "(..., n, 6)"),
        ({"x": [torch.ones(3, D).double(), torch.ones(3, D)]}, "x[1]", "torch.float64 on cpu as x[0]"),
        ({"x": [torch.ones(3, D).double(), "tokens"]}, "x[1]", "torch.as_tensor"),
        ({"x": [torch.full((3, D), torch.nan).double()]}, "x[0]", "finite"),
        ({"x": [torch.ones(8, D).double()], "f": CASES["masked"](4)}, "x[0]", "length of the mask"),
        ({"seed": [1, 2]}, "seed", "2 integers"),
        ({"rtol": 2.0}, "rtol", "up to 1"),
    ],
)
def test_refusals(change: dict, argument: str, words: str) -> None:
    defaults = {"f": random_attention(0), "x": [torch.ones(3, D).double()]}
    with pytest.raises(ArgumentError) as caught:
        hs.local_lipschitz(**(defaults | change))
    assert caught.value.argument == argument
    assert words in str(caught.value)


def test_the_verdict_takes_no_residual_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a loose tolerance the Ritz residual is large; taken for rounding, it would ask for float64."""
    from howsmooth.lipschitz import singular_value_solver

    solved: list[torch.dtype] = []
    solve = singular_value_solver.lanczos_together

    def noted(operators: list, starts: list, **options: object) -> object:
        solved.append(operators[0].dtype)
        return solve(operators, starts, **options)

    monkeypatch.setattr(singular_value_solver, "lanczos_together", noted)
    f = random_attention(6, value_dim=2).to(dtype=torch.float32)
    x = tokens(6, 50, 2, D, dtype=torch.float32)
    found = hs.local_lipschitz(f, x, rtol=0.3, confidence=0.5)
    assert solved == [torch.float32]
    assert found.converged.all()
