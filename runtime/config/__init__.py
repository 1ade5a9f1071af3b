"""The settings of a run: what the program says, and what the environment asks."""
