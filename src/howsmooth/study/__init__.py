"""Run studies: read a plan, measure into a store, fit exponents, and write figures and a report."""
