"""Softmax attention between two sequences: queries from tokens x, keys and values from a memory y.

Such a map is no :class:`~howsmooth.attention.TokenMap`, since it takes two sequences. Its views are: as a
function of the tokens alone, of the memory alone, or of both together.
"""

from __future__ import annotations

import abc
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from howsmooth.attention.custom_code_attention import Core, SoftmaxCore, StagedAttention
from howsmooth.attention.multi_head_projections import (
    HeadParameters,
    in_heads,
    optional_parameter,
    projected_heads,
)
from howsmooth.errors import ArgumentError
from howsmooth.scopes import SIDES

__all__ = [
    "CrossAttention",
    "CrossLayer",
    "StagedCrossAttention",
    "TwoSequenceMap",
]


@runtime_checkable
class CrossLayer(Protocol):
    """The interface of PyTorch code for a cross-attention layer in which the softmax attentions can be
    replaced.
    """

    def run(self, x: Tensor, memory: Tensor, core: Core) -> Tensor:
        """Return the outputs (m, d_out) for tokens ``x`` (m, d) and a memory (n, d_memory).

        The layer calls ``core`` for each softmax, as :meth:`howsmooth.attention.Layer.run` does.
        """

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> CrossLayer:
        """Return a copy of the layer whose parameters have another dtype or lie on another device."""


