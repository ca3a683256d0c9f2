"""Loading models: ``load_model``, where a model of a given name lies, its tokenizer and its processors."""
