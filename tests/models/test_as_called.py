"""What is measured is what runs: arguments, wrappers and settings of a model as its user calls it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import howsmooth as hs
from howsmooth.bounds.radius import robust_radius
from howsmooth.errors import ArgumentError, CaptureError
from howsmooth.models import capture, inspect_model
from howsmooth.models.recorded_softmaxes import RecordedModel
from tests._selection import others_slow
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
def plain(scope: str = "attention", output: str = "hidden") -> list[tuple[str, float]]:
    return constants(llama(), scope=scope, output=output)


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
    assert found.input.startswith("inputs x, scale=3.0, SHA-256 of the numbers ")
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


@pytest.fixture(autouse=True)
def accelerate_starts_anew() -> Iterator[None]:
    """Accelerate keeps one precision for a process; a Trainer of another test sets it too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("name", others_slow(WRAPPED, WRAPPED.keys() - {"compiled twice over"}))
def test_wrapped_models_have_the_numbers_of_the_plain_one(name: str) -> None:
    model = WRAPPED[name](llama())
    model(input_ids=IDS)  # compiles
    before = [type(module) for module in model.modules()]
    for how in ({}, {"scope": "span"}, {"scope": "model", "output": "logits"}):
        assert constants(model, **how) == plain(**how)
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
    how: dict[str, Any] = {"tokens": [0], "order": 2, "attack": False}
    wanted = robust_radius(model, x, **how).radius
    within = copy.deepcopy(model)
    within.layer = compiled(within.layer)
    for wrapped in (compiled(model), within):
        wrapped(x)
        assert robust_radius(wrapped, x, **how).radius == wanted > 0


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


# ---------------------------------------------------------------- what a measurement changes

PACKED = {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}


def leaks(model: nn.Module, **given: Any) -> Tensor:
    """How much each token of a packed call depends on the first three, which are another document."""
    changed = {**PACKED, "input_ids": torch.cat([(IDS[:, :3] + 5) % 60, IDS[:, 3:]], 1)}
    with torch.no_grad():
        a, b = (model(**inputs, **given).logits for inputs in (PACKED, changed))
    return (a - b)[0].abs().amax(-1)


@pytest.mark.parametrize(
    "scope", others_slow(["head", "attention", "block", "span", "model"], ["attention", "span"])
)
def test_packed_documents_are_measured_with_the_mask_of_the_call(scope: str) -> None:
    """transformers hides other documents from a model without a cache alone, and the model has one."""
    model = llama()
    assert leaks(model)[3:].min() > 1e-2
    assert leaks(model, use_cache=False)[3:].max() == 0
    open_mask = {**PACKED, "attention_mask": torch.ones_like(IDS)}  # the mask of this call
    how: dict[str, Any] = {"scope": scope, "layers": [1] if scope in ("head", "attention", "block") else None}
    wanted = [value for _, value in constants(model, open_mask, **how)]
    apart = [value for _, value in constants(model, {**PACKED, "use_cache": False}, **how)]
    for inputs in (PACKED, {**PACKED, "use_cache": True}):
        assert [value for _, value in constants(model, inputs, **how)] == pytest.approx(wanted, rel=1e-4)
    assert apart != pytest.approx(wanted, rel=1e-2)
    model.config.use_cache = False
    assert [value for _, value in constants(model, PACKED, **how)] == apart


def test_influence_between_packed_documents() -> None:
    model = llama()
    for given, least, most in ((PACKED, 1e-2, 1e9), ({**PACKED, "use_cache": False}, 0.0, 0.0)):
        (whole,) = capture(model, given, scope="model")
        found = hs.influence(whole, outputs=[3, 4, 5, 6]).value[:, :3]
        assert least <= float(found.min()) <= float(found.max()) <= most


