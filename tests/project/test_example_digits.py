"""The worked case of examples/digits: committed weights, against an attack and dense Jacobians."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("sklearn")

from examples.digits import radii
from examples.digits import train as training
from examples.digits.attack import attack
from examples.digits.data import Digits, load
from examples.digits.evaluate import RADII, certified_radii, constant_of, of_parts

from tests._selection import others_slow

HERE = Path(training.__file__).parent
RESULTS = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
DONE = json.loads((HERE / "radii.json").read_text(encoding="utf-8"))
LIPSCHITZ = [name for name, row in RESULTS.items() if row["form"] == "lipschitz"]
# The first seed of each form; the others with -m slow.
SEEDS = [pytest.param(n, marks=[] if n.endswith("-0") else pytest.mark.slow) for n in RESULTS]


@pytest.fixture(scope="module")
def digits() -> tuple[Digits, Digits]:
    return load()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def committed(name: str) -> nn.Module:
    row = RESULTS[name]
    return training.read_model(training.weights_path(HERE, row["form"], row["seed"]), row["form"])


def test_the_attack_of_a_linear_model_finds_the_worst_that_there_is() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 4, bias=False)).double()
    model[1].weight.data = weight
    images = torch.randn(20, 1, 2, 3, generator=generator, dtype=torch.float64)
    labels = model(images).argmax(dim=1).detach()
    radii = (0.01, 0.02)  # nothing is broken there, so nothing stops the search
    clean = model(images).detach()
    gaps = clean.gather(1, labels[:, None]) - clean
    slopes = (weight[labels][:, None] - weight[None]).norm(dim=2)
    found, _ = attack(model, images, labels, radii)
    for radius, least in zip(radii, found, strict=True):
        exact = (gaps - radius * slopes).scatter(1, labels[:, None], torch.inf).amin(dim=1)
        kept = exact > 0
        assert kept.sum() > 10
        torch.testing.assert_close(least[kept], exact[kept], rtol=0, atol=2e-5)
        assert bool((least >= exact - 1e-12).all())
        assert bool((least[~kept] <= 0).all())


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_ordered_image_by_image(name: str) -> None:
    row = RESULTS[name]
    assert row["wrongly_certified"] == 0
    assert row["images"] == 500
    assert row["radii"] == list(RADII)
    for certified, attacked in zip(row["certified"], row["attacked"], strict=True):
        assert certified <= attacked <= row["clean"]
    assert row["attacked"] == sorted(row["attacked"], reverse=True)
    assert row["model_constants"][1] <= row["constant"]


@pytest.mark.parametrize("name", SEEDS)
def test_committed_weights_give_the_accuracies_that_are_told(
    name: str, digits: tuple[Digits, Digits]
) -> None:
    row, (_, test), model = RESULTS[name], digits, committed(name)
    assert training.weights_path(HERE, row["form"], row["seed"]).stat().st_size < 300_000
    with torch.no_grad():
        right = model(test.images).argmax(dim=1) == test.labels
    radii = certified_radii(model, test.images, test.labels)
    assert float(right.double().mean()) == row["clean"]
    assert [float((right & (radii >= radius)).double().mean()) for radius in RADII] == row["certified"]
    assert constant_of(model).constant == pytest.approx(row["constant"], rel=1e-9)


@pytest.mark.parametrize("name", others_slow(LIPSCHITZ, LIPSCHITZ[:1]))
def test_every_image_certified_at_a_radius_survives_the_attack_there(
    name: str, digits: tuple[Digits, Digits]
) -> None:
    model, test = committed(name), digits[1]
    radii = certified_radii(model, test.images, test.labels)
    # Those that were certified by the least, at each radius: where a constant that is too small would show.
    for radius in RADII:
        order = torch.argsort(torch.where(radii >= radius, radii, torch.inf))[:12]
        order = order[radii[order] >= radius]
        assert len(order)
        found, _ = attack(model, test.images[order], test.labels[order], [radius], steps=10, starts=0)
        assert float(found.min()) > 0
    # And the attack is one that breaks: none survives at three times a pixel's range.
    some = test[:20]
    broken, _ = attack(model, some.images, some.labels, [3.0], steps=15, starts=0)
    assert float(broken.max()) < 0


@pytest.mark.parametrize("name", [name for name in DONE if "order" in name])
def test_every_proved_radius_lies_below_the_attack(name: str) -> None:
    for row in DONE[name].values():
        if row["right"]:
            assert 0 < row["radius"] < row["attack"]
            assert 0 < sum(row["losses"].values()) < row["margin"]
        else:
            assert row["radius"] == row["attack"] == 0


@pytest.mark.parametrize("form", ["plain", "penalised"])
def test_a_plain_model_its_parts_and_its_stages_are_one_function(
    form: str, digits: tuple[Digits, Digits]
) -> None:
    model, images = committed(f"{form}-0"), digits[1].images
    if form == "plain":
        parts, _ = of_parts(model)
        with torch.no_grad():
            torch.testing.assert_close(parts(images[:50]), model(images[:50]), rtol=1e-11, atol=1e-11)
    model = model.double().eval().requires_grad_(False)
    network, patches = radii.network_of(model), model.patches(images[:4])
    logits = torch.stack([network.logits(some) for some in patches])
    torch.testing.assert_close(logits, model(images[:4]), rtol=1e-12, atol=1e-12)
    states = list(network.states(patches[0]))
    torch.testing.assert_close(states[1], model.embed(patches[0]) + model.positions)


def test_training_is_reproducible_and_lowers_the_loss(digits: tuple[Digits, Digits]) -> None:
    train = digits[0][:128]
    for form in training.FORMS:
        recipe = training.RECIPES[form]
        first, _ = training.fit(form, 3, train, epochs=2)
        second, _ = training.fit(form, 3, train, epochs=2)
        torch.manual_seed(3)
        untrained = training.build(form)
        with torch.no_grad():
            images, labels = train.images.float(), train.labels
            losses = [
                float(training.criterion(m(images), labels, recipe)) for m in (untrained, first, second)
            ]
        assert losses[1] < losses[0]
        assert losses[1] == losses[2]
