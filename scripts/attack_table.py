"""How far the worst inputs found are above the paper's construction, and below the best upper bound.

    python scripts/attack_table.py --out attack                    # about half an hour on two CPU cores
    python scripts/attack_table.py --out attack --quick            # a minute: is the road whole?
    python scripts/attack_table.py --models random builtin-encoder FOLDER # FOLDER: a model downloaded before
    python scripts/attack_table.py --models today FOLDER --lengths 12 48 96 # heads of today's types

For each head and length: the constant at the paper's two clusters, at the best construction, at the best
input that the ascent finds, and the smallest upper bound on the ball. Heads are taken alone (scope
``head``), with the mask of their model, on the ball of the longest token of real text. ``today`` stands for
small models of today's types with random weights, whose scores have rotary positions, norms, caps, sinks or
biases: the paper's construction does not apply there. Rows are appended to OUT/attack.csv as they come, and
the same command goes on where it stopped; OUT/attack.md has the tables.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd
import torch
from transformers import CONFIG_MAPPING, AutoModel

import howsmooth as hs
from howsmooth import adversarial
from howsmooth.bounds import best
from howsmooth.bounds.attention_parameters import parameters_of
from howsmooth.errors import HowsmoothError
from howsmooth.study.attention_sources import shortened
from howsmooth.texts import load_text

LENGTHS = (12, 50, 120, 392)
MODELS = ("random", "builtin-encoder", "builtin-decoder", "gpt2-random")
WORDS = 96  # tokens of text from which the radius is read

WIDTH = 128  # of the small models; with weights of variance 1 / width, scores are of order 1 as in large ones
_WIDE = {
    "vocab_size": 2048, "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "initializer_range": WIDTH**-0.5,
}  # fmt: skip
_GEMMA = _WIDE | {"query_pre_attn_scalar": 32, "sliding_window": 24}
TODAY = {
    "llama": _WIDE,
    "qwen3": _WIDE,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt_oss": _WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "bloom": {
        "vocab_size": 2048, "hidden_size": WIDTH, "n_layer": 4, "n_head": 4, "initializer_range": WIDTH**-0.5
    },
    "t5": {
        "vocab_size": 2048, "d_model": WIDTH, "d_kv": 32, "d_ff": 256, "num_layers": 4, "num_heads": 4,
        "is_encoder_decoder": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One head, and the ball on which it is attacked."""

    model: str
    layer: int
    head: int
    radius: float
    attention: hs.SelfAttention
    tokens: torch.Tensor | None = None  # those of the text


@dataclass(frozen=True)
class Row:
    """What was found for one head at one length."""

    model: str
    layer: int
    head: int
    causal: bool
    d: int
    n: int
    radius: float
    a: float
    paper: float
    construction: str
    constructed: float
    found: float
    given: float
    converged: bool
    start: str
    bound: str
    upper: float
    seconds: float


def random_heads(count: int, seed: int) -> Iterator[Target]:
    """Gaussian heads at d = 64, key dimensions 64 and 16, unmasked and causal, on tokens of norm √d."""
    d = 64
    for i in range(count):
        generator = torch.Generator().manual_seed(1000 * seed + i)
        k = (64, 16)[i % 2]
        query, key, value = (
            torch.randn(1, k, d, generator=generator, dtype=torch.float64) / math.sqrt(d) for _ in range(3)
        )
        causal = i % 4 >= 2
        attention = hs.SelfAttention(query, key, value, causal=causal)
        yield Target("random, causal" if causal else "random", 0, i, math.sqrt(d), attention)


def heads_of_today(count: int, seed: int) -> Iterator[Target]:
    """Heads of small models of today's types with random weights, on real text."""
    tokenizer = hs.load_model("builtin-decoder").tokenizer
    tokens = torch.tensor([tokenizer.encode(load_text("alice").content[: 40 * WORDS])[:WORDS]])
    for kind, config in TODAY.items():
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModel.from_config(CONFIG_MAPPING[kind](**config)).eval()
        model = model.encoder if kind == "t5" else model
        yield from spread_heads(kind, model, tokens, 4, 4, count)