def test_every_door_measures_the_call() -> None:
    model = llama()
    wanted = [value for _, value in constants(model, PACKED)]
    rows = hs.profile(model, PACKED, scopes=["attention"]).table["value"].to_list()
    assert rows == pytest.approx(wanted, rel=0.02)
    rows = [row.lipschitz for row in hs.nn.LipschitzMonitor(model, PACKED).measure()]
    assert rows == pytest.approx(wanted, rel=0.02)
    depth = hs.depth_profile(model, PACKED).table
    apart = hs.depth_profile(model, {**PACKED, "use_cache": False}).table
    assert not depth.equals(apart)
    logits = RecordedModel(model, PACKED).logits
    assert torch.allclose(logits, model(**PACKED).logits[0], rtol=1e-4, atol=1e-4)
    assert [site.masking for site in inspect_model(model, PACKED).sites] == ["causal", "causal"]


class Wrapper(nn.Module):
    """A model of one's own around one of transformers, in whose call no cache can be given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.inner(input_ids=ids, position_ids=positions).logits


class Normed(nn.Module):
    """An attention layer behind a batch norm."""

    def __init__(self, dropout: float = 0.0, gain: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.gain * self.norm(x.mT).mT)


class FastPath(nn.Module):
    """A model that computes something else where PyTorch's fast path is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(2 * x if torch.backends.mha.get_fastpath_enabled() else x)


def drawn_tokens() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "a cache inside": (
        Wrapper,
        {"ids": IDS, "positions": PACKED["position_ids"]},
        r"with its cache, as it is called, than without one.*use_cache=False",
    ),
    "batch norm in training": (
        lambda: Normed().train(),
        drawn_tokens(),
        r"in training mode, as it is called, than in evaluation mode.*model\.eval\(\)",
    ),
    "the fast path": (
        lambda: FastPath().eval(),
        drawn_tokens(),
        r"with PyTorch's fast path, as it is called, than without it.*set_fastpath_enabled",
    ),
    "half precision that overflows": (
        lambda: Normed(gain=1e5).eval().half(),
        drawn_tokens().half(),
        r"in half precision, as it is called, than in float32.*difference inf.*model\.float\(\)",
    ),
}


@pytest.mark.parametrize(("make", "inputs", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_changes_the_output_is_refused(make: Callable[[], nn.Module], inputs: Any, words: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    for scope in ("attention", "model"):
        with pytest.raises(CaptureError, match=f"gives other outputs {words}"):
            capture(model, inputs, scope=scope)


ALLOWED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "dropout in training": (lambda: Normed(dropout=0.5).train(), drawn_tokens()),
    "batch norm in evaluation": (lambda: Normed().eval(), drawn_tokens()),
    "half precision": (lambda: Normed().eval().bfloat16(), drawn_tokens().bfloat16()),
    "transformers in training": (lambda: llama(attention_dropout=0.3).train(), IDS),
    "transformers in half precision": (lambda: llama().half(), IDS),
}


@pytest.mark.parametrize(("make", "inputs"), ALLOWED.values(), ids=ALLOWED.keys())
def test_what_rounds_or_draws_is_measured(make: Callable[[], nn.Module], inputs: Any) -> None:
    model = make()
    before = copy.deepcopy(model.state_dict())
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        assert capture(model, inputs)
        assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_monitor_measures_in_evaluation_mode_whatever_the_training_does() -> None:
    model = Normed().train()
    assert model.layer.training
    (row,) = hs.nn.LipschitzMonitor(model, drawn_tokens(), strict=True).measure()
    assert row.lipschitz is not None


def test_a_measurement_keeps_the_statistics_of_batch_norm() -> None:
    model = Normed().train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError, match="training mode"):
        capture(model, drawn_tokens())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(("settings", "runs"), [({"use_cache": False}, 0), ({}, 2)])
def test_the_comparison_costs_a_run_where_something_can_differ(settings: dict[str, Any], runs: int) -> None:
    model, calls = llama(**settings), []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))  # a capture of a layer ends before it
    capture(model, IDS, layers=[0])
    assert len(calls) == runs
