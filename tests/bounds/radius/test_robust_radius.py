"""hs.bounds.robust_radius on models of transformers, beside attacks; and what it refuses."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

import howsmooth as hs
from howsmooth.bounds.radius import third_order_remainders
from howsmooth.bounds.radius.attack import attack_radius
from howsmooth.bounds.radius.classifier import Classifier
from howsmooth.bounds.radius.robust_radius import NetworkAtInput
from howsmooth.bounds.radius.transformer_network import Network
from howsmooth.errors import ArgumentError, CertificateError, NonFiniteError
from tests._selection import others_slow
from tests._shared import shared_data
from tests._tiny_models import tiny
from tests.bounds.radius._networks import normal, post_norm

IDS = torch.tensor([[1, 7, 3, 9, 4]])


class _Curved:
    """A network of three logits: 1, a and 0.5 + b² in the entries a, b of its one token."""

    def logits(self, x: Tensor) -> Tensor:
        a, b = x[0]
        return torch.stack((torch.ones_like(a), a, 0.5 + b * b))


def test_the_attack_searches_all_other_classes() -> None:
    # The gradient of the second margin vanishes at the input, but its class is the nearest.
    functionals = torch.tensor([[1.0, -1, 0], [1, 0, -1]], dtype=torch.float64)
    x, injection = torch.zeros(1, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)[None]
    found = attack_radius(cast(Network, _Curved()), x, injection, functionals, torch.zeros(2).double(), 0.1)
    assert found == pytest.approx(0.5**0.5, rel=0.05)
    alone = attack_radius(
        cast(Network, _Curved()), x, injection, functionals[:1], torch.zeros(1).double(), 0.1
    )
    assert alone == pytest.approx(1.0, rel=0.05)


@pytest.fixture(scope="module")
def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
        hidden_dropout_prob=0.5,
        initializer_range=0.3,
    )
    return BertForSequenceClassification(config)


def test_the_stages_are_the_model(classifier: BertForSequenceClassification) -> None:
    model = classifier.double().eval()
    read = Classifier.at(model, {"input_ids": IDS})
    x = read.place.tokens
    network, _ = read.network()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits[0]
    torch.testing.assert_close(network.logits(x), expected, rtol=1e-12, atol=1e-12)
    changed = x + normal(torch.Generator().manual_seed(1), *x.shape)
    expected = read.logits(changed)
    torch.testing.assert_close(network.logits(changed), expected, rtol=1e-12, atol=1e-12)
    classifier.float()


def others() -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
    """Random pre-norm classifiers of transformers, with inputs."""
    small = {"num_attention_heads": 2, "num_hidden_layers": 2, "num_labels": 3, "initializer_range": 0.3}
    torch.manual_seed(0)
    ids = {"input_ids": torch.tensor([[1, 7, 3, 9]])}
    width = {"vocab_size": 20, "hidden_size": 8}
    vit = ViTConfig(hidden_size=8, intermediate_size=16, image_size=8, patch_size=4, **small)
    llama = {"num_key_value_heads": 1, "intermediate_size": 16, "pad_token_id": None}
    gpt2 = GPT2Config(n_positions=16, bos_token_id=0, eos_token_id=0, **width, **small)
    relu = copy.deepcopy(gpt2)
    relu.activation_function = "relu"
    found = {
        "gpt2": (GPT2ForSequenceClassification(gpt2), ids),
        "relu": (GPT2ForSequenceClassification(relu), ids),
        "llama": (LlamaForSequenceClassification(LlamaConfig(**width, **llama, **small)), ids),
        "vit": (ViTForImageClassification(vit), {"pixel_values": torch.randn(1, 3, 8, 8)}),
    }
    for model, _ in found.values():
        for parameter in model.parameters():  # no norm with a weight of one, no bias of zero
            parameter.data += 0.1 * torch.randn_like(parameter)
    return found


OTHERS = others()


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_read(name: str) -> None:
    model, inputs = OTHERS[name]
    at = NetworkAtInput(model, inputs)
    wide = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        expected = wide(**{k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}).logits
    # Llama's norms round to float32.
    torch.testing.assert_close(at.logits, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", others_slow(OTHERS, ["llama"]))
def test_no_attack_lies_within_the_radius_of_other_models(name: str, order: int) -> None:
    found = NetworkAtInput(*OTHERS[name]).radius(1, order=order)
    assert 0 < found.radius < found.attack


class Encoder(nn.Module):
    """A classifier of PyTorch's own layers, which pools in its code."""

    def __init__(self, pool: str, **options: object) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, **options)
        norm = nn.LayerNorm(8) if options.get("norm_first") else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.head, self.pool = nn.Linear(8, 3), pool

    def forward(self, x: Tensor) -> Tensor:
        u = self.encoder(x)
        of = {"mean": u.mean, "sum": u.sum, "max": u.amax}
        pooled = of[self.pool](1) if self.pool in of else u[:, {"first": 0, "last": -1}[self.pool]]
        return self.head(pooled)


