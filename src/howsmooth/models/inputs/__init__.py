"""Readers of model inputs (images, audio, token ids, embeddings) from files or arrays, with checks."""
