"""Load models: find a model by its name, refuse unsafe files, and load weights, tokenizer and processors."""
