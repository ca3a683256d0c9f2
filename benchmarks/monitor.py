"""What a monitor adds to training: processor seconds of its measurements, and of the steps between.

Each model is trained from its configuration on random tokens. Blocks of steps without a measurement, and
measurements, are timed in turns, so that what else the machine does falls on both; a monitor at ``every = k``
costs one measurement in k steps, ``overhead = measurement / (k · step)``. Medians, one thread.

    python benchmarks/monitor.py
    python benchmarks/monitor.py --device cuda --sizes gpt2,realistic
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.utils import logging
from turns import options, show

from howsmooth.nn import LipschitzMonitor


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], PreTrainedModel]
    batch: int
    n: int
    vocabulary: int
    probes: int
    scope: str = "attention"
    bfloat16: bool = False


def bert(d: int, layers: int, n: int, vocabulary: int) -> Callable[[], PreTrainedModel]:
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=d, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * d, max_position_embeddings=n,
    )  # fmt: skip
    return lambda: BertForMaskedLM(config)


def gpt2(d: int, layers: int, n: int, vocabulary: int, heads: int = 4) -> Callable[[], PreTrainedModel]:
    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=d,
        n_layer=layers,
        n_head=heads,
        n_positions=n,
        bos_token_id=0,
        eos_token_id=0,
    )
    return lambda: GPT2LMHeadModel(config)


CASES = {
    "tiny": Case("BERT, d=64, 2 layers", bert(64, 2, 32, 100), 8, 32, 100, 4),
    "small": Case("BERT, d=128, 2 layers", bert(128, 2, 64, 1000), 16, 64, 1000, 4),
    "small-gpt2": Case("GPT-2, d=128, 2 layers", gpt2(128, 2, 64, 1000), 16, 64, 1000, 4),
    "realistic": Case("GPT-2, d=256, 4 layers", gpt2(256, 4, 128, 1000), 16, 128, 1000, 4),
    "realistic-block": Case("GPT-2, d=256, 4 layers", gpt2(256, 4, 128, 1000), 16, 128, 1000, 4, "block"),
    "10m": Case("GPT-2, d=320, 8 layers, 10 M weights", gpt2(320, 8, 128, 1000, 8), 16, 128, 1000, 2),
    "10m-four": Case("GPT-2, d=320, 8 layers, 10 M weights", gpt2(320, 8, 128, 1000, 8), 16, 128, 1000, 4),
    "gpt2": Case(
        "GPT-2, d=768, 12 layers, bfloat16",
        gpt2(768, 12, 1024, 50_257, 12),
        16,
        1024,
        50_257,
        4,
        bfloat16=True,
    ),
}
# Without a GPU the last takes hours.
ON_A_PROCESSOR = [name for name in CASES if name != "gpt2"]


def step_of(model: PreTrainedModel, ids: Tensor, *, bfloat16: bool) -> Callable[[], None]:
    """One step of training; in bfloat16 as autocast has it, the weights in float32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model.train()

    def step() -> None:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(call: Callable[[], object], times: int, device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    _wait(device)
    began = clock()
    for _ in range(times):
        call()
    _wait(device)
    return (clock() - began) / times


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measured(case: Case, every: int, repeats: int, block: int, device: str) -> dict[str, object]:
    torch.manual_seed(0)
    model = case.make().to(device)
    ids = torch.randint(0, case.vocabulary, (case.batch, case.n)).to(device)
    probes = torch.randint(0, case.vocabulary, (case.probes, case.n))
    step = step_of(model, ids, bfloat16=case.bfloat16)
    monitor = LipschitzMonitor(model, probes, every=every, scope=case.scope, strict=True)
    seconds(step, 2, device)
    monitor.measure(0)
    steps, measurements = [], []
    for repeat in range(repeats):
        steps.append(seconds(step, block, device))
        measurements.append(seconds(lambda at=repeat: monitor.measure(at + 1), 1, device))  # type: ignore[misc]
    a_step, a_measurement = statistics.median(steps), statistics.median(measurements)
    worst = max(m / s for m, s in zip(measurements, steps, strict=True)) / every
    return {
        "model": case.name,
        "batch": f"{case.batch} x {case.n}",
        "probes": f"{case.probes} x {case.n}",
        "scope": case.scope,
        "ms a step": 1e3 * a_step,
        "ms a measurement": 1e3 * a_measurement,
        "steps a measurement": a_measurement / a_step,
        "overhead %": 100 * a_measurement / (every * a_step),
        "largest %": 100 * worst,
    }


def main() -> None:
    parser = options(__doc__ or "", ",".join(ON_A_PROCESSOR))
    parser.set_defaults(repeats=9)
    parser.add_argument("--every", type=int, default=100, help="steps from one measurement to the next")
    parser.add_argument("--block", type=int, default=5, help="steps that are timed together")
    parser.add_argument("--device", default="cpu", help="cpu: processor seconds; cuda: seconds on the clock")
    given = parser.parse_args()
    logging.set_verbosity_error()
    if given.device == "cpu":
        torch.set_num_threads(1)
    rows = [
        measured(CASES[name], given.every, given.repeats, given.block, given.device)
        for name in given.sizes.split(",")
    ]
    show(rows, given.json)


if __name__ == "__main__":
    main()
