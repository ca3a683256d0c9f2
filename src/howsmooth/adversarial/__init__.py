"""Worst inputs: tokens at which attention has a large local Lipschitz constant, built or found by ascent."""

from howsmooth.adversarial.constructions import (
    Construction,
    constructions,
    heavy_token,
    two_cluster,
    two_heavy_tokens,
)
from howsmooth.adversarial.domains import Around, Ball, Domain, Ellipsoid
from howsmooth.adversarial.gradient_ascent import Ascent, ascend

__all__ = [
    "Around",
    "Ascent",
    "Ball",
    "Construction",
    "Domain",
    "Ellipsoid",
    "ascend",
    "constructions",
    "heavy_token",
    "two_cluster",
    "two_heavy_tokens",
]
