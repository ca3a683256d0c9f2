"""Train a small Vision Transformer on handwritten digits in three forms, and evaluate it.

    python examples/digits/train.py                              # everything, minutes of one core
    python examples/digits/train.py --forms lipschitz --seeds 0  # one model
    python examples/digits/train.py --quick --out out/digits     # all forms, far from trained
    python examples/digits/train.py --attentions                 # 1-Lipschitz, by kind of attention

plain is an ordinary pre-norm Vision Transformer; penalised is the same, with the local Lipschitz constants of
its attention layers added to the loss; lipschitz has constant 1 from image to logits, whatever the weights.
Weights go into OUT/weights, one file for each form and seed, and numbers into OUT/results.json. What is there
already is not done again, so that a run that was stopped goes on (--again does it anew).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.digits.data import Digits, load
from examples.digits.evaluate import RADII, certified_radii, evaluate
from examples.digits.models import ATTENTIONS, PlainViT, lipschitz_vit, settled, without_attention
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import howsmooth as hs

FORMS = ("plain", "penalised", "lipschitz")
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Recipe:
    """How one form is trained; everything that changes its result, besides the seed."""

    epochs: int
    learning_rate: float
    batch: int = 64
    weight_decay: float = 0.0
    attention_rate: float = 1.0  # times the learning rate, for the weights of attention layers
    penalty: float = 0.0  # times the mean local constant of the attention layers
    temperature: float = 1.0  # logits are multiplied by it in the loss
    margin: float = 0.0  # l2 radius that the loss asks for: √2 times it is taken from the right logit


RECIPES = {
    "plain": Recipe(epochs=30, learning_rate=2e-3, weight_decay=0.05),
    "penalised": Recipe(epochs=30, learning_rate=2e-3, weight_decay=0.05, penalty=0.3),
    "lipschitz": Recipe(epochs=30, learning_rate=5e-3, attention_rate=0.1, temperature=8.0, margin=0.8),
}


def main() -> int:
    """Train, evaluate and write, as asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of weights and results")
    parser.add_argument("--epochs", type=int, help="instead of those of each form's recipe")
    parser.add_argument("--quick", action="store_true", help="two epochs, 50 images, a short attack")
    parser.add_argument("--again", action="store_true", help="do anew what is there already")
    parser.add_argument("--threads", type=int, default=1, help="of the processor; 1 by default")
    parser.add_argument("--attentions", action="store_true", help="compare kinds of attention instead")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    train, test = load()
    if asked.quick:
        asked.epochs = asked.epochs or 2
        test = test[:50]
    (asked.out / "weights").mkdir(parents=True, exist_ok=True)
    if asked.attentions:
        return compare(asked, train, test)
    for form in asked.forms:
        for seed in asked.seeds:
            path = weights_path(asked.out, form, seed)
            done = read(asked.out / "results.json")
            if asked.again or not path.exists():
                done.pop(f"{form}-{seed}", None)
                model, seconds = fit(form, seed, train, asked.epochs)
                save(model, path)
                print(f"{form}, seed {seed}: trained in {seconds:.0f} s of the processor", flush=True)
            if asked.again or f"{form}-{seed}" not in done:
                effort = {"measured": 10, "steps": 10, "starts": 1} if asked.quick else {}
                numbers = evaluate(read_model(path, form), test, **effort)
                done[f"{form}-{seed}"] = {"form": form, "seed": seed, **numbers.record()}
                write(asked.out / "results.json", done)
                print(f"{form}, seed {seed}: clean {numbers.clean:.3f}", end=", ")
                print("certified", *(f"{share:.3f}" for share in numbers.certified), end=", ")
                print("attacked", *(f"{share:.3f}" for share in numbers.attacked), flush=True)
                if numbers.wrongly_certified:
                    print(f"{numbers.wrongly_certified} images are certified and broken", file=sys.stderr)
                    return 1
    return 0


def build(form: str, **settings: object) -> nn.Module:
    """Return a model of a form, untrained; ``settings`` are those of `lipschitz_vit`."""
    return lipschitz_vit(**settings) if form == "lipschitz" else PlainViT()


