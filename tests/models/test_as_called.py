"""What is measured is what runs: arguments, wrappers and settings of a model as its user calls it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import howsmooth as hs
from howsmooth.bounds.radius import robust_radius
from howsmooth.errors import ArgumentError
from howsmooth.models import capture
from tests._tiny_models import token_ids

IDS = token_ids(1, 7)


def llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, **settings,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def constants(model: Any, inputs: Any = IDS, **how: Any) -> list[tuple[str, float]]:
    """The name of each site and its constant."""
    sites = capture(model, inputs, **how)
    return [(site.name, float(hs.local_lipschitz(site.map, site.x).value.max())) for site in sites]


@functools.cache
def plain(scope: str = "attention") -> list[tuple[str, float]]:
    return constants(llama(), scope=scope)


class Gated(nn.Module):
    """An attention layer of its own code, with arguments that are no tensors."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.qkv, self.gate = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor, start_pos: int = 0, scale: float = 1.0, kind: str | None = "soft") -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        y = torch.softmax((scale + start_pos) * q @ k.transpose(-1, -2), -1) @ v
        return y if kind is None else torch.sigmoid(self.gate(x)) * y


def gated() -> tuple[Gated, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Gated().eval(), torch.randn(1, 5, 8)


# ---------------------------------------------------------------- arguments that are no tensors


@pytest.mark.parametrize("scope", ["attention", "model"])
@pytest.mark.parametrize("given", [{}, {"start_pos": 2}, {"scale": 3.0}, {"kind": None}, {"kind": "soft"}])
def test_plain_arguments_reach_the_model(given: dict[str, Any], scope: str) -> None:
    layer, x = gated()
    (site,) = capture(layer, {**given, "x": x}, scope=scope)  # the tensor need not come first
    assert torch.allclose(site.map(site.x), layer(x, **given), atol=1e-6)
    changes = given not in ({}, {"kind": "soft"})
    assert changes != torch.allclose(layer(x), layer(x, **given), atol=1e-2)


def test_plain_arguments_reach_padded_and_batched_runs() -> None:
    model = llama()
    ids, mask = token_ids(2, 5), torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    padded = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    assert [site.sequence for site in capture(model, padded, layers=[1])] == [0, 1]
    (whole,) = capture(model, {"input_ids": ids, "logits_to_keep": 1}, scope="model", output="logits")
    logits = model(ids, logits_to_keep=1).logits
    assert torch.allclose(whole.map(whole.x), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_what_else_is_returned_is_left_out(name: str) -> None:
    model = llama()
    assert constants(model, {"input_ids": IDS, name: True, "return_dict": False}) == plain("attention")
    (site,) = capture(
        model, {"input_ids": IDS, name: True, "return_dict": False}, scope="model", output="logits"
    )
    assert torch.allclose(site.map(site.x), model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_other_objects_and_inputs_without_a_tensor_are_refused() -> None:
    layer, x = gated()
    with pytest.raises(
        ArgumentError, match=r"inputs\['start_pos'\]: expected a tensor, a number.*got object"
    ):
        capture(layer, {"x": x, "start_pos": object()})
    with pytest.raises(
        ArgumentError, match=r"inputs: expected at least one tensor, got start_pos of type int"
    ):
        capture(layer, {"start_pos": 0})


def test_profile_and_monitor_take_plain_arguments() -> None:
    layer, x = gated()
    given = {"x": x, "scale": 3.0}
    (wanted,) = (value for _, value in constants(layer, given))
    found = hs.profile(layer, given, scopes=["attention"])
    assert found.table["value"].to_list() == pytest.approx([wanted], rel=0.02)
    assert found.input == "inputs x, scale=3.0"
    monitor = hs.nn.LipschitzMonitor(layer, given)
    assert "scale=3.0" in monitor.probes.words
    assert monitor.measure()[0].lipschitz == pytest.approx(wanted, rel=0.02)


# ---------------------------------------------------------------- wrappers


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def compiled_blocks(model: nn.Module) -> nn.Module:
    layers: Any = model.model.layers  # type: ignore[union-attr]
    for i, layer in enumerate(layers):
        layers[i] = compiled(layer)
    return model


def compiled_in_place(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.compile(backend="eager")
    model.compile(backend="eager")
    return model


def compiled_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


class Tuner(nn.Module):
    """What peft has between its PeftModel and the model: the model with adapters in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


class PeftModel(nn.Module):
    """peft's PeftModel without a task type, as far as howsmooth sees it."""

    def __init__(self, model: nn.Module, *, prompts: bool = False) -> None:
        super().__init__()
        self.peft_config = {"default": SimpleNamespace(is_prompt_learning=prompts)}
        self.base_model = model if prompts else Tuner(model)

    def get_base_model(self) -> nn.Module:
        prompts = self.peft_config["default"].is_prompt_learning
        return self.base_model if prompts else self.base_model.model  # type: ignore[return-value]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_base_model()(*args, **kwargs)


class PeftModelForCausalLM(PeftModel):
    """peft's PeftModel with a task type, whose forward has named arguments."""

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:  # type: ignore[override]
        return self.base_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": compiled,
    "compiled blocks": compiled_blocks,
    "compiled in place": compiled_in_place,
    "compiled forward": compiled_forward,
    "compiled twice over": lambda model: compiled(compiled_blocks(model)),
    "data parallel": nn.DataParallel,
    "peft": PeftModel,
    "peft, with a task": PeftModelForCausalLM,
    "peft, compiled": lambda model: compiled(PeftModel(model)),
    "accelerate": lambda model: Accelerator(cpu=True, mixed_precision="bf16").prepare(model),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
def test_wrapped_models_have_the_numbers_of_the_plain_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(llama())
    model(input_ids=IDS)  # compiles
    before = [type(module) for module in model.modules()]
    for how in (
        {},
        {"scope": "head", "layers": [0]},
        {"scope": "span"},
        {"scope": "model", "output": "logits"},
    ):
        assert constants(model, **how) == constants(llama(), **how)
    assert [type(module) for module in model.modules()] == before


def test_real_peft_models() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    for task in (None, "CAUSAL_LM"):
        wrapped = peft.get_peft_model(llama(), peft.LoraConfig(task_type=task, target_modules=["q_proj"]))
        assert [value for _, value in constants(wrapped)] == [value for _, value in plain()]


def test_prompts_before_the_tokens_are_no_wrapper() -> None:
    """The model inside of such a PeftModel is another map of the tokens."""
    model = PeftModelForCausalLM(llama(), prompts=True)
    assert [name for name, _ in constants(model)] == [
        f"base_model.model.layers.{i}.self_attn" for i in (0, 1)
    ]


def test_own_code_that_is_compiled_in_place() -> None:
    layer, x = gated()
    wanted = constants(layer, x)
    layer.compile(backend="eager")
    layer(x)
    assert constants(layer, x) == wanted


def test_compilation_goes_on_as_it_was() -> None:
    built: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        built.append(graph)
        return graph.forward

    layer, x = gated()
    whole = torch.compile(layer, backend=backend)
    with torch.no_grad():
        before = whole(x)
        count = len(built)
        with torch.compiler.set_stance("fail_on_recompile"):
            capture(whole, x)
            assert torch.equal(whole(x), before)
        assert torch.equal(whole(x), before)
    assert len(built) == count > 0


def test_hooks_on_a_wrapped_part_are_kept() -> None:
    """A hook on the wrapper of a part changes what the model computes."""
    model = compiled_blocks(llama())
    model.model.layers[0].register_forward_hook(lambda module, args, output: 2 * output)
    by_hand = llama()
    by_hand.model.layers[0].register_forward_hook(lambda module, args, output: 2 * output)
    found, wanted = (
        [value for _, value in constants(one, layers=[1], scope="block")] for one in (model, by_hand)
    )
    assert found == wanted != [value for _, value in constants(llama(), layers=[1], scope="block")]


class Classifier(nn.Module):
    """A classifier that the radius knows, of PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


def test_radius_of_a_compiled_classifier() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Classifier().eval(), torch.randn(1, 3, 4)
    wanted = robust_radius(model, x, tokens=[0], order=2).radius
    within = copy.deepcopy(model)
    within.layer = compiled(within.layer)
    for wrapped in (compiled(model), within):
        wrapped(x)
        assert robust_radius(wrapped, x, tokens=[0], order=2).radius == wanted > 0


def scripted(layer: nn.Module, x: Tensor) -> Any:
    return torch.jit.script(layer)


def traced(layer: nn.Module, x: Tensor) -> Any:
    return torch.jit.trace(layer, x)


def with_a_traced_part(layer: nn.Module, x: Tensor) -> Any:
    return nn.Sequential(torch.jit.trace(layer, x))


def exported(layer: nn.Module, x: Tensor) -> Any:
    return torch.export.export(layer, (x,)).module()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [scripted, traced, with_a_traced_part, exported])
def test_what_hides_its_calls_is_refused_with_what_works(make: Callable[..., nn.Module]) -> None:
    layer, x = gated()
    made = make(layer, x)
    words = "that is (exported|compiled by torch.jit).*Give the model that it was made from."
    words += "" if make is scripted else " A map of tokens .*hs.local_lipschitz"
    for measure in (capture, hs.profile, hs.nn.LipschitzMonitor):
        with pytest.raises(ArgumentError, match=words):
            measure(made, x)  # type: ignore[operator]
    if make is not scripted:
        wanted = float(hs.local_lipschitz(layer, x).value)
        assert float(hs.local_lipschitz(made, x).value) == pytest.approx(wanted, rel=1e-4)


def test_an_exported_program_is_refused_with_a_remedy() -> None:
    layer, x = gated()
    with pytest.raises(ArgumentError, match=r"got ExportedProgram\. Give the model that was exported"):
        capture(torch.export.export(layer, (x,)), x)  # type: ignore[arg-type]
