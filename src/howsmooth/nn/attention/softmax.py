"""Softmax attention divided by the tightest bound that holds at its length and radius."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.attention import SelfAttention, TokenMap
from howsmooth.bounds import (
    Bound,
    Head,
    Parameters,
    Quantity,
    any_mask_theorem_a,
    best_head_bound,
    h_star,
    multi_head_folded,
    multi_head_output,
    parameters_of,
)
from howsmooth.bounds.parameters import spectral_norm
from howsmooth.errors import ArgumentError
from howsmooth.nn.attention.base import LipschitzAttention
from howsmooth.nn.attention.divisor import log_of_numbers, spectral_norms
from howsmooth.nn.attention.masks import Masking

__all__ = ["SoftmaxAttention"]


class SoftmaxAttention(LipschitzAttention):
    """Softmax self-attention with a constant: torch.nn.MultiheadAttention, divided by its bound.

    With ``constant=1`` it is the 1-Lipschitz attention that Castin, Ablin and Peyré suggest for Vision
    Transformers, whose length is fixed and whose radius is set by a norm layer. The bound is the smaller of
    :func:`~howsmooth.bounds.multi_head_folded` and :func:`~howsmooth.bounds.multi_head_output`, over
    Theorem A for the heads, with the masks that the layer takes. Without ``constant`` it is
    torch.nn.MultiheadAttention itself, and its bound is what it is.

    Parameters
    ----------
    embed_dim, num_heads, length, radius, constant, bias, beyond, shorter, mask, device, dtype
        As of :class:`~howsmooth.nn.attention.base.LipschitzAttention`.

    Raises
    ------
    ArgumentError
        If an argument does not fit; the message names it.

    References
    ----------
    Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, Section 6; docs/theory/bounds-on-a-ball.md
    for the bounds and docs/theory/enforce.md for the masks.

    """

    @classmethod
    def from_torch(cls, attention: nn.MultiheadAttention, **settings: Any) -> SoftmaxAttention:
        """Take the weights of a torch.nn.MultiheadAttention over; its dropout is left out.

        Parameters
        ----------
        attention
            Self-attention: keys and values of the dimension of the queries, no ``add_bias_kv`` and no
            ``add_zero_attn``. Whatever its ``batch_first``, the new layer has the batch first.
        settings
            ``length``, ``radius`` and what else the constructor takes.

        Raises
        ------
        ArgumentError
            If it is something else, or a setting does not fit.

        """
        if not isinstance(attention, nn.MultiheadAttention):
            raise ArgumentError(
                "attention", expected="a torch.nn.MultiheadAttention", got=type(attention).__name__
            )
        if not attention._qkv_same_embed_dim or attention.bias_k is not None or attention.add_zero_attn:
            raise ArgumentError(
                "attention",
                expected="kdim and vdim equal to embed_dim, no add_bias_kv, no add_zero_attn",
                got="another attention",
                remedy="Its scores have keys that are no tokens, or its keys another dimension.",
            )
        weight = attention.out_proj.weight
        layer = cls(
            attention.embed_dim,
            attention.num_heads,
            bias=attention.in_proj_bias is not None,
            device=weight.device,
            dtype=weight.dtype,
            **settings,
        )
        layer.load_state_dict(attention.state_dict())
        layer.train(attention.training)
        return layer

    # ---- the map

    def _probabilities(
        self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, weights: Mapping[str, Tensor]
    ) -> Tensor:
        scores = (q / math.sqrt(self.head_dim)) @ k.mT
        return torch.softmax(scores if added is None else scores + added, dim=-1)

    def _map(self, weights: Mapping[str, Tensor], scale: float) -> TokenMap:
        dtype = torch.float64 if weights["out_proj.weight"].dtype == torch.float64 else torch.float32
        w = {name: weight.detach().to(dtype) for name, weight in weights.items()}
        query, key, value = (self._rows(part) for part in w["in_proj_weight"].chunk(3))
        biases: list[Tensor | None] = [None, None, None]
        if self.bias:
            biases = [part.unflatten(0, (self.num_heads, -1)) for part in w["in_proj_bias"].chunk(3)]
        hidden = self.masking.hidden
        return SelfAttention(
            query,
            key,
            value,
            w["out_proj.weight"] * scale,
            query_bias=biases[0],
            key_bias=biases[1],
            value_bias=biases[2],
            output_bias=w["out_proj.bias"] * scale if self.bias else None,
            causal=self.masking.kind == "causal",
            mask=None if hidden is None else ~hidden.to(query.device),
        )

    def _rows(self, weight: Tensor) -> Tensor:
        """Cut (heads · k, d) into (heads, k, d)."""
        rows: Tensor = weight.unflatten(0, (self.num_heads, -1))
        return rows

    # ---- the bound

    def _undivided_bound(self, length: int, radius: float, weights: Mapping[str, Tensor]) -> Bound:
        double = {name: weight.detach().to("cpu", torch.float64) for name, weight in weights.items()}
        parameters = parameters_of(self._map(double, 1.0))

        def head_bound(alone: object, n: int, R: float) -> Bound:
            assert isinstance(alone, Parameters)
            return bound_of_head(alone, n, R, self.masking)

        several = (multi_head_folded, multi_head_output)
        return min((f(parameters, length, radius, head_bound) for f in several), key=lambda b: b.log_value)

    def _log_bound(self, length: int, radius: float, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the smaller of the two forms, in the spectral norms that they depend on."""
        w = {name: weight.to("cpu", torch.float64) for name, weight in weights.items()}
        query, key, value = (self._rows(part) for part in w["in_proj_weight"].chunk(3))
        output = w["out_proj.weight"].unflatten(1, (self.num_heads, -1)).transpose(0, 1)  # (heads, d, k)
        scale = 1 / math.sqrt(self.head_dim)
        norms_a = scale * products_norms(key.mT, query)
        norms_b = torch.zeros_like(norms_a)
        if self.bias:
            bias = w["in_proj_bias"].chunk(3)[0].unflatten(0, (self.num_heads, -1))
            norms_b = scale * torch.linalg.vector_norm(torch.einsum("hkd,hk->hd", key, bias), dim=-1)
        log_heads = torch.stack(
            [
                log_of_numbers(
                    lambda numbers: log_bound_of_numbers(numbers, length, radius, self.masking),
                    torch.stack([a, b]),
                )
                for a, b in zip(norms_a, norms_b, strict=True)
            ]
        )
        return torch.minimum(log_folded(output, value, log_heads), log_output(output, value, log_heads))

    def _undivided_output_radius(self, length: int, radius: float, weights: Mapping[str, Tensor]) -> float:
        return softmax_output_radius(
            {name: weight.detach().to("cpu", torch.float64) for name, weight in weights.items()},
            self.num_heads,
            radius,
        )