class TwoSequenceMap(abc.ABC):
    """Base class of maps f(x, y) of two sequences: tokens x (..., m, d) and a memory y (..., n, d_memory).
    The outputs have shape (..., m, d_out).

    Such a map consists of PyTorch code around softmax attentions (cores), whose derivatives have a closed
    form. Leading axes are batch axes. Its parameters are tensors without gradients.
    """

    heads: int
    #: The softmax attentions, in the order in which the map calls them.
    cores: tuple[SoftmaxCore, ...]

    @property
    @abc.abstractmethod
    def d(self) -> int:
        """Dimension of a token x_i."""

    @property
    @abc.abstractmethod
    def d_memory(self) -> int:
        """Dimension of a memory token y_j."""

    @property
    @abc.abstractmethod
    def d_out(self) -> int:
        """Dimension of an output token."""

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """Data type of the parameters."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Device of the parameters."""

    @abc.abstractmethod
    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> TwoSequenceMap:
        """Return the map with its parameters converted to another dtype or device."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""

    @abc.abstractmethod
    def check_lengths(self, m: int, n: int) -> None:
        """Raise ArgumentError if the map cannot take m tokens and n memory tokens."""

    @abc.abstractmethod
    def run(self, x: Tensor, memory: Tensor, core: Core) -> Tensor:
        """Return the outputs (m, d_out) for one pair of sequences, with a given function in place of each
        softmax attention.
        """

    def __call__(self, x: Tensor, memory: Tensor) -> Float[Tensor, "*batch m d_out"]:
        """Return the outputs (..., m, d_out) for tokens x (..., m, d) and a memory (..., n, d_memory).

        Raises
        ------
        ArgumentError
            If a shape, dtype or device does not fit.

        """
        self._check("x", x, self.d)
        self._check("memory", memory, self.d_memory)
        if x.shape[:-2] != memory.shape[:-2]:
            raise ArgumentError(
                "memory",
                expected=f"the leading axes {tuple(x.shape[:-2])} of x",
                got=f"shape {tuple(memory.shape)}",
            )
        self.check_lengths(x.shape[-2], memory.shape[-2])

        def core(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.cores[i].attend(q, k, v)

        pairs = zip(x.reshape(-1, *x.shape[-2:]), memory.reshape(-1, *memory.shape[-2:]), strict=True)
        return torch.stack([self.run(*pair, core) for pair in pairs]).reshape(*x.shape[:-1], self.d_out)

    def view(self, side: str, x: Tensor, memory: Tensor) -> StagedAttention:
        """Return the map as a function of tokens, of the memory, or of both, for
        :func:`howsmooth.local_lipschitz`.

        Parameters
        ----------
        side
            ``"queries"``: the function x ↦ f(x, y) of the tokens, at the fixed ``memory``. ``"memory"``: the
            function y ↦ f(x, y) of the memory, at the fixed tokens ``x``. ``"joint"``: the function of both,
            whose argument is :meth:`joined`; its constant is the norm of [∂f/∂x, ∂f/∂y].
        x, memory
            Tokens (m, d) and memory (n, d_memory). If a sequence is an argument of the returned function,
            only its shape matters.

        Raises
        ------
        ArgumentError
            If ``side`` is none of the three, or a sequence does not fit.

        """
        if side not in SIDES:
            raise ArgumentError("side", expected=f"one of {', '.join(SIDES)}", got=repr(side))
        self._check("x", x, self.d, one=True)
        self._check("memory", memory, self.d_memory, one=True)
        m, n = len(x), len(memory)
        self.check_lengths(m, n)
        d, rows, words = {
            "queries": (self.d, m, "a function of its queries' tokens at a fixed memory"),
            "memory": (self.d_memory, n, "a function of its memory at fixed queries"),
            "joint": (max(self.d, self.d_memory), m + n, "a function of its queries' tokens and its memory"),
        }[side]
        return StagedAttention(
            _OneArgument(self, side, x.detach(), memory.detach()),
            self.cores,
            d=d,
            d_out=self.d_out,
            heads=self.heads,
            n=rows,
            causal=False,
            dtype=self.dtype,
            device=self.device,
            description=f"{self.describe()}, as {words}",
        )

    def joined(
        self, x: Float[Tensor, "*batch m d"], memory: Float[Tensor, "*batch n d_memory"]
    ) -> Float[Tensor, "*batch rows width"]:
        """Concatenate m tokens and n memory tokens into one sequence of m + n rows.

        If their dimensions differ, the shorter ones are filled up with zeros, which the map ignores.
        """
        width = max(self.d, self.d_memory)
        return torch.cat((pad(x, (0, width - self.d)), pad(memory, (0, width - self.d_memory))), dim=-2)

    def apart(
        self, z: Float[Tensor, "*batch rows width"], m: int
    ) -> tuple[Float[Tensor, "*batch m d"], Float[Tensor, "*batch n d_memory"]]:
        """Split a sequence made by :meth:`joined` into its m tokens and its memory."""
        return z[..., :m, : self.d], z[..., m:, : self.d_memory]

    def tokens(self, side: str, x: Tensor, memory: Tensor) -> Tensor:
        """Return the argument of :meth:`view` for the given ``side``: the tokens, the memory, or both
        concatenated.
        """
        return {"queries": x, "memory": memory}[side] if side != "joint" else self.joined(x, memory)

    def __repr__(self) -> str:
        sizes = f"d={self.d}, d_memory={self.d_memory}, d_out={self.d_out}"
        return f"{type(self).__name__}({self.describe()}, {sizes})"

    def _check(self, name: str, given: object, d: int, *, one: bool = False) -> None:
        expected = f"a tensor {'(' if one else '(..., '}rows, {d}) of {self.dtype} on {self.device}"
        if not isinstance(given, Tensor):
            raise ArgumentError(name, expected=expected, got=type(given).__name__)
        fits = given.ndim == 2 if one else given.ndim >= 2
        if not (fits and given.shape[-1] == d and given.shape[-2] >= 1):
            raise ArgumentError(name, expected=expected, got=f"shape {tuple(given.shape)}")
        if given.dtype != self.dtype or given.device != self.device:
            raise ArgumentError(
                name,
                expected=expected,
                got=f"{given.dtype} on {given.device}",
                remedy="Convert one of the two, with .to(...).",
            )


class _OneArgument:
    """A map of two sequences as a function of the tokens, of the memory, or of both concatenated. A sequence
    that is not an argument of this function is held fixed.
    """

    def __init__(self, f: TwoSequenceMap, side: str, x: Tensor, memory: Tensor) -> None:
        self.f = f
        self.side = side
        self.x = x
        self.memory = memory

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> _OneArgument:
        x, memory = (t.to(dtype=dtype, device=device) for t in (self.x, self.memory))
        return _OneArgument(self.f.to(dtype=dtype, device=device), self.side, x, memory)

    def run(self, z: Tensor, core: Core) -> Tensor:
        if self.side == "queries":
            return self.f.run(z, self.memory, core)
        if self.side == "memory":
            return self.f.run(self.x, z, core)
        return self.f.run(*self.f.apart(z, len(self.x)), core)


class CrossAttention(HeadParameters, TwoSequenceMap):
    """Multi-head softmax attention from tokens x (..., m, d) to a memory y (..., n, d_memory).

    f(x, y)_i = W_O · concat_h( Σ_j P^h_ij (V_h y_j + b_v,h) ) + b_O, where P^h is the row softmax of
    scale · ⟨Q_h x_i + b_q,h, K_h y_j + b_k,h⟩ over the visible keys j. The attention of the decoder of T5,
    BART, Marian or Whisper to the output of its encoder is such a map.

    Parameters
    ----------
    query
        (heads, key_dim, d).
    key
        (kv_heads, key_dim, d_memory), where kv_heads divides heads; as in
        :class:`~howsmooth.attention.SelfAttention`.
    value
        (kv_heads, value_dim, d_memory).
    output
        (d_out, heads * value_dim), or None for concatenated heads without output projection.
    query_bias, key_bias, value_bias, output_bias
        (heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim), (d_out,). Without softcap the key bias
        has no effect: it shifts all scores of a row alike.
    scale
        Factor of the scores; 1/sqrt(key_dim) by default, and 1 in T5.
    mask
        Boolean (m, n), or (1, n) for all queries alike, True where the query (row) may see the memory token
        (column), for instance to hide padding of the memory. Every query must see one.
    score_bias
        Finite numbers (heads, m, n), or (1, m, n) for all heads alike, added to the scores.
    softcap
        Soft cap c > 0: a score s becomes c · tanh(s / c), before bias and mask.

    Raises
    ------
    ArgumentError
        If a shape, dtype or device does not fit; the message names the argument.
    NonFiniteError
        If a parameter holds NaN or infinity.

    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor | None = None,
        *,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        output_bias: Tensor | None = None,
        scale: float | None = None,
        mask: Tensor | None = None,
        score_bias: Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__(
            query,
            key,
            value,
            output,
            query_bias=query_bias,
            key_bias=key_bias,
            value_bias=value_bias,
            output_bias=output_bias,
            scale=scale,
            memory=True,
        )
        self.mask = None if mask is None else _check_mask(mask, self.device)
        self.score_bias = optional_parameter("score_bias", score_bias, ("heads", "m", "n"), self.query)
        if self.score_bias is not None and self.score_bias.shape[0] not in (1, self.heads):
            raise ArgumentError(
                "score_bias",
                expected=f"shape ({self.heads}, m, n) or (1, m, n)",
                got=f"shape {tuple(self.score_bias.shape)}",
            )
        self.softcap = None if softcap is None else float(softcap)
        core = SoftmaxCore(self.scale, mask=self.mask, score_bias=self.score_bias, softcap=self.softcap)
        self.cores = (core,)

    @property
    def d_memory(self) -> int:
        """Dimension of a memory token y_j."""
        return self.key.shape[2]

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        masking = "unmasked" if self.mask is None else "masked"
        return ", ".join((self._described("cross-attention", masking), *self.cores[0].feature_names()))

    def check_lengths(self, m: int, n: int) -> None:
        """Raise ArgumentError if the mask or the score bias does not fit m tokens and n memory tokens."""
        for name, given in (("mask", self.mask), ("score bias", self.score_bias)):
            if given is None:
                continue
            rows, columns = given.shape[-2:]
            if n != columns:
                raise ArgumentError(
                    "memory", expected=f"n = {columns} tokens, the columns of the {name}", got=f"n = {n}"
                )
            if rows not in (1, m):
                raise ArgumentError(
                    "x", expected=f"m = {rows} tokens, the rows of the {name}", got=f"m = {m}"
                )

    def projections(
        self, x: Float[Tensor, "m d"], memory: Float[Tensor, "n d_memory"]
    ) -> tuple[
        Float[Tensor, "heads m key_dim"],
        Float[Tensor, "kv_heads n key_dim"],
        Float[Tensor, "kv_heads n value_dim"],
    ]:
        """Return the queries of tokens x, and the keys and values of a memory, biases included."""
        keys = in_heads(memory, self.key, self.key_bias)
        return in_heads(x, self.query, self.query_bias), keys, in_heads(memory, self.value, self.value_bias)

    def run(self, x: Tensor, memory: Tensor, core: Core) -> Tensor:
        """Return the outputs (m, d_out) for one pair of sequences, with the function ``core`` in place of the
        softmax attention.
        """
        return projected_heads(core(0, *self.projections(x, memory)), self.output, self.output_bias)

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> CrossAttention:
        """Return the attention with its parameters converted to another dtype or device."""
        bias = None if self.score_bias is None else self.score_bias.to(dtype=dtype, device=device)
        mask = None if self.mask is None else self.mask.to(device=device)
        return CrossAttention(
            **self._arguments(dtype, device), score_bias=bias, mask=mask, softcap=self.softcap
        )


