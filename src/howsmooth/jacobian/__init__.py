"""Jacobians of token maps as linear operators, in closed form or by automatic differentiation.

The closed form of attention rests on one derivative, whose formulas stand in ``softmax_tile``. All else is a
schedule around it, and gives the same numbers up to rounding:

- ``softmax``: P is kept in memory; at a measure (the atoms of which have weights) a second, weighted P too.
- ``unequal_lengths``: several sequences with P kept, which share the projections, or are padded with zeros to
  one length.
- ``streamed_softmax``, cut by ``tiling``: P is formed tile by tile in each product, in memory O(n d).
- ``fused_softmax``: the same in Triton kernels on a CUDA device, where tiles stay on the chip.
- :mod:`howsmooth.functional`: blocks of rows, as a function that PyTorch differentiates to every order.

``attention`` puts the projections of a layer around one of them, ``custom_code_attention`` PyTorch code, and
``closed_form`` chooses the operator of a map. ``howsmooth.batching`` decides whether P is kept. Derivation,
memory and cost: documentation page "The Jacobian of attention in closed form".
"""

from howsmooth.jacobian.autodiff import AutodiffJacobian
from howsmooth.jacobian.closed_form import closed_form_jacobian

__all__ = ["AutodiffJacobian", "closed_form_jacobian"]