@pytest.mark.parametrize(
    ("pool", "options"),
    [
        ("mean", {"norm_first": True}),
        ("first", {"activation": "gelu"}),
        ("last", {"bias": False}),
        ("sum", {}),
    ],
)
def test_layers_of_pytorch_are_read_in_any_module(pool: str, options: dict[str, object]) -> None:
    torch.manual_seed(1)
    model = Encoder(pool, **options)
    x = torch.randn(3, 8)
    if pool == "last":
        found = NetworkAtInput(model, x).radius(1, order=2)
        assert 0 < found.radius < found.attack
    model = model.double().eval()
    network, _ = Classifier.at(model, x.double()).network()
    torch.testing.assert_close(network.logits(x.double()), model(x[None].double())[0])


def test_a_module_that_pools_otherwise_is_refused() -> None:
    with pytest.raises(CertificateError, match=r"\(Encoder\) computes 'amax'"):
        NetworkAtInput(Encoder("max"), torch.randn(3, 8))


def test_the_token_of_the_readout_and_missing_norms_are_seen() -> None:
    model, inputs = OTHERS["gpt2"]
    padded = copy.deepcopy(model)
    padded.config.pad_token_id = 9  # the last id: the model then reads the token before
    assert NetworkAtInput(padded, inputs).reads == [0, 1, 2]
    model = copy.deepcopy(OTHERS["llama"][0])
    model.model.norm = nn.Identity()
    assert "norm" not in NetworkAtInput(model, inputs).network.stages[-1].name


@pytest.mark.parametrize("order", [2, 3])
def test_the_attack_lies_outside_of_the_radius(order: int, classifier: BertForSequenceClassification) -> None:
    classifier.train()  # dropout is of no effect, and the model is left as it is
    found = hs.bounds.robust_radius(classifier, {"input_ids": IDS}, tokens=2, order=order)
    assert classifier.training
    assert next(classifier.parameters()).dtype == torch.float32
    assert found.attack is not None
    assert 0 < found.radius < found.attack
    assert float(found) == found.radius
    assert found.tokens == (2,)
    assert sum(found.losses.values()) + found.polynomial_loss == pytest.approx(found.margin, rel=0.02)
    lower = [value for _, value in found.curve]
    assert lower == sorted(lower, reverse=True)
    assert lower[-1] < found.margin / 10 < lower[0] < found.margin
    assert dict(found.curve)[found.radius] > 0
    assert found.radius / 2 in dict(found.curve)
    assert "proved" in str(found)


def test_the_radius_is_that_of_the_nearest_class() -> None:
    network, x = post_norm(2, layers=1)  # where the nearest class is not that of the second logit
    classes = [int(c) for c in network.logits(x).argsort(descending=True)]
    every = hs.bounds.robust_radius(network, x, tokens=1, order=2, attack=False)
    assert every.label == classes[0]
    each = [
        hs.bounds.robust_radius(network, x, tokens=1, target=c, order=2, attack=False) for c in classes[1:]
    ]
    assert every.radius == pytest.approx(min(one.radius for one in each), rel=1e-2)
    assert every.rival == min(each, key=float).rival
    assert every.first_order == min(one.first_order for one in each) != max(one.first_order for one in each)


def test_a_functional_stays_above_its_threshold() -> None:
    network, x = post_norm(0, layers=1)
    given = {"tokens": 1, "order": 2}
    label, rival, _ = (int(c) for c in network.logits(x).argsort(descending=True))
    direction = torch.zeros(3)
    direction[label], direction[rival] = 1, -1
    by_class = hs.bounds.robust_radius(network, x, target=rival, attack=False, **given)
    functional = hs.bounds.robust_radius(network, x, target=direction, **given)
    assert functional.radius == pytest.approx(by_class.radius, rel=1e-9)
    assert "functional" in str(functional)
    assert (functional.label, functional.rival) == (None, None)
    margin = by_class.margin
    half = hs.bounds.robust_radius(network, x, target=direction, threshold=margin / 2, **given)
    assert half.margin == pytest.approx(margin / 2)
    assert 0 < half.radius < by_class.radius
    assert half.radius < half.attack < functional.attack
    for below in ({"target": direction, "threshold": 2 * margin}, {"target": -direction}):
        with pytest.raises(ArgumentError, match=r"a functional .* above its threshold .*-target"):
            hs.bounds.robust_radius(network, x, **below, **given)


