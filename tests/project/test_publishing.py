"""The files that a code host, Read the Docs and PyPI read, held against their schemas without a network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GITHUB = ROOT / ".github"
FILES = {
    "vendor.github-workflows": [*(GITHUB / "workflows").glob("*.yml")],
    "vendor.github-issue-forms": [
        path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"
    ],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.readthedocs": [ROOT / ".readthedocs.yaml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}
pytestmark = pytest.mark.skipif(not GITHUB.exists(), reason="these files are in a clone, not in the sdist")


def read(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def steps(workflow: str) -> str:
    """Return all commands of a workflow."""
    jobs = read(GITHUB / "workflows" / f"{workflow}.yml")["jobs"].values()
    return "\n".join(step.get("run", "") for job in jobs for step in job["steps"])


@pytest.mark.skipif(not importlib.util.find_spec("check_jsonschema"), reason="check-jsonschema is missing")
@pytest.mark.parametrize("schema", FILES)
def test_files_follow_their_schema(schema: str) -> None:
    assert FILES[schema]
    command = [sys.executable, "-m", "check_jsonschema", "--default-filetype", "yaml"]
    done = subprocess.run(
        [*command, "--builtin-schema", schema, *FILES[schema]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_run_what_a_developer_runs() -> None:
    assert ".ci/run" in steps("tests")
    assert "dev.py test tests" in steps("tests")
    assert "dev.py docs" in steps("docs")
    (hook,) = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert hook["entry"] == "python3 dev.py check"
    assert "dev.py docs" in "\n".join(read(ROOT / ".readthedocs.yaml")["build"]["commands"])


def test_tested_versions_of_python_are_the_declared_ones() -> None:
    matrix = read(GITHUB / "workflows" / "tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: 3."
    declared = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert matrix["python"] == declared
    assert PROJECT["requires-python"] == f">={declared[0]}"
    badge = re.search(r"badge/python-(\S+)-blue", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert badge is not None
    assert badge[1].split("%20%7C%20") == declared


def test_only_the_publishing_job_gets_an_identity() -> None:
    workflow = read(GITHUB / "workflows" / "release.yml")
    assert workflow["permissions"] == {}
    publish = workflow["jobs"].pop("publish")
    assert (publish["environment"], publish["permissions"]) == ("pypi", {"id-token": "write"})
    assert all("id-token" not in job["permissions"] for job in workflow["jobs"].values())


def test_the_day_of_a_version_is_the_same_everywhere() -> None:
    citation = read(ROOT / "CITATION.cff")
    preferred = citation["preferred-citation"]
    for key in ("title", "version", "date-released", "license", "authors"):
        assert preferred[key] == citation[key]
    assert citation["date-released"].year == preferred["year"]
