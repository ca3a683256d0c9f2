"""influence against the blocks of dense float64 Jacobians."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

import howsmooth as hs
from howsmooth.errors import ArgumentError
from howsmooth.jacobian.token_pair_blocks import token_blocks
from howsmooth.profiling import Influence
from tests._cases import CASES, random_attention, tokens
from tests._selection import others_slow
from tests._tiny_models import tiny
from tests.attention.test_custom_code_attention import CASES as STAGED
from tests.attention.test_custom_code_attention import naive

N = 5


def dense_blocks(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The blocks ∂y_i/∂x_j of f at x (n, d) in float64, (n_out, n, d_out, d): the oracle."""
    return torch.func.jacrev(f)(x.double()).transpose(1, 2)


def contains(found: Influence, blocks: Tensor) -> bool:
    truth = torch.linalg.matrix_norm(blocks, 2)
    return bool(((found.lower <= truth) & (truth <= found.upper)).all())


def largest_token_move(blocks: Tensor, restarts: int = 40) -> float:
    """max_i sup |Σ_j J_ij e_j| over |e_j| ≤ 1, by ascent from many starts on dense blocks."""
    best = 0.0
    generator = torch.Generator().manual_seed(9)
    for row in blocks:
        u = torch.randn(restarts, row.shape[1], generator=generator, dtype=torch.float64)
        for _ in range(200):
            e = torch.nn.functional.normalize(torch.einsum("jab,ra->rjb", row, u), dim=-1)
            image = torch.einsum("jab,rjb->ra", row, e)
            u = torch.nn.functional.normalize(image, dim=-1)
        best = max(best, float(image.norm(dim=-1).max()))
    return best


# ---- the matrix


DEFAULT = ["multi-head", "causal window, grouped", "score bias for all heads, masked", "post-norm"]
DEFAULT += ["sinks, softcap, score bias", "norms of queries and keys, rotary, causal", "scaled residual"]


@pytest.mark.parametrize("name", others_slow(CASES, DEFAULT))
def test_every_entry_contains_the_norm_of_its_dense_block(name: str) -> None:
    f, x = CASES[name](N), tokens(3, N, 6)
    for dtype, rtol in ((torch.float64, 1e-8), (torch.float32, 1e-3)):
        g, y = f.to(dtype=dtype), x.to(dtype)
        blocks = dense_blocks(g.to(dtype=torch.float64), y)
        found = hs.influence(g, y, rtol=rtol)
        assert contains(found, blocks)
        assert found.converged.all()
        assert torch.allclose(found.value, torch.linalg.matrix_norm(blocks, 2), rtol=rtol, atol=0)
        assert found.method == "closed form"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_whose_products_underflow(dtype: torch.dtype) -> None:
    """Blocks a_ij W V of such weights that W V or its square underflows, and some blocks that are zero."""
    size = 1e-25 if dtype == torch.float32 else 1e-152
    a = torch.ones(3, 3, dtype=torch.float64).tril() * tokens(0, 3, 3).abs()
    w, v = tokens(1, 2, 4), tokens(2, 4, 2)
    a, w, v = (t.to(dtype) for t in (a, w, v))
    found = hs.influence(lambda x: a @ x @ (size * w) @ (size * v), tokens(3, 3, 2).to(dtype))
    truth = torch.linalg.matrix_norm(w.double() @ v.double(), 2) * a.double() * size * size
    assert ((found.lower <= truth) & (truth <= found.upper)).all()
    assert (found.upper[a == 0] == 0).all()
    if dtype == torch.float64:
        assert found.converged.all()
        assert found.token_wise.lower <= float(truth.sum(dim=1).max()) <= found.token_wise.upper
        assert found.token_wise.lower > 0.9 * float(truth.sum(dim=1).max())


