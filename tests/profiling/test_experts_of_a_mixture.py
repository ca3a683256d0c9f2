"""The constants of single experts, against Jacobians of their formulas written by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import (
    DeepseekV3Config,
    DeepseekV3Model,
    GptOssConfig,
    GptOssModel,
    Llama4TextConfig,
    Llama4TextModel,
    MixtralConfig,
    MixtralForCausalLM,
    MixtralModel,
    OlmoeConfig,
    OlmoeModel,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeModel,
)

import howsmooth as hs
from howsmooth.cli import main
from howsmooth.errors import ArgumentError, CaptureError
from tests._tiny_models import tiny

IDS = torch.arange(3, 10)
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4,
    "num_key_value_heads": 2, "intermediate_size": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 4,
    "kv_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "head_dim": 4,
}  # fmt: skip
MIXTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: MixtralModel(MixtralConfig(**SIZES, num_local_experts=6)),
    "olmoe": lambda: OlmoeModel(OlmoeConfig(**SIZES, num_experts=6)),
    "qwen3": lambda: Qwen3MoeModel(Qwen3MoeConfig(**SIZES, num_experts=6)),
    "gpt-oss": lambda: GptOssModel(GptOssConfig(**SIZES, num_local_experts=6)),
    "deepseek": lambda: DeepseekV3Model(DeepseekV3Config(**SIZES | LATENT)),
}


def mixture(name: str) -> Any:
    torch.manual_seed(0)
    model = MIXTURES[name]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn_like(p) + (p.ndim == 1))
    return model


def expert(experts: Any, number: int, x: Tensor) -> Any:
    """The formula of one expert in float64, as in the papers: down(act(gate x) * up x)."""
    up, down = (p[number].double() for p in (experts.gate_up_proj, experts.down_proj))
    if not hasattr(experts, "gate_up_proj_bias"):
        gate, linear = (up @ x).chunk(2)
        return down @ (silu(gate) * linear)
    both = x @ up + experts.gate_up_proj_bias[number].double()
    gate, linear = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
    return (linear + 1) * gate * torch.sigmoid(1.702 * gate) @ down + experts.down_proj_bias[number].double()


def routed(model: Any, layer: int) -> tuple[Tensor, Tensor]:
    """The tokens that the experts of a layer are given, and the numbers of the experts of each."""
    seen: list[Any] = []
    handle = model.layers[layer].mlp.experts.register_forward_pre_hook(lambda _, given: seen.append(given))
    model(IDS[None])
    handle.remove()
    return seen[0][0].detach().double(), seen[0][1]


@pytest.mark.parametrize("name", MIXTURES)
def test_an_expert_is_the_jacobian_of_its_formula_at_its_tokens(name: str) -> None:
    model = mixture(name)
    found = hs.profile(model, IDS, scopes=["mlp", "expert"])
    rows = found.table[found.table["scope"] == "expert"].set_index(["layer", "head"])
    alone, refused = 0, []
    for layer in (0, 1) if name != "deepseek" else (1,):  # its first MLP is no mixture
        x, chosen = routed(model, layer)
        experts = model.layers[layer].mlp.experts
        for number in chosen.unique().tolist():
            at = (chosen == number).any(dim=1).nonzero().flatten().tolist()
            formula = partial(expert, experts, number)
            jacobians = [torch.func.jacrev(formula)(x[i]) for i in at]
            norms = torch.stack([torch.linalg.matrix_norm(one, 2) for one in jacobians])
            row = rows.loc[layer, number]
            assert row["lower"] <= norms.max() * (1 + 1e-5)  # the tokens are those of a float32 model
            assert norms.max() <= row["upper"] * (1 + 1e-5)
            assert row["name"] == f"layers.{layer}.mlp.experts.{number}"
            tokens = found.sensitive_tokens(layer, number, scope="expert")
            assert sorted(tokens["position"]) == at
            assert tokens["position"][0] == at[int(norms.argmax())]
            assert tokens["token"][0] == f"id {IDS[tokens['position'][0]]}"
            alone += 1
        if missing := 6 - len(chosen.unique()):
            refused.append(f"Layer {layer}: {missing} of 6 experts have no token.")
    assert len(rows) == alone
    assert list(found.refused) == refused
    assert "layer 1, expert " in repr(found)
    assert [panel.get_xlabel() for panel in found.plot().axes[::2]] == ["expert", "scope"]
    assert "id 3" in found.page()


def test_models_without_a_mixture_and_of_other_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaptureError, match="It has no mixture of experts"):
        hs.profile(tiny("gpt2"), IDS, scopes="expert")
    other = Llama4TextModel(
        Llama4TextConfig(**SIZES | {"num_experts_per_tok": 1}, num_local_experts=2, pad_token_id=0)
    ).eval()
    with pytest.raises(CaptureError, match=r"layers\.0 are not one module that is given tokens"):
        hs.profile(other, IDS, scopes="expert")
    model = mixture("mixtral")
    kind = type(model.layers[0].mlp.experts)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x, index, weights: own(self, x, index, weights).tanh())
    with pytest.raises(CaptureError, match="and returns the weighted sum"):
        hs.profile(model, IDS, scopes="expert")


def test_texts_and_models_with_other_routes() -> None:
    model, texts = mixture("mixtral"), [torch.arange(3, 7), torch.arange(20, 26)]
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layers[0].mlp.gate.weight[:3] *= -1
    over, against = (hs.profile(one, texts, scopes=["mlp", "expert"]) for one in (model, other))
    each = over.each[over.each["scope"] == "expert"]
    reached = [{*map(tuple, rows[["layer", "head"]].values)} for _, rows in each.groupby("text")]
    in_all = reached[0] & reached[1]
    table = over.table[over.table["scope"] == "expert"]
    assert {*map(tuple, table[["layer", "head"]].values)} == in_all
    some = len(reached[0] | reached[1]) - len(in_all)
    assert over.refused[-1] == f"{some} experts that a token reaches in some texts only."
    first, second = (hs.profile(one, texts[0], scopes=["mlp", "expert"]) for one in (model, other))
    a, b = ({*map(tuple, one.table[["layer", "head"]].dropna().values)} for one in (first, second))
    ratios = first.compare(second)
    assert {*map(tuple, ratios.table[["layer", "head"]].dropna().values)} == a & b
    assert a ^ b
    assert ratios.refused[-1] == f"{len(a ^ b)} experts that a token reaches in one model only."
    assert set(over.compare(against).table["scope"]) == {"mlp", "expert"}
    assert [one.get_xlabel() for one in over.plot().axes] == ["layer", "layer.expert"]
    with pytest.raises(
        ArgumentError, match="scope mlp, layer 0; scope mlp, layer 1; scope expert, layer 0, exp"
    ):
        first.compare(hs.profile(other, texts[0], scopes="expert"))


def test_the_parts_of_a_mixture_on_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)).save_pretrained("mixture")
    np.save("ids.npy", IDS.tolist())
    assert main(["profile", "./mixture", "--tokens", "ids.npy", "--scope", "parts", "--json"]) == 0
    ranking = json.loads(capsys.readouterr().out)["ranking"]
    assert sum(row["scope"] == "expert" for row in ranking) == 4
    assert Path("howsmooth-profile/profile.html").exists()