# ---- one head


def bound_of_head(alone: Parameters, n: int, radius: float, masking: Masking) -> Bound:
    """Bound one head under the masks that a layer takes (docs/theory/enforce.md, Masks)."""
    if masking.kind == "additive":
        return _additive(alone, n, radius)
    if masking.kind == "any" and n > 1:
        worst = (replace(alone, masking="other", mask=mask) for mask in _worst_masks(n))
        return max((any_mask_theorem_a(p, n, radius) for p in worst), key=lambda bound: bound.log_value)
    return best_head_bound(alone, n, radius)


def _worst_masks(n: int) -> list[Tensor]:
    """Return three masks, True where seen, one of which has the largest bound of all masks.

    All see the first token; besides, each sees itself (the first one sees the second), or only the first
    sees the second, or none sees another.
    """
    alone = torch.zeros(n, n, dtype=torch.bool)
    alone[:, 0] = True
    pairs, one = alone | torch.eye(n, dtype=torch.bool), alone.clone()
    pairs[0, 1] = one[0, 1] = True
    return [pairs, one, alone]


def _additive(alone: Parameters, n: int, radius: float) -> Bound:
    """Bound a head with any numbers added to its scores by ‖V‖ (a + √(n h*(a₃)))."""
    head = alone.one_head("additive_masks")
    a = head.A_norm * radius * radius
    h = h_star((head.A_norm * radius + head.b_norm) * radius)
    return Bound.upper(
        "additive_masks",
        Quantity.GLOBAL,
        "howsmooth, docs/theory/enforce.md, Masks",
        formula=head.V_norm * (1.0 if n == 1 else a + math.sqrt(n * h)),
    )