@pytest.mark.parametrize("name", CASES)
def test_products_with_tiles_are_those_with_dense_blocks(name: str) -> None:
    """The operator itself, whose diagonal blocks and energies a norm would not show."""
    f, x = CASES[name](N), tokens(4, N, 6)
    blocks, dense = token_blocks(f, x), dense_blocks(f, x)
    assert blocks is not None
    seen = blocks.weights > 0
    assert not dense[~seen].any()
    for some in (torch.eye(N, dtype=torch.bool), seen & ~torch.eye(N, dtype=torch.bool)):
        i, j = torch.nonzero(some, as_tuple=True)
        if not len(i):
            continue
        # Maps of single tokens are not scaled.
        factor = torch.full((len(i),), 2.0 if isinstance(f, hs.SelfAttention) else 1.0, dtype=torch.float64)
        (tile,), of_pairs = blocks.tile(i, j, factor, [torch.float64]), factor[0] * dense[i, j]
        e, u = tokens(5, len(i), 1, 6), tokens(6, len(i), 1, of_pairs.shape[1])
        image = e @ of_pairs.mT
        torch.testing.assert_close(tile.product(e), image)
        torch.testing.assert_close(tile.adjoint_product(u), u @ of_pairs)
        energy, gram = tile.energy_product(e)
        torch.testing.assert_close(energy, image.square().sum(dim=(1, 2)))
        torch.testing.assert_close(gram, image @ of_pairs)
        chosen = torch.tensor([len(i) - 1, 0])
        torch.testing.assert_close(tile.select(chosen).product(e[chosen]), image[chosen])


def test_what_a_mask_hides_is_exactly_zero() -> None:
    found = hs.influence(CASES["causal window, grouped"](6), tokens(0, 6, 6))
    hidden = torch.ones(6, 6).triu(1).bool() | torch.ones(6, 6).tril(-2).bool()
    assert not found.upper[hidden].any()
    assert (found.lower[~hidden] > 0).all()
    assert found.converged.all()


def test_blocks_that_cancel_or_nearly_vanish_keep_true_intervals() -> None:
    """Two equal heads of opposite output; and scores so large that weights leave the range of float32."""
    f = random_attention(0, heads=1, d=12, d_out=12, temperature=4.0)
    assert f.output is not None
    nearly = torch.cat((f.output, -f.output * (1 + 1e-5)), dim=1)
    twice = {
        name: getattr(f, name).repeat(2, *(1,) * (getattr(f, name).ndim - 1))
        for name in ("query", "key", "value", "query_bias", "key_bias", "value_bias")
    }
    x = tokens(1, 7, 12)
    for g in (
        hs.SelfAttention(**twice, output=nearly),
        random_attention(2, d=12, d_out=12, temperature=60.0),
    ):
        g32 = g.to(dtype=torch.float32)
        blocks = dense_blocks(g32.to(dtype=torch.float64), x.float())
        found = hs.influence(g32, x.float())
        assert contains(found, blocks)
        assert found.value.min() < 1e-5 * found.value.max()


def extended_blocks(f: hs.SelfAttention, x: Tensor) -> Tensor:
    """Return the norms of the blocks from sums in extended precision, which do not cancel.

    Float64 derivatives of a head that looks at one key keep only absolute digits.
    """

    def extended(t: Tensor) -> np.ndarray:
        return t.double().numpy().astype(np.longdouble)

    assert f.output is not None
    assert f.query_bias is not None
    assert f.key_bias is not None
    assert f.value_bias is not None
    tokens_, n, blocks = extended(x), len(x), 0.0
    for head in range(f.heads):
        (wq, wk, wv), w = (extended(t[head]) for t in (f.query, f.key, f.value)), extended(f.output)
        q = (tokens_ @ wq.T + extended(f.query_bias[head])) * np.longdouble(f.scale)
        k = tokens_ @ wk.T + extended(f.key_bias[head])
        v = tokens_ @ wv.T + extended(f.value_bias[head])
        p = np.exp(q @ k.T - (q @ k.T).max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        of_head = np.zeros((n, n, f.value_dim, f.d), dtype=np.longdouble)
        for i in range(n):
            m = p[i].argmax()
            away = v - v[m] - sum(p[i, j] * (v[j] - v[m]) for j in range(n) if j != m)
            own = sum(p[i, j] * np.outer(away[j], (k[j] - k[m]) @ wq) for j in range(n)) * f.scale
            for j in range(n):
                of_head[i, j] = p[i, j] * (wv + np.outer(away[j], q[i] @ wk)) + (own if i == j else 0)
        blocks = blocks + w[:, head * f.value_dim : (head + 1) * f.value_dim] @ of_head
    size = np.abs(blocks).max(axis=(2, 3))
    norms = np.linalg.norm((blocks / size[..., None, None]).astype(float), ord=2, axis=(2, 3))
    return torch.from_numpy((norms * size).astype(float))


@pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="this machine has no extended precision")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", [119, 126, 143])
def test_heads_that_look_at_one_key(seed: int, dtype: torch.dtype) -> None:
    """Blocks from 1e-126 to 1e2, some of whose squares leave the range of float64."""
    f = random_attention(seed, d=12, d_out=12, temperature=120.0).to(dtype=torch.float32)
    x = tokens(seed, 7, 12).float()
    truth = extended_blocks(f.to(dtype=torch.float64), x)
    found = hs.influence(f.to(dtype=dtype), x.to(dtype))
    assert ((found.lower <= truth) & (truth <= found.upper)).all()
    assert found.converged.all()


