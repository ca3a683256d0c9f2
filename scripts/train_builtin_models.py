"""Train the two models that ship inside howsmooth, from nothing, on prose that every Python carries.

    python scripts/train_builtin_models.py            # both, about 50 minutes each on one CPU core
    python scripts/train_builtin_models.py --quick    # a minute, into a temporary folder: is the road whole?

The encoder is of BERT type (masked-token prediction), the decoder of GPT-2 type (next-token
prediction). Each folder gets config, weights in half precision, tokenizer, a held-out text
(`heldout.txt`), the numbers of the training (`training.json`) and a model card (`README.md`).
An interrupted training goes on where it stopped, if `--scratch` names the same folder again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

from python_docs import python_docs  # noqa: E402

from howsmooth.texts import Text  # noqa: E402

KINDS = ("encoder", "decoder")
VOCABULARY = 2048
POSITIONS = 256
WIDTH = 256
LAYERS = 4
HEADS = 8
INNER = 512
ENCODER_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
DECODER_TOKENS = ("<|endoftext|>",)

BLOCK = 20  # paragraphs a block
HELD_OUT_EVERY = 20  # every 20th block is held out
PIECE_CHARACTERS = 20_000  # the held-out piece that is kept beside the weights

EVALUATION_LENGTH = 128  # tokens a window, special tokens included
EVALUATION_SEED = 20_240
MASKED_SHARE = 0.15
IGNORED = -100


@dataclass(frozen=True)
class Plan:
    """What one training does; everything that changes its result."""

    kind: str
    steps: int
    opening: int = 0  # steps with short windows, see `window_length`
    tokens_a_step: int = 2048
    learning_rate: float = 1e-3
    warm_up: int = 300
    weight_decay: float = 0.1
    dropout: float = 0.1
    seed: int = 0
    autocast: bool = True


PLANS = {
    "encoder": Plan("encoder", steps=4500, opening=1500, learning_rate=1e-3, dropout=0.0, weight_decay=0.01),
    "decoder": Plan("decoder", steps=2200, learning_rate=1.5e-3, dropout=0.2),
}


# ---------------------------------------------------------------- data


def split(text: Text) -> tuple[str, str]:
    """Return (training text, held-out text): every 20th block of 20 paragraphs is held out."""
    paragraphs = text.content.strip().split("\n\n")
    parts: tuple[list[str], list[str]] = ([], [])
    for index, paragraph in enumerate(paragraphs):
        block = index // BLOCK
        parts[block % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(paragraph)
    return "\n\n".join(parts[0]) + "\n", "\n\n".join(parts[1]) + "\n"


def heldout_piece(text: str) -> str:
    """Return the first whole paragraphs of the held-out text, up to a fixed size."""
    return text[: text.rindex("\n\n", 0, PIECE_CHARACTERS)] + "\n"


def overlap(train: str, heldout: str) -> float:
    """Return the share of the held-out text's sequences of eight words that the training text has too."""

    def sequences(text: str) -> list[tuple[str, ...]]:
        found = []
        for paragraph in text.lower().split("\n\n"):
            words = paragraph.split()
            found += [tuple(words[i : i + 8]) for i in range(len(words) - 7)]
        return found

    known, asked = set(sequences(train)), sequences(heldout)
    return sum(sequence in known for sequence in asked) / len(asked)


