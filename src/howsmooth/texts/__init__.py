"""Texts to measure on: prose and code that every Python carries, two well-known corpora, or any file."""

from __future__ import annotations

from howsmooth.texts.loaders import TEXTS, Text, load_text

__all__ = ["TEXTS", "Text", "load_text"]
