"""Attention layers that are Lipschitz, the parts of 1-Lipschitz models, penalties and monitors."""
