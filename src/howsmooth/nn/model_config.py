"""Description of a model by nested dicts of class names and settings, from which it can be built again
without stored code.

A node of the tree describes one module. It has the module's ``class``; the ``settings`` with which its
constructor is called; the ``modules`` among the constructor's arguments (for :class:`torch.nn.Sequential`,
its children in order); and, for PyTorch's own modules, the ``parametrizations`` of their tensors. If a module
occurs a second time, its node there is ``{"shared": path}``. Only known classes are ever called: the layers
of :mod:`howsmooth.nn`, some modules of :mod:`torch.nn`, and classes that the caller names.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode

from howsmooth.errors import ArgumentError, HowsmoothError
from howsmooth.nn.lipschitz_module import LipschitzModule

__all__ = ["DescriptionError", "KnownClasses", "LimitedMemory", "build", "describe"]

#: PyTorch modules whose attributes have the names of their constructor's arguments. The exception is the last
#: one, whose settings ``_encoder_settings`` collects.
TORCH_MODULES: tuple[type[nn.Module], ...] = (
    nn.CELU,
    nn.Dropout,
    nn.ELU,
    nn.Flatten,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LayerNorm,
    nn.LeakyReLU,
    nn.Linear,
    nn.LogSigmoid,
    nn.Mish,
    nn.PReLU,
    nn.RMSNorm,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softmax,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.TransformerEncoderLayer,
)

# The names by which the constructor of an encoder layer knows its activation functions.
_ACTIVATIONS = {nn.functional.relu: "relu", nn.functional.gelu: "gelu"}

# Limits for files. They are far below the depths at which JSON parsing or Python's recursion fail.
DEEPEST = 64
_DEEPEST_SETTING = 4
_MOST_MODULES = 10_000
_LONGEST_LIST = 100_000
# Larger integers are not exact in float64, and no layer has sizes this large.
_LARGEST_NUMBER = 2**53
# These arguments are never saved: the loader chooses the device, and the file's tensors have the dtype.
_PLACEMENT = ("device", "dtype")
_OURS = "howsmooth.nn."


class DescriptionError(HowsmoothError):
    """Raised when a model cannot be described, or cannot be built from a description.

    The message says where and why.
    """


class KnownClasses:
    """The classes of modules that a saved model may contain.

    They are the layers of howsmooth.nn, some modules of torch.nn, and the classes that the caller gives.

    Parameters
    ----------
    classes
        The caller's classes: modules with a method ``settings`` that returns the constructor's arguments.

    Raises
    ------
    ArgumentError
        If an entry of ``classes`` is not such a class.

    """

    def __init__(self, classes: Sequence[type[nn.Module]] = ()) -> None:
        for one in classes:
            if not (
                isinstance(one, type)
                and issubclass(one, nn.Module)
                and callable(getattr(one, "settings", None))
            ):
                raise ArgumentError(
                    "classes",
                    expected="classes of modules with a method settings()",
                    got=getattr(one, "__name__", repr(one)),
                    remedy="settings() returns the keyword arguments of the constructor.",
                )
        self._named = {f"torch.nn.{one.__name__}": one for one in (*TORCH_MODULES, nn.Sequential)}
        self._named |= {f"{one.__module__}.{one.__qualname__}": one for one in classes}
        self._names = {one: name for name, one in self._named.items()}

    def name(self, cls: type[nn.Module]) -> str | None:
        """Return the name under which a class is saved, or None for a class that must not be saved."""
        if cls not in self._names and cls.__module__.startswith("howsmooth.nn."):
            name = f"{_OURS}{cls.__name__}"
            return name if self.get(name) is cls else None
        return self._names.get(cls)

    def get(self, name: object) -> type[nn.Module] | None:
        """Return the class with a given saved name, or None for a class that a saved model must not
        contain.
        """
        from howsmooth import nn as room

        if not isinstance(name, str):
            return None
        if name in self._named:
            return self._named[name]
        ours = name.removeprefix(_OURS)
        # Only this name is looked up: howsmooth.nn imports a module when its name is used, and some take
        # seconds.
        cls = getattr(room, ours) if ours != name and ours in room.__all__ else None
        layer = isinstance(cls, type) and issubclass(cls, LipschitzModule) and not inspect.isabstract(cls)
        return cls if layer else None


def describe(model: nn.Module, known: KnownClasses) -> dict[str, Any]:
    """Return nested dicts that describe the modules of a model: classes, constructor arguments and children,
    without weights.

    Raises
    ------
    DescriptionError
        If a module's class is not known, or its settings are not JSON values.

    """
    return _describe(model, "", known, {}, 0)


def _describe(
    module: nn.Module, path: str, known: KnownClasses, seen: dict[int, str], depth: int
) -> dict[str, Any]:
    where = place(path)
    if id(module) in seen:
        return {"shared": seen[id(module)]}
    seen[id(module)] = path
    if depth > DEEPEST:
        raise DescriptionError(f"{where} is nested more than {DEEPEST} modules deep")
    cls = _type_of(module)
    name = known.name(cls)
    if name is None:
        own = "that builds it" if cls.__module__.startswith("torch.") else cls.__name__
        raise DescriptionError(
            f"{where} is a {cls.__module__}.{cls.__qualname__}, unknown to files: they hold layers "
            "of howsmooth.nn, torch.nn.Sequential, simple modules of torch.nn, and your own classes with a "
            f"method settings(), which are given as classes=[...]: give the class {own}"
        )
    node: dict[str, Any] = {"class": name}
    if cls is nn.Sequential:
        # named_children would leave out a module that occurs twice.
        children = {name: one for name, one in module._modules.items() if one is not None}
        node["modules"] = {
            name: _describe(one, join(path, name), known, seen, depth + 1) for name, one in children.items()
        }
        return node
    if cls in TORCH_MODULES:
        encoder = cls is nn.TransformerEncoderLayer
        node["settings"] = _encoder_settings(module, where) if encoder else _torch_settings(module, cls)
        found = _parametrizations(module, where)
        if found:
            node["parametrizations"] = found
    else:
        settings = module.settings()  # type: ignore[operator]
        if not isinstance(settings, dict):
            raise DescriptionError(f"settings() of {where} returns a {type(settings).__name__}, not a dict")
        given = [name for name in _arguments(cls) if name not in settings]
        modules = {
            name: _describe(one, join(path, name), known, seen, depth + 1)
            for name in given
            if isinstance(one := module._modules.get(name), nn.Module)
        }
        node["settings"] = settings
        if modules:
            node["modules"] = modules
    node["settings"] = {
        name: _json(value, f"{name} of {where}", 0)
        for name, value in node["settings"].items()
        if name not in _PLACEMENT
    }
    return node


def _module_option(name: Any) -> str:
    """Return the command-line option ``--classes`` that names the Python module of a class.

    ``name`` is the full name of the class. If it does not tell the module, the option has the placeholder
    MODULE.
    """
    module = name.rpartition(".")[0] if isinstance(name, str) else ""
    if module == "__main__":
        return "--classes MODULE, once they stand in a file of their own and the model is saved from there"
    return f"--classes {module if re.fullmatch(r'[A-Za-z_][A-Za-z0-9_.]*', module) else 'MODULE'}"


def build(tree: Any, known: KnownClasses) -> nn.Module:
    """Build a model with random weights from the nested dicts that :func:`describe` returned.

    Raises
    ------
    DescriptionError
        If the tree is malformed, names a class that is not known, or has settings that a constructor refuses.

    """
    count = [0]
    built: dict[str, nn.Module] = {}
    return _build(tree, "", known, built, count, 0)


def _build(
    node: Any,
    path: str,
    known: KnownClasses,
    built: dict[str, nn.Module],
    count: list[int],
    depth: int,
) -> nn.Module:
    where = place(path)
    count[0] += 1
    if count[0] > _MOST_MODULES or depth > DEEPEST:
        raise DescriptionError(
            f"at {where} it has more than {_MOST_MODULES} modules, or nests them too deeply"
        )
    if not isinstance(node, dict):
        raise DescriptionError(f"{where} is described by a {type(node).__name__}, not by an object")
    if "shared" in node:
        _only(node, ("shared",), where)
        if not isinstance(node["shared"], str) or node["shared"] not in built:
            raise DescriptionError(f"{where} refers to a module that does not come before it")
        return built[node["shared"]]
    _only(node, ("class", "settings", "modules", "parametrizations"), where)
    name = node.get("class")
    cls = known.get(name)
    if cls is None:
        raise DescriptionError(
            f"{where} is of the class {_short(name)}, which is not known: give your own as classes=[...], or "
            f"on the command line their module, {_module_option(name)}"
        )
    settings, modules = _object(node, "settings", where), _object(node, "modules", where)
    for key, value in settings.items():
        _json(value, f"{_short(key)} of {where}", 0)
    for key in modules:
        if not key or "." in key:
            raise DescriptionError(f"{where} has a module of the name {_short(key)}")
    if cls is not nn.Sequential:
        unknown = [key for key in (*settings, *modules) if key not in _arguments(cls) or key in _PLACEMENT]
        twice = [key for key in modules if key in settings]
        if unknown or twice:
            raise DescriptionError(f"{name} at {where} takes no {_short((unknown or twice)[0])}")
    children = {
        key: _build(one, join(path, key), known, built, count, depth + 1) for key, one in modules.items()
    }
    module = _call(cls, settings, children, where)
    for tensor, chain in _object(node, "parametrizations", where).items():
        _parametrize(module, tensor, chain, where)
    built[path] = module
    return module


def _call(
    cls: type[nn.Module], settings: dict[str, Any], children: dict[str, nn.Module], where: str
) -> nn.Module:
    try:
        return nn.Sequential(OrderedDict(children)) if cls is nn.Sequential else cls(**settings, **children)
    except DescriptionError:
        raise
    except Exception as error:  # a constructor may raise any error
        raise DescriptionError(f"{cls.__name__} at {where} cannot be built: {first_line(error)}") from error


def _torch_settings(module: nn.Module, cls: type[nn.Module]) -> dict[str, Any]:
    # The attribute ``bias`` is a tensor or None, while the argument ``bias`` is a flag.
    return {
        name: getattr(module, name, None) is not None if name == "bias" else getattr(module, name)
        for name in _arguments(cls)
        if name not in _PLACEMENT and hasattr(module, name)
    }


def _encoder_settings(layer: Any, where: str) -> dict[str, Any]:
    if layer.activation not in _ACTIVATIONS:
        raise DescriptionError(f"{where} has an activation other than relu and gelu")
    parts = (layer.self_attn, layer.norm1, layer.norm2)
    for part, kind in zip(parts, (nn.MultiheadAttention, nn.LayerNorm, nn.LayerNorm), strict=True):
        if _type_of(part) is not kind:
            raise DescriptionError(
                f"{where} has a {type(part).__name__} in place of its {kind.__name__}: replace it in a class "
                "of your own with a method settings(), which is given as classes=[...]"
            )
    return {
        "d_model": layer.self_attn.embed_dim,
        "nhead": layer.self_attn.num_heads,
        "dim_feedforward": layer.linear1.out_features,
        "dropout": layer.dropout.p,
        "activation": _ACTIVATIONS[layer.activation],
        "layer_norm_eps": layer.norm1.eps,
        "batch_first": layer.self_attn.batch_first,
        "norm_first": layer.norm_first,
        "bias": layer.linear1.bias is not None,
    }


def _arguments(cls: type[nn.Module]) -> list[str]:
    """Return the names of the arguments of a constructor, including arguments that it passes on to parent
    classes.
    """
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found: dict[str, None] = {}
    for one in cls.__mro__:
        if "__init__" not in vars(one):
            continue
        parameters = inspect.signature(vars(one)["__init__"]).parameters.values()
        found |= dict.fromkeys(p.name for p in list(parameters)[1:] if p.kind in by_name)
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return list(found)


def _type_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before parametrizations were registered.

    PyTorch then replaces the class of the module by a subclass.
    """
    cls: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return cls


