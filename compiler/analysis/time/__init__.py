"""Seconds of a step, before it runs."""
