"""Parts of models whose constant is one, or stated."""
