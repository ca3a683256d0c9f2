"""hs.profile against captures and constants taken one by one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import disk_offload
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE
from tqdm import tqdm

import howsmooth as hs
from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models import load_model
from howsmooth.profiling.model_input import shown_progress
from tests._tiny_models import tiny

IDS = torch.arange(3, 15)
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank."


@pytest.fixture(scope="module")
def encoder() -> hs.Profile:
    return hs.profile("builtin-encoder", TEXT, layers=[0, -1])


def test_every_row_is_the_constant_of_the_captured_map(encoder: hs.Profile) -> None:
    loaded = load_model("builtin-encoder")
    ids = torch.tensor([loaded.tokenizer.encode(TEXT)])
    assert encoder.n == ids.shape[1]
    for scope in ("attention", "head"):
        sites = hs.capture(loaded, ids, layers=[0, -1], scope=scope)
        rows = encoder.table[encoder.table["scope"] == scope]
        assert len(rows) == len(sites)
        for site, (_, row) in zip(sites, rows.iterrows(), strict=True):
            truth = hs.local_lipschitz(site.map.to(dtype=torch.float64), site.x[0].double(), rtol=1e-8)
            assert (row["layer"], row["name"]) == (site.layer, site.name)
            assert row["lower"] <= float(truth.value) * (1 + 1e-9)
            assert float(truth.value) <= row["upper"]
            assert row["converged"]
            assert row["upper"] - row["lower"] <= 1e-3 * row["value"]


def test_the_tokens_are_those_of_the_leading_directions(encoder: hs.Profile) -> None:
    (site,) = hs.capture(load_model("builtin-encoder"), ids_of(TEXT), layers=[0], scope="head", heads=[3])
    x = site.x[0].double()
    jacobian = torch.func.jacrev(site.map.to(dtype=torch.float64))(x).flatten(2).flatten(0, 1)
    _, u = torch.linalg.eigh(jacobian @ jacobian.mT)
    shares = torch.nn.functional.normalize(jacobian.mT @ u[:, -1], dim=0).reshape(x.shape).square().sum(dim=1)
    rows = encoder.sensitive_tokens(0, 3)
    assert rows["position"][0] == int(shares.argmax())
    assert rows["input_share"][0] == pytest.approx(float(shares.max()), abs=0.02)
    whole = encoder.tokens.groupby(["layer", "head", "scope"], dropna=False)[["input_share", "output_share"]]
    assert (whole.sum() - 1).abs().max().max() < 1e-6
    assert "".join(encoder.words) == TEXT


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([load_model("builtin-encoder").tokenizer.encode(text)])


@pytest.mark.parametrize(("name", "top"), [("llama", 0), ("gpt2", 2)])
def test_influence_is_that_of_the_layer_with_the_largest_constant(name: str, top: int) -> None:
    model = tiny(name)
    told: list[tuple[float, int]] = []
    found = hs.profile(model, IDS, influence=True, on_layer=lambda *at: told.append(at))
    layers = len(set(found.table["layer"]))
    assert told[-1] == (layers + 1, layers + 1)
    assert found.influence is not None
    constants = found.table[found.table["scope"] == "attention"].set_index("layer")["value"]
    assert constants.idxmax() == top
    site = hs.capture(model, IDS[None], layers=[top])[0]
    jacobian = torch.autograd.functional.jacobian(
        site.map.to(dtype=torch.float64), site.x[0].double(), vectorize=True
    )
    norms = torch.linalg.matrix_norm(jacobian.transpose(1, 2), 2)
    assert (found.influence.lower <= norms * (1 + 1e-9)).all()
    assert (norms <= found.influence.upper * (1 + 1e-9)).all()
    assert found.influence.converged.all()
    assert f"Which token moves which, layer {top}:" in repr(found)
    assert hs.profile(model, IDS, layers=[top]).influence is None


def test_inputs_of_every_kind_agree() -> None:
    model = tiny("llama")
    profile = partial(hs.profile, model, layers=[0], scopes="attention")
    by_ids = profile(IDS)
    for inputs in (IDS.tolist(), IDS[None], {"input_ids": IDS[None]}):
        assert profile(inputs).table.equals(by_ids.table)
    twice = torch.cat([IDS, IDS])
    assert profile(twice, span="0:12").table.equals(by_ids.table)
    assert profile(twice, span=(0, 12)).words == tuple(f"id {one}" for one in IDS.tolist())
    assert profile(twice, span=slice(None, 12)).n == 12


def test_a_module_with_a_tokenizer_of_transformers() -> None:
    class Letters:
        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            assert not add_special_tokens
            return {"input_ids": [ord(letter) - 90 for letter in text]}

        def decode(self, ids: list[int]) -> str:
            return chr(ids[0] + 90)

    found = hs.profile(tiny("gpt2"), "alice", tokenizer=Letters(), layers=[0])
    assert found.words == ("a", "l", "i", "c", "e")
    assert list(found.sensitive_tokens(0)["token"].sort_values()) == sorted("alice")

    class Plain:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) - 90 for letter in text]

        decode = Letters.decode

    assert hs.profile(tiny("gpt2"), "alice", tokenizer=Plain(), layers=[0]).table.equals(found.table)


def test_half_precision_is_said_and_gives_the_constants_of_float32() -> None:
    half = tiny("llama").to(torch.bfloat16)
    found = hs.profile(half, IDS)
    assert found.precision == "weights in bfloat16, computed in float32"
    assert found.precision in repr(found)
    assert found.precision in found.citation
    single = hs.profile(tiny("llama").to(torch.bfloat16).float(), IDS).table
    assert set(found.table["stored"]) == {"bfloat16"}
    assert set(found.table["computed"]) == set(single["computed"]) == set(single["stored"]) == {"float32"}
    assert found.table.drop(columns="stored").equals(single.drop(columns="stored"))
    assert set(hs.profile(half, IDS, layers=[0], confidence=0.9).table["confidence"]) == {0.9}


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        (None, [0, 1, 2, 3]),
        ("all", [0, 1, 2, 3]),
        (slice(0, 2), [0, 1]),
        (range(1, 3), [1, 2]),
        (1, [1]),
        ([0, -1], [0, 3]),
    ],
)
def test_layers_are_chosen_as_in_capture_and_progress_has_a_total(layers: Any, chosen: list[int]) -> None:
    told: list[tuple[int, int]] = []
    of = partial(hs.profile, "builtin-encoder", TEXT, scopes="attention", rtol=0.1)
    found = of(layers=layers, on_layer=lambda *at: told.append(at)).table
    assert told[0] == (0, len(chosen))
    assert told[-1] == (len(chosen), len(chosen))
    assert list(found["layer"]) == chosen


def test_a_bar_in_a_notebook_takes_a_new_total(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotebookBar(tqdm):  # its widget learns of a total when it is made, and by reset
        def __init__(self, **options: Any) -> None:
            super().__init__(**options | {"disable": False})
            self.drawn = self.total

        def reset(self, total: float | None = None) -> None:
            super().reset(total)
            self.drawn = total

    bars: list[NotebookBar] = []
    monkeypatch.setattr(
        "howsmooth.profiling.model_input.tqdm",
        lambda **options: bars.append(NotebookBar(**options)) or bars[-1],
    )
    with shown_progress(None, 1) as told:
        for done, total in ((0, 1), (2, 5), (3, 6)):
            told(done, total)
            assert (bars[0].n, bars[0].drawn) == (done, total)


def test_a_model_whose_weights_are_on_a_disk(tmp_path: Path) -> None:
    model = tiny("llama").to(torch.bfloat16)
    whole = hs.profile(model, IDS, layers=[0])
    disk_offload(model, tmp_path, execution_device="cpu")
    found = hs.profile(model, IDS, layers=[0])
    assert found.table.equals(whole.table)
    assert found.fingerprint == whole.fingerprint


def test_a_long_input_is_cut_and_says_so() -> None:
    found = hs.profile(tiny("gpt2"), torch.arange(40) + 3, layers=[0], scopes="attention")
    assert found.n == 32
    assert "tokens 0 to 31 of 40" in found.input
    assert found.input in repr(found)
    assert "GPT2Model, 1 token, " in repr(hs.profile(tiny("gpt2"), [3], layers=[0], scopes="attention"))


def test_layers_that_are_refused_are_named() -> None:
    class Two(torch.nn.Module):
        """A layer of softmax attention, and one whose mask depends on the tokens."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(_Attention(sparse=sparse) for sparse in (False, True))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
    found = hs.profile(Two(), x)
    assert set(found.table["layer"]) == {0}
    assert len(found.refused) == 1
    assert "sparsity" in found.refused[0]
    assert found.refused[0] in repr(found)
    with pytest.raises(CaptureError, match="sparsity"):
        hs.profile(Two(), x, layers=[1])


