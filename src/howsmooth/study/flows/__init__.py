"""Run flows of tokens for ``howsmooth flow``: compute the states (frames) one by one, store and draw them."""
