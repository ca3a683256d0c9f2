"""Flows of tokens from the command line: what is asked for, carried out frame by frame, kept and drawn."""
