"""Building blocks of models, each with a known Lipschitz constant."""
