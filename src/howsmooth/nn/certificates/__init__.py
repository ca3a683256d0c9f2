"""Certificates of whole models: rules, the walk over modules, what is said of data."""
