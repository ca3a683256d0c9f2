"""Run flows of tokens for ``howsmooth flow``: integrate frame by frame, store the frames, and draw them."""
