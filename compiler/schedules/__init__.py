"""Pipeline schedules as values: the order of each rank's work, checked, simulated and made."""
