"""Inputs at which attention is as little smooth as can be found: constructions, and ascent."""
