r"""Measure for the page docs/evidence.md: corrected and published, over all layers of a few models.

    python scripts/what_we_found.py --text ag_news.csv --minilm all-MiniLM-L6-v2 --stories stories260k \
        --capp capp_gpt --sst2 bert_tiny_sst2_encoder --gpt2 gpt2 --work found    # some two hours, one core

The options name folders (``--gpt2`` a folder or a Hub id, for its configuration and tokenizer); the built-in
models and Alice are always measured, what is not named is left out. One process, one thread; the
same command goes on where it stopped. ``--whole`` measures whole models only. At the end the tables are
written to ``--to``, by default those of the docs; ``--tables`` writes them from what is there.
``scripts/what_we_found_page.py`` turns them into the page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import models as tokenizer_models
from tokenizers import pre_tokenizers
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

import howsmooth as hs
from howsmooth.paper.published_code import PublishedLayer, items_that_apply, measure_layer, wrong_slices
from howsmooth.paper.published_code.constants_task import published_left
from howsmooth.study.exponents import compare, exponents, fit_exponent
from howsmooth.study.measurement_run import run
from howsmooth.study.plans import ModelSpec, Plan
from howsmooth.study.records import CORRECTED, PUBLISHED, InputRecord, Measurement, PublishedValue, quantities
from howsmooth.study.runner import Means
from howsmooth.study.store import Store
from howsmooth.texts import load_text

LENGTHS = (4, 8, 12, 16, 24, 32, 48, 64, 96)
FEWER = (4, 8, 16, 32, 64)
WHOLE_LENGTHS = (*FEWER, 96)
WHOLE = ("model",)
SHORT = 16  # up to here, and from the next length on, exponents are fitted apart as well
ALICE = "alice"
PARTS = "parts"
PART_LENGTHS = (4, 8, 12, 16, 24, 32)  # a part with its processes has 10 to 37 tokens
RADII = (15.5, 21.5, 100.0)
ADVERSARIAL_LENGTHS = (12, 24, 50, 100, 200, 392)
TABLES = Path(__file__).resolve().parents[1] / "docs" / "_static" / "what-we-found"


@dataclass(frozen=True)
class Job:
    """One model on one text: both quantities, or the corrected one in several scopes."""

    spec: ModelSpec
    text: str
    lengths: tuple[int, ...] = LENGTHS
    samples: int = 10
    layers: str = "all"
    scopes: tuple[str, ...] = ()
    """Empty for corrected and published."""
    items: tuple[str, ...] | None = None
    """Of the published code; None for all that apply."""

    @property
    def folder(self) -> str:
        """Where its results lie: one folder a model, so that jobs of one text can come before another's."""
        name = "-".join("".join(c if c.isalnum() else " " for c in self.spec.label).split())
        room = "whole" if self.scopes == WHOLE else "scopes" if self.scopes else "published"
        return f"{room}/{name}"

    @property
    def plan(self) -> Plan:
        """The plan of a study."""
        return Plan(
            models=(self.spec,),
            texts=(self.text,),
            lengths=self.lengths,
            samples=self.samples,
            scopes=self.scopes or ("attention",),
            layers=self.layers,
            rtol=1e-3 if self.scopes == WHOLE else 1e-4,
            # They would take longer than all else, and are not what the page is about.
            bounds="none",
        )


def jobs_of(options: argparse.Namespace) -> Iterator[Job]:
    """List what is measured, the most telling first."""
    small = [
        (ModelSpec("builtin-encoder"), ("output", "block")),
        (ModelSpec("builtin-encoder", as_decoder=True), ("output", "block", "unmasked")),
        (ModelSpec("builtin-decoder"), ("output",)),
        *([(ModelSpec(str(options.stories)), ("output",))] if options.stories else []),
        *([(ModelSpec(str(options.minilm)), ("output", "block"))] if options.minilm else []),
    ]
    capp = [ModelSpec(str(options.capp))] if options.capp else []
    parts = str(options.work / f"{PARTS}.txt")
    gpt2 = [ModelSpec(options.gpt2, random_init=True)] if options.gpt2 else []
    for text in (ALICE, *options.text):
        for spec, items in small:
            # Together with output, stopping changes nothing: what the iteration returns is there at its
            # first step. Alone it takes most of the time, so it is measured on one text, for small models.
            alone = text == ALICE and spec.name != str(options.minilm)
            yield Job(spec, text, items=None if alone else items)
        layers = "0,6,11" if text == ALICE else "6"  # 6 is that of the paper's figure
        # With dropout it takes as long as all else.
        yield from (Job(spec, text, (4, 8, 16, 32, 64, 96), 5, layers) for spec in gpt2)
        if text == ALICE:
            yield from (Job(spec, parts, PART_LENGTHS) for spec in capp)
        for scopes, samples in ((("attention", "heads", "residual", "block"), 6), (("head",), 4)):
            if scopes == ("head",) and text != ALICE:
                continue  # there are many heads
            yield from (Job(spec, text, FEWER, samples, scopes=scopes) for spec, _ in small)
            if text == ALICE:
                yield from (Job(spec, text, FEWER, samples, "6", scopes) for spec in gpt2)
                yield from (Job(spec, parts, FEWER[:4], samples, scopes=scopes) for spec in capp)


