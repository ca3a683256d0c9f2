"""Flows frame by frame: what is integrated, kept, continued, measured and seen."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXModel

import howsmooth as hs
from howsmooth.dynamics import Sphere, flow
from howsmooth.errors import ArgumentError, StoreError
from howsmooth.study.figures.flow_view import FlowView, cluster_colours, limits_of, outline
from howsmooth.study.flows.metrics import measure_frames
from howsmooth.study.flows.opening import System, open_system
from howsmooth.study.flows.plan import FlowPlan
from howsmooth.study.flows.publish import publish_flow
from howsmooth.study.flows.run import FlowOutcome, FlowTools, flow_tools, run_flow
from howsmooth.study.flows.store import FlowStore
from howsmooth.study.flows.systems import SYSTEMS, build_system
from howsmooth.study.tools import default_tools
from tests._sources import SmallModel, small_tools
from tests._sources import norm as small_norm

SMALL: dict[str, Any] = {"source": "random", "tokens": 7, "dimension": 3, "until": 1.0, "frames": 5}


def opened(plan: FlowPlan) -> System:
    return open_system(plan, small_tools())


class Counting:
    """The library's tools, with a count of what was integrated; ``before`` may stop it."""

    def __init__(self, before: Callable[[int], None] = lambda calls: None) -> None:
        self.before = before
        self.calls = 0

    def tools(self) -> FlowTools:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.before(self.calls)
            self.calls += 1
            return flow(*arguments, **options)

        return dataclasses.replace(flow_tools(), flow=counted)


def carry_out(plan: FlowPlan, folder: Path, work: Counting | None = None) -> FlowOutcome:
    return run_flow(plan, opened(plan), folder, (work or Counting()).tools())


def states(folder: Path) -> tuple[list[float], Tensor]:
    with FlowStore.open(folder, write=False) as store:
        frames = [store.frame(place) for place in range(store.count())]
    return [frame.time for frame in frames], torch.stack([frame.x for frame in frames])


# ---- what is integrated


@pytest.mark.parametrize("options", [{}, {"method": "rk4", "step": 0.1}, {"sphere": True}])
def test_frame_by_frame_is_bit_for_bit_the_flow_in_one_go(tmp_path: Path, options: dict[str, Any]) -> None:
    plan = FlowPlan(**SMALL, **options)
    carry_out(plan, tmp_path)
    times, found = states(tmp_path)
    system = opened(plan)
    field = Sphere(system.maps[0], 1.0) if plan.sphere else system.maps[0]
    how = {"step": plan.step} if plan.step else {"rtol": plan.rtol}
    whole = flow(field, system.x, [k / 5 for k in range(6)], method=plan.method, **how)
    assert times == whole.times.tolist()
    assert torch.equal(found, whole.states)


def test_layers_of_a_model_in_sequence_are_its_residual_layers(tmp_path: Path) -> None:
    plan = FlowPlan("small", tokens=5, text="prose", method="residual")
    carry_out(plan, tmp_path)
    times, found = states(tmp_path)
    assert times == [0.0, 1.0, 2.0]
    model = SmallModel()
    x = opened(plan).x
    assert x.shape == (5, 6)
    for layer in (0, 1):
        x = x + model.attention(layer, 5).to(dtype=torch.float64)(x)
    torch.testing.assert_close(found[-1], x, rtol=1e-13, atol=1e-13)


class Recording:
    """Tools of the library that remember the token ids that a model is given."""

    def __init__(self) -> None:
        self.tools = dataclasses.replace(default_tools(), capture=self.capture)
        self.ids = torch.zeros(0)

    def capture(self, model: Any, inputs: Tensor, **options: Any) -> Any:
        self.ids = inputs
        return hs.capture(model, inputs, **options)


