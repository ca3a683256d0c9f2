"""Attention through depth: tokens, measures and Gaussians as they flow."""
