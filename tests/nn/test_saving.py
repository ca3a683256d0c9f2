"""Models in files: the same numbers to the last bit, and nothing in a file that can do harm."""

from __future__ import annotations

import contextlib
import copy
import json
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import howsmooth as hs
from howsmooth.bounds import Bound
from howsmooth.errors import ArgumentError, ModelError
from tests._nn_layers import DIM, LAYERS, LENGTH, RADIUS, Layer, inputs, tokens_of


def trained(model: nn.Module, x: Tensor, steps: int = 2) -> nn.Module:
    """After some steps of an optimiser, weights and estimates of norms are not what they were at first."""
    parameters = list(model.parameters())
    optimiser = torch.optim.SGD(parameters, lr=0.05) if parameters else None
    for _ in range(steps if optimiser else 0):
        assert optimiser is not None
        optimiser.zero_grad()
        tokens_of(model(x)).square().sum().backward()
        optimiser.step()
    return model.eval()


def small_vit() -> nn.Sequential:
    """A model of most parts."""
    torch.manual_seed(3)
    attention = LAYERS["SoftmaxAttention"].build(length=5, radius=2.0, constant=1.0)
    return nn.Sequential(
        hs.nn.Patches(2),
        hs.nn.ClipTokens(RADIUS),
        hs.nn.OrthogonalLinear(4, DIM),
        hs.nn.PrependToken(DIM),
        hs.nn.AddPositions(5, DIM),
        hs.nn.AverageResidual(
            nn.Sequential(hs.nn.LipschitzLayerNorm(DIM), hs.nn.SelfAttentionBlock(attention)), 0.3
        ),
        nn.Sequential(hs.nn.SpectralLinear(DIM, 8), hs.nn.MaxMin(), nn.Dropout(0.1)),
        hs.nn.TakeToken(0),
        parametrizations.orthogonal(nn.Linear(8, 4), orthogonal_map="householder"),
        parametrizations.spectral_norm(nn.Linear(4, 3, bias=False), n_power_iterations=2),
    )


