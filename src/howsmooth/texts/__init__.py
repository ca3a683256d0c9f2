"""Texts on which models are measured: the texts of the paper, loaded by name, and text files."""

from howsmooth.texts.loaders import TEXTS, Text, load_text

__all__ = ["TEXTS", "Text", "load_text"]
