"""hs.precision against quantised caches and modules of the models themselves, and against dense Jacobians."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DynamicCache,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    PreTrainedConfig,
)

import howsmooth as hs
from howsmooth.errors import HowsmoothError
from howsmooth.models.recorded_softmaxes import RecordedModel
from tests._shared import shared_data
from tests._tiny_models import tiny, token_ids
from tests.profiling.test_entry_sensitivities import jacobians

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank, and of nothing to do."
SHAPE = {"vocab_size": 60, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4,
         "num_hidden_layers": 2, "max_position_embeddings": 32}  # fmt: skip
IDS = token_ids(1, 10)


def with_sharp_attention(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(torch.randn(p.shape, generator=generator) * (1.5 / p.shape[-1] ** 0.5))
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return with_sharp_attention(LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2)))


@pytest.fixture(scope="module")
def of_llama(llama: nn.Module) -> hs.Precision:
    return hs.precision(llama, IDS, bits=(6, 3), quantisers=("token", "channel"))


@pytest.fixture(scope="module")
def with_budgets(llama: nn.Module) -> hs.Precision:
    return hs.precision(llama, IDS, bits=(2, 3, 4), quantisers=("token", "kivi-3-2"), average=3.2)


@pytest.fixture(scope="module")
def encoder() -> hs.Precision:
    options = {"layers": [0, -1], "bits": (2, 4), "quantisers": ("token", "group-32", "group-64")}
    return hs.precision("builtin-encoder", TEXT, span="0:16", **options)


def quantised(t: Tensor, bits: int, dim: int) -> Tensor:
    """Absmax quantisation with one step for each slice along ``dim``, written out."""
    step = t.abs().max(dim=dim, keepdim=True).values / (2 ** (bits - 1) - 1)
    return torch.round(t / step) * step


def kivi(t: Tensor, bits: int, operand: str, group: int, window: int) -> Tensor:
    """Keys in groups of tokens of one channel, values in groups of channels of one token, written out."""
    n, found = t.shape[-2] - window, t.clone()
    size = (group, 1) if operand == "K" else (1, group)
    for i in range(0, n - size[0] + 1, size[0]):
        for c in range(0, t.shape[-1], size[1]):
            part = found[..., i : i + size[0], c : c + size[1]]
            low, high = part.amin((-2, -1), keepdim=True), part.amax((-2, -1), keepdim=True)
            step = (high - low) / (2**bits - 1)
            part.copy_(torch.round((part - low) / step) * step + low)
    return found


class QuantisedCache(DynamicCache):
    """A KV cache of transformers that stores the keys or values of some heads and layers in few bits."""

    def __init__(self, *cases: pd.Series) -> None:
        super().__init__()
        self.cases = cases

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *a: object, **k: object):
        key_states, value_states = key_states.clone(), value_states.clone()
        for case in self.cases:
            if layer_idx == case["layer"]:
                t = key_states if case["operand"] == "K" else value_states
                head = t[:, case["head"]]
                if case["quantiser"] == "kivi-3-2":
                    head.copy_(kivi(head, case["bits"], case["operand"], 3, 2))
                else:
                    head.copy_(quantised(head, case["bits"], -1 if case["quantiser"] == "token" else -2))
        return super().update(key_states, value_states, layer_idx, *a, **k)


def divergence(plain: Tensor, other: Tensor) -> float:
    """The mean over tokens of the divergence between softmaxes of logits."""
    p, q = plain.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@torch.no_grad()
def kl_of_a_quantised_cache(model: nn.Module, cases: pd.DataFrame) -> float:
    cache = QuantisedCache(*(case for _, case in cases.iterrows()))
    return divergence(model(IDS).logits, model(IDS, past_key_values=cache, use_cache=True).logits)


@torch.no_grad()
def test_the_changes_are_those_of_a_quantised_cache(
    llama: nn.Module, of_llama: hs.Precision, with_budgets: hs.Precision
) -> None:
    assert len(of_llama.table) == 2 * 2 * 2 * 2 * 2
    rows = pd.concat([of_llama.table, with_budgets.table.query("quantiser == 'kivi-3-2' and bits == 3")])
    kept: dict[int, Tensor] = {}
    for i, layer in enumerate(llama.model.layers):
        layer.self_attn.register_forward_hook(lambda m, a, out, i=i: kept.__setitem__(i, out[0].detach()))
    llama(IDS)
    own = dict(kept)
    for index in range(len(rows)):
        case = rows.iloc[index]
        kl = kl_of_a_quantised_cache(llama, rows.iloc[[index]])  # which runs that cache last
        layer = case["layer"]
        change = torch.linalg.vector_norm(kept[layer] - own[layer])
        assert case["change"] == pytest.approx(float(change), rel=2e-3, abs=1e-5)
        assert case["kl"] == pytest.approx(kl, rel=2e-2, abs=1e-7)
        assert case["output_norm"] == pytest.approx(float(torch.linalg.vector_norm(own[layer])), rel=1e-4)


def test_all_at_once_is_a_cache_that_is_quantised_as_a_whole(
    llama: nn.Module, of_llama: hs.Precision
) -> None:
    rows = of_llama.together.set_index(["quantiser", "bits"])["kl"]
    assert len(rows) == 4
    for (quantiser, bits), kl in rows.items():
        cases = of_llama.table.query("quantiser == @quantiser and bits == @bits")
        assert len(cases) == 8
        assert kl == pytest.approx(kl_of_a_quantised_cache(llama, cases), rel=2e-2)
        assert of_llama.simulate(bits, quantiser) == kl
        assert f"{kl:.3g} at {bits} bits" in repr(of_llama)
        assert f"{kl:.3g} at {bits} bits" in of_llama.citation
    assert of_llama.described()["together"][0]["kl"] == rows.iloc[0]
    assert "All keys and values of layers 0, 1 at once by token: " in repr(of_llama)


def test_a_simulated_budget_is_a_cache_with_these_bits(llama: nn.Module, of_llama: hs.Precision) -> None:
    budget = of_llama.budget(4.5)
    assert set(budget["bits"]) == {3, 6}
    truth = kl_of_a_quantised_cache(llama, budget.assign(quantiser="token"))
    assert of_llama.simulate(budget) == pytest.approx(truth, rel=2e-2)
    few = budget[budget["layer"] == 1]
    truth = kl_of_a_quantised_cache(llama, few.assign(quantiser="channel"))
    assert of_llama.simulate(few, "channel") == pytest.approx(truth, rel=2e-2)


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=60, hidden_size=24, n_layer=2, n_head=4),  # heads and batch are one axis
        GPT2Config(vocab_size=60, n_embd=24, n_layer=2, n_head=4),
        Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=6, sliding_window=32),  # a soft cap
        # One norm for the queries of all heads, and one for the keys
        Olmo2Config(**SHAPE, num_key_value_heads=2, eos_token_id=1, pad_token_id=0),
    ],
    ids=lambda config: config.model_type,
)
def test_divergences_of_other_decoders_are_those_of_a_quantised_cache(config: PreTrainedConfig) -> None:
    model = with_sharp_attention(AutoModelForCausalLM.from_config(config))
    table = hs.precision(model, IDS, bits=3, quantisers="token", layers=[1]).table
    assert bool((table["change"] <= table["bound"]).all())
    for index in range(len(table)):
        kl = kl_of_a_quantised_cache(model, table.iloc[[index]])
        assert table.iloc[index]["kl"] == pytest.approx(kl, rel=2e-2, abs=1e-7)


def test_the_prediction_is_the_root_mean_square_of_the_jacobian(
    llama: nn.Module, of_llama: hs.Precision
) -> None:
    (site,) = hs.capture(llama, IDS, layers=[1])
    f, x = site.map.to(dtype=torch.float64), site.x[0].double()
    _, k, v = f.projections(x)
    _, by_key, by_value = jacobians(f, x)
    for operand, t, dense in (("K", k, by_key), ("V", v, by_value)):
        for head in range(2):
            # Independent errors, uniform within half a step, have the variance step² / 12.
            step = t[head].abs().amax(dim=-1, keepdim=True) / 31
            truth = (dense[:, head].square() * step.square() / 12).sum().sqrt()
            table = of_llama.table.set_index(["layer", "operand", "head", "bits", "quantiser"])
            found = table["predicted"][1, operand, head, 6, "token"]
            assert found == pytest.approx(float(truth), rel=1e-6)


def test_the_predicted_divergence_is_the_mean_of_small_errors(llama: nn.Module) -> None:
    whole, size = RecordedModel(llama, IDS), 2e-3
    squares = whole.squared_gradients(300, seed=0)
    generator = torch.Generator().manual_seed(1)
    for layer, which in itertools.product(range(2), range(2)):

        def change(index: int, *given: Tensor, layer: int = layer, which: int = which):
            moved = list(given)
            noise = torch.randn(given[which].shape, generator=generator)
            moved[which] = given[which] + size * noise
            return (moved[0], moved[1]) if index == layer else None

        real = sum(whole.mean_kl(change) for _ in range(40)) / 40
        predicted = 0.5 * size**2 * float(squares[layer][which].sum()) / IDS.shape[1]
        assert predicted == pytest.approx(real, rel=0.2)


def test_no_real_change_goes_beyond_its_bound(
    of_llama: hs.Precision, with_budgets: hs.Precision, encoder: hs.Precision
) -> None:
    for table in (of_llama.table, with_budgets.table, encoder.table):
        assert bool((table["change"] <= table["bound"]).all())
        assert bool((table["predicted"] <= table["bound"]).all())
        assert bool((table["bound"] < 500 * table["change"]).all())


def test_predicted_and_real_effects_agree_in_rank(encoder: hs.Precision) -> None:
    for found in (
        encoder,
        hs.precision("builtin-decoder", TEXT, span="0:16", layers=[0, -1], bits=(2, 4), quantisers="token"),
    ):
        ranks = found.agreement.set_index(["bits", "predicted", "real"])["spearman"]
        assert ranks[0, "predicted", "change"] >= 0.97
        assert ranks[0, "predicted_kl", "kl"] >= 0.95
        truth = found.table["predicted"].rank().corr(found.table["change"].rank())
        assert ranks[0, "predicted", "change"] == pytest.approx(truth)


@pytest.mark.slow
def test_stories260k_agrees_in_rank() -> None:
    found = hs.precision(shared_data("stories260k"), TEXT, span="0:24", quantisers=("token", "channel"))
    ranks = found.agreement.set_index(["bits", "predicted", "real"])["spearman"]
    assert ranks[0, "predicted", "change"] >= 0.97
    assert ranks[0, "predicted_kl", "kl"] >= 0.95


def test_what_cannot_be_ranked_is_said(encoder: hs.Precision) -> None:
    equal = replace(encoder, table=encoder.table.assign(change=0.0))
    assert "predicted and change none exists" in repr(equal) + equal.citation


def test_equal_quantisers_have_rows_once(encoder: hs.Precision) -> None:
    assert list(encoder.table["quantiser"].unique()) == ["token"]
    only = hs.precision(tiny("gpt2"), IDS, bits=3, quantisers=("group-64", "token"), layers=[0]).table
    assert list(only["quantiser"].unique()) == ["group-64"]


def test_a_model_without_logits_says_so() -> None:
    found = hs.precision(tiny("bert"), IDS, bits=4, quantisers="token", layers=[0])
    assert not found.has_kl
    assert bool(found.table[["kl", "predicted_kl"]].isna().all().all())
    assert "BertModel has no logits" in found.refused[0]
    assert found.refused[0] in repr(found)
    assert list(found.agreement["bits"]) == [0]  # with one number of bits, all rows are those of 4 bits
    assert list(found.agreement["real"]) == ["change"]
    assert list(found.ranking["predicted"]) == sorted(found.table["predicted"], reverse=True)


def test_logits_are_left_out_on_demand(llama: nn.Module, of_llama: hs.Precision) -> None:
    found = hs.precision(llama, IDS, bits=(6, 3), quantisers=("token", "channel"), logits=False)
    assert not found.has_kl
    assert not found.refused
    assert found.together.empty
    assert "at once" not in repr(found)
    kept = ["layer", "head", "operand", "bits", "predicted", "change", "bound"]
    assert found.table[kept].equals(of_llama.table[kept])


def test_predictions_that_are_too_large_have_a_star(of_llama: hs.Precision) -> None:
    large = of_llama.table["predicted_kl"].nlargest(3).to_list()
    found = replace(
        of_llama, table=of_llama.table.assign(predicted_kl=lambda t: t["predicted_kl"] * 0.099 / large[2])
    )
    said = repr(found)
    assert said.count("*") == 3  # two rows, and the sentence
    assert f"{0.099 * large[0] / large[2]:.4g}*" in said
    assert "Above 0.1 nats" in said
    few = replace(found, table=found.table[found.table["predicted_kl"] <= 0.1])
    assert "*" not in repr(few)


def test_a_model_in_half_precision_has_the_changes_of_float32(llama: nn.Module) -> None:
    half = LlamaForCausalLM(llama.config).to(torch.bfloat16).eval()
    found = hs.precision(half, IDS, bits=3, quantisers="token")
    assert (found.stored, found.computed) == ("bfloat16", "float32")
    whole = hs.precision(half.float(), IDS, bits=3, quantisers="token").table
    for column in ("change", "kl", "predicted_kl"):
        assert torch.allclose(torch.tensor(found.table[column]), torch.tensor(whole[column]), rtol=1e-3)


def test_any_module_with_attention_is_taken() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), 1)
    found = hs.precision(model, torch.randn(1, 5, 8), bits=4, quantisers="token")
    assert len(found.table) == 2 * 2


def test_the_budget_is_the_best_of_all_choices(of_llama: hs.Precision) -> None:
    few = of_llama.table[of_llama.table["layer"] == 0]
    found = replace(of_llama, table=few, logits=None)
    budget = found.budget(4.5, "token")
    rows = few[few["quantiser"] == "token"].set_index(["layer", "head", "operand", "bits"])
    means = (rows["kl"] * rows["predicted_kl"]) ** 0.5
    places = [tuple(row) for row in budget[["layer", "head", "operand"]].itertuples(index=False)]
    choices = [one for one in itertools.product((3, 6), repeat=len(places)) if sum(one) <= 4.5 * len(places)]
    best = min(choices, key=lambda one: sum(means[(*at, b)] for at, b in zip(places, one, strict=True)))
    assert tuple(budget["bits"]) == best
    assert list(budget["effect"]) == [rows["kl"][(*at, b)] for at, b in zip(places, best, strict=True)]
    assert set(found.budget(6, "token")["bits"]) == {6}
    without = replace(found, table=few.assign(kl=float("nan")))
    lowest = few[(few["bits"] == 3) & (few["quantiser"] == "token")]
    truth = (lowest["predicted"] / lowest["output_norm"]).pow(2).sum()
    assert without.budget(3, "token")["effect"].sum() == pytest.approx(truth)


def test_the_average_is_that_of_all_quantised_numbers(with_budgets: hs.Precision) -> None:
    for quantiser, key_tokens in (("token", 10), ("kivi-3-2", 6)):
        budget = with_budgets.budget(3.2, quantiser)
        entries = budget["operand"].map({"K": 6 * key_tokens, "V": 6 * (10 if quantiser == "token" else 8)})
        assert list(budget["entries"]) == list(entries)
        left = 3.2 * entries.sum() - (budget["bits"] * entries).sum()
        assert 0 <= left < entries.min()  # not enough for another bit
        row = with_budgets.mixed.set_index("quantiser").loc[quantiser]
        assert row["bits"] == pytest.approx((budget["bits"] * entries).sum() / entries.sum(), rel=1e-15)
    sizes = with_budgets.table["operand"].map({"K": 1, "V": 100})
    budget = replace(with_budgets, table=with_budgets.table.assign(entries=sizes), logits=None).budget(3.2)
    left = 3.2 * 4 * 101 - (budget["bits"] * budget["entries"]).sum()
    assert 0 <= left < 100


def test_a_budget_is_the_best_at_once_of_several(with_budgets: hs.Precision) -> None:
    without = replace(with_budgets, logits=None)
    gains = []
    for average, quantiser in itertools.product((2.4, 3, 3.2, 3.6), ("token", "kivi-3-2")):
        kl = with_budgets.simulate(with_budgets.budget(average, quantiser), quantiser)
        gains.append(with_budgets.simulate(without.budget(average, quantiser), quantiser) - kl)
        assert kl <= with_budgets.simulate(int(average), quantiser)
    assert min(gains) >= 0
    assert max(gains) > 0
    useless = with_budgets.table.assign(kl=1.0, predicted_kl=1.0)
    assert set(replace(with_budgets, table=useless).budget(3.2)["bits"]) == {3}


def test_budgets_are_kept_and_better_at_once_than_equal_bits(
    llama: nn.Module, with_budgets: hs.Precision, tmp_path: Path
) -> None:
    page = with_budgets.write(tmp_path)[0].read_text(encoding="utf-8")
    table, told = pd.read_csv(tmp_path / "precision.csv"), with_budgets.described()
    place = ["layer", "head", "operand", "bits", "quantiser"]
    chosen = table[table["in_budget"]][place].sort_values(place)
    assert chosen.values.tolist() == with_budgets.budgets[place].sort_values(place).values.tolist()
    assert len(chosen) == 2 * 8
    for row in with_budgets.mixed.to_dict("records"):
        own = table[table["quantiser"] == row["quantiser"]]
        assert row["kl"] == pytest.approx(kl_of_a_quantised_cache(llama, own[own["in_budget"]]), rel=2e-2)
        truth = kl_of_a_quantised_cache(llama, own[own["bits"] == 3])
        assert (row["average"], row["equal_bits"]) == (3.2, 3)
        assert row["equal_kl"] == pytest.approx(truth, rel=2e-2)
        assert row["kl"] < row["equal_kl"]
        assert row in told["mixed"]
        said = f"({row['quantiser']}), in fact {row['bits']:.4g}; at once: divergence {row['kl']:.3g}"
        said = f"Bits for an average of 3.2 {said}, with 3 bits for all {row['equal_kl']:.3g}."
        assert said in page
        assert said in repr(with_budgets)
    bits = " ".join(map(str, with_budgets.budgets["bits"][with_budgets.budgets["operand"] == "K"][:2]))
    assert f">{bits}</td>" in page
    assert len(told["budget"]) == 16


def test_page_figure_and_table(of_llama: hs.Precision, tmp_path: Path) -> None:
    paths = of_llama.write(tmp_path)
    assert [path.name for path in paths] == [f"precision.{end}" for end in ("html", "png", "pdf", "csv")]
    page = paths[0].read_text(encoding="utf-8")
    assert list(of_llama.ranking["kl"]) == sorted(of_llama.table["kl"], reverse=True)
    top = of_llama.ranking.iloc[0]
    assert f">{top['predicted_kl']:.4g}</td>" in page
    assert "32 of 32" not in page
    table = pd.read_csv(paths[3])
    assert list(table["change"]) == list(of_llama.table["change"])
    panels = of_llama.plot().axes
    few = of_llama.table.query("operand == 'K' and quantiser == 'token' and bits == 3")
    assert panels[0].images[0].get_array().flatten().tolist() == pytest.approx(list(few["kl"]))
    assert len(panels[2].collections[0].get_offsets()) == len(of_llama.table) // 2


REFUSED: dict[str, tuple[Callable[[hs.Precision], object], str]] = {
    "bits": (lambda _: hs.precision(tiny("gpt2"), IDS, bits=(8, 1)), "bits"),
    "no bits": (lambda _: hs.precision(tiny("gpt2"), IDS, bits=()), "bits"),
    "parts of bits": (lambda _: hs.precision(tiny("gpt2"), IDS, bits=3.5), "bits"),
    "quantiser": (lambda _: hs.precision(tiny("gpt2"), IDS, quantisers="row"), "quantisers"),
    "span": (lambda _: hs.precision(tiny("gpt2"), IDS, span="5:2"), "span"),
    "no attention": (lambda _: hs.precision(nn.Linear(3, 3), torch.randn(1, 5, 3)), "No softmax attention"),
    "simulated bits": (lambda found: found.simulate(1), "bits"),
    "simulated quantiser": (lambda found: found.simulate(4, "row"), "quantisers"),
    "another layer": (
        lambda found: found.simulate(found.budget(4.5).assign(layer=7)),
        r"layers, heads and operands.*\(7, ",
    ),
    "without logits": (
        lambda found: hs.precision(tiny("gpt2"), IDS, bits=4, quantisers="token", logits=False).simulate(4),
        "logits",
    ),
    "few bits": (lambda found: found.budget(2), "average"),
    "budget of another quantiser": (lambda found: found.budget(4, "group-32"), "quantiser"),
    "an average below all bits": (
        lambda _: hs.precision("./not-loaded", IDS, bits=(4, 3), average=2.5),
        "average: expected at least 3 bits",
    ),
    "a group that does not fit": (
        lambda _: hs.precision(tiny("gpt2"), IDS, bits=3, quantisers=("token", "kivi-32-128")),
        "^quantisers: expected a group and a window that fit 10 tokens",
    ),
    "one number of bits": (
        lambda found: replace(found, table=found.table[found.table["bits"] == 3]).budget(4),
        "several numbers of bits",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_named(case: str, of_llama: hs.Precision) -> None:
    call, said = REFUSED[case]
    with pytest.raises(HowsmoothError, match=said):
        call(of_llama)