def same(a: nn.Module, b: nn.Module, x: Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(tokens_of(a(x)), tokens_of(b(x)))


# ---- what comes back


@pytest.mark.parametrize("name", sorted(LAYERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layers_come_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    layer: Layer = LAYERS[name]
    model = trained(layer.build(), inputs(layer)).to(dtype)
    path = hs.nn.save(model, tmp_path / "layer.safetensors")
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    again = hs.nn.load(path)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert type(again) is type(model)
    assert not again.training
    for one, other in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert one[0] == other[0]
        assert one[1].dtype == other[1].dtype
        assert torch.equal(one[1], other[1])
    if dtype != torch.bfloat16:
        assert same(model, again, inputs(layer, dtype=dtype))
        bounds = [m.lipschitz_bound(LENGTH, RADIUS).value for m in (model, again)]  # type: ignore[operator]
        assert bounds[0] == bounds[1]


@pytest.mark.parametrize("double", [False, True])
def test_a_model_comes_back_with_its_certificate(double: bool, tmp_path: Path) -> None:
    model = small_vit()
    x = torch.rand(3, 1, 4, 4)
    trained(model, x, steps=4)
    if double:
        model, x = model.double(), x.double()
    path = hs.nn.save(
        model, tmp_path / "new" / "vit.safetensors", length=4, radius=2.0, notes={"seed": "3", "": "é"}
    )
    found = hs.nn.load_saved(path)
    assert (found.length, found.radius, found.notes) == (4, 2.0, {"seed": "3", "": "é"})
    assert same(model, found.model, x)
    one, other = hs.nn.certify(model, 4, 2.0), hs.nn.certify(found.model, 4, 2.0)
    assert one.constant == other.constant
    assert one.table.equals(other.table)
    assert [p.name for p in path.parent.iterdir()] == ["vit.safetensors"]
    # And once more, from what was read.
    assert same(model, hs.nn.load(hs.nn.save(found.model, path)), x)


def test_a_loaded_model_trains_as_the_saved_one(tmp_path: Path) -> None:
    model = small_vit()
    x = torch.rand(3, 1, 4, 4)
    trained(model, x)
    again = hs.nn.load(hs.nn.save(model, tmp_path / "m.safetensors"))
    # Dropout is left in eval mode: its numbers would be others.
    for one in (model, again):
        trained(one, x, steps=3)
    assert same(model, again, x)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(DIM, 3),
    "no bias": lambda: nn.Linear(DIM, 3, bias=False),
    "layer norm": lambda: nn.LayerNorm(DIM, eps=1e-3, bias=False),
    "plain layer norm": lambda: nn.LayerNorm(DIM, elementwise_affine=False),
    "two axes": lambda: nn.LayerNorm((LENGTH, DIM)),
    "rms norm": lambda: nn.RMSNorm(DIM),
    "gelu": lambda: nn.GELU("tanh"),
    "leaky": lambda: nn.LeakyReLU(0.3),
    "elu": lambda: nn.ELU(0.7),
    "softplus": lambda: nn.Softplus(2, 3.0),
    "hardtanh": lambda: nn.Hardtanh(-0.2, 0.3),
    "prelu": lambda: nn.PReLU(LENGTH, 0.1),
    "softmax": lambda: nn.Softmax(-1),
    "flatten": lambda: nn.Flatten(1, -1),
    "dropout": lambda: nn.Dropout(0.7),
    "tanh": nn.Tanh,
    "none": nn.Sequential,
    "names": lambda: nn.Sequential(OrderedDict({"a b": nn.Tanh()})),
    "encoder": lambda: nn.TransformerEncoderLayer(
        DIM, 3, 8, 0.0, "gelu", layer_norm_eps=1e-3, batch_first=True, norm_first=True, bias=False
    ),
    "plain encoder": lambda: nn.TransformerEncoderLayer(DIM, 2, 5, 0.25),
    "cayley": lambda: parametrizations.orthogonal(nn.Linear(DIM, 4), orthogonal_map="cayley"),
    "no base": lambda: parametrizations.orthogonal(nn.Linear(DIM, DIM), use_trivialization=False),
    "a bias of norm one": lambda: parametrizations.spectral_norm(nn.Linear(DIM, 3), "bias"),
    "two": lambda: parametrizations.orthogonal(
        parametrizations.spectral_norm(nn.Linear(DIM, DIM)), use_trivialization=False
    ),
    "other dimension": lambda: parametrizations.spectral_norm(nn.Linear(DIM, 3), dim=1, eps=1e-6),
}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules_of_pytorch_come_back(name: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    x = torch.randn(2, LENGTH, DIM)
    model = trained(MODULES[name](), x)
    again = hs.nn.load(hs.nn.save(model, tmp_path / "m.safetensors"))
    assert repr(again) == repr(model)
    assert same(model, again, x)


def test_a_module_at_two_places_is_one_again(tmp_path: Path) -> None:
    shared = nn.Linear(DIM, DIM)
    model = nn.Sequential(nn.Sequential(shared, nn.Tanh()), shared)
    again = hs.nn.load(hs.nn.save(model, tmp_path / "m.safetensors"))
    assert again.get_submodule("0.0") is again.get_submodule("1")
    assert same(model, again, torch.randn(2, DIM))


def test_the_file_may_be_written_anew_while_its_model_is_in_use(tmp_path: Path) -> None:
    path = hs.nn.save(nn.Linear(DIM, 3), tmp_path / "m.safetensors")
    model = hs.nn.load(path)
    kept = copy.deepcopy(model.state_dict())
    path.write_bytes(bytes(len(path.read_bytes())))
    assert all(torch.equal(kept[name], t) for name, t in model.state_dict().items())


class Doubled(hs.nn.LipschitzModule):
    """A class of a user."""

    def __init__(self, factor: float, *, inner: nn.Module) -> None:
        super().__init__()
        self.factor, self.inner = factor, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.inner(x)

    def lipschitz_bound(self, length: int, radius: float) -> Bound:
        raise NotImplementedError

    def output_radius(self, length: int, radius: float) -> float:
        return 0.0

    def settings(self) -> dict[str, Any]:
        return {"factor": self.factor}


def test_parts_that_a_file_cannot_describe_are_named(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(DIM, 1, 8, dropout=0.0, batch_first=True)
    with pytest.raises(ArgumentError, match="the class that builds it"):
        hs.nn.save(nn.TransformerEncoder(layer, 1), tmp_path / "m.safetensors")
    layer.norm1 = hs.nn.LipschitzLayerNorm(DIM, floor=2.0)
    with pytest.raises(ArgumentError, match="LipschitzLayerNorm in place of its LayerNorm"):
        hs.nn.save(nn.Sequential(layer), tmp_path / "m.safetensors")


def test_classes_of_ones_own_are_named_by_the_caller(tmp_path: Path) -> None:
    model = Doubled(0.1, inner=nn.Linear(DIM, 2))
    with pytest.raises(ArgumentError, match=r"model is a .*Doubled, unknown to files"):
        hs.nn.save(model, tmp_path / "m.safetensors")
    path = hs.nn.save(model, tmp_path / "m.safetensors", classes=[Doubled])
    with pytest.raises(ModelError, match="Doubled', which is not known"):
        hs.nn.load(path)
    assert same(model, hs.nn.load(path, classes=[Doubled]), torch.randn(2, DIM))
    with pytest.raises(ArgumentError, match=r"classes: expected .* got Linear"):
        hs.nn.load(path, classes=[nn.Linear])


def test_a_layer_that_took_the_place_of_another(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"norm": nn.LayerNorm(DIM)})

        def settings(self) -> dict[str, Any]:
            return {}

    model = Own()
    model.inner["norm"] = hs.nn.LipschitzLayerNorm(DIM, floor=1.0)
    words = r"Own\(\*\*settings\(\)\) builds LayerNorm at inner.norm, but the model has LipschitzLayerNorm"
    with pytest.raises(ArgumentError, match=words):
        hs.nn.save(model, tmp_path / "m.safetensors", classes=[Own])
    with pytest.raises(ArgumentError, match=r"save the original, and deploy what hs\.nn\.load returns"):
        hs.nn.save(hs.nn.deploy(model), tmp_path / "m.safetensors", classes=[Own])


# ---- what is not saved


class Sub(nn.Linear):
    pass


class Secret(nn.Identity):
    def get_extra_state(self) -> object:
        return 1


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


def changed(name: str, change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = LAYERS[name].build()
        change(model)
        return model

    return build


def deep() -> nn.Module:
    model: nn.Module = nn.Tanh()
    for _ in range(100):
        model = nn.Sequential(model)
    return model


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 4)
    layer.linear2 = nn.Linear(4, 4, bias=False)
    return layer


UNSAVED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention of PyTorch": (lambda: nn.MultiheadAttention(4, 2), "model is a torch.*MultiheadAttention"),
    "within": (lambda: nn.Sequential(nn.Tanh(), nn.Conv2d(1, 1, 1)), r"module 1 is a torch.*Conv2d, unknown"),
    "a subclass": (lambda: Sub(2, 2), r"test_saving\.Sub, unknown"),
    "tied weights": (tied, "share a tensor"),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(2, 2)), "weight of the model has a param"),
    "a hook": (
        changed("MaxMin", lambda m: m.register_forward_hook(lambda *a: a[2] * 2)),
        "hooks or a replaced forward",
    ),
    "another forward": (changed("MaxMin", lambda m: setattr(m, "forward", abs)), "a replaced forward"),
    "another weight": (
        changed("SoftmaxAttention", lambda m: setattr(m, "out_proj", nn.Linear(DIM, 3))),
        "out_proj was changed after",
    ),
    "another module": (
        changed("MaxMin", lambda m: m.add_module("more", nn.Tanh())),
        "not mention module more",
    ),
    "another setting": (changed("SelfAttentionBlock", lambda m: setattr(m.attention, "constant", "x")), ""),
    "a setting of infinity": (
        changed("ClipTokens", lambda m: setattr(m, "radius", float("inf"))),
        "radius of",
    ),
    "a huge setting": (
        changed("TakeToken", lambda m: setattr(m, "index", 10**400)),
        "index of the model is 10",
    ),
    "extra parametrization": (
        changed("SoftmaxAttention", lambda m: parametrizations.spectral_norm(m.out_proj)),
        "settings of module out_proj do not mention its parametrizations",
    ),
    "another orthogonal map": (
        changed(
            "OrthogonalLinear",
            lambda m: setattr(
                m.linear.parametrizations.weight[0],
                "orthogonal_map",
                type(m.linear.parametrizations.weight[0].orthogonal_map).cayley,
            ),
        ),
        "do not mention its parametrizations",
    ),
    "an activation of code": (
        lambda: nn.TransformerEncoderLayer(4, 2, 4, activation=nn.functional.silu),
        "activation other than relu and gelu",
    ),
    "another encoder": (encoder, "linear2 was changed after its construction|tensor linear2"),
    "too deep": (deep, "is nested more than"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "tensor weight is not a dense tensor with values"),
    "lazy": (lambda: nn.LazyLinear(2), "is not a dense tensor with values"),
    "complex": (lambda: nn.Linear(2, 2, dtype=torch.complex64), "has the dtype torch.complex64"),
}


