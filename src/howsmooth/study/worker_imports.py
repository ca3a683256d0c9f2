"""Import what every worker process needs, once, in the process from which the workers are forked."""

# ruff: noqa: F401

from __future__ import annotations

from howsmooth.quick_imports import quick_imports

with quick_imports():
    import howsmooth.models
    import howsmooth.study.runner
    import howsmooth.study.tasks.lipschitz_constants
