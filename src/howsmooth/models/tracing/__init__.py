"""Tracing of a forward pass: every softmax attention is found while it runs, with the module calls around it.

``softmax_tracer`` follows the scores from the product of queries and keys to the product of probabilities and
values, in any PyTorch code, by the ``score_rules``. ``recorder`` keeps the calls of the modules around each
softmax, and ``module_replay`` repeats such a call with other tokens.
"""
