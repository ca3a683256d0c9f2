"""Influence: which token moves which, as the norms ‖∂y_i/∂x_j‖₂ of the blocks of a Jacobian.

``measure`` finds the norms and their intervals, ``result`` holds them with the token-wise constant, and
``heatmap`` draws them.
"""

from howsmooth.token_influence.measure import influence
from howsmooth.token_influence.result import Influence

__all__ = ["Influence", "influence"]
