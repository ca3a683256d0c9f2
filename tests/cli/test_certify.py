"""``howsmooth certify`` and hs.nn.evaluate: numbers against closed forms and attacks, and what is refused."""

from __future__ import annotations

import importlib
import json
import math
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.cli import certify as certify_function
from howsmooth.cli import main
from howsmooth.errors import ArgumentError, CertificateError, NonFiniteError
from howsmooth.nn.certificates.evaluation import tokens_of
from howsmooth.roundoff import limit_in_digits
from tests._documented import check_documented

Result = tuple[int, str, str]
Howsmooth = Callable[..., Result]


@pytest.fixture
def howsmooth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Howsmooth:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        code = main(["certify", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def said(out: str) -> dict[str, Any]:
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(found, dict)
    return found


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


@pytest.fixture
def files(tmp_path: Path) -> tuple[nn.Sequential, Tensor, Tensor]:
    """``model.safetensors`` and ``data.npz``; three of the labels are others than the model gives."""
    model, x = vit(), images()
    with torch.no_grad():
        y = model.double()(x.double()).argmax(dim=1)
        model.float()
    y[:3] = (y[:3] + 1) % 3
    hs.nn.save(model, tmp_path / "model.safetensors", length=4, radius=2.0, notes={"seed": "5"})
    np.savez(tmp_path / "data.npz", X=x.numpy(), y=y.numpy())
    return model, x, y


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


def test_an_evaluation_says_how_far_tokens_reach_within_the_certified_radius(
    howsmooth: Callable[..., Result],
) -> None:
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
    for covered in ({"radius": found.reach}, {"radius": 1.0, "clip": True}):
        assert "they reach" not in str(hs.nn.evaluate(model, x, length=1, **covered))
    hs.nn.save(model, "line.safetensors", length=1, radius=1.0)
    np.save("x.npy", x.numpy())
    line = ("line.safetensors", "--data", "x.npy")
    assert "Within the certified radii they reach 1.8: --radius 1.802 covers" in howsmooth(*line)[1]
    for options in (("--radius", "1.802"), ("--clip",)):
        assert "they reach" not in howsmooth(*line, *options)[1]


def test_no_attack_moves_an_input_to_another_class_within_its_radius() -> None:
    model, x = vit().double(), images(largest=1.5).double()
    found = hs.nn.evaluate(model, x, length=4, radius=2.0, clip=True)
    radii = torch.tensor(found.table["certified_radius"].to_numpy())
    predicted = torch.tensor(found.table["predicted"].to_numpy())
    assert (radii > 1e-3).float().mean() > 0.8
    # The model as it is evaluated: patches beyond the radius are clipped.
    clipped = nn.Sequential(model[0], hs.nn.ClipTokens(2.0), *model[1:])
    move = torch.randn_like(x) * 1e-3
    for _ in range(60):
        move.requires_grad_()
        logits = clipped(x + move)
        own = logits.gather(1, predicted[:, None])[:, 0]
        others = logits.scatter(1, predicted[:, None], -math.inf).amax(dim=1)
        (gradient,) = torch.autograd.grad((others - own).sum(), move)
        with torch.no_grad():
            move = move + gradient * (0.2 * radii / gradient.flatten(1).norm(dim=1))[:, None, None, None]
            norms = move.flatten(1).norm(dim=1)
            move = move * (radii / norms).clamp(max=1.0)[:, None, None, None]
    with torch.no_grad():
        assert torch.equal(clipped(x + move).argmax(dim=1), predicted)


def test_clipping_is_the_projection_of_the_inputs() -> None:
    model, x = vit().double(), images(largest=1.5).double()
    patches = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(len(x), 4, 4)
    norms = patches.norm(dim=2)
    beyond = int((norms > 2.0).any(dim=1).sum())
    assert 0 < beyond < len(x)
    factors = (2.0 / norms).clamp(max=1.0).reshape(len(x), 1, 2, 2)
    inside = x * factors.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    found = hs.nn.evaluate(model, x, length=4, radius=2.0, clip=True)
    plain = hs.nn.evaluate(model, inside * (1 - 1e-12), length=4, radius=2.0)
    assert found.clipped == beyond
    assert plain.clipped == 0
    assert math.isinf(found.certificate.radius)
    for column in ("predicted", "margin", "certified_radius"):
        np.testing.assert_allclose(found.table[column], plain.table[column], rtol=1e-9)
    np.testing.assert_allclose(found.table["longest"], norms.amax(dim=1), rtol=1e-12)
    with pytest.raises(
        ArgumentError, match=f"got {beyond} of 40 inputs with a longer one, the longest of norm"
    ):
        hs.nn.evaluate(model, x, length=4, radius=2.0)


@pytest.mark.parametrize("nested", [False, True])
def test_tokens_vectors_and_flat_images_are_clipped_before_all(nested: bool) -> None:
    def put(*modules: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Identity(), nn.Sequential(*modules)) if nested else nn.Sequential(*modules)

    torch.manual_seed(2)
    linear, pool = nn.Linear(3, 2).double(), hs.nn.MeanPool()
    x = 2 * torch.randn(20, 4, 3, dtype=torch.float64)

    def margins(model: nn.Module, x: Tensor, n: int) -> Any:
        return hs.nn.evaluate(model, x, length=n, radius=1.0, clip=True).table["margin"]

    def short(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp(min=1.0)

    def by_hand(logits: Tensor) -> Any:
        return (logits[:, 0] - logits[:, 1]).abs().detach()

    np.testing.assert_allclose(
        margins(put(linear, pool), x, 4), by_hand(linear(short(x)).sum(1) / 2), rtol=1e-10
    )
    np.testing.assert_allclose(margins(put(linear), x[:, 0], 1), by_hand(linear(short(x[:, 0]))), rtol=1e-10)
    wide = nn.Linear(12, 2).double()
    np.testing.assert_allclose(
        margins(put(nn.Flatten(), wide), x, 4), by_hand(wide(short(x).flatten(1))), rtol=1e-10
    )
    np.testing.assert_allclose(
        margins(put(nn.Flatten(), wide), x.reshape(20, 1, 4, 3), 1),
        by_hand(wide(short(x.flatten(1)))),
        rtol=1e-10,
    )


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

    def settings(self):
        return {"wide": self.positions.shape[1]}
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


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_forward_is_evaluated_as_its_parts_are(clip: bool, inside: bool) -> None:
    (model, parts), x = own_and_parts(), images(largest=1.5 if clip else 1.0)
    if inside:
        model, parts = (nn.Sequential(one, nn.Identity(), nn.Linear(3, 2)).double() for one in (model, parts))
        parts[2] = model[2]  # type: ignore[index, operator]
    y = torch.arange(40) % 2
    found, wanted = (
        hs.nn.evaluate(one, x, y, length=4, radius=2.0, clip=clip, batch=7) for one in (model, parts)
    )
    assert found.certificate.constant == pytest.approx(wanted.certificate.constant, rel=1e-9)
    assert found.certificate.radius == wanted.certificate.radius
    assert [row.path for row in found.certificate.rows].count("(clip)") == int(clip)
    assert found.clipped == wanted.clipped == (int((found.table["longest"] > 2).sum()) if clip else 0)
    assert not clip or 0 < found.clipped < 40
    np.testing.assert_allclose(found.table, wanted.table, rtol=1e-9, atol=1e-12)
    assert found.table["certified_radius"].max() > 1e-3


def test_a_forward_on_tokens_and_on_vectors_is_clipped() -> None:
    torch.manual_seed(0)

    class Own(nn.Module):
        def __init__(self, tokens: bool) -> None:
            super().__init__()
            self.linear, self.tokens = nn.Linear(3, 2).double(), tokens

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x) + self.linear(x)
            return y.mean(dim=1) if self.tokens else y

    x = 2 * torch.randn(20, 4, 3, dtype=torch.float64)
    short = x / x.norm(dim=-1, keepdim=True).clamp(min=1.0)
    for model, given, inside in ((Own(True), x, short), (Own(False), x[:, 0], short[:, 0])):
        found = hs.nn.evaluate(
            model, given, length=len(given[0]) if given.ndim == 3 else 1, radius=1.0, clip=True
        )
        logits = model(inside).detach()
        np.testing.assert_allclose(found.table["margin"], (logits[:, 0] - logits[:, 1]).abs(), rtol=1e-10)
        assert math.isinf(found.certificate.radius)
        norm = torch.linalg.matrix_norm(model.linear.weight.detach(), 2)
        share = math.sqrt(1 / 4) if given.ndim == 3 else 1.0
        assert found.certificate.constant == pytest.approx(2 * float(norm) * share, rel=1e-9)


def test_the_command_takes_a_forward_with_its_classes_and_data(howsmooth: Howsmooth, tmp_path: Path) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    sys.path.insert(0, str(tmp_path))
    try:
        own = importlib.import_module("own_models").ViT
    finally:
        sys.path.remove(str(tmp_path))
    torch.manual_seed(3)
    model, x = own(wide=5), images()
    hs.nn.save(model, "own.safetensors", radius=2.0, classes=[own])
    np.save("X.npy", x.numpy())
    options = ["own.safetensors", "--data", "X.npy", "--json", "-q"]
    code, out, err = howsmooth(*options, "--classes", "own_models")
    assert (code, err) == (0, "")
    wanted = hs.nn.evaluate(model, x, length=4, radius=2.0)
    found = said(out)
    assert (found["length"], found["constant"]) == (4, wanted.certificate.constant)
    assert found["modules"][0] | {"source": ""} == found["modules"][0] | {"path": "patches", "source": ""}
    assert found["data"]["median_certified_radius"] == wanted.table["certified_radius"].median()
    code, _, err = howsmooth("own.safetensors", "--classes", "own_models", "--length", "4")
    assert code == 2
    assert "data: expected --data FILE: the model has a forward of its own" in err
    code, _, err = howsmooth(*options)
    assert code == 2
    assert "own_models.ViT', which is not known: give your own as classes=[...], or" in err
    assert "on the command line their module, --classes own_models." in err
    assert "--data" not in err
    code, _, err = howsmooth("own.safetensors")
    assert code == 2
    assert "--classes own_models. Where such a class has a forward of its own, give --data FILE too" in err
    for name in ("no_such_models", "broken_models"):
        (tmp_path / "broken_models.py").write_text("1 / 0")
        code, _, err = howsmooth(*options, "--classes", name)
        assert code == 2
        assert f"classes: expected a Python module that can be imported, got '{name}' (" in err


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
        tokens_of(model, images())
    with pytest.raises(ArgumentError, match="kernel_size == stride"):
        tokens_of(own_and_parts()[0], torch.rand(2, 1, 1, 1).double())


# ---- the command


def test_the_constant_and_where_it_is_spent(howsmooth: Howsmooth, files: Any) -> None:
    model = files[0]
    code, out, err = howsmooth("model.safetensors")
    certificate = hs.nn.certify(model.double(), 4, 2.0)
    assert (code, err) == (0, "Certifying\n")
    first = out.splitlines()[0]
    constant = limit_in_digits(certificate.constant, 6, upper=True)
    assert first == (
        f"model.safetensors: Lipschitz constant at most {constant} on 4 tokens of norm at most 2"
    )
    for row in certificate.table.itertuples():
        assert re.search(rf"{row.path} +{row.kind} +{row.constant:.6g} ", out), row
    assert "3.inner" in out
    assert re.search(r"^  5 +MeanPool +1 +4 to 1 ", out, flags=re.MULTILINE)
    assert "Weights are stored in float32; the constant and the outputs are computed in float64." in out
    assert "half precision" not in out
    assert "accuracy" not in out


def test_accuracies_and_files(howsmooth: Howsmooth, files: Any) -> None:
    model, x, y = files
    options = ["--data", "data.npz", "--radii", "1e-3,0.05,0,0.05", "--out", "found"]
    code, out, _ = howsmooth("model.safetensors", *options)
    certificate = hs.nn.certify(model.double(), 4, 2.0)
    radii = certificate.certified_radius(model(x.double()), y)
    longest = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(40, 4, 4).norm(dim=2).max()
    assert code == 0
    assert f"data.npz: 40 inputs, the longest token of norm {longest:.4g}" in out
    assert re.search(r"^  not at all \(clean\) +0\.9250 +37 of 40$", out, flags=re.MULTILINE)
    shown = re.findall(r"^  ([\d.]+) +([\d.]+) +(\d+) of 40$", out, flags=re.MULTILINE)
    assert [float(row[0]) for row in shown] == [0.0, 0.001, 0.05]
    for radius, share, count in shown:
        assert int(count) == int((radii > float(radius)).sum())
        assert float(share) == pytest.approx(int(count) / 40, abs=1e-4)
    assert 0 < int(shown[2][2]) < int(shown[1][2]) <= 37
    assert "proved for perturbed inputs whose tokens have norms of at most 2; with --clip for all." in out
    assert f"Written: {Path('found/modules.csv')}" in out
    assert f"Written: {Path('found/inputs.csv')}" in out
    table = pd.read_csv("found/inputs.csv")
    assert list(table) == ["index", "label", "predicted", "margin", "certified_radius", "longest"]
    np.testing.assert_allclose(table["certified_radius"], radii.detach(), rtol=1e-12)
    assert table["label"].tolist() == y.tolist()
    assert (table["certified_radius"][:3] == 0).all()
    assert (table["margin"][:3] < 0).all()
    assert len(pd.read_csv("found/modules.csv")) == len(certificate.table)


def test_json(howsmooth: Howsmooth, files: Any) -> None:
    code, out, _ = howsmooth("model.safetensors", "--data", "data.npz", "--json", "-q", "--radii", "0,9")
    found = said(out)
    assert code == 0
    check_documented("certify", found)
    assert (found["length"], found["radius"], found["clipped"]) == (4, 2.0, False)
    assert (found["stored_in"], found["computed_in"], found["notes"]) == ("float32", "float64", {"seed": "5"})
    assert found["constant"] == hs.nn.certify(files[0].double(), 4, 2.0).constant
    assert [row["kind"] for row in found["modules"]][:3] == ["Patches", "OrthogonalLinear", "AddPositions"]
    assert found["data"]["clean_accuracy"] == 37 / 40
    assert [row["inputs"] for row in found["data"]["certified"]] == [37, 0]
    assert found["files"] == []
    _, out, _ = howsmooth("model.safetensors", "--json", "-q")
    assert said(out)["data"] is None


@pytest.mark.parametrize("saved", [math.inf, 2.0])
def test_a_model_that_clips_is_certified_for_all_inputs(
    howsmooth: Howsmooth, tmp_path: Path, saved: float
) -> None:
    patches, *rest = vit()
    model = nn.Sequential(patches, hs.nn.ClipTokens(2.0), *rest).eval()
    hs.nn.save(model, tmp_path / "clips.safetensors", length=4, radius=saved)
    np.save(tmp_path / "far.npy", images(largest=9.0).numpy())
    arguments = [
        "clips.safetensors",
        "--data",
        "far.npy",
        *([] if saved == math.inf else ["--radius", "inf"]),
    ]
    code, out, _ = howsmooth(*arguments)
    assert code == 0
    wanted = hs.nn.evaluate(model, images(largest=9.0), length=4, radius=math.inf)
    constant = limit_in_digits(wanted.certificate.constant, 6, upper=True)
    assert out.startswith(f"clips.safetensors: Lipschitz constant at most {constant} on 4 tokens\n")
    assert "The counts are proved for all perturbed inputs." in out
    found = said(howsmooth(*arguments, "--json")[1])
    assert (found["radius"], found["constant"]) == (None, wanted.certificate.constant)
    code, _, err = howsmooth(*arguments, "--clip")
    assert code == 2
    assert "radius: expected a finite number > 0, got inf" in err


def test_data_beyond_the_radius(howsmooth: Howsmooth, files: Any) -> None:
    x = images(largest=1.5)
    np.save("far.npy", x.numpy())
    code, out, err = howsmooth("model.safetensors", "--data", "far.npy", "-q")
    patches = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(40, 4, 4).norm(dim=2)
    beyond = int((patches > 2).any(dim=1).sum())
    assert (code, out) == (2, "")
    assert (
        f"data: expected tokens of norm at most 2, the radius of the certificate, got {beyond} of 40" in err
    )
    code, out, _ = howsmooth("model.safetensors", "--data", "far.npy", "--clip")
    assert code == 0
    assert out.startswith("model.safetensors: Lipschitz constant at most ")
    assert " on 4 tokens, clipped to norm 2\n" in out
    assert re.search(r"\(clip\) +ClipTokens +1 +4 +inf +2$", out, flags=re.MULTILINE)
    assert "keep their class" in out
    assert "clean" not in out
    assert f"{beyond} inputs had tokens beyond the radius and were clipped." in out
    _, out, _ = howsmooth("model.safetensors", "--data", "far.npy", "--clip", "--json", "-q")
    found = said(out)
    assert (found["clipped"], found["data"]["beyond_radius"], found["radius"]) == (True, beyond, 2.0)
    assert found["modules"][0]["radius_in"] is None
    # A larger radius takes them; the layer of attention states its own.
    assert howsmooth("model.safetensors", "--data", "far.npy", "--radius", "2.8")[0] == 0
    code, _, err = howsmooth("model.safetensors", "--radius", "4")
    assert code == 2
    assert "3.inner (SelfAttentionBlock) has no constant here: radius: expected at most 3" in err


def test_half_precision_is_said(howsmooth: Howsmooth, files: Any, tmp_path: Path) -> None:
    hs.nn.save(files[0].bfloat16(), tmp_path / "half.safetensors", length=4, radius=1.9)
    code, out, _ = howsmooth("half.safetensors", "--data", "data.npz", "--clip")
    assert code == 0
    assert "Weights are stored in bfloat16;" in out
    assert "The certificate does not cover a run in half precision" in out


def test_files_of_data(howsmooth: Howsmooth, files: Any, tmp_path: Path) -> None:
    _, x, y = files
    _, wanted, _ = howsmooth("model.safetensors", "--data", "data.npz", "--json", "-q")
    np.save("x.npy", x.numpy())
    np.save("y.npy", y.numpy())
    save_file({"X": x, "y": y}, "both.safetensors")
    np.savez("y.npz", y=y.numpy().astype(np.uint8), other=np.ones(3))
    ways = [
        ["x.npy", "--labels", "y.npy"],
        ["x.npy", "--labels", "y.npz"],
        ["both.safetensors"],
        ["data.npz", "--labels", "both.safetensors"],
    ]
    for way in ways:
        code, out, _ = howsmooth("model.safetensors", "--data", *way, "--json", "-q", "--batch", "7")
        assert code == 0
        assert said(out)["data"] | {"file": ""} == said(wanted)["data"] | {"file": ""}


def test_what_the_file_does_not_say_is_asked_for(howsmooth: Howsmooth, files: Any, tmp_path: Path) -> None:
    hs.nn.save(files[0], tmp_path / "bare.safetensors")
    code, _, err = howsmooth("bare.safetensors", "--radius", "2")
    assert code == 2
    assert (
        "length: expected a number, got none, and the model was saved without one. Give it with --length."
        in err
    )
    code, _, err = howsmooth("bare.safetensors", "--length", "4")
    assert code == 2
    assert "Give it with --radius." in err
    # The number of tokens may be that of the data.
    assert howsmooth("bare.safetensors", "--radius", "2", "--data", "data.npz")[0] == 0


REFUSED: dict[str, tuple[list[str], str]] = {
    "no model": ([], "Missing argument 'MODEL'"),
    "no such model": (["none.safetensors"], "There is no model file none.safetensors"),
    "a parameter file": (["head.safetensors"], "a safetensors file of another program"),
    "data for a model": (["data.npz"], "is damaged, or no safetensors file"),
    "another length": (
        ["model.safetensors", "--length", "5"],
        "2 (AddPositions) has no constant here: length",
    ),
    "another length of data": (
        ["model.safetensors", "--data", "long.npy"],
        "data: expected inputs of 4 tokens, the length of the certificate, got 2 inputs of 8",
    ),
    "length zero": (["model.safetensors", "--length", "0"], "length: expected at least 1, got 0"),
    "radius zero": (["model.safetensors", "--radius", "0"], "radius: expected a number > 0, or inf, got 0.0"),
    "radius nan": (
        ["model.safetensors", "--radius", "nan"],
        "radius: expected a number > 0, or inf, got nan",
    ),
    "radii of words": (
        ["model.safetensors", "--radii", "a"],
        "radii: expected finite numbers >= 0 with commas",
    ),
    "radii below zero": (["model.safetensors", "--radii", "1,-1"], "radii: expected finite numbers"),
    "radii of infinity": (["model.safetensors", "--radii", "inf"], "radii: expected finite numbers"),
    "no radii": (["model.safetensors", "--radii", ""], "radii: expected finite numbers"),
    "many radii": (["model.safetensors", "--radii", ",".join(map(str, range(101)))], "at most 100"),
    "no such data": (["model.safetensors", "--data", "none.npy"], "There is no data file none.npy"),
    "data of words": (["model.safetensors", "--data", "words.txt"], "words.txt is neither .npy nor .npz"),
    "pickled data": (["model.safetensors", "--data", "pickled.npy"], "pickled.npy cannot be read: "),
    "a pickled model": (["model.safetensors", "--data", "module.pt"], "Pickled formats are never read"),
    "several arrays": (["model.safetensors", "--data", "names.npz"], "an array named X, got a, b"),
    "no arrays": (["model.safetensors", "--data", "nothing.npz"], "an array named X, got none"),
    "NaN": (
        ["model.safetensors", "--data", "nan.npy"],
        "data: expected finite numbers, got NaN or infinity in 1 of 2",
    ),
    "whole numbers": (
        ["model.safetensors", "--data", "int.npy"],
        "data: expected floating-point numbers, scaled as",
    ),
    "no inputs": (
        ["model.safetensors", "--data", "empty.npy"],
        "data: expected at least one input, got shape",
    ),
    "vectors": (["model.safetensors", "--data", "vectors.npy"], "got 2 inputs of 1"),
    "tokens for images": (
        ["model.safetensors", "--data", "tokens.npy"],
        "x: expected floating-point numbers, 4 axes, got",
    ),
    "sides that do not fit": (
        ["model.safetensors", "--data", "odd.npy"],
        "images whose sides are multiples of 2",
    ),
    "five axes": (
        ["model.safetensors", "--data", "five.npy"],
        "data: expected tokens (batch, n, d) or vectors",
    ),
    "labels alone": (
        ["model.safetensors", "--labels", "data.npz"],
        "labels: expected this option together with --data",
    ),
    "clip alone": (
        ["model.safetensors", "--clip"],
        "clip: expected this option together with --data, got no --data",
    ),
    "few labels": (
        ["model.safetensors", "--data", "data.npz", "--labels", "few.npy"],
        "one for each of 40 inputs",
    ),
    "labels of fractions": (
        ["model.safetensors", "--data", "data.npz", "--labels", "half.npy"],
        "labels: expected integers",
    ),
    "labels beyond": (
        ["model.safetensors", "--data", "data.npz", "--labels", "high.npy"],
        "labels: expected classes from 0 to 2, got 7 to 7",
    ),
    "no logits": (["tokens.safetensors", "--data", "data.npz", "--length", "4"], "logits (batch, classes)"),
    "one class": (["one.safetensors", "--data", "data.npz", "--length", "4"], "classes >= 2"),
    "out is a file": (["model.safetensors", "--out", "words.txt"], "out: expected a writable folder"),
}


@pytest.fixture
def bad(files: Any, tmp_path: Path) -> None:
    hs.nn.save(hs.nn.Patches(2), tmp_path / "tokens.safetensors", radius=2.0)
    one = nn.Sequential(hs.nn.Patches(2), hs.nn.MeanPool(), nn.Linear(4, 1))
    hs.nn.save(one, tmp_path / "one.safetensors", radius=2.0)
    save_file({"query": torch.ones(2, 2)}, tmp_path / "head.safetensors")
    (tmp_path / "words.txt").write_text("words")
    arrays = {
        "long": np.zeros((2, 1, 4, 8)), "int": np.zeros((2, 1, 4, 4), np.uint8),
        "empty": np.zeros((0, 1, 4, 4)),
        "vectors": np.zeros((2, 16)), "tokens": np.zeros((2, 4, 4)), "odd": np.zeros((2, 1, 3, 4)),
        "five": np.zeros((2, 1, 1, 4, 4)), "few": np.zeros(3, int), "half": np.zeros(40),
        "high": np.full(40, 7),
        "nan": np.stack([np.zeros((1, 4, 4)), np.full((1, 4, 4), np.nan)]),
    }  # fmt: skip
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.save(tmp_path / "pickled.npy", np.array([{"a": 1}]), allow_pickle=True)
    np.savez(tmp_path / "names.npz", a=np.zeros(3), b=np.zeros(3))
    np.savez(tmp_path / "nothing.npz")
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusals(name: str, howsmooth: Howsmooth, bad: None) -> None:
    arguments, words = REFUSED[name]
    code, out, err = howsmooth(*arguments)
    assert code == 2
    assert out == ""
    error = err.splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error
    assert not Path("found").exists()


def test_the_examples_of_the_help_work(howsmooth: Howsmooth, files: Any) -> None:
    _, x, y = files
    np.save("X.npy", x.numpy())
    np.save("y.npy", y.numpy())
    Path("data.npz").rename("digits.npz")
    lines = re.findall(r"\[cyan\](.*?)\[/\]", certify_function.__dict__["examples"])
    assert len(lines) >= 4
    for line in lines:
        program, command, *arguments = shlex.split(line)
        assert (program, command) == ("howsmooth", "certify")
        assert howsmooth(*arguments)[0] == 0


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
    model, x = vit(), images()
    y = torch.zeros(40, dtype=torch.int64)
    with pytest.raises(NonFiniteError, match="data: expected finite numbers, got NaN or infinity in 2 of 40"):
        hs.nn.evaluate(
            model, torch.where(torch.arange(40)[:, None, None, None] < 2, math.inf, x), length=4, radius=2.0
        )
    for labels in (y[:3], y[None], y.double(), y.bool()):
        with pytest.raises(ArgumentError, match="labels: expected integers, one for each of 40 inputs"):
            hs.nn.evaluate(model, x, labels, length=4, radius=2.0)
    with pytest.raises(ArgumentError, match="labels: expected classes from 0 to 2"):
        hs.nn.evaluate(model, x, y - 1, length=4, radius=2.0)
    with pytest.raises(ArgumentError, match="length"):
        hs.nn.evaluate(model, x, length=0, radius=2.0)
    with pytest.raises(ArgumentError, match="radius"):
        hs.nn.evaluate(model, x, length=4, radius=-2.0)
    arrays: Any = x.numpy(), y.numpy()
    for given, argument in ((arrays, "inputs"), ((x, arrays[1]), "labels")):
        with pytest.raises(ArgumentError, match=f"{argument}: expected a tensor, got ndarray.*from_numpy"):
            hs.nn.evaluate(model, *given, length=4, radius=2.0)
    for batch in (0, -1):
        with pytest.raises(ArgumentError, match="batch: expected a whole number >= 1"):
            hs.nn.evaluate(model, x, length=4, radius=2.0, batch=batch)
    found = hs.nn.evaluate(model, x, y, length=4, radius=2.0)
    for radius in (-0.1, math.nan, math.inf):
        with pytest.raises(ArgumentError, match="radius: expected a finite number >= 0"):
            found.certified(radius)
    with torch.no_grad():
        model[6].linear.bias.fill_(math.nan)
    with pytest.raises(NonFiniteError, match=r"6\.linear\.bias"):
        hs.nn.evaluate(model, x, length=4, radius=2.0)
