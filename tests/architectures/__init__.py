"""Every model type of the installed transformers, made tiny: configurations, weights, inputs, checks."""
