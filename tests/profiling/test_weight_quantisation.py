"""hs.precision of weights against models whose weights are quantised by hand, and against dense Jacobians."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

import howsmooth as hs
from howsmooth.errors import HowsmoothError
from tests._tiny_models import tiny
from tests.profiling.test_quantisation_effects import IDS, SHAPE, divergence, quantised, with_sharp_attention

HEADS = {"num_key_value_heads": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, **HEADS),
    "gpt2": lambda: GPT2Config(vocab_size=60, n_embd=24, n_layer=2, n_head=4),  # transposed weights
    "olmoe": lambda: OlmoeConfig(**SHAPE, **HEADS, **EXPERTS),
    "gpt_oss": lambda: GptOssConfig(**SHAPE, **HEADS, head_dim=6, num_local_experts=4, rope_scaling=None),
    # Its first block has linear attention.
    "qwen3_next": lambda: Qwen3NextConfig(
        **SHAPE, **HEADS, **EXPERTS, head_dim=8, moe_intermediate_size=16, linear_num_value_heads=4,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip
QUANTISERS = ("channel", "group-32")


def model_of(name: str) -> PreTrainedModel:
    return with_sharp_attention(AutoModelForCausalLM.from_config(CONFIGS[name]())).double()


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return model_of("llama")


@pytest.fixture(scope="module")
def of_llama(llama: PreTrainedModel) -> hs.Precision:
    return hs.precision(llama, IDS, weights=(4, 8, 12), quantisers=QUANTISERS)


def weights_of(model: nn.Module, row: dict[str, Any]) -> dict[str, bool]:
    """The names of the weights of a part, by their usual names; True if the output channels are last."""
    found = {}
    for name, p in model.named_parameters():
        inside = name.removeprefix(row["name"] + ".")
        weight = p.ndim == 3 or (p.ndim == 2 and name.endswith("weight"))
        if inside == name or not weight or "mlp.gate.weight" in name or "router" in name or "conv" in name:
            continue
        part = "attention" if "attn" in inside else "MLP"
        if row["part"] in (part, "block"):
            config = model.config.model_type
            found[name] = config == "gpt2" or (config == "gpt_oss" and p.ndim == 3)
    return found


def by_hand(w: Tensor, bits: int, quantiser: str, last: bool) -> Tensor:
    """Each output channel, or each 32 weights of it, by its own absmax."""
    rows = w.mT if last else w
    groups = rows.split(rows.shape[-1] if quantiser == "channel" else 32, dim=-1)
    near = torch.cat([quantised(group, bits, -1) for group in groups], dim=-1)
    return near.mT if last else near


@torch.no_grad()
def quantised_by_hand(model: PreTrainedModel, rows: list[dict[str, Any]]) -> PreTrainedModel:
    other = copy.deepcopy(model)
    for row in rows:
        for name, last in weights_of(model, row).items():
            p = other.get_parameter(name)
            p.copy_(by_hand(p, row["bits"], row["quantiser"], last))
    other.set_experts_implementation("eager")  # of float64
    return other


@torch.no_grad()
def outputs(model: PreTrainedModel, block: str = "") -> tuple[Tensor, Tensor]:
    kept: list[Any] = []
    hook = model.get_submodule(block).register_forward_hook(lambda m, a, out: kept.append(out))
    logits = model(IDS).logits
    hook.remove()
    return logits, kept[0][0] if isinstance(kept[0], tuple) else kept[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_changes_are_those_of_a_model_with_rounded_weights(name: str) -> None:
    model = model_of(name)
    found = hs.precision(model, IDS, weights=3, quantisers=QUANTISERS)
    rows = found.table.to_dict("records")
    first = ["block"] if name == "qwen3_next" else ["attention", "MLP"]
    assert [row["part"] for row in rows if row["quantiser"] == "channel"] == [*first, "attention", "MLP"]
    plain = quantised_by_hand(model, [])
    for row in rows:
        own, other = (outputs(one, row["name"]) for one in (plain, quantised_by_hand(model, [row])))
        assert row["kl"] == pytest.approx(divergence(own[0], other[0]), rel=1e-6)
        assert row["change"] == pytest.approx(float((own[1] - other[1]).norm()), rel=1e-6)
        assert row["output_norm"] == pytest.approx(float(own[1].norm()), rel=1e-6)
        assert row["entries"] == sum(model.get_parameter(one).numel() for one in weights_of(model, row))
    for _, quantiser, _, kl in found.together.itertuples():
        every = quantised_by_hand(model, [row for row in rows if row["quantiser"] == quantiser])
        assert kl == pytest.approx(divergence(outputs(plain)[0], outputs(every)[0]), rel=1e-6)
    left = {"olmoe": ["OlmoeTopKRouter.weight"], "gpt_oss": ["GptOssTopKRouter.weight"],
            "qwen3_next": ["Conv1d.weight", "Qwen3NextTopKRouter.weight"]}  # fmt: skip
    assert found.refused == tuple(
        f"{', '.join(one)}: matrices of no linear map that is known, which stay exact."
        for one in [left.get(name, [])]
        if one
    )


@pytest.mark.parametrize("name", ["gpt2", "olmoe"])
def test_predicted_divergences_are_those_of_the_dense_jacobian(name: str) -> None:
    model, ids = model_of(name), IDS[:, :4]
    table = hs.precision(model, ids, weights=3, quantisers=QUANTISERS, layers=[1]).table
    model.set_experts_implementation("eager")  # of float64
    for row in table.to_dict("records"):
        exact = {one: model.get_parameter(one).detach() for one in weights_of(model, row)}

        def logits(e: Tensor, exact: dict[str, Tensor] = exact) -> Tensor:
            parts = zip(exact.items(), e.split([w.numel() for w in exact.values()]), strict=True)
            moved = {one: w + part.view_as(w) for (one, w), part in parts}
            return torch.func.functional_call(model, moved, (ids,)).logits[0]

        other = quantised_by_hand(model, [row])
        e = torch.cat([(other.get_parameter(one).detach() - w).flatten() for one, w in exact.items()])
        u = torch.autograd.functional.jacobian(logits, torch.zeros_like(e)) @ e
        p = logits(torch.zeros_like(e)).detach().softmax(-1)
        fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        truth = 0.5 * torch.einsum("ni,nij,nj->n", u, fisher, u).mean()
        # The norms of OLMoE compute in float32.
        assert row["predicted_kl"] == pytest.approx(float(truth), rel=1e-9 if name == "gpt2" else 1e-6)


def test_predicted_changes_are_differences_of_the_block() -> None:
    model, step = model_of("gpt2"), 1e-4
    for row in hs.precision(model, IDS, weights=4, quantisers=QUANTISERS).table.to_dict("records"):
        ends, other = [], quantised_by_hand(model, [row])
        for sign in (1, -1):
            moved = copy.deepcopy(model)
            for name in weights_of(model, row):
                w = moved.get_parameter(name).data
                w += sign * step * (other.get_parameter(name).data - w)
            ends.append(outputs(moved, row["name"])[1])
        slope = (ends[0] - ends[1]) / (2 * step)
        assert row["predicted"] == pytest.approx(float(slope.norm()), rel=1e-6)


def test_predictions_become_exact_for_small_errors(of_llama: hs.Precision) -> None:
    table = of_llama.table
    for real, predicted in (("change", "predicted"), ("kl", "predicted_kl")):
        errors = (table[predicted] / table[real] - 1).abs().groupby(table["bits"]).max()
        assert errors[12] < 2e-3
        assert errors[12] < errors[8] / 4 < errors[4] / 16
    ranks = of_llama.agreement.set_index(["bits", "predicted", "real"])["spearman"]
    assert ranks[0, "predicted_kl", "kl"] > 0.98


def test_forward_mode_is_not_needed() -> None:
    model = model_of("olmoe").float()  # whose experts have none
    own = hs.precision(model, IDS, weights=6, quantisers="channel").table
    wide = hs.precision(model.double(), IDS, weights=6, quantisers="channel").table
    for column in ("predicted", "predicted_kl", "change"):
        assert own[column].to_list() == pytest.approx(wide[column].to_list(), rel=1e-3)


def test_a_budget_is_that_of_a_model_with_these_bits(llama: PreTrainedModel, of_llama: hs.Precision) -> None:
    budget = of_llama.budget(6)
    assert set(budget["bits"]) == {4, 8}
    assert (budget["bits"] * budget["entries"]).sum() <= 6 * budget["entries"].sum()
    chosen = of_llama.table.merge(budget[["layer", "part", "bits"]]).query("quantiser == 'channel'")
    other = quantised_by_hand(llama, chosen.to_dict("records"))
    truth = divergence(outputs(llama)[0], outputs(other)[0])
    assert of_llama.simulate(budget) == pytest.approx(truth, rel=1e-6)
    assert (
        of_llama.simulate(4) == of_llama.together.query("quantiser == 'channel' and bits == 4")["kl"].item()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("when", ["never", "in the derivative", "quantised"])
def test_the_weights_are_restored(dtype: torch.dtype, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama").to(dtype)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    near = by_hand(model.model.layers[1].mlp.up_proj.weight.detach().float(), 2, "channel", last=False)
    linear, seen = nn.functional.linear, set[str]()

    def interrupted(x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        derived = torch._C._functorch.is_gradtrackingtensor(w)
        here = "in the derivative" if derived else "quantised" if torch.equal(w, near) else ""
        seen.add(here)
        if here == when:
            raise KeyboardInterrupt
        return linear(x, w, *bias)

    monkeypatch.setattr(nn.functional, "linear", interrupted)
    with pytest.raises(KeyboardInterrupt) if when != "never" else nullcontext():
        hs.precision(model, IDS, weights=2, quantisers="channel", layers=[1])
    assert when in {*seen, "never"}
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert torch.equal(p, before[name][1])


def test_one_block_at_a_time_has_other_weights(
    llama: PreTrainedModel, of_llama: hs.Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, seen = nn.functional.linear, list[int]()

    def counted(*given: Any) -> Tensor:
        own = [layer.mlp.up_proj._parameters["weight"] for layer in llama.model.layers]
        seen.append(sum(not isinstance(w, nn.Parameter) for w in own))
        return linear(*given)

    monkeypatch.setattr(nn.functional, "linear", counted)
    of_llama.simulate(4)
    assert max(seen) == 1


def test_weights_in_half_precision_are_rounded_in_float32() -> None:
    half = model_of("llama").to(torch.bfloat16)
    found = hs.precision(half, IDS, weights=5, quantisers="channel")
    assert (found.stored, found.computed) == ("bfloat16", "float32")
    whole = hs.precision(half.float(), IDS, weights=5, quantisers="channel")
    for column in ("predicted", "change", "kl", "predicted_kl"):
        assert found.table[column].to_list() == pytest.approx(whole.table[column].to_list(), rel=1e-4)
    assert found.together["kl"].to_list() == pytest.approx(whole.together["kl"].to_list(), rel=1e-4)


def test_a_model_without_logits_has_the_changes_of_its_blocks() -> None:
    found = hs.precision(tiny("bert"), IDS, weights=4, quantisers="channel")
    assert not found.has_kl
    assert list(found.table["part"].unique()) == ["attention", "MLP"]
    assert bool((found.table["predicted"] / found.table["change"]).between(0.8, 1.2).all())
    assert "BertModel has no logits" in found.refused[0]


def test_quantisers_that_act_alike_have_rows_once(llama: PreTrainedModel) -> None:
    table = hs.precision(llama, IDS, weights=8, layers=[0], logits=False).table
    assert list(table["quantiser"].unique()) == ["channel", "group-32"]  # no row is longer than 40


def test_page_figure_and_words(of_llama: hs.Precision, tmp_path: Path) -> None:
    paths = of_llama.write(tmp_path)
    assert [path.name for path in paths] == [f"precision.{end}" for end in ("html", "png", "pdf", "csv")]
    table, page = pd.read_csv(paths[3]), paths[0].read_text(encoding="utf-8")
    assert table["kl"].to_list() == of_llama.table["kl"].to_list()
    assert "Norms are of the change of the block&#39;s output" in page.replace("'", "&#39;")
    cells = of_llama.table.query("part == 'MLP' and quantiser == 'channel'")
    image = of_llama.plot().axes[1].images[0].get_array().flatten().tolist()
    assert image == pytest.approx(cells["kl"].to_list())
    top = of_llama.ranking.iloc[0]
    assert list(of_llama.ranking.columns[:2]) == ["layer", "part"]
    assert f"{top['kl']:.4g}" in repr(of_llama)
    assert "linear weights of one part of a block quantised" in repr(of_llama)
    assert "All linear weights in blocks of layers 0, 1 at once by channel: " in repr(of_llama)
    assert of_llama.citation.startswith("Quantised linear weights in blocks of LlamaForCausalLM at ")


def with_int8() -> nn.Module:
    model = tiny("gpt2")
    w = model.h[0].attn.c_attn
    w.weight = nn.Parameter(w.weight.to(torch.int8), requires_grad=False)
    return model


def with_config() -> nn.Module:
    model = tiny("gpt2")
    model.config.quantization_config = {"quant_method": "gptq"}
    return model


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "bits beside weights": (lambda: hs.precision("./none", IDS, bits=4, weights=4), "bits: expected None"),
    "bits": (lambda: hs.precision("./none", IDS, weights=(8, 1)), "weights: expected whole numbers"),
    "quantiser": (lambda: hs.precision("./none", IDS, weights=4, quantisers="token"), "some of channel"),
    "average": (lambda: hs.precision("./none", IDS, weights=4, average=4), "weights: expected several"),
    "int8": (lambda: hs.precision(with_int8(), IDS, weights=4), "got h.0.attn.c_attn.weight in torch.int8"),
    "quantised": (lambda: hs.precision(with_config(), IDS, weights=4), "got a quantization_config"),
    "no blocks": (
        lambda: hs.precision(nn.TransformerEncoderLayer(8, 2, 8).eval(), torch.randn(5, 1, 8), weights=4),
        "No linear weights in full precision are beside an attention in a module list",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_named(case: str) -> None:
    call, said = REFUSED[case]
    with pytest.raises(HowsmoothError, match=said):
        call()


def test_places_of_a_simulation_are_those_of_the_table(of_llama: hs.Precision) -> None:
    with pytest.raises(HowsmoothError, match=r"layers and parts of the table, got \(7, "):
        of_llama.simulate(of_llama.budget(6).assign(layer=7))
    with pytest.raises(HowsmoothError, match="some of channel"):
        of_llama.simulate(4, "token")
