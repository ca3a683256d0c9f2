"""The derivative of softmax attention at one tile of scores: a block of queries and a block of keys.

With scaled queries q, let s = q kᵀ, S = c tanh(s / c) + mask + bias (S = s + … without a cap), D the
derivative of the cap (else 1), P the row softmax of S, and O = P v. For tangents dq, dk, dv, … and a
cotangent U of O ::

    dS = D∘(dq kᵀ + q dkᵀ) + dmask + dbias
    dP = P∘(dS − rowsum(P∘dS)),    dO = dP v + P dv                             the tangent
    A = U vᵀ,    G = P∘(A − rowsum(P∘A))
    q̄ = (D∘G) k,    k̄ = (D∘G)ᵀ q,    v̄ = Pᵀ U,    G for mask and bias           the adjoint

All else is a schedule around a tile: how scores are cut, and what is kept between products. A tile comes in
two forms. :class:`WholeRows` has all keys of its rows. It takes the row sums itself, in operations that
PyTorch can differentiate again, and has second derivatives. :class:`Tile` has any keys of its rows, for a
schedule that keeps O: with T = P∘dS, dO is the sum of T v + P dv over tiles less rowsum(T) O, and
rowsum(P∘A) is ⟨U, O⟩. Derivation: documentation page "The Jacobian of attention in closed form".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["OfKeys", "OfOutputs", "OfQueries", "OfValues", "Tile", "WholeRows", "derivative_in_own_query"]

# Tangents and cotangents, in batches b of matrices, with m rows of queries and n of keys.
OfQueries = Float[Tensor, "b m key_dim"]
OfKeys = Float[Tensor, "b n key_dim"]
OfValues = Float[Tensor, "b n value_dim"]
OfOutputs = Float[Tensor, "b m value_dim"]


@dataclass(frozen=True, eq=False)
class Tile:
    """The derivative of softmax attention for some of the queries and some of the keys, in batches b of
    matrices. Its products can be added to those of other tiles in place.

    At a measure with weights a_i, tangents are multiplied by √a_i (Definition C.4), and
    P̃_ij = √(a_i/a_j) P_ij takes the place of P before tangents of keys and values.

    The derivative stays as it is if one vector is subtracted from all values and, without a cap, one from
    all keys. ``q`` are scaled queries, and ``p`` is P̃, which is P for a sequence of tokens. ``slope`` and
    ``slope_of_keys`` are P∘D and P̃∘D: one tensor where they are equal, ``p`` itself without a cap.
    """

    q: OfQueries
    k: OfKeys
    v: OfValues
    p: Float[Tensor, "b m n"]
    slope: Float[Tensor, "b m n"]
    slope_of_keys: Float[Tensor, "b m n"]

    def tangent(
        self,
        dq: OfQueries,
        dk: OfKeys,
        dv: OfValues,
        onto: tuple[Tensor, Tensor] | None = None,
        memory: Tensor | None = None,
    ) -> tuple[OfOutputs, Float[Tensor, "b m 1"]]:
        """Return T v + P dv and the row sums of T, where T is P∘dS. If ``onto`` is given, both are added to
        it. If ``memory`` is given, T is written to it.
        """
        t = torch.bmm(dq, self.k.mT, out=memory)
        if self.slope_of_keys is self.slope:
            t.baddbmm_(self.q, dk.mT).mul_(self.slope)
        else:
            t.mul_(self.slope).addcmul_(torch.bmm(self.q, dk.mT), self.slope_of_keys)
        total = t.sum(dim=-1, keepdim=True)
        if onto is None:
            return torch.bmm(t, self.v).baddbmm_(self.p, dv), total
        return onto[0].baddbmm_(t, self.v).baddbmm_(self.p, dv), onto[1].add_(total)

    def scores_adjoint(
        self, u: OfOutputs, common: Float[Tensor, "b m 1"], memory: Tensor | None = None
    ) -> tuple[Float[Tensor, "b m n"], Float[Tensor, "b m n"]]:
        """Return two cotangents D∘G of the scores, one for the queries and one for the keys. ``common`` has
        the row sums ⟨U, O⟩.

        The two differ at a measure only. The first is written to ``memory`` if that is given.
        """
        a = torch.bmm(u, self.v.mT, out=memory).sub_(common)
        if self.slope_of_keys is self.slope:
            a.mul_(self.slope)
            return a, a
        of_keys = a * self.slope_of_keys
        return a.mul_(self.slope), of_keys


@dataclass(frozen=True, eq=False)
class WholeRows:
    """The derivatives of softmax attention for some of the queries and all of their keys. Tensors have the
    axes (…, group, rows, columns), of full length or 1.

    In the methods ``d`` holds tangents by name, ``u`` is the cotangent U of the output, and ``du`` the
    tangent of ``u``; missing ones count as zero.

    ``x`` has ``q`` (scaled), ``k`` and ``v``; further tensors that enter the scores are read from ``d``
    only. ``p`` is P, whose rows are zero where they see no key. ``scale`` is the factor of q in the scores,
    by which tangents and cotangents of ``q`` are multiplied. ``softcap`` and ``tanh`` are c and tanh(s / c),
    and ``sink`` the probability of the sink in each row, (…, rows, 1). ``dropout`` is the constant matrix M,
    of the entries 0 and 1/(1 − p), by which dropout multiplies P where it meets the values: O = (P∘M) v, A =
    (U vᵀ)∘M and v̄ = (P∘M)ᵀ U.
    """

    x: Mapping[str, Tensor]
    scale: float
    p: Tensor
    softcap: float | None = None
    tanh: Tensor | None = None
    sink: Tensor | None = None
    dropout: Tensor | None = None

    def value(self) -> Tensor:
        """Return the attention outputs O."""
        return _over_keys(self._dropped(self.p), self.x["v"])

    def tangent(self, d: Mapping[str, Tensor]) -> Tensor:
        """Return the derivative of the attention outputs along changes ``d`` of the inputs, by name."""
        dp = self._dp(d, self._products_tangent(d))
        do = None if dp is None else _over_keys(self._dropped(dp), self.x["v"])
        if "v" in d:
            do = _sum(do, _over_keys(self._dropped(self.p), d["v"]))
        return torch.zeros_like(self.value()) if do is None else do

    def adjoint(self, u: Tensor, which: Sequence[str]) -> dict[str, Tensor]:
        """Return the cotangents of the inputs named in ``which``, for the cotangent ``u`` of the outputs."""
        found: dict[str, Tensor] = {}
        if "v" in which:
            found["v"] = _over_rows(self._dropped(self.p), u)
        # The cotangent of the values needs P only.
        if set(which) <= {"v"}:
            return found
        a = self._dropped(_products(u, self.x["v"]))
        if self.sink is not None and "sinks" in which:
            found["sinks"] = -self.sink * (self.p * a).sum(dim=-1, keepdim=True)
        g = _through_softmax(a, self.p)
        found.update((name, g) for name in ("mask", "bias") if name in which)
        g = self._sloped(g)
        if "q" in which:
            found["q"] = self.scale * _over_keys(g, self.x["k"])
        if "k" in which:
            found["k"] = _over_rows(g, self.x["q"])
        return found

    def second(
        self, u: Tensor, d: Mapping[str, Tensor], du: Tensor | None, which: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return the change of :meth:`adjoint` if the inputs move along ``d`` and the cotangent along ``du``.

        The gradient of ⟨U, tangent⟩ = ⟨adjoint, dx⟩ in x is the derivative of the adjoint along dx. So these
        methods give every second derivative except forward over forward (documentation page "The Jacobian of
        attention in closed form", section "Second derivatives").
        """
        x, p, found = self.x, self.p, dict[str, Tensor]()
        # The tangent of s is needed before the cap too, because the derivative of the cap changes with s.
        ds = self._products_tangent(d)
        dp = self._dp(d, ds)
        a = self._dropped(_products(u, x["v"]))
        r = (p * a).sum(dim=-1, keepdim=True)
        da = None if du is None else self._dropped(_products(du, x["v"]))
        if "v" in d:
            da = _sum(da, self._dropped(_products(u, d["v"])))
        # dr = rowsum(dP∘A + P∘dA) and dG = dP∘(A − r) + P∘(dA − dr), without the terms that are zero.
        dr, dg = torch.zeros_like(r), torch.zeros_like(p)
        if dp is not None:
            dr, dg = dr + (dp * a).sum(dim=-1, keepdim=True), dg + dp * (a - r)
        if da is not None:
            dr, dg = dr + (p * da).sum(dim=-1, keepdim=True), dg + p * da
        dg = dg - p * dr
        if "v" in which:
            dv = torch.zeros_like(x["v"])
            if dp is not None:
                dv = dv + _over_rows(self._dropped(dp), u)
            found["v"] = dv if du is None else dv + _over_rows(self._dropped(p), du)
        if self.sink is not None and "sinks" in which:
            found["sinks"] = -self.sink * dr
            if dp is not None:
                # P and the sink's probability sum to one in each row, so the sink's tangent is −rowsum(dP).
                found["sinks"] = found["sinks"] + dp.sum(dim=-1, keepdim=True) * r
        found.update((name, dg) for name in ("mask", "bias") if name in which)
        g = p * (a - r)
        if self.tanh is not None and self.softcap is not None:
            slope = (1 - self.tanh) * (1 + self.tanh)
            g, dg = g * slope, dg * slope
            # dD = −(2/c) tanh(s/c) D ds, times G; g has the factor D already.
            if ds is not None:
                dg = dg - (2 / self.softcap) * self.tanh * ds * g
        if "q" in which:
            dq = _over_keys(dg, x["k"])
            found["q"] = self.scale * (_sum(dq, _over_keys(g, d["k"])) if "k" in d else dq)
        if "k" in which:
            dk = _over_rows(dg, x["q"])
            found["k"] = _sum(dk, self.scale * _over_rows(g, d["q"])) if "q" in d else dk
        return found

    def _dropped(self, t: Tensor) -> Tensor:
        return t if self.dropout is None else t * self.dropout

    def _sloped(self, t: Tensor) -> Tensor:
        return t if self.tanh is None else t * ((1 - self.tanh) * (1 + self.tanh))

    def _products_tangent(self, d: Mapping[str, Tensor]) -> Tensor | None:
        ds = _products(self.scale * d["q"], self.x["k"]) if "q" in d else None
        return _sum(ds, _products(self.x["q"], d["k"])) if "k" in d else ds

    def _dp(self, d: Mapping[str, Tensor], ds: Tensor | None) -> Tensor | None:
        """Return the tangent dP of probabilities, or None if it is zero; ``ds`` is the tangent of q kᵀ."""
        ds = None if ds is None else self._sloped(ds)
        for name in ("mask", "bias"):
            if name in d:
                ds = _sum(ds, d[name])
        dp = None if ds is None else _through_softmax(ds, self.p)
        if self.sink is not None and "sinks" in d:
            dp = _sum(dp, -self.p * (self.sink * d["sinks"]))
        return dp


