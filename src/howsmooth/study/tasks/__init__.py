"""The tasks of studies (constants, bounds, attacks, flows), and functions that list the tasks left to do."""
