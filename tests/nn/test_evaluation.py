"""hs.nn.evaluate: numbers against closed forms and attacks, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import ArgumentError, CertificateError, NonFiniteError
from howsmooth.nn.certificates.evaluation import _tokens_of


def vit() -> nn.Sequential:
    """Images (1, 4, 4), four patches of norm at most 2, three classes."""
    torch.manual_seed(5)
    attention = hs.nn.SoftmaxAttention(6, 2, length=4, radius=3.0, constant=1.0)
    return nn.Sequential(
        hs.nn.Patches(2),
        hs.nn.OrthogonalLinear(4, 6, bias=False),
        hs.nn.AddPositions(4, 6),
        hs.nn.AverageResidual(hs.nn.SelfAttentionBlock(attention)),
        hs.nn.AverageResidual(nn.Sequential(hs.nn.OrthogonalLinear(6, 6), hs.nn.MaxMin())),
        hs.nn.MeanPool(),
        hs.nn.SpectralLinear(6, 3),
    ).eval()


def images(count: int = 40, largest: float = 1.0) -> Tensor:
    return largest * torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))


# ---- numbers


def test_radii_of_a_linear_classifier_are_distances_to_its_boundary() -> None:
    # With rows w and −w the largest constant is attained along what separates the classes.
    torch.manual_seed(0)
    w = torch.randn(5, dtype=torch.float64)
    model = nn.Linear(5, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.stack([w, -w]))
        model.bias.copy_(torch.tensor([0.3, -0.1], dtype=torch.float64))
    x = torch.randn(50, 5, dtype=torch.float64)
    found = hs.nn.evaluate(model, x, length=1, radius=10.0)
    distance = (2 * x @ w + 0.4).abs() / (2 * w.norm())
    radii = torch.tensor(found.table["certified_radius"].to_numpy())
    torch.testing.assert_close(radii, distance, rtol=1e-10, atol=0.0)
    assert bool((radii < distance).all())
    assert found.correct is None
    for radius in (0.0, 0.3, 1.0):
        assert found.certified(radius) == int((distance > radius).sum())
    torch.testing.assert_close(torch.tensor(found.table["longest"].to_numpy()), x.norm(dim=1))
    assert found.table["predicted"].tolist() == (x @ w < -0.2).long().tolist()


def test_an_evaluation_says_how_far_tokens_reach_within_the_certified_radius() -> None:
    model, x = (
        nn.Linear(2, 2, bias=False).double(),
        torch.tensor([[0.9, 0.0], [0.0, 1.0]], dtype=torch.float64),
    )
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    found = hs.nn.evaluate(model, x, torch.tensor([0, 1]), length=1, radius=1.0)
    # The first input may move by 0.9, to the norm 1.8; the second lies on the boundary of the classes.
    assert found.reach == pytest.approx(1.8, rel=1e-9)
    assert "2 inputs, the longest token of norm 1; 1 of the class of their label" in str(found)
    assert "of at most 1; within the certified radii they reach 1.8, which radius=1.802 or" in str(found)
    clipped = nn.Sequential(hs.nn.ClipTokens(1.0), model)
    for one, radius in ((model, found.reach), (clipped, math.inf)):
        assert "they reach" not in str(hs.nn.evaluate(one, x, length=1, radius=radius))


def test_inputs_beyond_the_radius_are_counted_and_refused() -> None:
    model, x = vit().double(), images(largest=1.5).double()
    beyond = int((hs.nn.Patches(2)(x).norm(dim=2) > 2.0).any(dim=1).sum())
    assert 0 < beyond < len(x)
    words = f"got {beyond} of 40 inputs with a longer one, the longest of norm .* hs.nn.ClipTokens"
    with pytest.raises(ArgumentError, match=words):
        hs.nn.evaluate(model, x, length=4, radius=2.0)


def test_half_precision_weights_are_numbers_of_float64() -> None:
    model = nn.Sequential(hs.nn.MaxMin(), nn.Linear(4, 3)).bfloat16()
    x = torch.randn(9, 4).half()
    found = hs.nn.evaluate(model, x, length=1, radius=9.0)
    exact = nn.Sequential(hs.nn.MaxMin(), nn.Linear(4, 3)).double()
    exact.load_state_dict(model.state_dict())
    top = exact(x.double()).topk(2).values
    np.testing.assert_allclose(found.table["margin"], (top[:, 0] - top[:, 1]).detach(), rtol=1e-12)
    assert next(model.parameters()).dtype == torch.bfloat16


def test_dropout_and_training_do_not_matter() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    x = torch.randn(9, 4)
    tables = [
        hs.nn.evaluate(model.train(training), x, length=1, radius=9.0, batch=size).table
        for training, size in ((True, 2), (True, 4), (False, 99))
    ]
    for other in tables[1:]:
        pd.testing.assert_frame_equal(tables[0], other)


# ---- models with a forward of their own

OWN = """
import torch
from torch import nn


