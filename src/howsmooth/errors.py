"""Every error that howsmooth raises on purpose.

All derive from :class:`HowsmoothError`, so that a caller can catch the library's refusals and
nothing else; the command line turns each into one sentence and exit code 2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

__all__ = [
    "ArgumentError",
    "CaptureError",
    "CertificateError",
    "DerivativeError",
    "HowsmoothError",
    "ModelError",
    "NonFiniteError",
    "StoreError",
    "TextError",
    "WorkerError",
    "reason",
]


class HowsmoothError(Exception):
    """Base of all errors raised on purpose by this library."""


class ArgumentError(HowsmoothError, ValueError):
    """An argument is not what the function needs.

    Parameters
    ----------
    argument
        The name of the argument, as the caller wrote it.
    expected
        What would have been accepted.
    got
        What came.
    remedy
        What to do about it; a full sentence, or empty.

    """

    def __init__(self, argument: str, *, expected: str, got: str, remedy: str = "") -> None:
        self.argument = argument
        self.expected = expected
        self.got = got
        self.remedy = remedy
        message = f"{argument}: expected {expected}, got {got}."
        super().__init__(f"{message} {remedy}" if remedy else message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a worker process send it: by default an exception is rebuilt from its sentence alone."""
        words = {"expected": self.expected, "got": self.got, "remedy": self.remedy}
        return partial(type(self), self.argument, **words), ()


class NonFiniteError(ArgumentError):
    """An input, a parameter or a product holds NaN or infinity, so no number can be certified."""


class DerivativeError(HowsmoothError):
    """A map has no derivative of the kind that is needed, or its derivative is not what it claims."""


class ModelError(HowsmoothError):
    """A model cannot be found, read or built."""


class CaptureError(HowsmoothError):
    """An attention layer of a model cannot be captured, or the captured map fails its verification."""


class CertificateError(HowsmoothError):
    """A model cannot be certified, because of one of its modules.

    Parameters
    ----------
    path
        Of the module, as ``model.named_modules()`` gives it; empty for the model itself.
    kind
        Its class.
    reason
        Why no constant is known; the rest of a sentence that begins with the module.
    remedy
        What to do about it; a full sentence, or empty.

    """

    def __init__(self, path: str, *, kind: str, reason: str, remedy: str = "") -> None:
        self.path = path
        self.kind = kind
        self.reason = reason
        self.remedy = remedy
        message = f"{path or 'the model'} ({kind}) {reason}."
        super().__init__(f"{message} {remedy}" if remedy else message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a worker process send it: by default an exception is rebuilt from its sentence alone."""
        words = {"kind": self.kind, "reason": self.reason, "remedy": self.remedy}
        return partial(type(self), self.path, **words), ()


class TextError(HowsmoothError):
    """A text cannot be found or read, or is too short for what was asked of it."""


class StoreError(HowsmoothError):
    """A store of measurements cannot be opened, belongs to another study, or cannot be written."""


class WorkerError(HowsmoothError):
    """A worker that measures for a study was lost, cannot be reached, or is not of this version."""


def reason(error: BaseException) -> str:
    """Say in a phrase why a file cannot be read or written."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__
