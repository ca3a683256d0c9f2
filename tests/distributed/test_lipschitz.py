"""One sequence shared among processes: the algebra against dense Jacobians, the number against one process.

Threads play the processes, so that every number of them is tried; two real ones, with gloo, come last.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import TokenMap
from howsmooth.distributed import lipschitz as measuring
from howsmooth.distributed.communication import Exchange
from howsmooth.distributed.lipschitz import measure
from howsmooth.distributed.random_start import own_start
from howsmooth.distributed.shared_jacobian import SharedMap, check_shareable
from howsmooth.distributed.token_partition import RowShares
from howsmooth.errors import ArgumentError, HowsmoothError, NonFiniteError
from howsmooth.lipschitz import LipschitzEstimate
from howsmooth.seeds import torch_seed
from tests._cases import CASES, D, dense_jacobian, random_attention, rotary, tokens, true_norm
from tests._forked import all_done
from tests._group import ThreadCollectives, in_threads
from tests._two_processes import main

N = 11
# Some cases differ in what a process does by itself only.
ALONE = {
    "no biases",
    "heads concatenated",
    "wide output",
    "rank one",
    "own scale",
    "negative scale",
    "multi-query",
}
SHARED = [
    name for name in CASES if not any(word in name for word in ("masked", "score bias")) and name not in ALONE
]
CPU = torch.device("cpu")


def estimates(f: TokenMap, x: Tensor, world: int, **options: object) -> list[LipschitzEstimate]:
    """What each of ``world`` processes gets."""
    shares = RowShares(len(x), world)
    keywords = {"rtol": 1e-8, "confidence": 0.999, "max_iterations": 200, "seed": 0, "memory": 1 << 30}

    def work(collectives: ThreadCollectives) -> LipschitzEstimate:
        own = x[shares.rows(collectives.rank)]
        return measure(f, own, len(x), collectives, **(keywords | options))

    return in_threads(world, work)


# ---- who holds what


@given(world=st.integers(1, 9), more=st.integers(0, 300))
def test_every_row_has_one_process_and_causal_work_is_even(world: int, more: int) -> None:
    shares = RowShares(2 * world + more, world)
    rows = [shares.rows(rank) for rank in range(world)]
    assert torch.cat(rows).sort().values.tolist() == list(range(shares.n))
    assert [len(own) for own in rows] == [shares.count(rank) for rank in range(world)]
    assert all(own.tolist() == sorted(own.tolist()) for own in rows)
    assert shares.longest <= shares.n / world + 2
    # Keys that queries see, j <= i: n²/2 over all, and to one piece's rounding the same for each.
    seen = [int((own + 1).sum()) for own in rows]
    assert max(seen) - min(seen) <= 2 * shares.n


def test_a_process_without_work_is_refused() -> None:
    with pytest.raises(ArgumentError, match="at least two tokens for each of 3 processes, got n = 5"):
        RowShares(5, 3)


@pytest.mark.parametrize(
    ("n", "d", "chunk"), [(40, 3, 64), (37, 5, 100), (33, 1, 16), (9, 1, 16), (300, 33, 5000)]
)
def test_the_start_is_that_of_one_process(n: int, d: int, chunk: int) -> None:
    for seed in (0, -7):
        generator = torch.Generator().manual_seed(torch_seed(seed))
        drawn = torch.randn(n, d, generator=generator, dtype=torch.float64)
        for rank in range(2):
            shares = RowShares(n, 2)
            assert torch.equal(
                own_start(n, d, shares.ranges(rank), seed, chunk=chunk), drawn[shares.rows(rank)]
            )


def test_gather_and_scatter_are_adjoint() -> None:
    shares = RowShares(N, 3)
    first, second = tokens(0, 3, 2, N, 4), tokens(1, 2, N, 4)

    def work(collectives: ThreadCollectives) -> tuple[Tensor, Tensor]:
        exchange, rows = Exchange(collectives, shares, CPU), shares.rows(collectives.rank)
        own = second[:, rows]
        gathered = torch.cat(exchange.gather(own[..., :1], own[..., 1:]), dim=-1)
        mine = first[collectives.rank]
        summed = torch.cat(exchange.scatter_sum(mine[..., :3], mine[..., 3:]), dim=-1)
        return gathered, summed

    for rank, (gathered, summed) in enumerate(in_threads(3, work)):
        assert torch.equal(gathered, second)
        torch.testing.assert_close(summed, first.sum(dim=0)[:, shares.rows(rank)])


# ---- products


@pytest.mark.parametrize(
    ("name", "heads_together"),
    [(name, 99) for name in SHARED]
    + [(name, 1) for name in SHARED if "grouped, hot" in name or "rotary" in name],
)
def test_products_are_those_of_the_dense_jacobian(name: str, heads_together: int) -> None:
    f, x = CASES[name](N), tokens(0, N, D)
    dense = dense_jacobian(f, x)
    e, u = tokens(1, N, D), tokens(2, N, f.d_out)
    image = dense @ e.flatten()
    wanted = [t.view(N, -1) for t in (image, dense.T @ u.flatten(), image, dense.T @ image)]
    shares = RowShares(N, 3)

    def work(collectives: ThreadCollectives) -> tuple[Tensor, ...]:
        rows = shares.rows(collectives.rank)
        shared = SharedMap(Exchange(collectives, shares, CPU), heads_together)
        at = shared.jacobian(f, x[rows][None], torch.float64)
        own = e[rows][None]
        return at.product(own), at.adjoint_product(u[rows][None]), *at.gram_product(own)

    for rank, parts in enumerate(in_threads(3, work)):
        for got, want in zip(parts, wanted, strict=True):
            torch.testing.assert_close(got[0], want[shares.rows(rank)], rtol=1e-11, atol=1e-11)


def test_windows() -> None:
    """Rows that see a part of the sequence only, from both sides and from one."""
    x = tokens(3, N, D)
    for options in ({"window": 3, "rotary": rotary(N + 4, 2)}, {"window": 2, "causal": True}):
        f = random_attention(4, heads=2, kv_heads=1, **options)
        (truth,) = true_norm(f, x[None])
        for estimate in estimates(f, x, 3, rtol=1e-4):
            assert float(estimate.lower) <= float(truth) <= float(estimate.upper)
            assert float(estimate.value) == pytest.approx(float(truth), rel=1e-4)


# ---- the number


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("norms of queries and keys, rotary, causal", 3),
        ("sinks, grouped, causal", 2),
        ("post-norm", 2),
        ("post-norm", 1),
    ],
)
def test_the_number_is_that_of_one_process(name: str, world: int) -> None:
    f, x = CASES[name](N), tokens(5, N, D)
    alone = hs.local_lipschitz(f, x, rtol=1e-6, seed=3)
    everywhere = estimates(f, x, world, seed=3, rtol=1e-6)
    for estimate in everywhere:
        assert float(estimate.value) == pytest.approx(float(alone.value), rel=1e-12)
        # One process proves its limit, which may take a step more.
        assert int(alone.iterations) - int(estimate.iterations) in (0, 1)
        assert bool(estimate.converged)
        for bound in ("value", "lower", "upper"):  # decisions hang on them: to the last digit
            assert torch.equal(getattr(estimate, bound), getattr(everywhere[0], bound))
    shares = RowShares(N, world)
    h = 1e-6
    direction = torch.empty_like(x)
    for rank, estimate in enumerate(everywhere):
        direction[shares.rows(rank)] = estimate.input_direction
    assert float(direction.norm()) == pytest.approx(1.0, rel=1e-12)
    moved = (f(x + h * direction) - f(x - h * direction)) / (2 * h)
    for rank, estimate in enumerate(everywhere):
        want = float(alone.value) * estimate.output_direction
        torch.testing.assert_close(moved[shares.rows(rank)], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 60.0])
def test_float32_has_the_verdict_of_float64(temperature: float) -> None:
    """Also where scores are so large that they are formed in float64."""
    f = random_attention(7, causal=True, temperature=temperature, dtype=torch.float32)
    x = tokens(7, N, D, dtype=torch.float32)
    (truth,) = true_norm(f, x[None])
    for memory in (1 << 30, _little(f, x)):
        for estimate in estimates(f, x, 2, rtol=1e-4, memory=memory):
            assert bool(estimate.converged)
            assert float(estimate.value) == pytest.approx(float(truth), rel=2e-5)
            assert float(estimate.lower) <= float(truth) * (1 + 1e-13) <= float(estimate.upper) * (1 + 1e-12)
            assert estimate.input_direction.dtype == torch.float32


def _little(f: TokenMap, x: Tensor) -> int:
    """The least memory that is accepted."""
    with pytest.raises(ArgumentError, match=r"at least [0-9]+ bytes") as refused:
        estimates(f, x, 2, rtol=1e-4, memory=1)
    least = max(int(word) for word in str(refused.value).split() if word.isdigit())
    with pytest.raises(ArgumentError, match="memory: expected at least"):
        estimates(f, x, 2, rtol=1e-4, memory=least - 1)
    return least


@pytest.mark.parametrize("seed", [3039, 3077])
def test_what_float32_cannot_settle_is_settled_in_float64(seed: int) -> None:
    """W_O W_V is small against its factors: its last digits are those of the verdict, or of a second run."""
    f = random_attention(
        seed, heads=1, key_dim=2, d=1, d_out=2, temperature=10.0, biases=False, dtype=torch.float32
    )
    x = 3.0 * tokens(seed, 4, 1, dtype=torch.float32)
    (truth,) = true_norm(f, x[None])
    for estimate in estimates(f, x, 2, rtol=2e-5):
        assert bool(estimate.converged)
        assert float(estimate.value) == pytest.approx(float(truth), rel=2e-6)


def test_processes_of_one_device_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    f, x, given = random_attention(1), tokens(1, N, D), []
    monkeypatch.setattr(measuring, "memory_budget", lambda memory, device: 1 << 30)
    check = measuring.check_budget
    monkeypatch.setattr(measuring, "check_budget", lambda *all_: given.append(all_[4]) or check(*all_))
    estimates(f, x, 2, memory=None, rtol=1e-2)
    assert given == [1 << 29] * 2
    estimates(f, x, 2, memory=1 << 30, rtol=1e-2)
    assert given[2:] == [1 << 30] * 2


def test_what_was_measured_is_said() -> None:
    scope = estimates(random_attention(1, causal=True), tokens(1, N, D), 2)[0].scope
    assert (
        scope == "self-attention, 3 heads, causal, with output projection, 11 tokens shared among 2 processes"
    )


# ---- what is refused, by all processes together


def refusals(world: int, **changes: list[object]) -> list[str]:
    """What each process says when an argument differs between them."""
    arguments = {
        "f": [random_attention(2)] * world,
        "x": [tokens(2, N, D)[RowShares(N, world).rows(rank)] for rank in range(world)],
        "n": [N] * world,
        "rtol": [1e-6] * world,
        "seed": [0] * world,
        "memory": [1 << 30] * world,
    } | changes

    def work(collectives: ThreadCollectives) -> str:
        own = {name: values[collectives.rank] for name, values in arguments.items()}
        try:
            measure(**own, collectives=collectives, confidence=0.999, max_iterations=50)
        except HowsmoothError as error:
            return str(error)
        return "measured"

    return in_threads(world, work)


def test_processes_that_differ_are_refused_by_all() -> None:
    other = random_attention(2)._rebuilt(value=1.001 * random_attention(2).value)
    x = [tokens(2, N, D)[RowShares(N, 2).rows(rank)] for rank in range(2)]
    cases: list[tuple[dict[str, list[object]], str]] = [
        (
            {"rtol": [1e-6, 1e-5]},
            "rtol: expected one value in all processes, got 1e-06 here, 1e-05 in process 1",
        ),
        ({"seed": [0, 1]}, "seed: expected one value"),
        ({"f": [random_attention(2), other]}, "f: expected one map in all processes"),
        ({"f": [random_attention(2), random_attention(2, causal=True)]}, "f: expected one value"),
        ({"x": [x[0], x[1] * float("nan")]}, "process 1: x: expected finite numbers"),
        ({"x": [x[0], x[1][1:]]}, "process 1: x: expected the 6 rows of process 1, shape (6, 6)"),
        ({"memory": [1 << 30, 1000]}, "in process 1, for 11 tokens among 2 processes"),
        ({"memory": [1 << 30, -1]}, "process 1: memory: expected a number of bytes"),
        ({"n": [N, N + 2]}, "n: expected one value in all processes, got 11 here, 13 in process 1"),
    ]
    assert refusals(2) == ["measured", "measured"]
    for changes, words in cases:
        said = refusals(2, **changes)
        assert "measured" not in said, changes
        assert any(words in one for one in said), said


def test_a_norm_that_has_no_derivative_in_one_process_stops_all() -> None:
    f = hs.Compose(random_attention(2), hs.LayerNorm(torch.ones(D).double(), torch.zeros(D).double(), 0.0))
    x = tokens(2, N, D)
    x[0] = 1.0  # constant: the norm has nothing to divide by
    shares = RowShares(N, 2)
    said = refusals(2, f=[f, f], x=[x[shares.rows(rank)] for rank in range(2)])
    assert "expected tokens at which the norm is differentiable" in said[0]
    assert "process 0: x: expected tokens at which" in said[1]


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (random_attention(0, mask=torch.ones(N, N, dtype=torch.bool)), "got a mask"),
        (random_attention(0, score_bias=torch.zeros(1, N, N).double()), "got a score bias"),
        (lambda x: x, "got function"),
        (
            hs.Residual(hs.L2Attention(*(tokens(i, 1, D, D) for i in range(3)))),
            "got L2Attention",
        ),
    ],
)
def test_maps_that_cannot_be_shared(f: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        check_shareable(f)


def test_without_a_group_there_is_one_sentence() -> None:
    with pytest.raises(ArgumentError, match=r"torch.distributed has not been started"):
        hs.distributed.own_rows(10)
    with pytest.raises(ArgumentError, match="torchrun"):
        hs.distributed.local_lipschitz(random_attention(0), tokens(0, 4, D), 4)


def test_products_that_are_not_finite_stop_all() -> None:
    f = random_attention(0)
    huge = f._rebuilt(value=1e200 * f.value, output=1e200 * f.output)
    with pytest.raises(NonFiniteError):
        estimates(huge, tokens(0, N, D), 2)


# ---- real processes

Problems = dict[str, tuple[TokenMap, Tensor, dict[str, object]]]


def in_processes(
    world: int, folder: Path, problems: Problems
) -> list[dict[str, tuple[Tensor, dict[str, Tensor], int]]]:
    """What each of ``world`` processes joined by gloo found: rows, fields of the estimate, memory taken."""
    torch.save(problems, folder / "problems.pt")
    assert all_done([partial(main, folder, rank, world) for rank in range(world)])
    return [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(world)]


def test_two_processes_give_the_number_of_one(tmp_path: Path) -> None:
    x = tokens(8, 40, D)
    fine: dict[str, object] = {"rtol": 1e-9, "seed": 4, "memory": 1 << 30}
    problems: Problems = {
        name: (CASES[name](40), x, fine) for name in ("rotary, partial, grouped, causal", "pre-norm")
    }
    f = random_attention(9, heads=4, kv_heads=2, causal=True, dtype=torch.float32)
    problems["float32"] = (f, x.float(), {"rtol": 1e-4, "seed": 4})
    both = in_processes(2, tmp_path, problems)
    for name, (f, whole, options) in problems.items():
        alone = hs.local_lipschitz(f, whole, **options)
        rows = torch.cat([found[name][0] for found in both])
        assert rows.sort().values.tolist() == list(range(40))
        for found in both:
            estimate = found[name][1]
            tolerance = 1e-12 if whole.dtype == torch.float64 else 1e-6
            assert float(estimate["value"]) == pytest.approx(float(alone.value), rel=tolerance)
            assert int(alone.iterations) - int(estimate["iterations"]) in (0, 1)
            assert estimate["upper"].equal(both[0][name][1]["upper"])
        for side in ("input_direction", "output_direction"):
            shared = torch.cat([found[name][1][side] for found in both])
            assert float(shared.double().norm()) == pytest.approx(1.0, rel=1e-6)
            cosine = (shared * getattr(alone, side)[rows]).double().sum().abs()
            assert float(cosine) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_process_keeps_to_its_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    """A window makes it quick: memory is that of all keys and values, gathered, all the same."""
    n = 20_000
    f = random_attention(
        10, heads=4, key_dim=32, value_dim=32, d=32, d_out=32, causal=True, window=16, dtype=dtype
    )
    x = tokens(10, n, 32, dtype=dtype)
    options = {"rtol": 0.1, "max_iterations": 2}
    with pytest.raises(ArgumentError, match=r"at least [0-9]+ bytes") as refused:
        estimates(f, x, 2, memory=1, **options)
    least = max(int(word) for word in str(refused.value).split() if word.isdigit())
    problems: Problems = {str(memory): (f, x, {**options, "memory": memory}) for memory in (least, 3 * least)}
    both = in_processes(2, tmp_path, problems)
    added = {name: [found[name][2] for found in both] for name in problems}
    for name, taken in added.items():
        assert max(taken) <= int(name), added
        assert min(taken) >= 0.2 * int(name) or int(name) > least, added
    values = [float(found[name][1]["value"]) for found in both for name in problems]
    assert values == pytest.approx([values[0]] * len(values), rel=1e-6)


def test_one_module_only_imports_torch_distributed() -> None:
    source = Path(hs.__file__).parent
    modules = [path.relative_to(source).as_posix() for path in source.rglob("*.py")]
    importing = [
        name for name in modules if "import torch.distributed" in (source / name).read_text(encoding="utf-8")
    ]
    assert importing == ["distributed/communication.py"]
