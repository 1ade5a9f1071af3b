"""Formats of others' files, by their bytes: what compiler and runtime both know.

Only the standard library is needed.
"""
