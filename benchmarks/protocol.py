"""The paper's protocol at BERT-base size: against the machine's matrix products, and against other ways.

    python benchmarks/protocol.py                 # all of it: some ten minutes on two cores
    python benchmarks/protocol.py --lengths 2:20:2 --compare 4,10 --pack 2:20:1

Part 1 runs the protocol (49 lengths × 10 sequences, one layer of an untrained BERT-base, rtol 1e-4) and
sets the float32 operations that its products need, over the time they took, against the rate of a
2048 × 2048 matrix product measured between the lengths.

Part 2 runs other methods on sequences of the same protocol, in turns and on the same inputs, one sequence at
a time: plain power iteration with autodiff products (what the paper describes); SciPy's ``svds`` on the
autodiff operator and on howsmooth's; ``svds`` on the Jacobian of curvlinops; the power iteration of cola on
its Jacobian; the dense Jacobian where it fits. It prints times, products and errors against a float64
measurement at rtol 1e-9, (i) at each method's own stop for a tolerance of 1e-4, beside howsmooth at that
tolerance and at the cheapest one whose worst error is no larger than the method's; and (ii) when the true
error is small enough: for a method with a tolerance, the cheapest of several that get there; power iteration
is stopped by an oracle that knows the error.

Part 3 measures sequences of unequal lengths in one list and one by one.

Part 4 takes every fourth length of the protocol, ten sequences each: all in one list by howsmooth at several
tolerances, and one after the other by power iteration with autodiff at 1e-4, with the worst and the median
error of each. The ratio of the sums is what the whole protocol takes less.

With ``--threads 1`` times are processor seconds, which other work on the machine disturbs little. The
dependency group ``benchmarks`` names curvlinops and cola (``pip install curvlinops-for-pytorch cola-ml``; the
torchvision that comes along must fit the build of PyTorch); what is missing is left out, and said.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.progress import track
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor

import howsmooth as hs
from howsmooth import spectral
from howsmooth.attention import SelfAttention
from howsmooth.jacobian import AutodiffJacobian, closed_form_jacobian
from howsmooth.models import LoadedModel
from howsmooth.study.input_sequences import arrange
from howsmooth.study.ranges import Ranges
from howsmooth.texts import load_text

RTOL = 1e-4
DENSE_UP_TO = 4  # tokens: beyond, the SVD of (768 n)² takes minutes


def clock() -> float:
    """Seconds; with one thread those of the processor, which other work on the machine disturbs little."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def matrix_rate(size: int = 2048) -> float:
    """Float32 operations a second of one matrix product, as PyTorch makes it."""
    a, b = torch.randn(2, size, size)
    began = clock()
    a @ b
    return 2 * size**3 / (clock() - began)


def operations(f: SelfAttention, n: int) -> int:
    """Operations in matrix products of one step, for one sequence of n tokens.

    Projections forth and back, W_OᵀW_O between them, and eight products of size n × n × head dimension a
    head, P being kept: dq kᵀ, q dkᵀ, dP v and P dv in J; dO vᵀ, dS k, dSᵀ q and Pᵀ dO in Jᵀ.
    """
    rows = f.heads * f.key_dim + f.kv_heads * (f.key_dim + f.value_dim)
    through = min(f.heads * f.value_dim, 2 * f.d_out)
    projections = 2 * n * (2 * f.d * rows + f.heads * f.value_dim * through)
    core = 2 * n * n * f.heads * (4 * f.key_dim + 4 * f.value_dim)
    return projections + core


@dataclass
class Answer:
    """What one method said about one sequence."""

    value: float
    products: int
    seconds: float


Method = Callable[[SelfAttention, Tensor, float], tuple[float, int]]
"""The largest singular value to a tolerance, and the products that took."""


def timed(method: Method, f: SelfAttention, x: Tensor, tolerance: float) -> Answer:
    """Run one measurement and time it."""
    began = clock()
    value, products = method(f, x, tolerance)
    return Answer(value, products, clock() - began)