@pytest.mark.parametrize("name", others_slow(["qwen2", "llama", "bert"], ["qwen2", "bert"]))
def test_a_captured_layer_of_a_half_precision_model(name: str) -> None:
    model = tiny(name).to(torch.bfloat16)
    ids = torch.randint(1, 60, (1, 8), generator=torch.Generator().manual_seed(0))
    for scope in ("attention", "block", "head"):
        site = hs.capture(model, ids, layers=[1], scope=scope)[0]
        found = hs.influence(site)
        blocks = dense_blocks(site.map.to(dtype=torch.float64), site.x[0])
        assert contains(found, blocks)
        assert found.converged.all()
        again = hs.influence(site.map, site.x[0])
        assert torch.equal(found.value, again.value)


def test_chosen_outputs_of_a_whole_model() -> None:
    ids = torch.randint(1, 60, (1, 7), generator=torch.Generator().manual_seed(0))
    (site,) = hs.capture(tiny("llama"), ids, scope="model")
    found = hs.influence(site, outputs=[-1, 2])
    double = site.map.to(dtype=torch.float64)
    blocks = dense_blocks(lambda x: double(x)[[-1, 2]], site.x[0])
    assert contains(found, blocks)
    assert found.converged.all()
    assert not found.upper[1, 3:].any()


def _with_logits(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    if kind == "bert":
        return BertForMaskedLM(BertConfig(**sizes, vocab_size=90)).eval()
    if kind == "gpt2":  # the output layer has the weights of the embedding table
        return GPT2LMHeadModel(GPT2Config(n_embd=12, n_layer=2, n_head=2, vocab_size=90)).eval()
    sizes |= {"num_key_value_heads": 2, "head_dim": 6, "vocab_size": 90}
    cap = {"final_logit_softcapping": 0.3 if kind == "capped" else None}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **cap)).eval()


@pytest.mark.parametrize("kind", others_slow(["bert", "gpt2", "gemma2", "capped"], ["gpt2", "capped"]))
def test_logits_are_differentiated_before_the_output_layer(kind: str) -> None:
    ids = torch.randint(1, 60, (1, 4), generator=torch.Generator().manual_seed(0))
    (site,) = hs.capture(_with_logits(kind), ids, scope="model", output="logits")
    assert (site.map.readout() is None) == (kind == "capped")
    found = hs.influence(site, rtol=1e-4)
    double = site.map.to(dtype=torch.float64)
    assert contains(found, dense_blocks(double, site.x[0]))
    assert found.converged.all()
    last = hs.influence(hs.capture(_with_logits(kind), ids, scope="model", output="logits")[0], outputs=-1)
    assert contains(last, dense_blocks(lambda x: double(x)[-1:], site.x[0]))
    hidden = hs.capture(_with_logits(kind), ids, scope="model")[0].map
    assert hidden.readout() is None


def test_maps_without_blocks_in_closed_form() -> None:
    x = tokens(2, 4, 6)
    q, k, v = (tokens(seed, 2, 3, 6) for seed in (10, 11, 12))
    two = hs.Compose(random_attention(1), random_attention(2, causal=True))
    others: list[hs.attention.TokenMap] = [hs.L2Attention(q, k, v), hs.SinkhornAttention(q, k, v)]
    for f in (two, *others):
        found = hs.influence(f, x, rtol=1e-3)
        assert contains(found, dense_blocks(f, x))
        assert found.converged.all()
        assert found.method == ("closed form" if f is two else "autodiff")


@pytest.mark.parametrize("name", ["gate", "windows", "fewer queries", "differential"])
def test_layers_in_stages(name: str) -> None:
    f = STAGED[name]()
    x = tokens(100, f.n, f.d)
    found = hs.influence(f, x, rtol=1e-3)
    blocks = dense_blocks(naive(f), x)
    assert found.value.shape == blocks.shape[:2]
    assert contains(found, blocks)
    assert found.converged.all()


