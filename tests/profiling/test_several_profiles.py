"""Profiles over many texts, and of two models, against single profiles and enumerated resamples."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import bootstrap
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models.loading import load
from howsmooth.profiling import several_profiles
from tests._tiny_models import tiny

TEXTS = [torch.arange(3, 9), torch.arange(20, 31), torch.arange(9, 4, -1)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("gpt2")


@pytest.fixture(scope="module")
def over(model: Any) -> hs.ProfileOverTexts:
    return hs.profile(model, TEXTS)


@pytest.fixture(scope="module")
def doubled(model: Any) -> Any:
    """The model with the values of head 1 in layer 1 times two."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        attention = other.h[1].attn.c_attn  # columns: queries, keys, values
        attention.weight[:, 48 + 6 : 48 + 12] *= 2
        attention.bias[48 + 6 : 48 + 12] *= 2
    return other


def values_of(over: hs.ProfileOverTexts, scope: str) -> np.ndarray:
    """The constants of a scope, one row a layer and head, one column a text."""
    rows = over.each[over.each["scope"] == scope]
    return np.stack([rows[rows["text"] == i]["value"].to_numpy() for i in range(len(TEXTS))], axis=1)


# ---- many texts


def test_the_rows_of_a_text_are_those_of_its_own_profile(over: hs.ProfileOverTexts, model: Any) -> None:
    for i, text in enumerate(TEXTS):
        alone = hs.profile(model, text)
        rows = over.each[over.each["text"] == i].drop(columns="text").reset_index(drop=True)
        pd.testing.assert_frame_equal(
            pd.DataFrame(rows), pd.DataFrame(alone.table[rows.columns]), check_exact=True
        )
        assert alone.input == over.inputs[i]
    assert over.n == sum(map(len, TEXTS))


