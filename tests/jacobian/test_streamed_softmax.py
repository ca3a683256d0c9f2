"""The derivative without n × n matrices: the same numbers as dense autodiff, in memory of order n."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import howsmooth as hs
from howsmooth.attention import TokenMap
from howsmooth.attention.masks import Visibility
from howsmooth.jacobian import closed_form_jacobian, streamed_softmax, tiling
from howsmooth.jacobian.centred_projections import Operands
from howsmooth.jacobian.closed_form import has_closed_form
from howsmooth.jacobian.memory_footprint import streamed_bytes
from howsmooth.jacobian.streamed_softmax import streamed_derivative
from howsmooth.spectral import LinearOperator
from tests._cases import CASES, D, dense_jacobian, random_attention, tokens
from tests._forked import memory_added
from tests._operators import to_dense
from tests._selection import others_slow, pairs

LAYERS = [name for name, make in CASES.items() if has_closed_form(make(4))]
VARIED = [
    "multi-head",
    "causal window, grouped",
    "score bias for all heads, masked",
    "sinks, softcap, score bias",
    "norms of queries and keys, rotary, causal",
    "post-norm",
    "scaled residual",
]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiling._TILE, "cpu", 12)
    monkeypatch.setitem(tiling._COLUMNS, "cpu", 2)
    monkeypatch.setattr(tiling, "_ROWS", 2)
    monkeypatch.setattr(tiling, "_FEWEST_ROWS", 1)


def check_products(op: LinearOperator, dense: torch.Tensor, size: float) -> None:
    """Compare products with a few vectors."""
    e, u = tokens(1, 2, *op.in_shape), tokens(2, 2, *op.out_shape)
    adjoint = (dense.mT @ u.flatten(1)[..., None]).view(e.shape)
    torch.testing.assert_close(op.adjoint_product(u), adjoint, rtol=1e-12, atol=1e-12 * size)
    image = (dense @ e.flatten(1)[..., None]).view(u.shape)
    gram = (dense.mT @ image.flatten(1)[..., None]).view(e.shape)
    found_image, found_gram = op.gram_product(e)
    torch.testing.assert_close(found_image, image, rtol=1e-12, atol=1e-12 * size)
    torch.testing.assert_close(found_gram, gram, rtol=1e-11, atol=1e-12 * size**2)


# Every layer is cut below, into strips.
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "name",
    others_slow(LAYERS, VARIED),
)
def test_products_are_those_of_the_dense_jacobian(name: str) -> None:
    n = 5
    f, x = CASES[name](n), tokens(n, 2, n, D)
    op = closed_form_jacobian(f, x, streamed=True)
    dense = torch.stack([dense_jacobian(f, member) for member in x])
    size = max(1.0, float(dense.abs().max()))
    check_products(op, dense, size)
    assert (to_dense(op) - dense).abs().max() <= 1e-13 * size
    (last,) = to_dense(op.select(torch.tensor([1])))
    assert (last - dense[1]).abs().max() <= 1e-13 * size


def cut_finely(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Blocks of eight rows, strips of two, tiles of two keys; rows apart for each thread."""
    monkeypatch.setitem(tiling._TILE, "cpu", 16)
    monkeypatch.setitem(tiling._COLUMNS, "cpu", 2)
    monkeypatch.setattr(tiling, "_ROWS", 8)
    monkeypatch.setattr(tiling, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(tiling, "_STRIP", 2)
    monkeypatch.setattr(tiling, "_FEWEST_ROWS_APART", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)


def check_fine_cuts(f: TokenMap, x: torch.Tensor) -> None:
    dense = torch.stack([dense_jacobian(f, member) for member in x])
    check_products(closed_form_jacobian(f, x, streamed=True), dense, max(1.0, float(dense.abs().max())))


@pytest.mark.parametrize("name", others_slow(LAYERS, VARIED))
def test_products_are_those_of_the_dense_jacobian_where_blocks_have_strips(name, monkeypatch) -> None:
    cut_finely(monkeypatch, threads=2)
    check_fine_cuts(CASES[name](11), tokens(5, 2, 11, D))


ONE_HEAD = {
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": 6},
    "window": {"window": 6},
    "grouped": {"causal": True, "heads": 2},
    "sinks": {"causal": True, "sinks": torch.tensor([0.5]).double()},
    "capped": {"causal": True, "softcap": 1.5},
    "score bias": {"causal": True, "score_bias": tokens(3, 1, 14, 14)},
    "mask": {"causal": True, "mask": tokens(4, 14, 14).fill_diagonal_(1.0) > 0},
}


@pytest.mark.parametrize(("name", "threads"), pairs(ONE_HEAD, [3, 1, 2, 4]))
def test_one_head_is_cut_into_rows_of_each_thread(name, threads, monkeypatch) -> None:
    keywords = ONE_HEAD[name]
    cut_finely(monkeypatch, threads)
    # Of two threads, each has four of the first block's rows, and three of the last one's.
    check_fine_cuts(random_attention(1, **{"heads": 1, "kv_heads": 1} | keywords), tokens(2, 2, 14, D))


def pieces_of_one_head(n: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> list[tiling.Piece]:
    cut_finely(monkeypatch, threads)
    op = closed_form_jacobian(random_attention(1, heads=1, causal=True), tokens(2, 1, n, D), streamed=True)
    cut = op.core.tiling
    return [piece for block in cut.blocks() for piece in cut.pieces(block)]


@pytest.mark.parametrize("threads", [1, 2])
def test_strips_form_what_is_seen_and_half_of_the_diagonals_squares(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = pieces_of_one_head(16, threads, monkeypatch)
    assert any(isinstance(piece.block, tiling.DiagonalSquares) for piece in pieces) == (threads == 2)
    # Strips have two rows, of which one does not see one key.
    assert sum(piece.pairs for piece in pieces) == 16 * 17 // 2 + 8


def test_with_many_threads_rows_are_not_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {piece.block.batches for piece in pieces_of_one_head(16, 8, monkeypatch)} == {1}
    assert tiling.parts_for_threads(1, torch.device("cpu")) == 1


def test_cotangents_of_each_thread_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    # With outputs so wide, a product takes more than linearising.
    one, two = (random_attention(1, heads=heads, d_out=2_000, causal=True) for heads in (1, 2))
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append([streamed_bytes(f, 100_000, torch.float32, cpu) for f in (one, two)])
    added = [b - a for a, b in zip(*found, strict=True)]
    # Two heads are divided between the threads; one head has cotangents of keys and values in each thread.
    assert added == [100_000 * (one.key_dim + one.value_dim) * 4, 0]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("temperature", [1.0, 40.0], ids=["scores in float32", "scores in float64"])
@pytest.mark.parametrize("keywords", [{"causal": True}, {"kv_heads": 1, "sinks": torch.ones(3).double()}])
def test_float32_products_keep_their_digits_whatever_the_scores(temperature, keywords) -> None:
    f, x = random_attention(3, temperature=temperature, **keywords), tokens(1, 1, 6, D)
    dense = dense_jacobian(f, x[0])
    op = closed_form_jacobian(f, x, dtype=torch.float32, streamed=True)
    # Beside a sink scores are formed of other keys than products are, in float64.
    assert (op.core.exact is None) == (temperature == 1.0 and f.sinks is None)
    off = torch.linalg.matrix_norm(to_dense(op)[0].double() - dense, 2)
    # Without float64 scores the error at the higher temperature is 2e-5 of the norm.
    assert off <= 1.5e-6 * torch.linalg.matrix_norm(dense, 2)
    assert float(off / torch.linalg.matrix_norm(dense, 2)) <= float(op.rounding)


@pytest.mark.usefixtures("small_tiles")
def test_a_mask_that_differs_between_heads_and_members_hides_tiles() -> None:
    n = 6
    seen = torch.rand(2, 2, 1, n, n, generator=torch.Generator().manual_seed(0)) < 0.4
    seen |= torch.eye(n, dtype=torch.bool)
    q, k, v = tokens(0, 2, 2, 1, n, 3), tokens(1, 2, 2, n, 3), tokens(2, 2, 2, n, 4)
    features = hs.attention.scaled_dot_product.ScoreFeatures(seen=seen)
    at = streamed_derivative(Operands.of_heads(q, k, v, 0.5, features), Visibility(n), torch.float64)

    def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (0.5 * q[:, :, 0] @ k.mT).masked_fill(~seen[:, :, 0], float("-inf"))
        return torch.softmax(scores, dim=-1) @ v

    tangents = tokens(3, 2, 2, 1, n, 3), tokens(4, 2, 2, n, 3), tokens(5, 2, 2, n, 4)
    expected = torch.func.jvp(heads, (q, k, v), tangents)[1]
    found = at.product(
        0.5 * tangents[0].reshape(4, n, 3), tangents[1].flatten(0, 1), tangents[2].flatten(0, 1)
    )
    torch.testing.assert_close(found.view(2, 2, n, 4), expected)


@pytest.mark.parametrize(
    ("keywords", "tiles"),
    [({}, 64), ({"causal": True}, 36), ({"causal": True, "window": 9}, 15), ({"window": 9}, 22)],
    ids=["all", "causal", "causal window", "window"],
)
def test_tiles_that_no_query_sees_are_not_formed(
    keywords: dict[str, object], tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiling._COLUMNS, "cpu", 8)
    monkeypatch.setitem(tiling._TILE, "cpu", 64)
    monkeypatch.setattr(tiling, "_ROWS", 1)
    monkeypatch.setattr(tiling, "_FEWEST_ROWS", 1)
    op = closed_form_jacobian(random_attention(0, heads=1, **keywords), tokens(0, 1, 64, D), streamed=True)
    formed = 0
    original = streamed_softmax._Tiles._tile

    def count(self: streamed_softmax._Tiles, *arguments: object) -> object:
        nonlocal formed
        formed += 1
        return original(self, *arguments)

    monkeypatch.setattr(streamed_softmax._Tiles, "_tile", count)
    op.gram_product(tokens(1, 1, 64, D))
    assert formed == tiles


def test_blocks_of_a_narrow_window_are_as_large_in_a_long_sequence_as_in_a_short_one() -> None:
    lengths = []
    for n in (1 << 14, 1 << 20):
        rows = torch.zeros(1, 1, 1, 1).expand(1, 1, n, 1)
        at = streamed_softmax.StreamedDerivative(
            rows, rows[0], rows[0], rows[..., 0].double(), rows, None, None, torch.zeros(1).double(),
            Visibility(n, True, 64), hs.attention.scaled_dot_product.ScoreFeatures(), 1,
        )  # fmt: skip
        first = next(at.tiling.blocks()).rows
        lengths.append(first.stop - first.start)
    assert lengths[0] == lengths[1] > tiling._FEWEST_ROWS


def test_memory_grows_with_the_length_and_not_with_its_square(tmp_path: Path) -> None:
    n = 10_000
    f = random_attention(3, heads=2, key_dim=8, value_dim=8, d=16, d_out=16, causal=True, dtype=torch.float32)
    x = tokens(3, 1, n, 16, dtype=torch.float32)

    def multiplied() -> None:
        image, gram = closed_form_jacobian(f, x, streamed=True).gram_product(x)
        assert abs(float((gram * x).sum() / image.square().sum()) - 1) < 1e-4

    # What a process allocates once, whatever the length, is allocated here.
    closed_form_jacobian(f, x[:, :2_000], streamed=True).gram_product(x[:, :2_000])
    # An eighth of the probabilities in float32 of the two heads; tiles take the same whatever the length.
    assert memory_added(multiplied, tmp_path) < 2 * n * n * 4 / 8
