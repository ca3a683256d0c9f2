"""Worst inputs: tokens at which attention has a large local Lipschitz constant, built or found by ascent."""

from howsmooth.adversarial.constructions import (
    Construction,
    balanced,
    constructions,
    heavy_token,
    two_cluster,
    two_heavy_tokens,
)
from howsmooth.adversarial.gradient_ascent import Ascent, ascend
from howsmooth.adversarial.search_domains import Around, Ball, Ellipsoid

__all__ = [
    "Around",
    "Ascent",
    "Ball",
    "Construction",
    "Ellipsoid",
    "ascend",
    "balanced",
    "constructions",
    "heavy_token",
    "two_cluster",
    "two_heavy_tokens",
]
