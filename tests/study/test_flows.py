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

import howsmooth as hs
from howsmooth.dynamics import Sphere, flow
from howsmooth.errors import ArgumentError, HowsmoothError, StoreError
from howsmooth.models.attention_parameter_files import save_parameters
from howsmooth.seeds import derive_seed
from howsmooth.study.figures.flows import FlowView, cluster_colours, limits_of, outline
from howsmooth.study.flows.flow_outputs import FlowOutputs, measure_frames, view_of, write_flow_outputs
from howsmooth.study.flows.flow_plan import FlowPlan
from howsmooth.study.flows.flow_run import Integration, frames, run_flow, tokens_of
from howsmooth.study.flows.flow_system import SYSTEMS, build_system, load_system
from howsmooth.study.progress_listener import Listener, Outcome
from howsmooth.study.records import Ending, GrowthRow
from howsmooth.study.store import Store
from tests._cases import random_attention, tokens

SMALL: dict[str, Any] = {"source": "random", "tokens": 7, "dimension": 3, "until": 1.0, "frames": 5}


def small(**changes: Any) -> FlowPlan:
    return FlowPlan(**(SMALL | {"animation": "none"} | changes))


def carry_out(plan: FlowPlan, folder: Path) -> tuple[Outcome, Ending | None]:
    return run_flow(plan, load_system(plan), folder)


def states(folder: Path) -> tuple[list[float], Tensor]:
    with Store.open(folder, write=False) as store:
        found = frames(store)
    return [frame.time for frame in found], torch.stack([tokens_of(frame) for frame in found])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], list[int]]:
    """Counts integrations; the one of a number is interrupted."""

    def count(interrupted: int | None = None) -> list[int]:
        calls: list[int] = []

        def counting(*arguments: Any, **options: Any) -> Any:
            if len(calls) == interrupted:
                raise KeyboardInterrupt
            calls.append(len(calls))
            return flow(*arguments, **options)

        monkeypatch.setattr("howsmooth.study.flows.flow_run.flow", counting)
        return calls

    return count


# ---- what is integrated


@pytest.mark.parametrize("options", [{}, {"method": "rk4", "step": 0.1}, {"sphere": True}])
def test_frame_by_frame_is_bit_for_bit_the_flow_in_one_go(tmp_path: Path, options: dict[str, Any]) -> None:
    plan = small(**options)
    carry_out(plan, tmp_path)
    times, found = states(tmp_path)
    system = load_system(plan)
    field = Sphere(system.maps[0], 1.0) if plan.sphere else system.maps[0]
    how: dict[str, Any] = {"step": plan.step} if plan.step else {"rtol": plan.rtol}
    whole = flow(field, system.x, [k / 5 for k in range(6)], method=plan.method, **how)
    assert times == whole.times.tolist()
    torch.testing.assert_close(found, whole.states, rtol=0, atol=0)


PROSE = "Anything at all that a tokenizer makes some dozen tokens of, or a few more than that. " * 3


