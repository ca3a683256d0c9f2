"""Run studies: measure what a plan asks for, store it, fit exponents, and write figures and a report."""