def train_tokenizer(kind: str, text: str) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `text`."""
    # Tokens carry the space before them; so must the mask that stands for one.
    special = [
        AddedToken(token, lstrip=token == "[MASK]", special=True)
        for token in (ENCODER_TOKENS if kind == "encoder" else DECODER_TOKENS)
    ]
    bpe = Tokenizer(models.BPE(unk_token="[UNK]" if kind == "encoder" else None))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(text.splitlines(keepends=True), trainer)
    if kind == "decoder":
        end = DECODER_TOKENS[0]
        return PreTrainedTokenizerFast(
            tokenizer_object=bpe, bos_token=end, eos_token=end, model_max_length=POSITIONS
        )
    bpe.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, bpe.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token=special[-1],
        model_max_length=POSITIONS,
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    """Return the ids of the whole text, without special tokens, shape (tokens,), int64."""
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return torch.tensor(ids, dtype=torch.int64)


def wrapped(tokenizer: PreTrainedTokenizerFast, windows: Tensor) -> Tensor:
    """Put [CLS] and [SEP] around windows (batch, n), in place of their first and last token."""
    windows = windows.clone()
    windows[:, 0] = tokenizer.cls_token_id
    windows[:, -1] = tokenizer.sep_token_id
    return windows


def masked(
    windows: Tensor, tokenizer: PreTrainedTokenizerFast, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mask 15 % of the tokens: 80 % become [MASK], 10 % a random token, 10 % stay (BERT's recipe).

    Returns the inputs and the labels, both (batch, n); labels are -100 where nothing is predicted.
    """
    special = (windows == tokenizer.cls_token_id) | (windows == tokenizer.sep_token_id)
    chosen = (torch.rand(windows.shape, generator=generator) < MASKED_SHARE) & ~special
    fate = torch.rand(windows.shape, generator=generator)
    random = torch.randint(len(ENCODER_TOKENS), VOCABULARY, windows.shape, generator=generator)
    inputs = windows.clone()
    inputs[chosen & (fate < 0.8)] = tokenizer.mask_token_id
    swapped = chosen & (fate >= 0.9)
    inputs[swapped] = random[swapped]
    return inputs, windows.masked_fill(~chosen, IGNORED)


def window_length(plan: Plan, step: int) -> int:
    """Return the tokens a window of one step.

    Three steps of four have windows of 128 tokens, the fourth of 256, so that every position is trained.
    The encoder opens with windows of 32, then 64 tokens: among few neighbours attention soon finds those
    that help, while with 128 from the start masked-token prediction stays at token frequencies for long.
    """
    if step < plan.opening:
        return 32 if 3 * step < 2 * plan.opening else 64
    return POSITIONS if step % 4 == 3 else POSITIONS // 2


def training_batch(
    plan: Plan, step: int, stream: Tensor, tokenizer: PreTrainedTokenizerFast
) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of one step; a function of seed and step alone, so that a resume is exact."""
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
    length = window_length(plan, step)
    starts = torch.randint(0, len(stream) - length, (plan.tokens_a_step // length,), generator=generator)
    windows = stream[starts[:, None] + torch.arange(length)]
    if plan.kind == "decoder":
        return windows, next_token_labels(windows)
    # Half of the windows carry [CLS] and [SEP], half are bare text: the model sees both in use.
    windows[::2] = wrapped(tokenizer, windows[::2])
    return masked(windows, tokenizer, generator)


def next_token_labels(windows: Tensor) -> Tensor:
    """Return for each position the token that follows, shape (batch, n); the last one has none."""
    return torch.cat([windows[:, 1:], torch.full_like(windows[:, :1], IGNORED)], dim=1)


# ---------------------------------------------------------------- models


def new_model(plan: Plan, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return an untrained model of the plan's kind."""
    torch.manual_seed(plan.seed)
    if plan.kind == "encoder":
        return BertForMaskedLM(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                intermediate_size=INNER,
                max_position_embeddings=POSITIONS,
                hidden_dropout_prob=plan.dropout,
                attention_probs_dropout_prob=0.0,
                pad_token_id=tokenizer.pad_token_id,
                tie_word_embeddings=True,
            )
        )
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=POSITIONS,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_inner=INNER,
            resid_pdrop=plan.dropout,
            embd_pdrop=plan.dropout,
            attn_pdrop=0.0,
            activation_function="gelu_pytorch_tanh",  # "gelu_new" in one kernel
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=True,
        )
    )


