"""Certificates for whole models: an upper bound on the Lipschitz constant, and the robustness of single
inputs.
"""
