"""The settings of a plan as typed classes, the table of GPUs, and the names of weights in files."""
