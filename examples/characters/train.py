"""Train a small causal character model plain and with penalties, and watch its Lipschitz constants.

    python examples/characters/train.py           # all forms and seeds, ten minutes of one core
    python examples/characters/train.py --quick   # half a minute, into a temporary folder
    python examples/characters/train.py --forms plain spectral --seeds 0

The text is *Alice's Adventures in Wonderland*, which ships with howsmooth. All forms of one seed begin with
the same weights and see the same batches. A training that is in the tables of --out already is not done
again, so an interrupted run goes on where it stopped. `page.py` beside this file draws the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import howsmooth as hs
from howsmooth.nn import LipschitzMonitor
from howsmooth.nn.penalty import JasminPenalty, SpectralPenalty
from howsmooth.texts import Text, load_text

RESULTS = Path(__file__).resolve().parent / "results"

#: One id a character; 0 stands for every other one.
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
BLOCK, HELD_OUT_EVERY = 5, 5  # every 5th block of 5 paragraphs is held out

SEEDS = (0, 1)

NOISE = (0.1, 0.2, 0.5, 1.0)  # size of a perturbation over that of the embedded tokens, Frobenius norms
ATTACK = (0.02, 0.05, 0.1, 0.2)
ATTACK_STEPS = 10


@dataclass(frozen=True)
class Setting:
    """Everything but form and seed that changes a result."""

    steps: int = 600
    batch: int = 16
    length: int = 64
    width: int = 64
    layers: int = 3
    heads: int = 4
    learning_rate: float = 5e-3
    warm_up: int = 50
    weight_decay: float = 0.1
    penalise_every: int = 2  # steps; the strength is multiplied by as much
    every: int = 50  # steps between two looks at constants and held-out loss
    validation: int = 256  # windows
    probe: int = 4  # windows at which constants are watched while training
    final: int = 32  # windows at which the trained model is measured and perturbed


@dataclass(frozen=True)
class Form:
    """What is added to the loss, and the share of the steps that is made."""

    penalty: str
    strength: float
    share: float = 1.0

    def steps(self, setting: Setting) -> int:
        """Return the steps of a training."""
        return max(1, round(self.share * setting.steps))


FORMS = {
    "plain": Form("none", 0.0),
    # A model that learnt less is smoother, too: this one shows how much of the rest is only that.
    "plain-short": Form("none", 0.0, share=2 / 3),
    "spectral": Form("spectral", 0.02),
    "spectral-strong": Form("spectral", 0.2),
    "blocks": Form("blocks", 0.02),
    "jasmin": Form("jasmin", 0.1),
}
QUICK = Setting(steps=20, every=10, validation=16, final=2)


# ---------------------------------------------------------------- text


def ids_of(text: str) -> Tensor:
    """Return the ids of a text's characters, shape (characters,), int64."""
    table = {character: index + 1 for index, character in enumerate(ALPHABET)}
    return torch.tensor([table.get(character, 0) for character in text])


