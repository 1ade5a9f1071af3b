"""Formats of files of other programs, by their bytes, for compiler and runtime.

Only the standard library is needed.
"""
