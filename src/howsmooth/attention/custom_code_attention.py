"""Attention layers given as arbitrary PyTorch code around softmax attentions whose derivatives are known.

The softmaxes, called cores, belong to this library, so that their derivatives have a closed form. The code
before them (projections, norms of queries and keys, positions, windows) and after them (gates, norms, the
output projection) may be any differentiable PyTorch code of cost O(n d²).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.attention.atom_weights import Weighting
from howsmooth.attention.map import TokenMap, converted
from howsmooth.attention.masks import Visibility, check_seen, check_window
from howsmooth.attention.scaled_dot_product import ScoreFeatures, attend
from howsmooth.errors import ArgumentError, NonFiniteError

__all__ = ["Core", "CoreShape", "Layer", "SoftmaxCore", "StagedAttention"]

# A function (index of the softmax in the layer, queries, keys, values) -> outputs of the heads.
Core = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class SoftmaxCore:
    """One softmax attention as a function of its queries, keys and values.

    P_ij ∝ exp(c tanh(scale ⟨q_i, k_j⟩ / c) + bias_ij) over the keys j that query i sees. Query heads that
    share a key head are adjacent. There may be leading axes, for instance one of windows of tokens, and the
    number m of queries may differ from the number n of keys.

    Parameters
    ----------
    scale, causal, window, softcap, sinks
        As for :class:`~howsmooth.attention.SelfAttention`; causal order and windows need m = n.
    mask, score_bias
        As there, but broadcastable to (*lead, heads, m, n). Beside sinks a query may see no key.

    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    score_bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ArgumentError("scale", expected="a finite number", got=str(self.scale))
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ArgumentError("softcap", expected="a finite number > 0, or None", got=str(self.softcap))
        check_window(self.window)
        mask = self.mask
        if mask is not None and not (mask.dtype == torch.bool and mask.ndim >= 2 and mask.numel()):
            raise ArgumentError(
                "mask",
                expected="a boolean tensor (..., m, n), True where the query sees the key",
                got=f"{mask.dtype} of shape {tuple(mask.shape)}",
                remedy="Convert an additive mask with mask == 0.",
            )
        for name, tensor, axes in (
            ("score_bias", self.score_bias, "(..., m, n)"),
            ("sinks", self.sinks, "(heads,)"),
        ):
            if tensor is None:
                continue
            fits = tensor.ndim == 1 if name == "sinks" else tensor.ndim >= 2
            if not (fits and tensor.is_floating_point()):
                got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                raise ArgumentError(name, expected=f"a floating-point tensor {axes}", got=got)
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(
                    name,
                    expected="finite numbers",
                    got="NaN or infinity",
                    remedy="Pass hidden keys as the mask." if name == "score_bias" else "",
                )
        if mask is not None and self.sinks is None:
            check_seen(mask, self.causal, self.window)

    def attend(
        self,
        q: Float[Tensor, "*lead heads m key_dim"],
        k: Float[Tensor, "*lead kv_heads n key_dim"],
        v: Float[Tensor, "*lead kv_heads n value_dim"],
    ) -> Float[Tensor, "*lead heads m value_dim"]:
        """Return the outputs Σ_j P_ij v_j of each head, computed in memory O((m + n) d). Raises the errors of
        :meth:`rules`.
        """
        visible, features = self.rules(q, k)
        grouped = q.unflatten(-3, (k.shape[-3], -1))
        out = attend(grouped, k, v, self.scale, visible, features=features)
        return out.flatten(-4, -3)

    def rules(self, q: Tensor, k: Tensor) -> tuple[Visibility, ScoreFeatures]:
        """Return the mask and the features of the scores for given queries and keys. Raise ArgumentError if
        a mask, a bias or the sinks do not fit them.
        """
        (heads, m), (kv_heads, n) = q.shape[-3:-1], k.shape[-3:-1]
        if heads % kv_heads:
            raise ArgumentError(
                "k", expected=f"a number of heads that divides the {heads} of q", got=f"{kv_heads} heads"
            )
        if (self.causal or self.window is not None) and m != n:
            raise ArgumentError(
                "causal" if self.causal else "window",
                expected="as many queries as keys",
                got=f"{m} queries, {n} keys",
                remedy="Pass the visible keys as the mask.",
            )
        if self.sinks is not None and self.sinks.shape[0] != heads:
            raise ArgumentError("sinks", expected=f"one for each of {heads} heads", got=str(len(self.sinks)))

        def spread(name: str, given: Tensor | None) -> Tensor | None:
            return None if given is None else _grouped(name, given, (*q.shape[:-1], n), kv_heads)

        seen, bias = spread("mask", self.mask), spread("score_bias", self.score_bias)
        # A mask without head and leading axes is applied by blocks, at no cost where a block is visible.
        common = None
        if seen is not None and seen.numel() == m * n:
            common, seen = seen.reshape(m, n), None

        sinks = None if self.sinks is None else self.sinks.unflatten(0, (kv_heads, -1))
        visible = Visibility(n, self.causal, self.window, common)
        return visible, ScoreFeatures(self.softcap, bias, sinks, seen)

    def head(self, h: int) -> SoftmaxCore:
        """Return the softmax attention of the single head ``h``."""

        def pick(t: Tensor | None) -> Tensor | None:
            return t if t is None or t.ndim < 3 or t.shape[-3] == 1 else t[..., h : h + 1, :, :]

        sinks = None if self.sinks is None else self.sinks[h : h + 1]
        return replace(self, mask=pick(self.mask), score_bias=pick(self.score_bias), sinks=sinks)

    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the features of the scores, for messages."""
        named = {"soft-capped scores": self.softcap, "a score bias": self.score_bias, "sinks": self.sinks}
        return tuple(name for name, there in named.items() if there is not None)

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> SoftmaxCore:
        """Return a copy of the softmax attention with its tensors in another dtype or on another device."""
        return SoftmaxCore(**{name: converted(t, dtype, device) for name, t in vars(self).items()})


class CoreShape(NamedTuple):
    """The sizes of the queries, keys and values of one softmax attention."""

    lead: int  # product of the leading axes, for instance the number of windows
    heads: int
    kv_heads: int
    m: int
    n: int
    key_dim: int
    value_dim: int


@runtime_checkable
class Layer(Protocol):
    """The interface of PyTorch code for a self-attention layer whose softmax attentions can be replaced."""

    def run(self, x: Tensor, core: Core) -> Tensor:
        """Run the layer on one sequence ``x`` (n, d). The function ``core`` replaces each softmax attention.

        Instead of its i-th softmax attention (i counts from 0 in the order of the calls) the layer calls
        ``core(i, q, k, v)`` with q (*lead, heads, m, key_dim), k (*lead, kv_heads, n, key_dim) and v
        (*lead, kv_heads, n, value_dim), which returns (*lead, heads, m, value_dim). The layer must be
        deterministic, must not change the tokens in place, and its parameters have no gradients.
        """

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Layer:
        """Return a copy of the layer whose parameters have another dtype or lie on another device."""


class StagedAttention(TokenMap):
    """Self-attention given as PyTorch code around softmax attentions (cores), X (..., n, d) -> (..., n_out,
    d_out).

    The Jacobian of the cores, which take most of the time, has a closed form; PyTorch differentiates the
    layer around them. A core may depend on the outputs of earlier cores. Members of a batch run one by one.

    Parameters
    ----------
    layer, cores
        The code before and after the cores, and these in the order in which the layer calls them.
    d, d_out
        Dimensions of an input token and of an output token.
    heads
        Number of heads of a core.
    n
        Number of tokens; masks and positions inside the layer fix it.
    causal
        Whether an output depends only on its own and earlier tokens; used in reports only.
    dtype, device
        Data type and device of the layer's parameters and of the tokens.
    description
        A phrase that describes the layer, for messages and reports.

    Raises
    ------
    ArgumentError
        If there is no core or a number is not positive. A call raises it if the layer breaks its contract.

    """

    def __init__(
        self,
        layer: Layer,
        cores: tuple[SoftmaxCore, ...],
        *,
        d: int,
        d_out: int,
        heads: int,
        n: int,
        causal: bool,
        dtype: torch.dtype,
        device: torch.device,
        description: str = "self-attention",
    ) -> None:
        if not cores:
            raise ArgumentError("cores", expected="at least one softmax", got="none")
        for name, number in (("d", d), ("d_out", d_out), ("heads", heads), ("n", n)):
            if number < 1:
                raise ArgumentError(name, expected="a whole number >= 1", got=str(number))
        self.layer = layer
        self.cores = cores
        self.heads = heads
        self.n = n
        self.causal = causal
        self.description = description
        self._sizes = (d, d_out)
        self._placed = (dtype, device)
        self._origin: StagedAttention | None = None
        self._shapes: list[CoreShape] = []  # filled by core_shapes

    @property
    def d(self) -> int:
        """Dimension of the map's input tokens."""
        return self._sizes[0]

    @property
    def d_out(self) -> int:
        """Dimension of the map's output tokens."""
        return self._sizes[1]

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the map's parameters."""
        return self._placed[0]

    @property
    def device(self) -> torch.device:
        """Device of the map's parameters."""
        return self._placed[1]

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        heads = f"{self.heads} head{'s' if self.heads > 1 else ''}"
        features = dict.fromkeys(name for core in self.cores for name in core.feature_names())
        return ", ".join((self.description, heads, "causal" if self.causal else "not causal", *features))

    def __repr__(self) -> str:
        return f"StagedAttention({self.describe()}, n={self.n}, d={self.d}, d_out={self.d_out})"

    def check_length(self, n: int) -> None:
        """Raise ArgumentError unless ``n`` is the number of tokens for which the layer was captured."""
        if n != self.n:
            raise ArgumentError("X", expected=f"n = {self.n} tokens, the length of the layer", got=f"n = {n}")

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> StagedAttention:
        """Return a copy of the map whose parameters have another dtype or lie on another device."""
        placed = (dtype or self.dtype, torch.device(device or self.device))
        for known in (self, self._origin):
            if known is not None and known._placed == placed:
                return known
        dtype, device = placed
        layer = self.layer.to(dtype=dtype, device=device)
        cores = tuple(core.to(dtype=dtype, device=device) for core in self.cores)
        made = self._rebuilt(layer=layer, cores=cores, dtype=dtype, device=device)
        made._origin = self  # so that converting back returns the same numbers
        made._shapes = self._shapes
        return made

    def run(self, x: Float[Tensor, "n d"], core: Core) -> Float[Tensor, "n_out d_out"]:
        """Run the layer on one sequence, with the function ``core`` in place of each softmax attention.

        Raise ArgumentError if the layer calls other cores than it has, or in another order, or if its output
        is not (n_out, d_out) in the dtype of ``x``.
        """
        called: list[int] = []
        order = list(range(len(self.cores)))

        def wrong_calls() -> ArgumentError:
            expected = f"calls of the cores {order}, in this order"
            return ArgumentError("layer", expected=expected, got=f"calls {called}")

        def counted(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            called.append(i)
            if called != order[: len(called)]:
                raise wrong_calls()
            return core(i, q, k, v)

        y = self.layer.run(x, counted)
        if called != order:
            raise wrong_calls()
        if y.ndim != 2 or y.shape[1] != self.d_out or y.dtype != x.dtype:
            raise ArgumentError(
                "layer",
                expected=f"an output (n_out, {self.d_out}), {x.dtype}",
                got=f"shape {tuple(y.shape)}, {y.dtype}",
            )
        return y

    def refuse_measures(self, weighting: Weighting | None) -> None:
        """Raise ArgumentError if a ``weighting`` is given, because the layer cannot act on measures."""
        if weighting is not None:
            raise ArgumentError(
                "measure",
                expected="a map that can act on measures",
                got="attention in stages, whose layer takes a list of tokens",
                remedy="Call the map on tokens.",
            )

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        self.refuse_measures(weighting)

        def core(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.cores[i].attend(q, k, v)

        members = [self.run(member, core) for member in x.reshape(-1, *x.shape[-2:])]
        return torch.stack(members).reshape(*x.shape[:-2], *members[0].shape)

    # ---- related maps

    def without_output(self) -> StagedAttention:
        """Return the layer without its output projection: the concatenated heads (scope ``heads``). Raise
        ArgumentError if the layer has several softmaxes, or if its softmax acts on windows.
        """
        return self._rebuilt(
            layer=_UpToCore(self.layer, None),
            d_out=self.heads * self._value_dim("heads"),
            description=f"{self.description}, heads concatenated",
        )

    def head(self, h: int) -> StagedAttention:
        """Return one head as a map of tokens, without the code after the softmax (scope ``head``). Raise
        ArgumentError if there is no head ``h``, and for layers that :meth:`without_output` refuses.
        """
        if not 0 <= h < self.heads:
            raise ArgumentError("h", expected=f"a head from 0 to {self.heads - 1}", got=str(h))
        return self._rebuilt(
            layer=_UpToCore(self.layer, h),
            d_out=self._value_dim("head"),
            cores=(self.cores[0].head(h),),
            heads=1,
            description=f"{self.description}, head {h} alone",
        )

    def core_shapes(self) -> tuple[CoreShape, ...]:
        """Return the sizes of each softmax attention of the layer. The first call runs the layer once to find
        them, with zeros as the softmax attentions' outputs.
        """
        if self._shapes:
            return tuple(self._shapes)
        found: list[CoreShape] = []

        def shaped(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            sizes = (q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
            found.append(CoreShape(math.prod(q.shape[:-3]), *sizes))
            return v.new_zeros((*q.shape[:-1], v.shape[-1]))

        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            # The tokens are small because a layer may refuse tokens outside of a ball.
            x = 2**-20 * torch.randn(self.n, self.d, generator=generator)
            self.run(x.to(dtype=self.dtype, device=self.device), shaped)
        self._shapes[:] = found
        return tuple(found)

    def _value_dim(self, scope: str) -> int:
        """Return the dimension of the values of the layer's softmax. Raise ArgumentError if the layer has
        several softmaxes, or if its softmax acts on windows.
        """
        first, *others = self.core_shapes()
        kind, got = "a layer of several softmaxes", f"{len(self.cores)} softmaxes"
        if not others:
            kind, got = "a softmax over windows", f"a softmax over {first.lead} windows"
        if others or first.lead != 1:
            raise ArgumentError(
                "scope", expected=f"'attention' or wider, for {kind}", got=f"{scope!r} of {got}"
            )
        return first.value_dim


class _UpToCore:
    """A layer that returns the output of its only softmax: all heads concatenated, or head ``h`` alone."""

    def __init__(self, layer: Layer, h: int | None) -> None:
        self.layer = layer
        self.h = h

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> _UpToCore:
        return _UpToCore(self.layer.to(dtype=dtype, device=device), self.h)

    def run(self, x: Tensor, core: Core) -> Tensor:
        kept: list[Tensor] = []

        def tap(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            whole = (*q.shape[:-1], v.shape[-1])
            if self.h is not None:
                g = self.h // (q.shape[-3] // k.shape[-3])
                q = q[..., self.h : self.h + 1, :, :]
                k, v = k[..., g : g + 1, :, :], v[..., g : g + 1, :, :]
            o = core(i, q, k, v)
            kept.append(o.reshape(o.shape[-3:]).movedim(0, 1).flatten(1))
            # The layer continues with zeros; what it computes after the softmax is not used.
            return v.new_zeros(whole)

        self.layer.run(x, tap)
        return kept[-1]


def _grouped(name: str, given: Tensor, whole: tuple[int, ...], kv_heads: int) -> Tensor:
    """Reshape a mask or bias as ScoreFeatures needs it, with the axis of heads split into (kv_heads, group).
    It must broadcast to ``whole``, the shape (*lead, heads, m, n) of the scores.
    """
    t = given
    while t.ndim > len(whole) and t.shape[0] == 1:
        t = t[0]
    t = t[(None,) * (len(whole) - t.ndim)]
    if t.ndim > len(whole) or any(a not in (1, b) for a, b in zip(t.shape, whole, strict=True)):
        expected = f"a shape that broadcasts to {whole}"
        raise ArgumentError(name, expected=expected, got=f"shape {tuple(given.shape)}")
    t = t.expand(*t.shape[:-2], *whole[-2:])
    t = t.unsqueeze(-3) if t.shape[-3] == 1 else t.unflatten(-3, (kv_heads, -1))
    if math.prod(t.shape[:-4]) == 1:
        return t.reshape(t.shape[-4:])
    return t.expand(*whole[:-3], *t.shape[-4:]).flatten(0, -5)
