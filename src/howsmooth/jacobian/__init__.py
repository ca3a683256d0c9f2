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

from howsmooth.jacobian.autodiff import AutodiffJacobian
from howsmooth.jacobian.closed_form import closed_form_jacobian

__all__ = [
    "AutodiffJacobian",
    "closed_form_jacobian",
]
