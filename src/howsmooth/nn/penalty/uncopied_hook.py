"""A forward hook that stays with its module where the module is copied or saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["UncopiedHook"]


class UncopiedHook:
    """A forward hook, or a forward pre-hook, in whose place a copy of the module, or a file, has a function
    that does nothing.

    Parameters
    ----------
    function
        What the hook calls, with the arguments that PyTorch passes to hooks.

    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        """Call the function."""
        self._function(*arguments)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _hook_of_copies, ()


def _hook_of_copies() -> Callable[..., None]:
    return _nothing


def _nothing(*arguments: Any) -> None:
    pass