@pytest.mark.parametrize("norm", others_slow([2, math.inf], [math.inf]))
def test_the_attack_has_the_norm_of_the_radius(norm: float) -> None:
    network, x = post_norm(0, layers=1)
    found = hs.bounds.robust_radius(network, x, tokens=1, norm=norm, order=2)
    assert found.radius < found.attack
    # A linear network would change its answer at the first-order radius.
    assert found.attack < 10 * found.first_order


def test_the_search_ends_near_the_largest_radius() -> None:
    network, x = post_norm(0, layers=1)
    at = NetworkAtInput(network, x)
    radii = [at.radius(1, order=2, attack=False, guess=guess).radius for guess in (1e-4, 40.0)]
    found = hs.bounds.robust_radius(network, x, tokens=1, order=2, attack=False)
    radii.append(found.radius)
    assert max(radii) <= 1.003 * min(radii)
    assert all(lower > 0 for e, lower in found.curve if e <= found.radius)


def test_without_an_order_the_larger_radius_of_both_counts() -> None:
    network, x = post_norm(0, layers=1)
    at = NetworkAtInput(network, x)
    two, three, larger = (at.radius(1, order=order, attack=False) for order in (2, 3, None))
    assert larger.order == 3
    assert two.radius < larger.radius == pytest.approx(three.radius, rel=3e-3)


def test_a_search_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = post_norm(0)
    at = NetworkAtInput(network, x)
    options = {"target": int(at.logits.argsort()[-2]), "attack": False}
    now = 0.0

    def ticking() -> float:
        nonlocal now
        now += 1  # a second for each of the nine stages
        return now

    monkeypatch.setattr("time.perf_counter", ticking)
    full = at.radius(1, order=2, **options)
    radii = []
    for seconds in (5, 25, 40, 1000):
        begin = now
        found = at.radius(1, order=2, seconds=seconds, **options)
        # What lies beyond is no stage of the search, but of what is reported.
        assert now - begin <= min(seconds, full.seconds) + 40
        assert all((lower > 0) == (radius <= found.radius) for radius, lower in found.curve)
        assert found.timed_out == (seconds < 1000)
        assert ("The time ended" in str(found)) == (found.timed_out and found.radius > 0)
        assert ("the time ended before a radius was proved" in str(found)) == (found.radius == 0)
        assert bool(found.losses) == (found.radius > 0)
        radii.append(found.radius)
    assert radii == sorted(radii)
    assert radii[0] == 0 < radii[1] < radii[-1] == full.radius
    far = at.radius(1, seconds=full.seconds + 5, **options)  # too little for the third order
    assert (far.order, far.radius) == (2, full.radius)
    assert at.radius(1, order=3, seconds=5, **options).radius == 0


def test_the_third_order_ends_within_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = post_norm(0)
    now, gram = 0.0, third_order_remainders.gram

    def slow(factors: Tensor) -> Tensor:
        nonlocal now
        now += 1  # a second for the values of the first attention, and for each of its four queries
        return gram(factors)

    monkeypatch.setattr(third_order_remainders, "gram", slow)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert hs.bounds.robust_radius(network, x, order=3, seconds=1.5, attack=False).timed_out
    assert now == 2


def test_more_freedom_gives_a_smaller_radius() -> None:
    network, x = post_norm(0, layers=1)
    one, two, every = (
        hs.bounds.robust_radius(network, x, tokens=tokens, order=2, attack=False)
        for tokens in (1, [1, -1], None)
    )
    assert every.tokens == (0, 1, 2, 3)
    assert two.tokens == (1, 3)
    assert every.radius < two.radius < one.radius
    entries = hs.bounds.robust_radius(network, x, tokens=1, norm=math.inf, order=2, attack=False)
    assert entries.radius == pytest.approx(one.radius / math.sqrt(x.shape[1]), rel=1e-9)
    assert entries.first_order <= one.first_order