class ViT(nn.Module):
    def __init__(self, wide=4):
        super().__init__()
        self.patches = nn.Conv2d(1, wide, 2, stride=2)
        self.positions = nn.Parameter(0.1 * torch.randn(4, wide))
        self.up, self.head = nn.Linear(wide, wide), nn.Linear(wide, 3)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head((x + torch.relu(self.up(x))).mean(dim=1))
"""


def own_and_parts() -> tuple[nn.Module, nn.Sequential]:
    """A ViT with a forward of its own, and the same function put together from parts."""
    torch.manual_seed(3)
    names: dict[str, Any] = {"__name__": "own"}
    exec(OWN, names)
    model = names["ViT"]().double()
    cut, positions, head = nn.Linear(4, 4).double(), hs.nn.AddPositions(4, 4), nn.Linear(4, 3).double()
    with torch.no_grad():
        cut.weight.copy_(model.patches.weight.flatten(1))
        cut.bias.copy_(model.patches.bias)
        head.weight.copy_(model.head.weight / 2)  # MeanPool gives the root of n times the mean
        head.bias.copy_(model.head.bias)
    positions.positions = model.positions
    branch = hs.nn.Residual(nn.Sequential(model.up, nn.ReLU()))
    return model, nn.Sequential(hs.nn.Patches(2), cut, positions, branch, hs.nn.MeanPool(), head)


@pytest.mark.parametrize("inside", [False, True])
def test_a_forward_is_evaluated_as_its_parts_are(inside: bool) -> None:
    (model, parts), x = own_and_parts(), images()
    if inside:
        model, parts = (nn.Sequential(one, nn.Identity(), nn.Linear(3, 2)).double() for one in (model, parts))
        parts[2] = model[2]
    y = torch.arange(40) % 2
    found, wanted = (hs.nn.evaluate(one, x, y, length=4, radius=2.0, batch=7) for one in (model, parts))
    assert found.certificate.constant == pytest.approx(wanted.certificate.constant, rel=1e-9)
    assert found.certificate.radius == wanted.certificate.radius
    np.testing.assert_allclose(found.table, wanted.table, rtol=1e-9, atol=1e-12)
    assert found.table["certified_radius"].max() > 1e-3


def test_images_that_do_not_fit_a_forward() -> None:
    model, _ = own_and_parts()
    for wrong, words in (
        (torch.rand(2, 1, 4, 6), "images of 4 patches, got 6 patches"),
        (torch.rand(2, 2, 4, 4), "an input that the model takes"),
        (torch.rand(2, 1, 1, 1), "an input that the model takes"),
    ):
        with pytest.raises(ArgumentError, match=words):
            hs.nn.evaluate(model, wrong, length=4, radius=2.0)
    model.patches = nn.Conv2d(1, 4, 2, stride=1).double()
    with pytest.raises(CertificateError, match="overlap"):
        hs.nn.evaluate(model, images(), length=9, radius=2.0)
    with pytest.raises(ArgumentError, match="kernel_size == stride"):
        _tokens_of(model, images())
    with pytest.raises(ArgumentError, match="kernel_size == stride"):
        _tokens_of(own_and_parts()[0], torch.rand(2, 1, 1, 1).double())


# ---- arguments in Python


def test_a_forward_that_depends_on_the_batch_is_refused() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * x.shape[0]

    with pytest.raises(ArgumentError, match=r"model: expected a forward .* input 2 alone"):
        hs.nn.evaluate(Counted(), torch.randn(5, 3), length=1, radius=9.0, batch=3)


def test_arguments_of_evaluate() -> None:
    model, x, y = vit(), images(), torch.zeros(40, dtype=torch.int64)
    bad = torch.where(torch.arange(40)[:, None, None, None] < 2, math.inf, x)
    usual: dict[str, Any] = {"labels": None, "length": 4, "radius": 2.0}
    for given, options, words in (
        (bad, {}, "inputs: expected finite numbers, got NaN or infinity in 2 of 40"),
        *((x, {"labels": labels}, "labels: expected") for labels in (y[:3], y[None], y.double())),
        (x, {"labels": y - 1}, "labels: expected classes from 0 to 2"),
        (x, {"length": 0}, "length"),
        (x, {"radius": -2.0}, "radius"),
        (x.numpy(), {}, "inputs: expected a tensor, got ndarray.*from_numpy"),
        (x, {"labels": y.numpy()}, "labels: expected a tensor, got ndarray.*from_numpy"),
        *((x, {"batch": batch}, "batch: expected a whole number >= 1") for batch in (0, -1)),
    ):
        with pytest.raises(ArgumentError, match=words):
            hs.nn.evaluate(model, given, **(usual | options))
    found = hs.nn.evaluate(model, x, y, length=4, radius=2.0)
    for radius in (-0.1, math.nan, math.inf):
        with pytest.raises(ArgumentError, match="radius: expected a finite number >= 0"):
            found.certified(radius)
    with torch.no_grad():
        model[6].linear.bias.fill_(math.nan)
    with pytest.raises(NonFiniteError, match=r"6\.linear\.bias"):
        hs.nn.evaluate(model, x, length=4, radius=2.0)
