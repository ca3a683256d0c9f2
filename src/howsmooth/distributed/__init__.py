"""Measurement of the Lipschitz constant at one sequence that is too long for one device. Its tokens are
divided among several processes.
"""

from howsmooth.distributed.cost import Device, StepCost, step_cost
from howsmooth.distributed.lipschitz import local_lipschitz, own_rows

__all__ = ["Device", "StepCost", "local_lipschitz", "own_rows", "step_cost"]
