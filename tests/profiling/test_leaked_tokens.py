"""Influence.leaks against dense float64 Jacobians, whose blocks under a mask are exactly zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import ArgumentError
from tests._cases import CASES, random_attention, tokens
from tests._tiny_models import tiny
from tests.profiling.test_token_influence import dense_blocks

DOCUMENTS = [0, 0, 0, 1, 1, None]
NUMBER = torch.tensor([0, 0, 0, 1, 1, -1])
CAUSAL = torch.ones(6, 6).tril().bool()
PACKED = CAUSAL & (NUMBER[:, None] == NUMBER)


def two_layers(allowed: Tensor, hidden: float = -torch.inf) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 9, batch_first=True, dropout=0.0)
    whole = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    mask = torch.zeros(6, 6, dtype=torch.float64).masked_fill(~allowed, hidden)

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = whole(x[None], mask=mask)[0]
            return y

    return Masked()


def test_a_right_mask_has_no_leak_and_a_wrong_one_is_named() -> None:
    x = tokens(0, 6, 6)
    right, wrong = (hs.influence(two_layers(mask), x).leaks(DOCUMENTS) for mask in (PACKED, CAUSAL))
    assert not right
    assert not dense_blocks(two_layers(PACKED), x)[~PACKED].any()
    assert right.checked == wrong.checked == 21
    right.raise_if_any()
    truth = torch.linalg.matrix_norm(dense_blocks(two_layers(CAUSAL), x).detach(), 2)
    assert {(i, j) for i, j in zip(wrong.table["output"], wrong.table["input"], strict=True)} == {
        (i, j) for i in (3, 4) for j in (0, 1, 2)
    }
    for row in wrong.table.to_dict("records"):
        assert row["lower"] <= float(truth[row["output"], row["input"]]) <= row["upper"]
        assert row["from"] == "document"
    assert wrong.table["value"].is_monotonic_decreasing
    with pytest.raises(AssertionError, match="6 leaks of 21 influences"):
        wrong.raise_if_any()


def test_a_faint_leak_is_a_leak() -> None:
    """A mask of −60 instead of −∞ leaves weights of about 1e-26, which no tolerance would show."""
    found = hs.influence(two_layers(PACKED, -60.0), tokens(0, 6, 6)).leaks(DOCUMENTS)
    assert len(found.table) == found.checked == 21
    assert set(found.table["from"]) == {"document", "padding", "future"}
    assert 0 < found.table["value"].max() < 1e-20


def test_composed_maps_in_closed_form() -> None:
    both = hs.Compose(random_attention(1, causal=True), random_attention(2, causal=True))
    for f in (CASES["causal window, grouped"](6), both):
        assert not hs.influence(f, tokens(0, 6, 6)).leaks()
    found = hs.influence(CASES["multi-head"](6), tokens(0, 6, 6), outputs=[-1, 0]).leaks()
    assert found.table[["output", "from"]].to_numpy().tolist() == [[0, "future"]] * 5


@pytest.mark.parametrize("mask", [PACKED, CAUSAL])
def test_positions_that_are_not_reset_are_no_leak(mask: Tensor) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 0]])
    added = torch.zeros(6, 6).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    found = hs.influence(tiny("llama"), {"input_ids": ids, "attention_mask": added}).leaks(DOCUMENTS)
    assert bool(found) == (mask is CAUSAL)


@pytest.mark.parametrize("attended", [False, True])
def test_padding_of_a_model(attended: bool) -> None:
    ids, mask = torch.tensor([[5, 6, 7, 8, 0, 0]]), torch.tensor([[1, 1, 1, 1, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(mask) if attended else mask}
    found = hs.influence(tiny("bert"), batch).leaks(torch.tensor([[0, 0, 0, 0, -1, -1]]), causal=False)
    assert len(found.table) == (8 if attended else 0)
    assert found.checked == 8
    assert set(found.table["from"]) == ({"padding"} if attended else set())


def test_documents_that_do_not_fit_are_refused() -> None:
    f, x = random_attention(0), tokens(0, 4, 6)
    found = hs.influence(f, x)
    for wrong, said in (
        ([0, 1], "shape .2,"),
        ([0.5] * 4, "float"),
        ([True] * 4, "bool"),
        ([0] * 4, "neither"),
    ):
        with pytest.raises(ArgumentError, match=said):
            found.leaks(wrong, causal=False)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="documents: expected 4 whole numbers or None, got 3"):
        found.leaks(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="causal: expected True or False"):
        found.leaks(causal="x")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="one alone cannot leak"):
        hs.influence(f, x[:1]).leaks()
    with pytest.raises(ArgumentError, match="an output for each token"):
        hs.influence(lambda x: f(x)[-1], x).leaks()
