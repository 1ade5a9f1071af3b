"""`scalec log` and `scalec loads`: the logs of runs, drawn."""