def whole_jobs_of(options: argparse.Namespace) -> Iterator[Job]:
    """List the whole models, from their embeddings to their last hidden state."""
    alice = [ModelSpec("builtin-encoder"), ModelSpec("builtin-encoder", as_decoder=True)]
    alice += [ModelSpec("builtin-decoder")]
    alice += [ModelSpec(str(path)) for path in (options.stories, options.minilm) if path]
    yield from (Job(spec, ALICE, WHOLE_LENGTHS, 5, scopes=WHOLE) for spec in alice)
    if options.capp:
        parts = str(options.work / f"{PARTS}.txt")
        yield Job(ModelSpec(str(options.capp)), parts, FEWER[:4], 5, scopes=WHOLE)
    if options.gpt2:
        yield Job(ModelSpec(options.gpt2, random_init=True), ALICE, FEWER[:3], 3, scopes=WHOLE)


def depths(jobs: Iterable[Job]) -> Iterator[pd.DataFrame]:
    """Measure the stages of trained models at the first tokens of their texts."""
    for job in jobs:
        spec = job.spec
        if spec.random_init:
            continue
        n = min(64, max(job.lengths))
        loaded = hs.load_model(spec.name, as_decoder=spec.as_decoder)
        found = hs.depth_profile(loaded, load_text(job.text).content, span=(0, n))
        say(f"depth of {spec.label}: {found.value:.4g}")
        yield found.table.assign(model=spec.label, n=n)