@pytest.mark.parametrize("name", sorted(UNSAVED))
def test_what_no_file_describes_is_refused(name: str, tmp_path: Path) -> None:
    build, words = UNSAVED[name]
    with pytest.raises(ArgumentError, match=f"model: expected .*{words}"):
        hs.nn.save(build(), tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_arguments_of_save(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    model = nn.Tanh()
    for length in (0, -3, True, 2**60):
        with pytest.raises(ArgumentError, match="length: expected a whole number"):
            hs.nn.save(model, path, length=length)
    for radius in (0.0, -3.0, float("nan"), -float("inf")):
        with pytest.raises(ArgumentError, match="radius: expected a number > 0, or None"):
            hs.nn.save(model, path, radius=radius)
    with pytest.raises(ArgumentError, match=r"path: expected a name that ends in \.safetensors"):
        hs.nn.save(model, tmp_path / "m.pt")
    with pytest.raises(ArgumentError, match="path: expected the path of a file"):
        hs.nn.save(model, "a\0b.safetensors")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written: "):
        hs.nn.save(model, tmp_path / "file" / "m.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# ---- files that are no such files


@pytest.fixture
def good(tmp_path: Path) -> Path:
    model = nn.Sequential(
        nn.Linear(4, 4), parametrizations.spectral_norm(nn.Linear(4, 3)), hs.nn.MaxMin(), nn.Linear(4, 4)
    )
    model[3] = nn.Linear(3, 2)
    return hs.nn.save(model, tmp_path / "good.safetensors", length=3, radius=1.0)


def tampered(good: Path, change: Callable[[dict[str, Any]], object], **top: str) -> Path:
    """Write a copy whose description is changed, or whose metadata are."""
    with safe_open(good, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    described = json.loads(metadata["model"])
    described["tensors"] = tensors
    change(described)
    tensors = described.pop("tensors")
    metadata["model"] = json.dumps(described)
    path = good.with_name("bad.safetensors")
    save_file(tensors, path, metadata={k: v for k, v in (metadata | top).items() if v is not None})
    return path


def first(described: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = described["tree"]["modules"]["0"]
    return found


def steps(described: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = described["tree"]["modules"]["1"]["parametrizations"]["weight"][0]
    return found


def nest(depth: int) -> Any:
    tree: Any = {"class": "torch.nn.Tanh"}
    for _ in range(depth):
        tree = {"class": "torch.nn.Sequential", "modules": {"0": tree}}
    return tree


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a module of Python": (
        lambda d: first(d).update({"class": "os.system"}),
        "'os.system', which is not known",
    ),
    "a function of ours": (lambda d: first(d).update({"class": "howsmooth.nn.certify"}), "not known"),
    "the base": (lambda d: first(d).update({"class": "howsmooth.nn.LipschitzModule"}), "not known"),
    "a room": (lambda d: first(d).update({"class": "howsmooth.nn.attention"}), "not known"),
    "a dunder": (lambda d: first(d).update({"class": "howsmooth.nn.__class__"}), "not known"),
    "an attention of PyTorch": (
        lambda d: first(d).update({"class": "torch.nn.MultiheadAttention"}),
        "module 0 is of the class 'torch.nn.MultiheadAttention', which is not known",
    ),
    "a class of a number": (lambda d: first(d).update({"class": 3}), "class 3, which is not known"),
    "no class": (lambda d: first(d).pop("class"), "class None, which is not known"),
    "no tree": (lambda d: d.pop("tree"), "the model is described by a NoneType"),
    "a list for a tree": (lambda d: d.update(tree=[1]), "described by a list"),
    "no notes": (lambda d: d.pop("notes"), "its description is not an object with"),
    "notes of numbers": (lambda d: d.update(notes={"a": 1}), "its description is not an object with"),
    "unknown argument": (lambda d: first(d)["settings"].update(spy=1), "Linear at module 0 takes no 'spy'"),
    "a device": (lambda d: first(d)["settings"].update(device="cuda"), "takes no 'device'"),
    "a precision": (lambda d: first(d)["settings"].update(dtype="float16"), "takes no 'dtype'"),
    "settings of a list": (lambda d: first(d).update(settings=[1]), "settings of module 0 is a list"),
    "missing argument": (
        lambda d: first(d)["settings"].pop("in_features"),
        "Linear at module 0 cannot be built",
    ),
    "an argument of words": (lambda d: first(d)["settings"].update(in_features="4"), "module 0"),
    "a negative size": (lambda d: first(d)["settings"].update(in_features=-4), "module 0 cannot be built"),
    "another size": (
        lambda d: first(d)["settings"].update(in_features=3),
        r"0\.weight has the shape \(4, 4\)",
    ),
    "a huge size": (
        lambda d: first(d)["settings"].update(in_features=2**40),
        "requests much more memory than the tensors in the file have",
    ),
    "a larger size": (lambda d: first(d)["settings"].update(in_features=2**20), "more memory than"),
    "many small layers": (
        lambda d: d["tree"]["modules"].update(
            {
                str(i): {"class": "torch.nn.LayerNorm", "settings": {"normalized_shape": 10**4}}
                for i in range(200)
            }
        ),
        "more memory than",
    ),
    "a size of no machine": (
        lambda d: first(d)["settings"].update(in_features=2**62),
        "finite numbers below",
    ),
    "digits": (lambda d: first(d)["settings"].update(in_features=10**4000), "in_features' of module 0 is 10"),
    "infinity": (lambda d: first(d)["settings"].update(in_features=1e999), "in_features' of module 0 is inf"),
    "not a number": (lambda d: first(d)["settings"].update(in_features=float("nan")), "is nan"),
    "a nest in settings": (
        lambda d: first(d)["settings"].update(in_features=[[[[[[4]]]]]]),
        "in_features' of module 0 is",
    ),
    "a deep nest": (lambda d: d.update(tree=nest(200)), "nests them too deeply"),
    "a name with a dot": (
        lambda d: d["tree"]["modules"].update({"a.b": nest(0)}),
        "module of the name 'a.b'",
    ),
    "no name": (lambda d: d["tree"]["modules"].update({"": nest(0)}), "module of the name ''"),
    "a name of a method": (lambda d: d["tree"]["modules"].update({"forward": nest(0)}), "cannot be built"),
    "modules of a list": (lambda d: d["tree"].update(modules=[nest(0)]), "modules of the model is a list"),
    "a module for a number": (lambda d: first(d).update(modules={"bias": nest(0)}), "module 0"),
    "shared with none": (
        lambda d: d["tree"]["modules"].update({"9": {"shared": "77"}}),
        "not come before it",
    ),
    "shared with itself": (lambda d: d.update(tree={"shared": ""}), "not come before it"),
    "shared by a list": (lambda d: d["tree"]["modules"].update({"9": {"shared": [1]}}), "not come before"),
    "shared and more": (lambda d: d["tree"]["modules"].update({"9": {"shared": "0", "x": 1}}), "entry 'x'"),
    "another entry": (lambda d: first(d).update(code="import os"), "module 0 has an entry 'code'"),
    "another parametrization": (
        lambda d: steps(d).update(kind="weight_norm"),
        "parametrization 'weight_norm'",
    ),
    "a parametrization of a list": (lambda d: steps(d).update(kind=[]), "parametrization "),
    "a hidden layer of any size": (
        lambda d: d.update(
            tree={"class": "torch.nn.TransformerEncoderLayer", "settings": {"d_model": 8, "nhead": 2**30}}
        ),
        "TransformerEncoderLayer at the model cannot be built",
    ),
    "many iterations": (lambda d: steps(d).update(n_power_iterations=10**12), "more than 1000 times"),
    "iterations of words": (lambda d: steps(d).update(n_power_iterations="3"), "takes no such settings"),
    "another step": (lambda d: steps(d).update(code="x"), "entry 'code'"),
    "a dimension that is not there": (lambda d: steps(d).update(dim=7), "of module 1 fails"),
    "no such tensor": (
        lambda d: first(d).update(parametrizations={"wait": [{"kind": "orthogonal"}]}),
        "orthogonal of 'wait' of module 0 fails",
    ),
    "a parametrized layer of ours": (
        lambda d: d["tree"]["modules"]["2"].update(parametrizations={"weight": [{"kind": "orthogonal"}]}),
        "has parametrizations in the file",
    ),
    "many steps": (
        lambda d: first(d).update(parametrizations={"weight": [{"kind": "orthogonal"}] * 99}),
        "are not a short list",
    ),
    "a tensor is gone": (lambda d: d["tensors"].pop("0.bias"), r"0\.bias is missing in the file"),
    "a tensor more": (lambda d: d["tensors"].update(x=torch.ones(1)), "x is missing in the model"),
    "a tensor of another shape": (lambda d: d["tensors"].update({"0.bias": torch.ones(5)}), "has the shape"),
    "whole numbers": (
        lambda d: d["tensors"].update({"0.bias": torch.ones(4, dtype=torch.int64)}),
        r"0\.bias has the dtype torch.int64",
    ),
    "a length of words": (lambda d: d.update(length="3"), "length: expected a whole number"),
    "no tokens": (lambda d: d.update(length=0), "length: expected a whole number"),
    "a radius below zero": (lambda d: d.update(radius=-1), "radius: expected a number > 0"),
    "a radius of words": (lambda d: d.update(radius="wide"), "radius: expected a number > 0"),
    "orders of no tensor": (lambda d: d.update(orders={"x": [0]}), "orders of axes"),
    "orders that are none": (lambda d: d.update(orders={"0.weight": [0, 0]}), "orders of axes"),
    "orders of words": (lambda d: d.update(orders={"0.weight": "01"}), "orders of axes"),
    "orders of fractions": (lambda d: d.update(orders={"0.weight": [0.0, 1.0]}), "orders of axes"),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_descriptions_are_refused(name: str, good: Path) -> None:
    change, words = HOSTILE[name]
    path = tampered(good, change)
    began = time.process_time()
    with pytest.raises(ModelError, match=words) as refused:
        hs.nn.load(path)
    assert time.process_time() - began < 5
    assert str(refused.value).startswith(f"The model file {path} cannot be used: ")
    assert len(str(refused.value)) < 600 + len(str(path))
    assert "\n" not in str(refused.value)


def test_a_model_of_too_many_modules_is_refused(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.nn.model_config._MOST_MODULES", 5)
    hs.nn.load(good)
    path = tampered(good, lambda d: d["tree"]["modules"].update({"9": nest(0)}))
    with pytest.raises(ModelError, match="more than 5 modules"):
        hs.nn.load(path)


@pytest.mark.parametrize(
    ("top", "words"),
    [
        ({"format": "pt"}, "of another program"),
        ({"format": None}, "of another program"),
        ({"version": "2"}, "version 2 of the format, but this howsmooth reads version 1"),
        ({"version": None}, r"version \? of the format"),
        ({"model": None}, "not JSON"),
        ({"model": "{"}, "not JSON"),
        ({"model": "[" * 10**6}, "nested too deeply"),
        ({"model": '{"a":' * 10**5 + "1" + "}" * 10**5}, "nested too deeply"),
        ({"model": "9" * 10**4}, "not JSON"),
        ({"model": "3"}, "not an object"),
    ],
)
def test_foreign_and_broken_metadata_are_refused(top: dict[str, Any], words: str, good: Path) -> None:
    with pytest.raises(ModelError, match=words):
        hs.nn.load(tampered(good, lambda _: None, **top))


def test_files_that_are_none(tmp_path: Path, good: Path) -> None:
    for name in ("nowhere.safetensors", "x" * 5000, tmp_path):
        with pytest.raises(ModelError, match="There is no model file"):
            hs.nn.load(name)
    torch.save(nn.Linear(2, 2), tmp_path / "m.pt")
    with pytest.raises(ModelError, match="Pickled models are never read"):
        hs.nn.load(tmp_path / "m.pt")
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "plain.safetensors")
    with pytest.raises(ModelError, match="of another program"):
        hs.nn.load(tmp_path / "plain.safetensors")
    # A header that announces more than there is.
    (tmp_path / "long.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(ModelError, match="damaged, or no safetensors file"):
        hs.nn.load(tmp_path / "long.safetensors")


def test_a_file_that_ends_early_is_refused(good: Path) -> None:
    content = good.read_bytes()
    for share in range(20):
        good.write_bytes(content[: len(content) * share // 20])
        with pytest.raises(ModelError, match="damaged, or no safetensors file"):
            hs.nn.load(good)


@settings(suppress_health_check=list(HealthCheck))
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), header=st.booleans())
def test_a_changed_byte_is_refused_or_gives_a_model(
    place: float, byte: int, header: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "m.safetensors"
    hs.nn.save(nn.Sequential(hs.nn.OrthogonalLinear(2, 2), nn.Linear(2, 1)), path, length=3)
    content = bytearray(path.read_bytes())
    end = 8 + struct.unpack("<Q", content[:8])[0] if header else len(content)
    content[int(place * end)] = byte
    path.write_bytes(content)
    with contextlib.suppress(ModelError):
        assert hs.nn.load(path)(torch.zeros(1, 2)).shape[0] == 1