class _Attention(torch.nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.parts = torch.nn.Linear(8, 24)
        self.sparse = sparse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.parts(x).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / 2
        if self.sparse:
            scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) - 0.5, -1e9)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": "some text"}, "tokenizer="),
        ({"inputs": IDS[None].expand(2, -1)}, "one sequence at a time"),
        ({"inputs": torch.zeros(0, dtype=torch.int64)}, "inputs"),
        ({"inputs": object()}, "inputs"),
        ({"inputs": {"input_ids": [[1, 2]]}}, r'got list. Call the tokenizer with return_tensors="pt"'),
        ({"inputs": ["one text", "another"]}, "inputs of text 0: expected token ids .* tokenizer="),
        ({"inputs": "some text", "tokenizer": "a/folder"}, "got str. Give AutoTokenizer.from_pretrained"),
        ({"inputs": "some text", "tokenizer": RawTokenizer(BPE())}, "got Tokenizer. Give AutoTokenizer"),
        ({"span": "3:3"}, "span"),
        ({"span": "0:13"}, "number of tokens, got '0:13'. Give 0:12, for example"),
        ({"inputs": IDS.repeat(99), "span": "5:999"}, "got '5:999', 994 tokens. Give 5:37"),
        ({"span": "a:b"}, "span"),
        ({"span": slice(0, 8, 2)}, "span"),
        (
            {"scopes": ["block"]},
            "expected some of attention, head, mlp, whole-block, expert, got .*hs.capture has the",
        ),
        ({"scopes": []}, "scopes"),
        ({"scopes": "head", "influence": True}, "influence"),
        ({"rtol": 2.0}, "rtol"),
        ({"layers": [9]}, "layer"),
        ({"inputs": {"input_ids": IDS[None]}, "span": "0:2"}, "span"),
        ({"model": 3}, "model"),
        ({"inputs": __file__}, "inputs: expected the text itself, got the path of a file"),
        (
            {"inputs": "alice", "tokenizer": object()},
            "tokenizer: expected a tokenizer of",
        ),
    ],
)
def test_refuses_and_names_the_argument(change: dict[str, object], said: str) -> None:
    given = {"model": tiny("gpt2"), "inputs": IDS} | change
    with pytest.raises(ArgumentError, match=said):
        hs.profile(given.pop("model"), given.pop("inputs"), **given)  # type: ignore[arg-type]
