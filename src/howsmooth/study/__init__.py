"""Run studies: measure the Lipschitz constants that a plan asks for, keep them in a store, fit exponents, and
write figures and a report.
"""
