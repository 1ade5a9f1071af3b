"""Recomputation of calls in backward, and hooks for saved tensors."""
