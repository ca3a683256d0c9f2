"""The coefficients (Butcher tableaux) of Runge–Kutta methods with fixed steps."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TABLEAUX", "Tableau"]


@dataclass(frozen=True)
class Tableau:
    """The coefficients (Butcher tableau) of an explicit Runge–Kutta method, with a strictly lower triangular
    matrix a.

    A step of length h is k_i = f(t + c_i h, x + h Σ_j a_ij k_j) and x⁺ = x + h Σ_i b_i k_i.
    """

    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]
    c: tuple[float, ...]


_EULER = Tableau(a=((),), b=(1.0,), c=(0.0,))

# These are torchdiffeq's methods (its rk4 is the 3/8 rule). "residual" is a layer X + h f(X).
TABLEAUX = {
    "euler": _EULER,
    "residual": _EULER,
    "midpoint": Tableau(a=((), (0.5,)), b=(0.0, 1.0), c=(0.0, 0.5)),
    "heun2": Tableau(a=((), (1.0,)), b=(0.5, 0.5), c=(0.0, 1.0)),
    "heun3": Tableau(a=((), (1 / 3,), (0.0, 2 / 3)), b=(0.25, 0.0, 0.75), c=(0.0, 1 / 3, 2 / 3)),
    "rk4": Tableau(
        a=((), (1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0)),
        b=(1 / 8, 3 / 8, 3 / 8, 1 / 8),
        c=(0.0, 1 / 3, 2 / 3, 1.0),
    ),
}