@pytest.mark.parametrize("scope", ["head", "attention"])
def test_intervals_are_the_quantiles_of_all_resamples(scope: str, over: hs.ProfileOverTexts) -> None:
    x = values_of(over, scope)
    # Of three texts there are 27 resamples, so that the exact quantiles are far from the next values.
    drawn = np.array([x[:, list(one)] for one in itertools.product(range(3), repeat=3)])
    mean, spread = drawn.mean(axis=2), drawn.std(axis=2, ddof=1)
    rank = 1 + (mean[:, None, :] > mean[:, :, None]).sum(axis=2)
    table = over.table[over.table["scope"] == scope]
    own = {"mean": x.mean(axis=1), "spread": x.std(axis=1, ddof=1)}
    own["rank"] = 1 + (own["mean"][None] > own["mean"][:, None]).sum(axis=1)
    for name, all_drawn in (("mean", mean), ("spread", spread), ("rank", rank)):
        assert table[name].to_numpy() == pytest.approx(own[name], rel=1e-12)
        for end, share in (("lower", 0.025), ("upper", 0.975)):
            exact = np.quantile(all_drawn, share, axis=0, method="inverted_cdf")
            assert table[f"{name}_{end}"].to_numpy() == pytest.approx(exact, rel=1e-9, abs=1e-7)
    tenth = -(-len(x) // 10)
    among = [(x[:, i] >= sorted(x[:, i])[-tenth]) for i in range(3)]
    assert table["top"].to_list() == np.mean(among, axis=0).tolist()


def test_many_texts_give_the_intervals_of_another_bootstrap() -> None:
    x = np.random.default_rng(1).lognormal(size=(2, 40))
    rows = [{"text": i, "layer": layer, "head": 0, "scope": "head", "value": x[layer, i], "converged": True}
            for layer in range(2) for i in range(40)]  # fmt: skip
    table = several_profiles._statistics(pd.DataFrame(rows), 40, seed=0)
    for name, of in (("mean", np.mean), ("spread", partial(np.std, ddof=1))):
        other = bootstrap((x,), of, axis=-1, vectorized=True, method="percentile", rng=3).confidence_interval
        error = bootstrap((x,), of, axis=-1, vectorized=True, method="percentile", rng=3).standard_error
        for end, wanted in (("lower", other.low), ("upper", other.high)):
            assert (np.abs(table[f"{name}_{end}"] - wanted) < 0.15 * error).all()


def test_what_is_kept_is_not_measured_again(
    model: Any, over: hs.ProfileOverTexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, told = tmp_path / "texts.jsonl", list[tuple[float, int]]()
    measure, of_layers = several_profiles.row_of, partial(hs.profile, layers=[0, 1, 2])
    with monkeypatch.context() as patch:  # interrupted at the third text
        done = iter([measure, measure])
        patch.setattr(several_profiles, "row_of", lambda *given: next(done)(*given))
        with pytest.raises(StopIteration):
            of_layers(model, TEXTS, file=file)
    found = of_layers(model, TEXTS, file=file, on_layer=lambda *at: told.append(at))
    assert [at for at in told if at[0] % 1] == [(pytest.approx(2 + i / 3), 3) for i in (1, 2)]
    assert told[-1] == (3, 3)
    kept = file.read_text()
    assert of_layers(model, TEXTS, file=file).table.equals(found.table)
    assert file.read_text() == kept
    assert found.table.equals(over.table)
    assert found.each.equals(over.each)
    of_layers(model, TEXTS, file=file, seed=1)
    assert len(file.read_text().split()) > len(kept.split())


def test_rows_are_added_to_files_of_rows_only(model: Any, tmp_path: Path) -> None:
    file, of = tmp_path / "rows.jsonl", partial(hs.profile, model, TEXTS[:2], layers=[0], scopes="attention")
    for other in (b"Some text.\n\nMore", b'{\n "key": "a"\n}', b"3\n", b"\xff\xfe"):
        file.write_bytes(other)
        with pytest.raises(ArgumentError, match="file: expected a file of rows kept by howsmooth"):
            of(file=file)
        assert file.read_bytes() == other
    for cut in ("", "\n", '\n{"k', '\n{"key": "12'):
        file.write_text(cut)
        of(file=file)
        assert len([line for line in file.read_text().splitlines() if line.endswith("}")]) == 2


def test_a_loaded_model_that_was_changed_in_place_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, hashed = hs.load_model("builtin-decoder"), list[object]()
    of = partial(hs.profile, layers=[0], scopes="attention", file=tmp_path / "texts.jsonl")
    monkeypatch.setattr(
        load, "fingerprint", lambda *a, f=load.fingerprint, **k: (hashed.append(a), f(*a, **k))[1]
    )
    before = of(loaded, TEXTS[:2])
    assert len(hashed) == 1
    assert before.fingerprint == loaded.fingerprint
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.25)
    after = of(loaded, TEXTS[:2])
    assert after.fingerprint != before.fingerprint
    assert after.each["value"].to_list() == of(loaded.model, TEXTS[:2], file=None).each["value"].to_list()
    assert len(set(after.compare(before).fingerprint.split(" / "))) == 2


def test_what_is_said_of_many_texts(over: hs.ProfileOverTexts, tmp_path: Path) -> None:
    top = over.ranking.iloc[0]
    words = " ".join(repr(over).split())
    assert f"layer {top['layer']}, head {top['head']} mean {top['mean']:.4g} in [" in words
    assert (
        "percentile bootstrap over 3 texts (few: such intervals are too narrow), 0.95 confidence, 4999"
        in words
    )
    assert over.ranking["scope"].to_list() == ["head"] * 12 + ["attention"] * 3
    assert f"{top['mean']:.6g} in [" in over.citation
    names = [path.name for path in over.write(tmp_path)]
    assert names == ["profile.html", "profile.png", "profile.pdf", "profile.csv", "texts.csv"]
    page = (tmp_path / "profile.html").read_text()
    assert "one input" not in page
    assert "percentile bootstrap over 3 texts" in page
    described = json.loads(json.dumps(over.described()))
    assert described["ranking"][0]["rank"] == 1
    assert len(described["texts"]) == len(over.each)
    figure = over.plot()
    assert [axis.get_title() for axis in figure.axes] == ["scope head", "scope attention"]
    means, texts = figure.axes[0].collections[1:]
    assert means.get_offsets()[:, 1].tolist() == over.ranking["mean"][:12].to_list()
    assert len(texts.get_offsets()) == 36
    assert r"rank\_upper" in str(over.to_latex())


def test_layers_that_are_missing_at_a_text_are_left_out_and_said(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from howsmooth.profiling import lipschitz_profile

    heads = lipschitz_profile._heads

    def fails(layer: Any, also: Sequence[int] = (2,), **how: Any) -> Any:
        if layer.tokens.shape[1] == len(TEXTS[1]) and layer.self_attention.layer.index in also:
            raise CaptureError("too long")
        return heads(layer, **how)

    monkeypatch.setattr(lipschitz_profile, "_heads", fails)
    found = hs.profile(model, TEXTS)
    assert found.refused == ("Text 1: Layer 2, scope head: too long",)
    assert set(found.table[found.table["scope"] == "head"]["layer"]) == {0, 1}
    assert set(found.table[found.table["scope"] == "attention"]["layer"]) == {0, 1, 2}
    monkeypatch.setattr(lipschitz_profile, "_heads", partial(fails, also=range(3)))
    assert set(hs.profile(model, TEXTS).table["scope"]) == {"attention"}  # at one text no head
    with pytest.raises(ArgumentError, match="other: expected the same layers, heads and scopes"):
        found.compare(dataclasses.replace(found, each=found.each[found.each["layer"] < 2]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": TEXTS[:1]}, "inputs: expected one text, or a list of at least two"),
        ({"influence": True}, "influence: expected False .* with several inputs"),
        ({"span": "0:6"}, "span of text 2: expected"),
        ({"inputs": TEXTS[0], "file": "rows.jsonl"}, "file: expected None with one input"),
        (
            {"file": "/tmp"},
            r"file: expected a file of JSON lines that can be .*, got /tmp \(Is a directory\)",
        ),
        ({"file": __file__ + "/rows.jsonl"}, r"file: expected .*rows\.jsonl \("),
        ({"inputs": []}, "inputs: expected .* got an empty list"),
        (
            {"model": "builtin-decoder", "inputs": torch.tensor([5, -1])},
            "inputs: expected token ids from 0 .* got id -1",
        ),
        (
            {"model": "builtin-decoder", "inputs": {"input_ids": torch.tensor([[5, -1]])}},
            "inputs: expected token ids .* got id -1",
        ),
    ],
)
def test_refuses_and_names_the_argument(model: Any, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        hs.profile(**({"model": model, "inputs": TEXTS} | change))


# ---- two models


def test_a_model_compared_with_itself_has_ratios_of_one(model: Any, over: hs.ProfileOverTexts) -> None:
    alone = hs.profile(model, TEXTS[0])
    for found in (alone.compare(alone), over.compare(over)):
        assert (found.table["ratio"] == 1).all()
        assert not found.table["changed"].any()
        assert (found.table["ratio_lower"] < 1).all()
        assert (found.table["ratio_upper"] < 1.01).all()
    assert alone.compare(alone).level == pytest.approx(0.998)


def test_twice_the_values_of_a_head_have_a_ratio_of_two(
    model: Any, doubled: Any, over: hs.ProfileOverTexts
) -> None:
    for found in (
        hs.profile(doubled, TEXTS[0]).compare(hs.profile(model, TEXTS[0])),
        hs.profile(doubled, TEXTS).compare(over),
    ):
        heads = found.table[found.table["scope"] == "head"].set_index(["layer", "head"])
        top = heads.loc[(1, 1)]
        assert top["ratio"] == pytest.approx(2, rel=1e-6)
        assert top["ratio_lower"] < 2 < top["ratio_upper"]
        assert top["changed"]
        before = heads.loc[
            [(layer, head) for layer in (0, 1) for head in range(4) if (layer, head) != (1, 1)]
        ]
        assert before["ratio"].to_numpy() == pytest.approx(np.ones(7), rel=1e-6)
        assert not before["changed"].any()
        assert heads.loc[2]["changed"].any()  # what follows has other tokens
        first = found.ranking.iloc[0]
        assert (first["layer"], first["head"]) == (1, 1)
        assert "layer 1, head 1 ratio 2 in [" in " ".join(repr(found).split())
        assert "GPT2Model / GPT2Model" in found.title


def test_the_ratios_of_dense_jacobians_are_in_the_intervals(model: Any, doubled: Any) -> None:
    found = hs.profile(doubled, TEXTS[0]).compare(hs.profile(model, TEXTS[0]))
    for row in found.table[found.table["layer"] == 2].to_dict("records"):
        scope, heads = row["scope"], None if row["scope"] == "attention" else [int(row["head"])]
        norms = []
        for one in (doubled, model):
            (site,) = hs.capture(one, TEXTS[0][None], layers=[2], scope=scope, heads=heads)
            norms.append(dense_norm(site.map.to(dtype=torch.float64), site.x[0]))
        assert row["ratio_lower"] <= norms[0] / norms[1] <= row["ratio_upper"]


def test_the_interval_over_texts_is_that_of_paired_resamples(
    model: Any, doubled: Any, over: hs.ProfileOverTexts
) -> None:
    other = hs.profile(doubled, TEXTS)
    found = other.compare(over)
    table = found.table[found.table["scope"] == "head"]
    drawn = list(itertools.product(range(3), repeat=3))
    ratios = [values_of(other, "head")[:, one].mean(axis=1) / values_of(over, "head")[:, one].mean(axis=1)
              for one in map(list, drawn)]  # fmt: skip
    for end, share, sign in (("lower", 0.025, 1), ("upper", 0.975, -1)):
        exact = np.quantile(ratios, share, axis=0, method="inverted_cdf")
        wider = sign * (exact - table[f"ratio_{end}"].to_numpy()) / exact
        # Wider than the resamples by the intervals of the measurements, whose rtol is 0.001.
        assert (wider > 0).all()
        assert (wider < 2.1e-3).all()


def test_profiles_that_do_not_match_are_refused(model: Any, over: hs.ProfileOverTexts) -> None:
    alone = hs.profile(model, TEXTS[0], scopes="attention")
    same = "other: expected the same layers, heads and scopes"
    for other, said in (
        (
            hs.profile(model, TEXTS[1], scopes="attention"),
            "other: expected a profile of token ids, SHA.* If both are of one text, the tokenizers differ",
        ),
        (
            hs.profile(model, TEXTS[0], layers=[0], scopes="attention"),
            f"{same}, got in one of them only: scope attention, layer 1; scope attention, layer 2",
        ),
        (hs.profile(model, TEXTS[0]), f"{same}, got in one of them only: scope head, layer 0, head 0"),
        (over, "other: expected a profile of token ids"),
        (3, "got int"),
    ):
        with pytest.raises(ArgumentError, match=said):
            alone.compare(other)


def test_inputs_without_token_ids_are_told_apart() -> None:
    x = torch.randn(2, 1, 5, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    of = partial(hs.profile, nn.TransformerEncoder(layer, 1).eval(), scopes="attention")
    for same, other in (((x[0], x[0]), x[1]), (({"src": x[0]}, {"src": x[0]}), {"src": x[1]})):
        assert (of(same[0]).compare(of(same[1])).table["ratio"] == 1).all()
        with pytest.raises(ArgumentError, match="other: expected a profile of"):
            of(same[0]).compare(of(other))


def test_a_comparison_is_written_and_drawn(model: Any, doubled: Any, tmp_path: Path) -> None:
    found = hs.profile(doubled, TEXTS[0]).compare(hs.profile(model, TEXTS[0]))
    names = [path.name for path in found.write(tmp_path)]
    assert names == ["comparison.html", "comparison.png", "comparison.pdf", "comparison.csv"]
    assert found.fingerprint.split(" / ") == [
        hs.profile(one, TEXTS[0]).fingerprint for one in (doubled, model)
    ]
    assert all(one[:12] in found.citation for one in found.fingerprint.split(" / "))
    shown = found.plot().axes[0].collections[1].get_offsets()[:, 1]
    assert shown.tolist() == found.ranking["ratio"][:12].to_list()
    assert json.loads(json.dumps(found.described()))["ranking"][0]["changed"] is True


def test_a_constant_of_zero_has_no_ratio_or_an_exact_one(model: Any, tmp_path: Path) -> None:
    silent = copy.deepcopy(model)
    with torch.no_grad():
        silent.h[0].attn.c_attn.weight[:, 48 : 48 + 6] = 0
    one, other = (hs.profile(m, TEXTS[0], scopes="head") for m in (silent, model))
    zero = dataclasses.replace(one, table=one.table.assign(value=0.0, lower=0.0, upper=0.0))
    wanted = [(one, one, math.nan, False), (one, other, 0, True), (other, one, math.inf, True)]
    for a, b, ratio, changed in wanted:
        found = a.compare(b)
        row = found.table.iloc[0]
        ends = row[["ratio", "ratio_lower", "ratio_upper"]].to_list()
        assert ends == pytest.approx([ratio] * 3, nan_ok=True)
        assert bool(row["changed"]) is changed
        assert len(found.plot().axes[0].collections[1].get_offsets()) == 11
        words = " ".join(repr(found).split())
        assert "e+308" not in words + found.page()
        assert "e-32" not in words + found.page()
    assert "ratio inf in [inf, inf]" in repr(found)
    zero.compare(zero).write(tmp_path)
    assert "ratio none, both are 0, value 0, against 0" in repr(zero.compare(zero))
    assert "1 is outside 0 of 0 intervals" in repr(zero.compare(zero))


# ---- the parts of a block


def dense_norm(f: Any, x: Tensor) -> float:
    jacobian = torch.func.jacrev(f)(x.double())
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


def fed(model: nn.Module, inputs: Tensor, module: nn.Module) -> Tensor:
    """The tokens that a module is given, in float64."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(inputs[None])
    handle.remove()
    return seen[0].detach()[0]


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_parts_of_a_block_are_the_dense_jacobians_of_its_modules(name: str) -> None:
    ids, wide = TEXTS[0], tiny(name, torch.float64, "eager")
    found = hs.profile(tiny(name), ids, layers=[1], scopes=["whole-block", "mlp", "attention"])
    assert list(found.table["scope"]) == ["whole-block", "mlp", "attention"]
    blocks: Any = wide.encoder.layer if name == "bert" else wide.h if name == "gpt2" else wide.layers
    block = blocks[1]
    if name == "bert":
        mlp, path = (
            nn.Sequential(block.intermediate, block.output.dense),
            "intermediate.dense to encoder.layer.1",
        )
        x = fed(wide, ids, block.intermediate)
    else:
        mlp, path = block.mlp, "1.mlp"
        x = fed(wide, ids, block.mlp)
    rows = found.table.set_index("scope")
    truths = {"mlp": dense_norm(lambda x: mlp(x[None])[0], x)}
    whole = next(iter(hs.capture(wide, ids[None], layers=(1, 1), scope="span")))
    if name == "gpt2":  # the block alone, by hand
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None].double()
        truths["whole-block"] = dense_norm(
            lambda x: first(block(x[None], attention_mask=mask)), fed(wide, ids, block)
        )
    else:
        truths["whole-block"] = dense_norm(whole.map, whole.x[0])
    for scope, truth in truths.items():
        row = rows.loc[scope]
        assert row["lower"] <= truth * (1 + 1e-6)
        assert truth <= row["upper"] * (1 + 1e-6)
        assert row["converged"]
    assert path in rows.loc["mlp"]["name"]
    assert found.sensitive_tokens(1, scope="mlp")["input_share"][0] == pytest.approx(1)  # token by token
    assert (
        found.sensitive_tokens(1)["input_share"][0]
        == found.sensitive_tokens(1, scope="whole-block")["input_share"][0]
    )
    (panel,) = found.plot().axes[:1]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["attention", "mlp", "whole-block"]
    assert panel.images[0].get_array().tolist() == [
        [rows.loc[one]["value"] for one in sorted(truths | {"attention": 0})]
    ]


def first(returned: Any) -> Tensor:
    tokens: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return tokens.reshape(-1, tokens.shape[-1])


def test_the_experts_of_a_mixture_count_together() -> None:
    from transformers import MixtralConfig, MixtralModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=40, intermediate_size=8, num_local_experts=3, **sizes)
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    model = MixtralModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.ndim > 1 else 1)
    found = hs.profile(model, TEXTS[0], scopes="mlp").table.iloc[0]
    wide = copy.deepcopy(model).double()
    mixture: Any = wide.layers[0].mlp
    truth = dense_norm(lambda x: first(mixture(x[None])), fed(wide, TEXTS[0], mixture))
    assert found["lower"] <= truth * (1 + 1e-6)  # its tokens are in float64
    assert truth <= found["upper"]
    assert found["name"] == "layers.0.mlp"


def check_parts(model: Any, layer: int, maps: dict[str, tuple[Any, Tensor]]) -> None:
    rows = hs.profile(model, TEXTS[0], layers=[layer], scopes=list(maps)).table.set_index("scope")
    for scope, (f, x) in maps.items():
        row, truth = rows.loc[scope], dense_norm(f, x)
        assert row["lower"] <= truth * (1 + 1e-6)
        assert truth <= row["upper"] * (1 + 1e-6)


@pytest.mark.parametrize("layer", range(3))
def test_layers_that_share_one_mlp(layer: int) -> None:
    from transformers import AlbertConfig, AlbertModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "embedding_size": 8, "hidden_size": 12, "num_hidden_layers": 3}
    model = AlbertModel(AlbertConfig(**sizes, num_attention_heads=2, intermediate_size=16)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(20 if p.ndim > 1 else 1)  # so that the layers differ
    wide = copy.deepcopy(model).double()
    shared: Any = wide.encoder.albert_layer_groups[0].albert_layers[0]
    states = wide(TEXTS[0][None], output_hidden_states=True).hidden_states
    attended = shared.attention(states[layer])[0][0].detach()
    maps = {
        "mlp": (nn.Sequential(shared.ffn, shared.activation, shared.ffn_output), attended),
        "whole-block": (lambda x: first(shared(x[None])), states[layer][0].detach()),
    }
    check_parts(model, layer, maps)


@pytest.mark.parametrize("layer", range(2))
def test_the_parts_of_a_block_that_is_a_list_of_layers(layer: int) -> None:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 12, "d_kv": 6, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    model = T5EncoderModel(T5Config(**sizes)).eval()
    wide: Any = copy.deepcopy(model).double()
    block = wide.encoder.block[layer]
    bias = wide.encoder.block[0].layer[0].SelfAttention.compute_bias(len(TEXTS[0]), len(TEXTS[0])).detach()
    maps = {
        "mlp": (block.layer[1].DenseReluDense, fed(wide, TEXTS[0], block.layer[1].DenseReluDense)),
        "whole-block": (lambda x: first(block(x[None], position_bias=bias)), fed(wide, TEXTS[0], block)),
    }
    check_parts(model, layer, maps)


def test_a_block_without_an_mlp_is_refused() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, x, x)[0]
            return x

    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
    found = hs.profile(Layers().eval(), x, scopes=["attention", "mlp", "whole-block"])
    assert set(found.table["scope"]) == {"attention"}
    assert len(found.refused) == 4
    assert "scope whole-block: In layers.1 no MLP is found" in found.refused[-1]
