"""Run a model on tensors without values, to learn what it computes from its tokens.

Where the model's code reads a value, for instance to branch on it, or performs an operation that no known
layer has, the run is refused: whatever stands in the forward pass, whether in modules, hooks or patched
methods, is seen, since nothing can be computed from such a tensor without its operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from howsmooth.bounds.radius.symbolic_terms import OTHER, DifferentOperationError, Terms
from howsmooth.errors import CertificateError, HowsmoothError, reason
from howsmooth.plain_modules import eager, fast_path, running_module

__all__ = ["SymbolicTensor", "refused_module", "run_on_symbols"]

# Operations that only rearrange entries, which are done on the numbers of the terms.
_REARRANGING = {
    "alias", "cat", "chunk", "clone", "detach", "expand", "flatten", "flip", "index", "index_select",
    "lift_fresh", "narrow", "permute", "repeat", "reshape", "select", "slice", "split", "split_with_sizes",
    "squeeze", "stack", "t", "transpose", "unbind", "unflatten", "unsafe_split", "unsqueeze", "view",
    "_unsafe_view", "_reshape_alias",
}  # fmt: skip
_SHAPE_ALONE = {
    "new_empty", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "empty_like",
}  # fmt: skip
_ELEMENTWISE = {"sigmoid", "tanh", "silu", "relu", "erf", "neg", "rsqrt"}
# Ways to the memory of a tensor past its operations.
_READING = {
    "numpy", "tolist", "item", "data_ptr", "untyped_storage", "storage", "_typed_storage", "apply_", "map_",
    "map2_", "set_", "share_memory_", "to_dlpack", "_to_dlpack", "from_dlpack", "__array__", "__dlpack__",
    "__reduce_ex__", "__deepcopy__", "__bool__", "__float__", "__int__", "__index__", "__contains__",
}  # fmt: skip


class SymbolicTensor(Tensor):
    """A float64 tensor that has terms in place of values."""

    entries: Tensor
    run: _Run

    @staticmethod
    def __new__(cls, entries: Tensor, run: _Run) -> SymbolicTensor:
        """Make a tensor without data that has the shape and the strides of ``entries``, and holds them."""
        found: SymbolicTensor = Tensor._make_wrapper_subclass(
            cls, entries.shape, strides=entries.stride(), dtype=torch.float64, device=torch.device("cpu")
        )
        found.entries, found.run = entries, run
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Perform an operation on terms."""
        first = next(t for t in tree_flatten((args, kwargs))[0] if isinstance(t, SymbolicTensor))
        return first.run.operation(func, args, kwargs or {})