def power_steps(f: SelfAttention, x: Tensor) -> Iterator[float]:
    """Power iteration on JᵀJ with autodiff products: σ after each step, of two products."""
    _, vjp = torch.func.vjp(f, x)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    v = v / v.norm()
    while True:
        u = torch.func.jvp(f, (x,), (v,))[1]
        w = vjp(u)[0]
        yield float(w.norm()) ** 0.5
        v = w / w.norm()


def power_iteration(f: SelfAttention, x: Tensor, tolerance: float) -> tuple[float, int]:
    """Power iteration until σ moves by less than the tolerance; at most 1000 steps."""
    sigma, steps = 0.0, 0
    for now in islice(power_steps(f, x), 1000):
        previous, sigma, steps = sigma, now, steps + 1
        if abs(sigma - previous) <= tolerance * sigma:
            break
    return sigma, 2 * steps


def power_iteration_until(
    f: SelfAttention, x: Tensor, truth: float, error: float, limit: float
) -> Answer | None:
    """Power iteration until its true error is small enough; None if it is not after ``limit`` seconds."""
    began = clock()
    for step, sigma in enumerate(power_steps(f, x), 1):
        seconds = clock() - began
        if abs(sigma - truth) <= error * truth:
            return Answer(sigma, 2 * step, seconds)
        if seconds > limit:
            return None
    raise AssertionError


class Counted:
    """A SciPy operator that counts its products."""

    def __init__(self, operator: LinearOperator) -> None:
        self.count = 0

        def counting(product: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
            def call(v: np.ndarray) -> np.ndarray:
                self.count += 1
                return product(v)

            return call

        self.operator = LinearOperator(
            operator.shape, counting(operator.matvec), counting(operator.rmatvec), dtype=operator.dtype
        )

    def largest(self, tolerance: float) -> tuple[float, int]:
        """Return the leading singular value by ARPACK."""
        values = svds(self.operator, k=1, tol=tolerance, return_singular_vectors=False, rng=0)
        return float(values[0]), self.count


def to_scipy(operator: spectral.LinearOperator) -> LinearOperator:
    """Return the first map of a batched operator as an operator of SciPy."""
    one = operator.select(torch.tensor([0]))

    def vector(x: np.ndarray, shape: tuple[int, ...]) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(x), dtype=one.dtype, device=one.device).view(1, *shape)

    def matvec(x: np.ndarray) -> np.ndarray:
        return np.asarray(one.product(vector(x, one.in_shape)).reshape(-1).cpu())

    def rmatvec(y: np.ndarray) -> np.ndarray:
        return np.asarray(one.adjoint_product(vector(y, one.out_shape)).reshape(-1).cpu())

    return LinearOperator(
        shape=(one.out_size, one.in_size),
        matvec=matvec,
        rmatvec=rmatvec,
        dtype=np.dtype(str(one.dtype).removeprefix("torch.")),
    )


def svds_autodiff(f: SelfAttention, x: Tensor, tolerance: float) -> tuple[float, int]:
    """SciPy's ``svds`` on the Jacobian by autodiff."""
    return Counted(to_scipy(AutodiffJacobian(f, x))).largest(tolerance)


def svds_closed_form(f: SelfAttention, x: Tensor, tolerance: float) -> tuple[float, int]:
    """SciPy's ``svds`` on howsmooth's Jacobian."""
    wide = f.to(dtype=torch.float64)
    return Counted(to_scipy(closed_form_jacobian(wide, x[None].double(), dtype=x.dtype))).largest(tolerance)


def svds_curvlinops(f: SelfAttention, x: Tensor, tolerance: float) -> tuple[float, int]:
    """``svds`` on the Jacobian of curvlinops, which is that by a parameter: here the tokens."""
    from curvlinops import JacobianLinearOperator

    class AtTokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Parameter(x.clone())

        def forward(self, _: Tensor) -> Tensor:
            return f(self.tokens)[None]

    module = AtTokens()
    data = [(torch.zeros(1, 1), torch.zeros(1, *x.shape))]
    jacobian = JacobianLinearOperator(module, [module.tokens], data, check_deterministic=False)
    return Counted(jacobian.to_scipy(dtype=np.float32)).largest(tolerance)


