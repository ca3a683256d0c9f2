"""The tasks of a study, which compute constants and bounds, and functions that list the tasks left to do."""
