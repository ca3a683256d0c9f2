"""The class ``Terms``: entries of tensors as numbered terms, so that two computations are known to be equal
if they consist of the same operations.

A term stands for a vector and is an operation with its operands, such as a linear map of a vector. An entry
is the number of its term, times 2³², plus its place in the vector; a tensor is an int64 tensor of entries.
Equal terms have equal numbers. The few rewritings (a factor of a query goes into the weights, a mask removes
keys) are identities of real numbers, so that equal entries are equal functions of the tokens everywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["OTHER", "TOKENS", "DifferentOperationError", "Terms"]

_PLACES = 2**32
_HIDDEN, _NO_WEIGHT, OTHER = -1, -2, -3
TOKENS = 0
_MASKS = (-math.inf, torch.finfo(torch.float64).min)


class DifferentOperationError(Exception):
    """An operation that no known layer performs."""


class Terms:
    """All terms of one comparison, with their numbers.

    The entries of the tokens have the number 0 and their place among all tokens. ``OTHER`` is an entry about
    which nothing is known, for what is computed before the first layer.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {("tokens",): TOKENS}
        self._terms: list[tuple[Any, ...]] = [("tokens",)]
        self._places: dict[tuple[str, bytes], int] = {}
        self._weights: list[tuple[Tensor, Tensor, int]] = []
        self._multiplied: dict[tuple[bytes, float], Tensor] = {}
        self._seen: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._terms)

    def _number(self, *term: Any) -> int:
        found = self._numbers.setdefault(term, len(self._terms))
        if found == len(self._terms):
            self._terms.append(term)
        return found

    def _vector(self, number: int, length: int) -> Tensor:
        return number * _PLACES + torch.arange(length)

    def _named(self, length: int, *term: Any) -> Tensor:
        return self._vector(self._number(*term), length)

    def _term(self, entries: Tensor) -> tuple[Any, ...]:
        """Return the term to whose vector all given entries belong, or an empty one."""
        first = int(entries[0])
        same = first >= 0 and bool((entries // _PLACES == first // _PLACES).all())
        return self._terms[first // _PLACES] if same else ("",)

    def _kinds(self, entries: Tensor) -> set[Any]:
        """Return the operations from which entries come; entries without a term stand for themselves."""
        named = {int(number) for number in (entries[entries >= 0] // _PLACES).unique()}
        return {self._terms[number][0] for number in named} | set(entries[entries < 0].tolist())

    def newest(self, entries: Tensor) -> int:
        """Return the largest number of the terms of some entries."""
        return int(entries.max()) // _PLACES

    # ---- operations between entries and constants

    def linear(self, u: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return W u + b for entries u (..., d), a weight (d_out, d) and a bias (d_out,)."""
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        places = self._weight_places(weight, bias)
        return _rows(lambda row: self._number("linear", _key(row)) * _PLACES + places, u)

    def _weight_places(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the numbers of the rows of a weight, each together with its entry of the bias."""
        places = []
        joined = torch.cat([weight.detach(), bias.detach()[:, None]], 1).double() + 0.0  # no −0
        for i, row in enumerate(joined.numpy()):
            digest = hashlib.blake2b(row.data, digest_size=20).digest()
            place = self._places.setdefault(("weight", digest), len(self._weights))
            if place == len(self._weights):
                self._weights.append((weight, bias, i))
            places.append(place)
        return torch.tensor(places)

    def norm(self, u: Tensor, centred: bool, eps: float, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the outputs of a LayerNorm, or of an RMSNorm if ``centred`` is false."""
        gain = torch.ones(u.shape[-1], dtype=torch.float64) if gain is None else gain
        bias = torch.zeros_like(gain) if bias is None else bias
        settings = (bool(centred), float(eps), _bytes(gain), _bytes(bias))
        return _rows(lambda row: self._named(len(row), "norm", *settings, _key(row)), u)

    def times(self, u: Tensor, factor: Tensor | float) -> Tensor:
        """Multiply entries by a constant."""
        return _with_constant(self._times, u, factor)

    def _times(self, row: Tensor, factor: Tensor) -> Tensor:
        self._learn_activations(row)
        if bool((factor == 1).all()):
            return row
        if len(row) > 1 and self._kinds(row) == {"total"}:  # a sum of n tokens, divided by n, is their mean
            return torch.cat([self._times(*pair) for pair in zip(row.split(1), factor.split(1), strict=True)])
        kind, *of = self._term(row)
        if kind == "dot" and bool((factor == factor[0]).all()):
            return self._scaled(row, float(factor[0]))
        whole = bool((row == self._vector(int(row[0]) // _PLACES, len(row))).all())
        if kind == "norm" and whole and of[2:4] == [_bytes(torch.ones_like(factor)), _bytes(0 * factor)]:
            return self._named(len(row), "norm", *of[:2], _bytes(factor), *of[3:])
        return self._named(len(row), "times", _key(row), _bytes(factor))

    def plus(self, u: Tensor, offset: Tensor | float) -> Tensor:
        """Add a constant to entries; a mask hides scores."""
        return _with_constant(self._plus, u, offset)

    def _plus(self, row: Tensor, offset: Tensor) -> Tensor:
        hidden = torch.isin(offset, torch.tensor(_MASKS, dtype=torch.float64))
        if bool(((offset == 0) | hidden).all()) and (not bool(hidden.any()) or self._kinds(row) == {"dot"}):
            return torch.where(hidden, _HIDDEN, row)
        return self._named(len(row), "plus", _key(row), _bytes(offset))

    # ---- operations between entries

    def applied(self, name: str, u: Tensor) -> Tensor:
        """Apply a function of one variable, given by its name, to entries."""

        def one(row: Tensor) -> Tensor:
            self._learn_activations(row)
            return self._named(len(row), name, _key(row))

        return _rows(one, u)

    def add(self, u: Tensor, v: Tensor) -> Tensor:
        """Add entries."""
        return _rows(lambda a, b: self._named(len(a), "add", *sorted((_key(a), _key(b)))), u, v)

    def multiply(self, u: Tensor, v: Tensor) -> Tensor:
        """Multiply entries."""
        return _rows(self._multiply, u, v)

    def _multiply(self, a: Tensor, b: Tensor) -> Tensor:
        for row, other in ((a, b), (b, a)):
            kind, *of = self._term(other) if bool((other == other[0]).all()) else ("",)
            if kind == "rsqrt" and (term := self._term(_entries(of[0])))[0] == "plus":
                square = _entries(term[1])
                offset = torch.frombuffer(bytearray(term[2]), dtype=torch.float64)
                if len(square) == 1 and bool((square == self.mean(self._multiply(row, row), 0)).all()):
                    return self.norm(row, False, float(offset[0]), None, None)
        return self._named(len(a), "multiply", *sorted((_key(a), _key(b))))

    def total(self, u: Tensor, dim: int) -> Tensor:
        """Add the entries along a dimension."""
        u = u.movedim(dim, -1)
        found = _rows(lambda row: row if len(row) == 1 else self._named(1, "total", _key(row)), u)
        return found[..., 0]

    def mean(self, u: Tensor, dim: int) -> Tensor:
        """Average the entries along a dimension."""
        total = self.total(u, dim)
        return self.times(total[..., None], 1 / u.shape[dim])[..., 0]

    # ---- attention

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores (rows, keys), the inner products of queries (rows, e) and keys (keys, e)."""
        keys = [self._key_place(self._plain(row)) for row in k]
        factors = [self._factor(row) for row in k]

        def one(row: Tensor) -> Tensor:
            factor, row = self._factor(row), self._plain(row)
            found = []
            for key, other in zip(keys, factors, strict=True):
                own = row if factor * other == 1 else self._scaled(row, factor * other)
                found.append(self._number("dot", _key(own)) * _PLACES + key)
            return torch.tensor(found)

        return _rows(one, q)

    def _key_place(self, row: Tensor) -> int:
        return self._places.setdefault(("key", _key(row)), len(self._places))

    def _factor(self, row: Tensor) -> float:
        """Return the number that was multiplied to a whole query or key last, or 1."""
        kind, *of = self._term(row)
        if kind == "times":
            factor = torch.frombuffer(bytearray(of[1]), dtype=torch.float64)
            if bool((factor == factor[0]).all()):
                return float(factor[0])
        return 1.0

    def _plain(self, row: Tensor) -> Tensor:
        return row if self._factor(row) == 1 else _entries(self._term(row)[1])[row % _PLACES]

    def _scaled(self, row: Tensor, factor: float) -> Tensor:
        """Multiply entries by a number, in the weights of the linear map that they come from."""
        found = row.clone()
        for number in (row // _PLACES).unique().tolist():
            here = row // _PLACES == number
            places = row[here] % _PLACES
            kind, *of = self._terms[number] if number >= 0 else ("",)
            if kind == "linear":
                found[here] = number * _PLACES + self._scaled_weights(places, factor)
            elif kind == "dot":
                own = self._scaled(_entries(of[0]), factor)
                found[here] = self._number("dot", _key(own)) * _PLACES + places
            elif kind == "add":
                found[here] = self.add(*(self._scaled(_entries(one), factor) for one in of))[places]
            elif kind == "times":
                constant = torch.frombuffer(bytearray(of[1]), dtype=torch.float64)
                found[here] = self.times(self._scaled(_entries(of[0]), factor), constant)[places]
            elif kind == "neg":
                found[here] = self.applied("neg", self._scaled(_entries(of[0]), factor))[places]
            else:
                raise DifferentOperationError("multiplies scores that are not of linear queries and keys")
        return found

    def _scaled_weights(self, places: Tensor, factor: float) -> Tensor:
        """Multiply rows of weights, given by their numbers, by ``factor``, and return the numbers of the new
        rows.
        """
        key = (_key(places), factor)
        if key not in self._multiplied:  # once for all tokens
            rows = [(w[i], b[i]) for w, b, i in (self._weights[place] for place in places.tolist())]
            weight, bias = (torch.stack(parts) * factor for parts in zip(*rows, strict=True))
            self._multiplied[key] = self._weight_places(weight, bias)
        return self._multiplied[key]

    def softmax(self, scores: Tensor) -> Tensor:
        """Return the attention weights of scores (..., keys), some of which may be hidden."""

        def one(row: Tensor) -> Tensor:
            seen = row != _HIDDEN
            found = torch.full_like(row, _NO_WEIGHT)
            found[seen] = self._named(int(seen.sum()), "softmax", _key(row[seen]))
            return found

        return _rows(one, scores)

    def weighted(self, weights: Tensor, v: Tensor) -> Tensor:
        """Return the averages (rows, e) of values v (keys, e) with attention weights (rows, keys)."""

        def one(row: Tensor) -> Tensor:
            seen = row != _NO_WEIGHT
            return self._named(v.shape[1], "weighted", _key(row[seen]), _key(v[seen].flatten()))

        return _rows(one, weights)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of two matrices of entries, which is part of an attention."""
        return self.weighted(a, b) if self._kinds(a) <= {"softmax", _NO_WEIGHT} else self.scores(a, b.mT)

    # ---- activations that are written with several operations

    def _learn_activations(self, row: Tensor) -> None:
        """Let the longer ways to write an activation of these entries have the number of the activation.

        The entries are outputs of a linear map; before they were changed.
        """
        key = _key(row)
        if key in self._seen or self._kinds(row) != {"linear"}:
            return
        self._seen.add(key)
        half = self.times(row, 0.5)
        cubic = self.add(row, self.times(self.applied("cube", row), 0.044715))
        inner = self.applied("tanh", self.times(cubic, math.sqrt(2.0 / math.pi)))
        erf = self.applied("erf", self.times(row, 1 / math.sqrt(2.0)))
        ways = {
            "silu": (row, self.applied("sigmoid", row)),
            "quick_gelu": (row, self.applied("sigmoid", self.times(row, 1.702))),
            "gelu_tanh": (half, self.plus(inner, 1.0)),
            "gelu": (half, self.plus(erf, 1.0)),
        }
        for name, (a, b) in ways.items():
            self._numbers["multiply", *sorted((_key(a), _key(b)))] = self._number(name, key)


def _bytes(constant: Tensor) -> bytes:
    return (constant.detach().cpu().double() + 0.0).contiguous().numpy().tobytes()  # no −0


def _key(entries: Tensor) -> bytes:
    return entries.contiguous().numpy().tobytes()


def _entries(key: bytes) -> Tensor:
    return torch.frombuffer(bytearray(key), dtype=torch.int64)


def _rows(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply a function of vectors to all rows of tensors, which are broadcast to one shape."""
    same = torch.broadcast_tensors(*tensors)
    shape = same[0].shape or (1,)
    found = [function(*rows) for rows in zip(*(t.reshape(-1, shape[-1]) for t in same), strict=True)]
    if not found:
        raise DifferentOperationError("computes with no entries")
    return torch.stack(found).reshape(*same[0].shape[:-1], *(found[0].shape if same[0].ndim else ()))


def _with_constant(
    function: Callable[[Tensor, Tensor], Tensor], u: Tensor, constant: Tensor | float
) -> Tensor:
    fixed = torch.as_tensor(constant, dtype=torch.float64)
    shape = torch.broadcast_shapes(u.shape, fixed.shape)
    u, fixed = u.expand(shape), fixed.expand(shape)
    pairs = zip(u.reshape(-1, *shape[-1:] or (1,)), fixed.reshape(-1, *shape[-1:] or (1,)), strict=True)
    return torch.stack([function(*pair) for pair in pairs]).reshape(shape)