def power_cola(f: SelfAttention, x: Tensor, tolerance: float) -> tuple[float, int]:
    """The power iteration of cola on JᵀJ of its own Jacobian."""
    import cola

    # The package has a function of the module's name in front of it.
    power = import_module("cola.linalg.eig.power_iteration").power_iteration
    jacobian = cola.ops.Jacobian(lambda t: f(t.reshape(x.shape)).flatten(), x.flatten().clone())
    _, largest, told = power(jacobian.T @ jacobian, tol=tolerance, max_iter=1000)
    return float(largest) ** 0.5, 2 * int(told["iterations"])


def dense(f: SelfAttention, x: Tensor, _: float) -> tuple[float, int]:
    """Return the norm of the dense Jacobian by reverse-mode autodiff, one product a row."""
    j = torch.func.jacrev(f, chunk_size=64)(x).reshape(x.numel(), x.numel())
    return float(torch.linalg.matrix_norm(j, 2)), x.numel()


def sequences(tokens: list[int], n: int, samples: int) -> Tensor:
    """Cut the protocol's windows of n tokens."""
    starts = arrange(len(tokens), [n], samples, 0)
    return torch.tensor([tokens[first : first + n] for first in starts.values()])


def protocol(
    model: LoadedModel, tokens: list[int], lengths: Sequence[int], samples: int
) -> dict[str, object]:
    """Part 1: the whole protocol, with the rate of its products beside the machine's."""
    spent = forward = work = 0.0
    products, rates, unconverged = 0, [], 0
    per_length = []
    for n in track(lengths, "protocol", console=Console(stderr=True), transient=True):
        ids = sequences(tokens, n, samples)
        began = clock()
        (site,) = hs.capture(model, ids, layers=[0])
        forward += clock() - began
        rates.append(matrix_rate())
        began = clock()
        estimate = hs.local_lipschitz(site.map, site.x, rtol=RTOL)
        seconds = clock() - began
        rates.append(matrix_rate())
        steps = int(estimate.iterations.sum())
        done = steps * operations(site.map, n)
        spent, work, products = spent + seconds, work + done, products + 2 * steps
        unconverged += int((~estimate.converged).sum())
        per_length.append(
            {"n": n, "seconds": seconds, "share": done / seconds / statistics.median(rates[-2:])}
        )
    return {
        "sequences": len(lengths) * samples,
        "seconds_measuring": spent,
        "seconds_forward_and_capture": forward,
        "products": products,
        "unconverged": unconverged,
        "gflops": work / spent / 1e9,
        "machine_gflops": statistics.median(rates) / 1e9,
        "share_of_machine": work / spent / statistics.median(rates),
        "lengths": per_length,
    }


METHODS: dict[str, tuple[str, Method]] = {
    "power iteration, autodiff": ("", power_iteration),
    "power iteration, cola": ("cola", power_cola),
    "svds, SciPy on autodiff": ("", svds_autodiff),
    "svds, SciPy on howsmooth's J": ("", svds_closed_form),
    "svds, SciPy on curvlinops": ("curvlinops", svds_curvlinops),
    "dense": ("", dense),
}
TOLERANCES = (1e-1, 7e-2, 5e-2, 3e-2, 1e-2, 1e-3, 1e-4)


