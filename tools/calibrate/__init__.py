"""Measures a machine at the shapes of some plans: `torchrun … -m scalec.tools.calibrate LIST -o
FILE`.

`scalec calibrate` writes the list; the file is for `cluster { hardware = "FILE" }`.
Non-goals: pricing.
"""
