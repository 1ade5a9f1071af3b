"""The training loop: options, start, log, shutdown."""