def derivative_in_own_query(
    p: Float[Tensor, "*heads rows n"],
    slope: Float[Tensor, "*heads rows n"],
    v: Float[Tensor, "*heads n value_dim"],
    k: Float[Tensor, "*heads n key_dim"],
    sink: tuple[Tensor, Tensor] | None = None,
) -> Float[Tensor, "*heads rows value_dim key_dim"]:
    """Return each output's derivative in its own query, Σ_j P_ij D_ij (v_j − O_i) k_jᵀ; ``slope`` is P∘D.

    ``sink`` are the probability and the shifted value of a sink in each row, whose own term is left out.
    """
    # Where one key m has nearly all the weight, terms of order one would cancel; so values are taken relative
    # to v_m, and the sums leave m out.
    m = p.argmax(dim=-1, keepdim=True)
    others = p.scatter(-1, m, 0.0)
    rows = others if slope is p else slope.scatter(-1, m, 0.0)
    top = v.gather(-2, m.expand(*m.shape[:-1], v.shape[-1]))
    mean = others @ v - others.sum(dim=-1, keepdim=True) * top  # O_i − v_m
    if sink is not None:
        mean += sink[0] * (sink[1] - top)
    matrix = (rows[..., None] * v[..., None, :, :]).mT @ k[..., None, :, :]
    matrix = matrix.addcmul_(top[..., None], (rows @ k)[..., None, :], value=-1)
    return matrix.addcmul_(mean[..., None], (slope @ k)[..., None, :], value=-1)


def _through_softmax(w: Tensor, p: Tensor) -> Tensor:
    """Return P∘(W − rowsum(P∘W)), the derivative of the row softmax. It is its own adjoint."""
    # PyTorch's own kernel for the backward pass of a softmax needs equal shapes.
    if w.shape == p.shape:
        fused: Tensor = torch._softmax_backward_data(w, p, -1, p.dtype)
        return fused
    return p * (w - (p * w).sum(dim=-1, keepdim=True))


def _products(a: Tensor, b: Tensor) -> Tensor:
    # The rows of all query heads of a group form one matrix, so that heads with one key head share a product.
    s: Tensor = (a.flatten(-3, -2) @ b.squeeze(-3).mT).unflatten(-2, a.shape[-3:-1])
    return s


def _over_keys(p: Tensor, v: Tensor) -> Tensor:
    o: Tensor = (p.flatten(-3, -2) @ v.squeeze(-3)).unflatten(-2, p.shape[-3:-1])
    return o


def _over_rows(p: Tensor, u: Tensor) -> Tensor:
    return (p.flatten(-3, -2).mT @ u.flatten(-3, -2)).unsqueeze(-3)


def _sum(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b