class StagedCrossAttention(TwoSequenceMap):
    """Cross-attention that is given as PyTorch code around one or more softmax attentions (cores).

    A captured layer whose matrices are not known is such a map.

    Parameters
    ----------
    layer
        The code before and after the cores.
    cores
        The softmax attentions, in the order in which the layer calls them.
    d, d_memory, d_out
        Dimensions of a token x_i, of a memory token y_j, and of an output token.
    heads
        Number of heads of a core.
    m, n
        The numbers of tokens and of memory tokens, which masks inside the layer fix.
    dtype, device
        Data type and device of the layer's parameters.
    description
        A phrase that describes the layer.

    """

    def __init__(
        self,
        layer: CrossLayer,
        cores: tuple[SoftmaxCore, ...],
        *,
        d: int,
        d_memory: int,
        d_out: int,
        heads: int,
        m: int,
        n: int,
        dtype: torch.dtype,
        device: torch.device,
        description: str = "cross-attention",
    ) -> None:
        self.layer = layer
        self.cores = cores
        self.heads = heads
        self.m = m
        self.n = n
        self.description = description
        self._sizes = (d, d_memory, d_out)
        self._placed = (dtype, device)

    @property
    def d(self) -> int:
        """Dimension of a token x_i."""
        return self._sizes[0]

    @property
    def d_memory(self) -> int:
        """Dimension of a memory token y_j."""
        return self._sizes[1]

    @property
    def d_out(self) -> int:
        """Dimension of an output token."""
        return self._sizes[2]

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the parameters."""
        return self._placed[0]

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._placed[1]

    def describe(self) -> str:
        """Return a phrase that describes the map, for messages and reports."""
        return f"cross-attention of {self.description}, {self.heads} head{'s' if self.heads > 1 else ''}"

    def check_lengths(self, m: int, n: int) -> None:
        """Raise ArgumentError unless m and n are the sequence lengths for which the layer was captured."""
        for name, length, own in (("x", m, self.m), ("memory", n, self.n)):
            if length != own:
                raise ArgumentError(name, expected=f"{own} tokens, as captured", got=str(length))

    def run(self, x: Tensor, memory: Tensor, core: Core) -> Tensor:
        """Return the outputs (m, d_out) for one pair of sequences, with a given function in place of each
        softmax attention.
        """
        return self.layer.run(x, memory, core)

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> StagedCrossAttention:
        """Return the map with its parameters converted to another dtype or device."""
        d, d_memory, d_out = self._sizes
        return StagedCrossAttention(
            self.layer.to(dtype=dtype, device=device),
            tuple(core.to(dtype=dtype, device=device) for core in self.cores),
            d=d,
            d_memory=d_memory,
            d_out=d_out,
            heads=self.heads,
            m=self.m,
            n=self.n,
            dtype=dtype or self.dtype,
            device=torch.device(device or self.device),
            description=self.description,
        )


def _check_mask(mask: object, device: torch.device) -> Tensor:
    """Return the mask after checking that it is a boolean matrix on the device of the parameters."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 2:
        got = (
            f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        )
        raise ArgumentError(
            "mask",
            expected="a boolean tensor of shape (m, n) or (1, n), True where the query sees the memory token",
            got=got,
            remedy="Convert an additive mask with mask == 0.",
        )
    if mask.device != device:
        raise ArgumentError("mask", expected=f"a tensor on {device}, as query", got=str(mask.device))
    return mask
