"""Jacobians of token maps as linear operators, in closed form or by automatic differentiation.

The closed form of attention rests on one derivative. For scaled queries q, keys k and values v, with scores
S = q kᵀ (or S = c tanh(q kᵀ / c), whose derivative is D, else D = 1), row softmax P, O = P v and tangents
dq, dk, dv ::

    T    = P∘D∘(dq kᵀ + q dkᵀ)
    dO_i = Σ_j T_ij (v_j − O_i) + Σ_j P_ij dv_j                         the product J
    U    = P∘D∘(G vᵀ − ⟨G_i, O_i⟩)                                      for a cotangent G of O
    q̄, k̄, v̄ = U k, Uᵀ q, Pᵀ G                                           the adjoint product Jᵀ

Its variants compute the same numbers up to rounding:

- ``softmax``: P is kept in memory; with weights (the atoms of a measure) a second, weighted P beside it.
- ``packed_sequences`` and ``padded_jacobian_batch``: several sequences of unequal lengths with P kept, which
  share the projections, or are padded with zeros to one length.
- ``streamed_softmax``, cut by ``tiling``: P is formed tile by tile in each product, in memory O(n d).
- ``fused_softmax``: the same in Triton kernels on a CUDA device, where tiles stay on the chip.
- :mod:`howsmooth.functional`: a function that PyTorch differentiates again, to every order.

``attention`` puts the projections of a layer around one of them, ``custom_code_attention`` PyTorch code, and
``closed_form`` chooses the operator of a map. ``howsmooth.batching`` decides whether P is kept. The
derivation, and a table of memory and cost, are on the documentation page "The derivative of softmax
attention, and its variants".
"""

from howsmooth.jacobian.autodiff import (
    AutodiffJacobian,
    allowance_for_rounding,
    moved_by_rounding,
    weighted_autodiff_jacobian,
)
from howsmooth.jacobian.closed_form import (
    closed_form_jacobian,
    closed_form_jacobians,
    has_closed_form,
    in_double,
    runs_members_alone,
)
from howsmooth.jacobian.fixed_measure_derivative import frozen_derivatives
from howsmooth.jacobian.memory_footprint import cached_bytes, kernel_bytes, streamed_bytes
from howsmooth.jacobian.packed_sequences import energy_products_together, shares_products
from howsmooth.jacobian.padded_jacobian_batch import filled, joined

__all__ = [
    "AutodiffJacobian",
    "allowance_for_rounding",
    "cached_bytes",
    "closed_form_jacobian",
    "closed_form_jacobians",
    "energy_products_together",
    "filled",
    "frozen_derivatives",
    "has_closed_form",
    "in_double",
    "joined",
    "kernel_bytes",
    "moved_by_rounding",
    "runs_members_alone",
    "shares_products",
    "streamed_bytes",
    "weighted_autodiff_jacobian",
]
