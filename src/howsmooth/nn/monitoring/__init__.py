"""Attention watched in training: probes, records, where they go."""
