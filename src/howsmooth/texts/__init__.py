"""Texts to measure on: the paper's texts, by name, or text files."""

from howsmooth.texts.loaders import TEXTS, Text, load_text

__all__ = ["TEXTS", "Text", "load_text"]
