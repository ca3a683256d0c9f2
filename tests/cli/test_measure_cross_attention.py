"""``howsmooth measure`` of cross-attention and of whole encoder-decoders, against dense Jacobians."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import T5Config, T5Model

import howsmooth as hs
from howsmooth.cli import main
from howsmooth.scopes import SIDES
from tests._selection import others_slow

IDS = list(range(3, 15))
HOW = ["--tokens", "ids.npy", "--lengths", "4", "--samples", "2", "--bounds", "none", "-q"]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", [IDS])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        T5Model(T5Config(**config)).save_pretrained("t5")


def rows_of(*options: str) -> list[tuple[int, float, float, torch.Tensor]]:
    """The rows of a run, as layer, limits, and the tokens of the sequence."""
    assert main(["measure", "t5", *HOW, *options, "--out", "found"]) == 0
    table = hs.read("found")["measurements"]
    return [
        (row.layer, row.lower, row.upper, torch.tensor([IDS[row.start : row.start + row.n]]))
        for row in table.itertuples()
    ]


@pytest.mark.parametrize("side", others_slow([*SIDES], ["memory"]))
def test_the_rows_hold_the_constants_of_the_models_own_layer(side: str) -> None:
    model = T5Model.from_pretrained("t5").double().eval()
    model.set_attn_implementation("eager")
    module = model.decoder.block[0].layer[1].EncDecAttention
    found = rows_of("--scope", "cross-attention", "--layers", "2", "--side", side)
    assert len(found) == 2
    for layer, lower, upper, ids in found:
        kept: dict[str, torch.Tensor] = {}
        handle = module.register_forward_pre_hook(
            lambda m, a, k, kept=kept: kept.update(x=a[0], y=k["key_value_states"]), with_kwargs=True
        )
        model(input_ids=ids, decoder_input_ids=ids)
        handle.remove()

        def own(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = module(x[None], key_value_states=y[None])[0][0]
            return out

        parts = torch.func.jacrev(own, argnums=(0, 1))(kept["x"][0].detach(), kept["y"][0].detach())
        of_x, of_y = (part.flatten(2).flatten(0, 1) for part in parts)
        dense = {"queries": of_x, "memory": of_y, "joint": torch.cat((of_x, of_y), dim=1)}[side]
        exact = float(torch.linalg.matrix_norm(dense.detach(), 2))
        assert layer == 2
        assert lower * (1 - 1e-5) <= exact <= upper * (1 + 1e-5)


def test_a_whole_encoder_decoder_from_one_side() -> None:
    model = T5Model.from_pretrained("t5").double().eval()
    model.set_attn_implementation("eager")
    for layer, lower, upper, ids in rows_of("--scope", "model", "--side", "queries"):
        e = model.shared(ids)[0].detach()

        def own(x: torch.Tensor, ids: torch.Tensor = ids) -> torch.Tensor:
            out: torch.Tensor = model(input_ids=ids, decoder_inputs_embeds=x[None]).last_hidden_state[0]
            return out

        dense = torch.func.jacrev(own)(e).flatten(2).flatten(0, 1)
        exact = float(torch.linalg.matrix_norm(dense.detach(), 2))
        assert layer == 0
        assert lower * (1 - 1e-5) <= exact <= upper * (1 + 1e-5)


def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (["--side", "memory"], "side: expected no side unless the scope is cross-attention or model"),
        (["--scope", "cross-attention"], "Choose the others: layers 2."),
        (["--scope", "cross-attention", "--layers", "1"], "layer 1 (decoder.block.0"),
    ):
        assert main(["measure", "t5", *HOW, *options, "--out", "refused"]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_what_moves_is_in_the_citation_the_tables_and_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    scopes = ["--scope", "cross-attention", "--layers", "2", "--side", "memory"]
    asked = [*HOW, *scopes, "--lengths", "2,3,4", "--samples", "1", "--out", "moved", "--json"]
    assert main(["measure", "t5", *asked]) == 0
    (line,) = json.loads(capsys.readouterr().out)["citations"]
    assert "of t5, scope cross-attention, side memory, on ids (SHA-256" in line
    tables = hs.read("moved")
    assert tables["exponents"].attrs["howsmooth"] == line
    assert {*tables["measurements"]["side"]} == {*tables["exponents"]["side"]} == {"memory"}
    for file, words in (
        ("measurements.csv", ",side\n"),
        ("exponents.csv", ",side\n"),
        ("report.html", "scope cross-attention, side memory, "),
    ):
        assert words in (Path("moved") / file).read_text("utf-8")
