"""A small classifier of the BERT kind with a tokenizer, as a folder that transformers can load."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cat",
    "sat",
    *LETTERS,
    *(f"##{c}" for c in LETTERS),
)


def save_classifier(folder: Path) -> BertForSequenceClassification:
    """Save a random model of three classes and its tokenizer into a folder, and return the model."""
    folder.mkdir(parents=True)
    BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
        initializer_range=0.3,
    )
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return model
