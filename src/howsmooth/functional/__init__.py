"""Softmax attention as a function, with derivatives of every kind and order in memory O(n)."""

from howsmooth.functional.attention import attention

__all__ = ["attention"]
