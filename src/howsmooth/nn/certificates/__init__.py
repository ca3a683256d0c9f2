"""Certificates of whole models: constants of modules, their product, and the robustness of inputs."""
