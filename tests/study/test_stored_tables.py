"""hs.read: the rows of a store as tables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import howsmooth as hs
from howsmooth.cli import main
from howsmooth.errors import StoreError


def test_every_table_of_a_study_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = [
        "builtin-encoder",
        "--lengths",
        "4,8",
        "--samples",
        "2",
        "--layers",
        "0",
        "--out",
        str(folder),
    ]
    assert main(["measure", *arguments, "--bounds", "none", "--quiet"]) == 0
    tables = hs.read(str(folder))
    assert list(tables["measurements"]["n"].value_counts()) == [2, 2]
    assert (tables["measurements"]["lower"] <= tables["measurements"]["upper"]).all()
    assert tables["models"]["stored"].to_list() == ["float16"]
    assert tables["measurements"]["dtype"].unique() == ["float32"]
    assert "attacks" not in tables
    assert set(hs.read(os.fsdecode(folder))) == set(tables)
    assert "Weights stored in float16, measured in float32" in (folder / "report.html").read_text()


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="--out"):
        hs.read(tmp_path)
    assert list(tmp_path.iterdir()) == []
