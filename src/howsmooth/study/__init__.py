"""Run studies: measure the constants of a plan, store them, fit exponents, and write figures and a report."""
