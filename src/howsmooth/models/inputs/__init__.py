"""Readers of model inputs (images, token ids, embeddings) from files or arrays, with checks."""
