"""``howsmooth measure --scope model``: rows of whole models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import howsmooth as hs
from howsmooth.cli import main

_WHAT = ["builtin-decoder", "--scope", "model", "--lengths", "2,3", "--samples", "1", "--bounds", "none"]
_MEASURE = ["measure", *_WHAT, "--rtol", "1e-2", "-q"]


@pytest.mark.slow
def test_a_whole_model_is_measured_once_for_all_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path)]
    assert main([*_MEASURE, "--output", "logits", *out]) == 0
    found = hs.read(tmp_path)["measurements"]
    assert [(row.layer, row.scope, row.n) for row in found.itertuples()] == [(0, "model", 2), (0, "model", 3)]
    model = hs.load_model("builtin-decoder", head=True, dtype=torch.float64).model
    ids = hs.load_model("builtin-decoder").tokenizer.encode(hs.texts.load_text("alice").content)
    for row in found.itertuples():
        x = model.get_input_embeddings()(torch.tensor(ids[row.start : row.start + row.n]))
        logits = lambda e: model(inputs_embeds=e[None]).logits[0]  # noqa: E731
        with sdpa_kernel(SDPBackend.MATH):
            dense = torch.func.jacfwd(logits)(x).reshape(-1, x.numel())
        exact = torch.linalg.eigvalsh(dense.mT @ dense)[-1].sqrt()
        assert row.lower * (1 - 1e-9) <= float(exact) <= row.upper * (1 + 1e-9)
    # Another output is another study.
    assert main([*_MEASURE, "--output", "margin", *out]) == 2
    assert "belongs to another study" in capsys.readouterr().err


def test_an_output_needs_the_scope_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "builtin-decoder", "--output", "logits", "--out", str(tmp_path)]) == 2
    assert "output: expected hidden unless the scope is model" in " ".join(capsys.readouterr().err.split())