def model_heads(name: str, count: int, seed: int) -> Iterator[Target]:
    """Heads of a model, spread over its layers and heads."""
    text = load_text("alice")
    random_init = name.endswith("-random")
    loaded = hs.load_model(
        name.removesuffix("-random"), random_init=random_init, seed=seed, tokenizer_text=text.content
    )
    tokens = loaded.tokenizer.encode(text.content[: 40 * WORDS])[:WORDS]
    label = Path(name).name if Path(name).name != "model" else Path(name).parent.name
    yield from spread_heads(label, loaded, torch.tensor([tokens]), loaded.layers, loaded.heads, count)


def spread_heads(
    label: str, model: object, tokens: torch.Tensor, layer_count: int, head_count: int, count: int
) -> Iterator[Target]:
    """Heads of a model on some tokens, spread over its layers and heads."""
    layers = [round(i * (layer_count - 1) / max(1, count - 1)) for i in range(count)]
    heads = [(2 * i + 1) * head_count // (2 * count) for i in range(count)]
    # Heads in another order than layers, or only the diagonal would be seen.
    heads = heads[1::2] + heads[::2]
    for layer, head in zip(layers, heads, strict=True):
        (site,) = hs.capture(model, tokens, layers=[layer], scope="head", heads=[head])
        assert isinstance(site.map, hs.SelfAttention)
        attention = site.map.to(dtype=torch.float64)
        yield Target(label, layer, head, float(site.radius_max.max()), attention, site.x[0].double())


def attacked(target: Target, n: int, steps: int, restarts: int, seed: int) -> Row:
    """Attack one head at one length."""
    began = time.perf_counter()
    f = shortened(target.attention, n)
    built = {"": math.nan}
    plain = f.rotary is None and not f.feature_names()
    for construction in adversarial.constructions(f, n, target.radius) if plain else ():
        value = float(hs.local_lipschitz(f, construction.x, max_iterations=1000).value)
        # Of two clusters the first is the one that the paper's rule chooses.
        built.setdefault(construction.name, value)
    name, constructed = max(built.items(), key=lambda item: (not math.isnan(item[1]), item[1]))
    ascent = adversarial.ascend(f, n, target.radius, steps=steps, atom_restarts=restarts, seed=seed)
    bound = best(f, length=n, radius=target.radius)
    given = target.tokens is not None and len(target.tokens) >= n
    return Row(
        model=target.model,
        layer=target.layer,
        head=target.head,
        causal=f.causal,
        d=f.d,
        n=n,
        radius=target.radius,
        a=parameters_of(f).heads[0].A_norm * target.radius**2 if plain else math.nan,
        paper=built.get("two_cluster", math.nan),
        construction=name,
        constructed=constructed,
        found=ascent.value,
        given=float(hs.local_lipschitz(f, target.tokens[:n]).value) if given else math.nan,
        converged=bool(ascent.estimate.converged),
        start=ascent.start,
        bound=bound.name,
        upper=bound.value,
        seconds=time.perf_counter() - began,
    )


def today_markdown(rows: pd.DataFrame) -> str:
    """Return the table of heads to which the paper's construction does not apply: medians over them."""
    rows = rows.assign(loose=rows.upper / rows.found)
    lines = [
        "| model | n | heads | at the text's tokens | found | upper bound | bound / found | found by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (model, n), part in rows.groupby(["model", "n"], sort=False):
        start = part.start.str.replace(r", head.*|\d+", "", regex=True).str.strip().mode()[0]
        lines.append(
            f"| {model} | {n} | {len(part)} | {part.given.median():.3g} | {part.found.median():.3g} | "
            f"{part.upper.median():.3g} | {part.loose.median():.2f} ({part.loose.min():.2f} to "
            f"{part.loose.max():.2f}) | {start.replace('_', ' ')} |"
        )
    loose = rows.loose
    lines += [
        "",
        f"Medians over heads, with the range in parentheses. All {len(rows)} attacks: "
        f"{loose.median():.2f} ({loose.min():.2f} to {loose.max():.2f}), "
        f"{int((~rows.converged.astype(bool)).sum())} not converged, {rows.seconds.sum() / 60:.0f} minutes.",
    ]
    return "\n".join(lines) + "\n"


def markdown(rows: pd.DataFrame) -> str:
    """Return the table of the docs: medians for each model and length, and over all."""
    rows = rows.assign(ratio=rows.found / rows.paper, gain=rows.found / rows.constructed)
    rows = rows.assign(share=rows.found / rows.upper)
    lines = [
        "| model | n | heads | ‖A‖R² | paper's construction | found | found / paper "
        "| found / best construction | found / upper bound |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    everything = rows.assign(model="all", n=0)
    for (model, n), part in pd.concat([rows, everything]).groupby(["model", "n"], sort=False):
        lines.append(
            f"| {model} | {n or 'all'} | {len(part)} | {part.a.median():.3g} | {part.paper.median():.3g} | "
            f"{part.found.median():.3g} | {part.ratio.median():.2f} ({part.ratio.min():.2f} to "
            f"{part.ratio.max():.3g}) | {part.gain.median():.3f} | {part.share.median():.2f} "
            f"({part.share.min():.2f} to {part.share.max():.2f}) |"
        )
    lines += [
        "",
        f"Medians over heads, with the range in parentheses. {len(rows)} attacks, "
        f"{int((~rows.converged.astype(bool)).sum())} of them not converged, "
        f"{rows.seconds.sum() / 60:.0f} minutes. "
        f"Attention without a real eigenvalue, to which the paper's construction does not apply: "
        f"{int(rows.paper.isna().sum())}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Attack what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(MODELS),
        help="random, today, a built-in model, a folder, a Hub id, or a model type with -random "
        "(default: %(default)s)",
    )
    parser.add_argument("--heads", type=int, default=6, help="heads of each model (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="of the ascent (default: %(default)s)")
    parser.add_argument("--restarts", type=int, default=48, help="among few atoms (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("attack"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two heads, n = 12 and 50, fewer steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.heads, arguments.lengths, arguments.steps, arguments.restarts = 2, [12, 50], 20, 12
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "attack.csv"
    done: set[tuple[str, int, int, int]] = set()
    if path.exists():
        kept = pd.read_csv(path)
        done = set(zip(*(kept[name] for name in ("model", "layer", "head", "n")), strict=True))
    until = time.monotonic() + 60 * arguments.minutes
    columns = [field.name for field in fields(Row)]
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if not done:
            writer.writeheader()
        for name in arguments.models:
            several = {"random": random_heads, "today": heads_of_today}.get(name)
            targets = (
                several(arguments.heads, arguments.seed)
                if several
                else model_heads(name, arguments.heads, arguments.seed)
            )
            for target in targets:
                for n in arguments.lengths:
                    if (target.model, target.layer, target.head, n) in done or time.monotonic() > until:
                        continue
                    row = attacked(target, n, arguments.steps, arguments.restarts, arguments.seed)
                    writer.writerow(asdict(row))
                    file.flush()
                    print(
                        f"{row.model} layer {row.layer} head {row.head} n = {n}: paper {row.paper:.4g}, "
                        f"constructed {row.constructed:.4g}, found {row.found:.4g} ({row.start}), "
                        f"upper {row.upper:.4g} ({row.bound}), {row.seconds:.1f} s",
                        flush=True,
                    )
    rows = pd.read_csv(path)
    tables = ((rows[rows.a.notna()], markdown), (rows[rows.a.isna()], today_markdown))
    table = "\n".join(made(some) for some, made in tables if len(some))
    (arguments.out / "attack.md").write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    try:
        main()
    except HowsmoothError as error:
        raise SystemExit(f"attack_table: {error}") from None
