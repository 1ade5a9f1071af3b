"""What a step takes in time, before it runs."""
