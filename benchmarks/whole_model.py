"""The constant of a whole model, from embeddings to last hidden state: time and memory of each method.

    python benchmarks/whole_model.py                      # some minutes
    python benchmarks/whole_model.py --lengths 64,256,1024 --layers 4 --width 256
    python benchmarks/whole_model.py --cost --lengths 64,512,2048 --layers 4 --width 256

The model is of Llama type with random weights, in float32, on one thread. Every method runs in a process of
its own; seconds are those of the processor, and memory is what it adds to the size of the process, at most,
on Linux. ``jacrev`` forms the dense Jacobian and takes its spectral norm; it is left out where the matrix
exceeds 2 GiB. ``power`` is power
iteration on JᵀJ by forward and reverse mode, until its value changes by less than the tolerance, under eager
attention and under PyTorch's math backend; it gives no interval. ``curvlinops`` is its Jacobian operator with
SciPy's ``svds``, if it is installed. Products are those with J; there are as many with Jᵀ.

``--cost`` compares one measurement, capture not included, with its products alone, in turns: as passes in
forward mode (``jvp``) and in reverse mode (``vjp``), and as howsmooth makes them, along the kept graph. A
measurement also checks the derivatives, estimates rounding, and judges its value in float64.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.func import jacrev, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaModel
from turns import medians

import howsmooth as hs
from howsmooth.jacobian import AutodiffJacobian

METHODS = ("jacrev", "power, eager", "power, math", "curvlinops", "howsmooth")
_MOST = 2**31  # bytes of a dense Jacobian


def built(layers: int, width: int, attention: str) -> LlamaModel:
    """Return a model of Llama type with random weights."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 32),
        vocab_size=512,
        max_position_embeddings=1 << 20,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return LlamaModel(config).eval().requires_grad_(requires_grad=False)


def power(f: Callable[[Tensor], Tensor], x: Tensor, rtol: float) -> tuple[float, int]:
    """Return the spectral norm by power iteration on JᵀJ, and how many products with J it took."""
    back = vjp(f, x)[1]
    v, last = torch.randn_like(x), 0.0
    for step in range(1, 201):
        v = v / v.norm()
        image = jvp(f, (x,), (v,))[1]
        value = float(image.norm())
        if abs(value - last) <= rtol * value:
            return value, step
        last = value
        (v,) = back(image)
    return last, 200