def test_any_function_and_chosen_outputs() -> None:
    layer = torch.nn.TransformerEncoderLayer(6, 2, 9, batch_first=True, dropout=0.0).double().eval()
    x = tokens(7, 5, 6)
    blocks = dense_blocks(layer, x).detach()
    found = hs.influence(layer, x, outputs=[-1, 2], rtol=1e-6)
    assert found.outputs == (4, 2)
    assert contains(found, blocks[[4, 2]])
    assert found.method == "autodiff"
    assert found.scope == "TransformerEncoderLayer"

    def last(x: Tensor) -> Tensor:
        return torch.tanh(layer(x)[-1, :3])

    vector = hs.influence(last, x.float().double(), rtol=1e-6)
    assert vector.value.shape == (1, 5)
    assert contains(vector, dense_blocks(lambda x: last(x)[None], x.float().double()).detach())


def test_rounding_of_float32_derivatives_is_allowed_for() -> None:
    """Iterations in so few dimensions end exactly, so that only rounding keeps the limits apart."""
    attention = random_attention(4, temperature=3.0, dtype=torch.float32)

    def f(x: Tensor) -> Tensor:
        return attention.to(dtype=x.dtype)(x)

    x = tokens(5, 4, 6).float()
    found = hs.influence(f, x)
    assert found.method == "autodiff"
    assert contains(found, dense_blocks(f, x))


def test_one_entry_does_not_depend_on_the_others_and_seeds_matter() -> None:
    f, x = random_attention(5, d=30, d_out=30, heads=4), tokens(0, 6, 30)
    found = hs.influence(f, x, seed=3)
    assert torch.equal(found.upper, hs.influence(f, x, seed=3).upper)
    assert not torch.equal(found.upper, hs.influence(f, x, seed=4).upper)
    blocks = dense_blocks(f, x)
    assert contains(found, blocks)
    assert ((found.upper - found.lower) <= 1e-2 * found.value).all()


def test_equal_blocks_have_starts_of_their_own() -> None:
    """Equal input tokens have equal blocks, to which a few steps from other starts give other values."""
    x = tokens(0, 6, 30)
    x[1] = x[0]
    found = hs.influence(random_attention(5, d=30, d_out=30, heads=4), x, max_iterations=2)
    first, second = found.value[2:, 0], found.value[2:, 1]
    assert ((first - second).abs() > 1e-6 * first).all()


# ---- the token-wise constant


@pytest.mark.parametrize("name", ["multi-head", "causal grouped, hot", "pre-norm", "softcap, causal"])
def test_the_token_wise_constant_lies_between_its_limits(name: str) -> None:
    f, x = CASES[name](N), tokens(8, N, 6)
    blocks = dense_blocks(f, x)
    truth = largest_token_move(blocks)
    found = hs.influence(f, x, rtol=1e-4).token_wise
    assert found.lower <= truth * (1 + 1e-9)
    assert found.lower >= 0.98 * truth
    assert truth <= found.upper
    sums = torch.linalg.matrix_norm(blocks, 2).sum(dim=1)
    assert found.upper == pytest.approx(float(sums.max()), rel=2e-4)
    # The directions attain the lower limit.
    e = found.input_direction
    assert (e.norm(dim=-1) <= 1 + 1e-12).all()
    moved = torch.einsum("jab,jb->a", blocks[found.output], e)
    assert float(moved.norm()) == pytest.approx(found.lower, rel=1e-9)
    assert float(found.output_direction @ moved) == pytest.approx(found.lower, rel=1e-9)


def test_with_one_output_entry_the_two_limits_meet() -> None:
    """A map to one number: the tangents of all tokens add up, so that the sum of norms is attained."""
    found = hs.influence(lambda x: torch.softmax(x[:, 0], 0)[None] @ x[:, 1:2], tokens(1, 6, 4), rtol=1e-6)
    assert found.token_wise.lower == pytest.approx(found.token_wise.upper, rel=1e-5)


def test_tangents_that_are_rounded_to_float32_attain_no_more_than_there_is() -> None:
    """Rounded tangents may be too long; where the limit is attained, that alone would exceed the constant."""
    for seed in range(8):
        f, x = random_attention(seed, d_out=1, dtype=torch.float32), tokens(seed, 3, 6).float()
        truth = largest_token_move(dense_blocks(f.to(dtype=torch.float64), x))
        assert 0.98 * truth <= hs.influence(f, x).token_wise.lower <= truth * (1 + 1e-12)


# ---- the result


