"""Measures a machine at the shapes of some plans: `torchrun … -m scalec.runtime.calibrate LIST -o
FILE`.

The list is written by `scalec calibrate`; the file is for `cluster { hardware = "FILE" }`.
Non-goals: pricing.
"""
