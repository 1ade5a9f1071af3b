"""Grammars of the plan language and of the IR text, read through `importlib.resources`."""