def own_stops(sites: Sequence[Case], methods: dict[str, Method]) -> pd.DataFrame:
    """Part 2 (i): each method at its own stop for a tolerance of 1e-4, in turns on the same inputs.

    ``times_ours``: its time over that of howsmooth with the same tolerance; ``times_ours_as_good``: over that
    of howsmooth with the cheapest tolerance whose worst error is no larger than the method's own.
    """
    tables = []
    for case in track(sites, "own stops", console=Console(stderr=True), transient=True):
        at: dict[float, list[float]] = {tolerance: [] for tolerance in TOLERANCES}
        answers: dict[str, list[Answer]] = {"howsmooth": []}
        for x in case.x:
            for tolerance in TOLERANCES:  # the whole batch, once a sequence, for a median in turns
                at[tolerance].append(measured_together(case, tolerance)[0])
            for name, method in methods.items():
                if name != "dense" or case.n <= DENSE_UP_TO:
                    answers.setdefault(name, []).append(timed(method, case.f, x, RTOL))
        ours = {tolerance: measured_together(case, tolerance)[1] for tolerance in TOLERANCES}
        each = {tolerance: statistics.median(seconds) for tolerance, seconds in at.items()}
        worst = {tolerance: case.worst(found.value.tolist()) for tolerance, found in ours.items()}
        found = ours[RTOL]
        answers["howsmooth"] = [
            Answer(value, 2 * steps, each[RTOL])
            for value, steps in zip(found.value.tolist(), found.iterations.tolist(), strict=True)
        ]
        for name, given in answers.items():
            seconds = statistics.median(answer.seconds for answer in given)
            error = case.worst([answer.value for answer in given])
            as_good = min((each[t] for t in TOLERANCES if worst[t] <= error), default=math.nan)
            tables.append(
                {
                    "n": case.n,
                    "method": name,
                    "seconds": seconds,
                    "products": statistics.median(answer.products for answer in given),
                    "worst_error": error,
                    "times_ours": seconds / each[RTOL],
                    "times_ours_as_good": seconds / as_good,
                }
            )
    return pd.DataFrame(tables)


def until_error(
    sites: Sequence[Case], methods: dict[str, Method], targets: Sequence[float], limit: float
) -> pd.DataFrame:
    """Part 2 (ii): the time until all of a length's sequences are right to a true error.

    Of a method with a tolerance, the least time among the tolerances that are loose enough; of power
    iteration, stopped by the true error itself. NaN: not within ``limit`` seconds a sequence.
    """
    rows = []
    for case in track(sites, "true errors", console=Console(stderr=True), transient=True):
        runs: dict[str, list[tuple[float, float]]] = {"howsmooth": []}  # (worst error, seconds a sequence)
        for tolerance in TOLERANCES:
            each, ours = measured_together(case, tolerance)
            runs["howsmooth"].append((case.worst(ours.value.tolist()), each))
            for name, method in methods.items():
                if name.startswith("svds"):
                    answers = [timed(method, case.f, x, tolerance) for x in case.x]
                    seconds = statistics.median(answer.seconds for answer in answers)
                    runs.setdefault(name, []).append((case.worst([a.value for a in answers]), seconds))
        for target in targets:
            least = {
                name: min((seconds for error, seconds in found if error <= target), default=math.nan)
                for name, found in runs.items()
            }
            stopped = [
                power_iteration_until(case.f, x, truth, target, limit)
                for x, truth in zip(case.x, case.truth, strict=True)
            ]
            least["power iteration, autodiff"] = (
                math.nan
                if None in stopped
                else statistics.median(answer.seconds for answer in stopped if answer is not None)
            )
            rows += [
                {
                    "n": case.n,
                    "true_error": target,
                    "method": name,
                    "seconds": seconds,
                    "times_ours": seconds / least["howsmooth"],
                }
                for name, seconds in least.items()
            ]
    return pd.DataFrame(rows)


@dataclass
class Case:
    """Some sequences of one length, with what a float64 measurement at rtol 1e-9 says."""

    n: int
    f: SelfAttention
    x: Tensor
    truth: list[float]

    @classmethod
    def of(cls, model: LoadedModel, tokens: list[int], n: int, samples: int) -> Case:
        """Capture and measure them."""
        (site,) = hs.capture(model, sequences(tokens, n, samples), layers=[0])
        exact = site.map.to(dtype=torch.float64)
        found = hs.local_lipschitz(exact, site.x.double(), rtol=1e-9, max_iterations=1000)
        return cls(n, site.map, site.x, found.value.tolist())

    def worst(self, values: list[float]) -> float:
        """Return the largest relative error."""
        return max(abs(value - truth) / truth for value, truth in zip(values, self.truth, strict=True))