def _parametrizations(module: nn.Module, where: str) -> dict[str, list[dict[str, Any]]]:
    if not parametrize.is_parametrized(module):
        return {}
    found = {}
    for name, chain in module.parametrizations.items():  # type: ignore[union-attr, operator]
        steps = [parametrization_settings(one) for one in chain]
        if any(step is None for step in steps):
            raise DescriptionError(
                f"{name} of {where} has a parametrization other than orthogonal and spectral_norm of "
                "torch.nn.utils.parametrizations"
            )
        found[name] = [step for step in steps if step is not None]
    return found


def parametrization_settings(step: nn.Module) -> dict[str, Any] | None:
    """Return the arguments with which a parametrization of a weight was registered.

    The result also contains the kind, "orthogonal" or "spectral_norm". It is None for other parametrizations.
    """
    if type(step) is parametrizations._Orthogonal:
        return {
            "kind": "orthogonal",
            "orthogonal_map": step.orthogonal_map.name,
            "use_trivialization": hasattr(step, "base"),
        }
    if type(step) is parametrizations._SpectralNorm:
        return {
            "kind": "spectral_norm",
            # For a vector, no power iterations are needed, and the attribute is missing.
            "n_power_iterations": int(getattr(step, "n_power_iterations", 1)),
            "eps": float(step.eps),
            "dim": int(step.dim),
        }
    return None


