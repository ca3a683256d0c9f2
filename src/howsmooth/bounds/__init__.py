"""Bounds on Lipschitz constants: one function a theorem, each with its side, hypotheses and source."""