def split(text: Text) -> tuple[Tensor, Tensor]:
    """Return the ids of (training text, held-out text)."""
    parts: tuple[list[str], list[str]] = ([], [])
    for index, paragraph in enumerate(text.content.strip().split("\n\n")):
        block = index // BLOCK
        parts[block % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(paragraph)
    return ids_of("\n\n".join(parts[0])), ids_of("\n\n".join(parts[1]))


def batch_of(stream: Tensor, setting: Setting, seed: int, step: int) -> Tensor:
    """Return the windows of one step, (batch, length + 1): a function of seed and step alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(stream) - setting.length - 1, (setting.batch,), generator=generator)
    return stream[starts[:, None] + torch.arange(setting.length + 1)]


def held_out_windows(stream: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Return windows for validation, for watching and for the end, spread over the text without overlap."""
    count = len(stream) // (setting.length + 1)
    windows = stream[: count * (setting.length + 1)].reshape(count, -1)
    sizes = (setting.validation, setting.probe, setting.final)
    if count < sum(sizes):
        raise SystemExit(
            f"The held-out text has {count} windows of {setting.length} characters, fewer than {sum(sizes)}."
        )
    # Neighbours are alike: a fixed shuffle spreads each set over the whole text.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    first, second, third = windows[order[: sum(sizes)]].split(sizes)
    return first, second, third


# ---------------------------------------------------------------- model


def new_model(setting: Setting, seed: int) -> GPT2LMHeadModel:
    """Return an untrained model of GPT-2 type, as anyone would build it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(ALPHABET) + 1,
                n_positions=setting.length,
                n_embd=setting.width,
                n_layer=setting.layers,
                n_head=setting.heads,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                activation_function="gelu_pytorch_tanh",  # "gelu_new" in one kernel
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
                attn_implementation="eager",
            )
        )


def loss_of(logits: Tensor, windows: Tensor) -> Tensor:
    """Return the mean loss in nats a character."""
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: GPT2LMHeadModel, windows: Tensor) -> float:
    """Return the mean loss over windows (count, length + 1), in nats a character."""
    model.eval()
    losses = [loss_of(model(input_ids=part[:, :-1]).logits, part) * len(part) for part in windows.split(32)]
    model.train()
    return float(sum(losses)) / len(windows)


def learning_rate(setting: Setting, step: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < setting.warm_up:
        return setting.learning_rate * (step + 1) / setting.warm_up
    progress = (step - setting.warm_up) / max(1, setting.steps - setting.warm_up)
    return setting.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


# ---------------------------------------------------------------- the trained model


def constants(model: GPT2LMHeadModel, windows: Tensor) -> pd.DataFrame:
    """Measure each layer's attention, and the whole model from embedded characters to logits, at each window.

    Columns ``layer`` ("0", ..., "whole"), ``window``, ``constant``, ``lower``, ``upper``, and ``relative``:
    the constant times the Frobenius norm of what it is taken at.
    """
    ids = windows[:, :-1]
    maps = [(str(site.layer), site.map, site.x) for site in hs.capture(model, ids)]
    embedded = model.transformer.wte(ids).detach()
    maps.append(("whole", lambda x: model(inputs_embeds=x).logits, embedded))
    rows = []
    for layer, f, x in maps:
        found = hs.local_lipschitz(f, x, rtol=1e-2 if layer == "whole" else 1e-3)
        if not bool(found.converged.all()):
            raise SystemExit(f"The constant of layer {layer} did not converge.")
        for window in range(len(ids)):
            value, lower, upper = (float(t[window]) for t in (found.value, found.lower, found.upper))
            rows.append((layer, window, value, lower, upper, value * float(x[window].norm())))
    return pd.DataFrame(rows, columns=["layer", "window", "constant", "lower", "upper", "relative"])


def on_sphere(move: Tensor, radius: Tensor) -> Tensor:
    """Scale each sequence's perturbation (batch, n, d) to the Frobenius norm ``radius`` (batch,)."""
    return move * (radius / move.flatten(1).norm(dim=1).clamp_min(1e-30))[:, None, None]


def attack(model: GPT2LMHeadModel, embedded: Tensor, windows: Tensor, size: float) -> Tensor:
    """Seek the perturbation of relative size ``size`` that raises the loss most, by ascent."""
    radius = size * embedded.flatten(1).norm(dim=1)
    generator = torch.Generator().manual_seed(0)
    move = on_sphere(torch.randn(embedded.shape, generator=generator), radius)
    for _ in range(ATTACK_STEPS):
        move.requires_grad_(True)
        loss = loss_of(model(inputs_embeds=embedded + move).logits, windows)
        (slope,) = torch.autograd.grad(loss, move)
        # Where the loss is steep it is the step that is long, not the perturbation.
        move = on_sphere(move.detach() + on_sphere(slope, radius / 2), radius)
    return move


def robustness(model: GPT2LMHeadModel, windows: Tensor) -> pd.DataFrame:
    """Say how far predictions move when the embedded characters do, by noise and by an attack.

    Columns ``kind``, ``size`` (relative), ``loss``, ``rise`` of the loss, ``divergence`` (mean
    Kullback–Leibler divergence of the prediction from the unperturbed one, nats), ``changed`` (share of first
    guesses that change).
    """
    embedded = model.transformer.wte(windows[:, :-1]).detach()
    before = model(inputs_embeds=embedded).logits.detach()
    clean = float(loss_of(before, windows))
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(embedded.shape, generator=generator)
    moves = [("noise", size, on_sphere(noise, size * embedded.flatten(1).norm(dim=1))) for size in NOISE]
    moves += [("attack", size, attack(model, embedded, windows, size)) for size in ATTACK]
    rows = []
    for kind, size, move in moves:
        after = model(inputs_embeds=embedded + move).logits.detach()
        loss = float(loss_of(after, windows))
        divergence = functional.kl_div(
            after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="none"
        )
        changed = (after.argmax(-1) != before.argmax(-1)).double().mean()
        rows.append((kind, size, loss, loss - clean, float(divergence.sum(-1).mean()), float(changed)))
    return pd.DataFrame(rows, columns=["kind", "size", "loss", "rise", "divergence", "changed"])


# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class Data:
    """What all runs share: the training text, and held-out windows."""

    stream: Tensor
    validation: Tensor
    probe: Tensor
    final: Tensor
    digest: str

    @classmethod
    def load(cls, setting: Setting) -> Data:
        """Read and split the text."""
        text = load_text("alice")
        stream, held_out = split(text)
        return cls(stream, *held_out_windows(held_out, setting), text.digest)


PENALTIES: dict[str, Callable[[GPT2LMHeadModel], SpectralPenalty | JasminPenalty | None]] = {
    "none": lambda _: None,
    "spectral": SpectralPenalty,
    # Attention with its norms, residual and feed-forward part, so what a layer makes of its input.
    "blocks": lambda model: SpectralPenalty(
        model, [f"transformer.h.{i}" for i in range(model.config.n_layer)]
    ),
    "jasmin": JasminPenalty,
}


@dataclass(frozen=True)
class Run:
    """A trained model with its tables: one row for each look, layer and look, window, perturbation."""

    model: GPT2LMHeadModel
    losses: list[float]  # of every step
    tables: dict[str, pd.DataFrame]


def train(
    form: str,
    seed: int,
    setting: Setting,
    data: Data,
    report: Callable[[str], None] = lambda _: None,
    *,
    watch: bool = True,
) -> Run:
    """Train one model; ``watch=False`` leaves monitor and held-out losses out, and changes nothing else."""
    kind, strength, steps = FORMS[form].penalty, FORMS[form].strength, FORMS[form].steps(setting)
    setting = replace(setting, steps=steps)
    model = new_model(setting, seed)
    penalty = PENALTIES[kind](model)
    if penalty is not None:
        penalty.attach()
    monitor = LipschitzMonitor(model, data.probe[:, :-1], every=setting.every, strict=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), setting.learning_rate, betas=(0.9, 0.98), weight_decay=setting.weight_decay
    )
    model.train()
    losses: list[float] = []
    looks: list[tuple[int, float, float, float]] = []
    values: list[float] = []

    def look() -> None:
        step = len(losses)
        recent = losses[-setting.every :]
        mean = sum(recent) / len(recent) if recent else math.nan
        held_out = held_out_loss(model, data.validation)
        looks.append((step, mean, held_out, values[-1] if values else math.nan))
        monitor.measure(step)
        constant = max(record.lipschitz_mean or math.nan for record in monitor.records[-setting.layers :])
        report(
            f"{form}, seed {seed}: step {step}/{setting.steps}, held-out loss {held_out:.3f}, "
            f"largest constant {constant:.2f}"
        )

    if watch:
        look()
    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(setting, step)
        windows = batch_of(data.stream, setting, seed, step)
        loss = objective = loss_of(model(input_ids=windows[:, :-1]).logits, windows)
        if penalty is not None and step % setting.penalise_every == 0:
            value = penalty()
            values.append(float(value.detach()))
            objective = loss + strength * setting.penalise_every * value
        optimizer.zero_grad(set_to_none=True)
        objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if watch and (len(losses) % setting.every == 0 or len(losses) == steps):
            look()
    if penalty is not None:
        penalty.detach()
    model.eval().requires_grad_(requires_grad=False)
    tables = (
        {
            "losses": pd.DataFrame(looks, columns=["step", "training", "held_out", "penalty"]),
            "layers": monitor.table()[WATCHED],
            "constants": constants(model, data.final),
            "robustness": robustness(model, data.final),
        }
        if watch
        else {}
    )
    for table in tables.values():
        table.insert(0, "form", form)
        table.insert(1, "seed", seed)
    return Run(model, losses, tables)


