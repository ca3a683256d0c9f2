"""Carry out a flow: the frames that the store does not have, then how perturbations of its start grow."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from howsmooth.study.flows.frames import FLOW, count_frames, ending
from howsmooth.study.flows.integration import Integration
from howsmooth.study.flows.opening import System
from howsmooth.study.flows.plan import FlowPlan
from howsmooth.study.progress import Outcome
from howsmooth.study.records import Ending, FrameRow
from howsmooth.study.runner import Means, Runner
from howsmooth.study.store import PendingStore
from howsmooth.study.tasks.frames import frames_left, growth_left

__all__ = ["run_flow"]


def run_flow(
    plan: FlowPlan, system: System, folder: Path, means: Means | None = None
) -> tuple[Outcome, Ending | None]:
    """Make the frames that the store in ``folder`` does not have.

    Parameters
    ----------
    plan
        What to integrate, and how.
    system
        As :func:`~howsmooth.study.flows.opening.open_system` gives it for this plan.
    folder
        Of the store; made, with the store, once every check has passed.
    means
        Who is told how far it is, and what is recorded; by default nobody and nothing.

    Returns
    -------
    outcome, ending
        What was done; frames are counted without the start. Why the flow ended early, if it did.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the flow is impossible, before anything is kept; or if the store has another one.

    """
    began = time.monotonic()
    flow = Integration(plan, system)
    identity = plan.settings() | system.identity()
    with PendingStore(folder, FLOW) as pending:
        pending.check(identity)
        new = pending.store is None or not count_frames(pending.store)
        if new:
            flow.after(flow.start)  # shows what is impossible, before anything is kept
        store = pending.begin(identity)
        if new:
            store.add([flow.start.row()])
        runner = Runner(store, means or Means())
        frames = frames_left(flow, store)
        runner.carry_out(frames)
        # An ending takes frames back.
        runner.outcome.made[FrameRow.table] = max(0, count_frames(store) - 1 - frames.kept)
        runner.carry_out(growth_left(flow, store))
        return replace(runner.finish(), seconds=time.monotonic() - began), ending(store)
