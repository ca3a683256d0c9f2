"""Texts to measure models on: the paper's texts, loaded by name, or text files."""

from howsmooth.texts.loaders import TEXTS, Text, load_text

__all__ = ["TEXTS", "Text", "load_text"]
