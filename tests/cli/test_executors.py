"""``--executor`` on the command line, with the models of the package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from howsmooth.cli import main
from tests._study import contents_of, published_of, rows_of

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["builtin-decoder", "--layers", "0", "--lengths", "4,8", "--samples", "2", "--bounds", "none"]


@pytest.mark.slow
def test_processes_give_the_numbers_of_real_models_to_the_last_bit(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'models = ["builtin-decoder", {name = "builtin-encoder", random_init = true}]\n'
        "lengths = [4]\nsamples = 2\n"
        'layers = [0]\nscopes = ["attention", "block"]\nthreads = 1\n'
        'as_published = "all"\nbounds = "all"\n'
    )
    assert main(["measure", "--plan", str(plan), "--out", str(tmp_path / "here"), "--quiet"]) == 0
    words = ["--executor", "processes", "--workers", "2", "--quiet"]
    assert main(["measure", "--plan", str(plan), "--out", str(tmp_path / "there"), *words]) == 0
    assert len(rows_of(tmp_path / "there")) == 2 * 2 * 2
    assert rows_of(tmp_path / "there") == rows_of(tmp_path / "here")
    assert published_of(tmp_path / "there") == published_of(tmp_path / "here")
    bounds, others = (contents_of(tmp_path / name).bounds.drop(columns="run") for name in ("here", "there"))
    order = ["model", "scope", "layer", "n", "name", "side", "quantity", "source"]
    assert not bounds.empty
    assert bounds.sort_values(order, ignore_index=True).equals(others.sort_values(order, ignore_index=True))


def test_a_dry_run_with_workers_tells_the_memory_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dry-run", "--executor", "processes", "--workers", "2", "--out", str(tmp_path / "out")]
    assert main(["measure", *QUICK, *words]) == 0
    assert "for each worker" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "out").exists()


def test_the_wait_for_a_scheduler_is_told_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("howsmooth.study.dask_cluster._PATIENCE", 0.5)
    words = ["--executor", "dask", "--scheduler", "tcp://127.0.0.1:9", "--workers", "3"]
    assert main(["measure", *QUICK, "--out", str(tmp_path / "out"), *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("Waiting for 3 Dask workers at tcp://127.0.0.1:9\nerror: no Dask scheduler")


def test_without_dask_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "howsmooth.study.dask_cluster", raising=False)
    monkeypatch.setitem(sys.modules, "distributed", None)
    words = ["--executor", "dask", "--scheduler", "tcp://127.0.0.1:9"]
    assert main(["measure", *QUICK, "--out", str(tmp_path / "out"), *words]) == 2
    assert "pip install 'howsmooth[dask]'" in capsys.readouterr().err


# A study of stand-ins that take their time, on two processes.
STUDY = """
import sys
from howsmooth.cli import main
from tests._spread import spread_tools, stand_ins_sent
from tests._study import installed
if __name__ == "__main__":
    with installed(spread_tools()), stand_ins_sent():
        options = ["--executor", "processes", "--workers", "2", "--quiet"]
        sys.argv[1:] = ["measure", "--plan", sys.argv[1], *options]
        sys.exit(main())
"""
PLAN = 'models = ["small"]\ntexts = ["prose"]\nlengths = "1:8:1"\nsamples = 5\nbounds = "none"\nout = "out"\n'


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_study_that_is_stopped(blow: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "script.py").write_text(STUDY)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "HOWSMOOTH_TEST_WORKERS": str(tmp_path),
        "HOWSMOOTH_TEST_PAUSE": "0.5",
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "plan.toml")]
    process = subprocess.Popen(
        words, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    limit = time.monotonic() + 120
    while len(list(tmp_path.glob("measured-*"))) < 2:
        assert time.monotonic() < limit
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(1.0)
    if blow == signal.SIGINT:
        os.killpg(process.pid, blow)  # as a terminal does
    else:
        process.send_signal(blow)
    _, err = process.communicate(timeout=60)
    workers = [int(path.name.removeprefix("measured-")) for path in tmp_path.glob("measured-*")]
    limit = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < limit
        time.sleep(0.1)
    if blow != signal.SIGKILL:
        assert process.returncode == 130
        assert err.startswith("interrupted: ")
        assert "Traceback" not in err
    before = len(rows_of(tmp_path / "out"))
    environment["HOWSMOOTH_TEST_PAUSE"] = "0"
    assert subprocess.run(words, env=environment, cwd=ROOT, check=False, timeout=300).returncode == 0
    assert 0 < before < len(rows_of(tmp_path / "out")) == 8 * 5 * 3