def predictions(model: PreTrainedModel, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (logits, targets) where something is predicted: the head runs at those positions only."""
    chosen = labels != IGNORED
    if isinstance(model, BertForMaskedLM):
        return model.cls(model.bert(inputs).last_hidden_state[chosen]), labels[chosen]
    return model.lm_head(model.transformer(inputs, use_cache=False).last_hidden_state[chosen]), labels[chosen]


# ---------------------------------------------------------------- losses


def evaluation_batches(
    kind: str, stream: Tensor, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and labels over non-overlapping windows of a held-out stream, always the same ones."""
    count = len(stream) // EVALUATION_LENGTH
    windows = stream[: count * EVALUATION_LENGTH].reshape(count, EVALUATION_LENGTH)
    if kind == "decoder":
        inputs, labels = windows, next_token_labels(windows)
    else:
        generator = torch.Generator().manual_seed(EVALUATION_SEED)
        inputs, labels = masked(wrapped(tokenizer, windows), tokenizer, generator)
    yield from zip(inputs.split(32), labels.split(32), strict=True)


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, kind: str, stream: Tensor, tokenizer: PreTrainedTokenizerFast
) -> dict[str, float]:
    """Return mean loss in nats a predicted token, and the share predicted right, on a held-out stream."""
    training, total, right, count = model.training, 0.0, 0, 0
    model.eval()
    for inputs, labels in evaluation_batches(kind, stream, tokenizer):
        logits, targets = predictions(model, inputs, labels)
        total += functional.cross_entropy(logits.double(), targets, reduction="sum").item()
        right += int((logits.argmax(-1) == targets).sum())
        count += len(targets)
    model.train(training)
    return {"loss": total / count, "accuracy": right / count, "predicted_tokens": count}


def unigram_loss(kind: str, train: Tensor, heldout: Tensor, tokenizer: PreTrainedTokenizerFast) -> float:
    """Return the loss of predicting every token by its (add-one) frequency in the training text."""
    counts = torch.bincount(train, minlength=VOCABULARY).double() + 1
    logs = (counts / counts.sum()).log()
    targets = torch.cat(
        [labels[labels != IGNORED] for _, labels in evaluation_batches(kind, heldout, tokenizer)]
    )
    return -logs[targets].mean().item()


# ---------------------------------------------------------------- training


