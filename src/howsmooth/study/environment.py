"""Describe the software and hardware of a run: versions, machine and commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from concurrent.futures import Executor
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import torch

__all__ = ["environment"]

_PACKAGES = ("howsmooth", "torch", "transformers", "tokenizers", "numpy", "scipy")
_SOURCE = Path(__file__).parent


def environment(device: str, executor: Executor | None = None, threads: int | None = None) -> dict[str, str]:
    """Return a run's versions, hardware, workers and CPU threads (``threads`` for each worker) as text."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "device": device}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    found |= {"commit": _commit(), "threads": str(torch.get_num_threads())}
    found |= {"cores": str(os.cpu_count() or "unknown"), "processor": _processor()}
    if torch.device(device).type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
    if executor is not None:
        workers = getattr(executor, "workers", None)
        found["executor"] = type(executor).__name__ + (f" of {workers} workers" if workers else "")
        found["threads"] = "chosen by the workers" if threads is None else f"{threads} for each worker"
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """Return the git commit of the running howsmooth: that of its checkout, or the one pip installed."""
    try:
        # Check that git tracks this file: a virtual environment inside another repository is not part of it.
        _git("ls-files", "--error-unmatch", "environment.py")
        return _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=, changed since")
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        origin = json.loads(distribution("howsmooth").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    return str(origin.get("vcs_info", {}).get("commit_id", "of a release"))


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_SOURCE), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
    return done.stdout.strip()