@pytest.mark.parametrize(("layers", "chosen"), [("all", [0, 1, 2, 3]), ("1:2", [1, 2])])
def test_layers_with_norms_are_the_modules_of_the_model_in_a_plain_loop(
    tmp_path: Path, layers: str, chosen: list[int]
) -> None:
    plan = FlowPlan("builtin-decoder", tokens=12, layers=layers, method="residual", norms=True)
    recording = Recording()
    system = open_system(plan, recording.tools)
    assert system.norms
    assert system.in_order
    run_flow(plan, system, tmp_path, flow_tools())
    _, found = states(tmp_path)
    with torch.no_grad():
        model = hs.load_model("builtin-decoder").model.eval().double()
        hidden = model(recording.ids, output_hidden_states=True).hidden_states
        mask = torch.full((12, 12), -math.inf, dtype=torch.float64).triu(1)[None, None]
        # The tokens are captured in float32.
        torch.testing.assert_close(system.x, hidden[chosen[0]][0], rtol=1e-4, atol=1e-5)
        x = system.x[None]
        for place, layer in enumerate(chosen):
            torch.testing.assert_close(found[place], x[0], rtol=1e-12, atol=1e-12)
            block = model.h[layer]
            x = x + block.attn(block.ln_1(x), attention_mask=mask)[0]
        torch.testing.assert_close(found[-1], x[0], rtol=1e-12, atol=1e-12)
    assert len(found) == len(chosen) + 1


def test_norms_change_the_tokens_and_the_layers(tmp_path: Path) -> None:
    plan = FlowPlan("small", tokens=5, text="prose", method="residual", norms=True)
    system = opened(plan)
    torch.testing.assert_close(system.x, 2 * opened(dataclasses.replace(plan, norms=False)).x)
    carry_out(plan, tmp_path)
    x = system.x
    for layer in (0, 1):
        f = SmallModel().attention(layer, 5).to(dtype=torch.float64)
        x = x + f(small_norm().to(dtype=torch.float64)(x) if layer == 0 else x)
    torch.testing.assert_close(states(tmp_path)[1][-1], x, rtol=1e-13, atol=1e-13)
    with pytest.raises(StoreError, match="made with --norms, not without it"):
        carry_out(dataclasses.replace(plan, norms=False), tmp_path)


def test_post_norm_layers_with_norms_are_refused() -> None:
    plan = FlowPlan("builtin-encoder", tokens=4, norms=True)
    with pytest.raises(ArgumentError, match="got the post-norm layer 0 of 'builtin-encoder'"):
        open_system(plan, default_tools())


def test_other_layouts_with_norms_are_refused_by_name() -> None:
    config = GPTNeoXConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    parallel = GPTNeoXModel(config).eval()

    def capture(model: Any, inputs: Tensor, **options: Any) -> Any:
        return hs.capture(parallel, inputs % 50, **options)

    tools = dataclasses.replace(small_tools(), capture=capture)
    words = r"pre-norm layers.*got the parallel layer 0.*Leave --norms out"
    with pytest.raises(ArgumentError, match=words):
        open_system(FlowPlan("small", tokens=4, text="prose", norms=True), tools)


def test_one_layer_of_a_model_is_a_flow_with_frozen_weights(tmp_path: Path) -> None:
    plan = FlowPlan("small", tokens=5, text="prose", layers="1", until=0.5, frames=2)
    system = opened(plan)
    assert system.layers is None
    assert system.in_order
    carry_out(plan, tmp_path)
    once = flow(system.maps[0], system.x, [0.0, 0.25, 0.5])
    assert torch.equal(states(tmp_path)[1], once.states)