_KINDS: dict[str, tuple[Any, dict[str, type]]] = {
    "orthogonal": (parametrizations.orthogonal, {"orthogonal_map": str, "use_trivialization": bool}),
    "spectral_norm": (
        parametrizations.spectral_norm,
        {"n_power_iterations": int, "eps": float, "dim": int},
    ),
}


def _parametrize(module: nn.Module, tensor: str, chain: Any, where: str) -> None:
    if _type_of(module) not in TORCH_MODULES:
        raise DescriptionError(f"{where} is not a module of torch.nn, but has parametrizations in the file")
    if not isinstance(chain, list) or not 1 <= len(chain) <= _DEEPEST_SETTING:
        raise DescriptionError(f"the parametrizations of {_short(tensor)} of {where} are not a short list")
    for step in chain:
        kind = step.get("kind") if isinstance(step, dict) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            raise DescriptionError(f"{_short(tensor)} of {where} has a parametrization {_short(kind)}")
        function, kinds = _KINDS[kind]
        _only(step, ("kind", *kinds), where)
        arguments = {name: value for name, value in step.items() if name != "kind"}
        if any(type(value) is not kinds[name] for name, value in arguments.items()):
            raise DescriptionError(f"{kind} of {_short(tensor)} of {where} takes no such settings")
        # The constructor runs all power iterations at once, so their number is limited.
        if not 0 < arguments.get("n_power_iterations", 1) <= 1000:
            raise DescriptionError(f"{kind} of {_short(tensor)} of {where} iterates more than 1000 times")
        try:
            function(module, name=tensor, **arguments)
        except Exception as error:
            raise DescriptionError(
                f"{kind} of {_short(tensor)} of {where} fails: {first_line(error)}"
            ) from error