def learning_rate(plan: Plan, step: int) -> float:
    """Linear warm-up, then a cosine down to a hundredth."""
    if step < plan.warm_up:
        return plan.learning_rate * (step + 1) / plan.warm_up
    progress = (step - plan.warm_up) / max(1, plan.steps - plan.warm_up)
    return plan.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def train(
    plan: Plan,
    stream: Tensor,
    heldout: Tensor,
    tokenizer: PreTrainedTokenizerFast,
    scratch: Path,
    report: Callable[[str], None],
) -> tuple[PreTrainedModel, float]:
    """Train one model; return it and the seconds spent, over all resumptions."""
    model = new_model(plan, tokenizer)
    model.set_attn_implementation("eager")  # on a CPU the fused kernel's backward costs twice as much
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=plan.learning_rate,
        betas=(0.9, 0.98),
    )
    checkpoint = scratch / f"{plan.kind}.pt"
    fingerprint = {**asdict(plan), "data": hashlib.sha256(stream.numpy().tobytes()).hexdigest()}
    first, before = 0, 0.0
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        if saved["plan"] == fingerprint:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            first, before = saved["step"], saved["seconds"]
            report(f"{plan.kind}: going on at step {first} of {plan.steps}")
    model.train()
    start, smooth = time.perf_counter(), None
    for step in range(first, plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step)
        torch.manual_seed(plan.seed * 1_000_003 + step)  # dropout
        inputs, labels = training_batch(plan, step, stream, tokenizer)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=plan.autocast):
            logits, targets = predictions(model, inputs, labels)
        loss = functional.cross_entropy(logits.float(), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        done = step + 1
        if done % 250 == 0 or done == plan.steps:
            seconds = before + time.perf_counter() - start
            score = evaluate(model, plan.kind, heldout[: 64 * EVALUATION_LENGTH], tokenizer)
            report(
                f"{plan.kind}: step {done}/{plan.steps}, {seconds:.0f} s, training loss {smooth:.3f}, "
                f"held-out loss {score['loss']:.3f}, accuracy {score['accuracy']:.3f}"
            )
            state = {
                "plan": fingerprint,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": done,
                "seconds": seconds,
            }
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    return model.eval(), before + time.perf_counter() - start


# ---------------------------------------------------------------- writing


def build(plan: Plan, text: Text, out: Path, scratch: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Train one model and write its folder; return the facts that its card states."""
    train_text, heldout_text = split(text)
    piece_text = heldout_piece(heldout_text)
    tokenizer = train_tokenizer(plan.kind, train_text)
    stream, heldout, piece = (token_stream(tokenizer, t) for t in (train_text, heldout_text, piece_text))
    report(f"{plan.kind}: {len(stream)} training tokens, {len(heldout)} held out")
    untrained = evaluate(new_model(plan, tokenizer).eval(), plan.kind, heldout, tokenizer)
    unigram = unigram_loss(plan.kind, stream, heldout, tokenizer)
    report(f"{plan.kind}: held-out loss untrained {untrained['loss']:.3f}, unigram {unigram:.3f}")
    model, seconds = train(plan, stream, heldout, tokenizer, scratch, report)

    folder = out / plan.kind
    folder.mkdir(parents=True, exist_ok=True)
    trained = evaluate(model, plan.kind, heldout, tokenizer)
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written readable by its owner alone
    tokenizer.save_pretrained(folder)
    (folder / "heldout.txt").write_text(piece_text, encoding="utf-8", newline="\n")

    # What counts is what lies on the disk: the numbers of the card come from the files, read back.
    loaded = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    reread = PreTrainedTokenizerFast.from_pretrained(folder)
    facts: dict[str, Any] = {
        "kind": plan.kind,
        "plan": asdict(plan),
        "parameters": sum(p.numel() for p in model.parameters()),
        "text": {
            "name": text.name,
            "source": text.source,
            "python": platform.python_version(),
            "characters": len(text.content),
            "sha256": text.digest,
            "training_tokens": len(stream),
            "heldout_tokens": len(heldout),
            "heldout_characters": len(heldout_text),
            "heldout_overlap": overlap(train_text, heldout_text),
        },
        "heldout": {
            "untrained": untrained,
            "unigram_loss": unigram,
            "trained_float32": trained,
            "trained_as_saved": evaluate(loaded, plan.kind, token_stream(reread, heldout_text), reread),
        },
        "heldout_piece": {
            "file": "heldout.txt",
            "tokens": len(piece),
            "unigram_loss": unigram_loss(plan.kind, stream, piece, tokenizer),
            "untrained": evaluate(new_model(plan, tokenizer).eval(), plan.kind, piece, tokenizer),
            "trained_as_saved": evaluate(loaded, plan.kind, token_stream(reread, piece_text), reread),
        },
        "seconds": round(seconds),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(facts), encoding="utf-8")
    report(f"{plan.kind}: written to {folder}; held-out loss as saved {facts['heldout']['trained_as_saved']}")
    return facts


#: What was tried before the settings of PLANS, for the cards.
HISTORY = {
    "encoder": (
        " (two earlier runs, with windows of 128 and 256 tokens from the start, were stopped: one for its "
        "speed, one at step 1000, when the loss no longer fell at 5.90; three short trials then chose the "
        "opening windows)"
    ),
    "decoder": (
        " (two earlier runs were stopped: one for its speed, one with dropout 0.1 at step 1250 of 4000, when "
        "the training loss had fallen 0.6 below the held-out loss)"
    ),
}


def model_card(facts: dict[str, Any]) -> str:
    """Return the model card, all numbers from `facts`."""
    plan, text, full, piece = facts["plan"], facts["text"], facts["heldout"], facts["heldout_piece"]
    saved, whole, small = full["trained_as_saved"], full["untrained"], piece["untrained"]
    encoder = facts["kind"] == "encoder"
    fields = {
        "kind": facts["kind"],
        "layers": LAYERS,
        "heads": HEADS,
        "width": WIDTH,
        "inner": INNER,
        "positions": POSITIONS,
        "half": POSITIONS // 2,
        "vocabulary": VOCABULARY,
        "block": BLOCK,
        "held_out_every": HELD_OUT_EVERY,
        "evaluation_length": EVALUATION_LENGTH,
        "pipeline": "fill-mask" if encoder else "text-generation",
        "type": "BERT-type encoder" if encoder else "GPT-2-type decoder",
        "class_name": "BertForMaskedLM" if encoder else "GPT2LMHeadModel",
        "norm": "post" if encoder else "pre",
        "special": f"special tokens `{' '.join(ENCODER_TOKENS if encoder else DECODER_TOKENS)}`",
        "task": "Masked-token prediction" if encoder else "Next-token prediction",
        "what": "masked token (15 % of the tokens: 80 % `[MASK]`, 10 % random, 10 % kept)"
        if encoder
        else "next token",
        "windows": "with `[CLS]` and `[SEP]`" if encoder else "(their first token is not predicted)",
        "wrapping": "; half of the windows carry `[CLS]` and `[SEP]`, half are bare text" if encoder else "",
        "history": HISTORY[facts["kind"]] if Plan(**plan) == PLANS[facts["kind"]] else "",
        "opening": f"first {plan['opening']:,} steps with windows of 32, then 64 tokens, after them "
        if plan["opening"]
        else "",
        "precision": "bfloat16 autocast" if plan["autocast"] else "float32",
        "characters_a_token": text["heldout_characters"] / text["heldout_tokens"],
        "passes": plan["steps"] * plan["tokens_a_step"] / text["training_tokens"],
        "minutes": facts["seconds"] / 60,
    }
    template = (Path(__file__).parent / "builtin_model_card.md").read_text("utf-8")
    rows = {"facts": facts, "plan": plan, "text": text, "full": full, "piece": piece}
    card = template.format(**fields, **rows, saved=saved, whole=whole, small=small)
    wrap = textwrap.TextWrapper(width=100, break_long_words=False, break_on_hyphens=False)
    parts = card.strip().split("\n\n")
    return "\n\n".join(part if part[0] in "-#|" else wrap.fill(part) for part in parts) + "\n"


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=KINDS, help="train one of the two")
    parser.add_argument("--out", type=Path, help="where the folders encoder/ and decoder/ go [the package]")
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints, to go on after an interruption")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="steps a model")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--dropout", type=float)
    parser.add_argument(
        "--no-autocast", action="store_true", help="float32 throughout (slower on most machines)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few steps, temporary folder: a check of the road"
    )
    options = parser.parse_args()

    package = ROOT / "src" / "howsmooth" / "models" / "builtin"
    out = options.out or (Path(tempfile.mkdtemp(prefix="howsmooth-quick-")) if options.quick else package)
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="howsmooth-training-"))
    scratch.mkdir(parents=True, exist_ok=True)
    text = python_docs()
    print(f"{text.source} {len(text.content)} characters; checkpoints in {scratch}", flush=True)
    for kind in [options.only] if options.only else KINDS:
        plan = replace(PLANS[kind], seed=options.seed)
        if options.quick:
            plan = replace(plan, steps=60, opening=0, warm_up=10)
        if options.steps:
            plan = replace(plan, steps=options.steps, warm_up=min(plan.warm_up, options.steps // 4))
            plan = replace(plan, opening=min(plan.opening, options.steps // 3))
        if options.learning_rate:
            plan = replace(plan, learning_rate=options.learning_rate)
        if options.dropout is not None:
            plan = replace(plan, dropout=options.dropout)
        if options.no_autocast:
            plan = replace(plan, autocast=False)
        build(plan, text, out, scratch, lambda line: print(line, flush=True))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