def naive(x: np.ndarray, query: np.ndarray, key: np.ndarray, beta: float, *, causal: bool) -> np.ndarray:
    """Attention probabilities, token by token."""
    out = np.zeros((len(x), len(x)))
    for i in range(len(x)):
        seen = range(i + 1) if causal else range(len(x))
        weights = [math.exp(beta * float((query @ x[i]) @ (key @ x[j]))) for j in seen]
        out[i, : len(weights)] = np.array(weights) / sum(weights)
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SYSTEMS)
def test_named_systems_are_what_they_are_called(name: str, causal: bool) -> None:
    x = np.random.default_rng(3).normal(size=(5, 3))
    options: dict[str, Any] = {"attention": "softmax", "causal": causal, "beta": 0.7}
    f = build_system(name, 3, generator=torch.Generator().manual_seed(4), **options)
    drawn = torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64).numpy()
    eye = np.eye(3)
    query, key, value = {
        "identity": (eye, eye, eye),
        "negative": (eye, eye, -eye),
        "one-direction": (eye, eye, np.diag([1.0, -0.5, -0.5])),
        "turning": (eye, eye, np.array([[1.0, -1, 0], [1, 1, 0], [0, 0, 1]])),
        "random": tuple(drawn / math.sqrt(3)),
    }[name]
    p = naive(x, query, key, 0.7, causal=causal)
    np.testing.assert_allclose(f(torch.from_numpy(x)).numpy(), p @ x @ value.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_l2_attention_scores_by_distance(causal: bool) -> None:
    x = np.random.default_rng(5).normal(size=(4, 2))
    options: dict[str, Any] = {"causal": causal, "beta": 0.5, "generator": torch.Generator()}
    f = build_system("identity", 2, attention="l2", **options)
    weights = np.exp(-0.5 * ((x[:, None] - x[None]) ** 2).sum(axis=2)) * (np.tri(4) if causal else 1.0)
    wanted = (weights / weights.sum(axis=1, keepdims=True)) @ x
    np.testing.assert_allclose(f(torch.from_numpy(x)).numpy(), wanted, rtol=1e-12)


def test_sinkhorn_attention_is_doubly_stochastic() -> None:
    x = np.random.default_rng(6).normal(size=(5, 2))
    options: dict[str, Any] = {"causal": False, "beta": 0.5, "generator": torch.Generator()}
    f = build_system("negative", 2, attention="sinkhorn", **options)
    weights = np.exp(0.5 * x @ x.T)
    for _ in range(2000):
        weights /= weights.sum(axis=0)
        weights /= weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(f(torch.from_numpy(x)).numpy(), -weights @ x, rtol=1e-6, atol=1e-8)


def test_rescaled_tokens_are_those_of_the_flow_times_the_exponential(tmp_path: Path) -> None:
    plan = FlowPlan("one-direction", tokens=6, until=1.0, frames=2, rescale=True, rtol=1e-6)
    carry_out(plan, tmp_path)
    times, found = states(tmp_path)
    system = opened(plan)
    whole = flow(system.maps[0], system.x, times, rtol=1e-6, atol=1e-9)
    growth = torch.tensor([[math.exp(-t), math.exp(t / 2)] for t in times], dtype=torch.float64)
    torch.testing.assert_close(found, whole.states * growth[:, None], rtol=1e-4, atol=1e-5)


# ---- frames


def test_frames_stand_at_whole_steps() -> None:
    grid = FlowPlan("random", until=1.0, method="rk4", step=0.1, frames=4).grid(None)
    assert grid.times == (0.0, 0.2, 0.5, 0.8, 1.0)
    assert grid.step == pytest.approx(0.1)
    assert len(FlowPlan("random", until=1.0, method="euler", step=0.5).grid(None).times) == 3
    assert FlowPlan("random", until=2.0, frames=4).grid(None).times == (0.0, 0.5, 1.0, 1.5, 2.0)
    assert FlowPlan("m", method="residual").grid(3).times == (0.0, 1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "layers", "words"),
    [
        ({"method": "rk4", "step": 0.3, "until": 1.0}, None, "step: expected a step of which a whole number"),
        ({"method": "rk4", "step": 2.0, "until": 1.0}, None, "step: expected a step of which a whole number"),
        ({"method": "rk4", "step": 1e-300, "until": 1.0}, None, "at most 10000000, reaches 1"),
        (
            {"until": 5.0},
            4,
            "until: expected at most 4, as each of the 4 layers lasts one unit of time, got 5",
        ),
    ],
)
def test_times_that_cannot_be(changes: dict[str, Any], layers: int | None, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        FlowPlan("random", **changes).grid(layers)


def test_a_second_seed_is_another_start_and_a_longer_flow_the_same() -> None:
    x = opened(FlowPlan(**SMALL)).x
    assert torch.equal(x, opened(FlowPlan(**(SMALL | {"until": 9.0, "method": "rk4"}))).x)
    assert not torch.equal(x, opened(FlowPlan(**SMALL, seed=1)).x)
    options: tuple[dict[str, Any], ...] = (
        {"start": "sphere"},
        {"sphere": True},
        {"start": "gaussian", "sphere": True},
    )
    for option in options:
        norms = torch.linalg.vector_norm(opened(FlowPlan(**SMALL, **option, radius=3.0)).x, dim=1)
        torch.testing.assert_close(norms, torch.full((7,), 3.0, dtype=torch.float64))
    drawn = opened(FlowPlan(**(SMALL | {"tokens": 4000}), radius=3.0)).x
    assert float(drawn.std()) == pytest.approx(3.0, rel=0.05)


def test_tokens_of_a_text_are_put_on_the_sphere_of_their_own_size() -> None:
    plan = FlowPlan("small", tokens=5, text="prose")
    x, placed = opened(plan).x, opened(dataclasses.replace(plan, sphere=True))
    size = float(x.square().sum(dim=1).mean().sqrt())
    assert placed.radius == pytest.approx(size)
    torch.testing.assert_close(placed.x, size * x / x.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_tokens_of_a_file(tmp_path: Path, name: str) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    path = tmp_path / name
    np.save(path, x) if path.suffix == ".npy" else np.savez(path, X=x)
    system = opened(FlowPlan("identity", start=str(path)))
    np.testing.assert_array_equal(system.x.numpy(), x.astype(np.float64))


# ---- what is kept


def test_interrupted_and_continued_gives_bit_for_bit_the_same(tmp_path: Path) -> None:
    def interrupt(calls: int) -> None:
        if calls == 2:
            raise KeyboardInterrupt

    plan = FlowPlan(**SMALL)
    with pytest.raises(KeyboardInterrupt):
        carry_out(plan, tmp_path / "a", Counting(interrupt))
    assert len(states(tmp_path / "a")[0]) == 3
    rest = Counting()
    outcome = carry_out(plan, tmp_path / "a", rest)
    assert (outcome.made, outcome.kept, rest.calls) == (3, 2, 3)
    carry_out(plan, tmp_path / "b")
    assert torch.equal(states(tmp_path / "a")[1], states(tmp_path / "b")[1])
    again = Counting()
    outcome = carry_out(plan, tmp_path / "a", again)
    assert (outcome.made, outcome.kept, again.calls) == (0, 5, 0)


def test_nothing_is_made_where_the_first_frame_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="rtol"):
        carry_out(FlowPlan(**SMALL, rtol=1e-200), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "it was made with --seed 0, not 1. Choose another --out, or take --seed 0."),
        ({"until": 2.0}, "it was made with --until 1, not 2."),
        ({"until": None}, "it was made with --until 1, not its default."),
        ({"step": 0.5, "method": "rk4"}, "it was made with --method dopri5, not rk4."),
        ({"sphere": True}, "it was made without --sphere, not with it. .* or leave --sphere out."),
        ({"source": "identity"}, "it was made from random, not identity."),
        ({"tokens": 8}, "it was made with --tokens 7, not 8"),
    ],
)
def test_another_flow_is_not_mixed_into_a_folder(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    carry_out(FlowPlan(**SMALL), tmp_path)
    with pytest.raises(StoreError, match=words):
        carry_out(FlowPlan(**(SMALL | changes)), tmp_path)
    assert len(states(tmp_path)[0]) == 6


def test_a_flow_without_an_option_is_not_mixed_with_one_that_has_it(tmp_path: Path) -> None:
    carry_out(FlowPlan("random", tokens=3, frames=1, sphere=True), tmp_path)
    words = "with the default of --until, not 20. Choose another --out, or leave --until out."
    with pytest.raises(StoreError, match=words):
        carry_out(FlowPlan("random", tokens=3, frames=1, sphere=True, until=20.0), tmp_path)
    with pytest.raises(StoreError, match=r"with --sphere, not without it\. .* or add --sphere\."):
        carry_out(FlowPlan("random", tokens=3, frames=1), tmp_path)


def test_a_store_from_before_a_flag_is_that_of_the_flow_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FlowPlan(**SMALL)
    before = {name: value for name, value in plan.settings().items() if name != "norms"}
    with monkeypatch.context() as patch:
        patch.setattr(FlowPlan, "settings", lambda _: before)
        carry_out(plan, tmp_path)
    assert carry_out(plan, tmp_path).made == 0


def test_tokens_of_a_file_that_changed_are_another_flow(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    plan = FlowPlan("identity", start=str(path), until=1.0, frames=2)
    np.save(path, np.eye(3))
    carry_out(plan, tmp_path / "out")
    np.save(path, 2 * np.eye(3))
    with pytest.raises(StoreError, match="fingerprint"):
        carry_out(plan, tmp_path / "out")


def test_a_number_that_changed_is_damage(tmp_path: Path) -> None:
    carry_out(FlowPlan(**SMALL), tmp_path)
    with sqlite3.connect(tmp_path / "flow.sqlite") as connection:
        (x,) = connection.execute("SELECT x FROM frames WHERE place = 2").fetchone()
        connection.execute("UPDATE frames SET x = ? WHERE place = 2", (x[:-1] + bytes([x[-1] ^ 1]),))
    with pytest.raises(StoreError, match="row 2 of frames is not what was written"):
        carry_out(FlowPlan(**SMALL), tmp_path)


def test_a_flow_that_ends_early_is_kept_until_then_and_not_tried_again(tmp_path: Path) -> None:
    # x' = x² from x₀ is 1 / (1 / x₀ − t).
    def field(t: Tensor, x: Tensor) -> Tensor:
        return x * x

    plan = FlowPlan("identity", tokens=3, dimension=1, until=4.0, frames=10, rtol=1e-5)
    system = dataclasses.replace(opened(plan), x=torch.tensor([[0.1], [0.5], [0.25]], dtype=torch.float64))
    tools = dataclasses.replace(flow_tools(), flow=lambda _, *rest, **options: flow(field, *rest, **options))
    outcome = run_flow(plan, system, tmp_path, tools)
    ending = outcome.ending
    assert ending is not None
    assert (ending.status, ending.what) == ("blew up", "tokens")
    assert ending.lower <= 2.0 <= ending.upper
    assert ending.upper - ending.lower < 1e-3
    times, found = states(tmp_path)
    assert times[-1] < 2.0
    assert outcome.made == len(times) - 1 == 4
    torch.testing.assert_close(found[3, :, 0], 1 / (1 / system.x[:, 0] - times[3]), rtol=1e-4, atol=0)
    again = run_flow(plan, system, tmp_path, Counting(lambda calls: pytest.fail("integrated again")).tools())
    assert (again.made, again.ending) == (0, ending)


# ---- what is measured, written and seen


def published(folder: Path, **options: Any) -> Any:
    usual: dict[str, Any] = {"title": "a flow", "ordered": False, "animation": "none", "tolerance": None}
    return publish_flow(folder, **(usual | options))


def test_metrics_of_each_frame(tmp_path: Path) -> None:
    carry_out(FlowPlan(**SMALL, beta=0.5), tmp_path)
    with FlowStore.open(tmp_path, write=False) as store:
        measured = measure_frames(store, 0.8)
    times, found = states(tmp_path)
    table = measured.table
    assert table["time"].tolist() == times
    for place, x in enumerate(found.numpy()):
        apart = np.linalg.norm(x[:, None] - x[None], axis=2)
        near = (apart <= 0.8).astype(int)
        linked = np.linalg.matrix_power(near, len(x)) > 0
        assert table["clusters"][place] == len({tuple(row) for row in linked})
        assert table["spread"][place] == pytest.approx(math.sqrt(x.var(axis=0).sum()), rel=1e-12)
        rms = math.sqrt(((x - found[-1].numpy()) ** 2).sum(axis=1).mean())
        assert table["to_last"][place] == pytest.approx(rms, rel=1e-12, abs=1e-15)
        energy = np.exp(0.5 * x @ x.T).mean() / (2 * 0.5)
        assert table["log_energy"][place] == pytest.approx(math.log(energy), rel=1e-10)
    assert measured.tolerance == 0.8
    with FlowStore.open(tmp_path, write=False) as store:
        assert measure_frames(store, None).tolerance == pytest.approx(0.05 * table["spread"][0])


def test_growth_of_perturbations_is_measured_once_at_some_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One token is moved by V alone: the flow map is e^{tV}, V = diag(1, −1/2).
    monkeypatch.setattr("howsmooth.study.flows.run._GROWTHS", 2)
    plan = FlowPlan("one-direction", tokens=1, until=0.375, frames=3, growth=True)
    carry_out(plan, tmp_path)
    with FlowStore.open(tmp_path, write=False) as store:
        table = store.growth()
    assert table["time"].tolist() == [0.0, 0.25, 0.375]
    np.testing.assert_allclose(table["value"], np.exp(table["time"]), rtol=1e-6)
    np.testing.assert_allclose(table["product"], np.exp(table["time"]), rtol=1e-6)
    assert (table["lower"] <= table["value"]).all()
    assert (table["value"] <= table["upper"]).all()
    assert table["discretisation_error"].iloc[-1] < 1e-6
    assert set(table["method"]) == {"rk4"}
    assert set(table["step"]) == {1 / 8}
    tools = dataclasses.replace(flow_tools(), growth=lambda *_, **__: pytest.fail("measured again"))
    run_flow(plan, opened(plan), tmp_path, tools)
    published(tmp_path)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "growth.csv"), table)


