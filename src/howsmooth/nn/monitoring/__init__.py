"""Monitoring of attention during training: inputs, measurements, records and their output."""