NETWORK, X = post_norm(0, layers=1)
LOGITS = NETWORK.logits(X)
REFUSED: list[tuple[str, dict[str, object]]] = [
    *(("tokens", {"tokens": wrong}) for wrong in (4, [], [0, 9], True, "0", 1.0, slice(0, 2))),
    ("norm", {"norm": 1}),
    ("order", {"order": 4}),
    ("seconds", {"seconds": 0}),
    *(
        ("target", {"target": wrong})
        for wrong in (int(LOGITS.argmax()), [1.0, -1.0], LOGITS * math.nan, 1e308 * LOGITS.sign())
    ),
    ("inputs", {"inputs": torch.tensor([1, 2])}),
    ("inputs", {"inputs": X * math.nan}),
    ("model", {"model": replace(NETWORK, offset=NETWORK.offset * math.nan)}),
    ("model", {"model": "bert"}),
]


@pytest.mark.parametrize(("argument", "given"), REFUSED)
def test_bad_arguments_are_refused(argument: str, given: dict[str, object]) -> None:
    with pytest.raises((ArgumentError, NonFiniteError), match=f"^{argument}: expected"):
        hs.bounds.robust_radius(**({"model": NETWORK, "inputs": X} | given))  # type: ignore[arg-type]


def test_one_logit_needs_a_target() -> None:
    one = NetworkAtInput(*OTHERS["gpt2"])
    one.logits = one.logits[:1]
    with pytest.raises(ArgumentError, match="because the model has one logit"):
        one.radius()


def test_tokens_of_another_width_and_images_are_refused(classifier: BertForSequenceClassification) -> None:
    network, x = post_norm(0, layers=1)
    width = x.shape[1]
    for model, d in ((classifier, 16), (network, width), (Encoder("mean").eval(), 8)):
        width = "that the model takes" if isinstance(model, Encoder) else rf"\(n, {d}\) of the width"
        with pytest.raises(ArgumentError, match=rf"{width}.* \((1, )?4, 5\)"):
            hs.bounds.robust_radius(model, torch.ones(4, 5))

    class Vision(Encoder):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.flatten(1, 2))

    model, image = Vision("mean").eval(), torch.ones(1, 2, 2, 8)
    for given in (image, image[0, :1], image[0, 0], {"pixel_values": image}):
        with pytest.raises(ArgumentError, match=r"(own, and give it the|An image goes into a dict|n, d)"):
            hs.bounds.robust_radius(model, given)


def test_progress_counts_up_to_what_is_expected() -> None:
    network, x = post_norm(0, layers=1)
    told: list[tuple[int, int]] = []
    hs.bounds.robust_radius(network, x, tokens=1, attack=False, on_step=lambda *at: told.append(at))
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert all(done < total for done, total in told)
    assert told[-1][1] < 2 * len(told)


def test_models_without_remainders_are_refused_by_name(classifier: BertForSequenceClassification) -> None:
    with pytest.raises(CertificateError, match=r"Linear\) has logits of the shape .* Give a module"):
        hs.bounds.robust_radius(nn.Linear(3, 2), torch.zeros(2, 3))
    with pytest.raises(CertificateError, match=r"LlamaForCausalLM\) has logits of the shape .* of one token"):
        hs.bounds.robust_radius(LlamaForCausalLM(tiny("llama").config), {"input_ids": IDS})
    with pytest.raises(ArgumentError, match=r"token ids from 0 to 19, .*got id 90"):
        hs.bounds.robust_radius(classifier, {"input_ids": 10 * IDS})
    config = BertConfig(
        vocab_size=12,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_act="leaky_relu",
    )
    with pytest.raises(
        CertificateError, match=r"intermediate_act_fn.*'leaky_relu', which no known layer does"
    ):
        hs.bounds.robust_radius(BertForSequenceClassification(config), {"input_ids": IDS})


def test_a_model_that_computes_something_else_is_refused(classifier: BertForSequenceClassification) -> None:
    class Rounded(BertForSequenceClassification):
        def forward(self, **inputs: Tensor):
            found = super().forward(**inputs)
            found.logits = found.logits.round(decimals=3)
            return found

    with pytest.raises(CertificateError, match="computes 'round'"):
        hs.bounds.robust_radius(Rounded(classifier.config), {"input_ids": IDS})


@pytest.mark.slow
def test_a_real_sentence_keeps_its_radius() -> None:
    folder = shared_data("bert_tiny_sst2_encoder")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    x = load_file(folder / "sequences.safetensors")["sst2_val_1"]
    assert len(x) == json.loads((folder / "sequences.json").read_text())["sst2_val_1"]["tokens"]
    found = hs.bounds.robust_radius(model, x, tokens=4, order=2)
    assert found.margin == pytest.approx(1.8001, abs=1e-4)
    assert 0.19 < found.radius < found.attack < 1.3