def measured(method: str, n: int, layers: int, width: int, rtol: float) -> dict[str, Any]:
    """Return the value, its limits, the number of products, the seconds and the MiB of one method."""
    model = built(layers, width, "eager" if method == "power, eager" else "sdpa")
    ids = torch.randint(0, 512, (1, n), generator=torch.Generator().manual_seed(1))
    x = model.get_input_embeddings()(ids)

    def f(e: Tensor) -> Tensor:
        return model(inputs_embeds=e, use_cache=False).last_hidden_state

    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found: dict[str, Any] = {}
    with sdpa_kernel(SDPBackend.MATH):
        if method == "jacrev":
            dense = jacrev(f)(x).reshape(x.numel(), x.numel())
            found["value"] = float(torch.linalg.matrix_norm(dense, 2))
        elif method.startswith("power"):
            found["value"], found["products"] = power(f, x, rtol)
        elif method == "curvlinops":
            found["value"], found["products"] = _curvlinops(f, x, rtol)
        else:
            (site,) = hs.capture(model, ids, scope="model")
            best = hs.local_lipschitz(site.map, site.x, rtol=rtol)
            found |= {"value": float(best.value), "lower": float(best.lower), "upper": float(best.upper)}
            found["products"] = int(best.iterations)
    found["seconds"] = time.process_time() - began
    found["MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return found


def _curvlinops(f: Callable[[Tensor], Tensor], x: Tensor, rtol: float) -> tuple[float, int]:
    """Return the spectral norm, and how many products with J it took.

    The Jacobian of curvlinops is with respect to parameters, of which the input is one here.
    """
    from curvlinops import JacobianLinearOperator, TransposedJacobianLinearOperator
    from scipy.sparse.linalg import LinearOperator, svds

    class AtInput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = torch.nn.Parameter(x.clone())

        def forward(self, shift: Tensor) -> Tensor:
            return f(self.x + shift).flatten(1)

    module = AtInput()
    data = [(torch.zeros_like(x), torch.zeros(1, x.numel()))]
    parts = (module, list(module.parameters()), data)
    forward, back = JacobianLinearOperator(*parts), TransposedJacobianLinearOperator(*parts)

    made: list[Any] = []

    def product(operator: Any, v: Any) -> Any:
        made.append(operator)
        return (operator @ torch.as_tensor(v, dtype=x.dtype).flatten()).detach().flatten().numpy()

    both = LinearOperator(
        (x.numel(), x.numel()), lambda v: product(forward, v), lambda u: product(back, u), dtype="float32"
    )
    value = float(svds(both, k=1, tol=rtol, return_singular_vectors=False)[0])
    return value, sum(operator is forward for operator in made)


def cost(n: int, layers: int, width: int, rtol: float, rounds: int) -> tuple[int, dict[str, float]]:
    """Return the number of steps of one measurement, and its seconds beside those of its products alone."""
    model = built(layers, width, "sdpa")
    ids = torch.randint(0, 512, (1, n), generator=torch.Generator().manual_seed(1))
    (site,) = hs.capture(model, ids, scope="model")
    f, x = site.map, site.x
    steps: list[int] = []
    kept = AutodiffJacobian(f, x)
    e = torch.randn_like(x)
    u = kept.product(e)

    def measurement() -> None:
        steps.append(int(hs.local_lipschitz(f, x, rtol=rtol).iterations))

    def passes() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            jvp(f, (x,), (e,))
            back(u)

    def products() -> None:
        kept.gram_product(e)

    with sdpa_kernel(SDPBackend.MATH):
        back = vjp(f, x)[1]
    seconds = medians({"measurement": measurement, "passes": passes, "products": products}, rounds)
    many = {"measurement": 1, "passes": steps[0], "products": steps[0]}
    return steps[0], {name: many[name] * one for name, one in seconds.items()}


def main() -> None:
    """Measure all methods at all lengths, each in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="16,64,256")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rtol", type=float, default=1e-3)
    parser.add_argument("--cost", action="store_true", help="compare with the products alone")
    parser.add_argument("--rounds", type=int, default=3, help="of --cost, of which medians are taken")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = (given.layers, given.width, given.rtol)
    if given.cost:
        for n in map(int, given.lengths.split(",")):
            steps, seconds = cost(n, *settings, given.rounds)
            whole = seconds["measurement"]
            print(
                f"n = {n}: {whole:.2f} s, {steps} steps; {whole / seconds['passes']:.2f} times as long as "
                f"their passes in forward and reverse mode, {whole / seconds['products']:.2f} times as "
                "long as their products along the kept graph",
                flush=True,
            )
        return
    if given.one:
        method, n = json.loads(given.one)
        print(json.dumps(measured(method, n, *settings)))
        return
    table = Table("n", "method", "value", "interval", "products", "seconds", "MiB")
    for n in map(int, given.lengths.split(",")):
        for method in METHODS:
            dense = 4 * (n * given.width) ** 2 > _MOST
            if (method == "jacrev" and dense) or (method == "curvlinops" and not find_spec("curvlinops")):
                continue
            options = ["--layers", str(given.layers), "--width", str(given.width), "--rtol", str(given.rtol)]
            command = [sys.executable, __file__, *options, "--one", json.dumps([method, n])]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row = json.loads(done.stdout.splitlines()[-1])
            interval = f"[{row['lower']:.6g}, {row['upper']:.6g}]" if "lower" in row else ""
            numbers = (f"{row['seconds']:.1f}", f"{row['MiB']:.0f}")
            table.add_row(
                str(n), method, f"{row['value']:.6g}", interval, str(row.get("products", "")), *numbers
            )
    Console().print(table)


if __name__ == "__main__":
    main()
