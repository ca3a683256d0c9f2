"""Token ids and embedded tokens from files: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import howsmooth as hs
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.models import load_model
from howsmooth.models.inputs.token_files import load_embeddings, load_token_ids
from howsmooth.models.sequence_datasets import dataset_of
from tests._shared import shared_data


def test_ids_of_every_kind_of_file_are_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[5, 6, 7], [8, 9, 10]]))
    (tmp_path / "a.json").write_text("[[5, 6, 7], [8, 9, 10]]")
    (tmp_path / "a.txt").write_text("5 6\t7\n\n8 9 10\n")
    found = [load_token_ids(tmp_path / f"a.{ending}") for ending in ("npy", "json", "txt")]
    found += [load_token_ids([[5, 6, 7], [8, 9, 10]]), load_token_ids(torch.tensor([[5, 6, 7], [8, 9, 10]]))]
    for one in found:
        assert one.tokens.tolist() == [5, 6, 7, 8, 9, 10]
        assert one.tokens.dtype == torch.int64
        assert one.parts == ((0, 3), (3, 3))
        assert one.digest == found[0].digest
    assert load_token_ids([5, 6, 7, 8, 9, 10]).parts == ((0, 6),)
    assert load_token_ids([5, 6, 7, 8, 9, 10]).digest != found[0].digest


def write(folder: Path, kind: str) -> Path:
    contents = {
        "floats": ("json", "[1.0, 2.0]"),
        "negative": ("json", "[1, -2]"),
        "true": ("json", "[true]"),
        "huge": ("json", "[99999999999999999999]"),
        "a table": ("json", '{"ids": [1]}'),
        "a word": ("json", '"12"'),
        "mixed": ("json", "[1, [2]]"),
        "deep": ("json", "[" * 5000),
        "no json": ("json", "[1,"),
        "words": ("txt", "It was the best of times"),
        "signs": ("txt", "1 +2"),
        "other digits": ("txt", "1 ٢"),
        "nothing": ("txt", "\n \n"),
        "empty list": ("json", "[]"),
    }
    if kind in contents:
        ending, words = contents[kind]
        (folder / f"x.{ending}").write_text(words)
        return folder / f"x.{ending}"
    path = folder / "x.npy"
    arrays = {
        "float array": np.array([1.0, 2.0]),
        "deep array": np.zeros((2, 2, 2), int),
        "no numbers": np.array([], int),
        "bools": np.array([True]),
    }
    if kind in arrays:
        np.save(path, arrays[kind])
    elif kind == "damaged header":
        np.save(path, np.arange(3))
        path.write_bytes(path.read_bytes().replace(b"}", b"{"))
    elif kind == "no array":
        path.write_text("text")
    elif kind == "bytes":
        path = folder / "x.txt"
        path.write_bytes(b"\xff\xfe\x00")
    elif kind == "a folder":
        return folder
    return path


NO_IDS = [
    "floats", "negative", "true", "huge", "a table", "a word", "mixed", "deep", "no json", "words", "signs",
    "other digits", "nothing", "empty list", "float array", "deep array", "no numbers", "bools", "no array",
    "bytes", "a folder", "nowhere", "damaged header",
]  # fmt: skip


@pytest.mark.parametrize("kind", NO_IDS)
def test_what_holds_no_ids_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ArgumentError) as error:
        load_token_ids(write(tmp_path, kind))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    loaded = load_model("builtin-encoder")
    assert loaded.vocab_size is not None
    with pytest.raises(ArgumentError, match=f"id {loaded.vocab_size}"):
        dataset_of(load_token_ids([1, loaded.vocab_size]), loaded)
    feed = dataset_of(load_token_ids([[1, 2, 3], [4, 5, 6]]), loaded)
    assert isinstance(given := feed.inputs([0, 3], 3), torch.Tensor)
    assert given.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert len(feed.words(0, 3)) == 3


# ---- embedded tokens


def test_embedded_tokens_of_a_file(tmp_path: Path) -> None:
    a, b = torch.randn(4, 6), torch.randn(2, 3, 6)
    save_file({"z": a, "b": b}, tmp_path / "a.safetensors")
    found = load_embeddings(tmp_path / "a.safetensors")
    assert found.lengths == (3, 3, 4)
    assert torch.equal(found.tokens, torch.cat([b[0], b[1], a]))
    assert load_embeddings(a).digest != load_embeddings(a + 1e-6).digest


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({}, "none"),
        ({"a": torch.zeros(3)}, "shape"),
        ({"a": torch.zeros(0, 3)}, "shape"),
        ({"a": torch.zeros(2, 2, 2, 2)}, "shape"),
        ({"a": torch.zeros(2, 3, dtype=torch.int64)}, "int64"),
        ({"a": torch.zeros(2, 3, dtype=torch.float16)}, "float16"),
        ({"a": torch.full((2, 3), float("nan"))}, "NaN"),
        ({"a": torch.full((2, 3), float("inf"))}, "infinity"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}, "one dimension"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3).double()}, "one dtype"),
    ],
)
def test_tensors_that_are_no_embedded_tokens(tmp_path: Path, tensors: Any, word: str) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ArgumentError, match=word):
        load_embeddings(tmp_path / "a.safetensors")


@pytest.mark.parametrize("content", [b"", b"text", json.dumps({"a": 1}).encode() * 20, None])
def test_files_that_are_no_safetensors(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"a \.npy or \.safetensors file"):
        load_embeddings(tmp_path / "a.safetensors")


def test_a_stream_must_fit_the_model() -> None:
    loaded = load_model("builtin-encoder")
    with pytest.raises(ArgumentError, match="dimension 256"):
        dataset_of(load_embeddings(torch.randn(5, 8)), loaded)
    feed = dataset_of(load_embeddings(torch.randn(9, 256).double()), loaded)
    given = feed.inputs([0, 5], 4)
    assert isinstance(given, dict)
    assert given["inputs_embeds"].dtype == torch.float32
    assert [tuple(site.x.shape) for site in hs.capture(loaded, given, layers=[0])] == [(2, 4, 256)]
    encoder = load_model("builtin-encoder", part="encoder")
    assert (encoder.modality, encoder.layers, encoder.heads) == ("embeddings", 4, 8)
    with pytest.raises(ModelError, match="not token ids"):
        dataset_of(load_token_ids([1, 2]), encoder)
    assert isinstance(dataset_of(load_embeddings(torch.randn(9, 256)), encoder).inputs([0], 4), torch.Tensor)


def test_trained_bert_is_fed_embedded_sentences_through_its_encoder() -> None:
    folder = shared_data("bert_tiny_sst2_encoder")
    loaded = load_model(folder, part="encoder", dtype=torch.float64)
    stream = load_embeddings(folder / "sequences.safetensors")
    feed = dataset_of(stream, loaded)
    start, n = stream.parts[0][0], 6
    given = feed.inputs([start], n)
    assert isinstance(given, torch.Tensor)
    sites = hs.capture(loaded, given)
    assert torch.equal(sites[0].x[0], stream.tokens[:n].double())
    site = sites[0]
    dense = torch.autograd.functional.jacobian(lambda x: site.map(x), site.x[0], vectorize=True)
    exact = torch.linalg.matrix_norm(dense.reshape(n * 128, n * 128), ord=2)
    torch.testing.assert_close(hs.local_lipschitz(site.map, site.x[0]).value, exact, rtol=1e-4, atol=0.0)
