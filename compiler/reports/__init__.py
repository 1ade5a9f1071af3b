"""Summaries, explanations, warnings and drawings of a program, for people."""
