"""Certificates: an upper bound on the constant of a whole model, and the robustness of single inputs."""
