"""`scalec diff`: two plans, or compiled programs, side by side."""
