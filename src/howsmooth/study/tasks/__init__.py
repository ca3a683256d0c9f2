"""Define the tasks of studies: each lists the work that is left, and computes rows of the store."""
