"""Depth profiles: every entry against a dense Jacobian of the model's own modules."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import howsmooth as hs
from howsmooth.results.result import in_interval
from tests._tiny_models import WithoutDowncast, tiny, token_ids
from tests.architectures.build import build


def _norm(f: Any, x: Tensor) -> float:
    with sdpa_kernel(SDPBackend.MATH), WithoutDowncast():
        jacobian = torch.func.jacrev(f)(x).detach().reshape(-1, x.numel())
    return float(torch.linalg.matrix_norm(jacobian, 2))


def test_influences_are_those_of_the_whole_model_at_its_last_token() -> None:
    model, ids = tiny("gpt2", torch.float64), token_ids(1, 5)
    told: list[tuple[float, int]] = []
    found = hs.depth_profile(model, ids, influence=True, on_layer=lambda *step: told.append(step))
    (whole,) = hs.capture(model, ids, scope="model")
    same = hs.influence(whole, outputs=[-1])
    assert found.influence is not None
    assert found.influence.outputs == same.outputs == (4,)
    assert torch.allclose(found.influence.value, same.value, rtol=1e-2)
    assert "Which token moves which, whole model to the last hidden state" in repr(found)
    assert "Influence(" not in repr(found)
    assert told[-1] == (6, 6)
    assert hs.depth_profile(model, ids).influence is None


def test_every_constant_is_that_of_a_dense_jacobian() -> None:
    model = tiny("gpt2", torch.float64).requires_grad_(False)
    ids = token_ids(1, 5)
    found = hs.depth_profile(model, ids, rtol=1e-6).table

    def embedded(x: Tensor) -> Tensor:
        return x + model.wpe(torch.arange(5))

    stages = [embedded, *(lambda x, block=block: block(x[None])[0] for block in model.h), model.ln_f]
    # GPT-2's blocks are causal by the mask that the model makes, which a block alone does not know.
    mask = torch.full((5, 5), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)[None, None]
    stages[1:-1] = [lambda x, block=block: block(x[None], attention_mask=mask)[0] for block in model.h]

    def through(parts: list[Any]) -> Any:
        def f(x: Tensor) -> Tensor:
            for part in parts:
                x = part(x)
            return x

        return f

    points = [model.wte(ids)[0]]
    for stage in stages:
        points.append(stage(points[-1]))
    whole = model(ids).last_hidden_state[0]
    assert torch.allclose(points[-1], whole, atol=1e-10)
    assert list(found["stage"]) == ["embeddings", "block 0", "block 1", "block 2", "output"]
    for i, row in found.iterrows():
        exact = {
            "own": _norm(stages[i], points[i]),
            "until": _norm(through(stages[: i + 1]), points[0]),
            "beyond": _norm(through(stages[i + 1 :]), points[i + 1]) if i + 1 < len(stages) else None,
        }
        for kind, norm in exact.items():
            if norm is None:
                assert np.isnan(row[kind])
                continue
            assert row[f"{kind}_lower"] <= norm * (1 + 1e-9)
            assert norm * (1 - 1e-9) <= row[f"{kind}_upper"] <= norm * (1 + 3e-6)
    assert np.allclose(found["product"], found["own"].cumprod())
    assert np.allclose(found["ratio"] * found["product"], found["until"])


def test_layers_that_share_their_weights() -> None:
    model = build("albert").requires_grad_(False)
    ids = token_ids(1, 5)
    found = hs.depth_profile(model, ids, rtol=1e-6).table
    assert list(found["stage"]) == ["embeddings", "block 0", "block 1", "output"]
    encoder = model.encoder
    layer = lambda x: encoder.albert_layer_groups[0].albert_layers[0](x[None])[0]  # noqa: E731
    with torch.no_grad(), WithoutDowncast():
        first = encoder.embedding_hidden_mapping_in(model.embeddings(ids))[0]
        second = layer(first)
    for name, exact in {
        "own": [_norm(layer, first), _norm(layer, second)],
        "beyond": [_norm(layer, second), 1.0],
    }.items():
        assert np.allclose(found[name][1:3], exact, rtol=2e-6)


class _NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(90, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x + self.attention(x, x, x)[0]


def test_what_cannot_be_profiled_is_refused() -> None:
    with pytest.raises(hs.errors.CaptureError, match="has no blocks"):
        hs.depth_profile(_NoBlocks().eval(), token_ids(1, 4))
    with pytest.raises(hs.errors.ArgumentError, match="output: expected one of hidden, logits, margin"):
        hs.depth_profile(tiny("bert"), token_ids(1, 4), output="probabilities")


def test_no_map_exceeds_the_product_of_its_parts() -> None:
    found = hs.depth_profile(tiny("bert"), token_ids(1, 6), rtol=1e-4).table
    assert (found["ratio"] <= 1 + 1e-3).all()
    for one, following in pairwise(found.to_dict("records")):
        beyond = following["beyond"] if following["beyond"] > 0 else 1
        assert following["until"] <= one["until"] * following["own"] * (1 + 1e-3)
        assert one["beyond"] <= following["own"] * beyond * (1 + 1e-3)


def test_what_a_profile_shows() -> None:
    found = hs.depth_profile(tiny("llama"), token_ids(1, 4))
    assert found.value == found.table["until"].iloc[-1]
    assert repr(found).count("\n") == len(found.table) + 8
    assert "product: of the constants of the stages so far" in " ".join(repr(found).split())
    last = found.table.iloc[-1]
    whole = in_interval(found.value, last["until_lower"], last["until_upper"], converged=True)
    page = found.page({"depth": "data:,"})
    assert f"Whole model: {whole} at 0.999 confidence." in repr(found)
    assert f"Whole model: {whole} at 0.999 confidence." in page
    assert f'<td data-name="until">{whole}</td>' in page
    assert f"\nInput: {found.input}.\nWeights in float32.\n" in repr(found)
    assert f"{found.value:.6g}" in repr(found)
    assert f"{found.value:.6g}" in found.citation
    axis = found.plot().axes[0]
    assert axis.get_yscale() == "log"
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in axis.get_lines()]
    assert any(np.array_equal(found.table["until"], line) for line in drawn)
    stages = found.table.iloc[[0, 1, 1, 1, 1, 1, 1, -1]]
    figure = dataclasses.replace(found, table=stages, model="eight stages").plot()
    FigureCanvasAgg(figure).draw()
    first, second = (label.get_window_extent() for label in figure.axes[0].get_xticklabels()[:2])
    # The labels are turned: "embeddings" ends at its tick, well before "0" begins.
    assert first.x1 + 10 < second.x0
    assert not figure.legends[0].get_window_extent().overlaps(figure.axes[0].get_tightbbox())
    latex = found.to_latex()
    assert latex is not None
    assert latex.splitlines()[0] == f"% {found.citation}"
    assert f"caption{{Depth profile of {found.model} at one input of {found.n} tokens (howsmooth" in latex
    assert "block 2 & " in latex
    assert "block 2" in found._repr_html_()
    assert " style=" not in found.page({"depth": "data:,"})  # the page's security policy forbids it


class _Tagger(nn.Module):
    """A module of one's own, which returns logits (batch, n, 5) and no hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.embed(ids)))


def test_the_output_of_a_module_that_is_not_of_transformers() -> None:
    found = hs.depth_profile(_Tagger().eval(), token_ids(1, 4) % 50)
    assert found.output == "output"
    assert "from its embeddings to its output at" in found.citation