def _json(value: Any, what: str, depth: int) -> Any:
    """Return a setting as a JSON value; raise DescriptionError if JSON cannot represent it."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int) and abs(value) <= _LARGEST_NUMBER:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth < _DEEPEST_SETTING and isinstance(value, list | tuple) and len(value) <= _LONGEST_LIST:
        return [_json(one, what, depth + 1) for one in value]
    if depth < _DEEPEST_SETTING and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json(one, what, depth + 1) for key, one in value.items()}
    raise DescriptionError(
        f"{what} is {_short(value)}: settings are null, true, false, words, finite numbers below 2**53, and "
        "short lists and objects of them"
    )


def _object(node: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = node.get(key, {})
    if not isinstance(value, dict):
        raise DescriptionError(f"{key} of {where} is a {type(value).__name__}, not an object")
    return value


def _only(node: dict[str, Any], keys: Sequence[str], where: str) -> None:
    unknown = [key for key in node if key not in keys]
    if unknown:
        raise DescriptionError(f"{where} has an entry {_short(unknown[0])}")


def place(path: str) -> str:
    """Return a phrase that names a module by its path in the model."""
    return f"module {_cut(path)}" if path else "the model"


def join(path: str, name: str) -> str:
    """Return the path of the child ``name`` of the module at ``path``."""
    return f"{path}.{name}" if path else name


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an exception."""
    lines = str(error).strip().splitlines()
    return _cut(lines[0].rstrip("."), 300) if lines else type(error).__name__


def _short(value: Any) -> str:
    # The repr of a deeply nested value or of a number with thousands of digits may itself fail.
    try:
        return _cut(repr(value))
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"


def _cut(words: str, longest: int = 80) -> str:
    return words if len(words) <= longest else f"{words[: longest - 3]}..."


class LimitedMemory(TorchFunctionMode):
    """A PyTorch mode that limits the total number of tensor entries that factory functions may create.

    A file of a few bytes could otherwise request a layer of any size.
    """

    _FACTORIES = frozenset(
        {
            torch.arange,
            torch.empty,
            torch.eye,
            torch.full,
            torch.linspace,
            torch.normal,
            torch.ones,
            torch.rand,
            torch.randint,
            torch.randn,
            torch.randperm,
            torch.tril_indices,
            torch.triu_indices,
            torch.zeros,
        }
    )

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self._left = numbers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Subtract the size of a new tensor from the limit before a factory function allocates it."""
        kwargs = kwargs or {}
        if func in self._FACTORIES and kwargs.get("out") is None:
            sized = {name: value for name, value in kwargs.items() if name != "generator"}
            # On the meta device the same call costs no memory, but gives the number of entries.
            self._left -= func(*args, **(sized | {"device": "meta"})).numel()
            if self._left < 0:
                raise MemoryError("it requests much more memory than the tensors in the file have")
        return func(*args, **kwargs)