def test_table_and_figure_have_each_pair_and_the_words() -> None:
    found = hs.influence(CASES["causal"](N), tokens(0, N, 6))
    table = found.table
    assert list(table) == ["output", "input", "value", "lower", "upper", "converged"]
    row = table[(table["output"] == 3) & (table["input"] == 1)].iloc[0]
    assert row["value"] == float(found.value[3, 1])
    figure = found.plot(words=["a", "b$", "c", "d", "e"])
    axis, bar = figure.axes
    (image,) = axis.get_images()
    shown = image.get_array()
    assert shown.shape == (N, N)
    assert shown[3, 1] == pytest.approx(float(found.value[3, 1]))
    assert bool(torch.tensor(shown.mask)[1, 3])  # hidden by the mask
    assert [label.get_text() for label in axis.get_xticklabels()] == ["a", r"b\$", "c", "d", "e"]
    assert bar.get_title(loc="right") == "‖∂y/∂x‖₂"
    assert found._repr_html_().count("<img") == 1
    with pytest.raises(ArgumentError, match="words: expected 5 words"):
        found.plot(words=["a"])
    summed = hs.influence(lambda x: x.sum(dim=0, keepdim=True), tokens(0, 3, 4))  # outputs are no tokens
    axis = summed.plot(words=["a", "b", "c"]).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == [""]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["a", "b", "c"]


def test_what_did_not_converge_is_said_and_crossed_out() -> None:
    f, x = random_attention(5, d=30, d_out=30, heads=4), tokens(0, 3, 30)
    found = hs.influence(f, x, max_iterations=2)
    missed = int((~found.converged).sum())
    assert missed > 0
    assert f"{missed} of 9 NOT converged" in repr(found)
    assert len(found.plot().axes[0].texts) == missed
    assert contains(found, dense_blocks(f, x))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": None}, "x: expected tokens"),
        ({"x": torch.zeros(2, 4, 6, dtype=torch.float64)}, "one sequence"),
        ({"x": torch.zeros(4, 5, dtype=torch.float64)}, "X: expected tokens of shape"),
        ({"x": torch.zeros(4, 6)}, "dtype"),
        ({"outputs": [0, 4]}, "outputs: expected indices of the 4 output tokens"),
        ({"outputs": [0, -4]}, "each once"),
        ({"outputs": "last"}, "outputs"),
        ({"outputs": []}, "outputs"),
        ({"rtol": 0.0}, "rtol"),
        ({"confidence": 2.0}, "confidence"),
        ({"max_iterations": 0}, "max_iterations"),
        ({"seed": -1}, "seed"),
        ({"f": 3}, "f: expected a map"),
        ({"x": torch.full((4, 6), torch.nan, dtype=torch.float64)}, "x: expected finite"),
        ({"f": lambda x: x[None, None]}, "outputs of shape"),
    ],
)
def test_refuses_and_names_the_argument(change: dict[str, object], said: str) -> None:
    given = {"f": random_attention(0), "x": tokens(0, 4, 6)} | change
    with pytest.raises(ArgumentError, match=said):
        hs.influence(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("together", [2, 1])
def test_wide_outputs_are_differentiated_by_columns(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of both outputs at once, or of one after the other where memory holds those of one."""
    monkeypatch.setattr("howsmooth.lipschitz.block_norms._COLUMN_BYTES", together * 3 * 60 * 8)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)

    def wide(x: torch.Tensor) -> torch.Tensor:
        return (x.cumsum(0) @ weight.mT).tanh()

    told: list[float] = []
    found = hs.influence(wide, x, outputs=[-1, 1], on_output=lambda done, _: told.append(done))
    dense = torch.func.jacrev(wide)(x)  # (n, d_out, n, d)
    norms = torch.linalg.matrix_norm(dense.movedim(2, 1), 2)[[3, 1]]
    assert bool(((found.lower <= norms) & (norms <= found.upper)).all())
    assert bool((found.value[1, 2:] == 0).all())
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.25 * together, 2)


def test_the_name_of_a_model_and_a_text() -> None:
    model = hs.load_model("builtin-decoder", dtype=None)
    found, text = hs.influence("builtin-decoder", "Alice was"), "Alice was"
    wanted = hs.influence(model, torch.tensor([model.tokenizer.encode(text)]))
    assert torch.equal(found.value, wanted.value)
    assert "".join(found.words) == text
    with pytest.raises(ArgumentError, match="inputs: expected a text"):
        hs.influence("builtin-decoder")