#: What is kept of the monitor's rows.
WATCHED = [
    "step",
    "layer",
    "lipschitz_mean",
    "lipschitz",
    "lower",
    "upper",
    "score_norm",
    "entropy_normalised",
    "radius_mean",
]
TABLES = ("losses", "layers", "constants", "robustness")


# ---------------------------------------------------------------- results


def facts(setting: Setting, data: Data) -> dict[str, Any]:
    """Return what changes the results, which those in one folder must share."""
    forms = {name: asdict(form) for name, form in FORMS.items()}
    return {"setting": asdict(setting), "forms": forms, "text": data.digest}


def read(out: Path, name: str) -> pd.DataFrame:
    """Read a table, an empty one if there is none."""
    path = out / f"{name}.csv"
    return (
        pd.read_csv(path, dtype={"layer": str}) if path.is_file() else pd.DataFrame(columns=["form", "seed"])
    )


def done(out: Path) -> set[tuple[str, int]]:
    """Return forms and seeds that all tables have."""
    found = [
        {(str(form), int(seed)) for form, seed in read(out, name)[["form", "seed"]].values} for name in TABLES
    ]
    return set.intersection(*found)


def keep(out: Path, run: Run) -> None:
    """Add a run to the tables, in the order of FORMS, in place of what is there of the same form and seed."""
    for name, new in run.tables.items():
        old = read(out, name)
        form, seed = new["form"].iloc[0], new["seed"].iloc[0]
        old = old[(old["form"] != form) | (old["seed"] != seed)]
        table = pd.concat([old, new], ignore_index=True) if len(old) else new
        order = table["form"].map(list(FORMS).index)
        table = table.iloc[(order * 1000 + table["seed"].astype(int)).argsort(kind="stable")]
        path = out / f"{name}.csv"
        table.to_csv(path.with_suffix(".new"), index=False, float_format="%.6g")
        path.with_suffix(".new").replace(path)


