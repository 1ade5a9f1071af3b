"""`scalec launch`: the script that trains a plan on a cluster."""