def measured_together(case: Case, tolerance: float) -> tuple[float, hs.LipschitzEstimate]:
    """Measure all sequences of a case in one call: seconds a sequence, and the estimate."""
    began = clock()
    estimate = hs.local_lipschitz(case.f, case.x, rtol=tolerance)
    return (clock() - began) / len(case.x), estimate


def packing(model: LoadedModel, tokens: list[int], lengths: Sequence[int], repeats: int) -> dict[str, float]:
    """Part 3: one sequence of each length, in one list and one by one."""
    xs: list[Tensor] = []
    for n in lengths:
        (site,) = hs.capture(model, sequences(tokens, n, 1), layers=[0])
        xs.append(site.x[0])
    f, together, alone, largest = site.map, [], [], 0.0
    for _ in range(repeats):
        began = clock()
        packed = hs.local_lipschitz(f, xs)
        together.append(clock() - began)
        began = clock()
        single = [hs.local_lipschitz(f, x, seed=[seed]) for x, seed in zip(xs, member_seeds(xs), strict=True)]
        alone.append(clock() - began)
        largest = max(
            largest, *(abs(float(a) / float(b.value) - 1) for a, b in zip(packed.value, single, strict=True))
        )
    return {
        "sequences": len(xs),
        "tokens": sum(len(x) for x in xs),
        "seconds_in_one_list": statistics.median(together),
        "seconds_one_by_one": statistics.median(alone),
        "largest_difference": largest,
    }


def as_a_whole(
    model: LoadedModel, tokens: list[int], lengths: Sequence[int], samples: int
) -> tuple[pd.DataFrame, float]:
    """Part 4: the protocol in one list at several tolerances, beside power iteration.

    The list comes before it and after it. Beside the table: the time of power iteration over that of the
    cheapest list whose worst and median errors are no larger.
    """
    console = Console(stderr=True)
    cases = [
        Case.of(model, tokens, n, samples) for n in track(lengths, "truth", console=console, transient=True)
    ]
    f, xs = cases[-1].f, [x for case in cases for x in case.x]
    truth = torch.tensor([value for case in cases for value in case.truth], dtype=torch.float64)
    spent: dict[str, list[float]] = {}
    errors: dict[str, Tensor] = {}

    def in_one_list() -> None:
        for tolerance in TOLERANCES:
            name = f"howsmooth, {tolerance:g}"
            began = clock()
            found = hs.local_lipschitz(f, xs, rtol=tolerance)
            spent.setdefault(name, []).append(clock() - began)
            errors[name] = (found.value - truth).abs() / truth

    in_one_list()
    answers = [
        timed(power_iteration, f, x, RTOL)
        for x in track(xs, "power iteration", console=console, transient=True)
    ]
    in_one_list()
    other = "power iteration, autodiff"
    spent[other] = [sum(answer.seconds for answer in answers)]
    values = torch.tensor([answer.value for answer in answers], dtype=torch.float64)
    errors[other] = (values - truth).abs() / truth
    table = pd.DataFrame(
        {
            "method": name,
            "seconds": statistics.median(seconds),
            "worst_error": float(errors[name].max()),
            "median_error": float(errors[name].median()),
        }
        for name, seconds in spent.items()
    )
    theirs = table[table["method"] == other].iloc[0]
    ours = table[table["method"] != other]
    as_good = ours[
        (ours["worst_error"] <= theirs["worst_error"]) & (ours["median_error"] <= theirs["median_error"])
    ]
    table["power_iteration_over_this"] = theirs["seconds"] / table["seconds"]
    return table, float(theirs["seconds"] / as_good["seconds"].min())


def member_seeds(xs: Sequence[Tensor]) -> list[int]:
    """Seeds with which a sequence alone gets the start that it has in a list."""
    return [i * 0x9E3779B97F4A7C15 % 2**64 for i in range(len(xs))]


