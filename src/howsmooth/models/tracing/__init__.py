"""Tracing a forward pass: every softmax attention is seen as it runs, and the calls around it are kept.

``softmax_tracer`` and ``score_tracer`` follow scores from the product of queries and keys to their use as
probabilities, whatever code computes them; ``forward_trace`` keeps the calls of the modules around them, and
``module_replay`` makes such a call again with other tokens.
"""
