"""Softmax attention as a function that PyTorch can differentiate in forward and reverse mode, any number of
times.

It takes memory for the tokens, not for their pairs. The derivative is the one of :mod:`howsmooth.jacobian`.
There the point of linearisation is fixed, and the derivative is applied to many tangents; here it is computed
once and must be differentiable in turn.
"""

from howsmooth.functional.attention import attention
from howsmooth.functional.hugging_face import register

__all__ = ["attention", "register"]
