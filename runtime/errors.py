"""The one exception for what a user can put right: a single clear line instead of a traceback."""


class RunError(Exception):
    """What is wrong and what to do, in one line."""
