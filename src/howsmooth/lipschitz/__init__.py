"""The local Lipschitz constant ‖D_X f‖₂ of a map at given tokens or at a measure, with an interval.

:mod:`~howsmooth.lipschitz.local` is the front door: it has the arguments checked by
:mod:`~howsmooth.lipschitz.arguments`, chooses how the Jacobian is computed, and builds the result.
:mod:`~howsmooth.lipschitz.solver` runs the solvers of ``howsmooth.spectral`` from seeded starts, and
:mod:`~howsmooth.lipschitz.mixed_precision` lets float32 products do the work and float64 products judge it.
:mod:`~howsmooth.lipschitz.heads` measures all heads of a layer as one batch.
"""

from howsmooth.estimate import LipschitzEstimate, LipschitzEstimates
from howsmooth.lipschitz.heads import head_lipschitz
from howsmooth.lipschitz.local import local_lipschitz

__all__ = ["LipschitzEstimate", "LipschitzEstimates", "head_lipschitz", "local_lipschitz"]
