"""The paper's protocol at BERT-base size: against the machine's matrix products, and three alternatives.

    python benchmarks/protocol.py                 # all of it: some minutes on two cores
    python benchmarks/protocol.py --lengths 2:20:2 --compare 4,10

Part 1 runs the protocol (49 lengths × 10 sequences, one layer of an untrained BERT-base, rtol 1e-4) and
sets the float32 operations that its products need, over the time they took, against the rate of a
2048 × 2048 matrix product measured between the lengths. Part 2 runs, on sequences of the same protocol, in
turns and on the same inputs: howsmooth; plain power iteration with autodiff products, one sequence at a
time (what the paper describes); SciPy's ``svds`` on the autodiff operator; the dense Jacobian where it
fits. It prints times, numbers of products and errors against a float64 measurement at rtol 1e-9, and ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from rich.progress import track
from scipy.sparse.linalg import svds
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import SelfAttention
from howsmooth.jacobian import AutodiffJacobian
from howsmooth.models import LoadedModel
from howsmooth.spectral import to_scipy
from howsmooth.study.ranges import Ranges
from howsmooth.study.sequences import pick_windows
from howsmooth.texts import load_text

RTOL = 1e-4
DENSE_UP_TO = 4  # tokens: beyond, the SVD of (768 n)² takes minutes


def matrix_rate(size: int = 2048) -> float:
    """Float32 operations a second of one matrix product, as PyTorch makes it."""
    a, b = torch.randn(2, size, size)
    began = time.perf_counter()
    a @ b
    return 2 * size**3 / (time.perf_counter() - began)


def operations(f: SelfAttention, n: int) -> int:
    """Operations in matrix products of one Golub–Kahan step, for one sequence of n tokens.

    Projections forth and back, and eight products of size n × n × head dimension a head, P being kept:
    dq kᵀ, q dkᵀ, dP v and P dv in J; dO vᵀ, dS k, dSᵀ q and Pᵀ dO in Jᵀ.
    """
    rows = f.heads * f.key_dim + f.kv_heads * (f.key_dim + f.value_dim)
    projections = 2 * 2 * n * (f.d * rows + f.d_out * f.heads * f.value_dim)
    core = 2 * n * n * f.heads * (4 * f.key_dim + 4 * f.value_dim)
    return projections + core


@dataclass
class Answer:
    """What one method said about one sequence."""

    value: float
    products: int
    seconds: float


def timed(measure: Callable[[], tuple[float, int]]) -> Answer:
    """Run one measurement and time it."""
    began = time.perf_counter()
    value, products = measure()
    return Answer(value, products, time.perf_counter() - began)


def power_iteration(f: SelfAttention, x: Tensor) -> tuple[float, int]:
    """Power iteration on JᵀJ with autodiff products, until σ moves by less than RTOL; at most 1000 steps."""
    _, vjp = torch.func.vjp(f, x)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    v, sigma = v / v.norm(), 0.0
    products = 0
    for _ in range(1000):
        u = torch.func.jvp(f, (x,), (v,))[1]
        w = vjp(u)[0]
        products += 2
        previous, sigma = sigma, float(w.norm()) ** 0.5
        v = w / w.norm()
        if abs(sigma - previous) <= RTOL * sigma:
            break
    return sigma, products


def scipy_svds(f: SelfAttention, x: Tensor) -> tuple[float, int]:
    """Return the leading singular value by ARPACK on the autodiff operator."""
    operator = AutodiffJacobian(f, x)
    counted = to_scipy(operator)
    calls = 0
    product, adjoint = operator._product, operator._adjoint_product

    def count(inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(t: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return inner(t)

        return call

    operator._product, operator._adjoint_product = count(product), count(adjoint)  # type: ignore[method-assign]
    values = svds(counted, k=1, tol=RTOL, return_singular_vectors=False, rng=0)
    return float(values[0]), calls


def dense(f: SelfAttention, x: Tensor) -> tuple[float, int]:
    """Return the norm of the dense Jacobian by reverse-mode autodiff, one product a row."""
    j = torch.func.jacrev(f, chunk_size=64)(x).reshape(x.numel(), x.numel())
    return float(torch.linalg.matrix_norm(j, 2)), x.numel()


def sequences(tokens: list[int], n: int, samples: int) -> Tensor:
    """Cut the protocol's windows of n tokens."""
    return torch.tensor([tokens[first : first + n] for first in pick_windows(len(tokens), n, samples, 0)])


def protocol(
    model: LoadedModel, tokens: list[int], lengths: Sequence[int], samples: int
) -> dict[str, object]:
    """Part 1: the whole protocol, with the rate of its products beside the machine's."""
    spent = forward = work = 0.0
    products, rates, unconverged = 0, [], 0
    per_length = []
    for n in track(lengths, "protocol", console=Console(stderr=True), transient=True):
        ids = sequences(tokens, n, samples)
        began = time.perf_counter()
        (site,) = hs.capture(model, ids, layers=[0])
        forward += time.perf_counter() - began
        rates.append(matrix_rate())
        began = time.perf_counter()
        estimate = hs.local_lipschitz(site.map, site.x, rtol=RTOL)
        seconds = time.perf_counter() - began
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


def comparison(model: LoadedModel, tokens: list[int], lengths: Sequence[int], samples: int) -> pd.DataFrame:
    """Part 2: all methods in turns on the same inputs."""
    methods = {
        "power iteration, autodiff": power_iteration,
        "SciPy svds, autodiff": scipy_svds,
        "dense": dense,
    }
    rows = []
    for n in lengths:
        (site,) = hs.capture(model, sequences(tokens, n, samples), layers=[0])
        f, exact = site.map, site.map.to(dtype=torch.float64)
        truth = hs.local_lipschitz(exact, site.x.double(), rtol=1e-9, max_iterations=1000).value.tolist()

        began = time.perf_counter()
        ours = hs.local_lipschitz(f, site.x, rtol=RTOL)
        each = (time.perf_counter() - began) / samples
        for i, x in enumerate(site.x):
            answers = {"howsmooth": Answer(float(ours.value[i]), 2 * int(ours.iterations[i]), each)}
            for name, method in methods.items():
                if name != "dense" or n <= DENSE_UP_TO:
                    answers[name] = timed(partial(method, f, x))
            rows += [
                {
                    "n": n,
                    "method": name,
                    "seconds": answer.seconds,
                    "products": answer.products,
                    "error": abs(answer.value - truth[i]) / truth[i],
                    "times_ours": answer.seconds / answers["howsmooth"].seconds,
                }
                for name, answer in answers.items()
            ]
    table = pd.DataFrame(rows).groupby(["n", "method"], sort=False)
    return table.agg(
        seconds=("seconds", "median"),
        products=("products", "median"),
        worst_error=("error", "max"),
        times_ours=("times_ours", "median"),
    ).reset_index()


def main() -> None:
    """Run both parts and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="2:98:2", help="lengths of part 1 (default: the protocol's 49)")
    parser.add_argument("--samples", type=int, default=10, help="sequences a length of part 1")
    parser.add_argument("--compare", default="4,10,50,98", help="lengths of part 2")
    parser.add_argument("--compare-samples", type=int, default=3, help="sequences a length of part 2")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()

    text = load_text("python-docs")
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
        f"{whole['share_of_machine']:.0%} of the machine's matrix product"
    )
    table = comparison(
        model, tokens, Ranges.parse(options.compare, "compare").values(), options.compare_samples
    )
    print(table.to_string(index=False, float_format=lambda v: f"{v:.3g}"))
    if options.json:
        options.json.write_text(json.dumps(whole | {"comparison": table.to_dict("records")}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
