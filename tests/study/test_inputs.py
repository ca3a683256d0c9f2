"""Studies on images, token ids and embedded tokens: what is stored, said, continued and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from transformers import SwinConfig, SwinModel, ViTConfig, ViTModel

import howsmooth as hs
from howsmooth.cli import main
from howsmooth.errors import ArgumentError, CaptureError, HowsmoothError, StoreError
from howsmooth.models import image_inputs, load_model
from howsmooth.models.inputs.image_sources import load_images
from howsmooth.study.image_sequences import ImageFeed
from howsmooth.study.input_sequences import OpenedInput, TokenFeed, arrange, feed_of, sequence_starts
from howsmooth.study.measurement_outputs import write_outputs
from howsmooth.study.measurement_run import run
from howsmooth.study.plans import InputSpec, ModelSpec, Plan
from howsmooth.study.records import TextRecord
from howsmooth.texts import load_text
from tests._study import contents_of, overlapping, rows_of

IMAGES = InputSpec("images", ("builtin",))


@pytest.fixture
def vit(tmp_path: Path) -> str:
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=12,
        patch_size=4, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ViTModel(config).save_pretrained(tmp_path / "vit")
    return str(tmp_path / "vit")


def image_plan(vit: str, **changes: Any) -> Plan:
    plan = Plan((ModelSpec(vit),), samples=2, images=("builtin",), bounds="none")
    return replace(plan, **changes)


def test_a_study_on_images(vit: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    outcome = run(image_plan(vit), folder)
    assert (outcome.made["measurements"], outcome.failed) == (6, 0)
    contents = contents_of(folder)
    rows = contents.measurements
    assert sorted(set(rows["n"])) == [2, 5, 10]  # 1, 4 and 9 patches, and the class token
    assert set(rows["text"]) == {"builtin-images"}
    # Every length has the same images.
    assert rows.groupby("sample")["start"].nunique().tolist() == [1, 1]
    assert contents.texts[["kind", "characters"]].values.tolist() == [["images", 30]]
    # Each number is that of the library at that image.
    loaded = load_model(vit)
    images = image_inputs(loaded)
    row = rows[(rows["n"] == 10) & (rows["sample"] == 1)].iloc[0]
    (site,) = hs.capture(loaded, {"pixel_values": images["pixel_values"][int(row["start"])][None]})
    wanted = hs.local_lipschitz(site.map, site.x, seed=int(row["seed"]))
    assert float(wanted.lower) * (1 - 1e-4) <= row["lipschitz"] <= float(wanted.upper) * (1 + 1e-4)

    page = write_outputs(folder).report.read_text()
    for words in ("images builtin-images", "30 images, SHA-256", "mages of 12 x 12 pixels for 10 tokens"):
        assert words in page
    assert "tokenised" not in page

    before = rows_of(folder)
    again = run(image_plan(vit, samples=3), folder)
    assert (again.made["measurements"], again.kept["measurements"]) == (3, 6)
    assert before < rows_of(folder)


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        ({"lengths": (7,)}, "such as 2, 5, 10, 17"),
        ({"samples": 31}, "30 inputs, fewer than 31 samples"),
        ({"models": ("builtin-encoder",)}, "takes text, not images"),
        ({"images": (), "texts": ()}, "at least one"),
        ({"images": (), "tokens": ("x.safetensors",)}, "expected a .npy file, got 'x.safetensors'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before(
    vit: str, tmp_path: Path, plan: dict[str, Any], word: str
) -> None:
    with pytest.raises(HowsmoothError, match=word):
        run(Plan(**({"models": (vit,), "images": ("builtin",), "samples": 2} | plan)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_image_that_changed_under_its_name_is_noticed(vit: str, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in "ab":
        Image.fromarray(np.full((9, 9, 3), ord(name), np.uint8)).save(folder / f"{name}.png")
    plan = image_plan(vit, images=(str(folder),), lengths=(5,))
    run(plan, tmp_path / "out")
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(folder / "a.png")
    with pytest.raises(StoreError, match="SHA-256"):
        run(plan, tmp_path / "out")


def test_the_length_of_an_image_is_the_number_of_its_patches(vit: str, tmp_path: Path) -> None:
    loaded = load_model(vit)
    assert (loaded.modality, loaded.layers, loaded.heads, loaded.vocab_size) == ("image", 1, 2, None)
    feed = ImageFeed(load_images(), loaded, None)
    assert feed.usual == (2, 5, 10)
    for n in (5, 37):
        sites = hs.capture(loaded, feed.inputs([3, 4], n))
        assert [tuple(site.x.shape) for site in sites] == [(2, n, 8)]
        assert len(feed.words(0, n)) == n
    assert feed.words(0, 5) == ("class", "1,1", "1,2", "2,1", "2,2")
    # A model without other sizes has one length.
    SwinModel(
        SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4)
    ).save_pretrained(tmp_path / "swin")
    loaded = load_model(tmp_path / "swin")
    with pytest.raises(CaptureError, match="64 in layers 0; 16 in layers 1"):
        ImageFeed(load_images(), loaded, None)
    assert max(ImageFeed(load_images(), loaded, [1]).usual) == 16


@pytest.mark.parametrize("seed", range(4))
def test_windows_stay_within_the_sequences_of_a_file_and_apart(seed: int) -> None:
    parts = ((0, 21), (21, 10), (31, 17), (48, 21))
    placed = arrange(69, (4, 9), 4, seed, parts=parts)
    assert len(placed) == 8
    assert not overlapping((start, n) for (n, _), start in placed.items())
    for (n, _), start in placed.items():
        assert any(first <= start and start + n <= first + size for first, size in parts)
    some = {window: placed[window] for window in list(placed)[:3]}
    # An interrupted study goes on as it would have.
    assert arrange(69, (4, 9), 4, seed, some, parts) == placed
    with pytest.raises(ValueError, match="do not fit"):
        arrange(69, (20,), 3, seed, parts=parts)  # 60 tokens, but only two sequences are so long
    feed = TokenFeed(torch.arange(400), ((0, 400),), "")
    assert sequence_starts(feed, (4, 8), 3, seed, {}) == arrange(400, (4, 8), 3, seed)


def test_special_tokens_stand_around_each_sequence_and_count(tmp_path: Path) -> None:
    """Against the tokenizer of the model, which puts them around a text by itself."""
    loaded = load_model("builtin-encoder")
    around = loaded.tokenizer.special_tokens
    assert [loaded.tokenizer.decoded(list(ids)) for ids in around] == [["[CLS]"], ["[SEP]"]]
    words = "The smooth map was measured at words that nobody had read before."
    ids = loaded.tokenizer.encode(words)
    source = OpenedInput(TextRecord("prose", "0", "Made up.", len(words)), content=words)
    plain, special = (feed_of(source, loaded, (0,), special_tokens=on) for on in (False, True))
    assert special.inputs([0], len(ids) + 2).tolist() == [loaded.tokenizer.encode(words, special=True)]
    assert special.inputs([3, 5], 6).tolist() == [[2, *ids[3:7], 3], [2, *ids[5:9], 3]]
    assert special.words(3, 6) == ("[CLS]", *plain.words(3, 4), "[SEP]")
    assert special.place(3) == plain.place(3)
    assert plain.preparation.endswith(", without special tokens")
    assert special.preparation.endswith(", with special tokens: [CLS] before and [SEP] after each sequence")
    without = feed_of(source, load_model("builtin-decoder"), (0,), special_tokens=True)
    assert without.preparation.endswith(", without special tokens, of which it has none")
    assert without.special == 0


def test_a_study_with_special_tokens_is_another_one_and_says_so(tmp_path: Path) -> None:
    plan = Plan(
        ("builtin-encoder",), lengths=(4, 5, 6), samples=2, layers="0", bounds="none", special_tokens=True
    )
    run(plan, tmp_path)
    rows, plain = contents_of(tmp_path), tmp_path / "plain"
    run(replace(plan, special_tokens=False), plain)
    assert rows.measurements["start"].tolist() == contents_of(plain).measurements["start"].tolist()
    assert rows.sensitivities["tokens"][0][0] == "[CLS]"
    loaded, row = load_model("builtin-encoder"), rows.measurements.iloc[0]
    ids = loaded.tokenizer.encode(load_text("alice").content)[row["start"] : row["start"] + 2]
    (site,) = hs.capture(loaded, torch.tensor([[2, *ids, 3]]), layers=[0])
    wanted = hs.local_lipschitz(site.map, site.x, seed=int(row["seed"]))
    assert float(wanted.lower[0]) * (1 - 1e-4) <= row["lipschitz"] <= float(wanted.upper[0]) * (1 + 1e-4)
    assert ", with special tokens)" in hs.read(tmp_path)["exponents"].attrs["howsmooth"]
    page = write_outputs(tmp_path).report.read_text()
    assert "with special tokens: [CLS] before and [SEP] after each sequence" in page
    with pytest.raises(StoreError, match="with --special-tokens True, not its default"):
        run(replace(plan, special_tokens=False), tmp_path)
    with pytest.raises(ArgumentError, match="more than 2 tokens, the special tokens"):
        run(replace(plan, lengths=(2,)), tmp_path / "short")


def test_token_ids_and_embedded_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", [[5, 6, 7, 8], [20, 21, 22, 23]])
    common = ["measure", "builtin-encoder", "--lengths", "4", "--layers", "0", "--bounds", "none", "-q"]
    ids = [*common, "--tokens", "ids.npy", "--samples", "2"]
    assert main([*ids, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"][0]["kind"] == "tokens"
    table = pd.read_csv("howsmooth-out/measurements.csv")
    loaded = load_model("builtin-encoder")
    by_hand = hs.capture(loaded, torch.tensor([[5, 6, 7, 8], [20, 21, 22, 23]]), layers=[0])[0]
    values = hs.local_lipschitz(by_hand.map, by_hand.x).value.tolist()
    assert sorted(table["lipschitz"]) == pytest.approx(sorted(values), rel=1e-3)
    embedded = loaded.model.get_input_embeddings()(torch.tensor([[5, 6, 7, 8]]))  # type: ignore[operator]
    np.save("e.npy", embedded.detach().numpy())
    assert main([*common, "--embeddings", "e.npy", "--samples", "1", "--out", "e"]) == 0
    # The model adds its positions and norm to given embeddings as to its own.
    assert pd.read_csv("e/measurements.csv")["lipschitz"][0] == pytest.approx(values[0], rel=1e-3)
    assert main([*ids, "--as-published", "all", "--out", "p"]) == 2
    assert "the only input that the published code takes" in capsys.readouterr().err
