"""One small study of stand-ins, carried out once, that many tests read and none changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from howsmooth.study.measurement_outputs import Outputs, write_outputs
from tests._study import Heard, contents_of, make_plan, make_tools, rows_of, run


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Its plan, folder, rows and contents, and what was asked of the stand-ins and told."""
    folder, heard = tmp_path_factory.mktemp("study"), Heard()
    plan, (tools, work) = make_plan(scopes=("attention", "head")), make_tools()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("howsmooth.study.runner._BETWEEN_TELLING", 0.0)
        outcome = run(plan, folder, tools, command="howsmooth measure small", listener=heard)
    return SimpleNamespace(
        plan=plan, folder=folder, outcome=outcome, work=work, heard=heard, rows=rows_of(folder),
        contents=contents_of(folder),
    )  # fmt: skip


@pytest.fixture(scope="session")
def published(study: SimpleNamespace) -> Outputs:
    return write_outputs(study.folder, figures="all")