def test_what_is_written(tmp_path: Path) -> None:
    carry_out(FlowPlan(**SMALL), tmp_path)
    told = published(tmp_path, animation="gif")
    times, found = states(tmp_path)
    with np.load(tmp_path / "trajectory.npz", allow_pickle=False) as archive:
        assert sorted(archive.files) == ["states", "times"]
        np.testing.assert_array_equal(archive["states"], found.numpy())
        np.testing.assert_array_equal(archive["times"], times)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "metrics.csv"), told.metrics)
    assert (tmp_path / "flow.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "flow.pdf").read_bytes().startswith(b"%PDF")
    gif = (tmp_path / "flow.gif").read_bytes()
    assert gif.startswith(b"GIF89a")
    assert gif.count(b"\x21\xf9\x04") == 6  # one graphic control block a frame
    assert not list(tmp_path.glob(".*partial*"))
    before = {name: (tmp_path / name).read_bytes() for name in ("trajectory.npz", "flow.png", "flow.pdf")}
    published(tmp_path)
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


@pytest.mark.parametrize(
    "options",
    [
        {"dimension": 1},
        {"dimension": 3, "sphere": True},
        {"dimension": 5, "causal": True},
        {"dimension": 2, "tokens": 1},
    ],
)
def test_every_dimension_can_be_drawn(tmp_path: Path, options: dict[str, Any]) -> None:
    carry_out(FlowPlan(**(SMALL | {"frames": 1} | options)), tmp_path)
    moving = "gif" if options["dimension"] in (1, 3) else "none"
    told = published(tmp_path, ordered=bool(options.get("causal")), animation=moving)
    assert told.picture.alt.startswith(
        f"Ways of {options.get('tokens', 7)} tokens from t = 0 to t = 1; beside"
    )
    assert told.picture.png.stat().st_size > 10_000
    assert moving == "none" or told.animation.stat().st_size > 10_000


def view(points: np.ndarray, **options: Any) -> FlowView:
    k = points.shape[2]
    usual: dict[str, Any] = {
        "title": "t",
        "below": "b",
        "times": np.arange(len(points), dtype=np.float64),
        "axes": tuple(f"coordinate {i}" for i in range(k)),
        "metrics": pd.DataFrame(index=range(len(points))),
        "ordered": False,
        "clusters": np.zeros(points.shape[1], dtype=np.int64),
    }
    return FlowView(points=points, **(usual | options))


def test_all_points_and_ellipses_are_inside_the_limits() -> None:
    points = np.random.default_rng(1).normal(size=(4, 9, 2)) * [1, 5]
    flat = view(points)
    for frames in (slice(None), slice(1, 3)):
        limits = limits_of(flat, frames)
        for i in (0, 1):
            assert limits[i][0] < points[frames, :, i].min() <= points[frames, :, i].max() < limits[i][1]
        assert limits[0][1] - limits[0][0] == pytest.approx(limits[1][1] - limits[1][0])
    wide = view(points, mean=np.zeros((4, 2)), covariance=np.tile(np.diag([1.0, 400.0]), (4, 1, 1)))
    assert limits_of(wide, slice(None))[1][1] > 40
    one = limits_of(view(np.full((2, 1, 2), 3.0)), slice(None))
    assert one[0][0] < 3.0 < one[0][1]
    huge = limits_of(view(np.array([[[1e308, 0.0]], [[-1e308, 0.0]]])), slice(None))
    assert all(map(math.isfinite, sum(huge, ())))


def test_an_ellipse_is_two_standard_deviations_from_the_mean() -> None:
    covariance = np.array([[2.0, 0.6], [0.6, 0.5]])
    ring = outline(np.array([1.0, -1.0]), covariance) - [1.0, -1.0]
    lengths = np.einsum("pi,ij,pj->p", ring, np.linalg.inv(covariance), ring)
    np.testing.assert_allclose(lengths, 4.0, rtol=1e-9)
    assert np.isfinite(outline(np.zeros(2), np.diag([1.0, 0.0]))).all()


def test_colours_are_those_of_clusters_the_largest_first() -> None:
    clusters = np.array([0, 1, 1, 2, 1, 2, 3])
    assert list(cluster_colours(clusters)) == [1, 2]
    points = np.zeros((2, 7, 2))
    colours = view(points, clusters=clusters).colours
    assert (colours[1] == colours[2]).all()
    assert (colours[3] == colours[5]).all()
    assert (colours[0] == colours[6]).all()
    assert len({tuple(colour) for colour in colours}) == 3
    assert not view(points, clusters=clusters).by_place
    alone = view(points, clusters=np.arange(7))
    assert alone.by_place
    assert len({tuple(colour) for colour in alone.colours}) == 7


def test_many_dimensions_are_shown_where_tokens_spread_most(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator, dtype=torch.float64) * torch.tensor(
        [0.1, 3, 0.1, 9, 0.1, 0.1]
    )
    plan = FlowPlan("identity", tokens=60, dimension=6, until=1e-6, frames=1)
    system = dataclasses.replace(opened(plan), x=x)
    run_flow(plan, system, tmp_path, flow_tools())
    from howsmooth.study.flows.publish import _view

    with FlowStore.open(tmp_path, write=False) as store:
        seen = _view(store, measure_frames(store, None), "t", "b", ordered=False)
    values, vectors = np.linalg.eigh(np.cov(x.numpy().T))
    for k in (0, 1):
        wanted = x.numpy() @ vectors[:, -1 - k]
        assert abs(np.corrcoef(seen.points[0, :, k], wanted)[0, 1]) > 1 - 1e-6
    shares = [float(name.partition("(")[2].partition(" ")[0]) for name in seen.axes]
    assert shares == pytest.approx(100 * values[:-3:-1] / values.sum(), abs=0.51)


def test_the_tools_are_those_of_the_library() -> None:
    tools = flow_tools()
    assert tools.flow is hs.dynamics.flow
    assert tools.layers is hs.dynamics.Layers
    assert tools.sphere is hs.dynamics.Sphere
    assert tools.rescaled is hs.dynamics.Rescaled
    assert tools.gaussian is hs.measures.Gaussian
    assert tools.growth is hs.dynamics.growth
