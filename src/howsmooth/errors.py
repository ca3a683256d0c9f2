"""The exception classes of howsmooth, and the checks of numbers that raise them.

All of them derive from :class:`HowsmoothError`, so a caller can catch the library's errors and nothing
else. The command line prints each as one sentence and ends with exit code 2.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

__all__ = [
    "ArgumentError", "CaptureError", "CertificateError", "DerivativeError", "HowsmoothError", "ModelError",
    "NonFiniteError", "StoreError", "TextError", "WorkerError", "check_number", "check_whole", "reason",
    "similar_name",
]  # fmt: skip


class HowsmoothError(Exception):
    """The base class of all exceptions that howsmooth raises on purpose."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Make unpickling pass every field to the class, instead of the message alone."""
        fields = {name: value for name, value in vars(self).items() if name != "__notes__"}
        return (partial(type(self), **fields), ()) if fields else super().__reduce__()


class ArgumentError(HowsmoothError, ValueError):
    """Raised when an argument of a function has a wrong type, shape or value. The message says what was
    expected.

    Parameters
    ----------
    argument
        The name of the argument, as in the function's signature.
    expected
        The values that the function accepts.
    got
        The value that was given.
    remedy
        What the caller can do; a full sentence, or empty.
    """

    def __init__(self, argument: str, *, expected: str, got: str, remedy: str = "") -> None:
        self.argument = argument
        self.expected = expected
        self.got = got
        self.remedy = remedy
        message = f"{argument}: expected {expected}, got {got}."
        super().__init__(f"{message} {remedy}" if remedy else message)


class NonFiniteError(ArgumentError):
    """Raised when an input, a parameter or a computed product contains NaN or infinity."""


class DerivativeError(HowsmoothError):
    """Raised when a map has no derivative of the kind that is needed, or when its derivatives contradict each
    other.
    """


class ModelError(HowsmoothError):
    """Raised when a model cannot be found, read or built."""


class CaptureError(HowsmoothError):
    """Raised when an attention layer cannot be captured, or when the captured map fails its verification."""


class CertificateError(HowsmoothError):
    """Raised when no Lipschitz bound of a model can be certified because of one of its modules.

    Parameters
    ----------
    path
        The module's name in ``model.named_modules()``; empty for the model itself.
    kind
        The name of the module's class.
    reason
        Why no constant is known: the rest of a sentence whose subject is the module.
    remedy
        What the caller can do; a full sentence, or empty.

    """

    def __init__(self, path: str, *, kind: str, reason: str, remedy: str = "") -> None:
        self.path = path
        self.kind = kind
        self.reason = reason
        self.remedy = remedy
        message = f"{path or 'the model'} ({kind}) {reason}."
        super().__init__(f"{message} {remedy}" if remedy else message)


class TextError(HowsmoothError):
    """Raised when a text cannot be found or read, or is too short."""


class StoreError(HowsmoothError):
    """Raised when a file of stored measurements cannot be opened or written, or belongs to another study."""


class WorkerError(HowsmoothError):
    """Raised when a worker process of a study is lost or unreachable, or runs another howsmooth version."""


def check_whole(argument: str, value: object, *, least: int = 1) -> int:
    """Return ``value`` after checking that it is an int >= ``least``; raise ArgumentError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(argument, expected=f"a whole number >= {least}", got=repr(value))
    return value


def check_number(
    argument: str,
    value: object,
    expected: str = "a finite number > 0",
    good: Callable[[float], bool] = lambda number: 0 < number < math.inf,
    remedy: str = "",
) -> float:
    """Return ``value`` as a float after checking that it is a number for which ``good`` is true; raise
    ArgumentError otherwise.
    """
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # A tensor of several numbers raises RuntimeError.
        number = math.nan
    if isinstance(value, bool | str) or not good(number):
        raise ArgumentError(argument, expected=expected, got=repr(value), remedy=remedy)
    return number


def similar_name(given: str, known: Iterable[str]) -> str:
    """Return the question ``Is NAME meant?`` with the known name most similar to ``given``, or an empty
    string if none is similar.
    """
    near = difflib.get_close_matches(given, list(known), 1, cutoff=0.7)
    return f"Is {near[0]} meant?" if near else ""


def reason(error: BaseException) -> str:
    """Return a phrase that explains why a file could not be read or written, given the exception."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__
