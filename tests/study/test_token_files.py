"""Token ids and embedded tokens from files: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import howsmooth as hs
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.models import load_model
from howsmooth.study.input_sequences import file_feed
from howsmooth.study.token_files import TokenStream, load_tokens


def ids(folder: Path, values: Any) -> TokenStream:
    np.save(folder / "ids.npy", values)
    return load_tokens(folder / "ids.npy", "tokens")


def embedded(folder: Path, values: Any) -> TokenStream:
    np.save(folder / "x.npy", values)
    return load_tokens(folder / "x.npy", "embeddings")


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, ">i4", np.uint64])
def test_ids_of_a_file(tmp_path: Path, dtype: Any) -> None:
    one = ids(tmp_path, np.array([[5, 6, 7], [8, 9, 10]], dtype=dtype))
    assert one.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert one.tokens.dtype == torch.int64
    assert (one.name, one.lengths) == ("ids", (3, 3))
    flat = ids(tmp_path, np.array([5, 6, 7, 8, 9, 10], dtype=dtype))
    assert flat.lengths == (6,)
    assert flat.digest != one.digest


NO_IDS = {
    "negative": np.array([1, -2]),
    "huge": np.array([2**63], dtype=np.uint64),
    "floats": np.array([1.0, 2.0]),
    "deep": np.zeros((2, 2, 2), int),
    "no numbers": np.array([], int),
    "bools": np.array([True]),
    "words": np.array(["1"]),
}


@pytest.mark.parametrize(
    "kind", [*NO_IDS, "objects", "damaged header", "no array", "text file", "a folder", "nowhere"]
)
def test_what_holds_no_ids_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.npy"
    if kind in NO_IDS:
        np.save(path, NO_IDS[kind])
    elif kind == "objects":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    elif kind == "damaged header":
        np.save(path, np.arange(3))
        path.write_bytes(path.read_bytes().replace(b"}", b"{"))
    elif kind == "no array":
        path.write_text("text")
    elif kind == "text file":
        path = tmp_path / "x.txt"
        path.write_text("1 2 3")
    elif kind == "a folder":
        path.mkdir()
    with pytest.raises(ArgumentError) as error:
        load_tokens(path, "tokens")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert ("expected a .npy file" in str(error.value)) == (kind not in NO_IDS)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    loaded = load_model("builtin-encoder")
    assert loaded.vocab_size is not None
    with pytest.raises(ArgumentError, match=f"id {loaded.vocab_size}"):
        file_feed(ids(tmp_path, [1, loaded.vocab_size]), loaded)
    feed = file_feed(ids(tmp_path, [[1, 2, 3], [4, 5, 6]]), loaded)
    assert isinstance(given := feed.inputs([0, 3], 3), torch.Tensor)
    assert given.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert len(feed.words(0, 3)) == 3


# ---- embedded tokens


def test_embedded_tokens_of_a_file(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 6)
    found = embedded(tmp_path, x)
    assert found.lengths == (3, 3)
    assert torch.equal(found.tokens, x.reshape(6, 6))
    assert torch.equal(embedded(tmp_path, x.numpy().astype(">f4")).tokens, found.tokens)
    assert embedded(tmp_path, np.asfortranarray(x[0])).lengths == (3,)
    assert embedded(tmp_path, x + 1e-6).digest != found.digest


@pytest.mark.parametrize(
    ("array", "word"),
    [
        (np.zeros(3), "shape"),
        (np.zeros((0, 3)), "shape"),
        (np.zeros((2, 2, 2, 2)), "shape"),
        (np.zeros((2, 3), int), "int64"),
        (np.zeros((2, 3), np.float16), "float16"),
        (np.full((2, 3), np.nan), "NaN"),
        (np.full((2, 3), np.inf), "infinity"),
    ],
)
def test_arrays_that_are_no_embedded_tokens(tmp_path: Path, array: Any, word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        embedded(tmp_path, array)


def test_a_stream_must_fit_the_model(tmp_path: Path) -> None:
    loaded = load_model("builtin-encoder")
    with pytest.raises(ArgumentError, match="dimension 256"):
        file_feed(embedded(tmp_path, torch.randn(5, 8)), loaded)
    feed = file_feed(embedded(tmp_path, torch.randn(9, 256).double()), loaded)
    given = feed.inputs([0, 5], 4)
    assert isinstance(given, dict)
    assert given["inputs_embeds"].dtype == torch.float32
    assert [tuple(site.x.shape) for site in hs.capture(loaded, given, layers=[0])] == [(2, 4, 256)]
    encoder = load_model("builtin-encoder", part="encoder")
    assert (encoder.modality, encoder.layers, encoder.heads) == ("embeddings", 4, 8)
    with pytest.raises(ModelError, match="not token ids"):
        file_feed(ids(tmp_path, [1, 2]), encoder)
    feed = file_feed(embedded(tmp_path, torch.randn(9, 256)), encoder)
    assert isinstance(feed.inputs([0], 4), torch.Tensor)
