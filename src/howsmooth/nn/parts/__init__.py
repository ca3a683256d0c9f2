"""Building blocks of models with a Lipschitz constant of one or with a known constant."""
