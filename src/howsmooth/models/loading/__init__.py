"""Loading of models: finding a model by its name, refusing unsafe files, and loading weights, tokenizer and
processors.
"""
