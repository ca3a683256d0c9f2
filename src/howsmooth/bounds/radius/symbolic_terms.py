"""The class ``Terms``: entries of tensors as numbered terms, which say how a model computes them.

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

__all__ = ["OTHER", "PLACES", "DifferentOperationError", "Terms", "constant", "key_of", "operand_entries"]

PLACES = 2**32
"""An entry is the number of its term times this, plus its place."""

_HIDDEN, _NO_WEIGHT, OTHER = -1, -2, -3
_HIDES = torch.finfo(torch.float32).min  # a score so low, or lower, hides its key


class DifferentOperationError(Exception):
    """An operation that no known layer performs."""


class Terms:
    """All terms of one comparison, with their numbers.

    The entries of the tokens have the number 0 and their place among all tokens. ``OTHER`` is an entry about
    which nothing is known, for what is computed before the first layer.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {("tokens",): 0}
        self._terms: list[tuple[Any, ...]] = [("tokens",)]
        self._places: dict[tuple[str, bytes], int] = {}
        self._weights: list[tuple[Tensor, Tensor, int]] = []
        self._origins: dict[int, int] = {}
        self._owners: list[Any] = [None]
        self._lengths: dict[int, int] = {}
        #: The vectors that were keys, at the places of their scores.
        self.keys: list[Tensor] = []
        #: Whose code computes the terms that are made from now on.
        self.owner: Any = None
        self._multiplied: dict[tuple[bytes, float], Tensor] = {}
        self._seen: set[bytes] = set()
        self._learning = False

    def __len__(self) -> int:
        return len(self._terms)

    def _number(self, *term: Any) -> int:
        found = self._numbers.setdefault(term, len(self._terms))
        if found == len(self._terms):
            self._terms.append(term)
            self._owners.append(self.owner)
        return found

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        """Return the operation of a term, and its operands as bytes of entries and of constants."""
        return self._terms[number]

    def owned(self, number: int) -> Any:
        """Return the owner at the time at which a term was made first."""
        return self._owners[number]

    def whole(self, number: int) -> Tensor:
        """Return all entries of a term that is neither linear nor a score."""
        return self._vector(number, self._lengths[number])

    def weights(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of weights (m, d) and biases (m,) at some places of linear terms."""
        found = [(w[i], b[i]) for w, b, i in (self._weights[place] for place in places.tolist())]
        rows, biases = (torch.stack(parts).detach().double() for parts in zip(*found, strict=True))
        return rows, biases

    def _vector(self, number: int, length: int) -> Tensor:
        return number * PLACES + torch.arange(length)

    def _named(self, length: int, *term: Any) -> Tensor:
        number = self._number(*term)
        self._lengths[number] = length
        return self._vector(number, length)

    def _term(self, entries: Tensor) -> tuple[Any, ...]:
        """Return the term to whose vector all given entries belong, or an empty one."""
        first = int(entries[0])
        same = first >= 0 and bool((entries // PLACES == first // PLACES).all())
        return self._terms[first // PLACES] if same else ("",)

    def kinds(self, entries: Tensor) -> set[Any]:
        """Return the operations from which entries come; entries without a term stand for themselves."""
        named = {int(number) for number in (entries[entries >= 0] // PLACES).unique()}
        return {self._terms[number][0] for number in named} | set(entries[entries < 0].tolist())

    # ---- operations between entries and constants

    def linear(self, u: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return W u + b for entries u (..., d), a weight (d_out, d) and a bias (d_out,)."""
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        places = self._weight_places(weight, bias)
        return _rows(lambda row: self._number("linear", key_of(row)) * PLACES + places, u)

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
        return _rows(lambda row: self._named(len(row), "norm", *settings, key_of(row)), u)

    def fixed(self, constants: Tensor) -> Tensor:
        """Return constants as entries."""
        return _rows(lambda row: self._named(len(row), "constant", row.numpy().tobytes()),
                     constants.detach().double().cpu() + 0.0)  # fmt: skip

    def times(self, u: Tensor, factor: Tensor | float) -> Tensor:
        """Multiply entries by a constant."""
        return _with_constant(self._times, u, factor)

    def _times(self, row: Tensor, factor: Tensor) -> Tensor:
        self._learn_activations(row)
        if bool((factor == 1).all()):
            return row
        if len(row) > 1 and self.kinds(row) == {"total"}:  # a sum of n tokens, divided by n, is their mean
            return torch.cat([self._times(*pair) for pair in zip(row.split(1), factor.split(1), strict=True)])
        kind, *of = self._term(row)
        if kind == "dot" and bool((factor == factor[0]).all()):
            return self._scaled(row, float(factor[0]))
        whole = bool((row == self._vector(int(row[0]) // PLACES, len(row))).all())
        if kind == "norm" and whole and of[2:4] == [_bytes(torch.ones_like(factor)), _bytes(0 * factor)]:
            return self._named(len(row), "norm", *of[:2], _bytes(factor), *of[3:])
        return self._named(len(row), "times", key_of(row), _bytes(factor))

    def plus(self, u: Tensor, offset: Tensor | float) -> Tensor:
        """Add a constant to entries; a mask hides scores."""
        return _with_constant(self._plus, u, offset)

    def _plus(self, row: Tensor, offset: Tensor) -> Tensor:
        hidden = offset <= _HIDES
        seen = ~hidden & (row != _HIDDEN)
        found = torch.where(seen, row, _HIDDEN)
        if bool((offset[seen] == 0).all()):
            return found
        found[seen] = self._named(int(seen.sum()), "plus", key_of(row[seen]), _bytes(offset[seen]))
        return found

    # ---- operations between entries

    def applied(self, name: str, u: Tensor) -> Tensor:
        """Apply a function of one variable, given by its name, to entries."""

        def one(row: Tensor) -> Tensor:
            self._learn_activations(row)
            return self._named(len(row), name, key_of(row))

        return _rows(one, u)

    def add(self, u: Tensor, v: Tensor) -> Tensor:
        """Add entries."""
        return _rows(lambda a, b: self._named(len(a), "add", *sorted((key_of(a), key_of(b)))), u, v)

    def multiply(self, u: Tensor, v: Tensor) -> Tensor:
        """Multiply entries."""
        return _rows(self._multiply, u, v)

    def _multiply(self, a: Tensor, b: Tensor) -> Tensor:
        for row, other in ((a, b), (b, a)):
            kind, *of = self._term(other) if bool((other == other[0]).all()) else ("",)
            if kind == "rsqrt" and (term := self._term(operand_entries(of[0])))[0] == "plus":
                square = operand_entries(term[1])
                offset = constant(term[2])
                if len(square) == 1 and bool((square == self.mean(self._multiply(row, row), 0)).all()):
                    return self.norm(row, False, float(offset[0]), None, None)
        return self._named(len(a), "multiply", *sorted((key_of(a), key_of(b))))

    def total(self, u: Tensor, dim: int) -> Tensor:
        """Add the entries along a dimension."""
        u = u.movedim(dim, -1)
        found = _rows(lambda row: row if len(row) == 1 else self._named(1, "total", key_of(row)), u)
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
                found.append(self._number("dot", key_of(own)) * PLACES + key)
            return torch.tensor(found)

        return _rows(one, q)

    def _key_place(self, row: Tensor) -> int:
        place = self._places.setdefault(("key", key_of(row)), len(self.keys))
        if place == len(self.keys):
            self.keys.append(row)
        return place

    def _factor(self, row: Tensor) -> float:
        """Return the number that was multiplied to a whole query or key last, or 1."""
        kind, *of = self._term(row)
        if kind == "times":
            factor = constant(of[1])
            if bool((factor == factor[0]).all()):
                return float(factor[0])
        return 1.0

    def _plain(self, row: Tensor) -> Tensor:
        return row if self._factor(row) == 1 else operand_entries(self._term(row)[1])[row % PLACES]

    def _scaled(self, row: Tensor, factor: float) -> Tensor:
        """Multiply entries by a number, in the weights of the linear map that they come from."""
        found = row.clone()
        for number in (row // PLACES).unique().tolist():
            here = row // PLACES == number
            places = row[here] % PLACES
            kind, *of = self._terms[number] if number >= 0 else ("",)
            if kind == "linear":
                found[here] = number * PLACES + self._scaled_weights(places, factor)
            elif kind == "dot":
                own = self._scaled(operand_entries(of[0]), factor)
                found[here] = self._number("dot", key_of(own)) * PLACES + places
            elif kind == "add":
                found[here] = self.add(*(self._scaled(operand_entries(one), factor) for one in of))[places]
            elif kind == "times":
                scaled = self._scaled(operand_entries(of[0]), factor)
                found[here] = self.times(scaled, constant(of[1]))[places]
            elif kind == "norm":
                centred, eps, gain, bias, u = of
                gain, bias = (constant(part) * factor for part in (gain, bias))
                found[here] = self.norm(operand_entries(u), centred, eps, gain, bias)[places]
            elif kind == "constant":
                found[here] = self.fixed(constant(of[0]) * factor)[places]
            elif kind == "neg":
                found[here] = self.applied("neg", self._scaled(operand_entries(of[0]), factor))[places]
            else:
                raise DifferentOperationError("multiplies scores that are not of linear queries and keys")
        return found

    def _scaled_weights(self, places: Tensor, factor: float) -> Tensor:
        """Multiply rows of weights, given by their numbers, and return the numbers of the new rows."""
        key = (key_of(places), factor)
        if key not in self._multiplied:  # once for all tokens
            rows = [(w[i], b[i]) for w, b, i in (self._weights[place] for place in places.tolist())]
            weight, bias = (torch.stack(parts) * factor for parts in zip(*rows, strict=True))
            found = self._weight_places(weight, bias)
            self._multiplied[key] = found
            for place, origin in zip(found.tolist(), places.tolist(), strict=True):
                self._origins.setdefault(place, self._origins.get(origin, origin))
        return self._multiplied[key]

    def order(self, places: Tensor) -> Tensor:
        """Return the order of rows of weights in the model; those that were multiplied keep their place."""
        return torch.tensor([self._origins.get(place, place) for place in places.tolist()]).argsort()

    def softmax(self, scores: Tensor) -> Tensor:
        """Return the attention weights of scores (..., keys), some of which may be hidden."""

        def one(row: Tensor) -> Tensor:
            seen = row != _HIDDEN
            found = torch.full_like(row, _NO_WEIGHT)
            found[seen] = self._named(int(seen.sum()), "softmax", key_of(row[seen]))
            return found

        return _rows(one, scores)

    def weighted(self, weights: Tensor, v: Tensor) -> Tensor:
        """Return the averages (rows, e) of values v (keys, e) with attention weights (rows, keys)."""

        def one(row: Tensor) -> Tensor:
            seen = row != _NO_WEIGHT
            return self._named(v.shape[1], "weighted", key_of(row[seen]), key_of(v[seen].flatten()))

        return _rows(one, weights)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of two matrices of entries, which is part of an attention."""
        return self.weighted(a, b) if self.kinds(a) <= {"softmax", _NO_WEIGHT} else self.scores(a, b.mT)

    # ---- activations that are written with several operations

    def _learn_activations(self, row: Tensor) -> None:
        """Let the longer ways to write an activation of these entries have the number of the activation.

        The entries are outputs of a linear map; before they were changed.
        """
        key = key_of(row)
        if self._learning or key in self._seen or self.kinds(row) != {"linear"}:
            return
        self._seen.add(key)
        self._learning = True
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
            self._numbers["multiply", *sorted((key_of(a), key_of(b)))] = self._number(name, key)
            self._lengths[self._number(name, key)] = len(row)
        self._learning = False


def _bytes(vector: Tensor) -> bytes:
    return (vector.detach().cpu().double() + 0.0).contiguous().numpy().tobytes()  # no −0


def constant(key: bytes) -> Tensor:
    """Return the float64 vector that the bytes ``key`` hold."""
    return torch.frombuffer(bytearray(key), dtype=torch.float64)


def key_of(entries: Tensor) -> bytes:
    """Return entries as bytes, which an operation has as an operand."""
    return entries.contiguous().numpy().tobytes()


def operand_entries(key: bytes) -> Tensor:
    """Return the entries of an operand."""
    return torch.frombuffer(bytearray(key), dtype=torch.int64)


def _rows(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply a function of vectors to all rows of tensors, which are broadcast to one shape."""
    same = torch.broadcast_tensors(*tensors)
    shape = same[0].shape or (1,)
    found = [function(*rows) for rows in zip(*(t.reshape(-1, shape[-1]) for t in same), strict=True)]
    if not found:
        raise DifferentOperationError("computes with no entries")
    return torch.stack(found).reshape(*same[0].shape[:-1], *(found[0].shape if same[0].ndim else ()))


def _with_constant(function: Callable[[Tensor, Tensor], Tensor], u: Tensor, given: Tensor | float) -> Tensor:
    fixed = torch.as_tensor(given, dtype=torch.float64)
    shape = torch.broadcast_shapes(u.shape, fixed.shape)
    u, fixed = u.expand(shape), fixed.expand(shape)
    pairs = zip(u.reshape(-1, *shape[-1:] or (1,)), fixed.reshape(-1, *shape[-1:] or (1,)), strict=True)
    return torch.stack([function(*pair) for pair in pairs]).reshape(shape)
