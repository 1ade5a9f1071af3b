"""How a command ends."""

PLAN_WRONG = 1
USAGE = 2
BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED, BROKEN_PIPE = 128 + 2, 128 + 13  # as a shell reports a process that SIGINT or SIGPIPE ended


class UsageError(Exception):
    """What is asked for cannot be done, or not without harm, however right the plan is."""
