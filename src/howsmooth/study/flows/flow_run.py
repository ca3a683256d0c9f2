"""Run a flow: compute the frames that its store does not have, then the growth of perturbations."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from howsmooth.study.flows.flow_plan import FlowPlan
from howsmooth.study.flows.flow_system import System
from howsmooth.study.flows.frames import ending
from howsmooth.study.flows.integration import Integration
from howsmooth.study.progress_listener import Outcome
from howsmooth.study.records import FLOW, Ending, FrameRow
from howsmooth.study.runner import Means, Runner
from howsmooth.study.store import PendingStore
from howsmooth.study.tasks.flow_frames import frames_left, growth_left

__all__ = ["run_flow"]


def run_flow(
    plan: FlowPlan, system: System, folder: str | os.PathLike[str], means: Means | None = None
) -> tuple[Outcome, Ending | None]:
    """Compute the states of a flow (frames) that the store in a folder does not have.

    Folder and store are created after all checks have passed. The outcome does not count the start as a
    frame. The second result is the reason why the flow ended early, or None.

    Raises
    ------
    howsmooth.errors.HowsmoothError
        If the flow is impossible, before anything is stored; or if the store holds another flow.

    """
    folder = Path(folder)
    began = time.monotonic()
    flow = Integration(plan, system)
    identity = plan.settings() | system.identity()
    with PendingStore(folder, FLOW) as pending:
        pending.check(identity)
        new = pending.store is None or not pending.store.count(FrameRow)
        if new:
            flow.after(flow.start)  # raises an error if the flow is impossible, before a store is created
        store = pending.begin(identity)
        if new:
            store.add([flow.start])
        runner = Runner(store, means or Means())
        frames = frames_left(flow, store)
        runner.carry_out(frames)
        # If the flow ended early, frames beyond that time were deleted, so count again.
        runner.outcome.made[FrameRow.table] = max(0, store.count(FrameRow) - 1 - frames.kept)
        runner.carry_out(growth_left(flow, store))
        return replace(runner.finish(), seconds=time.monotonic() - began), ending(store)