def log_bound_of_numbers(numbers: Sequence[float], n: int, radius: float, masking: Masking) -> float:
    """Return the logarithm of a head's bound for ‖V‖ = 1 from ‖A‖ and |b|, all that it depends on."""
    a, b = (torch.full((1, 1), x, dtype=torch.float64) for x in numbers)
    one = torch.ones(1, 1, dtype=torch.float64)
    hidden = masking.hidden
    kind = {"causal": "causal", "fixed": "other"}.get(masking.kind, "none")
    mask = None if hidden is None else ~hidden
    alone = Parameters((Head(a, one, b[0]),), (one,), kind, mask)  # type: ignore[arg-type]
    return bound_of_head(alone, n, radius, masking).log_value


# ---- several heads: the two forms of hs.bounds as expressions with a gradient


def products_norms(left: Tensor, right: Tensor) -> Tensor:
    """Return the spectral norms of left @ right, (..., d, k) @ (..., k, d), with gradient.

    ‖L R‖ is the norm of the product of the triangular factors of L and Rᵀ, which are small. The singular
    vectors go back through the orthogonal factors, and are held fixed.
    """
    with torch.no_grad():
        q_left, r_left = torch.linalg.qr(left)
        q_right, r_right = torch.linalg.qr(right.mT)
        u, v = _leading(q_left, r_left @ r_right.mT, q_right)
    norms: Tensor = torch.einsum("...dk,...d,...ke,...e->...", left, u, right, v)
    return norms


def _leading(q_left: Tensor, small: Tensor, q_right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors of q_left @ small @ q_rightᵀ; the left one 0 for a zero matrix."""
    u, s, vh = torch.linalg.svd(small)
    u = u[..., :, 0] * (s[..., :1] > 0)
    return (q_left @ u[..., None])[..., 0], (q_right @ vh[..., 0, :, None])[..., 0]


def log_folded(output: Tensor, value: Tensor, log_heads: Tensor) -> Tensor:
    """Return the logarithm of multi_head_folded; output (H, d, k), value (H, k, d), log bounds (H,)."""
    h, g = torch.triu_indices(len(value), len(value))
    with torch.no_grad():
        q, r = torch.linalg.qr(value.mT)
        folded = output @ r.mT
        u, v = _leading(q[h], folded[h].mT @ folded[g], q[g])
    # ‖O_hᵀ O_g‖ = ⟨O_h u, O_g v⟩, O_h = W_h V_h
    left = output[h] @ (value[h] @ u[..., None])
    right = output[g] @ (value[g] @ v[..., None])
    norms = (left * right).sum(dim=(-2, -1))
    top = log_heads.detach().max()
    c = torch.exp(log_heads - top)
    twice = 1.0 + (h != g).double()
    return top + 0.5 * torch.log((twice * norms * c[h] * c[g]).sum())


def log_output(output: Tensor, value: Tensor, log_heads: Tensor) -> Tensor:
    """Return the logarithm of multi_head_output; arguments as above."""
    whole = spectral_norms(output.transpose(0, 1).flatten(1))
    top = log_heads.detach().max()
    c = torch.exp(log_heads - top) * spectral_norms(value)
    return top + torch.log(whole) + 0.5 * torch.log(c.square().sum())


def softmax_output_radius(weights: Mapping[str, Tensor], heads: int, radius: float) -> float:
    """Bound the norm of W_O [P_h (X V_hᵀ)]_h + biases for rows of P that are probabilities.

    The least of Σ_h ‖W_h V_h‖ R and ‖W_O‖ (Σ_h ‖V_h‖²)^{1/2} R, and the norm of W_O b_v + b_O.
    """
    out = weights["out_proj.weight"]
    values = weights["in_proj_weight"].chunk(3)[2].unflatten(0, (heads, -1))
    outputs = out.unflatten(1, (heads, -1)).transpose(0, 1)
    summed = sum(spectral_norm(w @ v) for w, v in zip(outputs, values, strict=True))
    together = spectral_norm(out) * math.sqrt(sum(spectral_norm(v) ** 2 for v in values))
    shift = 0.0
    if "in_proj_bias" in weights:
        b = out @ weights["in_proj_bias"].chunk(3)[2] + weights["out_proj.bias"]
        shift = float(torch.linalg.vector_norm(b))
    return min(summed, together) * radius + shift
