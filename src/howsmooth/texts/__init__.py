"""Texts to measure on: those of the paper by name, or any file."""

from __future__ import annotations

from howsmooth.texts.loaders import TEXTS, Text, load_text

__all__ = ["TEXTS", "Text", "load_text"]
