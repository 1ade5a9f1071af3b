"""`scalec new`: a first plan for this machine."""