@pytest.mark.parametrize(("layers", "norms"), [("1:2", True), ("all", False)])
def test_layers_are_the_modules_of_the_model_in_a_plain_loop(
    tmp_path: Path, layers: str, norms: bool
) -> None:
    (tmp_path / "prose.txt").write_text(PROSE)
    text = str(tmp_path / "prose.txt")
    options: dict[str, Any] = {"layers": layers, "norms": norms, "text": text}
    plan = FlowPlan("builtin-decoder", tokens=12, method="residual", **options)
    system = load_system(plan)
    assert (system.norms, system.in_order, system.text) == (norms, True, "prose")
    carry_out(plan, tmp_path)
    times, found = states(tmp_path)
    chosen = [0, 1, 2, 3] if layers == "all" else [1, 2]
    assert times == [float(k) for k in range(len(chosen) + 1)]
    loaded = hs.load_model("builtin-decoder")
    model: Any = loaded.model.eval().double()
    mask = torch.full((12, 12), -math.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        x = system.x[None]
        for layer, state in zip(chosen, found, strict=False):
            torch.testing.assert_close(state, x[0], rtol=1e-12, atol=1e-12)
            block = model.h[layer]
            x = x + block.attn(block.ln_1(x) if norms else x, attention_mask=mask)[0]
        torch.testing.assert_close(found[-1], x[0], rtol=1e-12, atol=1e-12)
        # The start: what the model has at some place of the text. Tokens are captured in float32.
        ids = torch.tensor(loaded.tokenizer.encode(PROSE))
        hidden = [
            model(ids[None, k : k + 12], output_hidden_states=True).hidden_states[chosen[0]][0]
            for k in range(len(ids) - 11)
        ]
        starts = hidden if norms else [model.h[chosen[0]].ln_1(one) for one in hidden]
        assert min(float((one - system.x).abs().max()) for one in starts) < 1e-5


def test_one_layer_of_a_model_is_a_flow_with_frozen_weights_and_norms_are_of_pre_norm_layers(
    tmp_path: Path,
) -> None:
    (tmp_path / "prose.txt").write_text(PROSE)
    options: dict[str, Any] = {"tokens": 4, "text": str(tmp_path / "prose.txt")}
    assert load_system(FlowPlan("builtin-encoder", **options, layers="1")).layers is None
    with pytest.raises(ArgumentError, match=r"got the post-norm layer 0 of 'builtin-encoder'.*Leave --norms"):
        load_system(FlowPlan("builtin-encoder", norms=True, **options))


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
    plan = FlowPlan(name, causal=causal, beta=0.7, seed=4)
    f = build_system(plan, 3)
    seed = derive_seed(purpose="system", name=name, seed=4)
    drawn = torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).numpy()
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
    f = build_system(FlowPlan("identity", attention="l2", causal=causal, beta=0.5), 2)
    weights = np.exp(-0.5 * ((x[:, None] - x[None]) ** 2).sum(axis=2)) * (np.tri(4) if causal else 1.0)
    wanted = (weights / weights.sum(axis=1, keepdims=True)) @ x
    np.testing.assert_allclose(f(torch.from_numpy(x)).numpy(), wanted, rtol=1e-12)


def test_sinkhorn_attention_is_doubly_stochastic() -> None:
    x = np.random.default_rng(6).normal(size=(5, 2))
    f = build_system(FlowPlan("negative", attention="sinkhorn", beta=0.5), 2)
    weights = np.exp(0.5 * x @ x.T)
    for _ in range(2000):
        weights /= weights.sum(axis=0)
        weights /= weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(f(torch.from_numpy(x)).numpy(), -weights @ x, rtol=1e-6, atol=1e-8)


