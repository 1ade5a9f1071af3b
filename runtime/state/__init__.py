"""Parameters, gradients and optimizer state in flat buckets, whole or sharded."""