def begin(out: Path, wanted: dict[str, Any], *, fresh: bool) -> None:
    """Make the folder ready, or stop if it holds results of another setting."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "setting.json"
    made = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "howsmooth": hs.__version__,
    }
    now = {**wanted, "made_with": made}
    if fresh:
        for name in TABLES:
            (out / f"{name}.csv").unlink(missing_ok=True)
    elif path.is_file():
        there = json.loads(path.read_text("utf-8"))
        forms = {**wanted["forms"], **there["forms"]}
        # A form more changes nothing for the others.
        if {**there, "forms": forms} != {**there, **wanted}:
            raise SystemExit(
                f"{out} holds results of another setting, strength or text. "
                "Give another folder with --out, or --fresh to begin anew."
            )
        now = {**there, **wanted}
    path.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")


class Progress:
    """One line that is written over on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()

    def __call__(self, line: str) -> None:
        """Show a line."""
        print(
            f"\r\033[K{line}" if self.terminal else line,
            end="" if self.terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """End the line."""
        if self.terminal:
            print(file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=list(FORMS),
        default=list(FORMS),
        metavar="FORM",
        help=f"which of {', '.join(FORMS)} [all]",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="SEED", help="[0 1]")
    parser.add_argument("--steps", type=int, help=f"steps a training [{Setting.steps}]")
    parser.add_argument("--out", type=Path, help="where the tables go [results/ beside this file]")
    parser.add_argument("--fresh", action="store_true", help="do again what is in the tables")
    parser.add_argument("--quick", action="store_true", help="few steps, into a temporary folder")
    options = parser.parse_args(arguments)
    setting = QUICK if options.quick else Setting()
    if options.steps is not None:
        if options.steps < 1:
            parser.error("--steps must be at least 1")
        setting = replace(setting, steps=options.steps)
    if any(not 0 <= seed < 2**31 for seed in options.seeds):
        parser.error("--seeds must be whole numbers from 0 on")
    out = options.out or (
        Path(tempfile.mkdtemp(prefix="howsmooth-characters-")) if options.quick else RESULTS
    )
    torch.set_num_threads(1)  # results then depend less on the machine
    data = Data.load(setting)
    begin(out, facts(setting, data), fresh=options.fresh)
    progress = Progress()
    for form, seed in missing(options.forms, options.seeds, out):
        begun = time.process_time()
        run = train(form, seed, setting, data, progress)
        keep(out, run)
        progress(f"{form}, seed {seed}: done in {time.process_time() - begun:.0f} s of processor time")
        progress.close()
    print(f"Tables in {out}")


def missing(forms: list[str], seeds: list[int], out: Path) -> Iterator[tuple[str, int]]:
    """Yield forms and seeds that are not in the tables."""
    for seed in seeds:
        for form in forms:
            if (form, seed) not in done(out):
                yield form, seed


if __name__ == "__main__":
    main()