def test_rescaled_tokens_are_those_of_the_flow_times_the_exponential(tmp_path: Path) -> None:
    plan = FlowPlan("one-direction", tokens=6, until=1.0, frames=2, rescale=True, rtol=1e-6)
    carry_out(plan, tmp_path)
    times, found = states(tmp_path)
    system = load_system(plan)
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
        (
            {"method": "rk4", "step": 0.3, "until": 1.0},
            None,
            "step: expected a step that reaches 1 in a whole number",
        ),
        (
            {"method": "rk4", "step": 2.0, "until": 1.0},
            None,
            "step: expected a step that reaches 1 in a whole number",
        ),
        (
            {"method": "rk4", "step": 1e-300, "until": 1.0},
            None,
            "reaches 1 in a whole number of at most 10000000",
        ),
        (
            {"until": 5.0},
            4,
            "until: expected at most 4, because each of the 4 layers lasts one unit of time, got 5",
        ),
    ],
)
def test_times_that_cannot_be(changes: dict[str, Any], layers: int | None, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        FlowPlan("random", **changes).grid(layers)


# ---- where tokens start


def test_a_second_seed_is_another_start_and_a_longer_flow_the_same() -> None:
    x = load_system(small()).x
    assert torch.equal(x, load_system(small(until=9.0, method="rk4")).x)
    assert not torch.equal(x, load_system(small(seed=1)).x)
    placed: tuple[dict[str, Any], ...] = ({"start": "sphere"}, {"sphere": True})
    for options in (*placed, {"start": "gaussian", "sphere": True}):
        norms = torch.linalg.vector_norm(load_system(small(**options, radius=3.0)).x, dim=1)
        torch.testing.assert_close(norms, torch.full((7,), 3.0, dtype=torch.float64))
    assert float(load_system(small(tokens=4000, radius=3.0)).x.std()) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_tokens_of_a_file(tmp_path: Path, name: str) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    path = tmp_path / name
    np.save(path, x) if path.suffix == ".npy" else np.savez(path, X=x)
    system = load_system(FlowPlan("identity", start=str(path)))
    np.testing.assert_array_equal(system.x.numpy(), x.astype(np.float64))


def test_tokens_of_a_parameter_file_are_put_on_the_sphere_of_their_own_size(tmp_path: Path) -> None:
    f, x = random_attention(3), tokens(4, 5, 6)
    save_parameters(tmp_path / "head.npz", f, x)
    plan = FlowPlan(str(tmp_path / "head.npz"), method="euler", until=0.5, step=0.5)
    carry_out(plan, tmp_path)
    torch.testing.assert_close(states(tmp_path)[1], torch.stack([x, x + 0.5 * f(x)]), rtol=1e-12, atol=0)
    placed, size = (
        load_system(dataclasses.replace(plan, sphere=True)),
        float(x.square().sum(dim=1).mean().sqrt()),
    )
    assert placed.radius == pytest.approx(size)
    torch.testing.assert_close(placed.x, size * x / x.norm(dim=1, keepdim=True))
    larger = load_system(dataclasses.replace(plan, sphere=True, radius=3.0))
    torch.testing.assert_close(larger.x, 3 * x / x.norm(dim=1, keepdim=True))
    with pytest.raises(ArgumentError, match="radius: expected none for given tokens without --sphere"):
        load_system(dataclasses.replace(plan, radius=3.0))
    drawn = load_system(dataclasses.replace(plan, start="gaussian", tokens=9))
    assert drawn.x.shape == (9, 6)


# ---- what is refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no file": ({"source": "none.npz"}, "There is no parameter file"),
    "until": ({"until": 0.0}, "until: expected a finite number > 0, got 0"),
    "too large": ({"tokens": 99999999, "dimension": 99999}, "coordinates together"),
    "frames": ({"frames": 0}, "frames: expected a number from 1 to 10000, got 0"),
    "method": ({"method": "heun"}, "method: expected one of dopri5, dopri8"),
    "step": ({"step": 0.1}, "step: expected none with the method dopri5"),
    "rtol": ({"rtol": 2.0}, "rtol: expected a number from 1e-13"),
    "sinkhorn": (
        {"attention": "sinkhorn", "causal": True},
        "because causal weights cannot be doubly stochastic",
    ),
    "sphere": ({"sphere": True, "rescale": True}, "rescale: expected --rescale without --sphere"),
    "closure": ({"closure": True, "start": "sphere"}, "closure: expected tokens drawn with"),
    "given closure": ({"source": "given.npz", "closure": True}, "closure: expected tokens drawn with"),
    "causal closure": ({"closure": True, "causal": True}, "unmasked"),
    "rescaled l2": ({"rescale": True, "attention": "l2"}, "attention: expected self-attention"),
    "start": ({"start": "nowhere"}, "start: expected auto, gaussian, sphere, text, file, or a name"),
    "text": ({"start": "text"}, "start: expected a source with tokens of its own for text"),
    "no start": ({"start": "none.npy"}, "There is no file of tokens none.npy"),
    "pickle": ({"start": "pickled.npy"}, "pickled.npy cannot be read: Object arrays"),
    "no X": ({"start": "other.npz"}, "an array X (n, d) of numbers in other.npz, got none of that name"),
    "infinite": ({"start": "infinite.npy"}, "start: expected finite numbers in infinite.npy"),
    "cube": (
        {"start": "cube.npy"},
        "start: expected an array X (n, d) of numbers in cube.npy, got shape (2, 2, 2)",
    ),
    "count": ({"start": "good.npy", "tokens": 6}, "tokens: expected 3, as in good.npy, got 6"),
    "layers": ({"layers": "0"}, "source: expected a model with --layers, got the system random"),
    "norms": ({"norms": True}, "source: expected a model with --norms, got the system random"),
    "norms of a file": (
        {"source": "head.npz", "norms": True},
        "expected a model with --norms, got the param",
    ),
    "norms rescaled": ({"norms": True, "rescale": True}, "norms: expected --norms without --rescale"),
    "norms, Gaussian": ({"norms": True, "closure": True}, "norms: expected --norms without --closure"),
    "beta of a file": ({"source": "head.npz", "beta": 2.0}, "with --beta"),
    "no tokens": ({"source": "head.npz", "start": "file"}, "start: expected a file with tokens X"),
    "too many": ({"source": "given.npz", "tokens": 9}, "tokens: expected at most 5, got 9"),
    "not square": ({"source": "wide.npz", "start": "gaussian"}, "values have the dimension of its tokens"),
    "misfit": ({"source": "head.npz", "start": "good.npy"}, "start: expected tokens (n, 6)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_impossible_is_refused_before_there_is_a_store(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_parameters("head.npz", random_attention(1))
    save_parameters("given.npz", random_attention(1), tokens(4, 5, 6))
    save_parameters("wide.npz", random_attention(1, d_out=None))
    np.save("pickled.npy", np.array([{}], dtype=object))
    np.savez("other.npz", Y=np.eye(2))
    np.save("infinite.npy", np.full((2, 2), math.inf))
    np.save("cube.npy", np.zeros((2, 2, 2)))
    np.save("good.npy", np.eye(3))
    options, sentence = REFUSED[case]
    usual: dict[str, Any] = {"source": "random", "until": 1.0, "frames": 4}
    with pytest.raises(HowsmoothError) as refused:
        carry_out(FlowPlan(**(usual | options)), Path("out"))
    assert sentence in str(refused.value)
    assert not Path("out").exists()


def test_layers_in_sequence_have_a_last_time_and_are_not_rescaled(tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text(PROSE)
    options: dict[str, Any] = {"tokens": 4, "text": str(tmp_path / "prose.txt")}
    with pytest.raises(ArgumentError, match="rescale: expected one layer, got 4 layers in sequence"):
        load_system(FlowPlan("builtin-decoder", rescale=True, **options))
    plan = FlowPlan("builtin-decoder", until=5.0, **options)
    with pytest.raises(
        ArgumentError, match="until: expected at most 4, because each of the 4 layers lasts one"
    ):
        Integration(plan, load_system(plan))


# ---- what is kept


def test_interrupted_and_continued_gives_bit_for_bit_the_same(
    tmp_path: Path, counted: Callable[..., list[int]]
) -> None:
    counted(2)
    with pytest.raises(KeyboardInterrupt):
        carry_out(small(), tmp_path / "a")
    assert len(states(tmp_path / "a")[0]) == 3
    rest = counted()
    outcome, _ = carry_out(small(), tmp_path / "a")
    assert (outcome.made["frames"], outcome.kept["frames"], len(rest)) == (3, 2, 3)
    carry_out(small(), tmp_path / "b")
    assert torch.equal(states(tmp_path / "a")[1], states(tmp_path / "b")[1])
    again = counted()
    outcome, _ = carry_out(small(), tmp_path / "a")
    assert (outcome.made["frames"], outcome.kept["frames"], again) == (0, 5, [])


def test_a_folder_that_has_something_else_is_not_bound_to_a_flow_that_is_refused(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.begin("measure", {"seed": 0})
    with pytest.raises(ArgumentError, match="rtol"):
        carry_out(small(rtol=1e-200), tmp_path)
    carry_out(small(), tmp_path)
    with Store.open(tmp_path, write=False) as store:
        assert store.identity("measure") == {"seed": 0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "it was made with --seed 0, not 1. Choose another --out, or repeat --seed 0."),
        ({"until": 2.0}, "it was made with --until 1, not 2."),
        ({"until": None}, "it was made with --until 1, not its default."),
        ({"step": 0.5}, "with --step its default, not 0.5. .*, or leave --step out."),
        ({"method": "rk4"}, "it was made with --method euler, not rk4."),
        ({"sphere": True}, "it was made without --sphere, not with it. .*, or leave --sphere out."),
        ({"rescale": False}, "it was made with --rescale, not without it. .*, or add --rescale."),
        ({"source": "identity"}, "it was made with the source random, not identity. Choose another --out.$"),
    ],
)
def test_another_flow_is_not_mixed_into_a_folder(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    before: dict[str, Any] = {"frames": 1, "method": "euler", "rescale": "sphere" not in changes}
    carry_out(small(**before), tmp_path)
    with pytest.raises(StoreError, match=words):
        carry_out(small(**(before | changes)), tmp_path)
    assert len(states(tmp_path)[0]) == 2


def test_tokens_of_a_file_that_changed_are_another_flow(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    plan = FlowPlan("identity", start=str(path), until=1.0, frames=2)
    np.save(path, np.eye(3))
    carry_out(plan, tmp_path / "out")
    np.save(path, 2 * np.eye(3))
    with pytest.raises(StoreError, match="fingerprint"):
        carry_out(plan, tmp_path / "out")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            "UPDATE frames SET x = zeroblob(length(x)) WHERE place = 2",
            "row 3 of frames was changed after it was written",
        ),
        ("DELETE FROM frames WHERE place = 2", "frame 2 is missing"),
    ],
)
def test_frames_that_changed_are_damage(tmp_path: Path, damage: str, words: str) -> None:
    carry_out(small(), tmp_path)
    with sqlite3.connect(tmp_path / "study.sqlite") as connection:
        connection.execute(damage)
    with pytest.raises(StoreError, match=words):
        states(tmp_path)


def test_a_flow_that_ends_early_is_kept_until_then_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: Callable[..., list[int]]
) -> None:
    # x' = x² from x₀ is 1 / (1 / x₀ − t).
    def field(t: Tensor, x: Tensor) -> Tensor:
        return x * x

    plan = FlowPlan("identity", tokens=3, dimension=1, until=4.0, frames=10, rtol=1e-5)
    start = torch.tensor([[0.1], [0.5], [0.25]], dtype=torch.float64)
    system = dataclasses.replace(load_system(plan), x=start)
    with monkeypatch.context() as patch:
        patch.setattr(
            "howsmooth.study.flows.flow_run.flow",
            lambda _, *rest, **options: flow(field, *rest, **options),
        )
        outcome, ending = run_flow(plan, system, tmp_path)
    assert ending is not None
    assert (ending.status, ending.what) == ("blew up", "tokens")
    assert ending.lower <= 2.0 <= ending.upper
    assert ending.upper - ending.lower < 1e-3
    times, found = states(tmp_path)
    assert times[-1] < 2.0
    assert outcome.made["frames"] == len(times) - 1 == 4
    torch.testing.assert_close(found[3, :, 0], 1 / (1 / start[:, 0] - times[3]), rtol=1e-4, atol=0)
    calls = counted()
    outcome, again = run_flow(plan, system, tmp_path)
    assert (outcome.made["frames"], again, calls) == (0, ending, [])