class _Run(TorchFunctionMode):
    """One run of a model on symbolic tensors. The first operation that is refused ends it, even if the model
    catches the exception.
    """

    def __init__(self, terms: Terms, names: dict[nn.Module, str]) -> None:
        super().__init__()
        self.terms, self._names = terms, names
        self.refused: CertificateError | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        symbolic = [isinstance(t, SymbolicTensor) for t in args]
        if name in _READING and any(symbolic):
            self._refuse("reads values of the tokens")
        if func is torch.nn.functional.scaled_dot_product_attention and any(symbolic[:3]):
            return self._guarded(name, lambda: self._wrapped(self._attention(*args, **kwargs)))
        return func(*args, **kwargs)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Perform an operation of PyTorch on terms."""
        name = func.overloadpacket.__name__ if func.namespace == "aten" else func.name()
        self.terms.owner = running_module(self._names)
        return self._guarded(name, lambda: self._performed(func, name, args, kwargs))

    def _guarded(self, name: str, perform: Callable[[], Any]) -> Any:
        if self.refused is not None:
            raise self.refused
        try:
            # What is done with terms is no operation of the model.
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return perform()
        except DifferentOperationError as error:
            self._refuse(str(error))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            self._refuse(f"computes '{name}' in a way that is not known ({reason(error)})")

    def _refuse(self, why: str) -> None:
        """Raise CertificateError with the name of the module whose code is running."""
        self.refused = self.refused or refused_module(self._names, why, running_module(self._names))
        raise self.refused

    def _wrapped(self, entries: Tensor) -> SymbolicTensor:
        return SymbolicTensor(entries, self)

    def _entries(self, t: Tensor) -> Tensor:
        return t.entries if isinstance(t, SymbolicTensor) else self.terms.fixed(t)

    def _performed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in _SHAPE_ALONE:
            return func(*tree_map_only(SymbolicTensor, _blank, args), **kwargs)
        in_place = func._schema.is_mutable and name.endswith("_") and isinstance(args[0], SymbolicTensor)
        if name == "_to_copy" and kwargs.get("dtype") in (None, torch.float64):
            return self._wrapped(args[0].entries.clone())
        if name in _REARRANGING and func._overloadname != "dtype":
            found = func(tree_map_only(Tensor, _rearranged, args[0]), *args[1:], **kwargs)
            return tree_map_only(Tensor, self._wrapped, found)
        base = name.removesuffix("_") if in_place else name
        if base in _ELEMENTWISE and not kwargs and len(args) == 1:
            found = self.terms.applied(base, args[0].entries)
        elif base in _RULES and not (func._schema.is_mutable and not in_place):
            found = _RULES[base](self, *args, **kwargs)
        else:
            read = name in ("_local_scalar_dense", "equal", "is_nonzero", "item")
            what = "reads values of the tokens" if read else f"computes '{base}', which no known layer does"
            raise DifferentOperationError(what)
        if not in_place:
            return tree_map_only(Tensor, self._wrapped, found)
        # Views of the same memory share the numbers of terms, too.
        args[0].entries.copy_(found)
        return args[0]

    # ---- operations with a rule

    def _attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        q, k, v = (self._entries(t) for t in (query, key, value))
        if dropout_p or isinstance(attn_mask, SymbolicTensor):
            raise DifferentOperationError(
                "computes attention with dropout, or a mask that depends on the tokens"
            )
        n, m = q.shape[-2], k.shape[-2]
        mask = torch.zeros(n, m, dtype=torch.float64)
        if is_causal:
            mask.masked_fill_(torch.ones(n, m, dtype=torch.bool).tril().logical_not(), -math.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            mask = mask.masked_fill(attn_mask.logical_not(), -math.inf)
        elif attn_mask is not None:
            mask = mask + attn_mask
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
        scores = self.terms.times(_batched(self.terms.scores, q, k), factor)
        weights = self.terms.softmax(self.terms.plus(scores, mask))
        return _batched(self.terms.weighted, weights, v)

    def _fused_attention(
        self, q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        found = self._attention(q, k, v, dropout_p=dropout, is_causal=causal, **kwargs)
        return found, torch.full(found.shape[:-1], OTHER)

    def _product(self, a: Any, b: Any) -> Tensor:
        if isinstance(b, SymbolicTensor):
            return _batched(self.terms.product, self._entries(a), b.entries)
        return _batched(lambda u, w: self.terms.linear(u, w.mT, None), a.entries, b)

    def _addmm(self, bias: Tensor, a: Any, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if not isinstance(a, SymbolicTensor) or beta != 1 or alpha != 1 or bias.ndim != 1:
            raise DifferentOperationError("computes 'addmm' in a way that is not known")
        return self.terms.linear(a.entries, b.mT, bias)

    def _add(self, a: Any, b: Any, *, alpha: float = 1) -> Tensor:
        if alpha != 1:
            raise DifferentOperationError("computes 'add' in a way that is not known")
        if isinstance(a, SymbolicTensor) and isinstance(b, SymbolicTensor):
            return self.terms.add(a.entries, b.entries)
        (u, c) = (a, b) if isinstance(a, SymbolicTensor) else (b, a)
        return self.terms.plus(u.entries, c)

    def _sub(self, a: Any, b: Any, *, alpha: float = 1) -> Tensor:
        symbolic = isinstance(b, SymbolicTensor)
        return self._add(
            a, self._wrapped(self.terms.applied("neg", b.entries)) if symbolic else -b, alpha=alpha
        )

    def _masked_fill(self, a: Any, mask: Tensor, value: Any) -> Tensor:
        if not isinstance(a, SymbolicTensor) or isinstance(mask, SymbolicTensor):
            raise DifferentOperationError("hides scores by a mask that depends on the tokens")
        if not float(value) <= torch.finfo(torch.float32).min:
            why = f"replaces scores by {float(value):g}, which hides no token; minus infinity does"
            raise DifferentOperationError(why)
        hidden = torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(mask, -math.inf)
        return self.terms.plus(a.entries, hidden)

    def _where(self, condition: Tensor, a: Any, b: Any) -> Tensor:
        if isinstance(b, SymbolicTensor) or torch.as_tensor(b).numel() != 1:
            raise DifferentOperationError("chooses between values")
        return self._masked_fill(a, condition.logical_not(), b)

    def _baddbmm(self, c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
        product = self.terms.times(self._product(a, b), float(alpha))
        if isinstance(c, SymbolicTensor):
            raise DifferentOperationError("adds something to scores that depends on the tokens")
        return self.terms.plus(product, c * beta) if beta else product

    def _batch_norm(
        self,
        a: SymbolicTensor,
        gain: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        *more: Any,
    ) -> tuple[Any, ...]:
        if any(flag is True for flag in more[:-2]):
            raise DifferentOperationError("normalises by the statistics of its batch")
        factor = (variance + more[-1]).rsqrt() * (1.0 if gain is None else gain)
        offset = (0.0 if bias is None else bias) - mean * factor
        found = self.terms.plus(self.terms.times(a.entries.movedim(1, -1), factor), offset).movedim(-1, 1)
        return found, torch.full((0,), OTHER), torch.full((0,), OTHER)

    def _rms_norm(
        self, a: SymbolicTensor, shape: list[int], gain: Tensor | None, eps: float | None
    ) -> tuple[Any, ...]:
        if len(shape) != 1 or isinstance(gain, SymbolicTensor) or eps is None:
            raise DifferentOperationError("normalises in a way that is not known")
        unknown = torch.full((*a.shape[:-1], 1), OTHER)
        return self.terms.norm(a.entries, False, eps, gain, None), unknown

    def _mul(self, a: Any, b: Any) -> Tensor:
        if isinstance(a, SymbolicTensor) and isinstance(b, SymbolicTensor):
            return self.terms.multiply(a.entries, b.entries)
        (u, c) = (a, b) if isinstance(a, SymbolicTensor) else (b, a)
        return self.terms.times(u.entries, c)

    def _div(self, a: Any, b: Any) -> Tensor:
        if not isinstance(a, SymbolicTensor) or isinstance(b, SymbolicTensor):
            raise DifferentOperationError("divides by something that depends on the tokens")
        return self.terms.times(a.entries, 1 / torch.as_tensor(b, dtype=torch.float64))

    def _pow(self, a: Any, power: Any) -> Tensor:
        if not isinstance(a, SymbolicTensor) or power not in (2, 3):
            raise DifferentOperationError(f"computes the power {power}")
        u = a.entries
        return self.terms.multiply(u, u) if power == 2 else self.terms.applied("cube", u)

    def _gelu(self, a: SymbolicTensor, *, approximate: str = "none") -> Tensor:
        return self.terms.applied({"none": "gelu", "tanh": "gelu_tanh"}[approximate], a.entries)

    def _softmax(self, a: SymbolicTensor, dim: int, half_to_float: bool = False) -> Tensor:
        return self.terms.softmax(a.entries.movedim(dim, -1)).movedim(-1, dim)

    def _layer_norm(
        self, a: SymbolicTensor, shape: list[int], gain: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Any, ...]:
        if len(shape) != 1:
            raise DifferentOperationError("normalises more than one dimension")
        if any(isinstance(t, SymbolicTensor) for t in (gain, bias)):
            raise DifferentOperationError("has a norm layer whose weights depend on the tokens")
        found = self.terms.norm(a.entries, True, eps, gain, bias)
        unknown = torch.full((*a.shape[:-1], 1), OTHER)
        return found, unknown, unknown.clone()

    def _mean(
        self, a: SymbolicTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Tensor:
        return self._reduced(self.terms.mean, a, dim, keepdim, dtype)

    def _sum(self, a: SymbolicTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        return self._reduced(self.terms.total, a, dim, keepdim, dtype)

    def _reduced(self, reduce: Any, a: SymbolicTensor, dim: Any, keepdim: bool, dtype: Any) -> Tensor:
        if not isinstance(dim, list) or len(dim) != 1 or dtype not in (None, torch.float64):
            raise DifferentOperationError("adds or averages over more than one dimension")
        found: Tensor = reduce(a.entries, dim[0])
        return found.unsqueeze(dim[0]) if keepdim else found


_RULES: dict[str, Callable[..., Any]] = {
    "mm": _Run._product,
    "bmm": _Run._product,
    "addmm": _Run._addmm,
    "add": _Run._add,
    "baddbmm": _Run._baddbmm,
    "masked_fill": _Run._masked_fill,
    "where": _Run._where,
    "native_batch_norm": _Run._batch_norm,
    "_native_batch_norm_legit_no_training": _Run._batch_norm,
    "_fused_rms_norm": _Run._rms_norm,
    "sub": _Run._sub,
    "mul": _Run._mul,
    "div": _Run._div,
    "pow": _Run._pow,
    "gelu": _Run._gelu,
    "_softmax": _Run._softmax,
    "_scaled_dot_product_flash_attention_for_cpu": _Run._fused_attention,
    "native_layer_norm": _Run._layer_norm,
    "mean": _Run._mean,
    "sum": _Run._sum,
}


def refused_module(
    names: dict[nn.Module, str], why: str, module: nn.Module | None = None
) -> CertificateError:
    """Return the error that names a module, or else the model, which is the first of the names."""
    module = module if module in names else next(iter(names))
    return CertificateError(names[module], kind=type(module).__name__, reason=why)


def _blank(t: SymbolicTensor) -> Tensor:
    return torch.zeros(t.shape, dtype=torch.float64).as_strided(t.shape, t.stride())


def _rearranged(t: Tensor) -> Tensor:
    if not isinstance(t, SymbolicTensor) and t.numel():
        raise DifferentOperationError("joins tokens and constants")
    return t.entries if isinstance(t, SymbolicTensor) else t.long()


def _batched(function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Apply a function of two matrices to batches (..., rows, columns) of them, broadcast to one size."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    pairs = zip(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), strict=True)
    found = torch.stack([function(*pair) for pair in pairs])
    return found.reshape(*batch, *found.shape[1:])


def run_on_symbols(
    function: Callable[[Callable[[Tensor], SymbolicTensor]], Any], terms: Terms, names: dict[nn.Module, str]
) -> Tensor:
    """Run a function on symbolic tensors, and return the entries of its result. Raise CertificateError with
    the name of the module whose code performs an operation that no known layer has, or reads values.

    The function is given a function that makes a symbolic tensor of entries.
    """
    run = _Run(terms, names)
    try:
        with torch.no_grad(), fast_path(False), eager(), run:
            found = function(run._wrapped)
    except Exception as error:
        if run.refused is None and isinstance(error, HowsmoothError):
            raise
        raise run.refused or refused_module(names, f"does not run without values ({reason(error)})") from None
    if run.refused is not None:
        raise run.refused from None
    if not isinstance(found, SymbolicTensor):
        raise refused_module(names, "has an output that is not computed from its tokens")
    return found.entries
