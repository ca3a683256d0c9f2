"""The experiments on measures: two Diracs in R, and where √n ends."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from howsmooth.bounds.mean_field_bounds import two_dirac as two_dirac_bound
from howsmooth.paper import crossover as crossover
from howsmooth.paper import two_diracs as two_dirac
from howsmooth.paper.crossover import growth_ends
from howsmooth.paper.figure_definition import choose_figures
from howsmooth.paper.identity_head import identity_head
from howsmooth.paper.two_diracs import BETTER, HALF, OPPOSITE, PAPER_WEIGHT
from tests._figures import asked, dense_norm, measured, quick, shown

TWO_DIRAC, CROSSOVER = choose_figures(["two-dirac", "crossover"])


@pytest.fixture(scope="module")
def diracs(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    with quick():
        return measured(TWO_DIRAC, tmp_path_factory.mktemp("diracs"), asked())


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    with quick():
        return measured(CROSSOVER, tmp_path_factory.mktemp("lengths"), asked())


def dense(gamma: float, points: list[float], weights: list[float]) -> float:
    """‖J‖_a at atoms on the first axis of R⁴, A = γI, V = I, block by block."""
    x, a = np.zeros((2, 4)), np.array(weights)
    x[:, 0] = points
    e = a * np.exp(gamma * x @ x.T)
    p = e / e.sum(axis=1, keepdims=True)
    m = p @ x
    J = np.zeros((2, 4, 2, 4))
    for i in range(2):
        z = x - m[i]
        for j in range(2):
            J[i, :, j] = p[i, j] * (np.eye(4) + np.outer(z[j], gamma * x[i])) * math.sqrt(a[i] / a[j])
        J[i, :, i] += gamma * np.einsum("j,ja,jb->ab", p[i], z, z)
    return float(np.linalg.norm(J.reshape(8, 8), 2))


@pytest.mark.parametrize(("family", "gamma", "ratio"), [(OPPOSITE, -1.0, -1.0), (HALF, 8.0, 0.5)])
def test_two_diracs_are_measured_at_both_weights(
    diracs: pd.DataFrame, family: str, gamma: float, ratio: float
) -> None:
    rows = diracs.copy()
    assert len(rows) == 16
    for radius in (0.8, 1.5):
        light = {PAPER_WEIGHT: math.exp(-2 * radius**2), BETTER: 1 / (1 + 3 * math.exp(2 * radius**2))}
        for weight, p in light.items():
            one = rows[(rows["family"] == family) & (rows["weight"] == weight) & (rows["radius"] == radius)]
            true = dense(gamma, [radius, ratio * radius], [p, 1 - p])
            assert float(one["log_value"].iloc[0]) == pytest.approx(math.log(true), abs=1e-9)
    far = rows[(rows["family"] == family) & (rows["weight"] == BETTER) & (rows["radius"] == 26.5)]
    cluster = "half" if family == HALF else "opposite"
    bound = two_dirac_bound(gamma, 26.5, cluster=cluster).log_value
    assert float(far["log_value"].iloc[0]) == pytest.approx(bound, abs=1e-9)


def test_a_constant_outside_its_bounds_would_be_said(
    diracs: pd.DataFrame, lengths: pd.DataFrame, tmp_path: Path
) -> None:
    finding = shown(TWO_DIRAC, diracs, tmp_path)
    table = finding.tables[0][1]
    far = table[table["radius"] == 26.5].set_index(["family", "weight"])["ratio"]
    assert far[OPPOSITE, PAPER_WEIGHT] == pytest.approx(1.0, abs=2e-3)
    assert far[OPPOSITE, BETTER] == pytest.approx(3 * math.sqrt(3) / 4, abs=2e-3)
    assert "Of 16 measurements 0 did not converge, 0 are above" in finding.seen[-1]
    rows = diracs.copy()
    rows.loc[0, "log_value"] = rows.loc[0, "log_paper"] - 0.1
    rows.loc[1, "log_value"] = rows.loc[1, "log_free"] + 0.1
    words = two_dirac.result_sentences(rows)[-1]
    assert "1 are above howsmooth's bound for every n, and 1 below the proposition's lower bound" in words
    finding = shown(CROSSOVER, lengths, tmp_path)
    table = finding.tables[0][1]
    assert table["expected"].tolist() == pytest.approx([4, 20, 40])
    assert (table["at"] - table["expected"]).abs().max() <= 0.5
    assert table["exponent"].tolist()[1:] == pytest.approx([0.5, 0.5], abs=0.03)
    assert ((table["free"] > 1) & (table["free"] < 15)).all()
    assert "0 are outside" in finding.seen[-1]
    rows = lengths.copy()
    rows.loc[0, "log_value"] = rows.loc[0, "log_free"] + 0.1
    assert "1 are outside" in crossover.result_sentences(rows, growth_ends(rows))[-1]


def test_a_measure_of_weights_1_over_n_is_n_tokens(lengths: pd.DataFrame) -> None:
    rows = lengths.copy()
    assert len(rows) == 3 * 13
    for power in (4, 20):
        row = rows[(rows["power"] == power) & (rows["log_n"] == math.log(10))].iloc[0]
        radius = math.sqrt(power * math.log(10) / 2)
        x = torch.zeros(10, 2, dtype=torch.float64)
        x[:, 0], x[0, 0] = -radius, radius
        true = math.log(dense_norm(identity_head(-1.0, 2), x))
        assert row["log_value"] == pytest.approx(true, abs=1e-9)
        assert row["log_tokens"] == pytest.approx(true, abs=1e-9)
    assert (rows["log_value"] >= rows["log_formula"] - 1e-9).all()
    assert (rows["log_value"] <= rows["log_sharp"] + 1e-9).all()


def test_the_turning_point_is_the_largest_value() -> None:
    log_n = np.log(10.0) * np.arange(1, 9)
    rows = pd.DataFrame(
        {
            "power": 4,
            "g": 2 * math.log(10),
            "log_n": log_n,
            "log_value": np.minimum(0.5 * log_n, 4 * math.log(10) - 0.5 * log_n),
            "log_free": 2.5 * math.log(10),
            "converged": True,
        }
    )
    (row,) = growth_ends(rows).to_dict("records")
    assert row["at"] == pytest.approx(4)
    assert row["largest"] == pytest.approx(2)
    assert row["last"] == pytest.approx(0)
    assert row["free"] == pytest.approx(math.sqrt(10))
