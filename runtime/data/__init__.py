"""Files of tokens to batches on each rank."""