def fit(
    form: str, seed: int, train: Digits, epochs: int | None = None, **settings: object
) -> tuple[nn.Module, float]:
    """Train a model, built with ``settings``; return it with the seconds of the processor that this took."""
    recipe = RECIPES[form]
    epochs = epochs or recipe.epochs
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    model = build(form, **settings)
    images, labels = train.images.float(), train.labels
    optimiser = torch.optim.AdamW(groups(model, recipe), weight_decay=recipe.weight_decay)
    steps = len(train) // recipe.batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser,
        [group["lr"] for group in optimiser.param_groups],
        total_steps=epochs * steps,
        pct_start=0.2,
    )
    penalty = hs.nn.penalty.SpectralPenalty(model).attach() if recipe.penalty else None
    begin = time.process_time()
    for epoch in range(epochs):
        total = 0.0
        for which in torch.randperm(len(train), generator=order)[: steps * recipe.batch].split(recipe.batch):
            loss = criterion(model(images[which]), labels[which], recipe)
            if penalty is not None:
                loss = loss + recipe.penalty * penalty()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += float(loss.detach())
        progress(f"{form}, seed {seed}: epoch {epoch + 1} of {epochs}, loss {total / steps:.4f}")
    progress("")
    if penalty is not None:
        penalty.detach()
    if isinstance(model, nn.Sequential):
        model = settled(model)
    return model.eval(), time.process_time() - begin


def groups(model: nn.Module, recipe: Recipe) -> list[dict[str, object]]:
    """Return the parameters for the optimiser: attention layers have a learning rate of their own."""
    inside = {id(p) for name, p in model.named_parameters() if ".attention." in name}
    attention = [p for p in model.parameters() if id(p) in inside]
    rest = [p for p in model.parameters() if id(p) not in inside]
    rates = (recipe.learning_rate, recipe.learning_rate * recipe.attention_rate)
    return [{"params": ps, "lr": lr} for ps, lr in zip((rest, attention), rates, strict=True) if ps]


def criterion(logits: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """Return the cross-entropy, at a temperature and after a margin was taken from the right logit."""
    lowered = logits - recipe.margin * 2**0.5 * nn.functional.one_hot(labels, logits.shape[1])
    return nn.functional.cross_entropy(recipe.temperature * lowered, labels)


# ---------------------------------------------------------------- files


def weights_path(out: Path, form: str, seed: int) -> Path:
    """Return where the weights of a model are kept."""
    return out / "weights" / f"{form}-{seed}.safetensors"


def save(model: nn.Module, path: Path) -> None:
    """Write the weights of a model."""
    save_file({name: weight.contiguous() for name, weight in model.state_dict().items()}, path)


def read_model(path: Path, form: str) -> nn.Module:
    """Read what `save` wrote into a model of this form, in float64."""
    model = settled(lipschitz_vit()) if form == "lipschitz" else PlainViT()
    model.load_state_dict(load_file(path))
    return model.double().eval()


def read(path: Path) -> dict[str, dict[str, object]]:
    """Read results, none if there are none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, results: dict[str, dict[str, object]]) -> None:
    """Write results whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def progress(line: str) -> None:
    """Show a line in place of the last, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- kinds of attention


COMPARED: dict[str, dict[str, object]] = {
    **{kind: {"attention": kind} for kind in ATTENTIONS},
    "softmax, from weight 1/2": {"weight": 0.5},
    "softmax, weight kept at 1/4": {"weight": 0.25, "learnable": False},
    "none": {"attention": None},
}


def compare(asked: argparse.Namespace, train: Digits, test: Digits) -> int:
    """Train the 1-Lipschitz form with each kind of attention, and without, and write what is certified."""
    path = asked.out / "attentions.json"
    done = read(path)
    for kind, settings in COMPARED.items():
        for seed in asked.seeds:
            name = f"{kind}-{seed}"
            if name in done and not asked.again:
                continue
            model, seconds = fit("lipschitz", seed, train, asked.epochs, **settings)
            weights = [m.weight for m in model.modules() if isinstance(m, hs.nn.AverageResidual)]
            numbers = certified_only(model, test)
            numbers["without"] = certified_only(without_attention(model), test, certify=False)["clean"]
            done[name] = {"attention": kind, "seed": seed, **numbers, "weights": weights}
            write(path, done)
            print(f"{name}: {json.dumps(done[name])}, {seconds:.0f} s of the processor", flush=True)
    return 0


def certified_only(model: nn.Module, test: Digits, *, certify: bool = True) -> dict[str, object]:
    """Return clean accuracy, and certified accuracy if asked for."""
    model = model.double().eval()
    with torch.no_grad():
        right = model(test.images).argmax(dim=1) == test.labels
    if not certify:
        return {"clean": float(right.double().mean())}
    radii = certified_radii(model, test.images, test.labels)
    certified = [float((right & (radii >= radius)).double().mean()) for radius in RADII]
    return {"clean": float(right.double().mean()), "radii": RADII, "certified": certified}


if __name__ == "__main__":
    sys.exit(main())
