"""Pipeline schedules as values: who does what in which order, checked, simulated and made."""