def test_frames_of_times_when_it_had_ended_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after, ended = Integration.after, Ending("blew up", "tokens", "as it is told", 0.35, 0.7)

    def ending_after_three(self: Integration, frame: Any) -> Any:
        return ended if frame.place == 3 else after(self, frame)

    monkeypatch.setattr(Integration, "after", ending_after_three)
    add = Store.add

    def killed(self: Store, rows: Any, *rest: Any, **options: Any) -> None:
        if isinstance(rows[0], Ending):
            raise KeyboardInterrupt
        add(self, rows, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            carry_out(small(), tmp_path)
    outcome, ending = carry_out(small(), tmp_path)
    assert (ending, outcome.made["frames"], states(tmp_path)[0]) == (ended, 0, [0.0, 0.2])


# ---- what is measured, written and seen


def published(plan: FlowPlan, folder: Path) -> FlowOutputs:
    carry_out(plan, folder)
    return write_flow_outputs(folder, plan, load_system(plan))


def test_metrics_of_each_frame(tmp_path: Path) -> None:
    told = published(small(beta=0.5, tolerance=0.8), tmp_path)
    times, found = states(tmp_path)
    table = told.metrics
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
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "metrics.csv"), table)


def test_growth_of_perturbations_is_measured_once_at_some_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One token is moved by V alone: the flow map is e^{tV}, V = diag(1, −1/2).
    monkeypatch.setattr("howsmooth.study.flows.flow_run._GROWTHS", 2)
    plan = FlowPlan("one-direction", tokens=1, until=0.375, frames=3, growth=True, animation="none")
    table = published(plan, tmp_path).growth
    assert table["time"].tolist() == [0.0, 0.25, 0.375]
    np.testing.assert_allclose(table["value"], np.exp(table["time"]), rtol=1e-6)
    np.testing.assert_allclose(table["product"], np.exp(table["time"]), rtol=1e-6)
    assert (table["lower"] <= table["value"]).all()
    assert (table["value"] <= table["upper"]).all()
    assert table["discretisation_error"].iloc[-1] < 1e-6
    assert (set(table["method"]), set(table["step"])) == ({"rk4"}, {1 / 8})
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "growth.csv"), table)
    monkeypatch.setattr(Integration, "growth", lambda *_: pytest.fail("measured again"))
    carry_out(plan, tmp_path)
    with Store.open(tmp_path, write=False) as store:
        assert store.count(GrowthRow) == 3


