"""Pipeline schedules as values: who does what in which order, checked, simulated and made.

Purpose: everything about schedules that needs no model: actions, rows, generators, checks, time.
Non-goals: where a model is cut, what a stage costs (`passes.cut_stages`); drawing (`cli`).
"""
