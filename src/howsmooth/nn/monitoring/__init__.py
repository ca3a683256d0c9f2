"""Monitoring of the Lipschitz constants of attention layers during training."""
