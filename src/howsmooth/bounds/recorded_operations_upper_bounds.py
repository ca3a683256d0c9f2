"""An upper bound on a ball for a map given by PyTorch code, computed from the operations that the code runs.

It is for layers that are known by their code and not by matrices: gated attention, latent attention, scores
whose biases depend on the tokens. Proof: documentation page "Bounds for recorded maps",
Theorem P.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from howsmooth.attention import TokenMap
from howsmooth.attention.custom_code_attention import Core, SoftmaxCore, StagedAttention
from howsmooth.bounds.attention_parameters import SiteLike
from howsmooth.bounds.bound import Bound, Quantity, check_length, check_radius
from howsmooth.bounds.pytorch_operation_bounds import NoRuleError, Range, range_of, softmax_attention, written
from howsmooth.errors import ArgumentError

__all__ = ["Recording", "recorded_map_ball_upper_bound"]

_SOURCE = 'howsmooth documentation, "Bounds for recorded maps", Theorem P'


def recorded_map_ball_upper_bound(attention: object, length: object, radius: object) -> Bound:
    """Bound Lip(f on B_R^n) of a map given by PyTorch code, from the operations that the code runs.

    The map is run, and each operation gives bounds on the values and on the derivative of its result for all
    tokens of the ball. Softmax attention, norm layers and linear maps have rules of their own, so that the
    bound does not grow with the values of keys that are normed, for instance. The bound is finite for every
    layer whose operations have rules, and looser than the bounds for attention that is known by its matrices,
    which ``best`` takes wherever there is one.

    Parameters
    ----------
    attention
        A :class:`~howsmooth.attention.TokenMap` or a captured site.
    length
        Number n >= 1 of tokens.
    radius
        Largest norm R > 0 of a token.

    Returns
    -------
    Bound
        Upper bound on Lip(f on B_R^n) of the map with its stored weights in float64.

    Raises
    ------
    ArgumentError
        If ``attention`` is no map, length or radius do not fit, or an operation of the map has no rule.

    References
    ----------
    Documentation page "Bounds for recorded maps", Theorem P.

    """
    f = (
        attention.map
        if isinstance(attention, SiteLike) and not isinstance(attention, TokenMap)
        else attention
    )
    if not isinstance(f, TokenMap):
        raise ArgumentError("attention", expected="a map of tokens or a captured site", got=type(f).__name__)
    n, R = check_length(length), check_radius(radius)
    f.check_length(n)
    f = f.to(dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(0)
    constants: list[list[Tensor]] = []
    slope = math.nan
    try:
        for _ in range(2):
            x = torch.randn(n, f.d, dtype=torch.float64, generator=generator)
            # The norms differ as well, so that no function of the tokens is the same at both.
            norms = R * torch.rand(n, 1, dtype=torch.float64, generator=generator)
            x *= norms / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            recording = Recording(x, R)
            if isinstance(f, StagedAttention):
                slope = recording.range_of(partial(f.run, core=recording.core(f.cores))).slope
            else:
                slope = recording.range_of(f._forward).slope
            constants.append(recording.constants)
    except NoRuleError as error:
        raise ArgumentError(
            "attention",
            expected="operations that have a rule for bounds",
            got=f"{f.describe()}, with {error}",
        ) from error
    same = len(constants[0]) == len(constants[1]) and all(map(_equal, *constants))
    if not same or not math.isfinite(slope):
        raise ArgumentError(
            "attention",
            expected="operations that are the same for all tokens of the ball, with finite bounds",
            got=f"{f.describe()}, with {'an infinite bound' if same else 'other operations at other tokens'}",
        )
    causal = bool(getattr(f, "causal", False))
    quantity = Quantity.MASKED if causal else Quantity.GLOBAL
    return Bound.upper("recorded_map_ball_upper_bound", quantity, _SOURCE, formula=slope)


_NEW = ("new_empty", "new_zeros", "empty", "zeros", "empty_like", "zeros_like", "new_full", "full_like")


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


class Recording(TorchDispatchMode):
    """A PyTorch dispatch mode that runs a map and bounds every tensor that depends on the input tokens.

    Parameters
    ----------
    x
        Tokens (n, d) in float64, at which the map is run.
    radius
        Radius of the ball for which the ranges hold.

    """

    def __init__(self, x: Tensor, radius: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.x = x
        # Tensors that enter an operation beside one that depends on the tokens.
        self.constants: list[Tensor] = []
        self._ranges = WeakIdKeyDictionary()
        # New tensors, into which parts may be written.
        self._buffers = WeakIdKeyDictionary()
        size = torch.full_like(x, radius)
        self._ranges[x] = Range.of(size, 1.0, torch.full_like(x[:, 0], radius))

    def range_of(self, run: Callable[[Tensor], Tensor]) -> Range:
        """Run a function of the tokens, and bound the values and the derivative of its result on the ball.

        Raises
        ------
        NoRuleError
            If an operation has no rule, or the result is not finite or does not depend on the tokens.

        """
        with torch.no_grad(), self:
            y = run(self.x)
        if y not in self._ranges:
            raise NoRuleError("an output that does not depend on the tokens")
        if not bool(torch.isfinite(y).all()):
            raise NoRuleError("an output that is not finite")
        found = self._known(y)
        assert isinstance(found, Range)
        return found

    def core(self, cores: Sequence[SoftmaxCore]) -> Core:
        """Return a function that computes the softmax attentions of a layer and bounds their outputs."""

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with _disable_current_modes():
                out = cores[i].attend(q, k, v)
                self._ranges[out] = softmax_attention(cores[i], *(self._known(t) for t in (q, k, v)))
            return out

        return attend

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _NEW:
            self._buffers[result] = None
        if name in _NEW or not any(t in self._ranges for t in tensors):
            return result
        if name in ("copy_", "fill_"):
            self._write(args[0], args[1])
            return result
        if func._schema.is_mutable:
            self._check_alone(name, args[0])
            name = name.removesuffix("_")
        self.constants += [t for t in tensors if t not in self._ranges]
        ranged_args, ranged_kwargs = tree_map_only(Tensor, self._known, (args, kwargs))
        made = range_of(name, ranged_args, ranged_kwargs)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        ranges = made if isinstance(made, list) else [made]
        for output, one in zip_longest(outputs, ranges):
            # An output without a range, such as the mean in a norm layer, must not be used.
            if one is not None and (not output.is_floating_point() or one.size.shape != output.shape):
                raise NoRuleError(f"the operation {name}, whose result is not as expected")
            self._ranges[output] = one
        return result

    def _write(self, view: Tensor, value: Tensor | float) -> None:
        """Update the recorded bounds on a tensor after new values have been assigned to a part of it."""
        buffer = next((t for t in self._buffers if _memory(t) == _memory(view)), None)
        if buffer is None or not buffer.is_contiguous() or buffer.storage_offset():
            raise NoRuleError("a write into a part of a tensor that is not new")
        self._check_alone("copy", buffer, view)
        entries = torch.arange(buffer.numel())
        place = entries.as_strided(view.shape, view.stride(), view.storage_offset())
        if isinstance(value, Tensor):
            self.constants += [] if value in self._ranges else [value]
        # Before the first write the entries are constants; those of this place are replaced below.
        before = self._ranges[buffer] if buffer in self._ranges else buffer.clone()
        self._ranges[buffer] = written(
            before, place, self._known(value) if isinstance(value, Tensor) else value
        )

    def _check_alone(self, name: str, *known: Tensor) -> None:
        """Raise NoRuleError if an in-place operation also changes another recorded tensor that shares its
        memory.
        """
        sharing = [t for t in self._ranges if _memory(t) == _memory(known[0])]
        if not all(any(t is one for one in known) for t in sharing):
            raise NoRuleError(f"the operation {name}, which writes into a part of a tensor")

    def _known(self, t: Tensor) -> Range | Tensor:
        """Return the recorded bounds on a tensor if it depends on the tokens, and otherwise the tensor
        itself.
        """
        if t not in self._ranges:
            return t
        found: Range | None = self._ranges[t]
        if found is None:
            raise NoRuleError("an operation of which only the first result has a rule")
        return found
