"""Ops on local tensors that torch does not have as such."""
