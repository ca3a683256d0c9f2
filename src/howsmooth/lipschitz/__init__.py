"""Measurement of the local Lipschitz constant ‖D_X f‖₂ of a map f, at given tokens X or at a measure, with an
interval.

:mod:`~howsmooth.lipschitz.local` defines ``local_lipschitz``, which chooses how the Jacobian is computed and
builds the result. :mod:`~howsmooth.lipschitz.arguments` checks its arguments once,
:mod:`~howsmooth.lipschitz.measurement` makes the Jacobians, in float32 with the same in float64 around them,
and :mod:`~howsmooth.lipschitz.singular_value_solver` runs the solver of ``howsmooth.spectral`` from seeded
starts.
:mod:`~howsmooth.lipschitz.heads` measures all heads of a layer as one batch,
:mod:`~howsmooth.lipschitz.block_norms` the blocks ∂y_i/∂x_j, and
:mod:`~howsmooth.lipschitz.maximum_token_norm` how far one output moves if every token moves by at most one.
"""

from howsmooth.lipschitz.local import local_lipschitz
from howsmooth.lipschitz_estimate import LipschitzEstimate, LipschitzEstimates

__all__ = [
    "LipschitzEstimate",
    "LipschitzEstimates",
    "local_lipschitz",
]
