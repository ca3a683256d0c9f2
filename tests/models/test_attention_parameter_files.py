"""Parameter files: what is written comes back, and what is wrong is said in one sentence."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import ArgumentError, ModelError
from howsmooth.models.attention_parameter_files import (
    is_parameter_file,
    read_parameter_file,
    save_parameters,
)
from tests._cases import CASES, D, random_attention, tokens

ATTENTIONS = [name for name, f in CASES.items() if isinstance(f(5), hs.SelfAttention)]


def write(path: Path, **tensors: Tensor) -> Path:
    """Write tensors as they are, without the checks of save_parameters."""
    if path.suffix == ".npz":
        np.savez(path, **{name: t.numpy() for name, t in tensors.items()})
    else:
        save_file({name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}, path)
    return path


@pytest.fixture(params=[".safetensors", ".npz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"attention{request.param}"


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_attention_comes_back_the_same(path: Path, name: str) -> None:
    attention = CASES[name](5)
    assert isinstance(attention, hs.SelfAttention)
    x = tokens(0, 5, D)
    save_parameters(path, attention, x)
    found = read_parameter_file(path)
    assert found.x is not None
    assert torch.equal(found.x, x)
    assert found.attention.describe() == attention.describe()
    assert found.attention.scale == attention.scale
    for part in ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias", "output_bias"):
        before, after = getattr(attention, part), getattr(found.attention, part)
        assert (after is None) if before is None else torch.equal(after, before)
    # Not to the last bit: a sum may depend on where its numbers lie in memory.
    assert torch.allclose(found.attention(x), attention(x), rtol=1e-12)


def test_single_precision_stays_single_and_precise_tokens_take_the_parameters_along(path: Path) -> None:
    attention = random_attention(0, dtype=torch.float32, scale=1 / 3)
    save_parameters(path, attention)
    loaded = read_parameter_file(path).attention
    assert loaded.dtype == torch.float32
    assert loaded.scale == 1 / 3  # not rounded to the precision of the rest
    x = tokens(1, 4, D)
    save_parameters(path, attention, x)
    found = read_parameter_file(path)
    assert found.attention.dtype == torch.float64
    assert found.x is not None
    assert torch.equal(found.x, x)
    assert torch.equal(found.attention.query, attention.query.double())


def test_the_matrices_of_the_paper(path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    A, V = (torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    b = torch.randn(4, generator=generator, dtype=torch.float64)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    f = read_parameter_file(write(path, A=A, V=V, b=b)).attention
    scores = (x @ A.mT + b) @ x.mT
    assert torch.allclose(f(x), scores.softmax(dim=-1) @ x @ V.mT, rtol=1e-13)
    assert not f.causal
    causal = read_parameter_file(write(path, A=A, V=V, b=b, causal=torch.tensor(True))).attention
    seen = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    assert torch.allclose(causal(x), seen.softmax(dim=-1) @ x @ V.mT, rtol=1e-13)


def test_several_heads_of_the_paper(path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    A = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64)
    V = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    W = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    f = read_parameter_file(write(path, A=A, V=V, W=W)).attention
    wanted = sum(
        (x @ A[h].mT @ x.mT).softmax(dim=-1) @ x @ V[h].mT @ W[:, 2 * h : 2 * h + 2].mT for h in range(3)
    )
    assert torch.allclose(f(x), wanted, rtol=1e-12)


def test_one_head_may_be_written_as_matrices(path: Path) -> None:
    full = random_attention(5, heads=1, d_out=None)
    assert full.query_bias is not None
    found = read_parameter_file(
        write(path, query=full.query[0], key=full.key[0], value=full.value[0], query_bias=full.query_bias[0])
    ).attention
    other = hs.SelfAttention(full.query, full.key, full.value, query_bias=full.query_bias)
    x = tokens(2, 5, D)
    assert torch.equal(found(x), other(x))


def test_whole_and_half_precise_numbers_are_taken_exactly(tmp_path: Path) -> None:
    f = read_parameter_file(
        write(tmp_path / "whole.npz", A=torch.tensor([[2, 1], [0, 3]]), V=torch.eye(2))
    ).attention
    assert f.dtype == torch.float64
    assert torch.equal(f.query[0], torch.tensor([[2.0, 1.0], [0.0, 3.0]], dtype=torch.float64))
    half = torch.tensor([[0.1, 1.0], [0.0, 3.0]], dtype=torch.bfloat16)
    f = read_parameter_file(write(tmp_path / "half.safetensors", A=half, V=torch.eye(2))).attention
    assert torch.equal(f.query[0], half.float())
    assert f.dtype == torch.float32


def test_the_other_byte_order_is_read(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "big.npz", A=np.arange(4.0).reshape(2, 2).astype(">f8"), V=np.asfortranarray(np.eye(2))
    )
    assert torch.equal(
        read_parameter_file(tmp_path / "big.npz").attention.query[0],
        torch.arange(4.0, dtype=torch.float64).reshape(2, 2),
    )


EYE = torch.eye(3)
NAN = torch.full((3, 3), torch.nan)
Q = torch.ones(2, 4, 3)
REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "missing name": ({"query": Q, "key": Q}, "value: expected the tensors query, key and value, or A and V"),
    "only A": ({"A": EYE}, "V: expected the tensors query, key and value, or A and V, got a file with A."),
    "W of another width": (
        {"A": EYE, "V": EYE, "W": torch.ones(2, 2)},
        "W: expected a floating-point tensor",
    ),
    "forms mixed": ({"A": EYE, "V": EYE, "query": Q}, "query: expected names among A, V, b, W, causal, X"),
    "unknown name": ({"A": EYE, "V": EYE, "B": EYE}, "B: expected names among A, V, b, W, causal, X"),
    "A not square": (
        {"A": torch.ones(2, 3), "V": EYE},
        "A: expected a square matrix (d, d), or (heads, d, d)",
    ),
    "V of another d": ({"A": EYE, "V": torch.eye(2)}, "V: expected shape (d_v, 3), got shape (2, 2)"),
    "V of other heads": (
        {"A": EYE.expand(2, 3, 3), "V": EYE},
        "V: expected shape (2, d_v, 3), got shape (3, 3)",
    ),
    "b of another d": (
        {"A": EYE, "V": EYE, "b": torch.ones(2)},
        "b: expected a floating-point tensor of shape (1, 3), got shape (1, 2)",
    ),
    "NaN": ({"A": NAN, "V": EYE}, "A: expected finite numbers, got NaN or infinity"),
    "shape of key": (
        {"query": Q, "key": Q[:, :2], "value": Q},
        "key: expected a floating-point tensor of shape",
    ),
    "complex": ({"A": EYE.to(torch.complex64), "V": EYE}, "complex64"),
    "two scales": ({"query": Q, "key": Q, "value": Q, "scale": torch.ones(2)}, "scale: expected one number"),
    "causal = 2": ({"A": EYE, "V": EYE, "causal": torch.tensor(2)}, "causal: expected true or false"),
    "mask of numbers": ({"query": Q, "key": Q, "value": Q, "mask": EYE}, "mask: expected a boolean tensor"),
    "half rotary": (
        {"query": Q, "key": Q, "value": Q, "rotary_cos": EYE},
        "rotary_cos together with rotary_sin",
    ),
    "half norm": (
        {"query": Q, "key": Q, "value": Q, "key_norm_eps": EYE[0, :1]},
        "key_norm_weight together with",
    ),
    "shift of RMSNorm": (
        {"query": Q, "key": Q, "value": Q, "query_norm_weight": EYE[0], "query_norm_bias": EYE[0]}
        | {"query_norm_eps": EYE[0, :1]},
        "query_norm_bias: expected a norm with query_norm_centred = 1",
    ),
    "tokens of another d": ({"A": EYE, "V": EYE, "X": torch.ones(4, 2)}, "X: expected tokens (n, 3)"),
    "tokens with NaN": ({"A": EYE, "V": EYE, "X": NAN}, "X: expected finite numbers"),
    "no tensors": ({}, "got a file with none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_attention_is_refused_by_name(path: Path, case: str) -> None:
    tensors, sentence = REFUSED[case]
    write(path, **{name: t.contiguous() for name, t in tensors.items()})
    with pytest.raises(ModelError) as caught:
        read_parameter_file(path)
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)


def pickled(path: Path) -> None:
    np.savez(path, A=np.array([{"a": 1}], dtype=object), V=np.eye(3))


def bare_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"A": 1}))


def one_array(path: Path) -> None:
    written = io.BytesIO()
    np.save(written, np.eye(3))
    path.write_bytes(written.getvalue())


def cut_short(path: Path) -> None:
    save_parameters(path, random_attention(0))
    path.write_bytes(path.read_bytes()[:300])


def words(path: Path) -> None:
    np.savez(path, A=np.array([["a", "b"]]), V=np.eye(3))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("make", "ending", "sentence"),
    [
        (pickled, ".npz", "A is a pickled object, which is never read"),
        (bare_pickle, ".npz", "no archive as numpy.savez writes it"),
        (one_array, ".npz", "no archive as numpy.savez writes it"),
        (cut_short, ".npz", "no archive as numpy.savez writes it"),
        (words, ".npz", "where float32 or float64 numbers are needed"),
        (empty, ".npz", "cannot be read"),
        (cut_short, ".safetensors", "cannot be read"),
        (empty, ".safetensors", "cannot be read"),
        (bare_pickle, ".pt", "Pickled formats are never read"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, make: Callable[[Path], None], ending: str, sentence: str
) -> None:
    path = tmp_path / f"attention{ending}"
    make(path)
    with pytest.raises(ModelError, match=sentence):
        read_parameter_file(path)


def test_a_file_that_is_not_there(path: Path) -> None:
    with pytest.raises(ModelError, match="There is no parameter file"):
        read_parameter_file(path)


def test_names_of_files_and_of_models(tmp_path: Path) -> None:
    assert is_parameter_file("head.npz")
    assert is_parameter_file(tmp_path / "head.safetensors")
    assert not is_parameter_file("gpt2")
    folder = tmp_path / "model.npz"
    folder.mkdir()
    assert not is_parameter_file(folder)


def test_saving_refuses_other_endings_and_tokens_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"ends in \.safetensors or \.npz"):
        save_parameters(tmp_path / "attention.pt", random_attention(0))
    with pytest.raises(ArgumentError, match="X: expected tokens"):
        save_parameters(tmp_path / "attention.npz", random_attention(0), torch.ones(3, D + 1))
    assert list(tmp_path.iterdir()) == []


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"):
        save_parameters(tmp_path / "file" / "attention.npz", random_attention(0))
