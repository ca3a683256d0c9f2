"""Jacobians at unequal lengths as one operator: against dense Jacobians, and zero where nothing is."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.jacobian.closed_form import closed_form_jacobians
from howsmooth.jacobian.unequal_lengths import energy_products_together, joined_jacobian
from howsmooth.spectral import LinearOperator
from tests._cases import CASES, D, dense_jacobian, random_attention, tokens
from tests._selection import others_slow

# A mask and a bias of the scores fix the length.
FREE = [name for name in CASES if "masked" not in name and "score bias" not in name]
LENGTHS, MEMBERS, LONGEST = (3, 7, 1, 5), (2, 1, 1, 2), 7


def batches(seed: int) -> list[Tensor]:
    return [tokens(seed + i, *size, D) for i, size in enumerate(zip(MEMBERS, LENGTHS, strict=True))]


def whole(parts: list[Tensor]) -> Tensor:
    """All members (total, longest, d), zeros after their tokens."""
    filled = parts[0].new_zeros(sum(MEMBERS), LONGEST, parts[0].shape[-1])
    for into, part in zip(filled.split(MEMBERS), parts, strict=True):
        into[:, : part.shape[1]] = part
    return filled


def operators(name: str, dtype: torch.dtype = torch.float64) -> list[LinearOperator]:
    """The Jacobians of a case."""
    return [at[dtype] for at in closed_form_jacobians(CASES[name](LONGEST), batches(0), (dtype,))]


def dense_jacobians(name: str) -> list[Tensor]:
    """The same Jacobians, of each member by reverse mode."""
    f = CASES[name](LONGEST)
    return [torch.stack([dense_jacobian(f, member) for member in x]) for x in batches(0)]


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize(
    ("dtype", "loss"),
    [(torch.float64, 1e-13), pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow)],
)
def test_products_are_those_of_the_dense_jacobians(name: str, dtype: torch.dtype, loss: float) -> None:
    made, dense = operators(name, dtype), dense_jacobians(name)
    one = joined_jacobian(made)
    assert (one.batch, one.in_shape) == (sum(MEMBERS), (LONGEST, D))
    e = [part.to(dtype) for part in batches(10)]
    rows = [j.shape[1] // n for j, n in zip(dense, LENGTHS, strict=True)]
    image = [j @ part.double().flatten(1)[..., None] for j, part in zip(dense, e, strict=True)]
    back = [j.mT @ moved for j, moved in zip(dense, image, strict=True)]
    wanted_image = whole([t.view(len(t), n, d) for t, n, d in zip(image, LENGTHS, rows, strict=True)])
    wanted_back = whole([t.view(len(t), n, D) for t, n in zip(back, LENGTHS, strict=True)])
    norm = max(float(torch.linalg.matrix_norm(j, 2).max()) for j in dense)
    scale = norm * max(float(part.flatten(1).norm(dim=1).max()) for part in e)

    def check(found: Tensor, wanted: Tensor, size: float) -> None:
        assert float((found.double() - wanted).abs().max()) <= loss * size
        # Exactly zero, or a direction would leak to where no token is.
        for into, n in zip(found.split(MEMBERS), LENGTHS, strict=True):
            assert not into[:, n:].any()

    check(one.product(whole(e)), wanted_image, scale)
    check(one.adjoint_product(wanted_image.to(dtype)), wanted_back, scale * norm)
    ((energy, gram),) = energy_products_together([one], [whole(e)])
    check(gram, wanted_back, scale * norm)
    square = wanted_image.flatten(1).square().sum(dim=1)
    torch.testing.assert_close(energy, square, rtol=0, atol=loss * scale**2)
    torch.testing.assert_close(one.rounding, torch.cat([op.rounding for op in made]))
    chosen = torch.tensor([5, 0, 3])
    some = one.select(chosen).gram_product(whole(e)[chosen])[1]
    torch.testing.assert_close(some, gram[chosen], rtol=10 * loss, atol=10 * loss)


def test_without_a_cap_one_tensor_serves_for_probabilities_and_slope() -> None:
    """As in the operators that are joined: twice the memory otherwise."""
    made = operators("multi-head")
    core = joined_jacobian(made).core
    assert core.slope is core.p


def test_operators_of_unlike_kinds_are_refused() -> None:
    attention, norm = operators("multi-head"), operators("LayerNorm")
    with pytest.raises(TypeError, match=r"no common operator of .'AttentionJacobian', 'NormJacobian'."):
        joined_jacobian([attention[0], norm[1]])


@pytest.mark.parametrize(
    ("dtype", "name"),
    others_slow(
        itertools.product(
            (torch.float64, torch.float32),
            (
                "causal window, grouped",
                "wide output",
                "softcap, grouped, causal, rotary",
                "sinks, grouped, causal",
                "norms of all queries, of all keys",
                "LayerNorm",
                "pre-norm",
                "scaled residual",
            ),
        ),
        [
            (torch.float64, "causal window, grouped"),
            (torch.float32, "softcap, grouped, causal, rotary"),
            (torch.float64, "norms of all queries, of all keys"),
            (torch.float32, "pre-norm"),
            (torch.float64, "scaled residual"),
        ],
    ),
)
def test_each_sequence_gets_the_interval_that_it_gets_alone(name, dtype, monkeypatch) -> None:
    """Of two tokens of dimension 6 the Krylov space ends at step 12 and before; of the longest it goes on."""
    from howsmooth.lipschitz import measurement

    f = CASES[name](LONGEST).to(dtype=dtype)
    xs = [tokens(i, n, D, dtype=dtype) for i, n in enumerate((2, 7, 1, 4, 2))]
    lots: list[int] = []
    join = measurement.joined_jacobian

    def noted(parts: list[LinearOperator]) -> LinearOperator:
        lots.append(len(parts))
        return join(parts)

    monkeypatch.setattr(measurement, "joined_jacobian", noted)
    rtol = 1e-9 if dtype == torch.float64 else 1e-4
    seeds = [3, 1, 4, 1, 5]
    together = hs.local_lipschitz(f, xs, rtol=rtol, seed=seeds)
    assert lots[0] == 4  # lengths, in one operator
    for i, x in enumerate(xs):
        alone = hs.local_lipschitz(f, x, rtol=rtol, seed=seeds[i : i + 1])
        assert int(together.iterations[i]) == int(alone.iterations)
        assert bool(together.converged[i]) == bool(alone.converged)
        torch.testing.assert_close(together.value[i], alone.value, rtol=1e-10, atol=0)
        torch.testing.assert_close(
            together.upper[i], alone.upper, rtol=1e-9 if dtype == torch.float64 else 1e-5, atol=0
        )
        for name_of in ("input_direction", "output_direction"):
            assert getattr(together, name_of)[i].shape == getattr(alone, name_of).shape
        dense = dense_jacobian(f.to(dtype=torch.float64), x.double())
        image = (dense @ together.input_direction[i].double().flatten()).norm()
        torch.testing.assert_close(image, together.value[i], rtol=1e-5, atol=0)
        assert float(together.input_direction[i].norm()) == pytest.approx(1.0, rel=1e-5)
        assert float(together.lower[i]) <= float(torch.linalg.matrix_norm(dense, 2)) * (1 + 1e-12)
        assert float(torch.linalg.matrix_norm(dense, 2)) <= float(together.upper[i]) * (1 + 1e-12)


def test_a_cap_keeps_its_slope_where_it_is_joined() -> None:
    f = random_attention(3, softcap=0.5, temperature=4.0)
    core = joined_jacobian(
        [at[torch.float64] for at in closed_form_jacobians(f, batches(0), (torch.float64,))]
    ).core
    assert core.slope is not core.p
    assert (core.slope <= core.p).all()
    assert (core.slope < core.p).any()
