"""The base class of attention layers with a proved constant, called like torch.nn.MultiheadAttention.

A subclass defines its bound (``_bound``), a differentiable function of the weights, and may define its own
weights, its queries, keys and values, its scores or attention weights (``_scores``, ``_probabilities``), and
its form as a map of this library (``_map``). These functions take the weights as a dictionary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from contextlib import suppress
from typing import ClassVar, Self, Unpack

import torch
from torch import Tensor, nn

from howsmooth.attention import TokenMap
from howsmooth.attention.atom_weights import Weighting
from howsmooth.bounds import Bound, Quantity
from howsmooth.bounds.bound import check_length, check_radius
from howsmooth.bounds.differentiable_upper_bounds import HeadMatrices
from howsmooth.bounds.visible_key_counts import VisibleRows
from howsmooth.errors import ArgumentError, HowsmoothError, NonFiniteError, check_number, check_whole
from howsmooth.nn.attention.accepted_masks import AcceptedMasks
from howsmooth.nn.attention.head_weights import (
    Weights,
    hull_radius,
    projections_of,
    scaled_weights,
    weights_in_double,
)
from howsmooth.nn.attention.output_divisor import CachedNumber, divided, is_far_from_zero, log_value
from howsmooth.nn.checks import Placement, check, check_layer_input, check_placement, require
from howsmooth.nn.lipschitz_module import LipschitzModule
from howsmooth.rounding import above

__all__ = ["LipschitzAttention"]

# The norm of a token may exceed the radius by this many units of rounding in its dtype.
_ULPS = 4.0
# More roundings than the radius of what a layer returns is computed with, norms of vectors among them.
_ROUNDINGS = 1 << 12
# Divisors near e^709 overflow float64.
_LARGEST_LOG = 700.0

_OF_EACH_BOUND = ("embed_dim", "num_heads", "head_dim", "length", "radius", "constant", "shorter")


class LipschitzAttention(LipschitzModule):
    """Base class of self-attention layers that have a proved upper bound on their Lipschitz constant.

    The bound holds for sequences of ``length`` tokens and, with a ``radius``, for tokens of at most this
    norm. Inputs and outputs are as for :class:`torch.nn.MultiheadAttention` with ``batch_first=True``. The
    weights have the same names, shapes and initial values. There is no dropout, so the layer is the same
    function in training and in evaluation. ArgumentError names an argument of a wrong type or value.

    Parameters
    ----------
    embed_dim, num_heads
        Dimension d of the tokens, and number of heads. The number of heads must divide d.
    length
        Number n of tokens of a sequence. Sequences of other lengths raise an error.
    radius
        Largest norm of an input token. None permits tokens of any norm, for layers without ``constant``.
    constant
        If given, the layer's Lipschitz constant is at most this number, because the output is divided by
        (bound at ``length`` and ``radius``) / ``constant``. The divisor is computed from the current weights,
        and computed again whenever they change. Gradients go through the divisor, too.
    bias
        Whether the projections have biases.
    beyond
        What to do with tokens whose norm exceeds the radius. "refuse" raises an error. "clip" projects them
        onto the ball, which is a 1-Lipschitz map, so the constant then holds for all tokens.
    shorter
        Whether the layer accepts shorter sequences, with the constant for ``length``.
    mask
        The masks that the layer may be given; the constant depends on them. "none" permits no mask. "causal"
        always applies the causal mask. A boolean matrix (length, length), True where a query (row) must not
        see a key (column), is always applied. "any" permits every boolean mask, including padding. "additive"
        also permits masks of arbitrary numbers.
    device, dtype
        Device and dtype of the weights.

    Notes
    -----
    With half precision (float16 or bfloat16 weights or inputs) and under autocast, the layer computes in
    float32 with autocast disabled, from the stored weights, and casts the result to the dtype of the input.
    If the divisor is above e^25 or below e^−25, the layer computes in float64, since products of such weights
    may leave the range of float32. The constant holds in exact arithmetic.

    In evaluation mode torch.compile and torch.export can record the layer. The graph asserts what a call
    checks, with RuntimeError, and that the weights are those of its divisor. It gives the weights of a layer
    with ``constant`` no gradient. torch.onnx.export leaves assertions out, so call ``model.eval()`` after the
    last change of a weight. torch.jit.trace keeps the divisor, and no check. ``torch.func.vmap`` may map over
    inputs and masks, and without ``constant`` over weights: a divisor belongs to one set of weights.
    """

    #: Kinds of masks for which the layer has a bound.
    masks: ClassVar[tuple[str, ...]] = ("none", "causal", "fixed", "any", "additive")
    _mask_remedy: ClassVar[str] = "No theorem covers this kind of mask."
    #: The attribute of torch.nn.MultiheadAttention with this name.
    batch_first: ClassVar[bool] = True
    # torch.nn.TransformerEncoderLayer would otherwise call a fused kernel for softmax attention instead.
    _qkv_same_embed_dim: ClassVar[bool] = False

    def __init__(
        self,
        embed_dim: object,
        num_heads: object,
        *,
        length: object,
        radius: object = None,
        constant: object = None,
        bias: bool = True,
        beyond: object = "refuse",
        shorter: bool = False,
        mask: object = "none",
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__()
        check_placement(**placed)
        self.embed_dim = check_whole("embed_dim", embed_dim)
        self.num_heads = check_whole("num_heads", num_heads)
        divides = self.embed_dim % self.num_heads == 0
        check(divides, "num_heads", f"a divisor of embed_dim = {embed_dim}", num_heads)
        self.head_dim = self.embed_dim // self.num_heads
        self.length = check_length(length)
        self.radius = None if radius is None else check_radius(radius)
        self.constant = None if constant is None else check_number("constant", constant)
        bounded = self.constant is None or self.radius is not None or not self._needs_radius
        expected = "a number, because the layer is divided by its bound on a ball"
        remedy = "hs.bounds.norm_radius gives it after a norm layer; beyond='clip' enforces it."
        check(bounded, "radius", expected, "None", remedy)
        check(beyond in ("refuse", "clip"), "beyond", "'refuse' or 'clip'", repr(beyond))
        self.beyond = str(beyond)
        self.shorter = bool(shorter)
        self.masking = AcceptedMasks.read(mask, self.length)
        kind = self.masking.kind
        check(kind in self.masks, "mask", f"one of {self.masks}", repr(kind), self._mask_remedy)
        fits = not self.shorter or kind != "fixed"
        check(fits, "shorter", "False for a mask of fixed length", "True")
        self.bias = bool(bias)
        self._make_weights(placed)
        self._log_divisor_of = CachedNumber()
        self.register_load_state_dict_post_hook(_remember_divisor)  # type: ignore[no-untyped-call]

    # ---- what a subclass defines

    #: Name and source of the bound, and a phrase that describes the attention.
    _bound_name: ClassVar[str]
    _source: ClassVar[str] = 'howsmooth documentation, "Enforce"'
    _phrase: ClassVar[str]
    #: Whether the bound needs a radius; bounds that hold for all tokens do not.
    _needs_radius: ClassVar[bool] = True
    #: Attributes beside those of every layer on which the bound depends.
    _of_bound: ClassVar[tuple[str, ...]] = ()
    #: Number of matrices (d, d) in ``in_proj_weight``; name of the bias, and number of its vectors.
    _matrices: ClassVar[int] = 3
    _bias: ClassVar[tuple[str, int]] = ("in_proj_bias", 3)
    in_proj_bias: nn.Parameter | None

    def _make_weights(self, placed: Placement) -> None:
        d, (name, count) = self.embed_dim, self._bias
        self.in_proj_weight = nn.Parameter(torch.empty((self._matrices * d, d), **placed))
        self.register_parameter("in_proj_bias", None)  # torch.nn.TransformerEncoderLayer reads it
        self.register_parameter(name, nn.Parameter(torch.zeros(count * d, **placed)) if self.bias else None)
        self.out_proj = nn.Linear(d, d, bias=self.bias, **placed)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.bias:
            nn.init.zeros_(self.out_proj.bias)

    def _weights(self) -> dict[str, Tensor]:
        found = {
            "in_proj_weight": self.in_proj_weight,
            self._bias[0]: getattr(self, self._bias[0]),
            "out_proj.weight": self.out_proj.weight,
            "out_proj.bias": self.out_proj.bias,
        }
        return {name: weight for name, weight in found.items() if weight is not None}

    def _parts(self, weights: Weights) -> HeadMatrices:
        return projections_of(weights, self.num_heads)

    def _queries_keys_values(self, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
        projected = nn.functional.linear(x, weights["in_proj_weight"], weights.get("in_proj_bias"))
        q, k, v = (self._by_head(part) for part in projected.chunk(3, dim=-1))
        return q, k, v

    def _scores(self, q: Tensor, k: Tensor, weights: Weights) -> Tensor:
        return (q / math.sqrt(self.head_dim)) @ k.mT

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Weights
    ) -> Tensor:
        """Return the attention weights (batch, heads, n, n). The mask ``added`` is added to the scores."""
        scores = self._scores(q, k, weights)
        return torch.softmax(scores if added is None else scores + added, dim=-1)

    @abstractmethod
    def _bound(self, rows: VisibleRows, radius: float, weights: Weights) -> Tensor:
        """Return a Lipschitz bound of the layer before its output is divided, differentiable in the weights.

        It may be too small by the roundings of a formula in numbers >= 0. ``rows`` says how many keys each
        query sees under the layer's masks, ``radius`` is the largest norm of a token, possibly infinite, and
        ``weights`` are in float64 on the CPU.
        """

    def _quantity(self, radius: float) -> Quantity:
        return Quantity.GLOBAL if math.isfinite(radius) else Quantity.EVERYWHERE

    def _named_bound(self, log_formula: float, radius: float) -> Bound:
        return Bound.upper(self._bound_name, self._quantity(radius), self._source, log_formula=log_formula)

    def _undivided_output_radius(self, length: int, radius: float, weights: Weights) -> float:
        """Bound the norms of undivided output tokens. Here the output of a head is a mean of its values."""
        return hull_radius(self._parts(weights), radius)

    def _map(self, weights: Weights, scale: float) -> TokenMap:
        """Return the layer with these weights as a map of tokens, with its output multiplied by ``scale``."""
        return _LayerMap(self, scaled_weights(weights, scale))

    # ---- the constant

    def lipschitz_bound(self, length: int, radius: float) -> Bound:
        """Return an upper bound on the Lipschitz constant of the layer for tokens of norm at most ``radius``.

        ``length`` is that of the layer, or a smaller one if ``shorter=True``. ``radius`` may exceed that of
        the layer only with ``beyond="clip"``; then the result is the bound at the radius of the layer.
        Others raise ArgumentError, and a weight that is NaN or infinite NonFiniteError.
        """
        n, R = self._claimed(length, radius)
        weights = self._finite_weights()
        log = log_value(lambda given: self._log_bound(n, R, given), weights)
        bound = self._named_bound(log, R)
        if self.constant is None:
            return bound
        source = f"{bound.source}, divided by its value at length {self.length}, over {self.constant:g}"
        log = bound.log_formula - self._log_divisor(weights)
        return Bound.upper(bound.name, bound.quantity, source, log_formula=log, hypotheses=bound.hypotheses)

    def output_radius(self, length: int, radius: float) -> float:
        """Return an upper bound on the norms of output tokens. For arguments see :meth:`lipschitz_bound`."""
        n, R = self._claimed(length, radius)
        weights = self._finite_weights()
        with torch.no_grad():
            largest = self._undivided_output_radius(n, R, weights_in_double(weights))
        if self.constant is not None:
            largest *= math.exp(-self._log_divisor(weights))
        return above(largest, _ROUNDINGS)

    def _claimed(self, length: object, radius: object) -> tuple[int, float]:
        """Check a length and a radius. A layer that clips tokens replaces a larger radius by its own."""
        n = check_length(length)
        # An infinite radius stands for all tokens, for a layer that clips or whose bound needs no radius.
        everywhere = radius == math.inf and (self.radius is not None or not self._needs_radius)
        R = math.inf if everywhere else check_radius(radius)
        self._check_count(n, "length")
        if self.radius is not None and above(self.radius, _ROUNDINGS) < R:
            # Rounding in the layers before may lengthen tokens by less than six digits show.
            got = repr(R) if f"{R:g}" == f"{self.radius:g}" else f"{R:g}"
            remedy = "Build the layer with a larger radius, or with beyond='clip'."
            clips = self.beyond == "clip"
            check(clips, "radius", f"at most {self.radius:g}, the radius of the layer", got, remedy)
            R = self.radius
        return n, R

    def _finite_weights(self) -> dict[str, Tensor]:
        weights = self._weights()
        for name, weight in weights.items():
            if not bool(torch.isfinite(weight).all()):
                raise NonFiniteError(name, expected="finite numbers", got="NaN or infinity")
        return weights

    def _log_divisor(self, weights: Weights) -> float:
        """Return the log of the divisor, cached until a weight or a setting changes."""
        return self._log_divisor_of(
            weights, self._divisor_key, lambda: self._log_quotient(log_value(self._log, weights))
        )

    @property
    def _divisor_key(self) -> tuple[object, ...]:
        return self.masking, *(getattr(self, name) for name in (*_OF_EACH_BOUND, *self._of_bound))

    def _log(self, weights: Weights) -> Tensor:
        return self._log_bound(self.length, self._bound_radius, weights)

    def _log_bound(self, length: int, radius: float, weights: Weights) -> Tensor:
        """Return the logarithm of :meth:`_bound` under the layer's masks, differentiable in the weights.

        The output projection is divided by its largest entry meanwhile: the bound is proportional to it, and
        products of small weights would underflow.
        """
        output = weights["out_proj.weight"].to("cpu", torch.float64)
        size = output.detach().abs().amax()
        size = torch.where(size > 0, size, 1.0)
        scaled = weights_in_double({**weights, "out_proj.weight": output / size})
        return self._bound(self.masking.rows_at(length), radius, scaled).log() + size.log()

    def _log_quotient(self, log_formula: float) -> float:
        """Convert the log of a Lipschitz bound to the log of the divisor bound / constant, rounded up."""
        assert self.constant is not None
        log = self._named_bound(log_formula, self._bound_radius).log_value
        if not abs(log) < _LARGEST_LOG:
            self._finite_weights()
            got = "zero" if log == -math.inf else f"exp({log:.4g})"
            remedy = (
                "A layer with bound zero cannot be scaled to another constant; a huge bound comes from huge "
                "weights or a huge radius, a tiny one from tiny weights."
            )
            expected = "a layer whose bound is a positive number"
            raise ArgumentError("constant", expected=expected, got=got, remedy=remedy)
        return log - math.log(self.constant)

    @property
    def _bound_radius(self) -> float:
        return math.inf if self.radius is None else self.radius

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode. Evaluation mode caches the divisor for recorded graphs."""
        super().train(mode)
        _remember_divisor(self)
        return self

    # ---- the forward pass

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute self-attention, with arguments and results as in :class:`torch.nn.MultiheadAttention`.

        ``query`` are tokens (batch, n, d) or (n, d), ``key`` and ``value`` are None or the same tensor,
        because the constants are for self-attention. ``key_padding_mask`` is (batch, n), ``attn_mask`` (n, n)
        or (batch · heads, n, n), True or −inf where a key is not seen; ``is_causal`` applies the causal mask
        if there is no ``attn_mask``. The attention weights that are returned, (batch, n, n) or for each head
        (batch, heads, n, n), are not divided, so their rows sum to 1.

        ArgumentError names what has a wrong shape, dtype, device or length, a token that is longer than the
        radius, and a mask that the constant does not cover; NonFiniteError, in layers with a radius or a
        constant, a token or a weight that is NaN or infinite.
        """
        x, weights = self._checked(query, key, value)
        if torch.compiler.is_compiling() and self.constant is not None:
            # The divisor in a recorded graph has no derivative, so the graph gives the weights no gradient.
            weights = {name: weight.detach() for name, weight in weights.items()}
        # The bound is a theorem on exact arithmetic, so autocast must not lower the precision inside.
        with torch.autocast(x.device.type, enabled=False):
            if self.radius is not None:
                x = self.inside_ball(x, self.radius, query.dtype)
            inverse = None if self.constant is None else self._inverse(weights, x)
            # With a divisor that is far from one, float32 would overflow or underflow on the way.
            x = x if inverse is None else x.to(inverse.dtype)
            added = self.masking.scores(attn_mask, key_padding_mask, is_causal, heads=self.num_heads, x=x)
            # Half-precision weights take part as the float32 numbers that they are.
            working = {name: weight.to(x.dtype) for name, weight in weights.items()}
            output, probabilities = self._undivided(x, added, working)
            if inverse is not None:
                output = output * inverse
        output = output.to(query.dtype)
        if inverse is not None and inverse.dtype == torch.float64:
            words = f"query: expected tokens whose output has entries within the range of {query.dtype}"
            require(output, torch.isfinite, lambda _: _out_of_range(query.dtype), words)
        shown = probabilities.mean(dim=1) if average_attn_weights else probabilities
        shown = shown.to(query.dtype)
        if query.ndim == 2:
            output, shown = output[0], shown[0]
        return output, shown if need_weights else None

    def _undivided(self, x: Tensor, added: Tensor | None, weights: Weights) -> tuple[Tensor, Tensor]:
        q, k, v = self._queries_keys_values(x, weights)
        probabilities = self._probabilities(q, k, v, added, weights)
        attended = (probabilities @ v).transpose(1, 2).flatten(2)
        output = nn.functional.linear(attended, weights["out_proj.weight"], weights.get("out_proj.bias"))
        return output, probabilities

    def _inverse(self, weights: dict[str, Tensor], like: Tensor) -> Tensor:
        """Return constant / bound, differentiable in the weights; float64 where it is far from one."""
        if torch.compiler.is_compiling():
            if self.training:
                # torch.compile shows the words of an error only if its class has no constructor.
                raise HowsmoothError("training mode has no graph, as its divisor changes: call model.eval()")
            return (-self._log_divisor_of.recorded(weights, self._divisor_key)).exp().to(self._working(like))
        for name, weight in weights.items():
            _refuse_batched(name, weight)
        # Without training, the divisor is remembered, and its gradient is computed only on demand.
        learned = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights.values())
        if not (self.training and learned):
            cached = self._log_divisor(weights)
            return divided(cached, weights, self._log, self._working(like))
        # In training, a backward pass will follow and the weights will then change. So the bound is computed
        # once, with its graph, and not remembered.
        try:
            log = self._log(weights)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            self._log_quotient(math.inf)  # raises an error with the reason
            raise
        quotient = self._log_quotient(log_value(lambda _: log, weights))
        log_divisor = torch.tensor(quotient, dtype=log.dtype)
        # The value is exp(−log_divisor), rounded outwards; the second factor is 1 and has the gradient.
        factor = (-log_divisor).exp() * (log.detach() - log).exp()
        return factor.to(self._working(like, is_far_from_zero(quotient)))

    def _working(self, like: Tensor, far: bool | None = None) -> Tensor:
        """Return an empty scalar on the device of ``like``, in float64 if ``far``, else in its dtype."""
        far = self._log_divisor_of.far if far is None else far
        return like.new_empty((), dtype=torch.float64 if far else like.dtype)

    def _by_head(self, t: Tensor) -> Tensor:
        heads: Tensor = t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return heads

    def _checked(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        weights = self._weights()
        weight = next(iter(weights.values()))
        check_layer_input("query", query, like=weight)
        remedy = "The constant is for self-attention; there is none for cross-attention."
        for name, other in (("key", key), ("value", value)):
            same = other is None or other is query
            check(same, name, "None, or the tensor given as query", "another tensor", remedy)
        d = self.embed_dim
        if query.ndim not in (2, 3) or query.shape[-1] != d or 0 in query.shape[:-1]:
            got = f"shape {tuple(query.shape)}"
            raise ArgumentError("query", expected=f"tokens (batch, n, {d}) or (n, {d})", got=got)
        self._check_count(query.shape[-2], "query")
        # Mixing float32 and float64 is an error; half precision on either side is converted.
        dtypes = {query.dtype, weight.dtype}
        expected, remedy = (
            f"{weight.dtype} like the weights, or half precision",
            "Convert one, with .to(dtype).",
        )
        check(dtypes != {torch.float32, torch.float64}, "query", expected, query.dtype, remedy)
        x = query.to(torch.float64 if torch.float64 in dtypes else torch.float32)
        return (x if x.ndim == 3 else x[None]), weights

    def _check_count(self, n: int, name: str) -> None:
        # One comparison: an equality first would keep the full length out of a graph for all shorter ones.
        if n <= self.length if self.shorter else n == self.length:
            return
        expected = f"{'at most ' if self.shorter else ''}{self.length} tokens, the length of the layer"
        remedy = "" if self.shorter else "With shorter=True a layer also accepts shorter sequences."
        raise ArgumentError(name, expected=expected, got=f"{n} tokens", remedy=remedy)

    def inside_ball(self, x: Tensor, radius: float, dtype: torch.dtype) -> Tensor:
        """Project tokens onto the ball if ``beyond`` is "clip"; otherwise refuse tokens outside of it."""
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        clip = self.beyond == "clip"
        longest = math.inf if clip else radius * (1 + _ULPS * torch.finfo(dtype).eps)
        require(
            norms,
            lambda norms: torch.isfinite(norms) & (norms <= longest),
            lambda norms: _beyond(float(norms.max()), radius),
            "query: expected " + ("finite numbers" if clip else f"tokens of norm at most {radius:g}"),
        )
        return x * (radius / norms.clamp(min=radius)) if clip else x

    # ---- description

    @property
    def map(self) -> TokenMap:
        """The layer as a function of tokens that :func:`~howsmooth.local_lipschitz` can measure.

        The function has the layer's current weights, and divides its output by the same number as the layer.
        For masks of kind "any" and "additive" the function has no mask. It clips no tokens.
        """
        weights = self._finite_weights()
        if self.constant is None:
            return self._map(weights, 1.0)
        scale = math.exp(-self._log_divisor(weights))
        if self._log_divisor_of.far:
            weights = {name: weight.double() for name, weight in weights.items()}
        return self._map(weights, scale)

    def extra_repr(self) -> str:
        """Return the settings of the layer as text for ``repr``."""
        names = dict.fromkeys((*_OF_EACH_BOUND, "bias", "beyond", *self._of_bound))
        shown = {name: getattr(self, name) for name in names} | {"mask": self.masking.kind}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class _LayerMap(TokenMap):
    def __init__(self, layer: LipschitzAttention, weights: Weights) -> None:
        self._layer = layer
        self._weights = {name: weight.detach().clone() for name, weight in weights.items()}

    @property
    def d(self) -> int:
        return self._layer.embed_dim

    @property
    def d_out(self) -> int:
        return self._layer.embed_dim

    @property
    def dtype(self) -> torch.dtype:
        return self._weights["out_proj.weight"].dtype

    @property
    def device(self) -> torch.device:
        return self._weights["out_proj.weight"].device

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> _LayerMap:
        moved = {name: weight.to(dtype=dtype, device=device) for name, weight in self._weights.items()}
        return _LayerMap(self._layer, moved)

    def describe(self) -> str:
        kind, heads = self._layer.masking.kind, self._layer.num_heads
        masked = "" if kind in ("none", "any", "additive") else f", {kind} mask"
        many = "s" if heads > 1 else ""
        return f"{self._layer._phrase}, {heads} head{many}{masked}, with output projection"

    def check_length(self, n: int) -> None:
        length = self._layer.length
        if self._layer.masking.hidden is not None and n != length:
            raise ArgumentError("X", expected=f"{length} tokens, as in the mask", got=f"{n} tokens")

    def _forward(self, x: Tensor, weighting: Weighting | None = None) -> Tensor:
        if weighting is not None:
            remedy = "This map acts on tokens only."
            raise ArgumentError("X", expected="tokens", got="a measure", remedy=remedy)
        # The map has the mask that every call applies; masks of single calls are not part of it.
        added = self._layer.masking.always_added(x)
        out, _ = self._layer._undivided(x.reshape(-1, *x.shape[-2:]), added, self._weights)
        return out.reshape(x.shape)


def _beyond(largest: float, radius: float) -> HowsmoothError:
    if not math.isfinite(largest):
        return NonFiniteError("query", expected="finite numbers", got="NaN or infinity")
    expected = f"tokens of norm at most {radius:g}, the radius of the layer"
    remedy = "Build the layer with a larger radius, or with beyond='clip', which projects them."
    return ArgumentError("query", expected=expected, got=f"a token of norm {largest:g}", remedy=remedy)


def _out_of_range(dtype: torch.dtype) -> HowsmoothError:
    expected = f"tokens whose output has entries within the range of {dtype}"
    remedy = "Weights so large overflow inside the layer: divide them by a constant."
    if dtype != torch.float64:
        remedy = "Small weights have a small bound, by which biases are divided, too: convert with .double()."
    return NonFiniteError("query", expected=expected, got="larger ones", remedy=remedy)


def _remember_divisor(layer: LipschitzAttention, keys: object = None) -> None:
    """Cache the divisor in evaluation mode: a graph that is recorded later cannot compute it."""
    weights = layer._weights()
    if layer.training or layer.constant is None or any(weight.is_meta for weight in weights.values()):
        return
    # A layer that cannot be divided says so when it is called.
    with suppress(HowsmoothError):
        layer._log_divisor(weights)


def _refuse_batched(name: str, weight: Tensor) -> None:
    expected = "one weight for all members of torch.func.vmap, because the layer is divided by its bound"
    remedy = "Call such layers one after the other, or build them without constant."
    error = ArgumentError(name, expected=expected, got="a weight for each member", remedy=remedy)
    # Within vmap the values that are looked at have the axis of the members, too.
    require(weight, lambda seen: torch.tensor(seen.ndim == weight.ndim), lambda _: error, expected)
