"""`scalec doctor`: looks at the machines of a job before it starts, by one process a rank."""