def available() -> dict[str, Method]:
    """Return the methods whose packages are there, and say of the others that they are not."""
    found = {}
    for name, (package, method) in METHODS.items():
        if package and importlib.util.find_spec(package) is None:
            print(f"left out: {name} ({package} is not installed: dependency group benchmarks)")
        else:
            found[name] = method
    return found


def main() -> None:
    """Run all parts and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="2:98:2", help="lengths of part 1 (default: the protocol's 49)")
    parser.add_argument("--samples", type=int, default=10, help="sequences a length of part 1")
    parser.add_argument("--compare", default="4,10,50,98", help="lengths of part 2")
    parser.add_argument("--compare-samples", type=int, default=10, help="sequences a length of part 2")
    parser.add_argument("--errors", default="1e-2,1e-3,1e-4", help="true errors of part 2 (ii)")
    parser.add_argument("--limit", type=float, default=20.0, help="most seconds a sequence of part 2 (ii)")
    parser.add_argument("--pack", default="2:60:2", help="lengths of part 3")
    parser.add_argument("--pack-repeats", type=int, default=3, help="repeats of part 3")
    parser.add_argument("--whole", default="2:98:8", help="lengths of part 4")
    parser.add_argument("--threads", type=int, help="threads of PyTorch")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    text = load_text("alice")
    model = hs.load_model("bert", random_init=True, tokenizer_text=text.content)
    tokens = model.tokenizer.encode(text.content)
    matrix_rate()
    print(f"{model.source}; {torch.get_num_threads()} threads; torch {torch.__version__}")
    whole = protocol(model, tokens, Ranges.parse(options.lengths, "lengths").values(), options.samples)
    print(
        f"protocol: {whole['sequences']} sequences in {whole['seconds_measuring']:.1f} s "
        f"(forward pass and capture aside: {whole['seconds_forward_and_capture']:.1f} s), "
        f"{whole['products']} products, {whole['unconverged']} unconverged\n"
        f"rate: {whole['gflops']:.0f} of {whole['machine_gflops']:.0f} GFLOP/s, "
        f"{whole['share_of_machine']:.0%} of the machine's matrix product",
        flush=True,
    )
    methods = available()
    lengths = Ranges.parse(options.compare, "compare").values()
    cases = [Case.of(model, tokens, n, options.compare_samples) for n in lengths]
    stops = own_stops(cases, methods)
    print(f"(i) each at its own stop, tolerance {RTOL:g}")
    print(stops.to_string(index=False, float_format=lambda v: f"{v:.3g}"), flush=True)
    targets = [float(target) for target in options.errors.split(",")]
    reached = until_error(cases, methods, targets, options.limit)
    print("(ii) time until the true error is small enough")
    print(reached.to_string(index=False, float_format=lambda v: f"{v:.3g}"), flush=True)
    packed = packing(model, tokens, Ranges.parse(options.pack, "pack").values(), options.pack_repeats)
    ratio = packed["seconds_one_by_one"] / packed["seconds_in_one_list"]
    print(
        f"packing: {packed['sequences']} sequences, {packed['tokens']} tokens: "
        f"{packed['seconds_in_one_list']:.2f} s in one list, {packed['seconds_one_by_one']:.2f} s one by "
        f"one, {ratio:.2f} times; values differ by at most {packed['largest_difference']:.1e}"
    )
    lengths = Ranges.parse(options.whole, "whole").values()
    lists, as_good = as_a_whole(model, tokens, lengths, options.compare_samples)
    print(f"the protocol in one list: {as_good:.1f} times faster than power iteration at no larger error")
    print(lists.to_string(index=False, float_format=lambda v: f"{v:.3g}"), flush=True)
    if options.json:
        parts = {"own_stops": stops, "true_errors": reached, "as_a_whole": lists}
        tables = {name: table.to_dict("records") for name, table in parts.items()}
        options.json.write_text(json.dumps({"protocol": whole, "packing": packed} | tables, indent=1))


if __name__ == "__main__":
    sys.exit(main())
