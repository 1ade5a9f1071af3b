"""Tools around the compiler, each a folder with its command.

Compiler and runtime work without them.
"""