class Told:
    """Says now and then how far a job is."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def phase(self, words: str) -> None:
        """Pass over what begins: a job is short."""

    def advance(self, done: float, total: float, words: str, left: float | None = None) -> None:
        """Say how far it is, if that has not been said for a while."""
        if time.monotonic() - self._told > 30:
            self._told = time.monotonic()
            say(f"    {words}")


def carry_out(job: Job, work: Path) -> None:
    """Measure what a job has left."""
    beside = [] if job.scopes else [published_left(job.items)]
    outcome = run(job.plan, work / job.folder, Means(Told(), keep_going=True), beside=beside)
    made, kept, unsettled = (sum(one.values()) for one in (outcome.made, outcome.kept, outcome.unsettled))
    words = f"{job.folder} on {Path(job.text).stem}: {made} measured, {kept} there already"
    say(f"{words}, {unsettled} unsettled, {outcome.seconds:.0f} s")


def say(words: str) -> None:
    """Print with the time, at once."""
    print(time.strftime("%H:%M:%S"), words, flush=True)


def with_own_words(folder: Path, to: Path) -> Path:
    """Copy capp_gpt, and write a tokenizer beside it that it comes without: its words, one a line."""
    found = to / folder.name
    shutil.copytree(folder, found, dirs_exist_ok=True)
    words = json.loads((folder / "token_mappings.json").read_text())["token2id"]
    backend = Backend(tokenizer_models.WordLevel(words, unk_token="<PAD>"))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "removed")  # type: ignore[assignment, unused-ignore]
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(found)
    return found


def write_parts(folder: Path, path: Path, count: int = 400) -> None:
    """Write the inputs of different parts, drawn at random, each with the processes that the model gives."""
    words: dict[str, int] = json.loads((folder / "token_mappings.json").read_text())["token2id"]
    kinds = json.loads((folder / "part_encoding_and_process_list.json").read_text())["part_encoding"]
    every = list(itertools.product(*([words[f"{kind}_{one}"] for one in of] for kind, of in kinds.items())))
    drawn = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))[:count]
    asked = torch.tensor([[*every[i], words["<SOS>"]] for i in drawn])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        answered = model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=200,
            do_sample=False,
            eos_token_id=words["<EOS>"],
            pad_token_id=words["<PAD>"],
        )
    names = {number: word for word, number in words.items()}
    lines = [names[int(i)] for row in answered for i in row if int(i) != words["<PAD>"]]
    path.write_text("\n".join(lines) + "\n")


def embedded(folder: Path, longest: int = 512) -> pd.DataFrame:
    """Measure the SST-2 encoder at its sentences, which are there as embedded tokens only."""
    model: Any = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval().requires_grad_(False)
    # The embedding tables are placeholders; the tokens have been through the real ones, norm included.
    model.config.max_position_embeddings = longest
    layer = model.embeddings
    layer.position_embeddings = torch.nn.Embedding(longest, model.config.hidden_size)
    torch.nn.init.zeros_(layer.position_embeddings.weight)
    torch.nn.init.zeros_(layer.token_type_embeddings.weight)
    layer.position_ids = torch.arange(longest)[None]
    layer.token_type_ids = torch.zeros(1, longest, dtype=torch.int64)
    layer.LayerNorm = torch.nn.Identity()
    rows = []
    for name, x in sorted(load_file(folder / "sequences.safetensors").items()):
        if len(x) > longest:
            continue
        inputs = {"inputs_embeds": x[None]}
        sites = zip(hs.capture(model, inputs), hs.capture(model, inputs, scope="block"), strict=True)
        for found in (PublishedLayer(attention, block, None, None) for attention, block in sites):
            if found.attention.layer == 0 and not torch.equal(found.attention.x[0], x):
                raise RuntimeError(f"{name}: the first layer was not given the embedded tokens")
            for quantity, items in quantities(items_that_apply(found)).items():
                value = measure_layer(found, items, seeds=[0])
                rows.append(
                    {
                        "model": folder.name,
                        "sentence": name,
                        "n": x.shape[0],
                        "layer": found.attention.layer,
                        "quantity": quantity,
                        "lipschitz": float(value.value),
                        "lower": float(value.lower),
                        "upper": float(value.upper),
                        "settled": bool(value.settled),
                    }
                )
    return pd.DataFrame(rows)


def slices(name: str, layers: list[int], *, random_init: bool) -> Iterator[dict[str, Any]]:
    """Measure heads at the tokens of Section 5.2, made of their own matrices and of wrong slices."""
    label = ModelSpec(name, random_init=random_init).label
    model: Any = hs.load_model(name, random_init=random_init)
    for layer in layers:
        (site,) = hs.capture(model, torch.arange(8)[None], layers=[layer])
        whole: Any = site.map
        sliced = wrong_slices(whole)
        for head, radius, n in itertools.product(range(whole.heads), RADII, ADVERSARIAL_LENGTHS):
            for tokens, source in (("own", whole), ("wrong slices", sliced)):
                x = hs.adversarial.two_cluster(source, n, radius, head=head).x
                found = hs.local_lipschitz(whole.head(head), x)
                yield {
                    "model": label,
                    "layer": layer,
                    "head": head,
                    "radius": radius,
                    "n": n,
                    "tokens": tokens,
                    "lipschitz": float(found.value),
                    "lower": float(found.lower),
                    "upper": float(found.upper),
                    "converged": bool(found.converged),
                }


def attention_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Fit the exponents of corrected and published rows: all lengths, short and long ones, by radius."""
    fits = compare(rows)
    for name, part in (("short", rows[rows["n"] <= SHORT]), ("long", rows[rows["n"] > SHORT])):
        apart = compare(part)[["model", "text", "layer", "quantity", "slope", "low", "high"]]
        renamed = apart.rename(columns={one: f"{name}_{one}" for one in ("slope", "low", "high")})
        fits = fits.merge(renamed, on=["model", "text", "layer", "quantity"], how="left")
    right = rows[rows["quantity"] == CORRECTED].rename(columns={"settled": "converged"})
    by_radius = exponents(right.assign(scope="attention", head=None))
    kept = [name for name in by_radius.columns if "radius" in name]
    by_radius["quantity"] = CORRECTED
    return fits.merge(by_radius[["model", "text", "layer", "quantity", *kept]], how="left")


def medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Median constants a length, corrected and as published, and the mean radius."""
    both = rows[rows["quantity"].isin([CORRECTED, PUBLISHED])]
    place = ["model", "text", "layer", "n"]
    wide = both.pivot_table("lipschitz", place, "quantity", "median").reset_index()
    radius = rows[rows["quantity"] == CORRECTED].groupby(place, as_index=False)["radius_mean"].median()
    return wide.merge(radius, on=place)


def scopes_table(measured: pd.DataFrame) -> pd.DataFrame:
    """Fit the exponents of every scope, and of the median over the heads of a layer."""
    fits = exponents(measured)
    heads = measured[measured["scope"] == "head"]
    rows = []
    for (model, text, layer), family in heads.groupby(["model", "text", "layer"]):
        of = family.groupby(["n", "sample"], as_index=False).agg(
            lipschitz=("lipschitz", "median"), converged=("converged", "all")
        )
        fit = fit_exponent(of["n"].to_numpy(), of["lipschitz"].to_numpy(), of["converged"].to_numpy())
        names = ("slope", "low", "high", "quarter", "n_points", "n_min", "n_max", "note")
        found = {name: getattr(fit, name) for name in names}
        rows.append({"model": model, "text": text, "scope": "head (median)", "layer": layer, **found})
    columns = ["model", "text", "scope", "layer", "head", "slope", "low", "high", "quarter", "n_points"]
    return pd.concat([fits, pd.DataFrame(rows)])[[*columns, "n_min", "n_max", "note"]]


def collect(work: Path, to: Path) -> None:
    """Write the tables from what has been measured so far."""
    to.mkdir(parents=True, exist_ok=True)
    rows = stored(work / "published", PublishedValue)
    if len(rows):
        write(attention_table(rows), to / "attention.csv")
        write(medians(rows), to / "medians.csv")
    scopes = stored(work / "scopes", Measurement)
    if len(scopes):
        write(scopes_table(scopes), to / "scopes.csv")
        write(stored(work / "scopes", InputRecord), to / "inputs.csv")
    whole = stored(work / "whole", Measurement)
    if len(whole):
        columns = ["model", "text", "n", "sample", "lipschitz", "lower", "upper", "converged"]
        write(whole[columns], to / "whole.csv")
    for name in ("slices", "embedded", "depth"):
        if (work / f"{name}.csv").exists():
            write(pd.read_csv(work / f"{name}.csv"), to / f"{name}.csv")


def stored(folder: Path, kind: type[Any]) -> pd.DataFrame:
    """Join the records of one kind in all stores of a folder; an empty table if there are none."""
    found = [pd.DataFrame()]
    for one in sorted(one for one in folder.glob("*") if one.is_dir()):
        with Store.open(one, write=False) as store:
            found.append(store.table(kind))
    return pd.concat(found)


def write(table: pd.DataFrame, path: Path) -> None:
    """Write a table with as many digits as mean something."""
    table.to_csv(path, index=False, float_format="%.5g", lineterminator="\n")
    say(f"{path.name}: {len(table)} rows")


def main() -> None:
    """Measure what is left, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", action="append", default=[])
    for name in ("minilm", "stories", "capp", "sst2"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--gpt2")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--to", type=Path, default=TABLES)
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    if not options.tables:
        if options.capp:
            options.capp = with_own_words(options.capp, options.work)
            write_parts(options.capp, options.work / f"{PARTS}.txt")
        if not options.whole:
            measure_layers(options)
        for job in whole_jobs_of(options):
            carry_out(job, options.work)
        if not (options.work / "depth.csv").exists():
            pd.concat(depths(whole_jobs_of(options))).to_csv(options.work / "depth.csv", index=False)
    collect(options.work, options.to)


def measure_layers(options: argparse.Namespace) -> None:
    """Measure all that is about single layers."""
    if options.sst2 and not (options.work / "embedded.csv").exists():
        embedded(options.sst2).to_csv(options.work / "embedded.csv", index=False)
    for job in jobs_of(options):
        carry_out(job, options.work)
    adversarial = options.work / "slices.csv"
    if not adversarial.exists():
        found: list[dict[str, Any]] = []
        if options.gpt2:
            found += slices(options.gpt2, [6], random_init=True)
        if options.capp:
            found += slices(str(options.capp), [0, 1, 2, 3], random_init=False)
        pd.DataFrame(found).to_csv(adversarial, index=False)


if __name__ == "__main__":
    main()
