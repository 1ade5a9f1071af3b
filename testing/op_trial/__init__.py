"""Tries the function of a user op: whether it does what the plan's `op` says of it.

Purpose: `python -m scalec.testing.op_trial` runs functions for `scalec check`, `compile` and `run`,
in a process of its own; `scalec.testing.assert_op` runs the same checks in the process of a test.
Non-goals: speed, a GPU, what the function computes.
"""