def test_what_is_written(tmp_path: Path) -> None:
    told = published(small(animation="gif"), tmp_path)
    times, found = states(tmp_path)
    assert told.tolerance == pytest.approx(0.05 * told.metrics["spread"][0])
    with np.load(tmp_path / "trajectory.npz", allow_pickle=False) as archive:
        assert sorted(archive.files) == ["states", "times"]
        np.testing.assert_array_equal(archive["states"], found.numpy())
        np.testing.assert_array_equal(archive["times"], times)
    assert (tmp_path / "flow.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "flow.pdf").read_bytes().startswith(b"%PDF")
    gif = (tmp_path / "flow.gif").read_bytes()
    assert gif.startswith(b"GIF89a")
    assert gif.count(b"\x21\xf9\x04") == 6  # one graphic control block a frame
    assert not list(tmp_path.glob(".*partial*"))
    before = {name: (tmp_path / name).read_bytes() for name in ("trajectory.npz", "flow.png", "flow.pdf")}
    published(small(), tmp_path)
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dimension": 1, "animation": "gif"}, marks=pytest.mark.slow),
        {"dimension": 3, "sphere": True, "animation": "gif"},
        pytest.param({"dimension": 5, "causal": True}, marks=pytest.mark.slow),
        {"dimension": 2, "tokens": 1},
    ],
)
def test_every_dimension_can_be_drawn(tmp_path: Path, options: dict[str, Any]) -> None:
    told = published(small(frames=1, **options), tmp_path)
    assert told.figures[0].stat().st_size > 10_000
    if "animation" in options:
        assert told.animation is not None
        assert told.animation.stat().st_size > 10_000


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
    for some in (slice(None), slice(1, 3)):
        limits = limits_of(flat, some)
        for i in (0, 1):
            assert limits[i][0] < points[some, :, i].min() <= points[some, :, i].max() < limits[i][1]
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
    scales = torch.tensor([0.1, 3, 0.1, 9, 0.1, 0.1])
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scales
    plan = FlowPlan("identity", tokens=60, dimension=6, until=1e-6, frames=1)
    system = dataclasses.replace(load_system(plan), x=x)
    run_flow(plan, system, tmp_path)
    with Store.open(tmp_path, write=False) as store:
        seen = view_of(store, plan, system, measure_frames(frames(store), 1.0, 1.0, Listener()), 1.0)
    values, vectors = np.linalg.eigh(np.cov(x.numpy().T))
    for k in (0, 1):
        wanted = x.numpy() @ vectors[:, -1 - k]
        assert abs(np.corrcoef(seen.points[0, :, k], wanted)[0, 1]) > 1 - 1e-6
    shares = [float(name.partition("(")[2].partition(" ")[0]) for name in seen.axes]
    assert shares == pytest.approx(100 * values[:-3:-1] / values.sum(), abs=0.51)
