"""The passes, each in a file or folder of its own: functions Program → Program.

A pass takes no options, and what a plan leaves open is decided before it runs.  Their order, and
the decisions between them, are in `tuning.lowering`.
"""
