"""growth against maps whose constant is known at every length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import ArgumentError
from tests._cases import tokens


class Growing(nn.Module):
    """x ↦ c √n x, with another c for the second of two sequences."""

    def forward(self, x: Tensor) -> Tensor:
        c = 1.0 if x.ndim == 2 else torch.tensor([1.0, 1.1], dtype=x.dtype)[:, None, None]
        return c * math.sqrt(x.shape[-2]) * x


def test_the_constants_and_the_exponent_of_a_known_growth() -> None:
    found = hs.growth(Growing(), [tokens(n, n, 3) for n in (4, 8, 16)])
    assert found.exponent.slope == pytest.approx(0.5, abs=1e-9)
    assert found.exponent.low <= 0.5 <= found.exponent.high
    for n, row in zip((4, 8, 16), found.table.to_dict("records"), strict=True):
        assert row["n"] == n
        assert row["lower"] <= math.sqrt(n) <= row["upper"]


def test_batches_are_several_sequences_and_the_fit_is_that_of_a_study() -> None:
    found = hs.growth(Growing(), [tokens(n, 2, n, 3) for n in (4, 8, 16)])
    n, c = np.array([4, 4, 8, 8, 16, 16]), np.tile([1.0, 1.1], 3)
    assert found.table["n"].tolist() == n.tolist()
    wanted = hs.fit_exponent(n, c * np.sqrt(n))
    ends = [(one.slope, one.low, one.high) for one in (found.exponent, wanted)]
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)
    assert wanted.low < 0.49


def test_the_worst_case_grows_like_the_root() -> None:
    unit = torch.eye(3, dtype=torch.float64)[None]
    f = hs.SelfAttention(unit, unit, unit, scale=1.0)
    xs = [hs.adversarial.heavy_token(f, n, 12.0).x for n in (16, 64, 256)]
    assert hs.growth(f, xs).exponent.slope == pytest.approx(0.5, abs=1e-6)


def test_constants_that_did_not_converge_are_left_out() -> None:
    f = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True).double().eval()
    found = hs.growth(f, [tokens(n, n, 8) for n in (2, 4, 6)], max_iterations=1)
    assert found.exponent.left_out == 3
    assert "no exponent: fewer than 3 lengths to fit, 3 left out (3 not converged: take float64" in repr(
        found
    )
    assert "3 left out" in found.citation


def test_constants_of_zero_are_left_out_and_a_lambda_has_a_name() -> None:
    found = hs.growth(lambda x: 0 * x, [tokens(n, n, 3) for n in (4, 8, 16)])
    assert "3 left out (3 of value 0); a lambda function;" in repr(found)
    assert "a lambda function &  &  &  & 0 &  &  & 3" in str(found.to_latex())
    assert hs.influence(lambda x: 2 * x, tokens(0, 2, 3)).scope == "a lambda function"


@pytest.mark.parametrize("name", ["max_iteration", "batch_dims"])
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: expected no option but rtol, confidence, max_iter"):
        hs.growth(Growing(), [tokens(0, 4, 3)], **{name: 1})


def test_files_and_a_row_in_latex(tmp_path: Path) -> None:
    found = hs.growth(Growing(), [tokens(n, n, 3) for n in (4, 8, 16)])
    assert {path.suffix for path in found.write(tmp_path)} == {".html", ".png", ".pdf", ".csv"}
    latex = found.to_latex()
    assert latex is not None
    assert "Growing & 0.5 & 0.499999 & 0.500001 & 3 & 4 & 16 & 0" in latex
    assert latex.startswith(f"% {found.citation}\n")
    (axis,) = found.plot().axes
    assert [len(np.asarray(line.get_xdata())) for line in axis.lines] == [2]


@pytest.mark.parametrize("wrong", [[], [torch.ones(3)], torch.ones(5, 4, 8), None, ["a"], [[[1.0]]], "text"])
def test_inputs_that_are_no_sequences_are_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="inputs: expected a list of tensors"):
        hs.growth(Growing(), wrong)
