"""Random programs of the operations that attention code applies to scores: what is read gives the output.

Each program makes scores in some arrangement, applies up to seven operations to them, brings them back and
multiplies the probabilities with values in some way.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from howsmooth.models.tracing.softmax_call import SoftmaxCall
from howsmooth.models.tracing.softmax_tracer import SoftmaxTracer
from tests.models.tracing.test_softmax_tracer import plain

F64 = torch.float64
OPERATIONS = (
    "scale", "divide", "bias", "fill", "where", "add mask", "view", "permute", "unsqueeze", "factor", "cap",
)  # fmt: skip


@dataclass
class Scores:
    """Scores and what each axis holds: a word over the letters b, h, m, n, possibly empty."""

    tensor: Tensor
    axes: list[str]


class Program:
    """The same computation at every run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = random.Random(seed)
        self.sizes = {
            "b": draw.choice([1, 2, 3]), "h": draw.choice([1, 2, 4]),
            "m": draw.choice([1, 3, 4, 6]), "n": draw.choice([1, 2, 4, 5, 6]),
        }  # fmt: skip
        b, h, m, n = self.sizes.values()
        d, dv = draw.choice([1, 2, 3]), draw.choice([1, 4, 7])
        make = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = (
            torch.randn(s, dtype=F64, generator=make) for s in ((b, h, m, d), (b, h, n, d), (b, h, n, dv))
        )

    def length(self, axis: str) -> int:
        return math.prod(self.sizes[letter] for letter in axis)

    def run(self) -> Tensor:
        self.draw, self.make = random.Random(self.seed + 1), torch.Generator().manual_seed(self.seed + 2)
        s = self.begin()
        self.done = []
        for _ in range(self.draw.randint(0, 7)):
            operation = self.draw.choice(OPERATIONS)
            self.apply(operation, s)
            self.done.append(operation)
        letters = "".join(s.axes)
        back = s.tensor.reshape([self.sizes[c] for c in letters]).permute([letters.index(c) for c in "bhmn"])
        return self.end(back.softmax(-1))

    def begin(self) -> Scores:
        b, h, m, n = self.sizes.values()
        way = self.draw.choice(["matmul", "bmm", "einsum", "keys first", "one key head"])
        if way == "bmm":
            q, k = self.q.reshape(b * h, m, -1), self.k.reshape(b * h, n, -1)
            return Scores(torch.bmm(q, k.mT), ["bh", "m", "n"])
        if way == "einsum":
            order = self.draw.sample("bhmn", 4)
            return Scores(torch.einsum("bhmd,bhnd->" + "".join(order), self.q, self.k), order)
        if way == "keys first":
            return Scores(self.k @ self.q.mT, ["b", "h", "n", "m"])
        keys = self.k[:, :1] if way == "one key head" else self.k
        return Scores(torch.matmul(self.q, keys.transpose(2, 3)), ["b", "h", "m", "n"])

    def shape(self, axes: list[str]) -> list[int]:
        return [self.length(axis) if self.draw.random() < 0.6 else 1 for axis in axes]

    def pairs(self, axes: list[str]) -> Tensor:
        """Pairs to hide, never those with the first key."""
        shape = self.shape(axes)
        hidden = torch.rand(shape, generator=self.make) < 0.4
        for i, axis in enumerate(axes):
            if "n" in axis and shape[i] > 1:
                after = self.length(axis[axis.index("n") + 1 :])
                key = torch.arange(shape[i]) // after % self.sizes["n"]
                return hidden & (key > 0).view([-1 if j == i else 1 for j in range(len(axes))])
        return torch.zeros_like(hidden)

    def apply(self, operation: str, s: Scores) -> None:
        draw, t, axes = self.draw, s.tensor, s.axes
        if operation == "scale":
            s.tensor = draw.uniform(0.3, 2) * t
        elif operation == "divide":
            s.tensor = t / draw.choice([2, torch.tensor(1.5, dtype=F64)]) if "cap" not in self.done else t / 2
        elif operation == "bias":
            bias = torch.randn(self.shape(axes), dtype=F64, generator=self.make)
            while bias.ndim > 1 and bias.shape[0] == 1 and draw.random() < 0.5:
                bias = bias[0]
            sums = (t + bias, bias + t, t - bias, t.add(bias, alpha=0.5))
            s.tensor = draw.choice(sums)
        elif operation == "fill":
            s.tensor = t.masked_fill(self.pairs(axes), draw.choice([-math.inf, -1e9, torch.finfo(F64).min]))
        elif operation == "where":
            s.tensor = torch.where(self.pairs(axes), torch.tensor(-1e9, dtype=F64), t)
        elif operation == "add mask":
            s.tensor = t + -1e9 * self.pairs(axes).to(F64)
        elif operation == "view":
            self.view(s)
        elif operation == "permute":
            order = draw.sample(range(len(axes)), len(axes))
            s.tensor, s.axes = t.permute(order), [axes[i] for i in order]
        elif operation == "unsqueeze":
            i = draw.randint(0, len(axes))
            s.tensor = t.unsqueeze(i)
            axes.insert(i, "")
        elif operation == "factor" and "cap" not in self.done:
            shape = [1 if "n" in axis else size for axis, size in zip(axes, self.shape(axes), strict=True)]
            s.tensor = t * (0.5 + torch.rand(shape, dtype=F64, generator=self.make))
        elif operation == "cap" and not {"bias", "fill", "where", "add mask", "cap"} & {*self.done}:
            s.tensor = 3 * torch.tanh(t / 3)

    def view(self, s: Scores) -> None:
        i = self.draw.randrange(len(s.axes))
        if i + 1 < len(s.axes) and self.draw.random() < 0.6:
            s.tensor = s.tensor.flatten(i, i + 1)
            s.axes[i : i + 2] = [s.axes[i] + s.axes[i + 1]]
        elif len(s.axes[i]) > 1:
            cut = self.draw.randrange(1, len(s.axes[i]))
            parts = [s.axes[i][:cut], s.axes[i][cut:]]
            s.tensor = s.tensor.reshape(
                *s.tensor.shape[:i], *map(self.length, parts), *s.tensor.shape[i + 1 :]
            )
            s.axes[i : i + 1] = parts

    def end(self, p: Tensor) -> Tensor:
        b, h, m, n = self.sizes.values()
        way = self.draw.choice(["matmul", "bmm", "einsum", "values first"])
        if way == "bmm":
            return torch.bmm(p.reshape(b * h, m, n), self.v.reshape(b * h, n, -1)).view(b, h, m, -1)
        if way == "einsum":
            out = torch.einsum("hbmn,bnhd->mbhd", p.transpose(0, 1), self.v.transpose(1, 2))
            return out.permute(1, 2, 0, 3)
        return p @ self.v if way == "matmul" else (self.v.mT @ p.mT).mT


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_what_is_read_of_random_programs_gives_their_output(first: int) -> None:
    for seed in range(first, first + 20):
        program = Program(seed)
        expected = program.run()
        calls: list[SoftmaxCall] = []
        with SoftmaxTracer(lambda call, calls=calls: calls.append(call), check=seed % 2 == 0):
            out = program.run()
        assert torch.equal(out, expected)
        assert len(calls) == 1, (seed, program.done)
        error = (plain(calls[0]) - calls[0].output).abs().max()
        assert error < 1e-11, (seed, program.done)
        with SoftmaxTracer(lambda call: 2 * call.output):
            torch.testing.assert_close(program.run(), 2 * expected, rtol=0, atol=1e-12)
