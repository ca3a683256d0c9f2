"""Capture from models that live on the device, and a study there, against the CPU in float64."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

import howsmooth as hs
from howsmooth.cli import main
from howsmooth.study.records import Measurement
from howsmooth.study.store import Store
from tests._tiny_models import CONFIGS, tiny, token_ids

pytestmark = pytest.mark.gpu

WORDS = (
    "river",
    "stone",
    "glass",
    "mirror",
    "water",
    "paper",
    "silk",
    "road",
    "table",
    "sky",
    "wheel",
    "leaf",
)


@pytest.mark.parametrize("name", CONFIGS)
def test_captured_maps_are_those_of_the_cpu(name: str, device: torch.device) -> None:
    ids = token_ids(2, 7)
    here = hs.capture(tiny(name, torch.float64), ids)
    there = hs.capture(tiny(name).to(device), ids.to(device))
    for exact, site in zip(here, there, strict=True):
        assert site.path == exact.path == "closed form"
        assert (site.causal, site.masking, site.layout) == (exact.causal, exact.masking, exact.layout)
        assert site.x.device.type == site.map.device.type == device.type
        assert site.x.dtype == torch.float32
        wanted = hs.local_lipschitz(exact.map, exact.x, rtol=1e-8)
        found = hs.local_lipschitz(site.map, site.x, rtol=1e-4)
        assert found.converged.all()
        # The tokens themselves are float32 here: they and so the constant are off by some of its digits.
        torch.testing.assert_close(found.value.cpu(), wanted.value.cpu(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("scope", ["head", "heads", "residual", "block"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_scopes(name: str, scope: str, device: torch.device) -> None:
    ids = token_ids(1, 6)
    here = hs.capture(tiny(name, torch.float64), ids, layers=[1], scope=scope)
    there = hs.capture(tiny(name).to(device), ids.to(device), layers=[1], scope=scope)
    for exact, site in zip(here, there, strict=True):
        wanted = hs.local_lipschitz(exact.map, exact.x, rtol=1e-8)
        found = hs.local_lipschitz(site.map, site.x, rtol=1e-4)
        torch.testing.assert_close(found.value.cpu(), wanted.value.cpu(), rtol=1e-4, atol=0)


def test_a_built_in_model_is_loaded_onto_the_device(device: torch.device) -> None:
    ids = torch.randint(3, 200, (1, 12), generator=torch.Generator().manual_seed(0))
    here = hs.load_model("builtin-decoder", dtype=torch.float64)
    there = hs.load_model("builtin-decoder", device=device)
    (exact,), (site,) = (
        hs.capture(here, ids, layers=[-1]),
        hs.capture(there, ids.to(device), layers=[-1]),
    )
    wanted = hs.local_lipschitz(exact.map, exact.x, rtol=1e-8)
    found = hs.local_lipschitz(site.map, site.x)
    torch.testing.assert_close(found.value.cpu(), wanted.value, rtol=1e-4, atol=0)


def test_a_study_gives_the_rows_of_the_cpu(tmp_path: Path, device: torch.device) -> None:
    text = tmp_path / "prose.txt"
    text.write_text(" ".join(f"The {word} is as smooth as the {other}." for word in WORDS for other in WORDS))
    plan = ["measure", "builtin-encoder", "--text", str(text), "--quiet"]
    plan += ["--lengths", "4,9", "--samples", "2", "--layers", "0,-1"]
    tables: list[pd.DataFrame] = []
    for place in ("cpu", str(device)):
        folder = tmp_path / f"on-{place.replace(':', '-')}-{len(tables)}"
        assert main([*plan, "--device", place, "--out", str(folder)]) == 0
        with Store.open(folder, write=False) as store:
            tables.append(store.table(Measurement, ["layer", "n", "start"]))
    here, there = tables
    assert len(here) == len(there) == 8
    assert there["converged"].all()
    for column in ("layer", "n", "start"):
        assert there[column].tolist() == here[column].tolist()
    assert there["lipschitz"].to_numpy() == pytest.approx(here["lipschitz"].to_numpy(), rel=2e-4)
