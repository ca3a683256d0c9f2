"""What capture refuses, and that it says why: never a wrong map, never a bare traceback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, BartConfig, PreTrainedModel

import howsmooth as hs
from howsmooth.errors import ArgumentError, CaptureError, NonFiniteError
from howsmooth.models import capture
from tests._tiny_models import VOCABULARY, tiny, token_ids


def make(config: Any) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModel.from_config(config).eval()


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scope": "everything"}, ["scope", "head, heads, attention, residual, block", "'everything'"]),
        ({"heads": [0]}, ["heads", "scope 'attention'"]),
        ({"layers": [3]}, ["layers", "from -3 to 2", "got 3", "3 layers"]),
        ({"layers": [-4]}, ["layers", "got -4"]),
        ({"layers": []}, ["layers", "empty"]),
        ({"layers": [1.0]}, ["layers", "1.0"]),
        ({"layers": [True]}, ["layers", "True"]),
        ({"layers": "01"}, ["layers", "'01'"]),
        ({"heads": [4], "scope": "head"}, ["heads", "from -4 to 3", "4 heads"]),
        ({"heads": [], "scope": "head"}, ["heads", "empty"]),
        ({"inputs": "some text"}, ["inputs", "str", "tokenizer"]),
        ({"inputs": [[1, 2]]}, ["inputs", "list"]),
        ({"inputs": torch.zeros(2, 3)}, ["inputs", "float32"]),
        ({"inputs": torch.zeros(3, dtype=torch.long)}, ["inputs", "(3,)", "torch.tensor([ids])"]),
        ({"inputs": torch.zeros(0, 3, dtype=torch.long)}, ["inputs", "(0, 3)"]),
        ({"inputs": torch.zeros(2, 0, dtype=torch.long)}, ["inputs", "(2, 0)"]),
        ({"inputs": torch.full((1, 3), VOCABULARY)}, ["0 to 59", "id 60", "tokenizer"]),
        ({"inputs": torch.full((1, 3), -1)}, ["id -1"]),
        ({"inputs": torch.ones(1, 33, dtype=torch.long)}, ["at most 32", "33"]),
        ({"inputs": {}}, ["input_ids", "an empty dict"]),
        ({"inputs": {"input_ids": token_ids(1, 4), "labels": token_ids(1, 4)}}, ["'labels'"]),
        ({"inputs": {"input_ids": [[1, 2]]}}, ["input_ids", "list"]),
        ({"inputs": {"input_ids": token_ids(1, 4), "past_key_values": torch.ones(1)}}, ["cache"]),
        (
            {"inputs": {"input_ids": token_ids(1, 4), "encoder_hidden_states": torch.ones(1)}},
            ["cross-attention"],
        ),
        (
            {"inputs": {"input_ids": token_ids(2, 2), "attention_mask": torch.tensor([[0, 0], [0, 1]])}},
            ["attention_mask", "a real token in every sequence", "nothing but padding"],
        ),
        ({"inputs": {"input_ids": token_ids(1, 4), "token_type_ids": token_ids(1, 4)}}, ["IndexError"]),
        ({"inputs": {"inputs_embeds": torch.zeros(1, 4, 24, dtype=torch.float64)}}, ["float32", "float64"]),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_arguments(arguments: dict[str, Any], words: list[str]) -> None:
    arguments = {"inputs": token_ids(1, 4), **arguments}
    with pytest.raises(ArgumentError) as error:
        capture(tiny("bert"), **arguments)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", ["bert", None])
@pytest.mark.usefixtures("unchecked")
def test_not_a_model(model: Any) -> None:
    with pytest.raises(ArgumentError, match=r"PreTrainedModel.*torch\.nn\.Module"):
        capture(model, token_ids(1, 4))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.zeros(1, 4, dtype=torch.long), ["inputs", "Linear", "RuntimeError"]),
        (torch.zeros(1, 4, 2, dtype=torch.float64), ["input", "float32", "float64"]),
        ({"tokens": torch.zeros(1, 4, 2)}, ["Linear", "(input)", "'tokens'"]),
        ({"input": 3}, ["input", "int"]),
        (torch.zeros(1, 0, 2), ["at least one token", "(1, 0, 2)"]),
        ({}, ["inputs", "an empty dict"]),
        (None, ["inputs", "NoneType"]),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_arguments_of_a_plain_module(inputs: Any, words: list[str]) -> None:
    with pytest.raises(ArgumentError) as error:
        capture(nn.Linear(2, 2), inputs)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_mixed_precision_and_no_weights() -> None:
    model = tiny("bert")
    model.encoder.layer[1].double()
    with pytest.raises(ArgumentError, match=r"float32.*float64"):
        capture(model, token_ids(1, 4))
    with pytest.raises(ArgumentError, match="meta"):
        capture(tiny("bert").to("meta"), token_ids(1, 4))


# ---- what is no self-attention


def test_no_softmax_at_all() -> None:
    with pytest.raises(CaptureError, match="No softmax attention of Linear was seen"):
        capture(nn.Linear(2, 2), torch.randn(1, 4, 2))


def test_cross_attention_is_left_out_and_refused_by_its_index() -> None:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, **heads)
    model, ids = make(config), token_ids(1, 4)
    assert [site.layer for site in capture(model, ids)] == [0, 1]
    for index in (2, -1):
        with pytest.raises(CaptureError, match=r"layer 2 \(decoder.*Capture it with scope .cross-attention"):
            capture(model, ids, layers=[0, index])


@pytest.mark.parametrize("zero", ["q k", "k", "v", "k v", "q k v"])
def test_a_layer_with_weights_of_zero_is_no_cross_attention(zero: str) -> None:
    model, n = tiny("qwen2", torch.float64), 4  # biases of queries and keys turn with the positions
    attention: Any = model.layers[1].self_attn
    with torch.no_grad():
        for name in zero.split():
            attention.get_submodule(f"{name}_proj").weight.zero_()
        attention.k_proj.bias.zero_()  # without keys, attention is uniform
    (row,) = hs.profile(
        model, token_ids(1, n), layers=[1], scopes=["attention"], rtol=1e-6
    ).table.itertuples()
    values = attention.v_proj.weight.unflatten(0, (2, 6)).repeat_interleave(2, 0).flatten(0, 1)
    means = torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]
    norms = [torch.linalg.matrix_norm(t, 2).item() for t in (means, attention.o_proj.weight @ values)]
    assert row.value == pytest.approx(norms[0] * norms[1], rel=1e-6)


@pytest.mark.parametrize("zero", ["q", "k", "v", "q k v"])
def test_cross_attention_with_weights_of_zero_is_said(zero: str) -> None:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, **heads)
    model: Any = make(config)
    with torch.no_grad():
        for name in zero.split():
            model.decoder.layers[0].encoder_attn.get_submodule(f"{name}_proj").weight.zero_()
    found = hs.profile(model, token_ids(1, 4), scopes=["attention"])
    assert found.table["layer"].tolist() == [0, 1]
    assert "layer 2 (decoder.layers.0.encoder_attn, BartAttention) may be self-attention or cross" in repr(
        found
    )


class Heads(nn.Module):
    """Softmax attention in plain PyTorch; what its scores and its output become is left to others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.proj, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def scores(self, s: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return s

    def output(self, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.proj(o)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        p = self.scores(q @ k.mT / 2, x).softmax(dim=-1)
        return self.output((p @ v).transpose(1, 2).flatten(2), x)


class TopKeys(Heads):
    def scores(self, s: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return s.masked_fill(s < s.topk(2, dim=-1).values[..., -1:], float("-inf"))


class ResidualInside(Heads):
    def output(self, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.norm(o))


class DrawsAtRandom(Heads):
    def scores(self, s: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return s + torch.rand_like(s)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (TopKeys, "layer 0.*data-dependent sparsity"),
        (ResidualInside, r"norm \(LayerNorm\) lies between.*own output holds a residual"),
        (DrawsAtRandom, "layer 0.*draws something at random"),
    ],
)
def test_modules_refused_by_name(kind: type[Heads], words: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(1, 5, 8)
    assert capture(Heads(), x)[0].path == "closed form"
    with pytest.raises(CaptureError, match=words):
        capture(kind(), x)


def _unknown_norm(model: Any) -> None:
    class SomeNorm(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    for layer in model.encoder.layer:
        layer.attention.output.LayerNorm.__class__ = SomeNorm


def test_unknown_norm_is_refused_in_scope_block_only() -> None:
    model, ids = tiny("bert"), token_ids(1, 4)
    _unknown_norm(model)
    capture(model, ids)
    with pytest.raises(CaptureError, match="SomeNorm"):
        capture(model, ids, scope="block")


# ---- what only values can tell: the structure looks right, and the numbers are not


def test_positions_that_differ_between_the_sequences() -> None:
    model, ids = tiny("llama"), token_ids(2, 5)
    positions = torch.stack([torch.arange(5), torch.tensor([0, 3, 4, 9, 11])])
    capture(model, {"input_ids": ids, "position_ids": positions[1:]})
    with pytest.raises(CaptureError, match="differ between the sequences"):
        capture(model, {"input_ids": ids, "position_ids": positions})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_that_hides_every_key(attention: str) -> None:
    mask = torch.ones(1, 1, 5, 5).triu(1).bool()
    with pytest.raises(CaptureError, match="hides every key from some token"):
        capture(tiny("bert", attention=attention), {"input_ids": token_ids(1, 5), "attention_mask": mask})


def _before_the_matrix(output: Any) -> None:
    output.forward = lambda h, x: output.LayerNorm(output.dense(h.tanh()) + x)


def _after_the_matrix(output: Any) -> None:
    output.forward = lambda h, x: output.LayerNorm(output.dense(h).tanh() + x)


def _scaled_after_the_matrix(output: Any) -> None:
    output.forward = lambda h, x: output.LayerNorm(3 * output.dense(h) + x)


def _adapter_after_the_matrix(output: Any) -> None:
    output.adapter = nn.Linear(24, 24)

    def forward(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = output.dense(h)
        return output.LayerNorm(h + output.adapter(output.LayerNorm(h)) + x)

    output.forward = forward


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (_before_the_matrix, "self"),
        (_after_the_matrix, "output.dense"),
        (_scaled_after_the_matrix, "output.dense"),
        (_adapter_after_the_matrix, "output.dense"),
    ],
)
def test_what_happens_between_heads_and_residual_is_not_dropped(
    change: Callable[[Any], None], where: str
) -> None:
    model, ids = tiny("bert"), token_ids(1, 5)
    change(model.encoder.layer[1].attention.output)
    for scope in ("attention", "residual"):
        message = (
            rf"layer 1 .* has no scope '{scope}': the output of encoder.layer.1.attention.{where} .*'heads'"
        )
        with pytest.raises(CaptureError, match=message):
            capture(model, ids, layers=[1], scope=scope)
    heads = capture(tiny("bert"), ids, layers=[1], scope="heads")[0]
    kept = capture(model, ids, layers=[1], scope="heads")[0]
    torch.testing.assert_close(kept.map(kept.x), heads.map(heads.x))


def test_weights_that_are_not_finite() -> None:
    model = tiny("gpt2")
    with torch.no_grad():
        model.h[1].mlp.c_proj.bias[0] = float("nan")
    assert len(capture(model, token_ids(1, 4), layers=[0, 1])) == 2
    with pytest.raises(NonFiniteError, match=r"infinity in h\.1\.mlp\.c_proj\.bias\. Load weights"):
        capture(model, token_ids(1, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q_proj", "v_proj", "o_proj"])
def test_errors_name_the_weight_that_is_not_finite(name: str, bad: float) -> None:
    model = tiny("llama")
    name = f"layers.2.self_attn.{name}.weight"
    with torch.no_grad():
        model.get_parameter(name).fill_(bad)
    for scope in (
        "attention",
        "model",
        "span",
    ):  # of the last layer, LAPACK says no more than "internal assert"
        with pytest.raises(NonFiniteError, match=rf"^model: expected finite .* infinity in {name}\."):
            capture(model, token_ids(1, 4), scope=scope)


class _ChosenKeys(nn.Module):
    """A mask of the tokens, made outside of the module that uses it."""

    def __init__(self, *, by_tokens: bool) -> None:
        super().__init__()
        self.by_tokens = by_tokens
        self.score, self.inner = nn.Linear(16, 1), _Masked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = self.score(x).squeeze(-1)
        keep = score >= score.median(dim=-1, keepdim=True).values
        return self.inner(
            x, keep[:, None, None, :] if self.by_tokens else torch.ones_like(keep)[:, None, None]
        )


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(heads.transpose(1, 2).flatten(2))


def test_keys_chosen_by_a_module_around_the_owner() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 16)
    for by_tokens in (False, True):
        model = nn.Sequential(_ChosenKeys(by_tokens=by_tokens)).eval()
        if by_tokens:
            with pytest.raises(CaptureError, match="data-dependent sparsity"):
                capture(model, x)
        else:
            assert capture(model, x)[0].masking == "none"
