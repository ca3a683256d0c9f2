"""A forward hook that serves one module only, so that its model can be copied and saved meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["OneModuleHook"]


class OneModuleHook:
    """A forward hook, or a forward pre-hook, of one module.

    Copies of the module share the hook, which does nothing when they call it. A module that was saved with
    the hook is loaded with a function that does nothing.

    Parameters
    ----------
    module
        The module that the hook serves.
    function
        What the hook calls, with the arguments that PyTorch passes to hooks.

    """

    def __init__(self, module: nn.Module, function: Callable[..., None]) -> None:
        self._module = module
        self._function = function

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        """Call the function if ``module`` is the module that the hook serves."""
        if module is self._module:
            self._function(module, *arguments)

    def __deepcopy__(self, memo: dict[int, object]) -> OneModuleHook:
        return self

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _loaded, ()


def _loaded() -> Callable[..., None]:
    return _nothing


def _nothing(*arguments: Any) -> None:
    pass
