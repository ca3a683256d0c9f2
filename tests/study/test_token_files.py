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


def saved(folder: Path, values: Any, kind: str = "tokens") -> TokenStream:
    np.save(folder / "ids.npy", values, allow_pickle=True)
    return load_tokens(folder / "ids.npy", kind)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, ">i4", np.uint64])
def test_ids_of_a_file(tmp_path: Path, dtype: Any) -> None:
    one = saved(tmp_path, np.array([[5, 6, 7], [8, 9, 10]], dtype=dtype))
    assert one.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert one.tokens.dtype == torch.int64
    assert (one.name, one.lengths) == ("ids", (3, 3))
    flat = saved(tmp_path, np.array([5, 6, 7, 8, 9, 10], dtype=dtype))
    assert flat.lengths == (6,)
    assert flat.digest != one.digest


def test_embedded_tokens_of_a_file(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 6)
    found = saved(tmp_path, x, "embeddings")
    assert found.lengths == (3, 3)
    assert torch.equal(found.tokens, x.reshape(6, 6))
    assert torch.equal(saved(tmp_path, x.numpy().astype(">f4"), "embeddings").tokens, found.tokens)
    assert saved(tmp_path, np.asfortranarray(x[0]), "embeddings").lengths == (3,)
    assert saved(tmp_path, x + 1e-6, "embeddings").digest != found.digest


BAD: list[tuple[str, Any, str]] = [
    ("tokens", np.array([1, -2]), "whole numbers of at least 0, got -2"),
    ("tokens", np.array([2**63], dtype=np.uint64), "whole numbers"),
    ("tokens", np.array([1.0, 2.0]), "an integer array .* got float64"),
    ("tokens", np.zeros((2, 2, 2), int), "shape"),
    ("tokens", np.array([], int), "shape"),
    ("tokens", np.array([True]), "got bool"),
    ("tokens", np.array(["1"]), "got <U1"),
    ("tokens", np.array([{}], dtype=object), "expected a .npy file"),
    ("tokens", b"text", "expected a .npy file"),
    ("tokens", None, "expected a .npy file"),
    ("embeddings", np.zeros(3), "shape"),
    ("embeddings", np.zeros((0, 3)), "shape"),
    ("embeddings", np.zeros((2, 2, 2, 2)), "shape"),
    ("embeddings", np.zeros((2, 3), int), "int64"),
    ("embeddings", np.zeros((2, 3), np.float16), "float16"),
    ("embeddings", np.full((2, 3), np.nan), "NaN"),
    ("embeddings", np.full((2, 3), np.inf), "infinity"),
]


@pytest.mark.parametrize(("kind", "content", "words"), BAD)
def test_what_holds_no_tokens_is_refused(tmp_path: Path, kind: str, content: Any, words: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / "ids.npy").write_bytes(content)
    elif content is not None:
        np.save(tmp_path / "ids.npy", content, allow_pickle=True)
    with pytest.raises(ArgumentError, match=words) as error:
        load_tokens(tmp_path / "ids.npy", kind)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_stream_must_fit_the_model(tmp_path: Path) -> None:
    loaded = load_model("builtin-encoder")
    assert loaded.vocab_size is not None
    with pytest.raises(ArgumentError, match=f"id {loaded.vocab_size}"):
        file_feed(saved(tmp_path, [1, loaded.vocab_size]), loaded)
    feed = file_feed(saved(tmp_path, [[1, 2, 3], [4, 5, 6]]), loaded)
    assert isinstance(given := feed.inputs([0, 3], 3), torch.Tensor)
    assert given.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert len(feed.words(0, 3)) == 3
    with pytest.raises(ArgumentError, match="dimension 256"):
        file_feed(saved(tmp_path, torch.randn(5, 8), "embeddings"), loaded)
    stream = saved(tmp_path, torch.randn(9, 256).double(), "embeddings")
    given = file_feed(stream, loaded).inputs([0, 5], 4)
    assert isinstance(given, dict)
    assert given["inputs_embeds"].dtype == torch.float32
    assert [tuple(site.x.shape) for site in hs.capture(loaded, given, layers=[0])] == [(2, 4, 256)]
    encoder = load_model("builtin-encoder", part="encoder")
    assert (encoder.modality, encoder.layers, encoder.heads) == ("embeddings", 4, 8)
    with pytest.raises(ModelError, match="not token ids"):
        file_feed(saved(tmp_path, [1, 2]), encoder)
    assert isinstance(file_feed(stream, encoder).inputs([0], 4), torch.Tensor)
