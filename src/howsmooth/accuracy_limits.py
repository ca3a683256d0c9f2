"""The smallest rtol and the largest confidence that measurements in float32 and in float64 accept.

Both the measurement and the study plans check their arguments here.
"""

from __future__ import annotations

from howsmooth.errors import ArgumentError

__all__ = ["check_accuracy"]

# The smallest rtol and the smallest risk (1 − confidence) for each dtype. With a smaller rtol, rounding
# would make up most of the interval. With a smaller risk, rounding errors would be as large as the
# component of the random start along the leading singular direction.
_FINEST = {"float32": (2e-5, 1e-5), "float64": (1e-12, 1e-12)}


def check_accuracy(rtol: float, confidence: float, dtype: str) -> None:
    """Raise ArgumentError if the requested accuracy or confidence cannot be reached in ``dtype``."""
    finest_rtol, finest_risk = _FINEST[dtype]
    if not finest_rtol <= rtol < 1:
        raise ArgumentError(
            "rtol",
            expected=f"a number from {finest_rtol:g} (in {dtype}) up to 1",
            got=f"{rtol:g}",
            remedy="For a smaller rtol measure in float64: with howsmooth measure --dtype float64, or in "
            "Python with the model and its tokens in torch.float64, as by model.double()."
            if dtype == "float32" and 0 < rtol < finest_rtol
            else "",
        )
    if not 0.5 <= confidence <= 1 - finest_risk:
        raise ArgumentError(
            "confidence",
            expected=f"a probability from 0.5 to 1 - {finest_risk:g} (in {dtype})",
            got=f"{confidence:g}",
        )
